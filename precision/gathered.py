"""Weights whose GEMM operand is what travelled between the ranks, not what a layer would cast of them itself.

A :class:`CodedWeight` knows the codes and scales under which it is gathered (:func:`codes_of`). The layer multiplies
them as they are where its recipe asks for the same codes, and quantizes their dequantized values anew where it does not
(``shards.requantize``). A :class:`GatheredWeight` is the unsharded one, which FSDP2 makes of what it gathered and frees
again; the sharded one is :class:`narrowgate.precision.sharding.ShardedWeight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .errors import NarrowgateError
from .packing import pack_fp4, unpack_fp4
from .quantization import QuantizedTensor
from .scaling import as_e8m0
from .shard_codes import quantize_rows
from .spec import Spec
from .turning import turned_codes

_ATEN = torch.ops.aten
#: What FSDP2 and autograd do with a weight without touching its values.
_SAME_VALUES = frozenset({_ATEN.detach.default, _ATEN.alias.default, _ATEN.as_strided.default})


#: What :func:`_part` can ask of a weight.
_CODES, _SCALE, _TENSOR_SCALE, _ROWS = "_data", "_scale", "_tensor_scale", "_rows"
_LIBRARY = torch.library.Library("narrowgate", "FRAGMENT")
_LIBRARY.define("coded_part(Tensor weight, str part) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


class CodedWeight(Tensor):
    """A weight [N, K] that is multiplied by the codes of :func:`codes_of`; shape, dtype and device are its own.

    What is traced calls no method of it and reads no tensor of it but through an operator: so functions, not methods.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    #: Under which it is gathered.
    _spec: Spec

    def source(self) -> Tensor | None:
        """The values that the codes were made of, [N, K]; None where only the codes are here."""
        return None

    def dequantize(self) -> Tensor:
        """The values that the codes stand for, FP32 [N, K]."""
        return codes_of(self).dequantize()


def codes_of(weight: CodedWeight, after: Tensor | None = None) -> QuantizedTensor:
    """The codes and scales of a whole weight [N, K], contracted over K; ``after`` as for :func:`operand_of`."""
    spec, shape = weight._spec, (weight.shape[0], weight.shape[1])
    if not isinstance(weight, GatheredWeight):
        return quantize_rows(_part(weight, _ROWS).detach(), spec, shape, 0, None, None)
    scale = _once_known(_part(weight, _SCALE), after)
    tensor_scale = _part(weight, _TENSOR_SCALE) if spec.fmt.tensor_scale else None
    scale = as_e8m0(scale) if scale.dtype == torch.uint8 else scale
    codes = _part(weight, _CODES)
    # Unpacked, they are larger than what is gathered, whatever becomes of the scales.
    codes = codes if spec.fmt.element.bits == 8 else _once_known(codes, after)
    return QuantizedTensor(codes, scale, tensor_scale, spec, 1, shape)


def operand_of(weight: CodedWeight, spec: Spec, dim: int, after: Tensor | None = None) -> QuantizedTensor | None:
    """The codes as the operand of ``spec`` contracted over ``dim``; None where it asks for other codes.

    A tensor scale is also one scale for each row, whichever axis the rows are.

    Args:
        weight: the weight, whole.
        spec: what is asked for.
        dim: the axis that the operand is contracted over; codes of a byte lie contiguous along it, for matrix units.
        after: what must be known before anything is made of codes that were gathered: a gradient, in backward. A
            compiler that may choose would make it in forward and keep it, whole, while FSDP2 lets go of the codes.
    """
    if not serves(weight._spec, spec, dim):
        return None
    codes = codes_of(weight, after)
    if dim == codes.dim:
        return codes
    bits = codes.spec.fmt.element.bits
    if bits == 4:  # packed in pairs along the contraction
        return replace(codes, data=pack_fp4(unpack_fp4(codes.data, codes.shape[1], 1), 0), dim=0)
    if bits == 8:
        gathered = isinstance(weight, GatheredWeight)
        return replace(codes, data=turned_codes(codes.data, after if gathered else None).t(), dim=0)
    return replace(codes, dim=0)


