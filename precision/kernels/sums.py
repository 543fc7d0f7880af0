"""Column sums of what a cast reads, in FP32: partial ones from the pass over the values, then one small kernel.

A layer's bias gradient is the sum over the rows of the gradient that its cast reads anyway. Each program of the pass
leaves a row of partial sums of its own, which are added in one order: nothing is atomic, and the same tiles give the
same bits. Other tiles (see :mod:`narrowgate.precision.kernels.tuning`) add in another order.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

#: Partial sums and columns that a program of :func:`quantized_sums_kernel` adds at a time.
SUMS_TILE = (128, 32)
#: Up to as many results side by side, a program keeps the sums of its tiles in registers; of more, each tile leaves its
#: own.
SUMMED_PIECES = 2


@triton.jit
def of_rows(x, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Sums [ROWS, BN] of the rows of ``x`` [BM, BN] that lie ROWS apart."""
    return tl.sum(tl.reshape(x, [BM // ROWS, ROWS, BN]), 0)


@triton.jit
def quantized_sums_kernel(partials, sums, parts, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums, FP32 [size], of partial sums [parts, size] over the rows of a matrix that is quantized."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (at < size)[None, :]
        total += tl.load(partials + part.to(tl.int64)[:, None] * size + at[None, :], mask=inside, other=0.0)
    tl.store(sums + at, tl.sum(total, 0), mask=at < size)


def partial_rows(bm: int, bn: int, warps: int) -> int:
    """Rows of partial sums that a tile [bm, bn] keeps: a thread has rows that far apart, and adds them by itself.

    A warp has 32 times sixteen neighbours at once, as it stores codes; where it has fewer, these rows lie in it, too.
    """
    return max(1, min(bm, 512 * warps // bn))
