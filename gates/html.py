"""``report.html``: the report as one page that needs nothing but itself, with the charts that people read."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from ruamel.yaml import YAML

from .charts import WIDTH
from .evidence_distributed import ARM_HEAD, arm_rows, distributed_lines
from .measurements import Operand
from .plots_modules import module_chart
from .plots_quality import loss_charts, quality_charts
from .plots_speed import speed_charts, wall_chart, waterfall
from .render import gate_row, quality_lines, speed_lines
from .report import Report
from .stability import numerics_lines

_HERE = Path(__file__).parent
_LEVELS = ("kernel", "module", "step", "distributed", "quality")
#: A cell that says a number, with a unit or without; nothing and "-" stand for a missing one.
_NUMBER = re.compile(r"-?|[-+]?\d[\d.]*(e[-+]?\d+)?( ?(%|ms|s|x|dB))?")
#: Where a name of a layer or a fact may go on in the next line.
_BREAK = re.compile(r"(?<=[A-Za-z_\])])\.|\.(?=[A-Za-z_])|_(?=[^_])|/(?=[A-Za-z])")
_CODE = re.compile(r"`([^`]+)`")


def render_html(report: Report) -> str:
    """Return ``report.html``: the verdict with its reasons, then gates, charts, plan and environment.

    No script, no request: styles and charts stand in the page, and its content policy forbids everything else.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": breakable, "marked": marked, "columns_of_numbers": columns_of_numbers}
    operands, runs = worst_operands(report), [seed.candidate.stability for seed in report.measurements.seeds]
    # Their table says what these lines would.
    left_out = numerics_lines(runs) if operands else []
    steps = max((run.observed_steps for run in runs), default=0)
    ranks = distributed_lines(report.evidence.distributed)
    speed = [*speed_charts(report), module_chart(report), waterfall(report)]
    charts = [*quality_charts(report), *loss_charts(report), *speed]
    return environment.get_template("report.html.jinja").render(
        r=report,
        width=WIDTH,
        css=Markup((_HERE / "report.css").read_text(encoding="utf-8")),
        gates=[{**gate_row(gate), "passed": gate.status} for gate in report.gates],
        quality=[line for line in (*quality_lines(report), *speed_lines(report)) if line not in left_out],
        charts=[chart for chart in charts if chart is not None],
        wall=wall_chart(report),
        slices=slice_rows(report),
        operands=operands,
        counted=f"Counted in {steps} {'step' if steps == 1 else 'steps'} a seed.",
        ranks=ranks[0] if ranks else None,
        arm_head=ARM_HEAD,
        arms=arm_rows(report.evidence.distributed),
        levels=[(name, getattr(report.evidence, name)) for name in _LEVELS],
        results=[
            (name, facts_of(level.results)) for name in _LEVELS if (level := getattr(report.evidence, name)).results
        ],
        layers=[layer_row(layer) for layer in report.recipe.plan.get("layers", ())],
        groups=report.recipe.plan.get("groups", ()),
        recipe=_recipe_text(report.recipe.resolved),
        facts=[
            (title, facts_of(facts))
            for title, facts in (
                ("Environment", report.environment),
                ("Model", report.model),
                ("Data", report.data),
                ("Policy", report.policy.model_dump()),
            )
        ],
    )


def breakable(text: str) -> Markup:
    """Return a dotted name that may go on in the next line behind a dot, an underscore or a slash, and nowhere else."""
    parts = _BREAK.sub(lambda found: f"{found[0]}\0", text.replace(" ", "\N{NO-BREAK SPACE}")).split("\0")
    return Markup("<wbr>").join(escape(part) for part in parts)


def marked(text: str) -> Markup:
    """Return a text in which what stands between backticks is marked as code."""
    parts = _CODE.split(text)
    return Markup("").join(
        escape(part) if i % 2 == 0 else Markup("<code>{}</code>").format(part) for i, part in enumerate(parts)
    )


def columns_of_numbers(rows: Sequence[Sequence[str]]) -> set[int]:
    """Return the columns of a table whose every cell is a number or missing; such read best aligned at the right."""
    columns = enumerate(zip(*rows, strict=True))
    return {i for i, cells in columns if set(cells) - {"", "-"} and all(_NUMBER.fullmatch(cell) for cell in cells)}


