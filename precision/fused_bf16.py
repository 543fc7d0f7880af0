"""BF16 linear layers on the fused cast kernels: the arm that tells what a format gains from what fusion gains.

Lowered so, a layer multiplies in BF16 as it did, but what it multiplies is written by the kernels that would have
quantized it: under ``torch.compile`` on a GPU the same producers move into the same places
(:mod:`narrowgate.precision.fusion`), and only the format differs. In eager mode nothing moves and the layer is an
ordinary one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import cast_operators as cast_operators  # registers the operators
from .config import LinearConfig
from .errors import NarrowgateError
from .gemm import dense_gemm
from .kernels.program import IDENTITY
from .layer import LowPrecisionLayer, autocast_device, swap

_BF16 = torch.bfloat16


class FusedBF16Linear(LowPrecisionLayer, nn.Linear):
    """An ``nn.Linear`` whose operands fused kernels write in BF16; made by :func:`lower_fused_bf16`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return x Wᵀ + bias: [..., N] for an input of [..., K], in autocast's dtype where that is on."""
        device = autocast_device(input)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        with torch.autocast(device, enabled=False):
            out = _FusedBF16Function.apply(input.reshape(-1, self.in_features), self.weight, dtype)
            if self.bias is not None:
                out = out + self.bias.to(dtype)
        return out.reshape(*input.shape[:-1], self.out_features)


def lower_fused_bf16(module: nn.Linear, *, name: str = "") -> None:
    """Make ``module`` a :class:`FusedBF16Linear`, in place; :func:`narrowgate.precision.restore_linear` undoes it.

    Args:
        module: an ``nn.Linear`` that keeps its ``forward``.
        name: its name in its model, for errors.

    Raises:
        NarrowgateError: the module is lowered already, or has a forward of its own.
    """
    if not isinstance(module, LowPrecisionLayer) and type(module).forward is not nn.Linear.forward:
        raise NarrowgateError(f"layer '{name}': {type(module).__name__} has a forward of its own and cannot be swapped")
    swap(module, FusedBF16Linear, LinearConfig(), name=name, seed=0, device=module.weight.device)


class _FusedBF16Function(torch.autograd.Function):
    """x [M,K], weight [N,K] -> y [M,N] of ``dtype``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        operand, matrix = _written(x), _cast(weight)
        ctx.save_for_backward(operand, matrix)
        ctx.dtypes = x.dtype, weight.dtype
        return dense_gemm(operand, matrix, out_dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operand, matrix = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = dw = None
        with torch.autocast(autocast_device(operand), enabled=False):
            dy = _written(grads[0])
            if needs_dx:
                dx = dense_gemm(dy, matrix.t(), out_dtype=ctx.dtypes[0])
            if needs_dw:
                dw = dense_gemm(dy.t(), operand.t(), out_dtype=ctx.dtypes[1])
        return dx, dw, None


def _written(x: Tensor) -> Tensor:
    """``x`` [M, N] in BF16; within a compiler through the operator that its producers can move into."""
    return torch.ops.narrowgate.write_bf16([x], IDENTITY) if torch.compiler.is_compiling() else _cast(x)


def _cast(x: Tensor) -> Tensor:
    # Not .to() where there is nothing to do: see gemm.as_dtype.
    return x if x.dtype == _BF16 else x.to(_BF16)
