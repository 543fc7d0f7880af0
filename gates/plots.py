"""The charts of a report: what each shows, from the report's own numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from . import statistics
from .charts import (
    Axis,
    Chart,
    Key,
    Mark,
    Table,
    band,
    diamond,
    dot,
    frame,
    histogram,
    label,
    line,
    rect,
    segment,
)
from .decision import Gate
from .report import Report

_ARMS = (Key("baseline", "baseline"), Key("candidate", "candidate"))
#: Seeds that still get a line of their own, with their number beside it.
_LABELLED_ROWS = 24
#: Share of the steps that count as the first ones.
_EARLY = 0.1
#: A loss that spans more than this ratio is drawn on a logarithmic axis.
_LOG_RATIO = 20
#: A threshold further from the data than this many times the data's own span is named, not drawn.
_IN_REACH = 4


def quality_charts(report: Report) -> list[Chart]:
    """Return one chart for each task and metric of quality: every seed's difference, the intervals and the margin."""
    judged = [gate for gate in report.gates if gate.name in ("ne", "auc") and gate.slice is None]
    found = (_differences(report, gate) for gate in judged)
    return [chart for chart in found if chart is not None]


def loss_charts(report: Report) -> list[Chart]:
    """Return the training loss of both arms, and their difference within pairs, which the first hides."""
    seeds = report.measurements.seeds
    base = _by_step([s.baseline.losses.curve for s in seeds])
    own = _by_step([s.candidate.losses.curve for s in seeds])
    if len(base) < 2 or len(own) < 2:
        return []
    paired: dict[int, list[float]] = defaultdict(list)
    for seed in seeds:
        other = dict(seed.candidate.losses.curve)
        for step, value in seed.baseline.losses.curve:
            mine = other.get(step)
            if value is not None and mine is not None:
                paired[step].append(mine - value)
    curves = _losses(len(seeds), base, own)
    return [curves] if len(paired) < 2 else [curves, _loss_difference(len(seeds), paired)]


def speed_charts(report: Report) -> list[Chart]:
    """Return block medians in the order they were measured, and the distribution of the speedup over quartets."""
    if len(report.measurements.step_time.quartets) < 2:
        return []
    return [_blocks(report), _speedups(report)]


def waterfall(report: Report) -> Chart | None:
    """Return how the baseline's step becomes the candidate's, by class of kernels; None where nobody attributed it."""
    classes = report.evidence.step.attribution
    if not classes:
        return None
    changes = [
        (c["class"], c["baseline_ms"], c["candidate_ms"]) for c in classes if c["baseline_ms"] or c["candidate_ms"]
    ]
    changes.sort(key=lambda c: -abs(c[2] - c[1]))
    before, after = math.fsum(c[1] for c in changes), math.fsum(c[2] for c in changes)
    rows = [("baseline", 0.0, before, "bar baseline", f"{before:.3f} ms")]
    at = before
    for name, base, own in changes:
        style = "bar worse" if own > base else "bar better"
        rows.append((name, at, at + own - base, style, f"{own - base:+.3f} ms"))
        at += own - base
    rows.append(("candidate", 0.0, after, "bar candidate", f"{after:.3f} ms"))
    total = "faster" if after < before else "slower"
    return _bars(
        "Where the time of a step goes",
        f"From the baseline's {before:.3f} ms to the candidate's {after:.3f} ms, {abs(after - before):.3f} ms {total}.",
        rows,
        Table(
            ("class", "baseline ms", "candidate ms", "difference ms"),
            tuple(
                (name, f"{base:.4f}", f"{own:.4f}", f"{own - base:+.4f}")
                for name, base, own in [*changes, ("all classes", before, after)]
            ),
        ),
        (*_ARMS, Key("worse", "slower"), Key("better", "faster")),
    )


def wall_chart(report: Report) -> Chart | None:
    """Return how the run's own time was spent; None where no part is known."""
    seconds = {part: s for part, s in report.wall_seconds.items() if part != "all"}
    if not seconds or not any(seconds.values()):
        return None
    total = report.wall_seconds.get("all", math.fsum(seconds.values()))
    return _bars(
        "How the run's time was spent",
        f"{total:.1f} s in all.",
        [(part, 0.0, s, "bar other", f"{s:.1f} s") for part, s in seconds.items()],
        Table(("part", "seconds"), tuple((p, f"{s:.1f}") for p, s in [*seconds.items(), ("all", total)])),
        unit=" s",
    )


