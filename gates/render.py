"""Text from a report: Markdown for a step summary, lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from ..precision.errors import on_one_line
from .evidence_distributed import ARM_HEAD, arm_rows, distributed_lines
from .judgement import Gate
from .report import Report

if TYPE_CHECKING:
    from .outputs import Outcome
from .stability import numerics_lines

#: Bytes that a GitHub step summary takes at most; it drops a longer one whole.
STEP_SUMMARY_LIMIT = 2**20
_WORDS = {"pass": "pass", "fail": "FAIL", "undecided": "undecided"}


def render_report(report: Report) -> str:
    """Return ``report.md``: verdict first, then gates, seeds, plan and environment, within a step summary's limit."""
    text = _template("report.md.jinja").render(
        r=report,
        gates=[gate_row(g) for g in report.gates],
        quality=quality_lines(report),
        speed=speed_lines(report),
        modules=module_rows(report),
        distributed=distributed_lines(report.evidence.distributed)[:1],
        arm_head=ARM_HEAD,
        arms=arm_rows(report.evidence.distributed),
        value=_value,
    )
    return fit(text, "report.json")


def fit(text: str, whole: str, limit: int = STEP_SUMMARY_LIMIT) -> str:
    """Return Markdown that takes at most ``limit`` bytes: a longer text ends after a line, and says so.

    Args:
        text: Markdown.
        whole: the file that has what is left out.
        limit: bytes in UTF-8.
    """
    data = text.encode(errors="replace")  # half characters become question marks, as in files
    if len(data) <= limit:
        return text
    for_notice = 200
    kept = data[: limit - for_notice].decode(errors="ignore")
    kept = kept[: kept.rfind("\n") + 1]
    left = len(data) - len(kept.encode())
    if kept.count("<details>") > kept.count("</details>"):
        kept += "\n</details>\n"
    cut = f"{kept}\n**Cut here**: {left} of {len(data)} bytes are left out; `{whole}` has everything.\n"
    assert len(cut.encode()) <= limit, "the notice is longer than the room kept for it"
    return cut


def render_summary(outcomes: Sequence[Outcome]) -> str:
    """Return ``summary.md``: one line a recipe, then each one's gates, within a step summary's limit."""
    rows = [None if o.report is None else [gate_row(gate) for gate in o.report.gates] for o in outcomes]
    text = _template("summary.md.jinja").render(outcomes=list(zip(outcomes, rows, strict=True)), short=short_reason)
    return fit(text, "summary.json")


def terminal_summary(outcomes: Sequence[Outcome]) -> str:
    """Return one aligned line for each of several gates: its name, verdict and first reason."""
    rows = [(o.name, o.verdict.upper(), short_reason(o.report) if o.report else str(o.failure)) for o in outcomes]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{name.ljust(widths[0])}  {verdict.ljust(widths[1])}  {why}" for name, verdict, why in rows)


def terminal_text(report: Report) -> str:
    """Return what the command prints: the verdict, its reasons and the gates as aligned columns."""
    rows = [["gate", "status", "[low estimate high]", "passes"]]
    for row in map(gate_row, report.gates):
        rows.append([on_one_line(row["gate"]), row["status"], row["interval"], row["threshold"]])
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    reasons = "\n".join(f"  - {on_one_line(reason.text)}" for reason in report.reasons)
    lines = (*quality_lines(report), *speed_lines(report), *distributed_lines(report.evidence.distributed))
    quality = "\n".join(f"  {on_one_line(line)}" for line in lines)
    baseline = report.evidence.quality.baseline
    return (
        f"{report.verdict.upper()}: {on_one_line(report.recipe.name)}\n{reasons}\n\n{table}\n\n{quality}\n"
        f"  Baseline: {baseline}; {report.statistics.n} paired seed{'s' * (report.statistics.n != 1)}.\n"
        f"  Took {wall_text(report.wall_seconds)}.\n"
    )


def wall_text(seconds: dict[str, float]) -> str:
    """Return how long a run took and on what, longest first."""
    parts = sorted(((s, part) for part, s in seconds.items() if part != "all"), reverse=True)
    told = ", ".join(f"{part} {s:.0f}" for s, part in parts if s >= 0.5)
    return f"{seconds.get('all', sum(s for s, _ in parts)):.0f} s" + (f" ({told})" if told else "")


def quality_lines(report: Report) -> list[str]:
    """Return each task's mean NE and AUC of both arms, beside the best NE there is where the data knows it."""
    lines, best = [], report.data.get("bayes_ne")
    for task, arms in report.evidence.quality.results.items():
        own, other = arms["candidate"], arms["baseline"]
        text = f"{task}: NE {_value(other['ne'])} baseline, {_value(own['ne'])} candidate"
        if isinstance(best, dict) and isinstance(best.get(task), float):
            text += f", {_value(best[task])} Bayes-optimal"
        lines.append(f"{text}; AUC {_value(other['auc'])}, {_value(own['auc'])}")
    lines += _gradient_line(report)
    lines += numerics_lines([seed.candidate.stability for seed in report.measurements.seeds])
    reuse = report.reuse
    if reuse is not None and reuse.baseline + reuse.candidate:
        lines.append(
            f"found finished, not trained by this run: {reuse.baseline} baselines and {reuse.candidate} candidates"
            f" of {reuse.trainings // 2} each"
        )
    return [*lines, *(reuse.notes if reuse is not None else ())]


