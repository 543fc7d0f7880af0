"""The GEM-like model: sparse features, InterFormer-style layers over features and a jagged history, task heads.

Sources: Wukong arXiv:2403.02545, InterFormer arXiv:2411.09852, HSTU arXiv:2402.17152, Kunlun arXiv:2602.10016; see
docs/models.md for what is taken from where and what differs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..precision.errors import NarrowgateError
from .attention import Pooling, SequenceArch
from .batch import Batch
from .checkpointing import Checkpointed
from .config import GemConfig
from .embedding import EventEncoder, SparseArch
from .experts import Experts
from .features import FeatureSpec
from .first_order import FirstOrder
from .functional import ACTIVATION_FUNCTIONS, TokenMixer, linear
from .interaction import Interaction
from .jagged import Jagged, Rows, Window, append_tokens


class CrossArch(nn.Module):
    """Exchange between both sides of a layer: a short summary of each, gated by itself."""

    def __init__(self, n_features: int, config: GemConfig) -> None:
        super().__init__()
        self.compress = TokenMixer(n_features, config.n_summary)
        self.feature_gate = linear(config.d, config.d, config)
        self.pooling = Pooling(config)
        self.sequence_gate = linear(config.d, config.d, config)

    def forward(self, features: Tensor, tokens: Tensor, window: Rows, tail: Window) -> tuple[Tensor, Tensor]:
        """Summarize both sides.

        Args:
            features: [B, n, d] feature tokens.
            tokens: [T, d] sequence tokens.
            window: the whole rows.
            tail: the closing summary tokens and the latest events of each row.

        Returns:
            [B, n_summary, d] of the features and [B, n_sequence_summary, d] of the sequence.
        """
        of_features = self.compress(features)
        of_features = of_features * torch.sigmoid(self.feature_gate(of_features))
        pooled = self.pooling(tokens, window)
        of_sequence = torch.cat([tail.pad(tokens), pooled.to(tokens.dtype)], 1)
        return of_features, of_sequence * torch.sigmoid(self.sequence_gate(of_sequence))


class GemLayer(Checkpointed):
    """One layer: cross exchange, interaction of the features, update of the sequence."""

    def __init__(self, n_features: int, config: GemConfig) -> None:
        super().__init__()
        self.cross = CrossArch(n_features, config)
        self.interaction = Interaction(n_features + config.n_sequence_summary, config)
        self.sequence = SequenceArch(config)
        self.experts = Experts(config) if config.experts else None

    def forward(self, features: Tensor, tokens: Tensor, window: Rows, tail: Window) -> tuple[Tensor, Tensor]:
        """Return the next feature tokens [B, n_interaction, d] and sequence tokens [T, d]."""
        of_features, of_sequence = self.run_region("cross", features, tokens, window, tail)
        tokens = self.run_region("sequence", tokens, of_features, window)
        features = self.run_region("interaction", torch.cat([features, of_sequence.to(features.dtype)], 1))
        return features if self.experts is None else self.run_region("experts", features), tokens


class Head(nn.Module):
    """One task's log odds; the only place with a bias by default."""

    def __init__(self, inputs: int, config: GemConfig) -> None:
        super().__init__()
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.hidden = linear(inputs, config.head_hidden, config)
        self.out = nn.Linear(config.head_hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs] -> [B, 1]."""
        return self.out(self.activation(self.hidden(x)))


class GemModel(nn.Module):
    """A recommender of configurable size.

    Works eagerly, under ``torch.compile(fullgraph=True)`` and under ``torch.autocast``, without waiting for the
    device; a new token count ``T`` is the only shape that changes between batches.
    """

    def __init__(self, config: GemConfig, features: FeatureSpec) -> None:
        super().__init__()
        self.config = config
        self.features = features
        self.sparse = SparseArch(config, features)
        self.encoder = EventEncoder(config)
        self.summary = TokenMixer(features.n_tokens, config.n_summary)
        counts = [features.n_tokens] + [config.n_interaction] * config.layers
        self.layers = nn.ModuleList(GemLayer(n, config) for n in counts[:-1])
        self.cross = CrossArch(counts[-1], config)
        width = (config.n_summary + config.n_sequence_summary + counts[-1]) * config.d
        self.heads = nn.ModuleList(Head(width, config) for _ in features.tasks)
        self.first_order = FirstOrder(features) if config.first_order else None

    def forward(self, batch: Batch) -> Tensor:
        """Return logits [B, tasks], FP32.

        Raises:
            NarrowgateError: a batch without times for a model with ``time_buckets``.
        """
        config = self.config
        times = batch.event_times if config.time_buckets else None
        if config.time_buckets and times is None:
            raise NarrowgateError(
                f"this batch has no event_times, which model field 'time_buckets' = {config.time_buckets} needs"
            )
        stream = self._stream_dtype(batch.events.device.type)
        features = self.sparse(batch)
        features = features if stream is None else features.to(stream)
        events = self.encoder(batch, self.sparse, stream)
        tokens, layout = append_tokens(events, Jagged(batch.event_rows, batch.offsets, times), self.summary(features))
        padded = config.attention == "padded"
        window = layout.window(config.max_tokens) if padded else layout.last(config.max_tokens)
        tail = layout.window(config.n_summary + config.n_recent)
        for layer in self.layers:
            features, tokens = layer(features, tokens, window, tail)
        of_features, of_sequence = self.cross(features, tokens, window, tail)
        parts = (part.flatten(1).to(features.dtype) for part in (of_features, of_sequence, features))
        joined = torch.cat(list(parts), 1)
        odds = torch.cat([head(joined) for head in self.heads], 1).float()
        return odds if self.first_order is None else odds + self.first_order(batch)

    def _stream_dtype(self, kind: str) -> torch.dtype | None:
        """Return the type that the residual streams keep on a kind of device; None for the type they come in."""
        # The meta device, on which models are only planned, knows no autocast.
        if self.config.residual == "autocast" and kind != "meta" and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return None

    def dense_parameters(self) -> int:
        """Parameters outside the embedding tables and the first-order part."""
        apart = (nn.Embedding, nn.EmbeddingBag, FirstOrder)
        tables = {id(p) for m in self.modules() if isinstance(m, apart) for p in m.parameters()}
        return sum(p.numel() for p in self.parameters() if id(p) not in tables)
