"""The operator through which compilers see attention over jagged rows: ``narrowgate::jagged_attention``.

``jagged_attention(sources, layout, heads, q_offsets, kv_offsets, bias, times, time_bias, max_q, max_kv, activation,
scale, norm, causal, window, n_summary, eps)`` computes ``activation(scale · q kᵀ + bias) v / norm`` for queries
[Tq, H, dh] and keys and values [Tk, H, dh], whose rows are ``offsets[b]:offsets[b + 1]``; the bias [H, R], if there is
one, is of a head and of how far before a query a key stands, and so is ``time_bias`` [H, B] of how far apart in time
they are, by ``times`` [Tk]. They come as they lie in what projections put out: ``layout`` names what each source holds
side by side, ``"q|k|v"``, ``"q|kv"``, ``"vqk"`` or ``"uvqk"``, whose u is a gate that attention does not read. The
arguments from ``max_q`` on are
:class:`narrowgate.models.kernels.reference.Rules`, without defaults: tensor lists and defaults do not go together in
PyTorch's custom gradients. On a GPU it launches Triton kernels, elsewhere it is their reference. Besides the output it
returns inverse root mean squares for ``jagged_attention_backward``, which returns the gradients of the sources, each
written once, where it belongs, with ``front`` as the gate's, and those of the biases that there are; it has no gradient
of its own.

Both tell :mod:`torch.utils.flop_counter` how much they multiply: whoever looks at operations sees no products inside.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..precision.errors import NarrowgateError
from .config import MAX_JAGGED_HEAD, MAX_TIME_BUCKETS
from .kernels.reference import ACTIVATIONS, Biases, Rules, reference_backward, reference_forward

#: What sources may hold, in this order.
LAYOUTS = ("q|k|v", "q|kv", "vqk", "uvqk")
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_RULES = (
    "int max_q, int max_kv, str activation, float scale, float norm, bool causal, int window, int n_summary, float? eps"
)
_OFFSETS = "Tensor q_offsets, Tensor kv_offsets, Tensor? bias, Tensor? times, Tensor? time_bias"

_LIBRARY = torch.library.Library("narrowgate", "FRAGMENT")
_LIBRARY.define(
    f"jagged_attention(Tensor[] sources, str layout, int heads, {_OFFSETS}, {_RULES}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "jagged_attention_backward(Tensor grad, Tensor[] sources, Tensor q_inverse, Tensor k_inverse, Tensor? front, "
    f"str layout, int heads, {_OFFSETS}, {_RULES}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@lru_cache(maxsize=1)
def _interpreted() -> bool:
    """Triton's interpreter runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _parts(sources: Sequence[Tensor], layout: str, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views [T, H, dh] of q, k and v in ``sources``."""
    found = {}
    for source, names in zip(sources, layout.split("|"), strict=True):
        for name, part in zip(names, source.chunk(len(names), -1), strict=True):
            found[name] = part.unflatten(-1, (heads, -1))
    return found["q"], found["k"], found["v"]


def _grouped(bias: Tensor | None, times: Tensor | None, time_bias: Tensor | None, *rules: Any) -> tuple[Biases, Rules]:
    """The operators' arguments behind the offsets."""
    return Biases(bias, time_bias, times), Rules(*rules)


def _in_fp32(biases: Biases) -> Biases:
    """As kernels read them."""

    def wide(table: Tensor | None) -> Tensor | None:
        return None if table is None else table.float().contiguous()

    times = biases.times
    return Biases(wide(biases.by_distance), wide(biases.by_time), None if times is None else times.contiguous())


def _check(
    sources: Sequence[Tensor], layout: str, heads: int, q_offsets: Tensor, kv_offsets: Tensor, *others: Any
) -> tuple[Biases, Rules]:
    if layout not in LAYOUTS:
        raise NarrowgateError(f"jagged_attention: layout is one of {', '.join(LAYOUTS)}, found '{layout}'")
    names = layout.split("|")
    flat = len(sources) == len(names) and all(source.dim() == 2 for source in sources)
    width = sources[0].shape[1] // len(names[0]) if flat else 0
    fits = (
        flat
        and all(source.shape[1] == width * len(part) for source, part in zip(sources, names, strict=True))
        and width % heads == 0
        and (layout != "q|k|v" or sources[1].shape[0] == sources[2].shape[0])
    )
    if not fits:
        shapes = ", ".join(str(list(x.shape)) for x in sources)
        expected = ", ".join(f"[T, {len(part)} d]" if len(part) > 1 else "[T, d]" for part in names)
        raise NarrowgateError(
            f"jagged_attention takes sources {expected} for '{layout}', d a multiple of {heads} heads, as many keys as "
            f"values; found {shapes}"
        )
    if len({source.dtype for source in sources}) > 1:
        raise NarrowgateError(f"jagged_attention takes one type, found {', '.join(str(x.dtype) for x in sources)}")
    if q_offsets.dim() != 1 or q_offsets.shape != kv_offsets.shape:
        raise NarrowgateError(
            f"jagged_attention takes offsets [B + 1] of one B, found {list(q_offsets.shape)}, {list(kv_offsets.shape)}"
        )
    biases, made = _grouped(*others)
    if made.activation not in ACTIVATIONS:
        raise NarrowgateError(
            f"jagged_attention: activation is one of {', '.join(ACTIVATIONS)}, found '{made.activation}'"
        )
    if made.window and not made.causal:
        raise NarrowgateError("jagged_attention: a window needs causal=True")
    _check_biases(biases, heads, made, keys=sources[-1].shape[0])
    return biases, made


