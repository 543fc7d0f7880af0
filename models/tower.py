"""A dense-heavy ranker: embeddings side by side, one projection, and a wide tower of gated feed-forward blocks.

The shape of DLRM's top MLP (arXiv:1906.00091) grown wide, as rankers at the scale of language models have it, with
the blocks that those use: RMSNorm (arXiv:1910.07467), SwiGLU (arXiv:2002.05202), a residual around both. Nearly all of
a step are large products of one shape, which is where a narrow format pays. A plain ranker of one's own can start here:
:class:`TowerModel` needs nothing but a :class:`narrowgate.models.Batch`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..precision.errors import NarrowgateError
from .batch import Batch
from .config import GemConfig
from .data.by_rank import RankData
from .data.loader import BatchSource
from .data.source import open_data
from .data.stream_config import StreamConfig
from .embedding import EventEncoder, SparseArch
from .features import FeatureSpec
from .functional import RMSNorm
from .jagged import Jagged
from .optimizers import table_parameters
from .presets import Preset, SyntheticConfig, TrainingConfig
from .task import GemTask


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Shape of a tower; widths count elements.

    Raises:
        NarrowgateError: a value below 1.
    """

    #: Of every embedding.
    embedding: int
    #: Of the residual stream, and of each block's gate and up half.
    width: int
    hidden: int
    blocks: int
    #: Latest events of a history that are pooled.
    events: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise NarrowgateError(f"tower field '{name}' must be at least 1, found {value}")

    @property
    def sparse(self) -> GemConfig:
        """What the parts that are the GEM-like model's ask of its configuration."""
        return GemConfig(d=self.embedding, heads=1, layers=1, max_tokens=self.events + 1, n_summary=1, n_recent=1)


class TowerBlock(nn.Module):
    """``x + down(silu(gate) * up)`` with ``[gate, up] = gate_up(RMSNorm(x))``, [B, width] -> [B, width]."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, config.sparse)
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)
        # All blocks together then add no more variance than one would: deeper towers start no louder. Not zero, as
        # a delayed scale would have nothing to go by in the step after.
        with torch.no_grad():
            self.down.weight.mul_((2 * config.blocks) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next residual stream in the type of ``x``."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up).to(x.dtype)


class TowerModel(nn.Module):
    """Log odds of every task from one wide tower over all fields.

    Works eagerly, under ``torch.compile(fullgraph=True)`` and under ``torch.autocast``, whose type the residual stream
    then has.
    """

    def __init__(self, config: TowerConfig, features: FeatureSpec) -> None:
        super().__init__()
        self.config = config
        self.sparse = SparseArch(config.sparse, features)
        self.encoder = EventEncoder(config.sparse)
        self.project = nn.Linear((features.n_tokens + 1) * config.embedding, config.width, bias=False)
        self.blocks = nn.ModuleList(TowerBlock(config) for _ in range(config.blocks))
        self.norm = RMSNorm(config.width, config.sparse)
        self.heads = nn.ModuleList(nn.Linear(config.width, 1) for _ in features.tasks)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits [B, tasks], FP32."""
        x = self.project(torch.cat([self.sparse(batch).flatten(1), self.history(batch)], 1))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return torch.cat([head(x) for head in self.heads], 1).float()

    def history(self, batch: Batch) -> Tensor:
        """Return the mean embedding [B, embedding] of each row's latest events, FP32; zeros without events."""
        window = Jagged(batch.event_rows, batch.offsets).window(self.config.events)
        count = batch.offsets.diff().clamp(1, self.config.events)
        return window.pad(self.encoder(batch, self.sparse)).sum(1) / count.unsqueeze(1)

    def dense_parameters(self) -> int:
        """Parameters outside the embedding tables."""
        tables = {id(p) for p in table_parameters(self)}
        return sum(p.numel() for p in self.parameters() if id(p) not in tables)


@dataclass(frozen=True, kw_only=True)
class TowerPreset(Preset):
    """A named tower: shape, training and generated data that fit together; ``model`` is ``tower.sparse``."""

    tower: TowerConfig


