"""The interaction of feature and summary tokens: Wukong's blocks with a low-rank DCN gate."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import GemConfig
from .functional import ACTIVATION_FUNCTIONS, RMSNorm, TokenMixer, linear


class Interaction(nn.Module):
    """Wukong layer (arXiv:2403.02545): factorization-machine block beside a linear compression, residual, norm.

    The block multiplies all token pairs, compresses them to ``fm_rank`` columns and feeds them to an MLP. A low-rank
    cross as in DCNv2 (arXiv:2008.13535) gates the residual.
    """

    def __init__(self, n_in: int, config: GemConfig) -> None:
        super().__init__()
        d, n_out = config.d, config.n_interaction
        self.config = config
        self.compress = TokenMixer(n_in, config.n_lcb)
        self.pairs = TokenMixer(n_in, config.fm_rank)
        widths = (n_in * config.fm_rank, *config.fm_hidden)
        self.pair_norm = RMSNorm(widths[0], config)
        self.mlp = nn.ModuleList(linear(a, b, config) for a, b in pairwise(widths))
        self.out = linear(widths[-1], config.n_fmb * d, config)
        self.residual = TokenMixer(n_in, n_out)
        self.cross_down = linear(n_in * d, config.cross_rank, config)
        self.cross_up = linear(config.cross_rank, n_out * d, config)
        self.norm = RMSNorm(d, config)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, n_in, d] -> [B, n_lcb + n_fmb, d]."""
        d = self.config.d
        activation = ACTIVATION_FUNCTIONS[self.config.activation]
        # (X Xᵀ) Wᵀ as X (W X)ᵀ: the n x n matrix of pairs is never formed.
        hidden = self.pair_norm(torch.bmm(tokens, self.pairs(tokens).transpose(1, 2).to(tokens.dtype)).flatten(1))
        for layer in self.mlp:
            hidden = activation(layer(hidden))
        hidden = F.dropout(hidden, self.config.dropout, self.training)
        products = self.out(hidden).unflatten(-1, (-1, d))
        mixed = torch.cat([products, self.compress(tokens).to(products.dtype)], 1)
        base = self.residual(tokens)
        gate = self.cross_up(self.cross_down(tokens.flatten(1))).unflatten(-1, (-1, d))
        return self.norm(mixed + base * (1 + gate))
