"""From two trainings of one seed to a pair, and from pairs to row intervals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..precision.errors import NarrowgateError
from . import metrics, statistics
from .measurements import ArmRun, LossSummary, RowEstimate, RowIntervals, SeedRun, TaskQuality
from .policy import StabilityLimits
from .stability import stability
from .task import Task, base_rates, task_names
from .train import RunError, Trained

Floats = NDArray[np.float64]
_CURVE_POINTS = 100
_BROKEN = "training stopped at a loss or gradient that is not finite"


@dataclass(frozen=True)
class RowDifferences:
    """Per-row differences of one pair; rows as the task yields them."""

    #: [rows, tasks]: the baseline's log loss, and candidate less baseline.
    log_loss: Floats
    log_loss_difference: Floats
    #: [rows, tasks]: placements of the baseline less those of the candidate; NaN where AUC does not exist.
    placement_difference: Floats
    labels: Floats
    weights: Floats | None
    groups: NDArray[np.int64] | None


@dataclass(frozen=True)
class Pair:
    """A seed's runs for the report, and its rows for the row interval (None where an arm has no predictions)."""

    run: SeedRun
    rows: RowDifferences | None
    tasks: tuple[str, ...]
    #: What keeping and reusing trainings had to tell.
    notes: tuple[str, ...] = ()


@dataclass
class Pairing:
    """Makes pairs of one task and checks that they are pairs."""

    task: Task
    limits: StabilityLimits
    _names: tuple[str, ...] | None = None

    def pair(self, baseline: Trained, candidate: Trained) -> Pair:
        """Compare two trainings of one seed.

        Raises:
            RunError: the arms did not start from the same weights, or saw other batches or rows.
            NarrowgateError: labels, weights or names that cannot be used.
        """
        assert baseline.seed == candidate.seed
        seed = baseline.seed
        for what, same in (
            ("build_model() made other weights", baseline.weights == candidate.weights),
            (f"train_batches({seed}) began with another batch", baseline.first_batch == candidate.first_batch),
            ("eval_batches() yielded other rows", _same_rows(baseline, candidate)),
        ):
            if not same:
                raise RunError(f"seed {seed}: {what} for the candidate than for the baseline, so they are no pair")
        other = _other_training(baseline, candidate)
        if other is not None:
            raise RunError(f"seed {seed}: {other}, so they are no pair")
        names = self._names_of(baseline, candidate)
        run = SeedRun(seed=seed, baseline=self._arm(baseline, names), candidate=self._arm(candidate, names))
        return Pair(run, _row_differences(baseline, candidate), names, baseline.notes + candidate.notes)

    def _names_of(self, baseline: Trained, candidate: Trained) -> tuple[str, ...]:
        logits = baseline.logits if baseline.logits is not None else candidate.logits
        if self._names is None and logits is not None:
            self._names = task_names(self.task, logits.shape[1])
        if self._names is not None:
            return self._names
        named = getattr(self.task, "task_names", None)
        return tuple(named) if named is not None else ("task",)

    def _arm(self, trained: Trained, names: tuple[str, ...]) -> ArmRun:
        return ArmRun(
            quality=_quality(trained, names, base_rates(self.task, len(names))),
            losses=summarise(trained.losses),
            stability=stability(trained.losses, trained.gradient_norms, self.limits, trained.observed),
            peak_memory=trained.peak_memory,
            seconds=trained.seconds,
            first_step_seconds=trained.first_step_seconds,
            reused=trained.reused,
        )


