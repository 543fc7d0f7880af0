"""Activations and norms shared by the model's parts."""

from __future__ import annotations

from collections.abc import Callable

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


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in FP32 and returned in the input's type.

    With ``norm_block`` it is LoKA's BlockNorm (arXiv:2605.10886): each block of features has its own root mean square.
    A zero vector stays zero, which keeps dead tokens dead.
    """

    def __init__(self, width: int, config: GemConfig) -> None:
        super().__init__()
        block = config.norm_block
        self.shape = (width,) if block is None or width % block else (width // block, block)
        self.weight = nn.Parameter(torch.ones(width)) if config.norm_affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` [..., width]."""
        y = x.float().unflatten(-1, self.shape)
        y = F.rms_norm(y, self.shape[-1:], eps=_EPS).flatten(-len(self.shape))
        if self.weight is not None:
            y = y * self.weight
        return y.to(x.dtype)


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