def _differences(report: Report, gate: Gate) -> Chart | None:
    task, relative = gate.task, gate.name == "ne"
    found: list[tuple[int, float, float, float]] = []
    for seed in report.measurements.seeds:
        base, own = (
            getattr(arm.quality[task], gate.name) if task in arm.quality else None
            for arm in (seed.baseline, seed.candidate)
        )
        if base is not None and own is not None and not (relative and base <= 0):
            found.append((seed.seed, base, own, 100 * (own / base - 1) if relative else base - own))
    if not found:
        return None
    unit, digits, scale = (" %", 4, 100.0) if relative else ("", 6, 1.0)
    margin = scale * gate.threshold
    intervals = _intervals(report, gate, scale)
    pitch = 17 if len(found) <= _LABELLED_ROWS else max(1.5, 17 * _LABELLED_ROWS / len(found))
    seeds_end = 12 + pitch * len(found)
    height = 10 + seeds_end + 24 * len(intervals) + 8 + 40
    left, top, right, bottom = frame(height)
    values = [d for *_, d in found] + [0.0, margin] + [v for _, low, mean, high in intervals for v in (low, mean, high)]
    x = Axis.over(values, left, right)
    marks = [
        rect(x(margin), right, top, bottom, "beyond", "past the margin"),
        segment(x(0), top, x(0), bottom, "zero", "no difference"),
        segment(x(margin), top, x(margin), bottom, "threshold", f"margin {margin:g}{unit}"),
    ]
    for i, (seed, base, own, difference) in enumerate(found):
        y = round(top + 10 + pitch * i, 2)
        text = f"seed {seed}: {difference:+.{digits}f}{unit} (baseline {base:.5f}, candidate {own:.5f})"
        marks.append(dot(x(difference), y, "candidate", text, r=3.5 if pitch > 6 else 2))
        if len(found) <= _LABELLED_ROWS:
            marks.append(label(left - 8, y + 4, f"seed {seed}", "end"))
    for i, (name, low, mean, high) in enumerate(intervals):
        y = round(top + seeds_end + 10 + 24 * i, 2)
        text = f"{name}: {mean:+.{digits}f}{unit} with bounds {low:+.{digits}f}{unit} and {high:+.{digits}f}{unit}"
        marks += [segment(x(low), y, x(high), y, "interval", text), diamond(x(mean), y, "mean", text)]
        marks.append(label(left - 8, y + 4, name, "end", "label strong"))
    rows: list[tuple[str, ...]] = [
        (f"seed {s}", f"{b:.6f}", f"{c:.6f}", f"{d:+.{digits}f}{unit}", "", "") for s, b, c, d in found
    ]
    for name, low, mean, high in intervals:
        rows.append((f"interval over {name}", "", "", *(f"{v:+.{digits}f}{unit}" for v in (mean, low, high))))
    metric = "NE increase (lower is better)" if relative else "AUC loss (lower is better)"
    return Chart(
        title=f"{gate.name.upper()}, {task}: {gate.status}",
        summary=f"{metric[0].upper() if relative else 'A'}{metric[1:]} of the candidate in each of {len(found)} paired"
        f" seeds; the gate passes where both upper bounds lie below the margin of {margin:g}{unit}.",
        height=height,
        marks=tuple(marks),
        x=x.ticks(4, unit),
        y=(),
        table=Table(("", "baseline", "candidate", "difference", "low bound", "high bound"), tuple(rows)),
        keys=(Key("candidate", "one seed"), Key("interval", "mean and bounds"), Key("threshold", "margin")),
        x_label=metric,
        grid="x",
    )


def _intervals(report: Report, gate: Gate, scale: float) -> list[tuple[str, float, float, float]]:
    """Return (name, low, mean, high): the interval over seeds that decides and the one over rows that can withhold."""
    found = []
    if gate.measured is not None and gate.ci_low is not None and gate.ci_high is not None:
        found.append(("seeds", gate.ci_low, gate.measured, gate.ci_high))
    rows = report.measurements.rows
    own = None if rows is None or gate.task is None else (rows.ne if gate.name == "ne" else rows.auc).get(gate.task)
    if own is not None and own.error is not None:
        row = own.estimate()
        found.append(("rows", row.lower(report.statistics.alpha), row.mean, row.upper(report.statistics.accept_alpha)))
    return [(name, scale * low, scale * mean, scale * high) for name, low, mean, high in found]


