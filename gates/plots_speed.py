"""Charts of time: blocks and speedups of the step, where a step's time goes, and where the run's went."""

from __future__ import annotations

import math
from collections.abc import Sequence

from . import statistics
from .charts import (
    WIDTH,
    Axis,
    Chart,
    Key,
    Mark,
    Table,
    diamond,
    dot,
    frame,
    histogram,
    label,
    rect,
    room_for,
    segment,
    shortened,
)
from .report import Report

_ARMS = (Key("baseline", "baseline"), Key("candidate", "candidate"))
#: A threshold further from the data than this many times the data's own span is named, not drawn.
_IN_REACH = 4
#: Room for the names of bars at most.
_NAMES = 200


def speed_charts(report: Report) -> list[Chart]:
    """Return block medians in the order they were measured, and the distribution of the speedup over quartets."""
    if len(report.measurements.deciding_step.quartets) < 2:
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


def _blocks(report: Report) -> Chart:
    _, top, _, bottom = frame(260)
    step = report.measurements.deciding_step
    blocks = [
        (i + 1, style, time)
        for i, q in enumerate(step.quartets)
        for style, times in (("baseline", q.baseline_ms), ("candidate", q.candidate_ms))
        for time in times
    ]
    y = Axis.over([t for *_, t in blocks], bottom, top)
    left, _, right, _ = frame(260, room_for([tick.label for tick in y.ticks(5, " ms")]))
    x = Axis.over([i for i, *_ in blocks], left, right)
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
        x=x.apart(5),
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
        left=left,
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
        x=x.apart(5, "x"),
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
    left, pitch = min(room_for([text for text, *_ in rows], gap=10), _NAMES), 24
    height = 10 + pitch * len(rows) + 44
    _, top, _, bottom = frame(height, left)
    right = WIDTH - room_for([says for *_, says in rows])
    x = Axis.over([0.0, *(v for _, a, b, *_ in rows for v in (a, b))], left, right)
    marks: list[Mark] = [segment(x(0), top, x(0), bottom, "zero")]
    for i, (text, a, b, style, says) in enumerate(rows):
        y = top + pitch * i
        marks.append(rect(x(a), x(b), y + 4, y + 18, style, f"{text}: {says}"))
        marks.append(label(left - 8, y + 15, shortened(text, left - 10), "end"))
        marks.append(label(max(x(a), x(b)) + 6, y + 15, says))
    ticks = x.apart(4, unit)
    return Chart(title, summary, height, tuple(marks), ticks, (), table, keys, left=left, grid="x")


def _ratios(report: Report) -> list[float]:
    """Return the speedup of every quartet."""
    quartets = report.measurements.deciding_step.quartets
    logs = statistics.log_ratios([q.baseline_ms for q in quartets], [q.candidate_ms for q in quartets])
    return [math.exp(value) for value in logs]
