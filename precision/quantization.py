"""Quantize a tensor as a format expression says: the reference that every kernel is tested against.

The order is fixed: hadamard, clip, scale, round. The scaled value is rounded once, from FP32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .clipping import clip, clip_limit
from .delayed import AmaxHistory, count_saturated
from .errors import NarrowgateError
from .grouping import Grouping, group
from .hadamard import rotate, rotate_back
from .packing import pack_fp4, unpack_fp4
from .rounding import decode, encode, round_nearest, round_stochastic, torch_dtype
from .scaling import Scales, scale_values, scales_from_amax
from .spec import Spec, as_spec
from .stochastic import Shard
from .stochastic import random_bits as draw_bits


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized tensor: ``value = code * scale`` (times ``tensor_scale`` for NVFP4).

    With K the length of the contraction axis ``dim`` of the input:
    """

    #: Codes in the input's axis order: a float8 dtype for FP8 and BF16/FP32 for themselves, in the input's shape;
    #: uint8 for FP6 (one code a byte); uint8 for FP4, two codes a byte along ``dim``: ceil(K / 2) there.
    data: Tensor
    #: Dequantization scales, FP32 or the block format's dtype (E8M0 as uint8 codes in a graph compiled for the CPU,
    #: which has no such type): shape [] for ``tensor``; length 1 at ``dim`` for
    #: ``row``; for blocks ceil(length / block) along every blocked axis. None for formats that are stored unscaled.
    scale: Tensor | None
    #: NVFP4's FP32 scale over the block scales, shape []; else None.
    tensor_scale: Tensor | None
    spec: Spec
    #: Contraction axis, not negative.
    dim: int
    #: Shape of the input.
    shape: tuple[int, ...]

    def elements(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the decoded elements without their scale, in the input's shape. Exact in BF16 and FP32."""
        codes = self.data
        if self.spec.fmt.element.bits == 4:
            codes = unpack_fp4(codes, self.shape[self.dim], self.dim)
        return decode(codes, self.spec.fmt.element).to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32, *, rotated: bool = False) -> Tensor:
        """Return element * scale in the input's shape: the FP32 product, rounded once to ``dtype``.

        Args:
            dtype: dtype of the result.
            rotated: with ``hadamard(n)``, leave the values in the rotated basis, in which two operands of one
                product may stay; default: rotate back, so that the result approximates the input.
        """
        values = self.elements()
        if self.scale is not None:
            groups = _grouping(self.spec, self.shape, self.dim)
            factor = groups.expand(scale_values(self.scale, self.tensor_scale))
            values = groups.join(groups.split(values) * factor)
            if self.spec.hadamard is not None and not rotated:
                values = rotate_back(values, self.spec.hadamard, self.dim)
        return values.to(dtype)


