"""A linear layer whose three GEMMs each multiply the formats that a recipe chose.

y [M,N] = x [M,K] · Wᵀ, W [N,K], and per path one GEMM over its own contraction:

=====  ==========================  ==============  =========
path   product                     operands        contracts
=====  ==========================  ==============  =========
fprop  y  [M,N] = x  · Wᵀ          input, weight   K
dgrad  dx [M,K] = dy · W           grad, weight    N
wgrad  dW [N,K] = dyᵀ · x          grad, input     M
=====  ==========================  ==============  =========

An operand is quantized along its path's contraction. Where two paths ask for the same codes (same spec, a scale that
survives a transpose, nearest rounding) the tensor is quantized once; where they do not, one kernel still makes both.
Backward keeps the wgrad operand itself, one byte an element where it is FP8, not the activation it came from, and the
dgrad weight. Weights are quantized straight from their master dtype. The gradient's cast sums its columns, too: the
gradient of the bias, in FP32 until it is rounded to the bias' dtype.

An existing module is lowered by swapping its class, so its Parameters, hooks, name and ``isinstance(m, nn.Linear)``
stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from . import observer
from .config import LinearConfig
from .errors import NarrowgateError
from .gathered import CodedWeight
from .gemm import dense_gemm, scaled_gemm
from .layer import (
    LayerState,
    LowPrecisionLayer,
    autocast_device,
    layer_state,
    live_layers,
    original_type,
    placed_state,
    restore_layer,
    swap,
)
from .operands import Operand, prepare, prepare_both, prepare_summed, restore, save
from .quantization import QuantizedTensor
from .weight_codes import WeightCodes, keep_obstacle, weight_product

__all__ = [
    "LowPrecisionLinear",
    "keep_weight_codes",
    "linear_state",
    "load_linear_state",
    "lower_linear",
    "original_type",
    "restore_linear",
]


class LowPrecisionLinear(LowPrecisionLayer, nn.Linear):
    """An ``nn.Linear`` that runs a :class:`LinearConfig`; made by :func:`lower_linear`, never constructed."""

    def forward(self, input: Tensor) -> Tensor:
        """Return x Wᵀ + bias: [..., N] for an input of [..., K] (or [K]).

        The output has the autocast dtype where autocast is on, else the input's.

        Raises:
            NarrowgateError: the last dimension of ``input`` is not ``in_features``.
        """
        training = self.training and torch.is_grad_enabled()
        return low_precision_linear(input, self.weight, self.bias, placed_state(self), training=training)


def low_precision_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, *, training: bool
) -> Tensor:
    """Return input [..., K] · weightᵀ [K, N] + bias as ``state`` says; ``training`` counts and records the forward.

    Raises:
        NarrowgateError: ``input`` has another last dimension than the weight.
    """
    columns = weight.shape[1]
    if input.shape[-1] != columns:
        raise NarrowgateError(
            f"{state.name or 'linear'}: expected an input of [..., {columns}], found {list(input.shape)}"
        )
    draw, recording = state.enter(training)
    kept = state.kept if training else None
    if kept is not None and not torch.compiler.is_compiling() and observer.watching():
        kept = None  # whoever watches wants to see the weight being quantized
    return linear_product(input, weight, bias, state, draw, recording, kept)


def linear_product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: LayerState,
    draw: Tensor,
    recording: bool,
    kept: WeightCodes | None = None,
) -> Tensor:
    """:func:`low_precision_linear` within a forward that was begun: its ``draw``, and whether it records amaxes.

    With ``kept`` the weight's codes are those of its last use, where they are still right.
    """
    device = autocast_device(input)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
    # Autocast must not touch the GEMMs inside: their dtypes are the recipe's.
    with torch.autocast(device, enabled=False):
        flat = input.reshape(-1, weight.shape[1])
        draw_or_none = draw if state.stochastic else None
        out = _LinearFunction.apply(flat, weight, bias, draw_or_none, state, dtype, recording, kept)
    if input.dim() == 2:
        return out
    # Not a view: FSDP2 gathers the weight for backward in a hook on what the layer returned, and of a view that is then
    # written to in place autograd drops the hooks.
    return torch.ops.aten._unsafe_view(out, [*input.shape[:-1], weight.shape[0]])


def lower_linear(module: nn.Linear, config: LinearConfig, *, name: str = "", seed: int = 0) -> None:
    """Make ``module`` run ``config``, in place.

    Args:
        module: an ``nn.Linear``, or a subclass that keeps its ``forward``.
        config: formats per path and operand.
        name: the module's name in its model; part of the key of its random streams and of its error messages.
        seed: seed of the random streams.

    Raises:
        NarrowgateError: the module is lowered already, or has a forward of its own.
    """
    if not isinstance(module, LowPrecisionLayer) and type(module).forward is not nn.Linear.forward:
        raise NarrowgateError(f"layer '{name}': {type(module).__name__} has a forward of its own and cannot be swapped")
    swap(module, LowPrecisionLinear, config, name=name, seed=seed, device=module.weight.device)


def restore_linear(module: LowPrecisionLinear) -> None:
    """Undo :func:`lower_linear`: the module is what it was, with the Parameters it has now."""
    restore_layer(module)


def keep_weight_codes(parameters: Iterable[Tensor]) -> dict[str, str]:
    """Quantize weights once for each optimizer step from now on; see :mod:`narrowgate.precision.weight_codes`.

    Memory: the codes stay between forwards, up to two bytes an element of a weight.

    Args:
        parameters: those that a ``torch.optim.Optimizer`` steps; of lowered linear layers.

    Returns:
        The layers among them that quantize their weight at each use all the same, with the reason.
    """
    stepped = {id(parameter) for parameter in parameters}
    obstacles: dict[str, str] = {}
    for layer in live_layers():
        weight = layer._parameters.get("weight")
        if isinstance(layer, LowPrecisionLinear) and weight is not None and id(weight) in stepped:
            state = layer_state(layer)
            obstacle = keep_obstacle(state.config, weight)
            if obstacle is not None:
                obstacles[state.name] = obstacle
            elif state.kept is None:
                state.kept = WeightCodes(state.config, weight)
    return obstacles


def linear_state(module: LowPrecisionLayer) -> dict[str, Tensor]:
    """The layer's recipe state for a checkpoint: its number of the next draw and its amax histories."""
    return layer_state(module).state_dict()


