"""Impressions without end, drawn on the device batch by batch, with known true probabilities.

A batch is a function of the configuration, the seed and its number alone: nothing is kept between two of them, so ten
million rows need the memory of one batch, and a run may start anywhere. Only history lengths are drawn on the host,
which therefore knows every shape without waiting for the device.

A row: a user and an item of power-law popularity (two in five items are one that the user met lately), context fields,
numbers, and a history of log-normal length. The log odds of a click add up a low-rank affinity of segment and
category, user and item factors, an item's bias and its tags', a factorization machine over the contexts, the numbers,
and interest: a fading trace of clicks on the item's category among the latest events, which only the order of the
history tells. Affinities and biases turn slowly over a training; held-out rows come from where it ends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...precision.errors import NarrowgateError
from ..batch import Batch
from ..features import FeatureSpec
from ..presets import TrainingConfig
from .balance import deal
from .loader import BatchStream, padded_tokens
from .metrics import normalized_entropy
from .rows import Ints
from .stream_config import StreamConfig
from .stream_draw import Draw
from .stream_world import LOOK_BACK, World

#: Streams of random numbers apart from each other, and rows that the odds are centred by.
_TRAIN, _HELD_OUT, _CENTRE = 0, 1, 2
_CENTRE_BATCHES, _CENTRE_ROWS = 8, 2048


class StreamDataset:
    """The streamed synthetic data as batches of a preset; has what :class:`Dataset` has, but no rows at rest.

    Args:
        config: what to generate.
        training: batch sizes, steps, padding, balancing.
        max_events: events that a row keeps.
        device: where the batches are drawn.
        steps: training batches of a run; by default what ``training`` and ``config.rows`` allow.
        times: whether batches carry the times of events.
    """

    def __init__(
        self,
        config: StreamConfig,
        training: TrainingConfig,
        *,
        max_events: int,
        device: str | torch.device = "cpu",
        steps: int | None = None,
        times: bool = False,
    ) -> None:
        if config.rows < training.batch_size:
            raise NarrowgateError(
                f"synthetic: too few rows: {config.rows}, expected at least one batch of {training.batch_size}"
            )
        self.config = config
        self.training = training
        self.device = torch.device(device)
        # Nothing can be drawn on the meta device: there, batches keep their shapes only.
        self._drawn_on = torch.device("cpu") if self.device.type == "meta" else self.device
        planned = min(training.steps, int(training.epochs * config.rows) // training.batch_size)
        self.steps = planned if steps is None else steps
        self.max_events = max_events
        self.times = times

    def __getstate__(self) -> dict[str, Any]:
        # The world is drawn again where it is needed rather than sent.
        return {name: value for name, value in vars(self).items() if name not in ("_world", "_centre")}

    @property
    def features(self) -> FeatureSpec:
        """The fields that the batches carry."""
        return self.config.features()

    @property
    def task_names(self) -> tuple[str, ...]:
        """The labels' names, in the order of their columns."""
        return self.features.tasks

    def base_rates(self) -> list[float]:
        """Mean true probability over a sample of the training's whole course, per task."""
        return list(self._centre[1])

    def train_batches(self, seed: int) -> BatchStream:
        """Return ``steps`` training batches in the order of time; another seed draws other rows of the same world."""
        return BatchStream(self.steps, lambda start: self._walk(_TRAIN, seed, start, self.steps))

    def eval_batches(self) -> BatchStream:
        """Return the held-out rows: the same for every seed, drawn where the drift ends."""
        size = min(self.training.eval_batch_size, self.config.held_out)
        count = -(-self.config.held_out // size)
        return BatchStream(count, lambda start: self._walk(_HELD_OUT, 0, start, count))

    def describe(self) -> dict[str, Any]:
        """Return JSON-able facts for a report; draws all held-out rows for the entropy of their true probabilities."""
        # A GPU draws other numbers from a seed than a CPU.
        facts = asdict(self.config) | {"drawn_on": self._drawn_on.type}
        base = self.base_rates()
        labels, truth = self.held_out_truth()
        entropy = normalized_entropy(truth, labels, base)
        return {
            "name": "synthetic",
            "split": "held-out rows follow the training rows in time",
            # Rows are a function of the configuration (and of the seed), so its hash stands for them.
            "sha256": hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
            "generator": facts,
            "rows_train": self.steps * self.training.batch_size,
            "rows_eval": self.config.held_out,
            "max_events": self.max_events,
            "tasks": list(self.task_names),
            "base_rate": dict(zip(self.task_names, base, strict=True)),
            "bayes_ne": dict(zip(self.task_names, entropy, strict=True)),
        }

    def held_out_truth(self) -> tuple[np.ndarray, np.ndarray]:
        """Return labels (FP32) and true probabilities (FP64) of the held-out rows, each [n, tasks] on the host."""
        labels, truth = [], []
        for number in range(len(self.eval_batches())):
            batch, odds = self._draw(_HELD_OUT, 0, number)
            labels.append(batch.labels[: batch.rows].cpu())
            truth.append(self._probabilities(odds.double())[: batch.rows].cpu())
        return torch.cat(labels).numpy(), torch.cat(truth).numpy()

    def _walk(self, split: int, seed: int, start: int, stop: int) -> Iterator[Batch]:
        for number in range(start, stop):
            yield self._draw(split, seed, number)[0].to(self.device)

    @cached_property
    def _world(self) -> World:
        return World.make(self.config).to(self._drawn_on)

    @cached_property
    def _centre(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """What centres both log odds, and the mean probabilities then: from a sample drawn on the CPU."""
        world, odds = World.make(self.config), []
        for part in range(_CENTRE_BATCHES):
            lengths = self._lengths(_CENTRE, 0, part, _CENTRE_ROWS)
            draw = Draw(self.config, world, torch.device("cpu"), self._key(_CENTRE, 0, part))
            angle = self.config.drift * (part + 0.5) / _CENTRE_BATCHES
            odds.append(draw.rows(np.minimum(lengths, LOOK_BACK), _CENTRE_ROWS * LOOK_BACK, angle).odds)
        click, conversion = torch.cat(odds).double().unbind(1)
        first = _centred(click, torch.ones_like(click), self.config.click_rate)
        clicked = torch.sigmoid(click + first)
        second = _centred(conversion, clicked / clicked.mean(), self.config.conversion_rate)
        both = clicked * torch.sigmoid(conversion + second)
        return (first, second), (float(clicked.mean()), float(both.mean()))

    def _probabilities(self, odds: Tensor) -> Tensor:
        """[B, 2] log odds of a click, and of a conversion after it -> [B, 2] probabilities of both labels."""
        first, second = self._centre[0]
        click = torch.sigmoid(odds[:, 0] + first)
        return torch.stack([click, click * torch.sigmoid(odds[:, 1] + second)], 1)

    def _key(self, *parts: int) -> int:
        return int(np.random.SeedSequence([self.config.seed, *parts]).generate_state(1, np.uint64)[0] >> 1)

    def _lengths(self, split: int, seed: int, number: int, rows: int) -> Ints:
        """Return the history lengths of batch ``number``; of balanced ones, its part of those of its pool."""
        balance = self.training.balance if split == _TRAIN else None
        pool = 1 if balance is None else balance.pool
        first = number - number % pool
        drawn = [
            np.random.default_rng([self.config.seed, split, seed, each]).lognormal(0.0, self.config.length_spread, rows)
            for each in range(first, first + pool)
        ]
        lengths = np.minimum(self.config.median_events * np.concatenate(drawn), self.max_events).astype(np.int64)
        if balance is None:
            return lengths
        order = deal(np.arange(pool * rows), lengths, rows, balance.sub_batch)
        return lengths[order].reshape(pool, rows)[number - first]

    def _draw(self, split: int, seed: int, number: int) -> tuple[Batch, Tensor]:
        """Return a batch and its uncentred log odds [B, 2]."""
        held_out = split == _HELD_OUT
        size = self.training.batch_size
        rows = size
        if held_out:
            size = min(self.training.eval_batch_size, self.config.held_out)
            rows = min(size, self.config.held_out - number * size)
        lengths = self._lengths(split, seed, number, size)
        lengths[rows:] = 0
        bound = padded_tokens(self._typical, size, self.training, balanced=not held_out)
        tokens = max(bound, self.training.round_up(int(lengths.sum())))
        angle = self.config.drift * (1.0 if held_out else number / self.steps)
        key = self._key(split, seed, number)
        drawn = Draw(self.config, self._world, self._drawn_on, key).rows(lengths, tokens, angle)
        truth = self._probabilities(drawn.odds)
        clicked = drawn.uniform[0] < truth[:, 0]
        converted = clicked & (drawn.uniform[1] * truth[:, 0] < truth[:, 1])
        return drawn.batch(torch.stack([clicked, converted], 1).float(), rows, times=self.times), drawn.odds

    @cached_property
    def _typical(self) -> Ints:
        """A large sample of history lengths, for the bound on a batch's tokens."""
        rng = np.random.default_rng([self.config.seed, _CENTRE])
        drawn = self.config.median_events * rng.lognormal(0.0, self.config.length_spread, 100_000)
        return np.minimum(drawn, self.max_events).astype(np.int64)


def _centred(odds: Tensor, weights: Tensor, rate: float) -> float:
    """Return the shift that makes the weighted mean of ``sigmoid(odds + shift)`` the rate, by bisection."""
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        if float((torch.sigmoid(odds + middle) * weights).mean()) < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2
