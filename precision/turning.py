"""The operator through which compilers see transposed codes: ``narrowgate::turned_codes(codes, after)``.

``codes``: [M, N] of one byte an element, FP8 or ``uint8``. It returns them as contiguous [N, M]: on a GPU by a kernel
of ours where M is a multiple of four, as matrix units want anyway, elsewhere as PyTorch does. ``after``: a tensor that
is not read, or None: no compiler turns codes before it is known.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .cast_operators import kernels_on_cpu

_TOGETHER = 4


def turned_codes(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """Return ``codes`` [M, N], one byte an element, as contiguous [N, M], once ``after`` is known."""
    return torch.ops.narrowgate.turned_codes(codes, after)


@cache
def _launcher() -> Any:
    from .kernels.turn import launch_turn

    return launch_turn


def _turned(codes: Tensor, after: Tensor | None) -> Tensor:
    if codes.shape[0] % _TOGETHER:
        return codes.t().clone(memory_format=torch.contiguous_format)
    return _launcher()(codes.contiguous().view(torch.uint8)).view(codes.dtype)


def _turned_on_cpu(codes: Tensor, after: Tensor | None) -> Tensor:
    return _turned(codes, after) if kernels_on_cpu() else codes.t().clone(memory_format=torch.contiguous_format)


def _turned_fake(codes: Tensor, after: Tensor | None) -> Tensor:
    return codes.new_empty((codes.shape[1], codes.shape[0]))


_LIBRARY = torch.library.Library("narrowgate", "FRAGMENT")
_LIBRARY.define("turned_codes(Tensor codes, Tensor? after) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("turned_codes", _turned, "CUDA")
_LIBRARY.impl("turned_codes", _turned_on_cpu, "CPU")
torch.library.register_fake("narrowgate::turned_codes", _turned_fake, lib=_LIBRARY)
