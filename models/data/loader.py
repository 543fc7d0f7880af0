"""Batches from rows: shuffled by a seed, gathered on the device, with every shape known on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...precision.errors import NarrowgateError
from ..batch import Batch
from ..features import FeatureSpec
from ..presets import TrainingConfig
from .balance import deal
from .metrics import normalized_entropy
from .rows import AGE_BUCKETS, Array, Ints, RowData


class BatchStream:
    """A sequence of batches that can be walked any number of times, always the same, from any of them on.

    Args:
        count: batches.
        build: returns an iterator from a batch's number on.
    """

    def __init__(self, count: int, build: Callable[[int], Iterator[Batch]]) -> None:
        self._count = count
        self._build = build

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        return self._build(0)

    def starting_at(self, number: int) -> Iterator[Batch]:
        """Return an iterator that leaves out the first ``number`` batches, without building them where it can."""
        return self._build(number)


class BatchSource(Protocol):
    """What a task needs of its data: :class:`Dataset` and the streamed ones."""

    training: TrainingConfig
    device: torch.device
    steps: int

    @property
    def features(self) -> FeatureSpec:
        """The fields that the batches carry."""
        ...

    @property
    def task_names(self) -> tuple[str, ...]:
        """The labels' names, in the order of their columns."""
        ...

    def base_rates(self) -> list[float]:
        """Share of positive training labels, per task."""
        ...

    def train_batches(self, seed: int) -> BatchStream:
        """Return the training batches of a seed."""
        ...

    def eval_batches(self) -> BatchStream:
        """Return the held-out batches, the same for every seed."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return JSON-able facts for a report."""
        ...


def no_times(source: str, why: str) -> NarrowgateError:
    """Return the error that a model asks for times of events that ``source`` does not have."""
    return NarrowgateError(f"{source}: model field 'time_buckets' needs the times of events, but {why}")


