"""The operator through which compilers see attention over jagged rows: ``narrowgate::jagged_attention``.

``jagged_attention(q, k, v, q_offsets, kv_offsets, max_q, max_kv, activation, scale, norm, causal, window, n_summary)``
computes ``activation(scale · q kᵀ) v / norm`` for q [Tq, H, dh] and k, v [Tk, H, dh], whose rows are
``offsets[b]:offsets[b + 1]``; the remaining arguments are :class:`narrowgate.models.kernels.reference.Rules`. On a GPU
it launches Triton kernels, elsewhere it is their reference. ``jagged_attention_backward`` takes the output's gradient
in front and returns those of q, k and v; it has none of its own.

Both tell :mod:`torch.utils.flop_counter` how much they multiply: whoever looks at operations sees no products inside.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..precision.errors import NarrowgateError
from .config import MAX_JAGGED_HEAD
from .kernels.reference import ACTIVATIONS, Rules, reference_backward, reference_forward

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_RULES = (
    "int max_q, int max_kv, str activation, float scale, float norm, bool causal=False, int window=0, int n_summary=0"
)
_INPUTS = f"Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor kv_offsets, {_RULES}"

_LIBRARY = torch.library.Library("narrowgate", "FRAGMENT")
_LIBRARY.define(f"jagged_attention({_INPUTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"jagged_attention_backward(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@lru_cache(maxsize=1)
def _interpreted() -> bool:
    """Triton's interpreter runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _check(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *rules: Any) -> Rules:
    if q.dim() != 3 or k.shape != v.shape or k.dim() != 3 or q.shape[1:] != k.shape[1:]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise NarrowgateError(f"jagged_attention takes q [Tq, H, dh] and k, v [Tk, H, dh], found {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise NarrowgateError(f"jagged_attention takes one type, found {q.dtype}, {k.dtype}, {v.dtype}")
    if q_offsets.dim() != 1 or q_offsets.shape != kv_offsets.shape:
        raise NarrowgateError(
            f"jagged_attention takes offsets [B + 1] of one B, found {list(q_offsets.shape)}, {list(kv_offsets.shape)}"
        )
    made = Rules(*rules)
    if made.activation not in ACTIVATIONS:
        raise NarrowgateError(
            f"jagged_attention: activation is one of {', '.join(ACTIVATIONS)}, found '{made.activation}'"
        )
    if made.window and not made.causal:
        raise NarrowgateError("jagged_attention: a window needs causal=True")
    return made


def _forward(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *rules: Any) -> Tensor:
    from .kernels.launch import launch_forward

    made = _check(q, k, v, q_offsets, kv_offsets, *rules)
    _check_kernel(q)
    return launch_forward(q, k, v, q_offsets, kv_offsets, made)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *rules: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from .kernels.launch import launch_backward

    return launch_backward(grad, q, k, v, q_offsets, kv_offsets, Rules(*rules))


def _check_kernel(q: Tensor) -> None:
    if q.dtype not in _KERNEL_DTYPES or q.shape[2] > MAX_JAGGED_HEAD:
        raise NarrowgateError(
            f"jagged_attention's kernels take BF16, FP16 and FP32 with heads up to {MAX_JAGGED_HEAD} wide, found"
            f" {q.dtype} with heads of {q.shape[2]}"
        )


def _forward_on_cpu(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *rules: Any) -> Tensor:
    if _interpreted():
        return _forward(q, k, v, q_offsets, kv_offsets, *rules)
    return reference_forward(q, k, v, q_offsets, kv_offsets, _check(q, k, v, q_offsets, kv_offsets, *rules))


def _backward_on_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *rules: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if _interpreted():
        return _backward(grad, q, k, v, q_offsets, kv_offsets, *rules)
    return reference_backward(grad, q, k, v, q_offsets, kv_offsets, Rules(*rules))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *rules: Any) -> Tensor:
    _check(q, k, v, q_offsets, kv_offsets, *rules)
    return q.new_empty(q.shape)


def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


