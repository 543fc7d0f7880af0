"""Batched products as modules, so that a recipe reaches them: ``MatMul()(a, b)`` instead of ``torch.matmul(a, b)``.

y [..., M, N] = input [..., M, K] · weight [..., K, N]; the paths are those of a linear layer, with the second argument
in the place of the weight: ``fprop`` contracts K, ``dgrad`` (the gradient of the first argument) N, ``wgrad`` (of the
second) M. ``tensor`` reaches over a whole argument, ``row`` over one row of one matrix of the batch.

Products are emulated on every device: operands are quantized, and their codes multiplied in BF16 with FP32
accumulation. No batched FP8 product is wired up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .capability import Support
from .config import GemmConfig, LinearConfig
from .errors import NarrowgateError
from .gemm import as_dtype
from .layer import LayerState, LowPrecisionLayer, autocast_device, placed_state, swap
from .operands import Operand, prepare, restore, save, shared

EMULATED = Support(native=False, reason="no batched low-precision product is wired up")


class MatMul(nn.Module):
    """``torch.matmul`` as a module: a target of recipes, without Parameters."""

    def forward(self, input: Tensor, weight: Tensor) -> Tensor:
        """Return input [..., M, K] · weight [..., K, N] as ``torch.matmul`` does, batch dimensions broadcast."""
        return torch.matmul(input, weight)


class LowPrecisionMatMul(LowPrecisionLayer, MatMul):
    """A :class:`MatMul` that runs a :class:`LinearConfig`; made by :func:`lower_matmul`, never constructed."""

    def forward(self, input: Tensor, weight: Tensor) -> Tensor:
        """Return input [..., M, K] · weight [..., K, N], batch dimensions broadcast, as the recipe says.

        The output has the autocast dtype where autocast is on, else the first argument's.

        Raises:
            NarrowgateError: an argument has less than two dimensions, or the inner ones do not match.
        """
        state = placed_state(self, input)
        if input.dim() < 2 or weight.dim() < 2 or input.shape[-1] != weight.shape[-2]:
            raise NarrowgateError(
                f"{state.name or 'matmul'}: expected [..., M, K] and [..., K, N], "
                f"found {list(input.shape)} and {list(weight.shape)}"
            )
        device = autocast_device(input)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        batch = torch.broadcast_shapes(input.shape[:-2], weight.shape[:-2])
        draw, recording = state.enter(self.training and torch.is_grad_enabled())
        if weight.dim() == 2:  # one matrix for the whole batch: one product of all rows
            first, second = input.flatten(0, -2).unsqueeze(0), weight.unsqueeze(0)
        else:
            first = input.expand(*batch, *input.shape[-2:]).flatten(0, -3)
            second = weight.expand(*batch, *weight.shape[-2:]).flatten(0, -3)
        with torch.autocast(device, enabled=False):
            out = _MatMulFunction.apply(first, second, draw if state.stochastic else None, state, dtype, recording)
        return torch.ops.aten._unsafe_view(out, [*batch, input.shape[-2], weight.shape[-1]])


def matmul_support(gemm: GemmConfig) -> Support:
    """Say how a batched product of ``gemm`` runs, on any device."""
    return Support(native=True) if gemm.high_precision else EMULATED


def lower_matmul(
    module: MatMul, config: LinearConfig, *, name: str = "", seed: int = 0, device: torch.device | str = "cpu"
) -> None:
    """Make ``module`` run ``config``, in place.

    Args:
        module: the product.
        config: formats per path and operand.
        name: the module's name in its model; part of the key of its random streams and of its error messages.
        seed: seed of the random streams.
        device: where it will run; moving its model moves it along.

    Raises:
        NarrowgateError: the module is lowered already, or has a forward of its own.
    """
    if not isinstance(module, LowPrecisionLayer) and type(module).forward is not MatMul.forward:
        raise NarrowgateError(f"layer '{name}': {type(module).__name__} has a forward of its own and cannot be swapped")
    swap(module, LowPrecisionMatMul, config, name=name, seed=seed, device=torch.device(device))


class _MatMulFunction(torch.autograd.Function):
    """x [B,M,K], w [B,K,N] -> [B,M,N] of ``dtype``; three products by ``state.config``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        draw: Tensor | None,
        state: LayerState,
        dtype: torch.dtype,
        recording: bool,
    ) -> Tensor:
        config = state.config
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        x_fprop = prepare(x, 2, "fprop", 0, state, draw, recording)
        w_fprop = prepare(w, 1, "fprop", 1, state, draw, recording)
        x_wgrad = w_dgrad = None
        if needs_dw:
            x_wgrad = shared(x_fprop, config.fprop.first, config.wgrad.second)
            if x_wgrad is None:
                x_wgrad = prepare(x, 1, "wgrad", 1, state, draw, recording)
        if needs_dx:
            w_dgrad = shared(w_fprop, config.fprop.second, config.dgrad.second)
            if w_dgrad is None:
                w_dgrad = prepare(w, 2, "dgrad", 1, state, draw, recording)
        ctx.state, ctx.dtypes, ctx.recording = state, (x.dtype, w.dtype), recording
        ctx.layout = save(ctx, [w_dgrad, x_wgrad, draw])
        return _product(x_fprop, w_fprop, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        state: LayerState = ctx.state
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NarrowgateError(f"layer '{state.name}': a low-precision product has no second derivative")
        (dy,) = grads
        config, recording = state.config, ctx.recording
        w_dgrad, x_wgrad, draw = restore(ctx.layout, ctx.saved_tensors)
        dx = dw = dy_dgrad = dy_wgrad = None
        with torch.autocast(autocast_device(dy), enabled=False):
            if ctx.needs_input_grad[0]:
                dy_dgrad = prepare(dy, 2, "dgrad", 0, state, draw, recording)
                dx = _product(dy_dgrad, w_dgrad, ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                if dy_dgrad is not None:
                    dy_wgrad = shared(dy_dgrad, config.dgrad.first, config.wgrad.first)
                if dy_wgrad is None:
                    dy_wgrad = prepare(dy, 1, "wgrad", 0, state, draw, recording)
                # As a linear layer's weight gradient, [N, K]; the second argument is [K, N].
                dw = _product(dy_wgrad, x_wgrad, ctx.dtypes[1]).mT
        return dx, dw, None, None, None, None


def _product(first: Operand, second: Operand, dtype: torch.dtype) -> Tensor:
    """[B, R, C] · [B, S, C]ᵀ over each operand's contraction axis: [B, R, S] of ``dtype``, accumulated in FP32."""
    if isinstance(first, Tensor):
        assert isinstance(second, Tensor)
        common = torch.promote_types(first.dtype, second.dtype)
        if common == torch.bfloat16:
            return as_dtype(_bmm(first, second), dtype)
        return as_dtype(torch.bmm(first.to(common), second.to(common).mT), dtype)
    assert not isinstance(second, Tensor)
    # Scales that are constant along the contraction are applied to the product in FP32, as for a single matrix.
    factored = {first.spec.granularity, second.spec.granularity} <= {"tensor", "row"}
    a, b = (
        _turned(q.elements(torch.bfloat16) if factored else q.dequantize(torch.bfloat16, rotated=True), q.dim)
        for q in (first, second)
    )
    product = _bmm(a, b)
    if factored:
        assert first.scale is not None
        assert second.scale is not None
        rows = _turned(first.scale, first.dim) if first.scale.dim() else first.scale
        columns = _turned(second.scale, second.dim).mT if second.scale.dim() else second.scale
        product = product * rows * columns
    return as_dtype(product, dtype)


def _turned(x: Tensor, dim: int) -> Tensor:
    return x if dim == 2 else x.mT


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """a [B, R, C] · b [B, S, C]ᵀ for BF16 operands, FP32 [B, R, S]."""
    if a.is_cuda:
        return torch.bmm(a, b.mT, out_dtype=torch.float32)
    # Products of BF16 values are exact in FP32, so an FP32 product of widened operands is the same arithmetic.
    return torch.bmm(a.float(), b.float().mT)