def _losses(seeds: int, base: dict[int, list[float]], own: dict[int, list[float]]) -> Chart:
    left, top, right, bottom = frame(260)
    values = [v for arm in (base, own) for row in arm.values() for v in row]
    steps = sorted({*base, *own})
    # The first steps fall from far above what follows, which would be flat beside them.
    later = [v for arm in (base, own) for s, row in arm.items() if s > steps[-1] * _EARLY for v in row]
    cut = max(values) - min(values) > 2 * (max(later) - min(values))
    shown = [*later, min(values)] if cut else values
    log = min(shown) > 0 and max(shown) > _LOG_RATIO * min(shown)
    x, y = Axis.over(steps, left, right), Axis.over(shown, bottom, top, log=log)
    marks: list[Mark] = []
    for arm, style in ((base, "baseline"), (own, "candidate")):
        marks.append(band([(s, min(v), max(v)) for s, v in sorted(arm.items())], x, y, style))
    for arm, style in ((base, "baseline"), (own, "candidate")):
        marks.append(line([(s, _mean(v)) for s, v in sorted(arm.items())], x, y, style))
    ends = [f"{_mean(arm[max(arm)]):.5f}" for arm in (base, own)]
    return Chart(
        title="Training loss",
        summary=f"Mean over {seeds} seeds and the range from the lowest to the highest seed; at the end {ends[0]} for"
        f" the baseline and {ends[1]} for the candidate."
        + (f" The first steps, up to {max(values):.5f}, run out of the picture." if cut else ""),
        height=260,
        marks=tuple(marks),
        x=x.ticks(5),
        y=y.ticks(5),
        table=Table(
            ("step", "baseline mean", "baseline range", "candidate mean", "candidate range"),
            tuple((str(s), *_spread(base.get(s)), *_spread(own.get(s))) for s in steps),
        ),
        keys=_ARMS,
        x_label="step" + (" (loss on a logarithmic axis)" if log else ""),
    )


def _loss_difference(seeds: int, paired: dict[int, list[float]]) -> Chart:
    left, top, right, bottom = frame(260)
    x = Axis.over(list(paired), left, right)
    y = Axis.over([0.0, *(v for row in paired.values() for v in row)], bottom, top)
    ordered = sorted(paired.items())
    return Chart(
        title="Training loss, candidate less baseline",
        summary=f"Mean over {seeds} pairs and the range from the lowest to the highest pair; above zero the candidate"
        " learns more slowly.",
        height=260,
        marks=(
            band([(s, min(v), max(v)) for s, v in ordered], x, y, "candidate"),
            segment(left, y(0), right, y(0), "zero", "no difference"),
            line([(s, _mean(v)) for s, v in ordered], x, y, "candidate"),
        ),
        x=x.ticks(5),
        y=y.ticks(5),
        table=Table(("step", "mean", "range"), tuple((str(s), *_spread(v)) for s, v in ordered)),
        keys=(Key("candidate", "candidate less baseline"),),
        x_label="step",
    )


def _blocks(report: Report) -> Chart:
    left, top, right, bottom = frame(260)
    step = report.measurements.step_time
    blocks = [
        (i + 1, style, time)
        for i, q in enumerate(step.quartets)
        for style, times in (("baseline", q.baseline_ms), ("candidate", q.candidate_ms))
        for time in times
    ]
    x, y = Axis.over([i for i, *_ in blocks], left, right), Axis.over([t for *_, t in blocks], bottom, top)
    radius = 3 if len(step.quartets) <= 40 else 2
    results = report.evidence.step.results.get("device_events", {})
    means = {
        arm: f"{results[key]:.3f} ms"
        for arm, key in (("baseline", "baseline_ms"), ("candidate", "candidate_ms"))
        if key in results
    }
    return Chart(
        title="Step time of every block",
        summary=f"Median milliseconds a step of two blocks an arm in each of {len(step.quartets)} quartets, by device"
        f" events, in the order they ran{': ' if means else ''}{', '.join(f'{arm} {m}' for arm, m in means.items())}.",
        height=260,
        marks=tuple(
            dot(x(i), y(time), style, f"quartet {i}, {style}: {time:.4f} ms", radius) for i, style, time in blocks
        ),
        x=x.ticks(5),
        y=y.ticks(5, " ms"),
        table=Table(
            ("quartet", "order", "baseline ms", "candidate ms", "speedup"),
            tuple(
                (
                    str(i + 1),
                    q.order,
                    f"{q.baseline_ms[0]:.4f}, {q.baseline_ms[1]:.4f}",
                    f"{q.candidate_ms[0]:.4f}, {q.candidate_ms[1]:.4f}",
                    f"{ratio:.4f}x",
                )
                for i, (q, ratio) in enumerate(zip(step.quartets, _ratios(report), strict=True))
            ),
        ),
        keys=_ARMS,
        x_label="quartet",
        left=72,
    )


