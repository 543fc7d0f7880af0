"""Plans as tables: plain text that golden tests can hold, and the same cells in colour for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..precision.config import OPERANDS, PATHS, GemmConfig
from ..precision.errors import on_one_line
from .plan import LayerPlan, Plan
from .pricing import LayerPrice, Unpriced
from .recipe import OptimizerState
from .runnable import inexpressible_in_plan
from .saved_activations import activations_notes

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEADER = ("layer", "type", "in", "out", *PATHS, "set by")
_PRICED = ("layer", "type", "in", "out", "rows", *PATHS, "gain us", "ratio", "set by")
#: With traced casts: which tensors of the layer are cast where they are made.
_FUSED = "fused casts"
_NUMERIC = frozenset({"in", "out", "rows", "gain us", "ratio"})
_EMULATED = "~"
#: Behind a ratio whose shapes were not measured.
_BEYOND = "?"


def plan_text(plan: Plan) -> str:
    """Return the plan as plain aligned text ending in a newline."""
    header = _header(plan)
    rows = [header, *(_cells(plan, layer, header) for layer in plan.layers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    right = {i for i, name in enumerate(header) if name in _NUMERIC}
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
    header = _header(plan)
    for name in header:
        numeric = name in _NUMERIC
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for layer in plan.layers:
        cells: list[Text] = []
        for name, cell in zip(header, _cells(plan, layer, header), strict=True):
            style = ""
            if name in PATHS:
                gemm: GemmConfig = getattr(layer.config, name)
                style = "dim" if gemm.high_precision else "green" if layer.support[name].native else "yellow"
            elif name in ("gain us", "ratio") and not layer.pays:
                style = "red"
            cells.append(Text(cell, style=style))
        table.add_row(*cells)
    return Group(table, *(Text(note) for note in _notes(plan)))


def _title(plan: Plan) -> str:
    low = len(plan.lowered)
    return (
        f"{plan.recipe.name} ({plan.recipe.hash()[:12]}) on {plan.device.name}, backend {plan.backend}: "
        f"{low} of {len(plan.layers)} layers in low precision"
    )


def _header(plan: Plan) -> tuple[str, ...]:
    header = _HEADER if plan.no_prices else _PRICED
    return header if plan.casts is None else (*header, _FUSED)


def _cells(plan: Plan, layer: LayerPlan, header: tuple[str, ...]) -> tuple[str, ...]:
    cells = {
        "layer": layer.name or "(root)",
        "type": layer.type,
        "in": str(layer.in_features or "-"),
        "out": str(layer.out_features or "-"),
        **{path: _gemm(layer, path) for path in PATHS},
        "set by": _set_by(layer),
        "rows": "",
        "gain us": "",
        "ratio": "",
        _FUSED: ", ".join(cast.tensor for cast in plan.casts or () if cast.fused and cast.layer == layer.name),
    }
    price = layer.price
    if isinstance(price, LayerPrice):
        cells["rows"] = str(price.rows)
        if not layer.config.high_precision:
            cells["gain us"] = f"{price.gain_us:+.1f}"
            cells["ratio"] = f"{price.ratio:.2f}x" + _BEYOND * (not price.within)
    return tuple(on_one_line(cells[name]) for name in header)


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
    if layer.kept is not None:
        return f"{layer.origin['when']} (profitable)"
    by_origin: dict[str, list[str]] = {}
    for path, operands in OPERANDS.items():
        origins = dict.fromkeys(str(layer.origin[f"{path}.{operand}"]) for operand in operands)
        by_origin.setdefault(" + ".join(origins), []).append(path)
    if len(by_origin) == 1:
        return next(iter(by_origin))
    return "; ".join(f"{','.join(paths)} {origin}" for origin, paths in by_origin.items())


def _notes(plan: Plan) -> list[str]:
    shares = ", ".join(f"{pair} {share:.1%}" for pair, share in plan.flops_share().items())
    notes = [f"GEMM FLOPs{'' if plan.weighted else ' per row'}: {shares or 'none'}", *_prices(plan)]
    notes += [f"{_EMULATED} emulated: {reason}" for reason in plan.emulated_reasons()]
    notes += [*_in_turns(plan), *_casts(plan)]
    padded = plan.padded()
    if padded:
        first = padded[0].name or "(root)"
        notes.append(f"padded to multiples of 16: {len(padded)} layer{'s' if len(padded) > 1 else ''}, first {first}")
    if not plan.gather.high_precision:
        notes.append(f"FSDP2 gathers {plan.gather} for {len(plan.gathered)} of {_layers(len(plan.layers))}")
    if plan.reduce is not None:
        notes.append(f"FSDP2 reduces gradients as {plan.reduce}, summed in FP32")
    if plan.tables is not None:
        notes.append(f"ranks exchange rows of embedding tables as {plan.tables}; one process exchanges nothing")
    notes += activations_notes(plan)
    optimizer = plan.recipe.optimizer or OptimizerState()
    if optimizer.state.format != "fp32":
        notes.append(f"the optimizer keeps its moments as {optimizer.state}")
    if optimizer.keep_weights:
        count = f"{len(plan.once_a_step)} of {_layers(len(plan.lowered))}"
        notes.append(f"weights are quantized once an optimizer step, where kernels cast them: {count}")
    notes += [str(finding) for finding in inexpressible_in_plan(plan)]
    if plan.trace is not None:
        notes.append(f"rules reach {plan.trace.reachable_share:.1%} of the FLOPs of a traced step")
        notes += [
            f"not reachable: {gemm.op} at {gemm.site}{f' in {gemm.module}' if gemm.module else ''}, "
            f"{plan.trace.share(gemm):.1%} of the FLOPs: {gemm.reason}"
            for gemm in plan.trace.unreachable
        ]
    notes += [f"not reachable: {e.name or '(root)'} ({e.type}): {e.reason}" for e in plan.unreachable]
    notes += [str(warning) for warning in plan.warnings]
    return notes


def _in_turns(plan: Plan) -> list[str]:
    """Return why experts multiply one after another, one line a reason with how many layers it concerns."""
    layers: dict[str, list[str]] = {}
    for layer in plan.layers:
        if layer.in_turns is not None:
            layers.setdefault(layer.in_turns, []).append(layer.name or "(root)")
    return [f"one expert after another: {reason} ({_layers(len(n))}, first {n[0]})" for reason, n in layers.items()]


def _casts(plan: Plan) -> list[str]:
    """Return how many of the casts of a compiled step compute what they cast."""
    if plan.casts is None:
        return []
    counts = {
        tensor: (sum(cast.fused for cast in casts), len(casts))
        for tensor in ("input", "grad", "weight")
        if (casts := [cast for cast in plan.casts if cast.tensor == tensor])
    }
    told = ", ".join(f"{fused} of {count} of {tensor}s" for tensor, (fused, count) in counts.items())
    return [f"casts fused with what made their tensor, under torch.compile on {plan.device.name}: {told or 'none'}"]


def _prices(plan: Plan) -> list[str]:
    """Return what the prices add up to, or why there are none."""
    if plan.no_prices is not None:
        if not plan.lowered:
            return []
        hint = " (plan --rows N or --trace; resolve(..., rows=...))" if plan.rates is not None else ""
        notes = [f"no prices: {plan.no_prices}{hint}"]
        waiting = sum(layer.when == "profitable" for layer in plan.lowered)
        return [*notes, f"when: profitable is undecided for {_layers(waiting)}"] if waiting else notes
    totals, rates = plan.totals(), plan.rates
    assert rates is not None
    notes = []
    if totals is not None:
        notes.append(
            f"predicted for the linear layers of one step: {totals.bf16_us:.1f} us in bf16, {totals.us:.1f} us like "
            f"this ({totals.ratio:.2f}x), {totals.cast_us:.1f} us of it casts; rates measured on {rates.device}, "
            f"{rates.date}"
        )
    if any(isinstance(p, LayerPrice) and not p.within for p in (layer.price for layer in plan.lowered)):
        notes.append(
            f"{_BEYOND} beyond the measured shapes: extrapolated, and small products are launches, not counted"
        )
    for layer in plan.layers:
        if layer.kept is not None:
            notes.append(f"kept in bf16: {layer.name or '(root)'}: {layer.kept}")
        elif isinstance(layer.price, Unpriced) and not layer.config.high_precision:
            notes.append(f"no price: {layer.name or '(root)'}: {layer.price.reason}")
    return notes


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"
