"""One operand of a tile: its scale, what it is rounded by, its codes, and where they go."""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides what a kernel takes.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import (
    GIVEN_BITS,
    NEAREST,
    PHILOX,
    magnitude_bits,
    multiplier_of,
    rounded_to,
    scale_of,
    tile_bits,
    tile_words,
)
from .stochastic_codes import store_codes, store_turned
from .tiles import inside_of, turned

#: What one scale of an operand reaches: nothing (the operand is not asked for), all, a row of the operand, or a block.
ABSENT, TENSOR, ROW, BLOCK, SQUARE = (tl.constexpr(i) for i in range(5))


@triton.jit
def rows_operand(
    x, codes, scale, key, bits, tensor_scale, turned_codes, m, tile_m, tile_n, piece, M, N, PIECES: tl.constexpr,
    KIND: tl.constexpr, SR: tl.constexpr, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    POW2: tl.constexpr, SAME: tl.constexpr, CLAMPED: tl.constexpr, STEPWISE: tl.constexpr, WORDS: tl.constexpr,
    PAIRS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Quantize FP32 ``x`` [BM, BN], clipped, as part of the operand that is contracted over columns."""
    n = tile_n * BN + tl.arange(0, BN)
    inside_m, inside_n = inside_of(m, M, EVEN), inside_of(n, N, EVEN)
    inside = inside_m[:, None] & inside_n[None, :]
    width, first, column = N * PIECES, piece * N + tile_n * BN, piece * N + n
    if KIND == TENSOR:
        multiplier = tl.full([BM, 1], multiplier_of(tensor_scale), tl.float32)
    elif KIND == ROW:
        multiplier = multiplier_of(tl.load(scale + m, mask=inside_m, other=1.0))[:, None]
    elif KIND == BLOCK:
        rows = scale_of(tl.max(magnitude_bits(x), 1), LARGEST, POW2)
        # [blocks, M]: how the matrix units read it.
        tl.store(scale + (first // 128).to(tl.int64) * M + m, rows, mask=inside_m)
        multiplier = multiplier_of(rows)[:, None]
    else:
        block = scale_of(tl.max(magnitude_bits(x)), LARGEST, POW2)
        tl.store(scale + tile_m * tl.cdiv(width, 128) + first // 128, block, mask=tile_m * BM < M)
        multiplier = tl.full([BM, 1], multiplier_of(block), tl.float32)
    scaled = x * multiplier
    random = _random(key, bits, m, first, column, width, inside, SR, STEPWISE, BM, BN)
    if SR != NEAREST and not STEPWISE:
        store_codes(codes, scaled, random, m, tile_n, piece, M, N, PIECES, MANTISSA, CLAMPED, WORDS, EVEN, BM, BN)
        if SAME:
            store_turned(
                turned_codes, scaled, random, tile_m, tile_n, piece, M, N, MANTISSA, CLAMPED, PAIRS, EVEN, BM, BN
            )
    else:
        rounded = rounded_to(scaled, random, LARGEST, MANTISSA, BIAS, SR, STEPWISE)
        tl.store(codes + m[:, None] * width + column[None, :], rounded.to(codes.dtype.element_ty), mask=inside)
        if SAME:
            _store_turned_nearest(turned_codes, rounded, tile_m, column, inside_n, M, EVEN, BM, BN)


@triton.jit
def columns_operand(
    x, codes, scale, key, bits, tensor_scale, m, tile_m, tile_n, piece, M, N, PIECES: tl.constexpr, KIND: tl.constexpr,
    SR: tl.constexpr, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, POW2: tl.constexpr,
    CLAMPED: tl.constexpr, STEPWISE: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Quantize FP32 ``x`` [BM, BN], clipped, as part of the operand that is contracted over rows, which lies turned."""
    n = tile_n * BN + tl.arange(0, BN)
    inside_m, inside_n = inside_of(m, M, EVEN), inside_of(n, N, EVEN)
    width, first, column = N * PIECES, piece * N + tile_n * BN, piece * N + n
    if KIND == TENSOR:
        multiplier = tl.full([1, BN], multiplier_of(tensor_scale), tl.float32)
    elif KIND == ROW:
        multiplier = multiplier_of(tl.load(scale + column, mask=inside_n, other=1.0))[None, :]
    elif KIND == BLOCK:
        columns = scale_of(tl.max(magnitude_bits(x), 0), LARGEST, POW2)
        tl.store(scale + tile_m.to(tl.int64) * width + column, columns, mask=inside_n & (tile_m * BM < M))
        multiplier = multiplier_of(columns)[None, :]
    else:
        block = scale_of(tl.max(magnitude_bits(x)), LARGEST, POW2)
        tl.store(scale + tile_m * tl.cdiv(width, 128) + first // 128, block, mask=tile_m * BM < M)
        multiplier = tl.full([1, BN], multiplier_of(block), tl.float32)
    scaled = x * multiplier
    random = _random(key, bits, m, first, column, width, inside_m[:, None] & inside_n[None, :], SR, STEPWISE, BM, BN)
    if SR != NEAREST and not STEPWISE:
        store_turned(codes, scaled, random, tile_m, tile_n, piece, M, N, MANTISSA, CLAMPED, PAIRS, EVEN, BM, BN)
    else:
        rounded = rounded_to(scaled, random, LARGEST, MANTISSA, BIAS, SR, STEPWISE)
        _store_turned_nearest(codes, rounded, tile_m, column, inside_n, M, EVEN, BM, BN)


@triton.jit
def _store_turned_nearest(
    codes, rounded, tile_m, column, inside_n, M, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    m = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    inside = inside_n[:, None] & inside_of(m, M, EVEN)[None, :]
    at = column.to(tl.int64)[:, None] * M + m[None, :]
    tl.store(codes + at, turned(rounded, codes.dtype.element_ty, BM, BN), mask=inside)


@triton.jit
def _random(
    key, bits, m, first, column, width, inside, MODE: tl.constexpr, STEPWISE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Random bits of a tile: 16 an element where it is rounded step by step, else words of two elements'."""
    if MODE == PHILOX:
        if STEPWISE:
            return tile_bits(tl.load(key), m, first, width, BM, BN)
        else:  # noqa: RET505 - a branch not taken must not be compiled, so one return a branch
            return tile_words(tl.load(key), m, first, width, BM, BN)
    elif MODE == GIVEN_BITS:
        given = tl.load(bits + m[:, None] * width + column[None, :], mask=inside, other=0).to(tl.int32) & 0xFFFF
        if STEPWISE:
            return given
        else:  # noqa: RET505 - a branch not taken must not be compiled, so one return a branch
            even, odd = tl.split(tl.reshape(given, [BM, BN // 2, 2]))
            return even | (odd << 16)
    else:
        return tl.zeros([1, 1], tl.int32)