def facts_of(data: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return nested data as (dotted name, text); what is None is left out."""
    if isinstance(data, dict):
        return [fact for key, value in data.items() for fact in facts_of(value, f"{prefix}.{key}" if prefix else key)]
    if isinstance(data, list | tuple) and any(isinstance(value, dict) for value in data):
        return [fact for i, value in enumerate(data) for fact in facts_of(value, f"{prefix}[{i}]")]
    if data is None:
        return []
    if isinstance(data, list | tuple):
        return [(prefix, ", ".join(_text(value) for value in data) or "none")]
    return [(prefix, _text(data))]


def slice_rows(report: Report) -> list[tuple[str, ...]]:
    """Return every slice's mean NE and AUC of both arms as cells of a table."""
    rows = []
    for task, results in report.evidence.quality.results.items():
        for name, part in (results.get("slices") or {}).items():
            base, own = part["baseline"], part["candidate"]
            change = f"{100 * (own['ne'] / base['ne'] - 1):+.4f} %" if base["ne"] and own["ne"] else "-"
            values = [base["ne"], own["ne"], base["auc"], own["auc"]]
            told = ["-" if value is None else f"{value:.5f}" for value in values]
            rows.append((f"{task}, {name}", str(part["rows"] or "-"), *told[:2], change, *told[2:]))
    return rows


def worst_operands(report: Report) -> list[tuple[str, ...]]:
    """Return the candidate's operands that lost the most, as cells of a table; of all seeds the worst one's numbers."""
    found: dict[tuple[str, str, str], Operand] = {}
    for seed in report.measurements.seeds:
        for operand in seed.candidate.stability.worst:
            key = (operand.layer, operand.path, operand.operand)
            before = found.get(key)
            if before is None or _loss(operand) > _loss(before):
                found[key] = operand
    return [
        (
            o.layer,
            f"{o.path}.{o.operand}",
            o.format,
            f"{100 * o.worst_saturated:.3g} % at step {o.worst_saturated_step}" if o.worst_saturated else "none",
            f"{100 * o.worst_underflowed:.3g} % at step {o.worst_underflowed_step}" if o.worst_underflowed else "none",
            f"{100 * o.worst_clipped:.3g} %" if o.worst_clipped else "none",
            "-" if o.sqnr_db is None else f"{o.sqnr_db:.1f} dB",
        )
        for o in sorted(found.values(), key=_loss, reverse=True)
    ]


def _loss(operand: Operand) -> tuple[float, float, float]:
    return operand.worst_saturated, operand.worst_underflowed, -(operand.sqnr_db or 0.0)


def layer_row(layer: dict[str, Any]) -> dict[str, Any]:
    """Return a layer of a stored plan as the cells of a table: its shape and, for each path, what it multiplies."""
    shape = [layer.get("in_features"), layer.get("out_features")]
    paths = []
    for name, path in layer.get("paths", {}).items():
        operands = {key: path[key] for key in ("input", "weight", "grad") if key in path}
        places = {
            f"{by['file']}:{by['line']}" if by.get("line") else f"{by['file']}: defaults"
            for key, by in path.get("set_by", {}).items()
            if key in operands and by.get("file")
        }
        values = list(operands.values())
        paths.append(
            {
                "name": name,
                "text": values[0] if len(set(values)) == 1 else " · ".join(values),
                "low": set(values) != {"bf16"},
                "native": path.get("native", True),
                "why": path.get("reason"),
                "set_by": ", ".join(sorted(places)),
            }
        )
    return {
        "name": layer.get("name", ""),
        "type": layer.get("type", ""),
        "shape": " x ".join(str(n) for n in shape if n is not None),
        "paths": paths,
    }


def _recipe_text(resolved: dict[str, Any]) -> str:
    # Not through Recipe: a stored report may hold a recipe whose grammar this version has left behind.
    out, yaml = io.StringIO(), YAML()
    yaml.default_flow_style, yaml.width = False, 100
    yaml.dump(resolved, out)
    return out.getvalue()


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
