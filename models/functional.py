"""Activations and norms shared by the model's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import GemConfig

#: By the names of :data:`narrowgate.models.config.ACTIVATIONS`.
ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
}
_EPS = 1e-6


class _UnitRMS(torch.autograd.Function):
    """``x / rms(x)`` over the last axis, FP32 inside. Saves only its input; ten times faster than the composite on
    a CPU, where PyTorch has no fused RMS norm.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        y = wide * _inverse_rms(wide)
        # A cast to the type it has: torch.compile of PyTorch 2.11 drops the gradients of what comes out of it.
        return y if x.dtype == y.dtype else y.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide, grad = x.float(), grads[0].float()
        inverse = _inverse_rms(wide)
        y = wide * inverse
        return (torch.addcmul(grad, y, (grad * y).mean(-1, keepdim=True), value=-1) * inverse).to(x.dtype)


def _inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS)


def unit_rms(x: Tensor) -> Tensor:
    """Return ``x`` over its root mean square along the last axis, in the type of ``x``; zeros stay zeros."""
    out = _UnitRMS.apply(x)
    assert isinstance(out, Tensor)
    return out


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in FP32 and returned in the input's type.

    With ``norm_block`` it is LoKA's BlockNorm (arXiv:2605.10886): each block of features has its own root mean square.
    A zero vector stays zero, which keeps dead tokens dead.
    """

    def __init__(self, width: int, config: GemConfig) -> None:
        super().__init__()
        block = config.norm_block
        self.block = block if block is not None and width % block == 0 else width
        self.weight = nn.Parameter(torch.ones(width)) if config.norm_affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` [..., width]."""
        y = unit_rms(x) if self.block == x.shape[-1] else unit_rms(x.unflatten(-1, (-1, self.block))).flatten(-2)
        return y if self.weight is None else y * self.weight.to(y.dtype)


def linear(inputs: int, outputs: int, config: GemConfig) -> nn.Linear:
    """Return a linear that recipes may lower; its bias follows the configuration."""
    return nn.Linear(inputs, outputs, bias=config.bias)


class TokenMixer(nn.Module):
    """Mixes the token axis: ``[B, n_in, d] -> [B, n_out, d]``.

    Tiny on both sides of its GEMM, which no low-precision format pays for: no ``nn.Linear``, so no recipe target.
    """

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        bound = n_in**-0.5
        self.weight = nn.Parameter(torch.empty(n_out, n_in).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``weight @ x`` for every row."""
        return torch.matmul(self.weight, x)
