"""Batches by rank: of every batch of a source each of several ranks has its own rows, and all of them the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...precision.errors import NarrowgateError
from ..batch import Batch
from ..features import FeatureSpec
from ..presets import TrainingConfig
from .loader import BatchStream, event_rows_of


class RankData:
    """What one rank sees of a source; seeds, order, steps and facts are the source's own.

    Args:
        source: of whole batches.
        rank: this one.
        ranks: how many there are.

    Raises:
        NarrowgateError: the ranks do not divide a training batch, so a mean over ranks would be none over rows.
    """

    def __init__(self, source: Any, rank: int, ranks: int) -> None:
        self.training: TrainingConfig = source.training
        if self.training.batch_size % ranks:
            raise NarrowgateError(
                f"batches of {self.training.batch_size} rows on {ranks} ranks: expected a number of ranks that divides"
                " the batch"
            )
        self.source, self.rank, self.ranks = source, rank, ranks
        self.device: torch.device = source.device
        self.steps: int = source.steps

    @property
    def features(self) -> FeatureSpec:
        """The fields that the batches carry."""
        return self.source.features

    @property
    def task_names(self) -> tuple[str, ...]:
        """The labels' names, in the order of their columns."""
        return self.source.task_names

    def base_rates(self) -> list[float]:
        """Share of positive training labels, per task, over all ranks."""
        return self.source.base_rates()

    def train_batches(self, seed: int) -> BatchStream:
        """Return this rank's part of the training batches of a seed."""
        return self._parts(self.source.train_batches(seed))

    def eval_batches(self) -> BatchStream:
        """Return this rank's part of the held-out batches; of the last one it may have no row."""
        return self._parts(self.source.eval_batches())

    def describe(self) -> dict[str, Any]:
        """Return the source's facts."""
        return self.source.describe()

    def _parts(self, batches: BatchStream) -> BatchStream:
        def build(start: int) -> Iterator[Batch]:
            return (part_of(batch, self.rank, self.ranks, self.training) for batch in batches.starting_at(start))

        return BatchStream(len(batches), build)


def part_of(batch: Batch, rank: int, ranks: int, training: TrainingConfig) -> Batch:
    """Return one rank's rows of a batch, in order: ceil(B / ranks) of them, and tokens up to a friendly number.

    The last ranks' parts are filled with rows that do not count, as the last batch of an evaluation is. Token counts
    are alike, but where a rank needs more than an equal share. Waits for the device once.
    """
    total, tokens = batch.sparse.shape[0], batch.events.shape[0]
    size = -(-total // ranks)
    first = min(rank * size, total)
    last = min(first + size, total)
    # Beyond the batch: the first row's features, without history.
    index = torch.arange(first, first + size, device=batch.sparse.device)
    index = torch.where(index < total, index, 0)
    begin, end = batch.offsets[[first, last]].tolist()
    offsets = batch.offsets[torch.arange(first, first + size + 1, device=index.device).clamp_max(total)] - begin
    room = training.round_up(max(end - begin, -(-tokens // ranks)))
    event_rows, live = event_rows_of(offsets, room)
    place = torch.arange(room, device=index.device) + begin
    place = place.clamp_max(tokens - 1)
    events = torch.where(live.unsqueeze(1), batch.events[place], 0)
    times = batch.event_times

    def of(values: Tensor) -> Tensor:
        return values[index]

    return Batch(
        sparse=of(batch.sparse),
        bags=tuple(of(bag) for bag in batch.bags),
        dense=of(batch.dense),
        events=events,
        event_rows=event_rows,
        offsets=offsets,
        labels=of(batch.labels),
        groups=of(batch.groups),
        rows=max(min(batch.rows, last) - first, 0),
        event_times=None if times is None else torch.where(live, times[place], 0),
    )