def _check_biases(biases: Biases, heads: int, rules: Rules, *, keys: int) -> None:
    def table(given: Tensor, what: str, size: str, limits: str, most: int | None) -> None:
        width = given.shape[-1]
        if given.dim() != 2 or given.shape[0] != heads or width & (width - 1) or not 0 < width <= (most or width):
            raise NarrowgateError(
                f"jagged_attention takes a {what} [{heads}, {size}] with {size} a power of two{limits}, found"
                f" {list(given.shape)}"
            )
        if not rules.causal:
            raise NarrowgateError(f"jagged_attention: a {what} needs causal=True")

    if biases.by_distance is not None:
        table(biases.by_distance, "bias", "R", "", None)
    times = biases.times
    if (times is None) != (biases.by_time is None):
        raise NarrowgateError("jagged_attention: times and time_bias need each other")
    if biases.by_time is not None and times is not None:
        table(biases.by_time, "time_bias", "B", f" up to {MAX_TIME_BUCKETS}", MAX_TIME_BUCKETS)
        if times.shape != (keys,) or times.dtype is not torch.int64:
            raise NarrowgateError(
                f"jagged_attention takes times [{keys}] int64, one a key, found {list(times.shape)} {times.dtype}"
            )


def _side_by_side(x: Tensor) -> Tensor:
    """``x`` with a token's elements side by side; a chunk of a projection stays where it is."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward(
    sources: Sequence[Tensor], layout: str, heads: int, q_offsets: Tensor, kv_offsets: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from .kernels.launch import launch_forward

    biases, made = _check(sources, layout, heads, q_offsets, kv_offsets, *others)
    q, k, v = _parts([_side_by_side(x) for x in sources], layout, heads)
    if q.dtype not in _KERNEL_DTYPES or q.shape[2] > MAX_JAGGED_HEAD:
        raise NarrowgateError(
            f"jagged_attention's kernels take BF16, FP16 and FP32 with heads up to {MAX_JAGGED_HEAD} wide, found"
            f" {q.dtype} with heads of {q.shape[2]}"
        )
    out, *inverses = launch_forward(q, k, v, q_offsets, kv_offsets, made, _in_fp32(biases))
    return out.flatten(1), inverses[0], inverses[1]


def _backward(
    grad: Tensor, sources: Sequence[Tensor], q_inverse: Tensor, k_inverse: Tensor, front: Tensor | None, layout: str,
    heads: int, q_offsets: Tensor, kv_offsets: Tensor, *others: Any,
) -> list[Tensor]:  # fmt: skip
    from .kernels.launch import launch_backward

    q, k, v = _parts([_side_by_side(x) for x in sources], layout, heads)
    found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in sources]
    into, above = _parts(found, layout, heads), grad.unflatten(-1, (heads, -1))
    biases, rules = _grouped(*others)
    wide = _in_fp32(biases)
    of_tables = launch_backward(above, q, k, v, (q_inverse, k_inverse), q_offsets, kv_offsets, rules, wide, into)
    if "u" in layout:
        gate = found[0][:, : found[0].shape[1] // len(layout)]
        _copy(front, gate) if front is not None else gate.zero_()
    tables = (table for table in (biases.by_distance, biases.by_time) if table is not None)
    return [*found, *(x.to(table.dtype) for x, table in zip(of_tables, tables, strict=True))]


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy [T, d] into rows that lie apart, 16 bytes at a time where PyTorch would take an element at a time."""
    wide = torch.complex128.itemsize
    places = [n * x.element_size() for x in (source, target) for n in (x.shape[1], x.stride(0), x.storage_offset())]
    if source.stride(1) == 1 and source.dtype == target.dtype and not any(place % wide for place in places):
        source, target = source.view(torch.complex128), target.view(torch.complex128)
    target.copy_(source)