def _speedups(report: Report) -> Chart:
    left, top, right, bottom = frame(260)
    ratios = _ratios(report)
    gate = next(g for g in report.gates if g.name == "step_time")
    bins = histogram(ratios)
    low, high = bins[0][0], bins[-1][1]
    reach = _IN_REACH * (high - low)
    lines = [(1.0, "zero", "no change"), (gate.threshold, "threshold", f"asked {gate.threshold:g}x")]
    near = [(at, style, text) for at, style, text in lines if low - reach <= at <= high + reach]
    bounds = [v for v in (gate.ci_low, gate.measured, gate.ci_high) if v is not None]
    x = Axis.over([low, high, *bounds, *(at for at, *_ in near)], left, right)
    y = Axis(0, max(n for *_, n in bins) * 1.25, bottom, top)
    marks = [rect(x(a), x(b), y(0), y(n), "bar other", f"{a:.4f}x to {b:.4f}x: {n} quartets") for a, b, n in bins if n]
    marks += [segment(x(at), top, x(at), bottom, style, text) for at, style, text in near]
    if len(bounds) == 3:
        text = f"speedup {bounds[1]:.4f}x with bounds {bounds[0]:.4f}x and {bounds[2]:.4f}x"
        marks += [
            segment(x(bounds[0]), top + 10, x(bounds[2]), top + 10, "interval", text),
            diamond(x(bounds[1]), top + 10, "mean", text),
        ]
    far = [text for at, style, text in lines if (at, style, text) not in near]
    measured = f"{bounds[1]:.4f}x [{bounds[0]:.4f}x, {bounds[2]:.4f}x]" if len(bounds) == 3 else "not decided"
    return Chart(
        title=f"Speedup of the whole step: {gate.status}",
        summary=f"How many quartets showed which speedup; the mean is {measured} and {gate.threshold:g}x is asked."
        + (f" Out of the picture: {', '.join(far)}." if far else ""),
        height=260,
        marks=tuple(marks),
        x=x.ticks(5, "x"),
        y=tuple(t for t in y.ticks(4) if float(t.label).is_integer()),
        table=Table(("from", "to", "quartets"), tuple((f"{a:.4f}x", f"{b:.4f}x", str(n)) for a, b, n in bins)),
        keys=(Key("other", "quartets"), Key("interval", "mean and bounds"), Key("threshold", "asked")),
        x_label="speedup of a quartet",
    )


def _bars(
    title: str,
    summary: str,
    rows: Sequence[tuple[str, float, float, str, str]],
    table: Table,
    keys: tuple[Key, ...] = (),
    unit: str = " ms",
) -> Chart:
    """Return horizontal bars from (name, from, to, style, what it says)."""
    left, pitch = 112, 24
    height = 10 + pitch * len(rows) + 44
    _, top, right, bottom = frame(height, left)
    x = Axis.over([0.0, *(v for _, a, b, *_ in rows for v in (a, b))], left, right - 76)
    marks: list[Mark] = [segment(x(0), top, x(0), bottom, "zero")]
    for i, (text, a, b, style, says) in enumerate(rows):
        y = top + pitch * i
        marks.append(rect(x(a), x(b), y + 4, y + 18, style, f"{text}: {says}"))
        marks.append(label(left - 8, y + 15, text, "end"))
        marks.append(label(max(x(a), x(b)) + 6, y + 15, says))
    ticks = x.ticks(4, unit)
    return Chart(title, summary, height, tuple(marks), ticks, (), table, keys, left=left, grid="x")


def _ratios(report: Report) -> list[float]:
    """Return the speedup of every quartet."""
    quartets = report.measurements.step_time.quartets
    logs = statistics.log_ratios([q.baseline_ms for q in quartets], [q.candidate_ms for q in quartets])
    return [math.exp(value) for value in logs]


def _by_step(curves: Sequence[Sequence[tuple[int, float | None]]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for curve in curves:
        for step, value in curve:
            if value is not None:
                found[step].append(value)
    return dict(found)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _spread(values: Sequence[float] | None) -> tuple[str, str]:
    if not values:
        return "-", "-"
    return f"{_mean(values):.5f}", f"{min(values):.5f} to {max(values):.5f}"