def _once_known(x: Tensor, after: Tensor | None) -> Tensor:
    """A copy of ``x`` that a compiler cannot make before it knows ``after``; outside of one ``x`` itself."""
    if after is None or not torch.compiler.is_compiling():
        return x
    return torch.ops.narrowgate.once_known(x, after)


def _copied(x: Tensor, after: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _copied_fake(x: Tensor, after: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_LIBRARY.define("once_known(Tensor x, Tensor after) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("once_known", _copied, _key)
torch.library.register_fake("narrowgate::once_known", _copied_fake, lib=_LIBRARY)


def _part(weight: CodedWeight, part: str) -> Tensor:
    return torch.ops.narrowgate.coded_part(weight, part) if torch.compiler.is_compiling() else getattr(weight, part)


def asked_part(func: Any, args: Sequence[Any]) -> Tensor | None:
    """Answer ``narrowgate::coded_part`` where that is what was called: a tensor within the weight."""
    return getattr(args[0], args[1]) if func is torch.ops.narrowgate.coded_part.default else None


def serves(own: Spec, wanted: Spec, dim: int) -> bool:
    """True where a weight [N, K], quantized over K as ``own``, is the operand ``wanted`` contracted over ``dim``."""
    tensor = own.granularity == "tensor" and own.delayed is None
    expanded = tensor and wanted == replace(own, granularity="row")
    if wanted != own and not expanded:
        return False
    square = own.block is not None and own.block[0] == own.block[1]
    return dim == 1 or (own.hadamard is None and (square or own.granularity == "tensor"))


class GatheredWeight(CodedWeight):
    """The unsharded weight: codes in FSDP2's gathered buffer, and their scales.

    Whatever is not a low-precision layer computes with the dequantized values; writing to it is an error.
    """

    _data: Tensor
    _scale: Tensor
    _tensor_scale: Tensor | None

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        scale: Tensor,
        tensor_scale: Tensor | None,
        spec: Spec,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> GatheredWeight:
        """Wrap the codes of a weight [N, K] and their scales, as :class:`QuantizedTensor` has them for ``dim`` 1.

        Args:
            data: the codes; float8, or uint8 for FP6 and, packed, FP4.
            scale: dequantization scales; E8M0 as its uint8 codes, which Inductor knows on the CPU too.
            tensor_scale: NVFP4's, else None.
            spec: how the weight is quantized.
            shape: (N, K).
            dtype: what the weight passes for.
        """
        weight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=data.device)  # type: ignore[attr-defined]
        weight._data, weight._scale, weight._tensor_scale, weight._spec = data, scale, tensor_scale, spec
        return weight

    def rescale(self, scale: Tensor, tensor_scale: Tensor | None) -> None:
        """Take the scales of a new gather, whose codes are in the buffer already."""
        self._scale, self._tensor_scale = scale, tensor_scale

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight(shape={list(self.shape)}, dtype={self.dtype}, spec={self._spec})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        inner = ["_data", "_scale"] if self._tensor_scale is None else ["_data", "_scale", "_tensor_scale"]
        return inner, (self._spec, tuple(self.shape), self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["_data"], inner["_scale"], inner.get("_tensor_scale"), *context)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        part = asked_part(func, args)
        if part is not None:
            return part
        first = args[0] if args else None
        if func in _SAME_VALUES and isinstance(first, GatheredWeight):
            # FSDP2 asks for the shape that the weight has, whatever is padded behind it.
            assert func is not _ATEN.as_strided.default or tuple(args[1]) == tuple(first.shape), args[1]
            shape = (first.shape[0], first.shape[1])
            return GatheredWeight(first._data, first._scale, first._tensor_scale, first._spec, shape, first.dtype)
        if func._schema.is_mutable and any(isinstance(arg, GatheredWeight) for arg in written(func, args)):
            raise NarrowgateError(
                f"a gathered weight is a copy and cannot be written to (by {func}): write to its shards"
            )
        dense = tree_map_only(GatheredWeight, lambda w: w.dequantize().to(w.dtype), (tuple(args), kwargs or {}))
        return func(*dense[0], **dense[1])


def written(func: Any, args: Sequence[Any]) -> list[Any]:
    """The positional arguments that an operator writes to."""
    found: list[Any] = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += value if isinstance(value, (list, tuple)) else [value]
    return found
