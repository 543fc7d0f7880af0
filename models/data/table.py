"""Batches from a user's CSV or Parquet file, read as a stream: the file may be larger than memory.

Opening a table reads it once: rows are counted and checked, numbers are measured, base rates taken. Every training
epoch reads it again, in a thread beside the training, shuffling as many rows at a time as the schema says. Ids are
hashed, so no vocabulary is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...precision.errors import NarrowgateError
from ..batch import Batch
from ..features import FeatureSpec
from ..presets import TrainingConfig
from .balance import deal
from .host_rows import HostRows
from .loader import BatchStream, no_times, padded_bound
from .read_ahead import read_ahead
from .table_columns import Mask
from .table_file import BadRows, TableFile
from .table_rows import Checked, RowReader
from .table_schema import TableSchema


@dataclass(eq=False)
class _Totals:
    """What one reading of the whole file adds up; sums are over training rows."""

    train: int = 0
    held_out: int = 0
    labels: NDArray[np.float64] | float = 0.0
    #: Over the numbers that are there: how many, mean, sum of squared differences from it.
    there: NDArray[np.float64] | float = 0.0
    mean: NDArray[np.float64] | float = 0.0
    squares: NDArray[np.float64] | float = 0.0
    #: Of history lengths.
    length_sum: float = 0.0
    length_squares: float = 0.0
    length_max: int = 0

    def add(self, part: Checked) -> None:
        """Count the rows of one piece."""
        train = ~part.held_out
        self.train += int(train.sum())
        self.held_out += int(part.held_out.sum())
        self.labels = self.labels + part.rows.labels[train].sum(0, dtype=np.float64)
        self._add_numbers(part.numbers[train], part.there[train])
        lengths = part.rows.lengths[train]
        self.length_sum += float(lengths.sum())
        self.length_squares += float(np.square(lengths).sum())
        self.length_max = max(self.length_max, int(part.rows.lengths.max(initial=0)))

    def _add_numbers(self, values: NDArray[np.float64], there: Mask) -> None:
        """Join another part's means and sums of squared differences, as Chan, Golub and LeVeque (1979) do.

        Sums of squares themselves would leave nothing of numbers that differ by little, such as times.
        """
        count = there.sum(0)
        mean = np.where(there, values, 0).sum(0) / np.maximum(count, 1)
        squares = np.square(np.where(there, values - mean, 0)).sum(0)
        both = np.maximum(self.there + count, 1)
        apart = mean - self.mean
        self.squares = self.squares + squares + np.square(apart) * self.there * count / both
        self.mean = self.mean + apart * count / both
        self.there = self.there + count

    def number_scale(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and deviation of each number; 0 and 1 where there is nothing to tell them from."""
        mean = np.asarray(self.mean, np.float64)
        deviation = np.sqrt(self.squares / np.maximum(self.there, 1))
        # What rounding leaves of numbers that are all the same is no deviation.
        return mean, np.where(deviation > np.maximum(1e-6, 1e-14 * np.abs(mean)), deviation, 1.0)


