"""Launching the attention kernels: tensors in, tensors out, and the tiles for a shape."""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .jagged_attention import (
    attention_forward_kernel,
    attention_inverse_rms_kernel,
    attention_key_gradient_kernel,
    attention_query_gradient_kernel,
)
from .reference import Rules


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
#: Rows' worth of programs that set to zero what lies behind the last row: up to one bound of a batch.
SWEEPERS = 32
#: Elements that a program of ``attention_inverse_rms_kernel`` reads.
_INVERSE_ELEMENTS = 8192


def tiles_for(kernel: str, head: int, dtype: torch.dtype, rules: Rules) -> Tiles:
    """Return the tiles of ``kernel`` for heads of width ``head``, no longer than rows can be."""
    narrow, short, long = TILES[kernel]
    wide = short if max(rules.max_q, rules.max_kv) <= SHORT else long
    found = FP32_TILES if dtype is torch.float32 else narrow if head <= 64 else wide
    longest = (max(_LEAST, triton.next_power_of_2(n)) for n in (rules.max_q, rules.max_kv))
    queries, keys = (min(size, most) for size, most in zip((found.queries, found.keys), longest, strict=True))
    # What is summed up lies in registers: as many rows as the program's own side has.
    own = keys if kernel == "key_gradient" else queries
    return Tiles(queries, keys, min(found.warps, 4) if own <= 64 else found.warps, found.stages)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, rules: Rules, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`narrowgate.models.kernels.reference.reference_forward` does, and what backward needs of it.

    Returns:
        [Tq, H, dh]; and with ``rules.eps`` the inverse root mean squares, FP32, of the queries that count [Tq, H] and
        of all keys [Tk, H], else two empty tensors.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    inverses = _inverses(q, k, rules)
    if rules.eps is not None:
        _launch_inverse(k, inverses[1], rules.eps)
    tiles = tiles_for("forward", q.shape[2], q.dtype, rules)
    # What a kernel ignores is any tensor.
    own = q if bias is None else bias
    tensors, strides = (q, k, v, out, *inverses, own, q_offsets, kv_offsets), _strides(q, k, v)
    _launch(
        attention_forward_kernel, tiles, tensors, strides, q, k, q_offsets, rules, bias, of_keys=False,
        eps=rules.eps or 0.0,
    )  # fmt: skip
    return out, *inverses


def launch_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, inverses: tuple[Tensor, Tensor], q_offsets: Tensor,
    kv_offsets: Tensor, rules: Rules, bias: Tensor | None, into: tuple[Tensor, Tensor, Tensor],
) -> Tensor | None:  # fmt: skip
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
        bias: as in forward.
        into: takes the gradients of q, k and v, of their shapes; heads side by side, tokens anywhere.

    Returns:
        The gradient of ``bias``, FP32 [H, R], if there is one.
    """
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    of_q, of_k, of_v = into
    strides = _strides(q, k, v, grad)
    inputs, offsets = (q, k, v, grad), (q if bias is None else bias, q_offsets, kv_offsets)
    tiles = tiles_for("query_gradient", q.shape[2], q.dtype, rules)
    parts = None
    if bias is not None:
        # A part of each program, added up in their order: the same bits every run.
        shape = (q_offsets.shape[0] - 1 + SWEEPERS, q.shape[1], triton.cdiv(rules.max_q, tiles.queries), bias.shape[1])
        parts = torch.zeros(shape, dtype=torch.float32, device=q.device)
    tensors = (*inputs, of_q, q if parts is None else parts, *inverses, *offsets)
    places = [*strides, of_q.stride(0)]
    _launch(attention_query_gradient_kernel, tiles, tensors, places, q, k, q_offsets, rules, bias, of_keys=False)
    tiles = tiles_for("key_gradient", q.shape[2], q.dtype, rules)
    tensors = (*inputs, of_k, of_v, *inverses, *offsets)
    places = [*strides, of_k.stride(0), of_v.stride(0)]
    _launch(attention_key_gradient_kernel, tiles, tensors, places, q, k, q_offsets, rules, bias, of_keys=True)
    return None if parts is None else parts.sum((0, 2))


def _inverses(q: Tensor, k: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    shapes = [x.shape[:2] if rules.eps is not None else (0,) for x in (q, k)]
    first, second = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes)
    return first, second


def _launch_inverse(x: Tensor, inverse: Tensor, eps: float) -> None:
    tokens, heads, head = x.shape
    if x.numel():
        width = max(_LEAST, triton.next_power_of_2(head))
        block = max(1, _INVERSE_ELEMENTS // width)
        attention_inverse_rms_kernel[(triton.cdiv(tokens * heads, block),)](
            x, inverse, *_strides(x), tokens, eps, HEADS=heads, DH=head, BD=width, BLOCK=block, num_warps=4
        )


def _launch(
    kernel: Any, tiles: Tiles, tensors: Any, strides: Any, q: Tensor, k: Tensor, offsets: Tensor, rules: Rules,
    bias: Tensor | None, *, of_keys: bool, **more: Any,
) -> None:  # fmt: skip
    rows, heads, head = offsets.shape[0] - 1, q.shape[1], q.shape[2]
    owner, longest, size = (k, rules.max_kv, tiles.keys) if of_keys else (q, rules.max_q, tiles.queries)
    if not owner.numel():
        return
    count = triton.cdiv(longest, size)
    # More rows than there are: what lies behind the last one is set to zero.
    kernel[(count * heads * (rows + SWEEPERS),)](
        *tensors, *strides, rows, SWEEPERS, q.shape[0], k.shape[0], count, rules.max_q, rules.max_kv, rules.scale,
        1 / rules.norm, rules.window, rules.n_summary, **more, ACTIVATION=rules.activation, CAUSAL=rules.causal,
        WINDOWED=rules.window > 0, UNIT=rules.eps is not None, REACH=0 if bias is None else bias.shape[1],
        HEADS=heads, DH=head, BD=max(_LEAST, triton.next_power_of_2(head)), BM=tiles.queries, BN=tiles.keys,
        PRECISION="ieee",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]
