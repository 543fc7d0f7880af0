"""Rowwise Adagrad on all tables of a model in one launch, and one pass over each gradient.

Plain operations read a gradient twice and take seven launches a table. Here a program takes some rows of one table:
their gradient is read once (4 bytes an element), and only rows that have one are read and written (8 more).
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...precision.kernels.device import current_for

#: Elements of a program, and its warps: 32 a thread.
_TILE, _WARPS = 4096, 4
#: Wider rows than this are not held by one program.
MAX_WIDTH = 4096


@triton.jit
def rowwise_adagrad_kernel(
    tables, firsts, lr, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TABLES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Step ``ROWS`` rows of one table.

    Args:
        tables: int64 [n, 4], each table's number of rows, and the addresses of its weight and gradient, FP32
            [rows, WIDTH], and of its accumulators, FP32 [rows].
        firsts: int64 [TABLES], the first program of each; past n more than there are.
        lr: rate.
        eps: added to the root.
        WIDTH: elements of a row.
        PADDED: the next power of two.
        ROWS: of a program.
        TABLES: the next power of two of n.
        ALIGNED: weights and gradients begin at multiples of 16 bytes: an address from memory does not say so itself.
    """
    program = tl.program_id(0).to(tl.int64)
    first = tl.load(firsts + tl.arange(0, TABLES))
    index = tl.sum((first <= program).to(tl.int32), 0) - 1
    count = tl.load(tables + 4 * index)
    weight = tl.load(tables + 4 * index + 1).to(tl.pointer_type(tl.float32))
    grad = tl.load(tables + 4 * index + 2).to(tl.pointer_type(tl.float32))
    total = tl.load(tables + 4 * index + 3).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        weight, grad = tl.multiple_of(weight, 16), tl.multiple_of(grad, 16)
    rows = (program - tl.load(firsts + index)) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    at = rows[:, None] * WIDTH + columns[None, :]
    g = tl.load(grad + at, mask=(rows < count)[:, None] & (columns < WIDTH)[None, :], other=0.0)
    # Not by the sum of squares, which may underflow.
    touched = tl.max((g != 0.0).to(tl.int32), 1) > 0
    summed = tl.load(total + rows, mask=touched, other=0.0) + tl.sum(g * g, 1) / WIDTH
    tl.store(total + rows, summed, mask=touched)
    rate = tl.div_rn(lr, tl.sqrt_rn(summed) + eps)
    inside = touched[:, None] & (columns < WIDTH)[None, :]
    w = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(weight + at, w - g * rate[:, None], mask=inside)


def takes(weight: Tensor, grad: Tensor, total: Tensor) -> bool:
    """Whether the kernel can step a table: all dense, FP32 and contiguous, and no subclass such as a shard."""
    tensors = (weight.data, grad, total)
    return (
        all(type(x) is Tensor and not x.is_sparse and x.dtype == torch.float32 for x in tensors)
        and all(x.is_contiguous() and x.device == weight.device for x in tensors)
        and 0 < weight.shape[1] <= MAX_WIDTH
    )


def step_tables(
    weights: Sequence[Tensor], grads: Sequence[Tensor], totals: Sequence[Tensor], lr: float, eps: float
) -> None:
    """Step tables that :func:`takes` takes, in place.

    Args:
        weights: FP32 [rows, width], of one device; rows and widths may differ.
        grads: the same.
        totals: FP32 [rows], each.
        lr: rate.
        eps: added to the root of an accumulator.
    """
    by_width: dict[int, list[int]] = {}
    for index, weight in enumerate(weights):
        if weight.shape[0]:
            by_width.setdefault(weight.shape[1], []).append(index)
    for width, members in by_width.items():
        padded = triton.next_power_of_2(width)
        rows = max(1, _TILE // padded)
        facts, firsts, programs, addresses = [], [], 0, 0
        for i in members:
            facts += [weights[i].shape[0], weights[i].data_ptr(), grads[i].data_ptr(), totals[i].data_ptr()]
            addresses |= weights[i].data_ptr() | grads[i].data_ptr()
            firsts.append(programs)
            programs += triton.cdiv(weights[i].shape[0], rows)
        several = triton.next_power_of_2(len(members))
        firsts += [programs] * (several - len(members))
        device = weights[0].device
        # From pinned memory the copy waits for nothing that the device has yet to do.
        described = torch.tensor(facts + firsts, dtype=torch.int64, pin_memory=device.type == "cuda")
        described = described.to(device, non_blocking=True)
        with current_for(weights[0]):
            rowwise_adagrad_kernel[(programs,)](
                described, described[len(facts) :], lr, eps,
                WIDTH=width, PADDED=padded, ROWS=rows, TABLES=several, ALIGNED=addresses % 16 == 0, num_warps=_WARPS,
            )  # fmt: skip
    # Nothing else tells autograd that these were written.
    torch.autograd.graph.increment_version([*weights, *totals])
