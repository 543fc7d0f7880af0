"""Two FP4 codes a byte along the contraction: the even element in the low nibble, as torchao and cuBLAS have it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pack_fp4(codes: Tensor, dim: int = -1) -> Tensor:
    """Pack 4-bit codes (uint8, one a byte) in pairs along ``dim``: length n becomes ceil(n / 2).

    Where n is odd, the last byte's high nibble is 0.
    """
    dim %= codes.dim()
    if codes.shape[dim] % 2:
        codes = F.pad(codes, [0, 0] * (codes.dim() - 1 - dim) + [0, 1])
    pairs = codes.unflatten(dim, (codes.shape[dim] // 2, 2))
    return pairs.select(dim + 1, 0) | (pairs.select(dim + 1, 1) << 4)


def unpack_fp4(packed: Tensor, length: int, dim: int = -1) -> Tensor:
    """Undo :func:`pack_fp4`: uint8 codes, one a byte, ``length`` of them along ``dim``."""
    dim %= packed.dim()
    codes = torch.stack((packed & 0xF, packed >> 4), dim + 1).flatten(dim, dim + 1)
    return codes.narrow(dim, 0, length)
