"""FP8 codes of scaled values rounded stochastically: four at a time, by one integer addition each.

What the format drops, plus (bits + 1/2) / 2**16 of its step, carries into what it keeps where the comparison of
:func:`narrowgate.precision.rounding.round_stochastic` rounds up. At a scale where the format's subnormal numbers are
FP32's, the same bits are dropped for both kinds, and what is kept is the code. Moved up so that it fills a byte, it
needs no conversion: four are gathered by bytes, and so are their signs.

The codes of NaN are those of some number: the scale of its group is NaN, or becomes it.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides what a kernel takes.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import E4M3, E5M2
from .assembly import stochastic_codes
from .tiles import inside_of

_E4M3, _E4M3_TURNED, _E4M3_CLAMPED, _E4M3_CLAMPED_TURNED, _E5M2, _E5M2_TURNED, _E5M2_CLAMPED, _E5M2_CLAMPED_TURNED = (
    tl.constexpr(stochastic_codes(element, clamped=clamped, turned=turned))
    for element in (E4M3, E5M2)
    for clamped in (False, True)
    for turned in (False, True)
)


@triton.jit
def _codes(x0, x1, x2, x3, w0, w1, MANTISSA: tl.constexpr, CLAMPED: tl.constexpr, TURNED: tl.constexpr):
    """Codes of four scaled values in a word, int32; :func:`~narrowgate.precision.kernels.assembly.stochastic_codes`.

    CLAMPED: values may be past the largest one, and saturate. Scales of the values' own maximum never leave one as far
    past it as would carry.
    """
    tl.static_assert(MANTISSA == 3 or MANTISSA == 2, "stochastic codes are those of E4M3 or E5M2")
    e4m3: tl.constexpr = (
        (_E4M3_CLAMPED_TURNED if TURNED else _E4M3_CLAMPED) if CLAMPED else (_E4M3_TURNED if TURNED else _E4M3)
    )
    e5m2: tl.constexpr = (
        (_E5M2_CLAMPED_TURNED if TURNED else _E5M2_CLAMPED) if CLAMPED else (_E5M2_TURNED if TURNED else _E5M2)
    )
    text: tl.constexpr = e4m3 if MANTISSA == 3 else e5m2
    return tl.inline_asm_elementwise(
        text, "=r,r,r,r,r,r,r", [x0, x1, x2, x3, w0, w1], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def store_codes(
    codes, x, words, m, tile_n, piece, M, N, PIECES: tl.constexpr, MANTISSA: tl.constexpr, CLAMPED: tl.constexpr,
    WORDS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store a tile's codes row-major.

    Args:
        codes: pointer to the codes, FP8 [M, N * PIECES].
        x: scaled values, FP32 [BM, BN].
        words: their random bits, [BM, BN / 2], as :func:`~narrowgate.precision.kernels.rounding.tile_words` gives them.
        m: the tile's rows, int64 [BM].
        tile_n: number of the tile along the columns of ``piece``, one of PIECES matrices side by side.
        piece: see there.
        M: rows.
        N: columns of a piece.
        PIECES: see there.
        MANTISSA: bits of the format's mantissa.
        CLAMPED: see :func:`_codes`.
        WORDS: N is a multiple of 4, so that codes can be stored by fours.
        EVEN: tiles divide the matrix.
        BM: rows of the tile.
        BN: its columns.
    """
    even, odd = tl.split(tl.reshape(x, [BM, BN // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    w0, w1 = tl.split(tl.reshape(words, [BM, BN // 4, 2]))
    found = _codes(x0, x1, x2, x3, w0, w1, MANTISSA, CLAMPED, False)
    inside_m = inside_of(m, M, EVEN)
    if WORDS:
        n = tile_n * (BN // 4) + tl.arange(0, BN // 4)
        at = m[:, None] * (N * PIECES // 4) + (piece * (N // 4) + n)[None, :]
        inside = inside_m[:, None] & inside_of(n, N // 4, EVEN)[None, :]
        tl.store(codes.to(tl.pointer_type(tl.int32)) + at, found, mask=inside)
    else:
        each = tl.join(tl.join(found, found >> 16), tl.join(found >> 8, found >> 24)).to(tl.int8)
        n = tile_n * BN + tl.arange(0, BN)
        at = m[:, None] * (N * PIECES) + (piece * N + n)[None, :]
        inside = inside_m[:, None] & inside_of(n, N, EVEN)[None, :]
        tl.store(codes + at, tl.reshape(each, [BM, BN]).to(codes.dtype.element_ty, bitcast=True), mask=inside)


@triton.jit
def store_turned(
    codes, x, words, tile_m, tile_n, piece, M, N, MANTISSA: tl.constexpr, CLAMPED: tl.constexpr, PAIRS: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store a tile's codes transposed, FP8 [N * PIECES, M].

    Args as of :func:`store_codes`, but that rows of ``x`` and ``words`` are in the order of
    :func:`~narrowgate.precision.kernels.tiles.rows_of`, of the tile of number ``tile_m``, and

    Args:
        PAIRS: M is a multiple of 2, so that codes can be stored by twos.
    """
    upper, lower = tl.split(tl.permute(tl.reshape(x, [2, 2, BM // 4, BN]), (1, 2, 3, 0)))
    x0, x2 = tl.split(tl.reshape(upper, [2, BM // 4, BN // 2, 2]))
    x1, x3 = tl.split(tl.reshape(lower, [2, BM // 4, BN // 2, 2]))
    w0, w1 = tl.split(tl.permute(tl.reshape(words, [2, 2, BM // 4, BN // 2]), (1, 2, 3, 0)))
    # Of two rows in two columns.
    found = _codes(x0, x1, x2, x3, w0, w1, MANTISSA, CLAMPED, True)
    columns = tl.join(found.to(tl.int16), (found >> 16).to(tl.int16))
    rows = tl.reshape(tl.permute(columns, (2, 3, 1, 0)), [BN, BM // 2])
    n = tile_n * BN + tl.arange(0, BN)
    inside_n = inside_of(n, N, EVEN)
    at_n = (piece * N + n).to(tl.int64)[:, None]
    if PAIRS:
        m = tile_m.to(tl.int64) * (BM // 2) + tl.arange(0, BM // 2)
        inside = inside_n[:, None] & inside_of(m, M // 2, EVEN)[None, :]
        tl.store(codes.to(tl.pointer_type(tl.int16)) + at_n * (M // 2) + m[None, :], rows, mask=inside)
    else:
        each = tl.reshape(tl.join(rows, rows >> 8), [BN, BM]).to(tl.int8)
        m = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
        inside = inside_n[:, None] & inside_of(m, M, EVEN)[None, :]
        tl.store(codes + at_n * M + m[None, :], each.to(codes.dtype.element_ty, bitcast=True), mask=inside)
