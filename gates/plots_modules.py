"""The chart of modules alone: what a step's calls of each take in both arms."""

from __future__ import annotations

from .charts import WIDTH, Axis, Chart, Key, Mark, Table, frame, label, rect, room_for, segment, shortened, text_width
from .render import MODULE_HEAD, module_rows
from .report import Report

#: Modules drawn at most; the table has all of them.
_MOST_DRAWN = 12
_PITCH = 38


def module_chart(report: Report) -> Chart | None:
    """Return the time of a step's calls of the heaviest modules; None where none was timed."""
    results = report.evidence.module.results
    modules = results.get("modules")
    if not modules:
        return None
    drawn = sorted(modules, key=lambda m: -m["calls"] * m["baseline_ms"])[:_MOST_DRAWN]
    left, height = 14, 14 + _PITCH * len(drawn) + 40
    _, top, right, bottom = frame(height, left)
    times = [m["calls"] * m[arm] for m in drawn for arm in ("baseline_ms", "candidate_ms")]
    ratios = [f"{module['speedup']:.2f}x" for module in drawn]
    x = Axis(0.0, 1.05 * max(times), left, WIDTH - room_for(ratios))
    marks: list[Mark] = [segment(x(0), top, x(0), bottom, "zero")]
    for i, module in enumerate(drawn):
        y, calls = top + _PITCH * i, module["calls"]
        counted = f" ({calls} calls)" if calls > 1 else ""
        name = shortened(module["name"], right - left - 4 - text_width(counted))
        marks.append(label(left + 4, y + 12, name + counted))
        for at, arm in ((y + 16, "baseline"), (y + 24, "candidate")):
            ms = calls * module[f"{arm}_ms"]
            marks.append(rect(x(0), x(ms), at, at + 7, f"bar {arm}", f"{module['name']}, {arm}: {ms:.4f} ms a step"))
        end = max(x(calls * module[f"{arm}_ms"]) for arm in ("baseline", "candidate"))
        marks.append(label(end + 6, y + 28, ratios[i]))
    gate = next((g for g in report.gates if g.name == "module_time"), None)
    total = results["total"]
    asked = f"; {gate.threshold:g}x is asked" if gate is not None else ""
    more = len(modules) - len(drawn)
    return Chart(
        title="Modules alone" + (f": {gate.status}" if gate is not None else ""),
        summary=f"Milliseconds of a step's calls, forward and backward: {total['baseline_ms']:.3f} ms baseline,"
        f" {total['candidate_ms']:.3f} ms candidate for all, {total['speedup']:.4f}x [{total['ci_low']:.4f}x,"
        f" {total['ci_high']:.4f}x]{asked}; {100 * results['covered']:.1f} % of the lowered modules' FLOPs were timed."
        + (f" {more} lighter ones stand in the table only." if more else ""),
        height=height,
        marks=tuple(marks),
        x=x.apart(4, " ms"),
        y=(),
        table=Table(MODULE_HEAD, tuple(module_rows(report))),
        keys=(Key("baseline", "baseline"), Key("candidate", "candidate")),
        left=left,
        grid="x",
    )
