"""Rounding and scales inside Triton kernels: the device functions that every cast kernel shares.

They repeat :mod:`narrowgate.precision.rounding` and :mod:`narrowgate.precision.scaling` bit for bit; what makes those
safe to repeat (exact powers of two, FP64 quotients, no multiply-add pairs) is said there.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides what a kernel takes.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ..stochastic import ROUNDS
from .assembly import philox_words

#: Modes of stochastic rounding of a kernel's operand.
NEAREST, PHILOX, GIVEN_BITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
#: Triton's interpreter runs no assembly.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def magnitude_bits(x):
    """|x| of FP32 ``x`` as int32, in an order in which NaN is above infinity: a maximum that cannot lose a NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def widened(x):
    """A tile ``x`` in FP32.

    Where one instruction of Triton's widened it, Triton would turn the tile before that rather than its codes, and
    compute all that follows twice. BF16 is widened by two instructions a pair, for which compilers take three; the rest
    in two halves of its columns.
    """
    if x.dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:  # noqa: RET505 - a branch not taken must not be compiled, so one return a branch
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        return tl.reshape(tl.join(even.to(tl.float32), odd.to(tl.float32)), x.shape)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of FP32 ``x``, to 2 units in the last place; 0 below some -87, where it would be subnormal.

    Subnormal results of the exponential do not show in the sum, and caring for both takes more than all the rest.
    """
    if _INTERPRETED:
        return tl.sigmoid(x)
    else:  # noqa: RET505 - a branch not taken must not be compiled, so one return a branch
        return tl.inline_asm_elementwise(
            "{.reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, t;}",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def clip_to(x, limit, passing: tl.constexpr):
    """Clip FP32 ``x`` to [-limit, limit]; NaN and infinity pass where ``passing``.

    They need not where a scale is NaN for them already.
    """
    clipped = tl.minimum(tl.maximum(x, -limit), limit)
    return tl.where(tl.abs(x) < float("inf"), clipped, x) if passing else clipped


@triton.jit
def clip_amax(bits, limit):
    """The amax, as magnitude bits, that is left of ``bits`` after clipping at ``limit`` (positive, may be infinite)."""
    return tl.where(bits < 0x7F800000, tl.minimum(bits, limit.to(tl.int32, bitcast=True)), bits)


@triton.jit
def rms_limit(squares, parts, elements, RMS: tl.constexpr):
    """RMS times the root mean square of ``elements`` values whose squares add up to ``parts`` FP64 partial sums.

    Infinite where that is zero: a tensor of zeros is not clipped.
    """
    at = tl.arange(0, 128)
    total = tl.zeros([128], tl.float64)
    for first in range(0, parts, 128):
        total += tl.load(squares + first + at, mask=first + at < parts, other=0.0)
    # Not the integer itself: one that is 1 is a constant to the compiler, of no type.
    mean = tl.sum(total, 0) / (tl.full([], 1.0, tl.float64) * elements)
    limit = tl.sqrt(mean).to(tl.float32) * RMS
    return tl.where(limit > 0, limit, float("inf"))


@triton.jit
def sums_of_squares(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of the squares of eight neighbours in a row of FP32 ``x``, FP64 [ROWS, COLUMNS / 8].

    In FP64 the order of the sum does not show in an FP32 result.
    """
    return tl.sum(tl.reshape((x * x).to(tl.float64), [ROWS, COLUMNS // 8, 8]), 2)


@triton.jit
def scale_of(bits, largest: tl.constexpr, pow2: tl.constexpr):
    """Dequantization scale, FP32, of groups whose amax has the magnitude bits ``bits``."""
    amax = bits.to(tl.float32, bitcast=True)
    # Correctly rounded, as the reference's division in FP64 is after rounding to FP32.
    if _INTERPRETED:
        scale = tl.div_rn(amax, largest)
    else:
        # By the rounded inverse and one residual, which is exact: what a general division does, less its checks for
        # operands that cannot be here, or whose quotient does not count (not finite, or below the smallest scale).
        inverse = tl.full(amax.shape, 1.0 / largest, tl.float32)
        quotient = amax * inverse
        scale = tl.fma(tl.fma(quotient, tl.full(amax.shape, -largest, tl.float32), amax), inverse, quotient)
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    if pow2:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    scale = tl.where(bits < 0x7F800000, scale, float("nan"))
    return tl.where(bits == 0, 1.0, scale)


@triton.jit
def multiplier_of(scale):
    """1 / scale, correctly rounded FP32, of a scale from :func:`scale_of`."""
    if _INTERPRETED:
        return tl.div_rn(1.0, scale)
    else:  # noqa: RET505 - a branch not taken must not be compiled, so one return a branch
        # What ptxas makes of rcp.rn where neither operand nor result is subnormal or near the largest: no scale is.
        return tl.inline_asm_elementwise(
            "{.reg .f32 y, e; rcp.approx.ftz.f32 y, $1; fma.rn.f32 e, $1, y, 0fBF800000; neg.f32 e, e;"
            " fma.rn.f32 $0, y, e, y;}",
            "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def rounded_to(x, bits, largest: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr, mode: tl.constexpr,
               stepwise: tl.constexpr):  # fmt: skip
    """FP32 ``x``, scaled, as FP32 values that a conversion to FP8 then makes the codes of; NaN stays NaN.

    ``stepwise`` rounds by the reference's own steps, where there are no instructions that do it: to nearest the
    conversion itself (cvt.rn.satfinite), stochastically :mod:`narrowgate.precision.kernels.stochastic_codes`.
    """
    if not stepwise:
        tl.static_assert(mode == NEAREST, "no conversion rounds stochastically")
        return x
    clamped = tl.minimum(tl.maximum(x, -largest, tl.PropagateNan.ALL), largest, tl.PropagateNan.ALL)
    exponent = tl.maximum(clamped.to(tl.int32, bitcast=True) & 0x7F800000, (128 - bias) << 23)
    step = exponent - (mantissa << 23)
    inverse = ((254 << 23) - step).to(tl.float32, bitcast=True)
    magnitude = tl.abs(clamped * inverse)
    lower = tl.floor(magnitude)
    fraction = magnitude - lower
    if mode == NEAREST:
        odd = lower - 2.0 * tl.floor(lower * 0.5)
        up = (fraction > 0.5) | ((fraction == 0.5) & (odd == 1.0))
    else:
        up = fraction >= 1.0 - (bits.to(tl.float32) + 0.5) * 1.52587890625e-05
    rounded = (lower + up.to(tl.float32)) * step.to(tl.float32, bitcast=True)
    sign = clamped.to(tl.int32, bitcast=True) & -0x80000000
    signed = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(clamped == clamped, signed, clamped)


_PHILOX = tl.constexpr(philox_words(ROUNDS))


@triton.jit
def philox(key, counter):
    """Philox4x32-7 of an int64 ``counter`` under an int64 ``key``: the four 32-bit words of ``tl.randint4x``.

    In one piece, which also costs a layout pass of Triton's so little that it draws anew rather than move bits.
    """
    if _INTERPRETED:
        return tl.randint4x(key, counter, _ROUNDS)
    else:  # noqa: RET505 - a branch not taken must not be compiled, so one return a branch
        return tl.inline_asm_elementwise(
            _PHILOX, "=r,=r,=r,=r,r,r,r,r",
            [counter.to(tl.uint32), (counter >> 32).to(tl.uint32), key.to(tl.uint32), (key >> 32).to(tl.uint32)],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def tile_bits(key, row, first, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """16 random bits, int32 [ROWS, COLUMNS], of the elements of a tile of a row-major tensor.

    Args:
        key: 64-bit key of the tensor.
        row: int64 [ROWS], the tile's rows.
        first: first column of the tile, a multiple of 8.
        width: columns of the whole tensor, a multiple of 8.
    """
    words = tile_words(key, row, first, width, ROWS, COLUMNS)
    return tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), (ROWS, COLUMNS)).to(tl.int32)


@triton.jit
def tile_words(key, row, first, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The same bits by words, uint32 [ROWS, COLUMNS / 2]: of two neighbours, the first one's in the low half."""
    # Element e of the tensor draws lane e % 8 of counter e // 8, as narrowgate.precision.stochastic does.
    counter = row[:, None] * (width // 8) + (first // 8 + tl.arange(0, COLUMNS // 8))[None, :]
    w0, w1, w2, w3 = philox(key, counter)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, COLUMNS // 2))
