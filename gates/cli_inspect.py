"""The command ``inspect``: per-tensor numerics of a recipe over a few training steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..precision.errors import NarrowgateError

if TYPE_CHECKING:
    from ..precision.observer import OperandNumerics

_COLUMNS = ("layer", "path", "operand", "format", "amax", "saturated", "underflowed", "clipped", "SQNR")
_LEFT = 4


@dataclass(frozen=True)
class InspectOptions:
    """What ``inspect`` was asked; fields are the options of the command line."""

    recipe: str
    model: str | None
    data: str | None
    task: str | None
    steps: int
    seed: int
    device: str
    json: bool
    quiet: bool


def inspect_command(options: InspectOptions) -> None:
    """Train, count and print."""
    if options.task is not None and (options.model or options.data):
        raise NarrowgateError("inspect: --task brings its own model and data; leave out --model and --data")
    from ..recipes import load_recipe
    from .cli_gate import pick_device
    from .inspection import inspect_recipe
    from .progress import make_progress, prints_aside
    from .seeds import watcher
    from .task import TaskSource

    recipe = load_recipe(options.recipe)
    source = TaskSource(
        task=options.task,
        model=options.model or "gem-tiny",
        data=options.data or "synthetic",
        device=pick_device(options.device),
        steps=options.steps,
    )
    with make_progress(options.quiet) as progress, prints_aside():
        progress.phase(f"training {options.steps} steps under {recipe.name} on {source.device}, uncompiled")
        found = inspect_recipe(source, recipe, options.seed, watcher(options.seed, recipe.name, progress.step))
    if options.json:
        print(json.dumps(found.to_dict(), indent=1, allow_nan=False))
        return
    first, last = ("not finite" if loss is None else f"{loss:.5f}" for loss in found.losses)
    print(f"{found.recipe}: {found.steps} steps on {found.device}, training loss {first} to {last}")
    rows = [_COLUMNS, *(_row(operand) for operand in found.operands)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        cells = (c.ljust(w) if i < _LEFT else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        print("  ".join(cells).rstrip())
    print(
        "Saturated and clipped: shares of all elements; underflowed: of the non-zero ones; each at its worst step."
        " Codes that two paths share may stand under one of them only."
    )


def _row(o: OperandNumerics) -> tuple[str, ...]:
    shares = (o.worst_saturated, o.worst_underflowed, o.worst_clipped)
    noise = "-" if o.sqnr_db is None else f"{o.sqnr_db:.1f} dB"
    return (o.layer, o.path, o.operand, o.format, f"{o.amax:.3g}", *(f"{100 * s:.3f} %" for s in shares), noise)
