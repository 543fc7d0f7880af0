"""FP8 casts of a matrix along one or both contraction axes, in one pass over memory where the scales allow it.

Two kernels. ``_amax`` reads the values once and leaves partial maxima: of the whole, by row, or by column. ``_cast``
reads them once, turns partial maxima (or a history, or its own tile's maximum) into scales, and writes codes
row-major (operand of a contraction over columns), transposed (of a contraction over rows, which Hopper's matrix units
want contiguous), or both. "Values" are what a :mod:`program <narrowgate.precision.kernels.program>` computes.

Passes over the values: one for ``128``-blocks, whose maximum fits a tile, and for delayed scales; two for dynamic
``tensor`` and ``row`` scales.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import (
    GIVEN_BITS,
    PHILOX,
    clip_amax,
    clip_to,
    encode,
    magnitude_bits,
    multiplier_of,
    scale_of,
    tile_bits,
)

#: What one scale of an operand reaches: nothing (the operand is not asked for), all, a row of the operand, or a block.
ABSENT, TENSOR, ROW, BLOCK, SQUARE = (tl.constexpr(i) for i in range(5))


@triton.jit
def _largest(history, length, LENGTH: tl.constexpr):
    """Largest entry of an amax history, FP32; 0 while it holds none."""
    at = tl.arange(0, LENGTH)
    return tl.max(tl.load(history + at, mask=at < length, other=0.0), 0)


@triton.jit
def amax_kernel(
    leaves, strides, M, N, tensor_out, row_out, column_out, history, history_length,
    TILE: tl.constexpr, PIECES: tl.constexpr, BY_TENSOR: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    HISTORY: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Partial maxima as magnitude bits: [programs], [tiles along columns, M] and [programs along rows, N * PIECES].

    With HISTORY it does nothing where the history holds an entry: the cast will not ask.
    """
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    if HISTORY and _largest(history, history_length, HISTORY) > 0:
        return
    n = pid_n * BN + tl.arange(0, BN)
    inside_n = n < N
    total = tl.zeros([BM], tl.int32)
    if BY_COLUMN:
        # Piece by piece, so that one accumulator is enough; what another piece loaded is still in cache.
        for p in tl.static_range(PIECES):
            columns = tl.zeros([BN], tl.int32)
            for i in range(LOOP):
                m = (pid_m * LOOP + i).to(tl.int64) * BM + tl.arange(0, BM)
                inside_m = m < M
                values = TILE(leaves, strides, m, n, inside_m, inside_n, ALIGNED)
                bits = magnitude_bits(tl.where(inside_m[:, None] & inside_n[None, :], values[p], 0.0))
                columns = tl.maximum(columns, tl.max(bits, 0))
                if BY_TENSOR or BY_ROW:
                    rows = tl.max(bits, 1)
                    total = tl.maximum(total, rows)
                    if BY_ROW:
                        tl.store(row_out + (p * tl.num_programs(1) + pid_n) * M + m, rows, mask=inside_m)
            tl.store(column_out + pid_m * (N * PIECES) + p * N + n, columns, mask=inside_n)
    else:
        for i in range(LOOP):
            m = (pid_m * LOOP + i).to(tl.int64) * BM + tl.arange(0, BM)
            inside_m = m < M
            values = TILE(leaves, strides, m, n, inside_m, inside_n, ALIGNED)
            for p in tl.static_range(PIECES):
                bits = magnitude_bits(tl.where(inside_m[:, None] & inside_n[None, :], values[p], 0.0))
                rows = tl.max(bits, 1)
                total = tl.maximum(total, rows)
                if BY_ROW:
                    tl.store(row_out + (p * tl.num_programs(1) + pid_n) * M + m, rows, mask=inside_m)
    if BY_TENSOR:
        tl.store(tensor_out + pid_m * tl.num_programs(1) + pid_n, tl.max(total, 0))


@triton.jit
def _over_all(partials, count, WIDTH: tl.constexpr):
    """The maximum of ``count`` partial maxima."""
    at = tl.arange(0, WIDTH)
    largest = tl.zeros([WIDTH], tl.int32)
    for first in range(0, count, WIDTH):
        largest = tl.maximum(largest, tl.load(partials + first + at, mask=first + at < count, other=0))
    return tl.max(largest, 0)


@triton.jit
def _over_parts(partials, count, stride, at, inside):
    """Maxima over ``count`` rows, ``stride`` apart, of partial maxima at the positions ``at``."""
    largest = tl.load(partials + at, mask=inside, other=0)
    for part in range(1, count):
        largest = tl.maximum(largest, tl.load(partials + part * stride + at, mask=inside, other=0))
    return largest


