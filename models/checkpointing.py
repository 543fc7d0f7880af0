"""Activation checkpointing by region: which parts of each layer are recomputed in backward instead of kept."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..precision import gemm, grouped_gemm, weight_codes
from ..precision.errors import NarrowgateError, did_you_mean
from .jagged_operator import OPERATOR

#: Parts of a :class:`narrowgate.models.gem.GemLayer`, by the names of its submodules.
REGIONS = ("cross", "interaction", "sequence", "experts")
#: ``all`` keeps only what goes into a region; ``pointwise`` keeps its matrix products too and recomputes the rest.
MODES = ("all", "pointwise")

_aten: Any = torch.ops.aten
#: What ``pointwise`` keeps: the products, which cost most to repeat.
_PRODUCTS = [
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten._scaled_mm.default,
    *gemm.OPERATORS, *grouped_gemm.OPERATORS, *weight_codes.OPERATORS, OPERATOR,
]  # fmt: skip


def checkpoint_activations(model: nn.Module, regions: Mapping[str, str]) -> None:
    """Set what every layer of ``model`` recomputes in backward; what ``regions`` leaves out is kept as usual.

    Losses and gradients stay the same: recomputation repeats dropout masks and stochastic rounding. Names of modules
    and parameters do not change. Works eagerly and under ``torch.compile``.

    Args:
        model: holds :class:`narrowgate.models.gem.GemLayer` modules.
        regions: a mode of :data:`MODES` by region of :data:`REGIONS`; empty to keep everything.

    Raises:
        NarrowgateError: unknown region or mode, or a model without layers.
    """
    for region, mode in regions.items():
        if region not in REGIONS:
            hint = did_you_mean(region, REGIONS)
            raise NarrowgateError(f"checkpoint: unknown region '{region}'{hint} (known: {', '.join(REGIONS)})")
        if mode not in MODES:
            hint = did_you_mean(mode, MODES)
            raise NarrowgateError(f"checkpoint: region '{region}' is one of {', '.join(MODES)}, found '{mode}'{hint}")
    layers = [module for module in model.modules() if isinstance(module, Checkpointed)]
    if not layers:
        raise NarrowgateError(f"checkpoint: found no layers in this {type(model).__name__}, expected a GemModel")
    for layer in layers:
        layer.checkpoints = dict(regions)


class Checkpointed(nn.Module):
    """A module whose parts may run under checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        #: Mode by region; set by :func:`checkpoint_activations`.
        self.checkpoints: dict[str, str] = {}

    def run_region(self, region: str, *inputs: Any) -> Any:
        """Run the submodule ``region`` on ``inputs`` as :attr:`checkpoints` says."""
        module, mode = getattr(self, region), self.checkpoints.get(region)
        if mode is None or not torch.is_grad_enabled():
            return module(*inputs)
        if mode == "all":
            return checkpoint(module, *inputs, use_reentrant=False)
        contexts = partial(create_selective_checkpoint_contexts, _PRODUCTS)
        return checkpoint(module, *inputs, use_reentrant=False, context_fn=contexts)