def combine(pairs: Sequence[Pair]) -> RowIntervals | None:
    """Average per-row differences over seeds and estimate how they would move with other held-out rows."""
    found = [pair.rows for pair in pairs if pair.rows is not None]
    if not found:
        return None
    first = found[0]
    if any(not _equal(first.labels, other.labels) for other in found[1:]):
        raise RunError("eval_batches() yielded other rows for another seed")
    loss = np.mean([rows.log_loss for rows in found], axis=0)
    difference = np.mean([rows.log_loss_difference for rows in found], axis=0)
    placed = np.mean([rows.placement_difference for rows in found], axis=0)
    ne, auc = {}, {}
    for column, name in enumerate(pairs[0].tasks):
        if loss[:, column].sum() > 0:
            ne[name] = RowEstimate.of(
                statistics.clustered_ratio(difference[:, column], loss[:, column], first.weights, first.groups)
            )
        if np.isfinite(placed[:, column]).all():
            auc[name] = RowEstimate.of(
                statistics.clustered_auc(placed[:, column], first.labels[:, column], first.weights, first.groups)
            )
    rows = len(first.labels)
    clusters = rows if first.groups is None else len(np.unique(first.groups))
    return RowIntervals(rows=rows, clusters=clusters, ne=ne, auc=auc)


def summarise(losses: Floats) -> LossSummary:
    """Summarise the training loss [steps]: ends over a tenth of the steps each, and at most 100 points between."""
    tenth = max(len(losses) // 10, 1)
    edges = np.unique(np.linspace(0, len(losses), min(_CURVE_POINTS, len(losses)) + 1).astype(int))
    curve = tuple((int(b), _finite(losses[a:b].mean())) for a, b in itertools.pairwise(edges))
    return LossSummary(first=_finite(losses[:tenth].mean()), last=_finite(losses[-tenth:].mean()), curve=curve)


def _quality(trained: Trained, names: tuple[str, ...], rates: Sequence[float | None]) -> dict[str, TaskQuality]:
    if trained.logits is None or trained.labels is None:
        return {name: TaskQuality(log_loss=None, ne=None, auc=None, calibration=None, note=_BROKEN) for name in names}
    labels, weights = trained.labels, trained.row_weights
    if not np.isin(labels, (0.0, 1.0)).all():
        raise NarrowgateError("predict() returned labels other than 0 and 1")
    if weights is not None and not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise NarrowgateError("predict() returned sample weights that are negative or not finite")
    found = {}
    for column, (name, rate) in enumerate(zip(names, rates, strict=True)):
        value = metrics.evaluate(trained.logits[:, column], labels[:, column], weights, rate)
        found[name] = TaskQuality(
            log_loss=value.log_loss, ne=value.ne, auc=value.auc, calibration=value.calibration, note=value.note
        )
    return found


def _row_differences(baseline: Trained, candidate: Trained) -> RowDifferences | None:
    own, other, labels = candidate.logits, baseline.logits, baseline.labels
    if own is None or other is None or labels is None or not (np.isfinite(own).all() and np.isfinite(other).all()):
        return None
    before = metrics.row_log_loss(other, labels)
    placed = np.full_like(before, np.nan)
    for column in range(labels.shape[1]):
        if 0 < labels[:, column].sum() < len(labels):
            args = (labels[:, column], baseline.row_weights)
            placed[:, column] = metrics.placements(other[:, column], *args) - metrics.placements(own[:, column], *args)
    return RowDifferences(
        log_loss=before,
        log_loss_difference=metrics.row_log_loss(own, labels) - before,
        placement_difference=placed,
        labels=labels,
        weights=baseline.row_weights,
        groups=baseline.groups,
    )


def _other_training(baseline: Trained, candidate: Trained) -> str | None:
    """Say what the arms' optimizers differ in; a training that broke off has no last step to compare."""
    whole = len(baseline.losses) == len(candidate.losses)
    pairs = list(zip(baseline.optimizer, candidate.optimizer, strict=False))
    for own, other in pairs if whole else pairs[: len(pairs) // 2]:
        for name in own.keys() & other.keys():
            if own[name] != other[name]:
                return f"optimizer() trains the candidate with {name} {other[name]} and the baseline with {own[name]}"
    return None


def _same_rows(baseline: Trained, candidate: Trained) -> bool:
    if baseline.labels is None or candidate.labels is None:
        return True
    names = ("labels", "row_weights", "groups")
    return all(_equal(getattr(baseline, name), getattr(candidate, name)) for name in names)


def _equal(a: NDArray | None, b: NDArray | None) -> bool:
    return b is None if a is None else b is not None and np.array_equal(a, b)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
