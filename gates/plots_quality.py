"""Charts of quality: every seed's difference beside the margin, and the training loss of both arms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from .charts import Axis, Chart, Key, Mark, Table, band, diamond, dot, frame, label, line, rect, room_for, segment
from .judgement import Gate
from .measurements import RowEstimate, SeedRun, SliceQuality
from .report import Report

_ARMS = (Key("baseline", "baseline"), Key("candidate", "candidate"))
#: Seeds that still get a line of their own, with their number beside it.
_LABELLED_ROWS = 24
#: Share of the steps that count as the first ones.
_EARLY = 0.1
#: A loss that spans more than this ratio is drawn on a logarithmic axis.
_LOG_RATIO = 20


def quality_charts(report: Report) -> list[Chart]:
    """Return one chart for each gate on quality: every seed's difference, the intervals and the margin."""
    judged = [gate for gate in report.gates if gate.name in ("ne", "auc", "gauc")]
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


def _differences(report: Report, gate: Gate) -> Chart | None:
    relative = gate.name == "ne"
    found: list[tuple[int, float, float, float]] = []
    for seed in report.measurements.seeds:
        base, own = (getattr(quality, gate.name, None) for quality in _qualities(seed, gate))
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
    left, top, right, bottom = frame(height, room_for([f"seed {seed}" for seed, *_ in found]))
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
    metric = f"{gate.name.upper()} {'increase' if relative else 'loss'} (lower is better)"
    place = gate.task if gate.slice is None else f"{gate.task}, {gate.slice}"
    return Chart(
        title=f"{gate.name.upper()}, {place}: {gate.status}",
        summary=f"{metric} of the candidate in each of {len(found)} paired"
        f" seeds; the gate passes where both upper bounds lie below the margin of {margin:g}{unit}.",
        height=height,
        marks=tuple(marks),
        x=x.apart(4, unit),
        y=(),
        table=Table(("", "baseline", "candidate", "difference", "low bound", "high bound"), tuple(rows)),
        keys=(Key("candidate", "one seed"), Key("interval", "mean and bounds"), Key("threshold", "margin")),
        x_label=metric,
        left=left,
        grid="x",
    )


def _intervals(report: Report, gate: Gate, scale: float) -> list[tuple[str, float, float, float]]:
    """Return (name, low, mean, high): the interval over seeds that decides and the one over rows that can withhold."""
    found = []
    if gate.measured is not None and gate.ci_low is not None and gate.ci_high is not None:
        found.append(("seeds", gate.ci_low, gate.measured, gate.ci_high))
    own = _row_estimate(report, gate)
    if own is not None and own.error is not None:
        row = own.estimate()
        found.append(("rows", row.lower(report.statistics.alpha), row.mean, row.upper(report.statistics.accept_alpha)))
    return [(name, scale * low, scale * mean, scale * high) for name, low, mean, high in found]


def _qualities(seed: SeedRun, gate: Gate) -> list[SliceQuality | None]:
    """Return what both arms of a seed reached on the gate's rows; None where that was not measured."""
    whole = [arm.quality.get(gate.task or "") for arm in (seed.baseline, seed.candidate)]
    if gate.slice is None:
        return list(whole)
    return [None if quality is None else quality.slices.get(gate.slice) for quality in whole]


def _row_estimate(report: Report, gate: Gate) -> RowEstimate | None:
    rows = report.measurements.rows
    part = rows if rows is None or gate.slice is None else rows.slices.get(gate.slice)
    return None if part is None else getattr(part, gate.name, {}).get(gate.task)


def _losses(seeds: int, base: dict[int, list[float]], own: dict[int, list[float]]) -> Chart:
    _, top, _, bottom = frame(260)
    values = [v for arm in (base, own) for row in arm.values() for v in row]
    steps = sorted({*base, *own})
    # The first steps fall from far above what follows, which would be flat beside them.
    later = [v for arm in (base, own) for s, row in arm.items() if s > steps[-1] * _EARLY for v in row]
    cut = max(values) - min(values) > 2 * (max(later) - min(values))
    shown = [*later, min(values)] if cut else values
    log = min(shown) > 0 and max(shown) > _LOG_RATIO * min(shown)
    y = Axis.over(shown, bottom, top, log=log)
    left, _, right, _ = frame(260, room_for([tick.label for tick in y.ticks(5)]))
    x = Axis.over(steps, left, right)
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
        x=x.apart(5),
        y=y.ticks(5),
        table=Table(
            ("step", "baseline mean", "baseline range", "candidate mean", "candidate range"),
            tuple((str(s), *_spread(base.get(s)), *_spread(own.get(s))) for s in steps),
        ),
        keys=_ARMS,
        x_label="step" + (" (loss on a logarithmic axis)" if log else ""),
        left=left,
    )


def _loss_difference(seeds: int, paired: dict[int, list[float]]) -> Chart:
    _, top, _, bottom = frame(260)
    y = Axis.over([0.0, *(v for row in paired.values() for v in row)], bottom, top)
    left, _, right, _ = frame(260, room_for([tick.label for tick in y.ticks(5)]))
    x = Axis.over(list(paired), left, right)
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
        x=x.apart(5),
        y=y.ticks(5),
        table=Table(("step", "mean", "range"), tuple((str(s), *_spread(v)) for s, v in ordered)),
        keys=(Key("candidate", "candidate less baseline"),),
        x_label="step",
        left=left,
    )


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
