"""Weights quantized once for each optimizer step, however many micro-batches and recomputed forwards read them.

A layer that keeps its codes (:func:`keep_weight_codes`) owns buffers for the operands of fprop and dgrad. Its products
go through ``narrowgate::weight_product``, which looks at run time, in eager mode and in compiled graphs alike, whether
the buffers hold the codes of the weight as it is now, and casts it anew where they do not. They do as long as

- no optimizer has stepped the weight since (a post-step hook of ``torch.optim`` says so),
- the weight lies where it lay, and its version counter stands where it stood: ``load_state_dict``, an average of the
  weights swapped in and any other write that autograd would know of move one of the two,
- the same stream asks.

Within the capture of a CUDA graph the cast is always launched, so that each replay sees the weight of its time. Nobody
counts replays, so codes that were ever captured are not trusted again, nor are those of a weight whose optimizer's step
was. Only training forwards keep codes: evaluation, and every layer that was not asked to keep any, casts at each use.
What no check can see is a write between two micro-batches of one step that leaves the version counter alone: through
``weight.data``, by a collective of ``torch.distributed``, in a replay. ``plan.refresh()`` after it.

The operator writes to its buffers though its schema does not say so. They are a cache: nothing reads them but this
operator, which checks first, so no order of calls can show the difference; and a compiler that knew of the writes would
copy the buffers to keep what backward saved.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .capability import has_cast_kernel, same_codes
from .cast_operators import SAME, cast_into, operand_sizes
from .casting import as_stored, has_kernel, limit_of
from .config import GemmConfig, LinearConfig
from .gemm import scaled_gemm
from .quantization import QuantizedTensor
from .rounding import torch_dtype
from .spec import Spec


@dataclass
class _Stamp:
    """What a layer's buffers hold."""

    #: Address of the layer's Parameter. Another tensor in its place, as functional_call has it, is never trusted: it
    #: may lie where yet another one lay before.
    home: int
    filled: bool = False
    version: int = 0
    stream: int = 0
    #: These, or the weight, are written within a CUDA graph, whose replays nobody counts.
    captured: bool = False


#: By the address of the codes; buffers that are not here are written at each use.
_STAMPS: dict[int, _Stamp] = {}


class WeightCodes:
    """Buffers for the codes of one weight [N, K] as the operands of fprop and of dgrad."""

    def __init__(self, config: LinearConfig, weight: Tensor) -> None:
        """Allocate.

        Args:
            config: of the layer, with no :func:`keep_obstacle`.
            weight: its Parameter, which is not held on to.
        """
        self._config, shape, device = config, (weight.shape[0], weight.shape[1]), weight.device
        rows, columns = config.fprop.second, config.dgrad.second
        #: Whether dgrad multiplies codes too, or the weight itself.
        self.dgrad = not columns.high_precision
        same = self.dgrad and same_codes(rows, columns)
        self.rows, self.columns = str(rows), (SAME if same else str(columns)) if self.dgrad else ""
        sizes = operand_sizes(rows, shape, 1), operand_sizes(columns if self.dgrad else rows, shape, 0)
        #: Codes [N, K] and their scales; codes [K, N] and theirs, empty where there are none.
        self.buffers = [
            torch.empty(size, dtype=dtype, device=device)
            for size, dtype in (
                (sizes[0][0], torch_dtype(rows.fmt.element)),
                (sizes[0][1], torch.float32),
                (sizes[1][0] if self.dgrad else 0, torch_dtype((columns if self.dgrad else rows).fmt.element)),
                (sizes[1][1] if self.dgrad and not same else 0, torch.float32),
            )
        ]
        for buffer in self.buffers:
            # Their addresses stay, so a compiler's CUDA graph need not copy them.
            torch._dynamo.mark_static_address(buffer)
        address = self.buffers[0].data_ptr()
        _STAMPS[address] = _Stamp(weight.data_ptr())
        weakref.finalize(self, _STAMPS.pop, address, None)

    def following(self, weight: Tensor) -> WeightCodes:
        """Return buffers for the weight where it lies now: these, emptied, or others on its device."""
        if weight.device == self.buffers[0].device:
            self.forget(weight)
            return self
        return WeightCodes(self._config, weight)

    def forget(self, weight: Tensor) -> None:
        """Have the next use cast anew; from now on of the Parameter ``weight``."""
        stamp = _STAMPS[self.buffers[0].data_ptr()]
        stamp.home, stamp.filled = weight.data_ptr(), False
        stamp.captured |= _capturing(weight)


