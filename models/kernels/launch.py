"""Launching the attention kernels: tensors in, tensors out, and the tiles for a shape."""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .jagged_attention import attention_forward_kernel, attention_key_gradient_kernel, attention_query_gradient_kernel
from .reference import Rules


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, warps of a program, and loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


#: By kernel, for heads up to 64 and up to 128 elements wide: what fits registers (keys have two sums to hold) and
#: shared memory of a Hopper multiprocessor.
TILES = {
    "forward": (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3)),
    "query_gradient": (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2)),
    "key_gradient": (Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 2)),
}
#: FP32 is multiplied outside of the matrix units, from registers.
FP32_TILES = Tiles(16, 16, 4, 1)
_LEAST = 16
#: Rows' worth of programs that set to zero what lies behind the last row: up to one bound of a batch.
SWEEPERS = 32


def tiles_for(kernel: str, head: int, dtype: torch.dtype, rules: Rules) -> Tiles:
    """Return the tiles of ``kernel`` for heads of width ``head``, no longer than rows can be."""
    found = FP32_TILES if dtype is torch.float32 else TILES[kernel][head > 64]
    longest = (max(_LEAST, triton.next_power_of_2(n)) for n in (rules.max_q, rules.max_kv))
    queries, keys = (min(size, most) for size, most in zip((found.queries, found.keys), longest, strict=True))
    # What is summed up lies in registers: as many rows as the program's own side has.
    own = keys if kernel == "key_gradient" else queries
    return Tiles(queries, keys, min(found.warps, 4) if own <= 64 else found.warps, found.stages)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, rules: Rules) -> Tensor:
    """See :func:`narrowgate.models.kernels.reference.reference_forward`."""
    q, k, v = map(_dense, (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiles = tiles_for("forward", q.shape[2], q.dtype, rules)
    tensors, strides = (q, k, v, out, q_offsets, kv_offsets), _strides(q, k, v)
    _launch(attention_forward_kernel, tiles, tensors, strides, q, k, q_offsets, rules, of_keys=False)
    return out


def launch_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, rules: Rules
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`narrowgate.models.kernels.reference.reference_backward`."""
    grad, q, k, v = map(_dense, (grad, q, k, v))
    of_q, of_k, of_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    strides = _strides(q, k, v, grad)
    inputs, offsets = (q, k, v, grad), (q_offsets, kv_offsets)
    tiles = tiles_for("query_gradient", q.shape[2], q.dtype, rules)
    tensors = (*inputs, of_q, *offsets)
    _launch(attention_query_gradient_kernel, tiles, tensors, strides, q, k, q_offsets, rules, of_keys=False)
    tiles = tiles_for("key_gradient", q.shape[2], q.dtype, rules)
    tensors = (*inputs, of_k, of_v, *offsets)
    _launch(attention_key_gradient_kernel, tiles, tensors, strides, q, k, q_offsets, rules, of_keys=True)
    return of_q, of_k, of_v


def _launch(
    kernel: Any, tiles: Tiles, tensors: Any, strides: Any, q: Tensor, k: Tensor, offsets: Tensor, rules: Rules, *,
    of_keys: bool,
) -> None:  # fmt: skip
    rows, heads, head = offsets.shape[0] - 1, q.shape[1], q.shape[2]
    owner, longest, size = (k, rules.max_kv, tiles.keys) if of_keys else (q, rules.max_q, tiles.queries)
    if not owner.numel():
        return
    count = triton.cdiv(longest, size)
    # More rows than there are: what lies behind the last one is set to zero.
    kernel[(count * heads * (rows + SWEEPERS),)](
        *tensors, *strides, rows, SWEEPERS, q.shape[0], k.shape[0], count, rules.max_q, rules.max_kv, rules.scale,
        1 / rules.norm, rules.window, rules.n_summary, ACTIVATION=rules.activation, CAUSAL=rules.causal,
        WINDOWED=rules.window > 0, HEADS=heads, DH=head, BD=max(_LEAST, triton.next_power_of_2(head)),
        BM=tiles.queries, BN=tiles.keys, PRECISION="ieee", num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _dense(x: Tensor) -> Tensor:
    """``x`` with a head's elements side by side; a chunk of a projection stays where it is."""
    return x if x.stride(2) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]
