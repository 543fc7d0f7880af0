"""What becomes of partial results that the programs of a cast leave: scales of rows, and sums of columns.

Maxima and sums of squares give the scales and the magnitude at which values are clipped. The sum of a column is a
layer's bias gradient where the matrix is the gradient of its output, which its cast reads anyway: each program of the
pass leaves a row of partial sums of its own, FP32, which are added in one order: nothing is atomic, and the same tiles
give the same bits. Other tiles (see :mod:`narrowgate.precision.kernels.tuning`) add in another order.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import clip_amax, rms_limit, scale_of

#: At what magnitude an operand is clipped: none, one that the caller gives, or a multiple of the values' RMS.
NO_LIMIT, GIVEN_LIMIT, RMS_LIMIT = (tl.constexpr(i) for i in range(3))
#: Partial sums and columns that a program of :func:`quantized_sums_kernel` adds at a time.
SUMS_TILE = (128, 32)
#: Up to as many results side by side, a program keeps the sums of its tiles in registers; of more, each tile leaves its
#: own.
SUMMED_PIECES = 2


@triton.jit
def over_all(partials, count, WIDTH: tl.constexpr):
    """The maximum of ``count`` partial maxima."""
    at = tl.arange(0, WIDTH)
    largest = tl.zeros([WIDTH], tl.int32)
    for first in range(0, count, WIDTH):
        largest = tl.maximum(largest, tl.load(partials + first + at, mask=first + at < count, other=0))
    return tl.max(largest, 0)


@triton.jit
def bound_of(limit, squares, parts, elements, CLIP: tl.constexpr, RMS: tl.constexpr):
    """The magnitude at which values are clipped; infinite where they are not."""
    if CLIP == GIVEN_LIMIT:
        return tl.load(limit)
    elif CLIP == RMS_LIMIT:  # noqa: RET505 - a branch not taken must not be compiled, so one return a branch
        return rms_limit(squares, parts, elements, RMS)
    else:
        return tl.full([], float("inf"), tl.float32)


@triton.jit
def scale_kernel(
    partials, scale, limit, parts, size, squares, squares_parts, elements,
    MAX: tl.constexpr, POW2: tl.constexpr, CLIP: tl.constexpr, RMS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Scales [size] from partial maxima [parts, size]; see :func:`bound_of` for what clips them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (at < size)[None, :]
        found = tl.load(partials + part.to(tl.int64)[:, None] * size + at[None, :], mask=inside, other=0)
        largest = tl.maximum(largest, tl.max(found, 0))
    if CLIP != NO_LIMIT:
        largest = clip_amax(largest, bound_of(limit, squares, squares_parts, elements, CLIP, RMS))
    tl.store(scale + at, scale_of(largest, MAX, POW2), mask=at < size)


@triton.jit
def of_rows(x, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Sums [ROWS, BN] of the rows of ``x`` [BM, BN] that lie ROWS apart."""
    return tl.sum(tl.reshape(x, [BM // ROWS, ROWS, BN]), 0)


@triton.jit
def with_sums(
    added, added_too, x, sums, tile, n, N, inside, p: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The sums so far of both results [ROWS, BN] with those of ``x`` [BM, BN], result ``p`` of row ``tile`` of tiles.

    Of more than two results side by side each tile leaves a row of its own, at columns ``n`` of N.
    """
    if PIECES <= 2 and p == 0:
        added += of_rows(x, ROWS, BM, BN)
    elif PIECES <= 2:
        added_too += of_rows(x, ROWS, BM, BN)
    else:
        part = tile.to(tl.int64) * PIECES + p
        tl.store(sums + part * N + n, tl.sum(of_rows(x, ROWS, BM, BN), 0), mask=inside)
    return added, added_too


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
