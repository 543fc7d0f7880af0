"""The FP8 cast by blocks of 1x128 both ways, each operand by programs of its own.

A tile of 128 x 128 with both operands leaves a multiprocessor room for two programs of eight warps. Here eight programs
of four warps take it, four with 32 rows each for the operand contracted over columns and four with 32 columns each for
the other. They follow one another, so that the second reading of the values can find them in L2.

The arguments are those of :func:`~narrowgate.precision.kernels.cast.cast_kernel`, in its place: one launch serves both.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides what a kernel takes.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from .cast_operands import columns_operand, rows_operand
from .tiles import inside_of, rows_of


@triton.jit
def cast_apart_kernel(
    leaves, strides, M, N,
    r_codes, r_scale, r_limit, r_key, r_bits,
    c_codes, c_scale, c_limit, c_key, c_bits,
    amax, parts, squares, sums, history, history_length, pending, saturated, workspace,
    TILE: tl.constexpr, ALONG: tl.constexpr, PIECES: tl.constexpr,
    R: tl.constexpr, R_SR: tl.constexpr, R_MAX: tl.constexpr, R_MANTISSA: tl.constexpr, R_BIAS: tl.constexpr,
    R_POW2: tl.constexpr, R_CLIP: tl.constexpr, R_RMS: tl.constexpr,
    C: tl.constexpr, C_SR: tl.constexpr, C_MAX: tl.constexpr, C_MANTISSA: tl.constexpr, C_BIAS: tl.constexpr,
    C_POW2: tl.constexpr, C_CLIP: tl.constexpr, C_RMS: tl.constexpr,
    SAME: tl.constexpr, SUMS: tl.constexpr, HISTORY: tl.constexpr, RECORD: tl.constexpr, OVERFLOW: tl.constexpr,
    STEPWISE: tl.constexpr, APART: tl.constexpr, WORDS: tl.constexpr, PAIRS: tl.constexpr, ALONE: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """As :func:`~narrowgate.precision.kernels.cast.cast_kernel`, of plain values, both operands by blocks of 1x128."""
    EACH: tl.constexpr = 128 // BM
    pid, block_n = tl.program_id(0), tl.program_id(1)
    part, block_m = pid % (2 * EACH), pid // (2 * EACH)
    if part < EACH:
        tile_m = block_m * EACH + part
        r_m = tile_m.to(tl.int64) * BM + rows_of(BM, False)
        r_n = block_n * 128 + tl.arange(0, 128)
        r_inside_m, r_inside_n = inside_of(r_m, M, EVEN), inside_of(r_n, N, EVEN)
        r_v = TILE(leaves, strides, r_m, r_n, r_inside_m, r_inside_n, ALIGNED)[0]
        r_v = tl.where(r_inside_m[:, None] & r_inside_n[None, :], r_v, 0.0)
        rows_operand(
            r_v, r_codes, r_scale, r_key, r_bits, 1.0, c_codes, r_m, tile_m, block_n, 0, M, N, 1, R, R_SR, R_MAX,
            R_MANTISSA, R_BIAS, R_POW2, False, False, STEPWISE, WORDS, PAIRS, EVEN, BM, 128,
        )  # fmt: skip
    else:
        tile_n = block_n * EACH + part - EACH
        c_m = block_m.to(tl.int64) * 128 + rows_of(128, True)
        c_n = tile_n * BM + tl.arange(0, BM)
        c_inside_m, c_inside_n = inside_of(c_m, M, EVEN), inside_of(c_n, N, EVEN)
        c_v = TILE(leaves, strides, c_m, c_n, c_inside_m, c_inside_n, ALIGNED)[0]
        c_v = tl.where(c_inside_m[:, None] & c_inside_n[None, :], c_v, 0.0)
        columns_operand(
            c_v, c_codes, c_scale, c_key, c_bits, 1.0, c_m, block_m, tile_n, 0, M, N, 1, C, C_SR, C_MAX, C_MANTISSA,
            C_BIAS, C_POW2, False, STEPWISE, PAIRS, EVEN, 128, BM,
        )  # fmt: skip
