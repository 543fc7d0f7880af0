"""Plans as tables: plain text that golden tests can hold, and the same cells in colour for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..precision.config import OPERANDS, PATHS, GemmConfig
from .plan import LayerPlan, Plan
from .runnable import inexpressible_in_plan

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEADER = ("layer", "type", "in", "out", *PATHS, "set by")
_EMULATED = "~"


def plan_text(plan: Plan) -> str:
    """Return the plan as plain aligned text ending in a newline."""
    rows = [_HEADER, *(_cells(layer) for layer in plan.layers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    right = {_HEADER.index("in"), _HEADER.index("out")}
    lines = [_title(plan), ""]
    for row in rows:
        cells = (
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, "", *_notes(plan)]) + "\n"


def plan_renderable(plan: Plan) -> RenderableType:
    """Return the plan as a rich table with its notes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=_title(plan), title_justify="left")
    for name in _HEADER:
        numeric = name in ("in", "out")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for layer in plan.layers:
        cells: list[Text] = []
        for name, cell in zip(_HEADER, _cells(layer), strict=True):
            style = ""
            if name in PATHS:
                gemm: GemmConfig = getattr(layer.config, name)
                style = "dim" if gemm.high_precision else "green" if layer.support[name].native else "yellow"
            cells.append(Text(cell, style=style))
        table.add_row(*cells)
    return Group(table, *(Text(note) for note in _notes(plan)))


def _title(plan: Plan) -> str:
    low = len(plan.lowered)
    return (
        f"{plan.recipe.name} ({plan.recipe.hash()[:12]}) on {plan.device.name}, backend {plan.backend}: "
        f"{low} of {len(plan.layers)} layers in low precision"
    )


def _cells(layer: LayerPlan) -> tuple[str, ...]:
    gemms = (_gemm(layer, path) for path in PATHS)
    return (
        layer.name or "(root)",
        layer.type,
        str(layer.in_features),
        str(layer.out_features),
        *gemms,
        _set_by(layer),
    )


def _gemm(layer: LayerPlan, path: str) -> str:
    gemm: GemmConfig = getattr(layer.config, path)
    if gemm.high_precision and gemm.first == gemm.second:
        return str(gemm.first)
    text = str(gemm.first) if gemm.first == gemm.second else f"{gemm.first} · {gemm.second}"
    if gemm.accumulate == "fast":
        text += " fast"
    return text if layer.support[path].native else f"{_EMULATED} {text}"


def _set_by(layer: LayerPlan) -> str:
    """Return where each path's operands come from, equal ones joined: ``fprop,dgrad r.yaml:7; wgrad r.yaml:13``."""
    by_origin: dict[str, list[str]] = {}
    for path, operands in OPERANDS.items():
        origins = dict.fromkeys(str(layer.origin[f"{path}.{operand}"]) for operand in operands)
        by_origin.setdefault(" + ".join(origins), []).append(path)
    if len(by_origin) == 1:
        return next(iter(by_origin))
    return "; ".join(f"{','.join(paths)} {origin}" for origin, paths in by_origin.items())


def _notes(plan: Plan) -> list[str]:
    shares = ", ".join(f"{pair} {share:.1%}" for pair, share in plan.flops_share().items())
    notes = [f"GEMM FLOPs per row: {shares or 'none'}"]
    if any(layer.when != "always" for layer in plan.layers):
        notes.append("when: profitable applies to some layers; which of them pay is measured, not shown here")
    notes += [f"{_EMULATED} emulated: {reason}" for reason in plan.emulated_reasons()]
    padded = plan.padded()
    if padded:
        first = padded[0].name or "(root)"
        notes.append(f"padded to multiples of 16: {len(padded)} layer{'s' if len(padded) > 1 else ''}, first {first}")
    notes += [str(finding) for finding in inexpressible_in_plan(plan)]
    notes += [f"not reachable: {e.name or '(root)'} ({e.type}): {e.reason}" for e in plan.unreachable]
    notes += [str(warning) for warning in plan.warnings]
    return notes