def quantize(
    x: Tensor,
    spec: Spec | str,
    *,
    dim: int = -1,
    seed: int | Tensor | None = None,
    random_bits: Tensor | None = None,
    shard: Shard | None = None,
    amax: Tensor | None = None,
    history: AmaxHistory | None = None,
) -> QuantizedTensor:
    """Quantize ``x`` (any float dtype, any shape, any device) as ``spec`` says.

    Not differentiable: the result carries no gradient. A non-finite element makes the scale of its group NaN, so its
    whole group dequantizes to NaN; formats that are stored unscaled keep it as it is.

    Args:
        x: the tensor; FP64 is rounded to FP32 first.
        spec: a :class:`Spec` or a format expression such as ``"nvfp4+sr"``.
        dim: contraction axis of the GEMM that the operand goes into.
        seed: 64-bit key of the random bits of ``+sr`` (see :func:`narrowgate.precision.stochastic.call_key`).
        random_bits: the bits themselves instead, integers in [0, 2**16) in ``x``'s shape.
        shard: where ``x`` lies in the unsharded tensor; decides which random bits it draws.
        amax: amax of the whole tensor (FP32, shape []) where ``x`` alone does not tell it, as for a shard. For
            granularity ``tensor`` and for NVFP4's tensor level; for blocks of several rows, those of all blocks of
            ``x``, in the shape of its scales.
        history: the amax history of ``+delayed(n)``; without one the scale is dynamic, as in a first step.

    Raises:
        NarrowgateError: ``dim`` is no axis of ``x``, ``+sr`` without bits, or an ``amax`` or ``history`` that the
            format cannot use.
    """
    spec = as_spec(spec)
    if not x.is_floating_point():
        raise NarrowgateError(f"quantize takes a floating-point tensor, found {x.dtype}")
    x = x.detach().to(torch.float32)
    shape = tuple(x.shape)
    bits = _bits(x, spec, seed, random_bits, shard)
    element = spec.fmt.element
    if spec.high_precision:
        rounded = round_nearest(x, element) if bits is None else round_stochastic(x, element, bits)
        return QuantizedTensor(encode(rounded, element), None, None, spec, dim % max(x.dim(), 1), shape)
    groups = _grouping(spec, shape, dim)
    x = groups.split(prepare(x, spec, groups.dim))
    own = groups.amax(x)
    if history is not None:
        if spec.delayed is None:
            raise NarrowgateError(f"an amax history belongs to delayed(n), found '{spec}'")
        amax = history.amax(own.view(()))
        if history.recording:
            history.record(own.view(()))
            count_saturated(history, x * scales_from_amax(amax.reshape(own.shape), spec).multiplier, element)
    scales = _scales(own, spec, amax)
    x = x * scales.multiplier
    if bits is not None:
        data = encode(groups.join(round_stochastic(x, element, groups.split(bits))), element)
    elif torch_dtype(element) is not None:
        # The cast rounds to nearest even; in range, every PyTorch version and compiler agrees on it.
        data = encode(groups.join(x.clamp(-element.max, element.max)), element)
    else:
        data = encode(groups.join(round_nearest(x, element)), element)
    if element.bits == 4 and data.dim():
        data = pack_fp4(data, groups.dim)
    return QuantizedTensor(data, groups.compact(scales.scale), scales.tensor_scale, spec, groups.dim, shape)


def prepare(x: Tensor, spec: Spec, dim: int) -> Tensor:
    """Apply what comes before the scale to FP32 ``x``: the Hadamard rotation along ``dim``, then the clip."""
    if spec.hadamard is not None:
        x = rotate(x, spec.hadamard, dim)
    limit = clip_limit(x, spec)
    return x if limit is None else clip(x, limit)


def _grouping(spec: Spec, shape: tuple[int, ...], dim: int) -> Grouping:
    assert spec.granularity is not None, spec
    return group(shape, spec.granularity, spec.block, dim)


def _scales(own: Tensor, spec: Spec, amax: Tensor | None) -> Scales:
    if amax is None:
        return scales_from_amax(own, spec)
    if spec.fmt.tensor_scale:
        return scales_from_amax(own, spec, amax)
    if spec.granularity != "tensor" and (spec.block is None or spec.block[0] == 1):
        raise NarrowgateError(f"amax belongs to granularity tensor, blocks of rows and nvfp4, found '{spec}'")
    if amax.numel() != own.numel():
        raise NarrowgateError(f"amax has shape {tuple(amax.shape)}, expected one for each of {own.numel()} scales")
    # The given amax decides the scale, but it cannot vouch for this tensor's elements.
    known = amax.to(torch.float32).reshape(own.shape)
    return scales_from_amax(torch.where(own < torch.inf, known, torch.nan), spec)


def _bits(x: Tensor, spec: Spec, seed: int | Tensor | None, bits: Tensor | None, shard: Shard | None) -> Tensor | None:
    if not spec.sr:
        return None
    if bits is not None:
        if bits.shape != x.shape:
            raise NarrowgateError(f"random_bits has shape {tuple(bits.shape)}, expected {tuple(x.shape)}")
        return bits
    if seed is None:
        raise NarrowgateError(f"'{spec}' rounds stochastically: give quantize a seed (or random_bits)")
    return draw_bits(seed, x.shape, x.device, shard)