@triton.jit
def cast_kernel(
    leaves, strides, M, N,
    r_codes, r_scale, r_amax, r_parts, r_limit, r_key, r_bits,
    c_codes, c_scale, c_amax, c_parts, c_limit, c_key, c_bits,
    history, history_length, pending, saturated, workspace,
    TILE: tl.constexpr, PIECES: tl.constexpr,
    R: tl.constexpr, R_SR: tl.constexpr, R_MAX: tl.constexpr, R_MANTISSA: tl.constexpr, R_BIAS: tl.constexpr,
    R_POW2: tl.constexpr, R_CLIP: tl.constexpr,
    C: tl.constexpr, C_SR: tl.constexpr, C_MAX: tl.constexpr, C_MANTISSA: tl.constexpr, C_BIAS: tl.constexpr,
    C_POW2: tl.constexpr, C_CLIP: tl.constexpr,
    SAME: tl.constexpr, HISTORY: tl.constexpr, RECORD: tl.constexpr, OVERFLOW: tl.constexpr,
    STEPWISE: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Quantize [M, N * PIECES] values: the operand contracted over columns (``r_``), over rows (``c_``), or both.

    With SAME the second is the first, transposed. With HISTORY there is one set of codes, R's if present, whose scale
    comes from the history; the last program to finish makes the scale NaN where a value was not finite, and, with
    RECORD, enters the amax into ``pending``.
    """
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    m = pid_m.to(tl.int64) * BM + tl.arange(0, BM)
    n = pid_n * BN + tl.arange(0, BN)
    inside_m, inside_n = m < M, n < N
    inside = inside_m[:, None] & inside_n[None, :]
    width = N * PIECES
    values = TILE(leaves, strides, m, n, inside_m, inside_n, ALIGNED)
    own = tl.zeros([BM], tl.int32)
    overflowed = tl.zeros([BM], tl.int32)

    tensor_scale = 1.0
    if R == TENSOR:
        tensor_scale = _tensor_scale(r_amax, r_parts, r_limit, history, history_length, R_MAX, R_POW2, R_CLIP, HISTORY)
        if not HISTORY:
            tl.store(r_scale, tensor_scale, mask=(pid_m == 0) & (pid_n == 0))
    column_tensor_scale = tensor_scale
    if C == TENSOR and not SAME:
        column_tensor_scale = _tensor_scale(
            c_amax, c_parts, c_limit, history, history_length, C_MAX, C_POW2, C_CLIP, HISTORY
        )
        if not HISTORY:
            tl.store(c_scale, column_tensor_scale, mask=(pid_m == 0) & (pid_n == 0))

    for p in tl.static_range(PIECES):
        v = tl.where(inside, values[p], 0.0)
        column = p * N + n
        if R != ABSENT:
            x = clip_to(v, tl.load(r_limit)) if R_CLIP else v
            if R == TENSOR:
                scale = tl.full([BM, 1], tensor_scale, tl.float32)
            elif R == ROW:
                bits = _over_parts(r_amax, r_parts, M, m, inside_m)
                if R_CLIP:
                    bits = clip_amax(bits, tl.load(r_limit))
                rows = scale_of(bits, R_MAX, R_POW2)
                if p == 0:
                    tl.store(r_scale + m, rows, mask=inside_m & (pid_n == 0))
                scale = rows[:, None]
            elif R == BLOCK:
                rows = scale_of(tl.max(magnitude_bits(x), 1), R_MAX, R_POW2)
                # [blocks, M]: how the matrix units read it.
                tl.store(r_scale + ((p * N + pid_n * BN) // 128).to(tl.int64) * M + m, rows, mask=inside_m)
                scale = rows[:, None]
            else:
                block = scale_of(tl.max(magnitude_bits(x)), R_MAX, R_POW2)
                tl.store(r_scale + pid_m * tl.cdiv(width, 128) + (p * N + pid_n * BN) // 128, block)
                scale = tl.full([BM, 1], block, tl.float32)
            x = x * multiplier_of(scale)
            random = _random(r_key, r_bits, m, p * N + pid_n * BN, column, width, inside, R_SR, BM, BN)
            codes = encode(x, random, R_MAX, R_MANTISSA, R_BIAS, R_SR, STEPWISE, r_codes.dtype.element_ty)
            tl.store(r_codes + m[:, None] * width + column[None, :], codes, mask=inside)
            if SAME:
                at = column.to(tl.int64)[:, None] * M + m[None, :]
                tl.store(c_codes + at, tl.trans(codes), mask=inside_n[:, None] & inside_m[None, :])
            if HISTORY:
                own, overflowed = _observe(v, x, own, overflowed, r_limit, OVERFLOW, R_CLIP)
        if C != ABSENT and not SAME:
            x = clip_to(v, tl.load(c_limit)) if C_CLIP else v
            if C == TENSOR:
                scale = tl.full([1, BN], column_tensor_scale, tl.float32)
            elif C == ROW:
                bits = _over_parts(c_amax, c_parts, width, column, inside_n)
                if C_CLIP:
                    bits = clip_amax(bits, tl.load(c_limit))
                columns = scale_of(bits, C_MAX, C_POW2)
                tl.store(c_scale + column, columns, mask=inside_n & (pid_m == 0))
                scale = columns[None, :]
            elif C == BLOCK:
                columns = scale_of(tl.max(magnitude_bits(x), 0), C_MAX, C_POW2)
                tl.store(c_scale + pid_m.to(tl.int64) * width + column, columns, mask=inside_n)
                scale = columns[None, :]
            else:
                block = scale_of(tl.max(magnitude_bits(x)), C_MAX, C_POW2)
                tl.store(c_scale + pid_m * tl.cdiv(width, 128) + (p * N + pid_n * BN) // 128, block)
                scale = tl.full([1, BN], block, tl.float32)
            x = x * multiplier_of(scale)
            random = _random(c_key, c_bits, m, p * N + pid_n * BN, column, width, inside, C_SR, BM, BN)
            codes = encode(x, random, C_MAX, C_MANTISSA, C_BIAS, C_SR, STEPWISE, c_codes.dtype.element_ty)
            at = column.to(tl.int64)[:, None] * M + m[None, :]
            tl.store(c_codes + at, tl.trans(codes), mask=inside_n[:, None] & inside_m[None, :])
            if HISTORY:
                own, overflowed = _observe(v, x, own, overflowed, c_limit, OVERFLOW, C_CLIP)

    if HISTORY:
        if RECORD:
            count = tl.sum(overflowed, 0)
            if count > 0:
                tl.atomic_add(saturated, count.to(tl.int64))
        tl.atomic_max(workspace, tl.max(own, 0))
        if tl.atomic_add(workspace + 1, 1) == tl.num_programs(0) * tl.num_programs(1) - 1:
            amax = tl.atomic_max(workspace, 0)
            finite = amax < 0x7F800000
            tl.store(r_scale, tl.where(finite, column_tensor_scale, float("nan")))
            if RECORD:
                known = tl.where(finite, amax.to(tl.float32, bitcast=True), -1.0)
                tl.store(pending, tl.maximum(tl.load(pending), known))
            # Left as it was found, for the next launch.
            tl.atomic_xchg(workspace, 0)
            tl.atomic_xchg(workspace + 1, 0)


@triton.jit
def _tensor_scale(amax, parts, limit, history, history_length, LARGEST: tl.constexpr, POW2: tl.constexpr,
                  CLIP: tl.constexpr, HISTORY: tl.constexpr):  # fmt: skip
    known = 0.0
    if HISTORY:
        known = _largest(history, history_length, HISTORY)
    if known > 0:
        bits = known.to(tl.int32, bitcast=True)
    else:
        bits = _over_all(amax, parts, 1024)
        if CLIP:
            bits = clip_amax(bits, tl.load(limit))
    return scale_of(bits, LARGEST, POW2)


@triton.jit
def _random(key, bits, m, first, column, width, inside, MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    if MODE == PHILOX:
        return tile_bits(tl.load(key), m, first, width, BM, BN)
    elif MODE == GIVEN_BITS:  # noqa: RET505 - a branch not taken must not be compiled, so one return a branch
        return tl.load(bits + m[:, None] * width + column[None, :], mask=inside, other=0).to(tl.int32) & 0xFFFF
    else:
        return tl.zeros([1, 1], tl.int32)


@triton.jit
def _observe(v, scaled, own, overflowed, limit, OVERFLOW: tl.constexpr, CLIP: tl.constexpr):
    bits = tl.max(magnitude_bits(v), 1)
    if CLIP:
        bits = clip_amax(bits, tl.load(limit))
    past = (tl.abs(scaled) > OVERFLOW) & (tl.abs(scaled) < float("inf"))
    return tl.maximum(own, bits), overflowed + tl.sum(past.to(tl.int32), 1)
