"""``nn.MultiheadAttention`` with its projections in low precision.

Its input projection is a packed Parameter and its output projection a module that PyTorch never calls, so the whole
forward is replaced: the projections run as low-precision linear layers, everything between them as it did. PyTorch's
inference fast path, which multiplies the weights itself, is never taken.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import LinearConfig
from .errors import NarrowgateError
from .layer import LayerState, LowPrecisionLayer, placed_state, swap
from .linear import linear_product


def attention_obstacle(module: nn.MultiheadAttention) -> str | None:
    """Say why the projections of ``module`` cannot be lowered; None where they can."""
    if not isinstance(module, LowPrecisionAttention) and type(module).forward is not nn.MultiheadAttention.forward:
        return "its class has a forward of its own, which a swap would discard"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, which a swapped class would not reach"
    if not module._qkv_same_embed_dim:
        return "kdim or vdim differs from embed_dim: separate query, key and value projections are not lowered"
    if module.bias_k is not None or module.add_zero_attn:
        return "add_bias_kv and add_zero_attn are not lowered"
    return None


class LowPrecisionAttention(LowPrecisionLayer, nn.MultiheadAttention):
    """An ``nn.MultiheadAttention`` whose ``in_proj`` runs a config and whose ``out_proj`` is called as a module."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what ``nn.MultiheadAttention`` returns, for the same arguments.

        Raises:
            NarrowgateError: the shapes do not fit, or a tensor is nested.
        """
        state = placed_state(self)
        if query.is_nested or key.is_nested or value.is_nested:
            raise NarrowgateError(
                f"layer '{state.name}': nested tensors have no low-precision attention; "
                "nn.TransformerEncoder makes them in evaluation unless it is built with enable_nested_tensor=False"
            )
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim() or key.shape != value.shape:
            shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
            raise NarrowgateError(f"layer '{state.name}': expected query, key and value of one form, found {shapes}")
        if is_causal and attn_mask is None:
            raise NarrowgateError(f"layer '{state.name}': is_causal is a hint about attn_mask, found none")
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value, state)
        # To [batch, length, width].
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
            key_padding_mask = key_padding_mask.unsqueeze(0) if key_padding_mask is not None else None
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        mask = self._mask(attn_mask, key_padding_mask, q, k.shape[2])
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q / math.sqrt(self.head_dim)) @ k.mT
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            out = weights @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out.squeeze(0), weights.squeeze(0) if weights is not None else None
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor, state: LayerState) -> list[Tensor]:
        """Query, key and value through the packed projection; equal inputs are quantized and multiplied once."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        draw, recording = state.enter(self.training and torch.is_grad_enabled())

        def linear(x: Tensor, first: int, count: int) -> tuple[Tensor, ...]:
            part = slice(first * self.embed_dim, (first + count) * self.embed_dim)
            b = bias[part] if bias is not None else None
            if state.config.high_precision:
                return F.linear(x, weight[part], b).chunk(count, -1)
            # The part takes the micro-batch's place in the random key, so that no two draw the same bits.
            return linear_product(x, weight[part], b, state, draw + (first << 16), recording).chunk(count, -1)

        if query is key and key is value:
            return [*linear(query, 0, 3)]
        if key is value:
            return [*linear(query, 0, 1), *linear(key, 1, 2)]
        return [*linear(query, 0, 1), *linear(key, 1, 1), *linear(value, 2, 1)]

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
        """Both masks as one that is added to the scores, broadcastable to [batch, heads, queries, keys]."""
        batch, heads, queries = q.shape[:3]
        parts: list[Tensor] = []
        if mask is not None:
            if (mask.dim() == 3 and mask.shape != (batch * heads, queries, keys)) or mask.shape[-2:] != (queries, keys):
                raise NarrowgateError(
                    f"attn_mask: expected [{queries}, {keys}] or [{batch * heads}, {queries}, {keys}], "
                    f"found {list(mask.shape)}"
                )
            parts.append(mask if mask.dim() == 2 else mask.unflatten(0, (batch, heads)))
        if padding is not None:
            if padding.shape != (batch, keys):
                raise NarrowgateError(f"key_padding_mask: expected [{batch}, {keys}], found {list(padding.shape)}")
            parts.append(padding[:, None, None, :])
        added = [
            torch.zeros(part.shape, dtype=q.dtype, device=q.device).masked_fill(part, -torch.inf)
            if part.dtype == torch.bool
            else part.to(q.dtype)
            for part in parts
        ]
        return sum(added[1:], added[0]) if added else None


def lower_attention(module: nn.MultiheadAttention, config: LinearConfig, *, name: str = "", seed: int = 0) -> None:
    """Make the input projection of ``module`` run ``config``, in place, and its output projection be called.

    Args:
        module: the attention; :func:`attention_obstacle` of it is None.
        config: formats per path and operand of the input projection; BF16 leaves it as it is.
        name: the projection's name in its model; part of the key of its random streams and of its error messages.
        seed: seed of the random streams.

    Raises:
        NarrowgateError: the module is lowered already, or cannot be.
    """
    obstacle = attention_obstacle(module)
    if obstacle is not None:
        raise NarrowgateError(f"layer '{name}': {obstacle}")
    device = module.in_proj_weight.device
    swap(module, LowPrecisionAttention, config, name=name, seed=seed, device=device)