def keep_obstacle(config: LinearConfig, weight: Tensor | None) -> str | None:
    """Say why a layer's weight is quantized at each use all the same; None where it can keep its codes."""
    if type(weight) is not torch.nn.Parameter:
        return "the weight is no plain Parameter: a sharded one is gathered anew for each use anyway"
    if config.fprop.second.high_precision:
        return "fprop does not quantize the weight"
    specs = [spec for spec in (config.fprop.second, config.dgrad.second) if not spec.high_precision]
    for spec in specs:
        if spec.sr:
            return f"{spec} is drawn anew at each use"
        if spec.delayed is not None:
            return f"{spec} records each use"
        if not has_cast_kernel(spec):
            return f"{spec} has no cast kernel"
    if weight.numel() == 0 or not has_kernel(weight, *specs):
        return f"no cast kernel takes a weight of {list(weight.shape)}, {weight.dtype}, on {weight.device.type}"
    return None


def weight_product(
    first: QuantizedTensor,
    weight: Tensor,
    kept: WeightCodes,
    path: str,
    gemm: GemmConfig,
    *,
    native: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply ``first`` by the codes of a weight: [M, N] on ``fprop``, [M, K] on ``dgrad``.

    Args:
        first: the path's other operand, contracted over its columns.
        weight: [N, K], in its master dtype.
        kept: the layer's buffers.
        path: ``fprop`` or ``dgrad``.
        gemm: the path's configuration.
        native: see :func:`narrowgate.precision.gemm.scaled_gemm`.
        out_dtype: float32 or bfloat16.
    """
    assert first.scale is not None
    return torch.ops.narrowgate.weight_product(
        first.data, first.scale, weight, kept.buffers, str(gemm.first), kept.rows, kept.columns, path == "dgrad",
        gemm.accumulate, native, out_dtype,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _parsed(first: str, rows: str, columns: str, accumulate: str) -> tuple[Spec, Spec, Spec | None, GemmConfig]:
    specs = Spec.parse(first), Spec.parse(rows)
    own = specs[1] if columns == SAME else Spec.parse(columns) if columns else None
    return *specs, own, GemmConfig(accumulate=accumulate)


def _product(
    first: Tensor,
    first_scale: Tensor,
    weight: Tensor,
    buffers: list[Tensor],
    first_spec: str,
    rows: str,
    columns: str,
    transposed: bool,
    accumulate: str,
    native: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    spec, rows_spec, columns_spec, gemm = _parsed(first_spec, rows, columns, accumulate)
    _bring_up_to_date(weight, buffers, rows, columns)
    codes, scale, turned, second_scale = buffers
    shape = tuple(weight.shape)
    if transposed:
        assert columns_spec is not None
        scale = as_stored(scale if columns == SAME else second_scale, columns_spec, 0)
        second = QuantizedTensor(turned.t(), scale, None, columns_spec, 0, shape)
    else:
        second = QuantizedTensor(codes, as_stored(scale, rows_spec, 1), None, rows_spec, 1, shape)
    operand = QuantizedTensor(first, first_scale, None, spec, 1, tuple(first.shape))
    # An operator's strides are what its fake says: a width that was padded for the matrix units is closed up.
    return scaled_gemm(operand, second, gemm, native=native, out_dtype=out_dtype).contiguous()


def _product_fake(first: Tensor, first_scale: Tensor, weight: Tensor, *others: Any) -> Tensor:
    transposed, out_dtype = others[4], others[7]
    return first.new_empty((first.shape[0], weight.shape[1 if transposed else 0]), dtype=out_dtype)


def _bring_up_to_date(weight: Tensor, buffers: list[Tensor], rows: str, columns: str) -> None:
    stamp = _STAMPS.get(buffers[0].data_ptr())
    version, capturing = _version(weight), _capturing(weight)
    stream = torch._C._cuda_getCurrentRawStream(weight.device.index) if weight.is_cuda else 0
    at_home = stamp is not None and weight.data_ptr() == stamp.home
    current = stamp is not None and (True, version, stream) == (stamp.filled, stamp.version, stamp.stream)
    if current and at_home and not capturing:
        return
    _cast_into(weight, buffers, rows, columns)
    if stamp is not None:
        stamp.captured |= capturing
        stamp.filled = at_home and version >= 0 and not stamp.captured
        stamp.version, stamp.stream = version, stream


def _cast_into(weight: Tensor, buffers: list[Tensor], rows: str, columns: str) -> None:
    specs = (rows, "" if columns == SAME else columns)
    cast_into(weight, rows, columns, [limit_of(weight, Spec.parse(text)) if text else None for text in specs], buffers)


def _capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _version(weight: Tensor) -> int:
    return -1 if weight.is_inference() else weight._version


_LIBRARY = torch.library.Library("narrowgate", "FRAGMENT")
_LIBRARY.define(
    "weight_product(Tensor first, Tensor first_scale, Tensor weight, Tensor[] buffers, str first_spec, str rows, "
    "str columns, bool transposed, str accumulate, bool native, ScalarType out_dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("weight_product", _product, _key)
torch.library.register_fake("narrowgate::weight_product", _product_fake, lib=_LIBRARY)