def load_linear_state(module: LowPrecisionLayer, state: dict[str, Tensor]) -> None:
    """Restore what :func:`linear_state` returned."""
    layer_state(module).load_state_dict(state)


class _LinearFunction(torch.autograd.Function):
    """x [M,K], weight [N,K], bias [N] -> y [M,N] of ``dtype``; three GEMMs by ``state.config``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        draw: Tensor | None,
        state: LayerState,
        dtype: torch.dtype,
        recording: bool,
        kept: WeightCodes | None,
    ) -> Tensor:
        config = state.config
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        # Backward multiplies the wgrad input and the dgrad weight: both made now, in the pass that reads the tensor.
        x_fprop, x_wgrad = prepare_both(x, ("fprop", 0), ("wgrad", 1) if needs_dw else None, state, draw, recording)
        # A dense dgrad weight is the weight itself, which lives anyway; so do codes that came from an all-gather.
        # Kept codes are looked up under the weight once more.
        dense_weight = needs_dx and (
            config.dgrad.second.high_precision or isinstance(weight, CodedWeight) or kept is not None
        )
        ctx.state, ctx.x_dtype, ctx.weight_dtype, ctx.recording = state, x.dtype, weight.dtype, recording
        ctx.dense_weight, ctx.kept, ctx.bias_dtype = dense_weight, kept, None if bias is None else bias.dtype
        assert x_fprop is not None
        if kept is not None:
            ctx.layout = save(ctx, [weight if dense_weight else None, x_wgrad, draw])
            return _plus(_multiply_kept(x_fprop, weight, kept, state, "fprop", dtype), bias)
        w_fprop, w_dgrad = prepare_both(
            weight, ("fprop", 1), ("dgrad", 1) if needs_dx and not dense_weight else None, state, draw, recording
        )
        ctx.layout = save(ctx, [weight if dense_weight else w_dgrad, x_wgrad, draw])
        assert w_fprop is not None
        return _plus(_multiply(x_fprop, w_fprop, state, "fprop", dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        state: LayerState = ctx.state
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NarrowgateError(
                f"layer '{state.name}': a low-precision layer has no second derivative; "
                "leave it out of the recipe, or take the gradient without create_graph"
            )
        (dy,) = grads
        recording = ctx.recording
        weight, x_wgrad, draw = restore(ctx.layout, ctx.saved_tensors)
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx = dw = db = None
        with torch.autocast(autocast_device(dy), enabled=False):
            uses = ("dgrad", 0) if needs_dx else None, ("wgrad", 0) if needs_dw else None
            if needs_db:
                dy_dgrad, dy_wgrad, db = prepare_summed(dy, *uses, state, draw, recording)
                db = db.to(ctx.bias_dtype)
            else:
                dy_dgrad, dy_wgrad = prepare_both(dy, *uses, state, draw, recording)
            if dy_dgrad is not None and ctx.kept is not None and ctx.kept.dgrad:
                dx = _multiply_kept(dy_dgrad, weight, ctx.kept, state, "dgrad", ctx.x_dtype)
            elif dy_dgrad is not None:
                if ctx.dense_weight:
                    weight = prepare(weight, 0, "dgrad", 1, state, draw, recording, after=dy)
                dx = _multiply(dy_dgrad, weight, state, "dgrad", ctx.x_dtype)
            if dy_wgrad is not None:
                dw = _multiply(dy_wgrad, x_wgrad, state, "wgrad", ctx.weight_dtype)
        return dx, dw, db, None, None, None, None, None


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias.to(product.dtype)


def _multiply_kept(
    first: Operand, weight: Tensor, kept: WeightCodes, state: LayerState, path: str, dtype: torch.dtype
) -> Tensor:
    assert isinstance(first, QuantizedTensor)
    gemm = getattr(state.config, path)
    return weight_product(first, weight, kept, path, gemm, native=state.native.get(path, False), out_dtype=dtype)


def _multiply(first: Operand, second: Operand, state: LayerState, path: str, dtype: torch.dtype) -> Tensor:
    gemm = getattr(state.config, path)
    if isinstance(first, Tensor):
        # Resolution refuses a GEMM of one quantized and one dense operand.
        assert isinstance(second, Tensor)
        return dense_gemm(first, second, out_dtype=dtype)
    assert isinstance(second, QuantizedTensor)
    return scaled_gemm(first, second, gemm, native=state.native.get(path, False), out_dtype=dtype)