def _forward_on_cpu(
    sources: Sequence[Tensor], layout: str, heads: int, q_offsets: Tensor, kv_offsets: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if _interpreted():
        return _forward(sources, layout, heads, q_offsets, kv_offsets, *others)
    biases, made = _check(sources, layout, heads, q_offsets, kv_offsets, *others)
    parts = _parts(sources, layout, heads)
    out = reference_forward(*parts, q_offsets, kv_offsets, made, biases)
    # The reference's backward finds them anew.
    return out.flatten(1), *_no_inverses(*parts[:2], made)


def _backward_on_cpu(
    grad: Tensor, sources: Sequence[Tensor], q_inverse: Tensor, k_inverse: Tensor, front: Tensor | None, layout: str,
    heads: int, q_offsets: Tensor, kv_offsets: Tensor, *others: Any,
) -> list[Tensor]:  # fmt: skip
    if _interpreted():
        return _backward(grad, sources, q_inverse, k_inverse, front, layout, heads, q_offsets, kv_offsets, *others)
    above, parts = grad.unflatten(-1, (heads, -1)), _parts(sources, layout, heads)
    biases, rules = _grouped(*others)
    *gradients, of_tables = reference_backward(above, *parts, q_offsets, kv_offsets, rules, biases)
    by_name = {name: x.flatten(1) for name, x in zip("qkv", gradients, strict=True)}
    by_name["u"] = torch.zeros_like(by_name["q"]) if front is None else front
    return [*(torch.cat([by_name[name] for name in names], -1) for names in layout.split("|")), *of_tables]


def _no_inverses(q: Tensor, k: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    shapes = [x.shape[:2] if rules.eps is not None else (0,) for x in (q, k)]
    first, second = (q.new_zeros(shape, dtype=torch.float32) for shape in shapes)
    return first, second


def _forward_fake(
    sources: Sequence[Tensor], layout: str, heads: int, q_offsets: Tensor, kv_offsets: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, made = _check(sources, layout, heads, q_offsets, kv_offsets, *others)
    q, k, _ = _parts(sources, layout, heads)
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2]), *_no_inverses(q, k, made)


def _backward_fake(
    grad: Tensor, sources: Sequence[Tensor], q_inverse: Tensor, k_inverse: Tensor, front: Tensor | None, layout: str,
    heads: int, q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None, times: Tensor | None,
    time_bias: Tensor | None, *rules: Any,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (*sources, bias, time_bias) if x is not None]


for _name, _on_gpu, _on_cpu, _fake in (
    ("jagged_attention", _forward, _forward_on_cpu, _forward_fake),
    ("jagged_attention_backward", _backward, _backward_on_cpu, _backward_fake),
):
    _LIBRARY.impl(_name, _on_gpu, "CUDA")
    _LIBRARY.impl(_name, _on_cpu, "CPU")
    torch.library.register_fake(f"narrowgate::{_name}", _fake, lib=_LIBRARY)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    sources, ctx.layout, ctx.heads, *others = inputs[:8]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*sources, *output[1:], *others)
    ctx.rules = inputs[8:]


def _gradients(ctx: Any, grad: Tensor | None, *others: None) -> tuple[Any, ...]:
    *sources, q_inverse, k_inverse, q_offsets, kv_offsets, bias, times, time_bias = ctx.saved_tensors
    found: list[Tensor | None] = [None] * (len(sources) + 2)
    if grad is not None:
        found = torch.ops.narrowgate.jagged_attention_backward(
            grad, sources, q_inverse, k_inverse, None, ctx.layout, ctx.heads, q_offsets, kv_offsets, bias, times,
            time_bias, *ctx.rules,
        )  # fmt: skip
    count = len(sources)
    of_bias, of_time = _of_tables(found[count:], bias, time_bias)
    return (found[:count], None, None, None, None, of_bias, None, of_time, *(None for _ in ctx.rules))


def _of_tables(found: Sequence[Tensor | None], *tables: Tensor | None) -> list[Tensor | None]:
    """The gradients of ``tables``, of which ``found`` has those of the ones that there are."""
    left = iter(found)
    return [None if table is None else next(left) for table in tables]


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


