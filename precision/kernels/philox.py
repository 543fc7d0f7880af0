"""Random bits in one launch: the GPU twin of :func:`narrowgate.precision.stochastic.random_bits`."""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding import philox

_BLOCK = 1024


def fill_random_bits(key: Tensor, offset: int, count: int) -> Tensor:
    """Return the 16 bits of the elements offset .. offset + count under ``key``, int16 [count] on the key's device.

    Args:
        key: int64, shape [], on a CUDA device.
        offset: index of the first element in the unsharded tensor.
        count: number of elements.
    """
    out = torch.empty(count, dtype=torch.int16, device=key.device)
    first = offset // 8
    counters = (offset + count + 7) // 8 - first
    if counters:
        _fill[(triton.cdiv(counters, _BLOCK),)](out, key, first, offset - 8 * first, count, counters, BLOCK=_BLOCK)
    return out


@triton.jit
def _fill(out, key, first, skip, count, counters, BLOCK: tl.constexpr):
    local = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = philox(tl.load(key), first + local)
    # Element 8 c + j takes word j // 2: the low half where j is even, the high half where it is odd.
    low = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(low & 0xFFFF, low >> 16)
    bits = tl.reshape(halves, (BLOCK, 8)).to(tl.int16)
    lane = tl.arange(0, 8)
    at = local[:, None] * 8 + lane[None, :] - skip
    tl.store(out + at, bits, mask=(local[:, None] < counters) & (at >= 0) & (at < count))


def fill_group_bits(keys: Tensor, group: Tensor, place: Tensor, width: int) -> Tensor:
    """Return the 16 bits of rows of groups: the GPU twin of :func:`narrowgate.precision.grouped_rows.group_bits`.

    Args:
        keys: int64 [E], each group's key, on a CUDA device.
        group: int64 [R], each row's group.
        place: int64 [R], each row's place within its group.
        width: columns.

    Returns:
        int16 [R, width].
    """
    rows = group.shape[0]
    out = torch.empty((rows, width), dtype=torch.int16, device=keys.device)
    if out.numel():
        counters = width // 8 + 2
        block = min(_BLOCK, triton.next_power_of_2(counters))
        # Rows along the first axis of the grid, the only one that goes beyond 65,535.
        _fill_groups[(rows, triton.cdiv(counters, block))](out, keys, group, place, width, BLOCK=block)
    return out


@triton.jit
def _fill_groups(out, keys, group, place, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(place + row) * width
    local = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = philox(tl.load(keys + tl.load(group + row)), begin // 8 + local)
    low = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(low & 0xFFFF, low >> 16)
    bits = tl.reshape(halves, (BLOCK, 8)).to(tl.int16)
    lane = tl.arange(0, 8)
    at = local[:, None] * 8 + lane[None, :] - begin % 8
    tl.store(out + row * width + at, bits, mask=(at >= 0) & (at < width))