def _gradient_line(report: Report) -> list[str]:
    """Return the largest finite gradient norm of both arms over all seeds and steps; none where an arm has none."""
    arms = [
        [norm for seed in report.measurements.seeds if (norm := getattr(seed, arm).stability.max_gradient_norm)]
        for arm in ("baseline", "candidate")
    ]
    if not all(arms):
        return []
    return [f"largest gradient norm of any step: {max(arms[0]):#.4g} baseline, {max(arms[1]):#.4g} candidate"]


def speed_lines(report: Report) -> list[str]:
    """Return what casting takes of the step, and which modules were left out; empty where neither is known."""
    lines = []
    casting = report.evidence.step.results.get("casting_overhead")
    if casting is not None:
        most, how = ("at most ", ", fused kernels counted whole") if casting["upper_bound"] else ("", "")
        lines.append(
            f"casting overhead: {most}{100 * casting['share']:.1f} % of the candidate's step"
            f" ({casting['ms']:.3f} ms{how}; the bar is {100 * casting['bar']:g} %)"
        )
    fused = report.evidence.step.results.get("bf16_fused")
    if isinstance(fused, dict):
        lines.append(
            f"against the same fusion in BF16 ({fused['fused_ms']:.3f} ms a step), the formats alone: speedup"
            f" [{fused['ci_low']:.4f}x  {fused['speedup']:.4f}x  {fused['ci_high']:.4f}x]"
        )
    results = report.evidence.module.results
    left = results.get("left_out")
    if left:
        share = 100 * (1 - results["covered"])
        named = ", ".join(f"{region['name']} ({100 * region['share']:.1f} %: {region['why']})" for region in left)
        lines.append(f"modules not timed, {share:.1f} % of the lowered modules' FLOPs: {named}")
    return lines


#: Heads of the columns of :func:`module_rows`.
MODULE_HEAD = ("module", "type", "M x K x N", "calls", "FLOPs", "baseline", "candidate", "speedup [low estimate high]")


def module_rows(report: Report) -> list[tuple[str, ...]]:
    """Return every module's cells under :data:`MODULE_HEAD`, heaviest first, those left out with why; then the sum."""
    results = report.evidence.module.results
    rows = []
    for region in (*results.get("modules", ()), *results.get("left_out", ())):
        shapes = ", ".join(" x ".join(map(str, mkn)) for mkn in region["mkn"])
        cells = (region["name"], region["type"], shapes, str(region["calls"]), f"{100 * region['share']:.1f} %")
        rows.append((*cells, *(("-", "-", region["why"]) if "why" in region else _times(region))))
    total = results.get("total")
    if total is not None:
        rows.append(("all, by calls", "", "", "", f"{100 * results['covered']:.1f} %", *_times(total)))
    return rows


def _times(found: dict[str, Any]) -> tuple[str, ...]:
    bounds = "  ".join(f"{found[key]:.4f}x" for key in ("ci_low", "speedup", "ci_high"))
    return f"{found['baseline_ms']:.4f} ms", f"{found['candidate_ms']:.4f} ms", f"[{bounds}]"


def short_reason(report: Report) -> str:
    """Return the first reason, with a count of the others."""
    more = len(report.reasons) - 1
    return report.reasons[0].text + (f" (and {more} more)" if more else "")


def gate_row(gate: Gate) -> dict[str, str]:
    """Return a gate's cells as text, in the unit that people read its metric in."""
    if gate.measured is None:
        interval = "not measured"
    elif gate.ci_low is None or gate.ci_high is None:
        interval = _unit(gate, gate.measured)
    else:
        interval = f"[{_unit(gate, gate.ci_low)}  {_unit(gate, gate.measured)}  {_unit(gate, gate.ci_high)}]"
    at_most = gate.name in ("stability", "memory")
    relation = ("at most" if at_most else "below") if gate.direction == "below" else "at least"
    return {
        "gate": " ".join(part for part in (gate.name, gate.task, gate.slice) if part is not None),
        "status": _WORDS[gate.status],
        "metric": gate.metric,
        "interval": interval,
        "threshold": f"{relation} {_unit(gate, gate.threshold, signed=False)}",
    }


def _unit(gate: Gate, value: float, signed: bool = True) -> str:
    sign = "+" if signed else ""
    if gate.name == "ne":
        return f"{100 * value:{sign}.4f} %" if signed else f"{100 * value:g} %"
    if gate.name in ("auc", "gauc"):
        return f"{value:{sign}.6f}" if signed else f"{value:g}"
    if gate.name == "stability":
        return f"{value:g}"
    return f"{value:.4f}x" if signed else f"{value:g}x"


def _value(value: Any, digits: int = 5) -> str:
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _flat(text: Any) -> str:
    return on_one_line(" ".join(str(text).split()))


def _cell(text: Any) -> str:
    """What neither ends a table's cell nor starts a tag or an image."""
    return _flat(text).replace("|", "\\|").replace("<", "&lt;").replace("![", "!\\[")


def _template(name: str) -> jinja2.Template:
    # Markdown, not HTML: what could break a table cell is replaced instead of escaped.
    environment = jinja2.Environment(
        autoescape=False, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = _cell
    environment.filters["code"] = lambda text: f"`{_flat(text).replace('`', chr(39))}`"
    source = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return environment.from_string(source)
