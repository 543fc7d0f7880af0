"""Closing the step of all amax histories of a model in one launch, where single operations take one or two for each.

A model has a hundred histories of a few dozen bytes. Stacking them, shifting and copying back costs the host more than
the casts of a small model, and the device waits for it.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiled import Launch
from .device import current_for

#: By the addresses of histories and of what is pending: they, on the device.
_tables: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
#: Tables that are kept: more than a process has models and lengths of histories.
_CACHED = 64
#: Tables that CUDA graphs read, for as long as those may be replayed.
_captured: list[Tensor] = []
#: By device and length, some of which Triton has kernels of their own for.
_launches: dict[tuple[torch.device, int], Launch] = {}


@triton.jit
def roll_kernel(table, length, nothing, PADDED: tl.constexpr):
    """Enter what is pending in a history; a program takes one.

    Args:
        table: int64 [n, 2], addresses of an FP32 [length] history and of FP32 [] pending.
        length: of every history.
        nothing: what says that nothing is pending, negative; written when it was entered.
        PADDED: the next power of two.
    """
    history = tl.load(table + 2 * tl.program_id(0)).to(tl.pointer_type(tl.float32))
    pending = tl.load(table + 2 * tl.program_id(0) + 1).to(tl.pointer_type(tl.float32))
    newest = tl.load(pending)
    at = tl.arange(0, PADDED)
    shifted = tl.load(history + at - 1, mask=(at > 0) & (at < length), other=newest)
    # Every element is read before its neighbour is written.
    tl.debug_barrier()
    if newest >= 0:
        tl.store(history + at, shifted, mask=at < length)
    tl.store(pending, nothing)


def roll_in_one(histories: Sequence[Tensor], pending: Sequence[Tensor], nothing: float) -> bool:
    """Enter every one of ``pending`` in its history, and clear it.

    Args:
        histories: FP32 [length], on one device, newest first.
        pending: FP32 [], as many; negative where nothing is pending.
        nothing: what clears.

    Returns:
        False where nothing was done: a CUDA graph is being captured that would have to compile or to copy addresses.
    """
    device, length = histories[0].device, histories[0].numel()
    # One that is named twice is entered once: two programs would race.
    pairs = dict.fromkeys(zip(map(_address, histories), map(_address, pending), strict=True))
    addresses = tuple(itertools.chain.from_iterable(pairs))
    table = _tables.get((device, addresses))
    launch = _launches.get((device, length))
    if launch is None:
        launch = Launch(roll_kernel, (1, 1), 1, {"PADDED": triton.next_power_of_2(length)})
        _launches[device, length] = launch
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if table is None or launch.compiled is None:
            return False
        _captured.append(table)
    if table is None:
        if len(_tables) >= _CACHED:
            _tables.clear()
        table = torch.tensor(addresses, dtype=torch.int64, device="cpu").to(device)  # whatever the default device
        _tables[device, addresses] = table
    launch.grid = len(pairs), 1
    with current_for(histories[0]):
        if launch.compiled is None:
            launch.first(True, table, length, nothing)
        else:
            launch.again(torch._C._cuda_getCurrentRawStream(device.index), table.data_ptr(), length, nothing)
    # Nothing else tells who looks at version counters that these were written.
    torch.autograd.graph.increment_version([*histories, *pending])
    return True


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()
