"""Scales: from the largest magnitude of a group to the number that its codes are multiplied by.

``scale`` is always the *dequantization* scale, value = code * scale; ``multiplier`` is what the input is multiplied
by before rounding. Three families:

- **FP32** (plain formats): ``scale = amax / max``, correctly rounded; ``multiplier = 1 / scale``, correctly rounded.
  Nothing else than the scale decides the codes, so a scale from elsewhere (delayed, another rank) gives the same
  codes. The scale of an all-zero group is 1. It never falls below ``2**-126``: an amax below ``max * 2**-126`` would
  have an infinite reciprocal, so such a group is stored coarsely instead. ``pow2`` rounds the scale *up* to a power
  of two, so nothing saturates.
- **E8M0** (MX), a power of two: ``floor`` takes the exponent of amax less the exponent of the format's largest
  value, as section 6.3 of the OCP MX specification v1.0 does (what lies between ``max`` and the next power of two
  saturates); ``rceil`` rounds ``amax / max`` up to a power of two, as cuBLAS and Blackwell's
  ``cvt.rp.satfinite.ue8m0x2.f32`` do (nothing saturates). An all-zero block has the smallest scale, ``2**-127``.
- **NVFP4**, two levels: ``S_enc = 2688 / amax(tensor)``; a block's scale is
  ``e4m3(block_amax * (S_enc * (1/6)))``, which rounds once before the cast, where ``(block_amax / 6) * S_enc`` rounds
  twice; the multiplier is ``1 / (scale * (1 / S_enc))``. That is Transformer Engine's arithmetic, without a lower
  clamp: the scale of a block below ``2**-10 * amax(tensor) / 448`` is 0 and its values dequantize to 0.

A group that holds NaN or infinity has a NaN scale. It does not enter the tensor level of NVFP4, so only its own
block is lost.

Divisions run in FP64: rounded to FP32 afterwards they equal the correctly rounded FP32 quotient (53 bits are more
than twice 24), and unlike FP32 division they are correctly rounded in compiled GPU code too. Only scales pay for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import E4M3, ElementFormat
from .spec import Spec

_MANTISSA_MASK = 0x7F_FFFF
_SMALLEST_SCALE = math.ldexp(1.0, -126)
_LARGEST_MULTIPLIER = torch.finfo(torch.float32).max
_E8M0_NAN = 255
#: 1/6 rounded to FP32: a compiler that kept the FP64 constant would round differently.
_SIXTH = 0.16666667163372040


@dataclass(frozen=True)
class Scales:
    """The scales of a tensor's groups; all three broadcast against each other."""

    #: Stored scale: FP32, or the block format (float8_e4m3fn; float8_e8m0fnu, its uint8 codes in compiled CPU code).
    scale: Tensor
    #: FP32 factor that the input is multiplied by before it is rounded.
    multiplier: Tensor
    #: NVFP4's FP32 scale of the whole tensor, shape [].
    tensor_scale: Tensor | None = None


def scales_from_amax(amax: Tensor, spec: Spec, tensor_amax: Tensor | None = None) -> Scales:
    """Compute the scales of groups whose largest magnitudes are ``amax`` (FP32, any shape).

    Args:
        amax: largest magnitude of every group; NaN or infinity makes that group's scale NaN.
        spec: how the operand is stored.
        tensor_amax: for two-level formats, the amax of the whole tensor (shape []), where ``amax`` does not cover it
            (a shard); default: the largest finite entry of ``amax``.
    """
    fmt = spec.fmt
    if fmt.scale is None:
        return _fp32_scales(amax, fmt.element, pow2=spec.pow2)
    if fmt.tensor_scale:
        return _two_level_scales(amax, fmt.element, tensor_amax)
    return _e8m0_scales(amax, fmt.element, rceil=spec.mx_scale == "rceil")


def reciprocal(x: Tensor) -> Tensor:
    """1 / x, correctly rounded FP32, in eager and in compiled code on every device."""
    return x.to(torch.float64).reciprocal().to(torch.float32)


def _quotient(x: Tensor, divisor: float) -> Tensor:
    return (x.to(torch.float64) / divisor).to(torch.float32)


def _fp32_scales(amax: Tensor, element: ElementFormat, *, pow2: bool) -> Scales:
    scale = _quotient(amax, element.max).clamp(min=_SMALLEST_SCALE)
    if pow2:
        scale = ((scale.view(torch.int32) + _MANTISSA_MASK) & ~_MANTISSA_MASK).view(torch.float32)
    scale = torch.where(amax < math.inf, scale, math.nan)
    scale = torch.where(amax == 0, 1.0, scale)
    return Scales(scale, reciprocal(scale))


def _e8m0_scales(amax: Tensor, element: ElementFormat, *, rceil: bool) -> Scales:
    if rceil:
        bits = _quotient(amax, element.max).view(torch.int32)
        exponent = (bits + _MANTISSA_MASK) >> 23
        # Of the FP32 subnormals only those above 2**-127, the smallest E8M0 value, round up to 2**-126.
        exponent = torch.where(bits <= 0x40_0000, 0, exponent)
    else:
        exponent = ((amax.view(torch.int32) >> 23) - element.max_exponent).clamp(min=0)
    # The largest FP32 number over the smallest ``max`` is below 2**126: the exponent stays in [0, 253].
    multiplier = ((254 - exponent) << 23).view(torch.float32)
    finite = amax < math.inf
    code = torch.where(finite, exponent, _E8M0_NAN)
    return Scales(as_e8m0(code.to(torch.uint8)), torch.where(finite, multiplier, math.nan))


def as_e8m0(code: Tensor) -> Tensor:
    """E8M0 scales of their uint8 codes."""
    # Inductor's C++ code has no E8M0 type (torch 2.13): inside a graph compiled for the CPU the codes stay uint8.
    if torch.compiler.is_compiling() and code.device.type == "cpu":
        return code
    return code.view(torch.float8_e8m0fnu)


def _two_level_scales(amax: Tensor, element: ElementFormat, tensor_amax: Tensor | None) -> Scales:
    finite = amax < math.inf
    if tensor_amax is None:
        tensor_amax = torch.where(finite, amax, 0.0).amax() if amax.numel() else amax.new_zeros(())
    largest = E4M3.max * element.max
    # Not ``largest / tensor_amax``: PyTorch computes number / tensor as reciprocal times number, two roundings.
    wide = tensor_amax.to(torch.float64)
    encode = (torch.full_like(wide, largest) / wide).to(torch.float32).clamp(max=1.0 / _SMALLEST_SCALE)
    encode = torch.where(tensor_amax == 0, 1.0, encode)
    decode = reciprocal(encode)
    block = torch.where(finite, amax, math.nan) * (encode * _SIXTH)
    scale = block.clamp(max=E4M3.max).to(torch.float8_e4m3fn)
    multiplier = reciprocal(scale.to(torch.float32) * decode).clamp(max=_LARGEST_MULTIPLIER)
    return Scales(scale, multiplier, decode)


def scale_values(scale: Tensor, tensor_scale: Tensor | None = None) -> Tensor:
    """Return stored scales as FP32 factors: E8M0 and E4M3 decoded, the tensor level multiplied in."""
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
        code = scale.view(torch.uint8).to(torch.int32)
        bits = torch.where(code == 0, 0x40_0000, code << 23)  # 2**-127 is subnormal in FP32
        return torch.where(code == _E8M0_NAN, math.nan, bits.view(torch.float32))
    values = scale.to(torch.float32)
    return values if tensor_scale is None else values * tensor_scale