class Dataset:
    """Rows of one source, resident on one device, and the batches of a preset.

    All columns live on the device, so a batch is some gathers there. Row order and lengths are known on the host:
    nothing waits for the device. Training batches are full: each epoch's shuffle continues where the last one ended.
    Their token count is padded to one bound that nearly every batch fits, so that compiled models see one shape.

    Args:
        rows: the source's rows.
        training: batch sizes, steps and padding.
        max_events: events that a row keeps.
        device: where the batches are.
        steps: training batches of a run; the preset's number by default.
        times: whether batches carry the times of events.

    Raises:
        NarrowgateError: too few rows, or no times where they are asked for.
    """

    def __init__(
        self,
        rows: RowData,
        training: TrainingConfig,
        *,
        max_events: int,
        device: str | torch.device = "cpu",
        steps: int | None = None,
        times: bool = False,
    ) -> None:
        if times and not rows.seconds:
            task = f", task {rows.facts['task']}" if "task" in rows.facts else ""
            raise no_times(f"{rows.facts.get('name', 'data')}{task}", "it knows the order of events only")
        if len(rows.train) < training.batch_size or not len(rows.held_out):
            raise NarrowgateError(
                f"{rows.facts.get('name', 'data')}: too few rows: {len(rows.train)} to train on and"
                f" {len(rows.held_out)} held out, expected at least one batch of {training.batch_size} and one row"
            )
        self.rows = rows
        self.training = training
        self.device = torch.device(device)
        planned = min(training.steps, -(-int(training.epochs * len(rows.train)) // training.batch_size))
        self.steps = planned if steps is None else steps
        start = np.maximum(rows.history_start, rows.history_end - max_events)
        self._lengths = rows.history_end - start
        self._columns = _Columns(rows, start, self._lengths, self.device, times=times)
        lengths = self._lengths[rows.train]
        self._train_tokens = padded_tokens(lengths, training.batch_size, training, balanced=True)

    @property
    def features(self) -> FeatureSpec:
        """The fields that the batches carry."""
        return self.rows.features

    @property
    def task_names(self) -> tuple[str, ...]:
        """The labels' names, in the order of their columns."""
        return self.rows.features.tasks

    def base_rates(self) -> list[float]:
        """Share of positive training labels, per task."""
        return [float(rate) for rate in self.rows.labels[self.rows.train].mean(0, dtype=np.float64)]

    def train_batches(self, seed: int) -> BatchStream:
        """Return ``steps`` training batches in the order that the seed shuffles."""
        return BatchStream(self.steps, lambda start: self._train(seed, start))

    def eval_batches(self) -> BatchStream:
        """Return every held-out row once, in the data's order."""
        size = self._eval_size()
        return BatchStream(-(-len(self.rows.held_out) // size), self._evaluate)

    def describe(self) -> dict[str, Any]:
        """Return JSON-able facts for a report: source, split, rows, base rates, what a perfect model would reach."""
        rows = self.rows
        base = self.base_rates()
        facts = dict(rows.facts) | {
            "rows_train": len(rows.train),
            "rows_eval": len(rows.held_out),
            "max_events": self._columns.max_length,
            "tasks": list(self.task_names),
            "base_rate": dict(zip(self.task_names, base, strict=True)),
        }
        if rows.probabilities is not None:
            entropy = normalized_entropy(rows.probabilities, rows.labels[rows.held_out], base)
            facts["bayes_ne"] = dict(zip(self.task_names, entropy, strict=True))
        return facts

    def _eval_size(self) -> int:
        return min(self.training.eval_batch_size, len(self.rows.held_out))

    def _train(self, seed: int, start: int) -> Iterator[Batch]:
        generator = np.random.default_rng(seed)
        size, balance = self.training.batch_size, self.training.balance
        pool = size * (1 if balance is None else balance.pool)
        waiting = np.empty(0, np.int64)
        for number in range(0, self.steps, pool // size):
            while len(waiting) < pool:
                waiting = np.concatenate([waiting, generator.permutation(self.rows.train)])
            chosen, waiting = waiting[:pool], waiting[pool:]
            if balance is not None:
                chosen = deal(chosen, self._lengths[chosen], size, balance.sub_batch)
            for place in range(max(0, start - number), min(pool // size, self.steps - number)):
                yield self._gather(chosen[place * size : (place + 1) * size], size, self._train_tokens)

    def _evaluate(self, start: int) -> Iterator[Batch]:
        size = self._eval_size()
        held_out = self.rows.held_out
        pieces = [held_out[i : i + size] for i in range(0, len(held_out), size)]
        tokens = max(int(self._lengths[piece].sum()) for piece in pieces)
        for piece in pieces[start:]:
            yield self._gather(piece, size, self.training.round_up(tokens))

    def _gather(self, chosen: Ints, size: int, tokens: int) -> Batch:
        """Build a batch of ``size`` rows and at least ``tokens`` tokens from row numbers known on the host."""
        needed = int(self._lengths[chosen].sum())
        return self._columns.batch(to_device(chosen, self.device), size, max(tokens, self.training.round_up(needed)))


def padded_tokens(lengths: Ints, size: int, training: TrainingConfig, *, balanced: bool) -> int:
    """Return the tokens that every batch is filled up to, so that compiled models see one shape.

    Six deviations over the mean of a batch's sum; of a whole pool's where batches are balanced, as all of one pool
    then carry about the same.

    Args:
        lengths: [n] tokens of the rows that batches are drawn from.
        size: rows of a batch.
        training: whose multiple and balance count.
        balanced: whether these batches are balanced where ``training`` says so.
    """
    pool = training.balance.pool if balanced and training.balance is not None else 1
    return padded_bound(float(lengths.mean()), float(lengths.std()), int(lengths.max()), size, training, pool)


def padded_bound(
    mean: float, deviation: float, longest: int, size: int, training: TrainingConfig, pool: int = 1
) -> int:
    """Return :func:`padded_tokens` from the mean, the deviation and the largest of the rows' lengths."""
    bound = size * mean + 6 * deviation * (size / pool) ** 0.5
    return min(training.round_up(int(bound) + 1), training.round_up(size * longest))


def to_device(array: Array, device: torch.device) -> Tensor:
    """Return a host array on the device, copied from pinned memory so that the host need not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def event_rows_of(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the row of each of ``tokens`` tokens (B for dead ones), and which are alive; [T] each.

    Args:
        offsets: [B + 1] int64.
        tokens: T, at least ``offsets[B]``.
    """
    at = torch.arange(tokens, device=offsets.device)
    rows = torch.searchsorted(offsets[1:], at, right=True)
    return rows, rows < offsets.shape[0] - 1


def age_limits(device: torch.device) -> Tensor:
    """Return the powers of two [AGE_BUCKETS - 1] at which an event's age changes its bucket."""
    return 2 ** torch.arange(AGE_BUCKETS - 1, device=device)


class _Columns:
    """The rows' columns as tensors on the device."""

    def __init__(self, rows: RowData, start: Ints, lengths: Ints, device: torch.device, *, times: bool) -> None:
        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.sparse = put(rows.sparse)
        self.bags = tuple(put(bag) for bag in rows.bags)
        self.dense = put(rows.dense)
        self.labels = put(rows.labels)
        self.groups = put(rows.groups)
        self.times = put(rows.times)
        self.start = put(start)
        self.lengths = put(lengths)
        # One dead event behind the pool: what dead tokens read.
        self.events = put(np.concatenate([rows.events, np.zeros((1, rows.events.shape[1]), np.int64)]))
        self.event_times = put(np.concatenate([rows.event_times, np.zeros(1, np.int64)]))
        self.with_times = times
        self.ages = age_limits(device)
        self.max_length = int(lengths.max(initial=0))

    def batch(self, index: Tensor, size: int, tokens: int) -> Batch:
        """Gather the rows ``index`` [n <= size] into a batch of ``size`` rows and ``tokens`` tokens."""
        count = index.shape[0]
        if count < size:
            # Fill with the first row's features; without history, label or weight it changes nothing.
            index = torch.cat([index, index[:1].expand(size - count)])
        lengths = self.lengths[index]
        if count < size:
            lengths = torch.cat([lengths[:count], lengths.new_zeros(size - count)])
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        event_rows, live = event_rows_of(offsets, tokens)
        at = torch.arange(tokens, device=index.device)
        row = event_rows.clamp_max(size - 1)
        source = torch.where(live, self.start[index][row] + at - offsets[row], self.events.shape[0] - 1)
        event_times = self.event_times[source]
        age = self.times[index][row] - event_times
        bucket = torch.where(live, torch.bucketize(age, self.ages, right=True), 0)
        return Batch(
            sparse=self.sparse[index],
            bags=tuple(bag[index] for bag in self.bags),
            dense=self.dense[index],
            events=torch.cat([self.events[source], bucket.unsqueeze(1)], 1),
            event_rows=event_rows,
            offsets=offsets,
            labels=self.labels[index],
            groups=self.groups[index],
            rows=count,
            event_times=event_times if self.with_times else None,
        )