def _flops(
    products: int, sources: Sequence[Tensor], layout: str, q_offsets: Tensor, kv_offsets: Tensor, rules: tuple[Any, ...]
) -> int:
    """FLOPs of ``products`` matrix products over all seen pairs; an addition and a multiplication are two."""
    rows = q_offsets.shape[0] - 1
    if q_offsets.is_meta:
        # Without values: as if all rows were equally long.
        queries, keys = (torch.full((rows,), x.shape[0] // max(rows, 1)) for x in (sources[0], sources[-1]))
    else:
        queries, keys = q_offsets.diff(), kv_offsets.diff()
    width = sources[0].shape[1] // len(layout.split("|")[0])
    return 2 * products * width * int(seen_pairs(queries, keys, Rules(*rules)).sum())


@register_flop_formula(torch.ops.narrowgate.jagged_attention, get_raw=True)
def _forward_flops(
    sources: Sequence[Tensor], layout: str, heads: int, q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None,
    times: Tensor | None, time_bias: Tensor | None, *rules: Any, out_val: Any = None,
) -> int:  # fmt: skip
    return _flops(2, sources, layout, q_offsets, kv_offsets, rules)


@register_flop_formula(torch.ops.narrowgate.jagged_attention_backward, get_raw=True)
def _backward_flops(
    grad: Tensor, sources: Sequence[Tensor], q_inverse: Tensor, k_inverse: Tensor, front: Tensor | None, layout: str,
    heads: int, q_offsets: Tensor, kv_offsets: Tensor, bias: Tensor | None, times: Tensor | None,
    time_bias: Tensor | None, *rules: Any, out_val: Any = None,
) -> int:  # fmt: skip
    # Two a product of the forward. Kernels compute scores and their gradients anew, which is not counted.
    return _flops(4, sources, layout, q_offsets, kv_offsets, rules)


#: For lists of operations, as selective checkpointing takes them.
OPERATOR: Any = torch.ops.narrowgate.jagged_attention.default


def jagged_attention(
    sources: Sequence[Tensor], q_offsets: Tensor, kv_offsets: Tensor, rules: Rules, *, heads: int,
    layout: str = "q|k|v", bias: Tensor | None = None, times: Tensor | None = None, time_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``activation(scale · q kᵀ + bias) v / norm`` over jagged rows, differentiable in sources and biases.

    Args:
        sources: what holds queries, keys and values, of one type: BF16, FP16 or FP32 with heads up to 128 wide where
            kernels run it, any type elsewhere. Each may be a chunk of something wider.
        q_offsets: [B + 1] int64, from 0, never falling: row b has the queries ``q_offsets[b]:q_offsets[b + 1]``.
        kv_offsets: [B + 1] int64.
        rules: which of them count, and what is computed.
        heads: H; divides d.
        layout: ``"q|k|v"`` for three sources [Tq, d], [Tk, d], [Tk, d]; ``"q|kv"`` for [Tq, d] and [Tk, 2 d], keys in
            front; ``"vqk"`` for one [T, 3 d] that holds values, queries and keys; ``"uvqk"`` for one [T, 4 d] of which
            the first d columns are left alone (:func:`gated_jagged_attention`).
        bias: [H, R], R a power of two: what is added to the score of a head's query and a key r tokens before it, R - 1
            and more alike; with ``rules.causal``. Computed with in FP32.
        times: [Tk] int64: when each key was, in seconds of any origin. A query has the time of the key it stands at.
        time_bias: [H, B], B a power of two up to 64: what is added for each bucket of the time between a query and a
            key, as :func:`narrowgate.models.kernels.reference.time_bucket` has them; with ``times`` and
            ``rules.causal``. The last ``rules.n_summary`` queries of a row have none. Computed with in FP32.

    Returns:
        [Tq, d]; zeros for queries of no row.

    Raises:
        NarrowgateError: shapes, types or rules that do not fit.
    """
    biases = (bias, times, time_bias)
    out, *_ = OPERATOR(list(sources), layout, heads, q_offsets, kv_offsets, *biases, *rules.arguments)
    return out


class _Gated(torch.autograd.Function):
    """A gate and attention out of one projection, so that backward puts their gradients side by side without a copy."""

    @staticmethod
    def forward(uvqk: Tensor, heads: int, offsets: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = OPERATOR([uvqk], "uvqk", heads, offsets, offsets, *others)
        return uvqk[:, : uvqk.shape[1] // 4], *found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        uvqk, ctx.heads, offsets, bias, times, time_bias, *ctx.rules = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(uvqk, *output[2:], offsets, bias, times, time_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        uvqk, q_inverse, k_inverse, offsets, bias, times, time_bias = ctx.saved_tensors
        found, *tables = torch.ops.narrowgate.jagged_attention_backward(
            grads[1], [uvqk], q_inverse, k_inverse, grads[0], "uvqk", ctx.heads, offsets, offsets, bias, times,
            time_bias, *ctx.rules,
        )  # fmt: skip
        of_bias, of_time = _of_tables(tables, bias, time_bias)
        return found, None, None, of_bias, None, of_time, *(None for _ in ctx.rules)


def gated_jagged_attention(
    uvqk: Tensor, offsets: Tensor, rules: Rules, *, heads: int, bias: Tensor | None = None,
    times: Tensor | None = None, time_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gate u [T, d], as it is, and :func:`jagged_attention` of the rest of ``uvqk`` [T, 4 d].

    The arguments are those of :func:`jagged_attention` with the layout ``"uvqk"``, and so are the errors.
    """
    gate, out, *_ = _Gated.apply(uvqk, heads, offsets, bias, times, time_bias, *rules.arguments)
    return gate, out
