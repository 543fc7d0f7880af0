"""Adam on BF16 moments of many parameters in one launch.

A launch from Python takes the host longer than the device takes for a parameter of less than some million elements: a
model's biases and norms, one after the other, leave the device waiting. Here a program looks up whose elements are its
own. Large parameters keep launches of their own (:func:`narrowgate.precision.kernels.adam.launch_adam`), in which
everything about them is known when the kernel is compiled.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .adam import BLOCK, INTERPRETED, WARPS, AdamRule, AdamTensors, step_tile
from .device import current_for

#: Elements up to which a parameter is worth more to the host than to the device: 84 MB of traffic, 20 us.
MOST = 1 << 22
#: Tiles of a program: enough that looking up whose they are does not count.
_TILES = 4
#: Integers that describe a parameter.
_FACTS = tl.constexpr(7)
#: By device, stream and contents, the one that was used longest ago first. Gradients come to lie where they lay before,
#: and then nothing is copied to the device.
_tables: dict[tuple[torch.device, int, tuple[Any, ...]], Tensor] = {}
_CACHED = 64


def launch_adam_together(
    rule: AdamRule,
    members: Sequence[tuple[int, AdamTensors]],
    coefficients: Tensor,
    keys: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update parameters and their moments in place, as so many calls of ``launch_adam`` would, to the bit.

    Not while a CUDA graph is captured: a replay would read addresses that were copied once.

    Args:
        rule: what is computed.
        members: of one device: what is updated, each with the number of its row of what follows.
        coefficients: FP32 [n, 4], of :func:`narrowgate.precision.kernels.adam.coefficients`.
        keys: int64 [n, 2], contiguous: where moments are rounded stochastically.
        grad_scale: FP32 []: what gradients are to be divided by.
        found_inf: FP32 []: where it is 1, nothing is written.
    """
    # By whether all threads may read and write 16 bytes at a time.
    facts: dict[bool, list[int]] = {True: [], False: []}
    sizes: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for row, tensors in members:
        count, offset = tensors.parameter.numel(), tensors.offset
        addresses = [x.data_ptr() for x in (tensors.parameter, tensors.grad, tensors.exp_avg, tensors.exp_avg_sq)]
        even = (addresses[0] | addresses[1] | addresses[2] | addresses[3] | count) % 16 == 0 and offset % 8 == 0
        if count:
            facts[even] += (*addresses, count, offset, row)
            sizes[even].append((count, offset % 8))
    keys = coefficients if keys is None else keys
    scale, found = (coefficients if x is None else x for x in (grad_scale, found_inf))
    first = members[0][1].parameter
    for even in (True, False):
        if not sizes[even]:
            continue
        described, owned = tuple(facts[even]), tuple(sizes[even])
        table = _on_device(first.device, described, lambda described=described: described)
        owners = _on_device(first.device, owned, lambda owned=owned: _owners(owned))
        with current_for(first):
            adam_together_kernel[(owners.shape[0] // 2,)](
                table, owners, coefficients, keys, scale, found,
                rule.beta1, rule.beta2, rule.eps, rule.weight_decay,
                EVEN=even, COUPLED=bool(rule.weight_decay) and not rule.decoupled,
                DECOUPLED=bool(rule.weight_decay) and rule.decoupled, MAXIMIZE=rule.maximize,
                UNSCALE=grad_scale is not None, GUARDED=found_inf is not None, STOCHASTIC=rule.stochastic,
                STEPWISE=INTERPRETED, BLOCK=BLOCK, TILES=_TILES, num_warps=WARPS,
            )  # fmt: skip


def _owners(sizes: Sequence[tuple[int, int]]) -> list[int]:
    """For each program whose elements it takes and its first tile of them; a member has elements and skipped ones."""
    programs: list[int] = []
    for index, (count, skip) in enumerate(sizes):
        for tile in range(0, triton.cdiv(count + skip, BLOCK), _TILES):
            programs += (index, tile)
    return programs


def _on_device(device: torch.device, key: tuple[Any, ...], numbers: Callable[[], Sequence[int]]) -> Tensor:
    """Integers that ``key`` stands for, int64 on ``device``, for use on its current stream."""
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    table = _tables.pop((device, stream, key), None)
    if table is None:
        # From pinned memory the copy waits for nothing that the device has yet to do. Of the CPU, whatever the default.
        table = torch.tensor(numbers(), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        table = table.to(device, non_blocking=True)
        if len(_tables) >= _CACHED:
            del _tables[next(iter(_tables))]
    _tables[device, stream, key] = table  # the last one that was used
    return table


@triton.jit
def adam_together_kernel(
    members, programs, coefficients, keys, grad_scale, found_inf, beta1, beta2, eps, weight_decay,
    EVEN: tl.constexpr, COUPLED: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, UNSCALE: tl.constexpr,
    GUARDED: tl.constexpr, STOCHASTIC: tl.constexpr, STEPWISE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Update up to ``TILES`` tiles of one parameter.

    Args:
        members: int64 [m, 7], for each parameter the addresses of itself, its gradient (FP32) and its moments (BF16),
            its elements, the index of the first in the unsharded parameter, and its row of what follows.
        programs: int64 [programs, 2], which of the members, and the first tile of it.
        coefficients: FP32 [n, 4].
        keys: int64 [n, 2].
        grad_scale: FP32 [].
        found_inf: FP32 [].
        beta1: as the next three, of the rule.
        beta2: see there.
        eps: see there.
        weight_decay: see there.
        EVEN: all addresses and counts are multiples of 16, all first indices of 8: addresses from memory do not say so
            themselves.
        COUPLED: as all that follow but the last, of the kernel for one parameter.
        DECOUPLED: see there.
        MAXIMIZE: see there.
        UNSCALE: see there.
        GUARDED: see there.
        STOCHASTIC: see there.
        STEPWISE: see there.
        BLOCK: elements of a tile.
        TILES: tiles of a program.
    """
    if GUARDED:  # noqa: SIM102  (what is not there is not loaded)
        if tl.load(found_inf) == 1.0:
            return
    facts = members + _FACTS * tl.load(programs + 2 * tl.program_id(0))
    tile = tl.load(programs + 2 * tl.program_id(0) + 1)
    parameter = tl.load(facts).to(tl.pointer_type(tl.float32))
    grad = tl.load(facts + 1).to(tl.pointer_type(tl.float32))
    exp_avg = tl.load(facts + 2).to(tl.pointer_type(tl.bfloat16))
    exp_avg_sq = tl.load(facts + 3).to(tl.pointer_type(tl.bfloat16))
    count, offset, row = tl.load(facts + 4), tl.load(facts + 5), tl.load(facts + 6)
    skip = offset % 8
    if EVEN:
        parameter, grad = tl.multiple_of(parameter, 16), tl.multiple_of(grad, 16)
        exp_avg, exp_avg_sq = tl.multiple_of(exp_avg, 16), tl.multiple_of(exp_avg_sq, 16)
        count = tl.multiple_of(count, 16)
    for _ in range(0, tl.minimum(TILES, (count + skip + BLOCK - 1) // BLOCK - tile)):
        # Tiles begin at a multiple of eight elements of the unsharded parameter: a thread uses all that it draws.
        at = tile * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        if not EVEN:
            at -= skip
            inside = (at >= 0) & (at < count)
        counter = offset // 8 + tile * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
        step_tile(
            parameter, grad, exp_avg, exp_avg_sq, at, inside, counter, coefficients + 4 * row, keys + 2 * row,
            grad_scale, beta1, beta2, eps, weight_decay,
            COUPLED, DECOUPLED, MAXIMIZE, UNSCALE, STOCHASTIC, STEPWISE, BLOCK,
        )  # fmt: skip
        tile += 1
