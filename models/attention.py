"""Attention with a pointwise activation in softmax's place (GDPA, HSTU), in its three asymmetric uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import GemConfig
from .functional import ACTIVATION_FUNCTIONS, EPS, RMSNorm, linear, unit_rms
from .jagged import Rows, Window, even_rows
from .jagged_operator import gated_jagged_attention, jagged_attention
from .kernels.reference import Rules, time_bucket


def pointwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    activation: Callable[[Tensor], Tensor],
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``activation(q kᵀ + bias) v / Lk`` per head, with normalized queries and keys.

    A zero key meets a zero value and ``activation(0) = 0``, so padded slots add exactly nothing and need no mask.

    Args:
        q: [B, Lq, D].
        k: [B, Lk, D].
        v: [B, Lk, D].
        heads: divides D.
        activation: zero at zero.
        mask: [Lq, Lk] bool, true where a query may look.
        bias: [H, Lq, Lk] or [B, H, Lq, Lk], added to scores.

    Returns:
        [B, Lq, D] in the type of ``v``.
    """
    width = v.shape[-1] // heads
    query, key, value = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
    # Unit-RMS vectors have length sqrt(width): the scores are the cosine times sqrt(width).
    query = unit_rms(query) * width**-0.5
    scores = torch.matmul(query.transpose(1, 2), unit_rms(key).permute(0, 2, 3, 1))
    scores = activation(scores if bias is None else scores + bias.to(scores.dtype))
    if mask is not None:
        scores = scores * mask.to(scores.dtype)
    out = torch.matmul(scores, value.transpose(1, 2)) / k.shape[1]
    return out.transpose(1, 2).flatten(2)


def sequence_mask(length: int, n_summary: int, window: int | None, device: torch.device) -> Tensor:
    """Return [length, length] bool: causal, within the window; the closing summary tokens see everything before."""
    at = torch.arange(length, device=device)
    back = at.unsqueeze(1) - at.unsqueeze(0)
    mask = back >= 0
    if window is not None:
        mask = mask & ((back < window) | (at.unsqueeze(1) >= length - n_summary))
    return mask


