"""Codes of one rank's rows of a weight: those that the rows have when one process quantizes all of it, bit for bit.

A scale that reaches over one row or less is known to the rank that holds the row, and one of a block of several rows
where no shard ends within a block. What a rank cannot know by itself is a maximum over ranks (:func:`reach`): of the
whole weight for a tensor scale, and for the tensor level of NVFP4; of every block, where shards split blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .casting import Request, quantize_both
from .delayed import AmaxHistory
from .grouping import group
from .quantization import QuantizedTensor, quantize
from .scaling import scales_from_amax
from .spec import Spec

_FP32 = torch.float32


def block_rows(spec: Spec) -> int:
    """Rows that one scale reaches over; 1 where it lies within a row."""
    return 1 if spec.block is None else spec.block[0]


def reach(spec: Spec, count: int, ranks: int) -> str | None:
    """What maxima a rank needs of the others: of the ``tensor``, of its ``blocks``, or None.

    Follows from the number of rows of the whole weight and the number of ranks alone, so it is alike on all of them.
    """
    if ranks == 1:
        return None
    if -(-count // ranks) % block_rows(spec):
        return "blocks"
    return "tensor" if spec.granularity == "tensor" or spec.fmt.tensor_scale else None


def payload_bytes(spec: Spec, shape: tuple[int, int], ranks: int) -> tuple[int, int, int]:
    """Bytes that each of ``ranks`` gives for a weight [N, K]: codes and scales to an all-gather, and FP32 maxima."""
    (count, columns), rows = shape, -(-shape[0] // ranks)
    if ranks == 1:  # nothing is gathered
        return 0, 0, 0
    codes = rows * (-(-columns // 2) if spec.fmt.element.bits == 4 else columns)
    reaches, (height, width) = reach(spec, count, ranks), spec.block or (1, columns)
    across = -(-columns // width)
    if reaches == "blocks":
        return codes, 0, 4 * -(-count // height) * across
    if spec.granularity == "tensor":
        return codes, 0, 4
    return codes, (4 if spec.fmt.scale is None else 1) * (rows // height) * across, 4 if reaches else 0


def own_amax(rows: Tensor, spec: Spec, shape: tuple[int, int], first: int, reaches: str) -> Tensor:
    """The maxima of :func:`reach`, FP32, as far as this rank's rows tell: [] or one for each block of the whole weight.

    Infinite for a group that holds NaN or infinity; those are left out of NVFP4's tensor level, as its own rule says.

    Args:
        rows: this rank's, [n, K].
        spec: how the weight is gathered.
        shape: the whole weight's, [N, K].
        first: the index of this rank's first row.
        reaches: what :func:`reach` says.
    """
    if reaches == "blocks":
        return _block_amax(rows, spec, shape, first)
    if spec.granularity == "tensor":
        return tensor_amaxes([rows])[0]
    assert spec.granularity is not None
    groups = group(tuple(rows.shape), spec.granularity, spec.block, 1)
    blocks = groups.amax(groups.split(rows.to(_FP32)))
    return _largest_finite(blocks)


def tensor_amaxes(shards: Sequence[Tensor]) -> list[Tensor]:
    """:func:`own_amax` of tensor scales, FP32 [] each, in as few launches as there are devices and dtypes."""
    found = [rows.new_zeros((), dtype=_FP32) for rows in shards]
    there = [index for index, rows in enumerate(shards) if rows.numel()]
    if there:
        norms = torch._foreach_norm([shards[index] for index in there], torch.inf)  # type: ignore[attr-defined]
        joined = _finite_or_infinite(torch.stack([norm.to(_FP32) for norm in norms]))
        for index, amax in zip(there, joined.unbind(), strict=True):
            found[index] = amax
    return found


def quantize_rows(
    rows: Tensor, spec: Spec, shape: tuple[int, int], first: int, reaches: str | None, amax: Tensor | None
) -> QuantizedTensor:
    """Quantize a rank's ``rows``, given the maxima ``amax`` over all ranks of what :func:`reach` says.

    Returns:
        The rows' codes; of scales the rows' own, or with ``reaches`` of a tensor scale or of blocks the whole weight's.
    """
    if reaches is None:
        return _quantize(rows, Request(spec))
    assert amax is not None
    if spec.granularity == "tensor":
        # As a delayed scale, an amax from elsewhere has a kernel that reads the values once.
        history = AmaxHistory(1, rows.device)
        # Not the tensor itself, a part of a joint all-reduce: kernels launch fast on aligned addresses only.
        history.history.copy_(amax)
        history.recording = False
        found = _quantize(rows, Request(replace(spec, delayed=1), history=history))
        return replace(found, spec=spec)
    if reaches == "tensor":
        return quantize(rows, spec, dim=1, amax=amax)
    return _quantize_split(rows, spec, shape, first, amax)


def _quantize(rows: Tensor, request: Request) -> QuantizedTensor:
    if not rows.numel():  # no kernel is launched for nothing
        return quantize(rows, request.spec, dim=1, history=request.history)
    quantized, _ = quantize_both(rows, request, None)
    assert quantized is not None
    return quantized


def _quantize_split(rows: Tensor, spec: Spec, shape: tuple[int, int], first: int, amax: Tensor) -> QuantizedTensor:
    """Of blocks that other ranks hold a part of: ``amax`` knows them all."""
    height, width = spec.block or (1, 1)
    top = first % height
    whole = F.pad(rows, (0, 0, top, -(top + len(rows)) % height))
    # A block that other ranks share has a row here that is none of ours: with the block's maximum in it, the block
    # scales as the whole one does.
    mine = amax[first // height :][: len(whole) // height].to(whole.dtype)
    if top and len(whole):
        whole[0, ::width] = mine[0]
    if len(whole) > top + len(rows):
        whole[-1, ::width] = mine[-1]
    tensor = _largest_finite(amax) if spec.fmt.tensor_scale else None
    codes = (_quantize(whole, Request(spec)) if tensor is None else quantize(whole, spec, dim=1, amax=tensor)).data
    scales = scales_from_amax(amax, spec, tensor)
    return QuantizedTensor(
        codes[top : top + len(rows)], scales.scale, scales.tensor_scale, spec, 1, (len(rows), shape[1])
    )


def _block_amax(rows: Tensor, spec: Spec, shape: tuple[int, int], first: int) -> Tensor:
    assert spec.block is not None
    (count, columns), (height, width) = shape, spec.block
    amax = rows.new_zeros(-(-count // height), -(-columns // width), dtype=_FP32)
    if rows.numel():
        top = first % height
        padded = F.pad(rows.abs(), (0, -columns % width, top, -(top + len(rows)) % height))
        blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width)).amax((1, 3))
        amax[first // height :][: len(blocks)] = blocks
    return _finite_or_infinite(amax)


def _finite_or_infinite(amax: Tensor) -> Tensor:
    # No library says what its maximum makes of NaN, and all agree on infinity.
    return torch.where(amax < torch.inf, amax, torch.inf)


def _largest_finite(amax: Tensor) -> Tensor:
    return torch.where(amax < torch.inf, amax, 0.0).amax() if amax.numel() else amax.new_zeros(())