class TableDataset:
    """The rows of a file as batches of a preset; has what :class:`Dataset` has, but no rows at rest.

    Args:
        file: the table.
        training: batch sizes, steps, padding, balancing.
        max_events: events that a row keeps.
        device: where the batches shall be.
        steps: training batches of a run; the preset's number by default.
        times: whether batches carry the times of events.

    Raises:
        NarrowgateError: too many bad rows, too few good ones, a label that never varies, no times where they are asked
            for.
    """

    def __init__(
        self,
        file: TableFile,
        training: TrainingConfig,
        *,
        max_events: int,
        device: str | torch.device = "cpu",
        steps: int | None = None,
        times: bool = False,
    ) -> None:
        history = file.schema.history
        if times and (history is None or history.times is None):
            why = "there is no history" if history is None else "its schema has no field 'history.times'"
            raise no_times(file.schema.table or str(file.path), why)
        self.file = file
        self.training = training
        self.device = torch.device(device)
        self.max_events = max_events
        schema = file.schema
        last = 0 if schema.split.last is None else max(1, round(schema.split.last * file.records))
        self._reader = RowReader(schema, max_events, file.first + file.records - last, times=times)
        self._bad = file.bad_rows()
        self._totals = _Totals()
        self._pieces = 0
        for part in self._parts(self._bad):
            self._totals.add(part)
            self._pieces += 1
        self._bad.warn()
        self._check()
        self._mean, self._deviation = self._totals.number_scale()
        planned = min(training.steps, -(-int(training.epochs * self._totals.train) // training.batch_size))
        self.steps = planned if steps is None else steps

    @property
    def schema(self) -> TableSchema:
        """What the columns mean."""
        return self.file.schema

    @property
    def features(self) -> FeatureSpec:
        """The fields that the batches carry."""
        return self.schema.features()

    @property
    def task_names(self) -> tuple[str, ...]:
        """The labels' names, in the order of their columns."""
        return tuple(self.schema.labels)

    def base_rates(self) -> list[float]:
        """Share of positive training labels, per task."""
        return [float(rate) for rate in np.atleast_1d(self._totals.labels) / self._totals.train]

    def train_batches(self, seed: int) -> BatchStream:
        """Return ``steps`` training batches; the seed shuffles within each buffer of rows."""
        return BatchStream(self.steps, lambda start: self._train(seed, start))

    def eval_batches(self) -> BatchStream:
        """Return every held-out row once, in the file's order."""
        return BatchStream(-(-self._totals.held_out // self._eval_size()), self._evaluate)

    def describe(self) -> dict[str, Any]:
        """Return JSON-able facts for a report: file, schema, split, rows, bad rows, base rates."""
        return {
            "name": self.schema.table or self.file.path.name,
            "files": {self.file.path.name: self.file.sha256},
            "sha256": self.file.sha256,
            "rows_read": self.file.limit,
            "schema": self.schema.model_dump(mode="json", exclude_defaults=True),
            "split": self._split(),
            "bad_rows": {"count": self._bad.count, "first": list(self._bad.first)},
            "rows_train": self._totals.train,
            "rows_eval": self._totals.held_out,
            "max_events": self._totals.length_max,
            "tasks": list(self.task_names),
            "base_rate": dict(zip(self.task_names, self.base_rates(), strict=True)),
        }

    def _split(self) -> str:
        split = self.schema.split
        if split.last is not None:
            return f"the last {split.last:g} of the file is held out"
        if split.users is not None:
            return f"a share {split.users:g} of the users, chosen by hash, is held out"
        return f"rows whose '{split.column}' is {', '.join(map(str, split.held_out))} are held out"

    def _check(self) -> None:
        found, size = self._totals, self.training.batch_size
        if found.train < size or not found.held_out:
            raise NarrowgateError(
                f"{self.file.path}: too few rows: {found.train} to train on and {found.held_out} held out, expected at"
                f" least one batch of {size} and one row"
            )
        for name, rate in zip(self.task_names, self.base_rates(), strict=True):
            if not 0 < rate < 1:
                raise NarrowgateError(f"{self.file.path}: label '{name}' is {rate:g} in every training row: no task")

    def _parts(self, bad: BadRows) -> Iterator[Checked]:
        for place, piece in enumerate(self.file.pieces(bad)):
            if not place:
                self._reader.check_types(piece.rows.schema, str(self.file.path))
            yield self._reader.read(piece, bad)

    def _rows(self, *, held_out: bool) -> Iterator[HostRows]:
        for part in self._parts(self.file.bad_rows()):
            kept = np.flatnonzero(part.held_out == held_out)
            if len(kept):
                numbers = (part.numbers[kept] - self._mean) / self._deviation
                dense = np.where(part.there[kept], numbers, 0).astype(np.float32)
                yield replace(part.rows.take(kept), dense=dense)

    def _train(self, seed: int, start: int) -> Iterator[Batch]:
        size, balance = self.training.batch_size, self.training.balance
        bound = self._token_bound(1 if balance is None else balance.pool)
        for rows in read_ahead(self._train_rows(seed, start)):
            yield self._batch(rows, size, bound)

    def _train_rows(self, seed: int, start: int) -> Iterator[HostRows]:
        generator = np.random.default_rng(seed)
        size, balance = self.training.batch_size, self.training.balance
        pool = size * (1 if balance is None else balance.pool)
        capacity = max(self.schema.shuffle, pool)
        waiting: list[HostRows] = []
        number = 0
        while number < self.steps:
            before = number
            for rows in self._epoch(waiting, capacity):
                order = generator.permutation(len(rows))
                whole = len(rows) // pool * pool
                for first in range(0, whole, pool):
                    chosen = order[first : first + pool]
                    if balance is not None:
                        chosen = deal(chosen, rows.lengths[chosen], size, balance.sub_batch)
                    for place in range(0, pool, size):
                        if number >= self.steps:
                            return
                        if number >= start:
                            yield rows.take(chosen[place : place + size])
                        number += 1
                waiting.append(rows.take(order[whole:]))
            assert number > before or sum(map(len, waiting)), "an epoch brings rows"

    def _epoch(self, waiting: list[HostRows], capacity: int) -> Iterator[HostRows]:
        """Yield the training rows of one epoch in buffers of ``capacity``; ``waiting`` holds what no batch took yet."""
        # While batches are made of one buffer the rows of the next are read.
        pieces = min(self._pieces, -(-capacity * self._pieces // self._totals.train))
        for rows in read_ahead(self._rows(held_out=False), pieces):
            waiting.append(rows)
            if sum(map(len, waiting)) >= capacity:
                joined = HostRows.join(waiting)
                waiting.clear()
                yield joined
        joined = HostRows.join(waiting)
        waiting.clear()
        yield joined

    def _evaluate(self, start: int) -> Iterator[Batch]:
        size = self._eval_size()
        for rows in read_ahead(self._held_out_rows(start)):
            yield self._batch(rows, size, self.training.round_up(int(rows.lengths.sum())))

    def _held_out_rows(self, start: int) -> Iterator[HostRows]:
        size, number = self._eval_size(), 0
        waiting: list[HostRows] = []
        left = self._totals.held_out
        for rows in self._rows(held_out=True):
            waiting.append(rows)
            while (there := sum(map(len, waiting))) >= size or (there == left and there):
                joined = HostRows.join(waiting)
                taken = min(size, there)
                if number >= start:
                    yield joined.take(np.arange(taken))
                number, left = number + 1, left - taken
                waiting[:] = [joined.take(np.arange(taken, there))] if there > taken else []

    def _batch(self, rows: HostRows, size: int, bound: int) -> Batch:
        needed = self.training.round_up(int(rows.lengths.sum()))
        return rows.batch(size, max(bound, needed), self.device)

    def _eval_size(self) -> int:
        return min(self.training.eval_batch_size, self._totals.held_out)

    def _token_bound(self, pool: int) -> int:
        found = self._totals
        mean = found.length_sum / found.train
        deviation = max(found.length_squares / found.train - mean**2, 0.0) ** 0.5
        return padded_bound(mean, deviation, found.length_max, self.training.batch_size, self.training, pool)
