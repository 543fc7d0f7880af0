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
#: Added to a mean of squares before its root is taken.
EPS = 1e-6


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
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


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


class _Mix(torch.autograd.Function):
    """``weight [n_out, n_in] @ x [B, n_in, d]`` sample by sample, one weight for all: nothing of the size of ``x`` is
    copied or transposed, neither here nor backward.

    ``torch.matmul`` folds the batch into one product of transposed copies instead, whose layout a compiler then hands
    on to everything around it. The weight's gradient is FP32 throughout where operands are 16 bits wide: exact products
    of each sample, added up in FP32, never rounded on the way.
    """

    @staticmethod
    def forward(weight: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.bmm(_columns(weight, dtype).mT.expand(len(x), -1, -1), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (weight, x), grad = ctx.saved_tensors, grads[0]
        of_weight, of_x = None, None
        if ctx.needs_input_grad[0]:
            # [B, n_in, n_out], transposed as the operand is, for the same reason.
            of_weight = _wide_bmm(x, grad.mT).sum(0).mT.to(weight.dtype).contiguous()
        if ctx.needs_input_grad[1]:
            of_x = torch.bmm(_columns(weight, x.dtype).expand(len(x), -1, -1), grad)
        return of_weight, of_x, None


def _columns(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[n_out, n_in] -> [n_in, n_out], contiguous: numbers of outputs are even ones, those of inputs need not be, and
    matrix units ask for leading dimensions of a multiple of 16 bytes.
    """
    return weight.mT.to(dtype).contiguous()


def _wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """``torch.bmm`` of 16-bit operands without rounding the result: FP32."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    # A compiled backward is traced under the forward's autocast, which would lower the operands again.
    with torch.autocast("cpu", enabled=False):
        return torch.bmm(a.float(), b.float())


class TokenMixer(nn.Module):
    """Mixes the token axis: ``[B, n_in, d] -> [B, n_out, d]``, contiguous.

    Tiny on both sides of its GEMM, which no low-precision format pays for: no ``nn.Linear``, so no recipe target.
    """

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        bound = n_in**-0.5
        self.weight = nn.Parameter(torch.empty(n_out, n_in).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``weight @ x`` for every row, in the type of ``x`` or autocast's."""
        kind, dtype = x.device.type, self.weight.dtype
        # The meta device, on which models are only planned, knows no autocast.
        if kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x = x.to(dtype)
        out = _Mix.apply(self.weight, x, dtype)
        assert isinstance(out, Tensor)
        return out
