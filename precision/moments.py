"""How one moment of one parameter is stored between optimizer steps, and how it comes back.

A moment is computed in FP32 and stored as one of the formats of :mod:`narrowgate.precision.state_formats`:

- **BF16**, rounded to nearest or stochastically; every parameter's.
- **Blocks of eight bits**: FP8 with an FP32 scale for 128, 32 or 16 elements, or MXFP8. A block lies within a row: the
  elements of one index of the parameter's first axis. Sharding over that axis splits none, so scales and codes are
  those of the unsharded moment. Parameters that are small or have short rows keep FP32.

A second moment is divided by: where eight bits would round a positive one to zero they store their smallest value,
which makes that element's update smaller, never larger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .casting import Request, has_kernel, quantize_both
from .errors import NarrowgateError
from .formats import BF16
from .gathered import CodedWeight
from .quantization import QuantizedTensor, quantize
from .rounding import round_stochastic
from .spec import Spec
from .stochastic import Shard, random_bits

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: The moments that are known, by the names that optimizers of the Adam family give them.
MOMENTS = ("exp_avg", "exp_avg_sq")
#: The one that is never negative, and is divided by.
_SECOND = "exp_avg_sq"
#: Types of tensors that hold no other.
ORDINARY = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Place:
    """The part of a parameter that this rank holds."""

    shape: tuple[int, ...]
    #: None where it is the whole parameter.
    shard: Shard | None

    @property
    def rows(self) -> tuple[int, int]:
        """Shape of the local part with all axes but the first joined."""
        width = 1
        for size in self.shape[1:]:
            width *= size
        return self.shape[0], width


def place_of(parameter: Tensor, name: str, spec: Spec) -> Place:
    """Where the local part of ``parameter`` lies in the unsharded one.

    Raises:
        NarrowgateError: its shards are such that blocks of rows, or an element's index, are not defined.
    """
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return Place(tuple(parameter.shape), None)
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Sharded
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = parameter.placements  # type: ignore[attr-defined]
    plain = all(type(placement) in (Replicate, Sharded) for placement in placements)
    by_rows = all(isinstance(placement, Replicate) or placement.dim == 0 for placement in placements if plain)
    if not plain or not (by_rows or spec.high_precision):
        wanted = "replicas and shards" if spec.high_precision else "replicas and shards of whole rows"
        raise NarrowgateError(f"'{name}': found placements {placements}, expected {wanted} for state in {spec}")
    shape, start = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return Place(tuple(shape), Shard(tuple(parameter.shape), tuple(start)))


def local(x: Tensor) -> Tensor:
    """The ordinary tensor that this rank holds of ``x``."""
    if type(x) in ORDINARY:  # asked many times a step
        return x
    x = getattr(x, "_local_tensor", x)
    if isinstance(x, CodedWeight):
        source = x.source()
        assert source is not None
        return source
    return x


def distributed_like(like: Tensor, x: Tensor) -> Tensor:
    """``x``, the local part of a tensor that is distributed as ``like`` is."""
    if not hasattr(like, "device_mesh"):
        return x
    # DTensor.from_local would move an offloaded shard to the mesh's device.
    whole: DTensor = torch.zeros_like(like, dtype=x.dtype)  # type: ignore[assignment]
    whole._local_tensor = x
    return whole


def scale_name(name: str) -> str:
    """Under which name an optimizer's state holds the scales of a moment's codes: FP32 or E8M0 [rows, blocks]."""
    return f"{name}_scale"


def store(name: str, values: Tensor, spec: Spec, place: Place, key: Tensor | None) -> dict[str, Tensor]:
    """Round a moment's local FP32 ``values`` to what is stored.

    Rounded to nearest, what :func:`restore` returned is stored as the same values again: the largest code of a block
    is the format's largest value, 7 * 2**n, and where s is amax / 7 rounded to FP32, so is a seventh of 7 s rounded. A
    scale that is a power of two may come back as its half, with codes twice as large.

    Args:
        name: of :data:`MOMENTS`.
        values: FP32 in the shape of ``place``.
        spec: BF16, or blocks of eight bits.
        place: where ``values`` lie in the unsharded moment, for the random bits of ``sr``.
        key: int64 []: their 64-bit key; None rounds to nearest, whatever ``spec`` says.

    Returns:
        By name: BF16 values, or 8-bit codes in the shape of ``values`` and their scales.
    """
    if key is None:
        spec = replace(spec, sr=False)
    if spec.high_precision:
        return {name: _to_bf16(values, place, key)}
    rows = values.reshape(place.rows)
    shard = None if place.shard is None else _rows_of(place.shard)
    stored = _quantize(rows, spec, key, shard)
    return _entries(name, rows, stored, place)


def restore(name: str, state: dict[str, Any], spec: Spec, place: Place) -> Tensor:
    """The FP32 values, in the shape of ``place``, of a moment stored in ``state``."""
    codes = local(state[name])
    if spec.high_precision:
        return codes.to(torch.float32)
    quantized = QuantizedTensor(codes.view(place.rows), state[scale_name(name)], None, spec, 1, place.rows)
    return quantized.dequantize().view(place.shape)


def _entries(name: str, rows: Tensor, stored: QuantizedTensor, place: Place) -> dict[str, Tensor]:
    codes, scale = stored.data, stored.scale
    assert scale is not None
    if name == _SECOND:
        # Code 1 is the smallest positive value of every format.
        lost = (codes.view(torch.uint8) == 0) & (rows > 0)
        codes = codes.view(torch.uint8).masked_fill(lost, 1).view(codes.dtype)
    return {name: codes.view(place.shape), scale_name(name): scale.contiguous()}


def _rows_of(shard: Shard) -> Shard:
    width = 1
    for size in shard.shape[1:]:
        width *= size
    return Shard((shard.shape[0], width), (shard.start[0], 0))


def _quantize(rows: Tensor, spec: Spec, key: Tensor | None, shard: Shard | None) -> QuantizedTensor:
    whole = shard is None or not spec.sr  # kernels number the elements of what they are given
    if rows.numel() and whole and has_kernel(rows, spec):
        quantized, _ = quantize_both(rows, Request(spec, seed=key), None)
        assert quantized is not None
        return quantized
    return quantize(rows, spec, dim=1, seed=key, shard=shard)


def _to_bf16(values: Tensor, place: Place, key: Tensor | None) -> Tensor:
    if key is None:
        return values.to(torch.bfloat16)
    whole = place.shard or Shard(place.shape, (0,) * len(place.shape))
    if place.shape[1:] != whole.shape[1:]:
        return quantize(values, Spec(format="bf16", sr=True), seed=key, shard=whole).data
    offset = whole.start[0] * place.rows[1] if place.shape else 0
    # One kernel beside the one that makes the bits, instead of a dozen passes; the same bits.
    rounding = _compiled_stochastic_bf16() if values.is_cuda else _stochastic_bf16
    return rounding(values.reshape(-1), key, offset).view(place.shape)


def _stochastic_bf16(flat: Tensor, key: Tensor, offset: int) -> Tensor:
    """Elements ``offset`` and on of a moment, FP32 [n] -> BF16 [n]."""
    count = flat.shape[0]
    bits = random_bits(key, (count,), flat.device, Shard((offset + count,), (offset,)))
    return round_stochastic(flat, BF16, bits).to(torch.bfloat16)


@cache
def _compiled_stochastic_bf16() -> Any:
    return torch.compile(_stochastic_bf16, dynamic=True)
