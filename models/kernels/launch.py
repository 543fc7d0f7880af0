"""Launching the attention kernels: tensors in, tensors out, and the tiles for a shape."""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...precision.kernels.device import current_for
from .jagged_attention import (
    attention_forward_kernel,
    attention_inverse_rms_kernel,
    attention_key_gradient_kernel,
    attention_query_gradient_kernel,
)
from .jagged_rows import attention_row_backward_kernel, attention_row_forward_kernel
from .reference import Biases, Rules


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, warps of a program, and loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


#: By kernel: for heads up to 64 elements wide, for wider ones over short rows, and over long ones. Large tiles are what
#: fits registers (keys have two sums to hold) and shared memory of a Hopper multiprocessor. Over rows of ``SHORT``
#: tokens at most a program's loop ends after a few tiles: what hides its loads is more programs at a time, which small
#: tiles and little shared memory leave room for.
TILES = {
    "forward": (Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 1), Tiles(128, 64, 8, 3)),
    "query_gradient": (Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 1), Tiles(128, 64, 8, 2)),
    "key_gradient": (Tiles(64, 128, 8, 2), Tiles(32, 64, 4, 2), Tiles(64, 128, 8, 2)),
}
SHORT = 256
#: FP32 is multiplied outside of the matrix units, from registers.
FP32_TILES = Tiles(16, 16, 4, 1)
_LEAST = 16
#: Rows with up to this many queries and keys are one tile, which a program does alone (``jagged_rows``); FP32 as many
#: as ``FP32_TILES`` hold.
ROW = 64
#: Registers of a thread there: of four warps each, four programs fit a multiprocessor forward and three backward.
ROW_REGISTERS = {"forward": 128, "backward": 168}
#: Rows' worth of programs that set to zero what lies behind the last row: up to one bound of a batch.
SWEEPERS = 32
#: Elements that a program of ``attention_inverse_rms_kernel`` reads.
_INVERSE_ELEMENTS = 8192


