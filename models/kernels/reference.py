"""Pointwise attention over jagged rows in plain PyTorch: what the kernels compute, row by row and head by head.

A row of queries meets the row of keys of the same number. Both are taken from their ends: of more than ``max_q``
queries or ``max_kv`` keys the latest count, the others get zeros. With n queries and m keys, query i stands at key
``i + m - n``: their ends are aligned, whatever their lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


@dataclass(frozen=True)
class Rules:
    """What ``activation(scale · q kᵀ) v / norm`` is computed with, besides its tensors, and where a query may look."""

    #: Queries and keys of a row that count, the latest ones; bounds that the host knows.
    max_q: int
    max_kv: int
    #: A name of :data:`ACTIVATIONS`; each is zero at zero.
    activation: str
    scale: float
    norm: float
    #: A query sees no later key.
    causal: bool = False
    #: With ``causal``: nor one this many or more before it; 0 for no such limit.
    window: int = 0
    #: This many last queries of a row are no events: no ``window`` limits them, and they have no bias of time.
    n_summary: int = 0
    #: Divide queries and keys by √(mean x² + eps) over a head first; None leaves them as they are.
    eps: float | None = None

    @property
    def arguments(self) -> tuple[int, int, str, float, float, bool, int, int, float | None]:
        """All of it, in the order of the operators' last arguments."""
        return (
            self.max_q, self.max_kv, self.activation, self.scale, self.norm, self.causal, self.window, self.n_summary,
            self.eps,
        )  # fmt: skip

    def distances(self, queries: int, keys: int, reach: int, device: torch.device) -> Tensor:
        """Return [queries, keys] int64: how far before a query a key stands, from 0 to ``reach`` - 1."""
        at = torch.arange(queries, device=device).unsqueeze(1)
        return (at + keys - queries - torch.arange(keys, device=device)).clamp(0, reach - 1)

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return [queries, keys] bool, true where a query may look; None for everywhere."""
        if not self.causal:
            return None
        at = torch.arange(queries, device=device).unsqueeze(1)
        back = at + keys - queries - torch.arange(keys, device=device)
        seen = back >= 0
        return seen & ((back < self.window) | (at >= queries - self.n_summary)) if self.window else seen


def time_bucket(apart: Tensor, buckets: int) -> Tensor:
    """Return the bucket of times that lie ``apart`` seconds from each other, int64: the bit length of the difference.

    Bucket 0 is 0 s, bucket n from 2^(n-1) to 2^n - 1 s; the last one is all longer ones too. Exact on every device.

    Args:
        apart: int64, of any sign and shape.
        buckets: from 1 to 64.
    """
    limits = 2 ** torch.arange(buckets - 1, device=apart.device)
    return torch.bucketize(apart.abs(), limits, right=True)


@dataclass(frozen=True, eq=False)
class Biases:
    """What is added to scores; each part is computed with in FP32."""

    #: [H, R], by :meth:`Rules.distances`.
    by_distance: Tensor | None = None
    #: [H, B], by :func:`time_bucket` of the times of query and key.
    by_time: Tensor | None = None
    #: [Tk] int64, seconds of any origin: of each key. A query has the time of the key that it stands at.
    times: Tensor | None = None

    def places(self, rules: Rules, queries: int, keys: slice) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Return each table, the place in it [queries, keys] of each pair, and [queries, 1] which queries it is for."""
        found: list[tuple[Tensor, Tensor, Tensor | None]] = []
        count = keys.stop - keys.start
        if self.by_distance is not None:
            reach, device = self.by_distance.shape[1], self.by_distance.device
            found.append((self.by_distance, rules.distances(queries, count, reach, device), None))
        if self.by_time is not None:
            assert self.times is not None
            at = torch.arange(queries, device=self.times.device)
            # Queries in front of the first key see nothing: any time will do.
            stand = (at + count - queries).clamp_min(0)
            when = self.times[keys]
            apart = (when[stand] if count else when.new_zeros(queries)).unsqueeze(1) - when
            found.append(
                (self.by_time, time_bucket(apart, self.by_time.shape[1]), (at < queries - rules.n_summary).unsqueeze(1))
            )
        return found


def _tanh_gate(x: Tensor) -> Tensor:
    """(1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, written as a sigmoid."""
    return torch.sigmoid(2 * _TANH_SCALE * (x + _TANH_CUBE * x**3))


def _silu_slope(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    gate = _tanh_gate(x)
    return gate + x * gate * (1 - gate) * 2 * _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)


def _hardswish_slope(x: Tensor) -> Tensor:
    return torch.where(x < -3, 0.0, torch.where(x <= 3, x / 3 + 0.5, 1.0))


