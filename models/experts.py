"""A mixture of experts over feature tokens: few of many feed-forward networks a token, as grouped products."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..precision.grouped import GroupedLinear
from .config import GemConfig
from .functional import ACTIVATION_FUNCTIONS, RMSNorm, linear


class Experts(nn.Module):
    """Each token goes to the ``expert_top`` experts that its gate likes best; their sum joins the residual stream.

    Interaction modules side by side with a shortcut and a norm are DHEN's form (arXiv:2203.11014); the gate that picks
    a few and the loss that keeps the picks even are Switch Transformer's (arXiv:2101.03961). How many rows an expert
    gets stays on the device; where :class:`narrowgate.precision.GroupedLinear` groups its products, a compiled model
    has no break here.
    """

    def __init__(self, config: GemConfig) -> None:
        super().__init__()
        d, hidden = config.d, config.expert_hidden
        self.top = config.expert_top
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.norm = RMSNorm(d, config)
        self.gate = linear(d, config.experts, config)
        self.up = GroupedLinear(config.experts, d, hidden, bias=config.bias)
        self.down = GroupedLinear(config.experts, hidden, d, bias=config.bias)
        #: Of the last forward: 1 where all experts are used alike, ``experts`` where one takes everything.
        self.imbalance: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, n, d] -> [B, n, d]."""
        x = self.norm(tokens).flatten(0, 1)
        share = torch.softmax(self.gate(x).float(), -1)
        weight, expert = share.topk(self.top, -1)
        # Stable, so that equal gates always give the same order and the same bits.
        owner, order = torch.sort(expert.flatten(), stable=True)
        experts = share.shape[1]
        ends = torch.searchsorted(owner, torch.arange(1, experts + 1, device=owner.device), out_int32=True)
        self.imbalance = experts * (torch.diff(ends, prepend=ends.new_zeros(1)) / len(owner) * share.mean(0)).sum()
        hidden = self.activation(self.up(x.repeat_interleave(self.top, 0)[order], ends))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        out = self.down(hidden, ends)[back].unflatten(0, (-1, self.top))
        return tokens + (out * weight.unsqueeze(-1).to(out.dtype)).sum(1).view(tokens.shape).to(tokens.dtype)


def imbalance(model: nn.Module) -> Tensor | None:
    """Return how unevenly the experts of ``model`` were used, summed over its mixtures; None without any."""
    found = [m.imbalance for m in model.modules() if isinstance(m, Experts) and m.imbalance is not None]
    return torch.stack(found).sum() if found else None