def attention_rules(queries: Rows, keys: Rows, config: GemConfig, *, causal: bool = False) -> Rules:
    """Return what :func:`attend_in_rows` computes with."""
    return Rules(
        max_q=queries.width,
        max_kv=keys.width,
        activation=config.activation,
        scale=(config.d // config.heads) ** -0.5,
        norm=float(keys.width),
        causal=causal,
        window=(config.window or 0) if causal else 0,
        n_summary=config.n_summary if causal else 0,
        eps=EPS,
    )


def attend_in_rows(
    sources: Sequence[Tensor], layout: str, queries: Rows, keys: Rows, config: GemConfig, *, causal: bool = False
) -> Tensor:
    """Return what :func:`pointwise_attention` does of padded rows, without padding them.

    Args:
        sources: queries [Tq, d], keys and values [Tk, d] as projections put them out.
        layout: what each source holds, as :func:`narrowgate.models.jagged_operator.jagged_attention` takes it.
        queries: the rows of the queries.
        keys: the rows of keys and values; their width is what sums are divided by.
        config: heads, activation, and with ``causal`` the window of :func:`sequence_mask`.
        causal: queries and keys are the same tokens, and see no later ones.

    Returns:
        [Tq, d] in the type of the sources; zeros outside of the rows.
    """
    rules = attention_rules(queries, keys, config, causal=causal)
    return jagged_attention(sources, queries.offsets, keys.offsets, rules, heads=config.heads, layout=layout)


class Pooling(nn.Module):
    """Pooling by multi-head attention: few learned queries over a long sequence."""

    def __init__(self, config: GemConfig) -> None:
        super().__init__()
        self.config = config
        self.seeds = nn.Parameter(torch.randn(config.n_pma, config.d) * config.d**-0.5)
        self.norm = RMSNorm(config.d, config)
        self.kv = linear(config.d, 2 * config.d, config)

    def forward(self, tokens: Tensor, window: Rows) -> Tensor:
        """[T, d] -> [B, n_pma, d]."""
        kv = self.kv(self.norm(tokens))
        if not isinstance(window, Window):
            q = self.seeds.to(kv.dtype).repeat(window.batch, 1)
            queries = even_rows(window.batch, self.config.n_pma, kv.device)
            return attend_in_rows([q, kv], "q|kv", queries, window, self.config).unflatten(0, (window.batch, -1))
        k, v = window.pad(kv).chunk(2, -1)
        q = self.seeds.to(k.dtype).expand(window.batch, -1, -1)
        activation = ACTIVATION_FUNCTIONS[self.config.activation]
        return pointwise_attention(q, k, v, heads=self.config.heads, activation=activation)


class _ByBucket(torch.autograd.Function):
    """``table[:, bucket]``, whose gradient is summed bucket by bucket: no atomic additions, the same bits every run."""

    @staticmethod
    def forward(table: Tensor, bucket: Tensor) -> Tensor:
        return table[:, bucket]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.buckets = inputs[0].shape[1]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (bucket,) = ctx.saved_tensors
        sums = [(grads[0] * (bucket == b)).flatten(1).sum(1) for b in range(ctx.buckets)]
        return torch.stack(sums, 1), None


class SequenceArch(nn.Module):
    """The sequence side of a layer: personalized feed-forward, then self-attention.

    The feed-forward is GDPA as in Kunlun (arXiv:2602.10016): every token queries a few key/value tokens that are made
    from its row's feature summary. Self-attention is HSTU's (arXiv:2402.17152): one projection to U, V, Q and K, a
    pointwise activation, a norm and the gate U; both parts of its bias, of position and of time, are optional.
    """

    def __init__(self, config: GemConfig) -> None:
        super().__init__()
        d = config.d
        self.config = config
        self.pffn_norm = RMSNorm(d, config)
        self.pffn_q = linear(d, d, config)
        self.pffn_kv = linear(config.n_summary * d, 2 * config.pffn_tokens * d, config)
        self.norm = RMSNorm(d, config)
        self.uvqk = linear(d, 4 * d, config)
        bias = torch.zeros(config.heads, config.bias_reach) if config.bias_reach else None
        self.position_bias = None if bias is None else nn.Parameter(bias)
        bias = torch.zeros(config.heads, config.time_buckets) if config.time_buckets else None
        self.time_bias = None if bias is None else nn.Parameter(bias)
        self.attention_norm = RMSNorm(d, config)
        self.out = linear(d, d, config)

    def forward(self, tokens: Tensor, summary: Tensor, window: Rows) -> Tensor:
        """Update the flat tokens.

        Args:
            tokens: [T, d].
            summary: [B, n_summary, d], the feature summary of each row.
            window: the whole rows, padded or as they lie; with ``time_buckets`` they have times.

        Returns:
            [T, d].
        """
        config = self.config
        activation = ACTIVATION_FUNCTIONS[config.activation]
        kv = self.pffn_kv(summary.flatten(1)).unflatten(-1, (config.pffn_tokens, -1))
        tokens = tokens + self._feed(self.pffn_q(self.pffn_norm(tokens)), kv, window)
        u, attended = self._attend(activation(self.uvqk(self.norm(tokens))), window)
        update = self.out(self.attention_norm(attended) * u)
        return tokens + F.dropout(update, config.sequence_dropout, self.training)

    def _feed(self, q: Tensor, kv: Tensor, window: Rows) -> Tensor:
        """Queries [T, d] over the keys and values [B, pffn_tokens, 2 d] of their rows -> [T, d]."""
        config = self.config
        if not isinstance(window, Window):
            keys = even_rows(window.batch, config.pffn_tokens, q.device)
            return attend_in_rows([q, kv.flatten(0, 1)], "q|kv", window, keys, config)
        activation = ACTIVATION_FUNCTIONS[config.activation]
        k, v = kv.chunk(2, -1)
        return window.flatten(pointwise_attention(window.pad(q), k, v, heads=config.heads, activation=activation))

    def _attend(self, uvqk: Tensor, window: Rows) -> tuple[Tensor, Tensor]:
        """Gates, values, queries and keys [T, 4 d] -> the gates [T, d], and what each token saw of its row [T, d]."""
        config = self.config
        if not isinstance(window, Window):
            rules = attention_rules(window, window, config, causal=True)
            times = None if self.time_bias is None else window.times
            return gated_jagged_attention(
                uvqk, window.offsets, rules, heads=config.heads, bias=self.position_bias, times=times,
                time_bias=self.time_bias,
            )  # fmt: skip
        activation = ACTIVATION_FUNCTIONS[config.activation]
        u, vqk = uvqk.split([config.d, 3 * config.d], -1)
        v, q, k = window.pad(vqk).chunk(3, -1)
        mask = sequence_mask(window.width, config.n_summary, config.window, vqk.device)
        out = pointwise_attention(
            q, k, v, heads=config.heads, activation=activation, mask=mask, bias=self._bias(window)
        )
        return u, window.flatten(out)

    def _bias(self, window: Window) -> Tensor | None:
        """What is added to the scores of padded rows, [H, L, L], with one of time [B, H, L, L]; None for nothing."""
        config, at = self.config, torch.arange(window.width, device=window.offsets.device)
        bias = None
        if self.position_bias is not None:
            bias = self.position_bias[:, (at.unsqueeze(1) - at).clamp(0, config.bias_reach - 1)]
        if self.time_bias is None:
            return bias
        assert window.times is not None, "a bias of time needs times"
        # What empty slots read here meets values of zero.
        when = window.times[window.pad_index].view(window.batch, window.width)
        bucket = time_bucket(when.unsqueeze(2) - when.unsqueeze(1), config.time_buckets)
        # The closing summary tokens are no events: they have no time, and events do not see them.
        of_events = (at < window.width - config.n_summary).unsqueeze(1)
        of_time = _ByBucket.apply(self.time_bias, bucket).transpose(0, 1) * of_events
        return of_time if bias is None else of_time + bias
