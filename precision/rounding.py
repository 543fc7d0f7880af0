"""Rounding FP32 to a narrow format, and the way from values to codes and back: the reference in plain PyTorch.

Every function is elementwise, takes FP32 on any device, and gives the same bits in eager and compiled mode.
Values past the largest finite one saturate, zero keeps its sign, NaN stays NaN as a *value* (a code exists for it
only where the format has one; see :func:`encode`). The steps between subnormals are honoured, never flushed.

Only integer operations, multiplications by powers of two and ``torch.round`` (nearest, ties to even) are used, so
nothing depends on how a device casts: a cast to E4M3 differs between PyTorch versions once its input is out of
range, and compilers contract multiply-add pairs.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .formats import BF16, ElementFormat

_FP32_MANTISSA_BITS = 23
_FP32_BIAS = 127
#: Random bits that one stochastic rounding compares with; see :func:`round_stochastic`.
SR_BITS = 16


def torch_dtype(fmt: ElementFormat) -> torch.dtype | None:
    """Return the torch dtype that stores one element of ``fmt``, or None where torch has none (FP6, FP4)."""
    return getattr(torch, fmt.torch_dtype) if fmt.torch_dtype is not None else None


def overflow_threshold(fmt: ElementFormat) -> float:
    """Return the magnitude past which a value saturates rather than rounds: the largest one and half a step more."""
    return fmt.max + math.ldexp(0.5, fmt.max_exponent - fmt.mantissa_bits)


def round_nearest(x: Tensor, fmt: ElementFormat) -> Tensor:
    """Round FP32 ``x`` to the nearest value of ``fmt``, ties to even, saturating; FP32 out, same shape."""
    if fmt.mantissa_bits >= _FP32_MANTISSA_BITS:
        return x
    if fmt.exponent_bits == 8:
        return _round_bf16(x)
    x = x.clamp(-fmt.max, fmt.max)
    step, inverse = _spacing(x, fmt)
    return torch.round(x * inverse) * step


def round_stochastic(x: Tensor, fmt: ElementFormat, bits: Tensor) -> Tensor:
    """Round FP32 ``x`` to one of its two neighbours in ``fmt``, up in magnitude with probability = distance.

    With ``f`` the fraction of a step by which \\|x\\| passes its lower neighbour and ``k`` the 16 random bits, it
    rounds up where ``f + (k + 1/2) / 2**16 >= 1``. The half centres the comparison: the probability is ``f`` rounded
    to a multiple of ``2**-16``, so the bias is at most ``2**-17 = 7.6e-6`` of a step and zero on average over ``f``,
    where plain truncation is biased by ``2**-17`` toward zero everywhere. Values that ``fmt`` holds never move, and
    a magnitude below ``2**-17`` of the smallest subnormal becomes zero. It is gfloat's ``StochasticFast``.

    Args:
        x: FP32, any shape.
        fmt: the target format.
        bits: integer tensor of ``x``'s shape with values in [0, 2**16).

    Returns:
        FP32 values of ``fmt``, same shape; magnitudes past the largest finite value saturate.
    """
    if fmt.exponent_bits == 8:
        return _round_bf16_stochastic(x, bits)
    x = x.clamp(-fmt.max, fmt.max)
    step, inverse = _spacing(x, fmt)
    # In units of 2**-17 steps the comparison is one of whole numbers below 2**21: cut the magnitude off, add 2k + 1,
    # cut off to whole steps. All of it is exact in FP32, so a kernel that repeats it gets the same answer whether or
    # not its compiler fuses operations. In place: these tensors are large, and a fresh page costs more than its sum.
    units = torch.mul(x, inverse).abs_().mul_(2.0 ** (SR_BITS + 1)).floor_()
    units.add_(bits, alpha=2).add_(1.0).mul_(2.0 ** -(SR_BITS + 1)).floor_()
    return units.mul_(step).copysign_(x)


def _spacing(x: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
    """Return (distance between neighbours of ``fmt`` around ``x``, its reciprocal), both exact powers of two."""
    smallest = (_FP32_BIAS + 1 - fmt.bias) << _FP32_MANTISSA_BITS  # the exponent of subnormals, as FP32 bits
    exponent = (x.view(torch.int32) & 0x7F80_0000).clamp(min=smallest)
    step = exponent - (fmt.mantissa_bits << _FP32_MANTISSA_BITS)
    inverse = (2 * _FP32_BIAS << _FP32_MANTISSA_BITS) - step
    return step.view(torch.float32), inverse.view(torch.float32)


def _round_bf16(x: Tensor) -> Tensor:
    # As every BF16 cast: past the largest finite value it gives infinity. BF16 carries no scale that could say so.
    return x.to(torch.bfloat16).to(torch.float32)


def _round_bf16_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    # The 16 bits that BF16 drops meet 16 random bits: the probability is exact. A finite number never becomes infinite,
    # while NaN and infinity, which no scale tells of here, stay what they are.
    moved = (x.clamp(-BF16.max, BF16.max).view(torch.int32) + bits.to(torch.int32)) & -0x1_0000
    return torch.where(x.abs() < math.inf, moved.view(torch.float32), x)


def encode(values: Tensor, fmt: ElementFormat) -> Tensor:
    """Turn FP32 values that ``fmt`` holds exactly into codes.

    Returns:
        The torch dtype of the format where one exists (FP8, BF16, FP32), else uint8 codes, one a byte in the low
        bits: sign, exponent, mantissa. NaN has no FP6 or FP4 code and becomes code 0: the scale of its group is NaN.
    """
    dtype = torch_dtype(fmt)
    if dtype is not None:
        return values.to(dtype)
    values = torch.nan_to_num(values, nan=0.0, posinf=fmt.max, neginf=-fmt.max)
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFF_FFFF
    shift = _FP32_MANTISSA_BITS - fmt.mantissa_bits
    normal = (magnitude >> shift) - ((_FP32_BIAS - fmt.bias) << fmt.mantissa_bits)
    subnormal = (values.abs() * (1.0 / fmt.min_subnormal)).to(torch.int32)
    # A subnormal's code is its multiple of the smallest value; a normal's ``normal`` is then the larger of the two
    # only from the first normal on, where both agree, and below it ``normal`` is the smaller.
    code = torch.maximum(normal, torch.minimum(subnormal, torch.full_like(subnormal, 1 << fmt.mantissa_bits)))
    sign = (bits >> 31) & 1
    return (code | (sign << (fmt.bits - 1))).to(torch.uint8)


def decode(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Turn codes (as :func:`encode` returns them) into FP32 values; every code, NaN and infinity included."""
    if torch_dtype(fmt) is not None:
        # Eager CPU converts E4M3 one element at a time; a gather from 256 values is five times as fast.
        if fmt.bits == 8 and codes.device.type == "cpu" and not torch.compiler.is_compiling():
            index = codes.view(torch.uint8).reshape(-1).to(torch.int32)
            return _table(fmt.torch_dtype or "").index_select(0, index).view(codes.shape)
        return codes.to(torch.float32)
    code = codes.to(torch.int32)
    magnitude = code & ((1 << (fmt.bits - 1)) - 1)
    shift = _FP32_MANTISSA_BITS - fmt.mantissa_bits
    normal = ((magnitude << shift) + ((_FP32_BIAS - fmt.bias) << _FP32_MANTISSA_BITS)).view(torch.float32)
    subnormal = magnitude.to(torch.float32) * fmt.min_subnormal
    value = torch.where(magnitude >= 1 << fmt.mantissa_bits, normal, subnormal)
    # The sign as a bit: Triton negates by subtracting from zero, which makes +0 of -0.
    sign = (code >> (fmt.bits - 1)) << 31
    return (value.view(torch.int32) | sign).view(torch.float32)


@functools.cache
def _table(dtype: str) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float32)