class TowerTask(GemTask):
    """A tower on a data source; batches, loss, prediction and optimizer are :class:`GemTask`'s.

    ``TowerTask(preset, open_data(source, preset, device=...))`` trains on any source.

    Raises:
        NarrowgateError: a preset of another model.
    """

    def __init__(self, preset: TowerPreset, data: BatchSource) -> None:
        if not isinstance(preset, TowerPreset):
            raise NarrowgateError(f"TowerTask: '{preset.name}' is a {type(preset).__name__}, expected a TowerPreset")
        super().__init__(preset, data)
        self.config = preset.tower

    def build_model(self) -> TowerModel:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a model initialized from torch's global generators, in training mode."""
        with torch.device(self.device):
            return TowerModel(self.config, self.data.features)

    def for_rank(self, rank: int, ranks: int) -> TowerTask:
        """Return the task as one of several ranks trains it; see :meth:`GemTask.for_rank`."""
        assert isinstance(self.preset, TowerPreset)
        return TowerTask(self.preset, RankData(self.data, rank, ranks))

    def describe(self) -> dict[str, Any]:
        """Return JSON-able facts about model, training and data for a report."""
        with torch.device("meta"):
            model = TowerModel(self.config, self.data.features)
        total, dense = sum(p.numel() for p in model.parameters()), model.dense_parameters()
        return {
            "model": {
                "name": self.preset.name,
                "config": asdict(self.config),
                "dense_parameters": dense,
                "embedding_parameters": total - dense,
            },
            "training": asdict(self.preset.training) | {"steps": self.steps},
            "data": self.data.describe(),
        }


def tower_preset(
    name: str, tower: TowerConfig, training: TrainingConfig, synthetic: SyntheticConfig | StreamConfig
) -> TowerPreset:
    """Return a preset of these parts."""
    return TowerPreset(name=name, model=tower.sparse, tower=tower, training=training, synthetic=synthetic)


#: A step multiplies 20 TFLOP: large enough for a GPU's products to be nearly all of it, short enough for 16 trainings.
TOWER = tower_preset(
    "tower",
    TowerConfig(embedding=128, width=2048, hidden=8192, blocks=4, events=12),
    # A low peak rate over tables that learn by rowwise Adagrad: the arms of a pair then hardly drift apart by chance.
    TrainingConfig(
        batch_size=16384, eval_batch_size=16384, steps=150, epochs=1, lr=2e-4, eps=1e-6, table_lr=0.02,
        token_multiple=4096,
    ),
    StreamConfig(
        users=50_000, items=20_000, rows=150 * 16384, held_out=262_144, contexts=8, context_rows=1024,
        median_events=6.0, length_spread=0.5, click_rate=0.25, conversion_rate=0.4, drift=0.2,
    ),
)  # fmt: skip
TOWER_TINY = tower_preset(
    "tower-tiny",
    TowerConfig(embedding=16, width=64, hidden=128, blocks=2, events=12),
    TrainingConfig(
        batch_size=512, eval_batch_size=4096, steps=150, epochs=1, lr=3e-3, eps=1e-5, table_lr=0.02,
    ),
    StreamConfig(
        users=2000, items=500, rows=150 * 512, held_out=32_768, contexts=4, context_rows=256,
        median_events=6.0, length_spread=0.5, click_rate=0.25, conversion_rate=0.4, drift=0.2,
    ),
)  # fmt: skip


def stream(device: str | torch.device = "cpu") -> TowerTask:
    """Return the task of :data:`TOWER` on generated data, for ``--task narrowgate.models.tower:stream``."""
    return TowerTask(TOWER, open_data("synthetic", TOWER, device=device))


def stream_tiny(device: str | torch.device = "cpu") -> TowerTask:
    """Return the task of :data:`TOWER_TINY`: the same model and data in seconds on one CPU core."""
    return TowerTask(TOWER_TINY, open_data("synthetic", TOWER_TINY, device=device))