for _name, _on_gpu, _on_cpu, _fake in (
    ("jagged_attention", _forward, _forward_on_cpu, _forward_fake),
    ("jagged_attention_backward", _backward, _backward_on_cpu, _backward_fake),
):
    _LIBRARY.impl(_name, _on_gpu, "CUDA")
    _LIBRARY.impl(_name, _on_cpu, "CPU")
    torch.library.register_fake(f"narrowgate::{_name}", _fake, lib=_LIBRARY)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rules = inputs[5:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.narrowgate.jagged_attention_backward(grad, *ctx.saved_tensors, *ctx.rules)
    return (*found, *(None for _ in range(2 + len(ctx.rules))))


torch.library.register_autograd("narrowgate::jagged_attention", _gradients, setup_context=_save, lib=_LIBRARY)


def seen_pairs(queries: Tensor, keys: Tensor, rules: Rules) -> Tensor:
    """Return how many pairs of a query and a key it sees each row has, [B] int64.

    Args:
        queries: [B] int64, the queries of each row.
        keys: [B] int64.
        rules: which of them count, and where a query may look.
    """
    n, m = queries.clamp_max(rules.max_q), keys.clamp_max(rules.max_kv)
    if not rules.causal:
        return n * m

    def seen(last: Tensor, most: int | None) -> Tensor:
        """Pairs of the queries that stand at the keys 1 to ``last``, each of which sees ``most`` keys at most."""
        near = last if most is None else last.clamp_max(most)
        return near * (near + 1) // 2 + (last - near) * (most or 0)

    # Ends are aligned: queries stand at the last n keys; those in front of the first key see nothing.
    before = (m - n).clamp_min(0)
    window = rules.window or None
    pairs = seen(m, window) - seen(before, window)
    free = torch.maximum(m - rules.n_summary, before) if window else m
    # The closing queries have no limit.
    return pairs + (seen(m, None) - seen(free, None)) - (seen(m, window) - seen(free, window))


def _flops(products: int, q: Tensor, q_offsets: Tensor, kv_offsets: Tensor, k: Tensor, rules: tuple[Any, ...]) -> int:
    """FLOPs of ``products`` matrix products over all seen pairs; an addition and a multiplication are two."""
    rows = q_offsets.shape[0] - 1
    if q_offsets.is_meta:
        # Without values: as if all rows were equally long.
        queries, keys = (torch.full((rows,), x.shape[0] // max(rows, 1)) for x in (q, k))
    else:
        queries, keys = q_offsets.diff(), kv_offsets.diff()
    return 2 * products * q.shape[1] * q.shape[2] * int(seen_pairs(queries, keys, Rules(*rules)).sum())


@register_flop_formula(torch.ops.narrowgate.jagged_attention, get_raw=True)
def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *rules: Any, out_val: Any = None
) -> int:
    return _flops(2, q, q_offsets, kv_offsets, k, rules)


@register_flop_formula(torch.ops.narrowgate.jagged_attention_backward, get_raw=True)
def _backward_flops(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *rules: Any,
    out_val: Any = None,
) -> int:  # fmt: skip
    # Two a product of the forward. Kernels compute scores and their gradients anew, which is not counted.
    return _flops(4, q, q_offsets, kv_offsets, k, rules)


#: For lists of operations, as selective checkpointing takes them.
OPERATOR: Any = torch.ops.narrowgate.jagged_attention.default


def jagged_attention(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, rules: Rules) -> Tensor:
    """Return ``activation(scale · q kᵀ) v / norm`` over jagged rows, differentiable in ``q``, ``k`` and ``v``.

    Args:
        q: [Tq, H, dh]; BF16, FP16 or FP32 with dh up to 128 where kernels run it, any type elsewhere.
        k: [Tk, H, dh] of the same type.
        v: [Tk, H, dh] of the same type; may be a chunk of a wider projection.
        q_offsets: [B + 1] int64, from 0, never falling: row b has the queries ``q_offsets[b]:q_offsets[b + 1]``.
        kv_offsets: [B + 1] int64.
        rules: which of them count, and what is computed.

    Returns:
        [Tq, H, dh]; zeros for queries of no row.

    Raises:
        NarrowgateError: shapes, types or rules that do not fit.
    """
    return OPERATOR(
        q, k, v, q_offsets, kv_offsets, rules.max_q, rules.max_kv, rules.activation, rules.scale, rules.norm,
        rules.causal, rules.window, rules.n_summary,
    )  # fmt: skip