#: Function and derivative by name. ``gelu`` is exact, ``gelu_tanh`` its approximation.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (F.silu, _silu_slope),
    "gelu": (F.gelu, _gelu_slope),
    "gelu_tanh": (lambda x: x * _tanh_gate(x), _gelu_tanh_slope),
    "hardswish": (F.hardswish, _hardswish_slope),
    "relu": (F.relu, lambda x: (x > 0).to(x.dtype)),
}


def _rows(q_offsets: Tensor, kv_offsets: Tensor, rules: Rules) -> Iterator[tuple[slice, slice]]:
    """Where the queries and the keys of each row lie that count."""
    for (first, last), (first_key, last_key) in zip(
        pairwise(q_offsets.tolist()), pairwise(kv_offsets.tolist()), strict=True
    ):
        yield slice(max(first, last - rules.max_q), last), slice(max(first_key, last_key - rules.max_kv), last_key)


def _wide(x: Tensor) -> Tensor:
    """[n, H, dh] -> [H, n, dh] in FP32, or FP64 where it is."""
    return x.transpose(0, 1).to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Tensor, eps: float | None) -> tuple[Tensor, Tensor | None]:
    """``x`` [H, n, dh] over its root mean square, and the inverse of that [H, n, 1]."""
    if eps is None:
        return x, None
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * inverse, inverse


def _through_unit(grad: Tensor, y: Tensor, inverse: Tensor | None) -> Tensor:
    """The gradient of what :func:`_unit` was given, for that of the ``y`` it returned."""
    return grad if inverse is None else (grad - y * (grad * y).mean(-1, keepdim=True)) * inverse


def _looked_up(table: Tensor, place: Tensor, counted: Tensor | None) -> Tensor:
    """[H, n] by places [queries, keys] -> [H, queries, keys]; 0 for queries that do not count."""
    found = table[:, place]
    return found if counted is None else found * counted


_NO_BIASES = Biases()


def reference_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, rules: Rules, biases: Biases = _NO_BIASES
) -> Tensor:
    """Return [Tq, H, dh] in the type of ``q``, computed in FP32; zeros where a token belongs to no row.

    Args:
        q: [Tq, H, dh].
        k: [Tk, H, dh].
        v: [Tk, H, dh].
        q_offsets: [B + 1] int64, from 0, never falling.
        kv_offsets: [B + 1] int64.
        rules: everything else.
        biases: what is added to scores.
    """
    function, _ = ACTIVATIONS[rules.activation]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for queries, keys in _rows(q_offsets, kv_offsets, rules):
        query, key, value = _wide(q[queries]), _wide(k[keys]), _wide(v[keys])
        query, key = _unit(query, rules.eps)[0], _unit(key, rules.eps)[0]
        scores = query @ key.transpose(1, 2) * rules.scale
        for table, place, counted in biases.places(rules, query.shape[1], keys):
            scores = scores + _looked_up(table, place, counted)
        scores = function(scores)
        mask = rules.mask(query.shape[1], key.shape[1], q.device)
        if mask is not None:
            scores = scores * mask
        out[queries] = (scores @ value / rules.norm).transpose(0, 1).to(q.dtype)
    return out


def reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, rules: Rules,
    biases: Biases = _NO_BIASES,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Return the gradients of ``q``, ``k``, ``v`` and each table of ``biases`` there is, in their types and shapes."""
    function, slope = ACTIVATIONS[rules.activation]
    of_q, of_k, of_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    of_tables = [torch.zeros_like(table) for table in (biases.by_distance, biases.by_time) if table is not None]
    for queries, keys in _rows(q_offsets, kv_offsets, rules):
        query, key, value, wide = _wide(q[queries]), _wide(k[keys]), _wide(v[keys]), _wide(grad[queries]) / rules.norm
        (query, of_queries), (key, of_keys) = _unit(query, rules.eps), _unit(key, rules.eps)
        raw = query @ key.transpose(1, 2) * rules.scale
        places = biases.places(rules, query.shape[1], keys)
        for table, place, counted in places:
            raw = raw + _looked_up(table, place, counted)
        scores, inner = function(raw), wide @ value.transpose(1, 2) * slope(raw)
        mask = rules.mask(query.shape[1], key.shape[1], q.device)
        if mask is not None:
            scores, inner = scores * mask, inner * mask
        for target, (_, place, counted) in zip(of_tables, places, strict=True):
            part = inner if counted is None else inner * counted
            target.index_add_(1, place.reshape(-1), part.flatten(1).to(target.dtype))
        parts = (
            _through_unit(inner @ key * rules.scale, query, of_queries),
            _through_unit(inner.transpose(1, 2) @ query * rules.scale, key, of_keys),
            scores.transpose(1, 2) @ wide,
        )
        for target, at, part in zip((of_q, of_k, of_v), (queries, keys, keys), parts, strict=True):
            target[at] = part.transpose(0, 1).to(target.dtype)
    return of_q, of_k, of_v, of_tables
