"""Codes of one byte, transposed: [M, N] to [N, M], for a product that contracts over M.

A gathered weight arrives as codes contracted over its columns, and dgrad wants the same codes contiguous along the
other axis (Hopper's matrix units take one layout only). The bytes of four rows are put together in registers before the
tile is turned, so that what crosses shared memory and what is stored are words: 2 M N bytes moved.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import current_for
from .operands import empty
from .tiles import inside_of

_TILE, _WARPS = 128, 4


@triton.jit
def turn_kernel(codes, words, M, N, EVEN: tl.constexpr, TILE: tl.constexpr):
    """Write the columns of uint8 ``codes`` [M, N] as the rows of ``words``, int32 [N, M / 4]."""
    fours = tl.program_id(0).to(tl.int64) * (TILE // 4) + tl.arange(0, TILE // 4)
    n = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = inside_of(fours, M // 4, EVEN)[:, None] & inside_of(n, N, EVEN)[None, :]
    word = tl.zeros([TILE // 4, TILE], tl.int32)
    for row in tl.static_range(4):
        byte = tl.load(codes + (fours * 4 + row)[:, None] * N + n[None, :], mask=inside, other=0)
        word |= byte.to(tl.int32) << (8 * row)
    turned = inside_of(n, N, EVEN)[:, None] & inside_of(fours, M // 4, EVEN)[None, :]
    tl.store(words + n[:, None] * (M // 4) + fours[None, :], tl.trans(word), mask=turned)


def launch_turn(codes: Tensor) -> Tensor:
    """Return uint8 ``codes`` [M, N], contiguous, with M a multiple of 4, as contiguous [N, M]."""
    count, width = codes.shape
    with current_for(codes):
        out = empty((width, count), torch.uint8, codes.device)
        if out.numel():
            grid = triton.cdiv(count, _TILE), triton.cdiv(width, _TILE)
            even = count % _TILE == 0 and width % _TILE == 0
            turn_kernel[grid](codes, out.view(torch.int32), count, width, EVEN=even, TILE=_TILE, num_warps=_WARPS)
    return out
