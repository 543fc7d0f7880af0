"""Which weights are quantized once for each optimizer step: those of dynamic scales, and of delayed ones."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .layer import layer_state, live_layers
from .linear import LowPrecisionLinear, keep_weight_codes
from .weight_codes import WeightCodes, kept_history


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
