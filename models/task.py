"""The training task of a built-in model on a data source, as ``narrowgate.gates.Task`` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from .batch import Batch
from .data.by_rank import RankData
from .data.loader import BatchSource, BatchStream
from .data.source import open_data
from .experts import imbalance
from .gem import GemModel
from .optimizers import scheduled_optimizer
from .prediction import Prediction
from .presets import Preset, get_preset


class GemTask:
    """A GEM-like model of one preset on one data source.

    Nothing in here depends on the arm: two arms that seed alike see the same initial weights, batches, dropout masks
    and learning rates. Can be pickled and sent to a worker process.
    """

    def __init__(self, preset: Preset, data: BatchSource) -> None:
        self.preset = preset
        self.data = data

    @classmethod
    def open(
        cls,
        model: str | Preset = "gem-tiny",
        data: str = "synthetic",
        device: str | torch.device = "cpu",
        steps: int | None = None,
    ) -> GemTask:
        """Open a built-in model on a data source.

        Args:
            model: a built-in size, or a :class:`Preset`.
            data: a source as :func:`narrowgate.models.open_data` takes it.
            device: where model and batches live.
            steps: training steps; the preset's number by default.

        Raises:
            NarrowgateError: as :func:`get_preset` and :func:`open_data`.
        """
        preset = get_preset(model) if isinstance(model, str) else model
        return cls(preset, open_data(data, preset, device=device, steps=steps))

    @property
    def task_names(self) -> tuple[str, ...]:
        """The labels' names, in the order of a prediction's columns."""
        return self.data.task_names

    @property
    def device(self) -> torch.device:
        """Where model and batches live."""
        return self.data.device

    @property
    def steps(self) -> int:
        """Optimizer steps of one training."""
        return self.data.steps

    def build_model(self) -> GemModel:
        """Return a model initialized from torch's global generators, in training mode."""
        with torch.device(self.device):
            return GemModel(self.preset.model, self.data.features)

    def train_batches(self, seed: int) -> BatchStream:
        """Return the training batches in the order that the seed shuffles; iterable again and again."""
        return self.data.train_batches(seed)

    def eval_batches(self) -> BatchStream:
        """Return the held-out rows, the same for every seed."""
        return self.data.eval_batches()

    def for_rank(self, rank: int, ranks: int) -> GemTask:
        """Return the task as one of several ranks trains it: of every batch it has an equal part of the rows.

        Raises:
            NarrowgateError: the ranks do not divide a batch.
        """
        return GemTask(self.preset, RankData(self.data, rank, ranks))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the log loss averaged over rows and tasks, FP32 scalar; a mixture's balance loss joins in training."""
        logits = model(batch)[: batch.rows]
        loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels[: batch.rows])
        uneven = imbalance(model) if self.preset.model.experts and model.training else None
        return loss if uneven is None else loss + self.preset.model.expert_balance * uneven

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        """Return scores and labels of the batch's rows, without gradients."""
        with torch.no_grad():
            logits = model(batch)[: batch.rows].float()
        return Prediction(logits, batch.labels[: batch.rows], groups=batch.groups[: batch.rows])

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the preset's optimizer; see :func:`narrowgate.models.optimizers.scheduled_optimizer`."""
        return scheduled_optimizer(model, self.steps, self.preset.training)

    def base_rates(self) -> Sequence[float]:
        """Return the share of positive training labels per task."""
        return self.data.base_rates()

    def describe(self) -> dict[str, Any]:
        """Return JSON-able facts about model, training and data for a report."""
        with torch.device("meta"):
            model = GemModel(self.preset.model, self.data.features)
        total = sum(p.numel() for p in model.parameters())
        dense = model.dense_parameters()
        return {
            "model": {
                "name": self.preset.name,
                "config": asdict(self.preset.model),
                "dense_parameters": dense,
                "embedding_parameters": total - dense,
            },
            "training": asdict(self.preset.training) | {"steps": self.steps},
            "data": self.data.describe(),
        }
