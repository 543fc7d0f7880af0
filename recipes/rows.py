"""How many rows each layer multiplies in one step: the M that a price needs, seen by running one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..precision.errors import NarrowgateError, did_you_mean
from .errors import found
from .targets import find_targets


def measure_rows(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """Return the rows that every target of ``model`` multiplies while ``run()`` runs, by layer name.

    Rows are all dimensions of a layer's input but the last, added up over its calls; 0 for a layer that is never
    called. The model runs in eval mode without gradients, uncompiled, and leaves torch's generators as they were.

    Args:
        model: the model, or what wraps it.
        run: runs it on one batch, for example ``lambda: model(batch)``.

    Raises:
        NarrowgateError: ``run`` called no layer of ``model``.
    """
    targets, _ = find_targets(model)
    rows = {target.name: 0 for target in targets}
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})

    def hook(name: str) -> Callable[..., None]:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next((kwargs[key] for key in ("input", "query", "x") if key in kwargs), None)
            if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1]:
                rows[name] += x.numel() // x.shape[-1]

        return count

    handles = [(t.caller or t.module).register_forward_pre_hook(hook(t.name), with_kwargs=True) for t in targets]
    try:
        model.eval()
        with (
            torch.random.fork_rng(devices),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            run()
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    if targets and not any(rows.values()):
        raise NarrowgateError(
            "rows: the batch that was run reached none of the model's layers, expected a forward of it"
        )
    return rows


def check_rows(rows: Mapping[str, int] | int | None, names: list[str]) -> dict[str, int] | None:
    """Return ``rows`` by layer name; one number stands for every layer.

    Raises:
        NarrowgateError: a number below 0, or a name that no layer has.
    """
    if rows is None:
        return None
    if isinstance(rows, int) and not isinstance(rows, bool):
        rows = dict.fromkeys(names, rows)
    if not isinstance(rows, Mapping):
        raise NarrowgateError(f"rows: found {found(rows)}, expected a number, or numbers by layer name")
    known = set(names)
    for name, count in rows.items():
        if name not in known:
            raise NarrowgateError(f"rows: found layer '{name}', which the model lacks{did_you_mean(str(name), names)}")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise NarrowgateError(f"rows: found {found(count)} for layer '{name}', expected a whole number from 0")
    return dict(rows)
