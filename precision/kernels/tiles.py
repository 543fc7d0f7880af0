"""Tiles of a matrix: which elements lie inside, and how a tile is turned."""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides what a kernel takes.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inside_of(at, size, EVEN: tl.constexpr):
    """Which positions lie inside; with EVEN, all of them, which compiles to no mask at all."""
    if EVEN:
        return tl.full(at.shape, True, tl.int1)
    else:  # noqa: RET505 - a branch not taken must not be compiled, so one return a branch
        return at < size


@triton.jit
def rows_of(BM: tl.constexpr, TURNED: tl.constexpr):
    """The rows of a tile in the order in which it holds them, int32 [BM].

    Where codes are turned, four neighbours lie a quarter of the tile apart. Triton gives a thread rows that far apart,
    so that it holds neighbours, and what it stores to turn a tile is wider than a byte.
    """
    at = tl.arange(0, BM)
    if TURNED:
        return at % (BM // 4) * 4 + at // (BM // 4) % 2 * 2 + at // (BM // 2)
    else:  # noqa: RET505 - a branch not taken must not be compiled, so one return a branch
        return at


@triton.jit
def turned(x, dtype: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """FP32 ``x`` [BM, BN], rows in the order of :func:`rows_of`, as codes [BN, BM] in the order of the matrix.

    It converts anew, two rows at a time. That needs no shuffling of bytes, and ptxas (CUDA 12.8 to 13.0) stores wrong
    bytes where one conversion's result is stored both packed along the row and byte by byte.
    """
    even, odd = tl.split(tl.permute(tl.reshape(x, [2, 2, BM // 4, BN]), (1, 2, 3, 0)))
    codes = tl.join(even, odd).to(dtype)
    return tl.reshape(tl.permute(codes, (2, 1, 0, 3)), [BN, BM])