def tiles_for(kernel: str, head: int, dtype: torch.dtype, rules: Rules, *, timed: bool = False) -> Tiles:
    """Return the tiles of ``kernel`` for heads of width ``head``, no longer than rows can be.

    ``timed``: with a bias of time. Summing its gradient holds the bucket of every pair, so tiles are half as large.
    """
    narrow, short, long = TILES[kernel]
    wide = short if max(rules.max_q, rules.max_kv) <= SHORT else long
    found = FP32_TILES if dtype is torch.float32 else narrow if head <= 64 else wide
    longest = (max(_LEAST, triton.next_power_of_2(n)) for n in (rules.max_q, rules.max_kv))
    size = (found.queries, max(_LEAST, found.keys // 2) if timed and kernel == "query_gradient" else found.keys)
    queries, keys = (min(most, wanted) for most, wanted in zip(longest, size, strict=True))
    # What is summed up lies in registers: as many rows as the program's own side has.
    own = keys if kernel == "key_gradient" else queries
    return Tiles(queries, keys, min(found.warps, 4) if own <= 64 else found.warps, found.stages)


def by_row(dtype: torch.dtype, rules: Rules) -> bool:
    """Return whether a program does all of a row and head; else tiles of queries and of keys have their own."""
    return max(rules.max_q, rules.max_kv) <= (min(ROW, FP32_TILES.queries) if dtype is torch.float32 else ROW)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, rules: Rules, biases: Biases
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`narrowgate.models.kernels.reference.reference_forward` does, and what backward needs of it.

    Returns:
        [Tq, H, dh]; and with ``rules.eps`` the inverse root mean squares, FP32, of queries [Tq, H] and keys [Tk, H], of
        those at least that backward reads, else two empty tensors.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    inverses = _inverses(q, k, rules)
    tensors, strides = (q, k, v, out, *inverses, *_given(biases, q), q_offsets, kv_offsets), _strides(q, k, v)
    if by_row(q.dtype, rules):
        if q.numel():
            _launch_rows(
                attention_row_forward_kernel, "forward", tensors, strides, q, k, q_offsets, rules, biases,
                eps=rules.eps or 0.0,
            )  # fmt: skip
        return out, *inverses
    if rules.eps is not None:
        _launch_inverse(k, inverses[1], rules.eps)
    tiles = tiles_for("forward", q.shape[2], q.dtype, rules)
    _launch(
        attention_forward_kernel, tiles, tensors, strides, q, k, q_offsets, rules, biases, of_keys=False,
        eps=rules.eps or 0.0,
    )  # fmt: skip
    return out, *inverses


def launch_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, inverses: tuple[Tensor, Tensor], q_offsets: Tensor,
    kv_offsets: Tensor, rules: Rules, biases: Biases, into: tuple[Tensor, Tensor, Tensor],
) -> list[Tensor]:  # fmt: skip
    """Write what :func:`narrowgate.models.kernels.reference.reference_backward` returns.

    Args:
        grad: of the output, [Tq, H, dh].
        q: as in forward.
        k: as in forward.
        v: as in forward.
        inverses: the second and third result of :func:`launch_forward`.
        q_offsets: as in forward.
        kv_offsets: as in forward.
        rules: as in forward.
        biases: as in forward.
        into: takes the gradients of q, k and v, of their shapes; heads side by side, tokens anywhere.

    Returns:
        The gradients, FP32, of the tables of ``biases`` that there are.
    """
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    of_q, of_k, of_v = into
    strides = _strides(q, k, v, grad)
    inputs, others = (q, k, v, grad), (*inverses, *_given(biases, q), q_offsets, kv_offsets)
    tiles = tiles_for("query_gradient", q.shape[2], q.dtype, rules, timed=biases.by_time is not None)
    alone = by_row(q.dtype, rules)
    # A part of each program, added up in their order: the same bits every run.
    programs = (q_offsets.shape[0] - 1 + SWEEPERS, q.shape[1], 1 if alone else triton.cdiv(rules.max_q, tiles.queries))
    parts = [
        None if table is None else torch.zeros((*programs, table.shape[1]), dtype=torch.float32, device=q.device)
        for table in (biases.by_distance, biases.by_time)
    ]
    of_tables = [q if part is None else part for part in parts]
    if alone:
        if q.numel() or k.numel():
            tensors = (*inputs, *into, *of_tables, *others)
            places = [*strides, *(x.stride(0) for x in into)]
            _launch_rows(attention_row_backward_kernel, "backward", tensors, places, q, k, q_offsets, rules, biases)
        return [part.sum((0, 2)) for part in parts if part is not None]
    tensors = (*inputs, of_q, *of_tables, *others)
    places = [*strides, of_q.stride(0)]
    _launch(attention_query_gradient_kernel, tiles, tensors, places, q, k, q_offsets, rules, biases, of_keys=False)
    tiles = tiles_for("key_gradient", q.shape[2], q.dtype, rules)
    tensors = (*inputs, of_k, of_v, *others)
    places = [*strides, of_k.stride(0), of_v.stride(0)]
    _launch(attention_key_gradient_kernel, tiles, tensors, places, q, k, q_offsets, rules, biases, of_keys=True)
    return [part.sum((0, 2)) for part in parts if part is not None]


def _given(biases: Biases, ignored: Tensor) -> tuple[Tensor, ...]:
    """The tensors of ``biases`` as kernels take them; what they do not read is any tensor."""
    tensors = (biases.by_distance, biases.times, biases.by_time)
    return tuple(ignored if x is None else x for x in tensors)


def _inverses(q: Tensor, k: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    shapes = [x.shape[:2] if rules.eps is not None else (0,) for x in (q, k)]
    first, second = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes)
    return first, second


def _launch_inverse(x: Tensor, inverse: Tensor, eps: float) -> None:
    tokens, heads, head = x.shape
    if x.numel():
        width = max(_LEAST, triton.next_power_of_2(head))
        block = max(1, _INVERSE_ELEMENTS // width)
        with current_for(x):
            attention_inverse_rms_kernel[(triton.cdiv(tokens * heads, block),)](
                x, inverse, *_strides(x), tokens, eps, HEADS=heads, DH=head, BD=width, BLOCK=block, num_warps=4
            )


def _launch(
    kernel: Any, tiles: Tiles, tensors: Any, strides: Any, q: Tensor, k: Tensor, offsets: Tensor, rules: Rules,
    biases: Biases, *, of_keys: bool, **more: Any,
) -> None:  # fmt: skip
    rows, heads = offsets.shape[0] - 1, q.shape[1]
    owner, longest, size = (k, rules.max_kv, tiles.keys) if of_keys else (q, rules.max_q, tiles.queries)
    if not owner.numel():
        return
    count = triton.cdiv(longest, size)
    # More rows than there are: what lies behind the last one is set to zero.
    with current_for(q):
        kernel[(count * heads * (rows + SWEEPERS),)](
            *tensors, *strides, rows, SWEEPERS, q.shape[0], k.shape[0], count, *_numbers(rules), **more,
            **_constants(q, rules, biases), BM=tiles.queries, BN=tiles.keys, num_warps=tiles.warps,
            num_stages=tiles.stages,
        )  # fmt: skip


def _launch_rows(
    kernel: Any, name: str, tensors: Any, strides: Any, q: Tensor, k: Tensor, offsets: Tensor, rules: Rules,
    biases: Biases, **more: Any,
) -> None:  # fmt: skip
    rows = offsets.shape[0] - 1
    queries, keys = (max(_LEAST, triton.next_power_of_2(n)) for n in (rules.max_q, rules.max_kv))
    # Biases take what there is.
    plain = biases.by_distance is None and biases.by_time is None
    with current_for(q):
        kernel[(q.shape[1] * (rows + SWEEPERS),)](
            *tensors, *strides, rows, SWEEPERS, q.shape[0], k.shape[0], *_numbers(rules), **more,
            **_constants(q, rules, biases), BM=queries, BN=keys, num_warps=4, num_stages=1,
            maxnreg=ROW_REGISTERS[name] if plain else None,
        )  # fmt: skip


def _numbers(rules: Rules) -> tuple[int | float, ...]:
    return rules.max_q, rules.max_kv, rules.scale, 1 / rules.norm, rules.window, rules.n_summary


def _constants(q: Tensor, rules: Rules, biases: Biases) -> dict[str, Any]:
    """What kernels are compiled for, but for their tiles."""
    heads, head = q.shape[1:]
    return {
        "ACTIVATION": rules.activation, "CAUSAL": rules.causal, "WINDOWED": rules.window > 0,
        "UNIT": rules.eps is not None, "REACH": _width(biases.by_distance), "BUCKETS": _width(biases.by_time),
        "HEADS": heads, "DH": head, "BD": max(_LEAST, triton.next_power_of_2(head)), "PRECISION": "ieee",
    }  # fmt: skip


def _width(table: Tensor | None) -> int:
    return 0 if table is None else table.shape[1]


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]
