"""Which weights are quantized once for each optimizer step: those of dynamic scales, and of delayed ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from . import casting
from .capability import has_cast_kernel, same_codes
from .casting import has_kernel
from .config import LinearConfig
from .delayed import AmaxHistory
from .layer import layer_state, live_layers
from .linear import LowPrecisionLinear, keep_weight_codes
from .weight_codes import WeightCodes, format_obstacle


def keep_weights(parameters: Iterable[Tensor]) -> dict[str, str]:
    """:func:`narrowgate.precision.linear.keep_weight_codes`, and the same for weights with delayed scales.

    Those record their amax and count what saturates once a step, where a weight that is quantized at each use records
    the same amax with each, and counts again.

    Args:
        parameters: those that a ``torch.optim.Optimizer`` steps; of lowered linear layers.

    Returns:
        The layers among them that quantize their weight at each use all the same, with the reason.
    """
    parameters = list(parameters)
    obstacles = keep_weight_codes(parameters)
    stepped = {id(parameter) for parameter in parameters}
    for layer in live_layers():
        weight, state = layer._parameters.get("weight"), layer_state(layer)
        if not isinstance(layer, LowPrecisionLinear) or weight is None or id(weight) not in stepped:
            continue
        history = kept_history(state.config, weight, state.histories)
        if history is not None:
            obstacles.pop(state.name, None)
            state.kept = state.kept or WeightCodes(state.config, weight, history)
    return obstacles


def kept_history(
    config: LinearConfig, weight: Tensor | None, histories: Mapping[tuple[str, str], AmaxHistory]
) -> AmaxHistory | None:
    """The amax history with which a layer's weight keeps its codes; None where others say whether it keeps any.

    It can where both products take the same codes. They are then recorded once a step, not at each use.
    """
    if type(weight) is not torch.nn.Parameter or not _one_history(config):
        return None
    return histories.get(("fprop", "weight")) if weight.numel() and has_kernel(weight, config.fprop.second) else None


def can_keep(config: LinearConfig) -> bool:
    """Whether a linear layer of these formats can keep its weight's codes, wherever kernels cast."""
    return _one_history(config) or format_obstacle(config) is None


def worth_keeping(parameter: Tensor) -> bool:
    """Whether a cast at each use is a kernel there, and not one of a shard, which is gathered anew for each use."""
    return type(parameter) is torch.nn.Parameter and (parameter.is_cuda or casting.kernels_on_cpu())


def _one_history(config: LinearConfig) -> bool:
    """Whether both products take the same codes, with a delayed scale that depends on nothing but its history."""
    spec = config.fprop.second
    clipped = spec.clip_p is not None or spec.clip_rms is not None
    delayed = spec.delayed is not None and not spec.sr and not clipped and has_cast_kernel(spec)
    return delayed and same_codes(spec, config.dgrad.second)
