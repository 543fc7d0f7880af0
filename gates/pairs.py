"""From two trainings of one seed to a pair, and from pairs to row intervals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..precision.errors import NarrowgateError
from . import metrics, statistics
from .measurements import ArmRun, LossSummary, RowEstimate, RowIntervals, SeedRun, SliceQuality, SliceRows, TaskQuality
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
    #: By task, the baseline's AUC less the candidate's within each group; () where the task names no groups.
    group_aucs: tuple[metrics.GroupAucs, ...]
    slices: dict[str, SliceDifferences]


@dataclass(frozen=True)
class SliceDifferences:
    """What differs within one slice: its rows [rows] bool, and placements [rows of the slice, tasks] among them."""

    rows: NDArray[np.bool_]
    placement_difference: Floats


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
            (f"train_batches({seed}) yielded other batches", _same_batches(baseline, candidate)),
            ("eval_batches() yielded other rows", _same_rows(baseline, candidate)),
        ):
            if not same:
                raise RunError(
                    f"seed {seed}: {what} for the candidate than for the baseline, so they are no pair"
                    + _kept(baseline, candidate)
                )
        other = _other_training(baseline, candidate)
        if other is not None:
            raise RunError(f"seed {seed}: {other}, so they are no pair{_kept(baseline, candidate)}")
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
            evaluation_seconds=trained.evaluation_seconds,
            reused=trained.reused,
        )


def _same_batches(baseline: Trained, candidate: Trained) -> bool:
    """Whether both saw the same batches; of one that stopped early nobody knows."""
    return baseline.batches == candidate.batches or len(baseline.losses) != len(candidate.losses)


def _kept(baseline: Trained, candidate: Trained) -> str:
    """What else may be the reason, where one of the two is of an earlier run."""
    if not (baseline.reused or candidate.reused):
        return ""
    whose = "baseline" if baseline.reused else "candidate"
    return f"; the {whose} is one that an earlier run into this folder trained: --fresh trains it anew"


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
    tasks = pairs[0].tasks
    whole = _row_estimates(first, None, loss, difference, [rows.placement_difference for rows in found], tasks)
    slices = {}
    for name, part in first.slices.items():
        placed = [rows.slices[name].placement_difference for rows in found]
        slices[name] = _row_estimates(first, part.rows, loss[part.rows], difference[part.rows], placed, tasks)
    gauc = {}
    for column, name in enumerate(tasks if first.group_aucs else ()):
        mean = np.mean([rows.group_aucs[column].auc for rows in found], axis=0)
        if mean.size:
            ones = np.ones_like(mean)
            estimate = statistics.clustered_ratio(mean, ones, first.group_aucs[column].weight)
            gauc[name] = RowEstimate.of(estimate)
    rows = len(first.labels)
    clusters = rows if first.groups is None else len(np.unique(first.groups))
    return RowIntervals(rows=rows, clusters=clusters, ne=whole.ne, auc=whole.auc, gauc=gauc, slices=slices)


def refuse_copies(pairs: Sequence[Pair]) -> None:
    """Refuse seeds whose baselines say the same of every row: copies of one run, without the spread between runs.

    Raises:
        RunError: there are such seeds; names two.
    """
    seen: dict[bytes, int] = {}
    for pair in pairs:
        if pair.rows is None:
            continue
        seed, loss = pair.run.seed, np.ascontiguousarray(pair.rows.log_loss)
        other = seen.setdefault(sha256(loss.data).digest(), seed)
        # A model that has learned nothing says the same of all rows of a label, and is told of as not sane.
        if other != seed and len(np.unique(loss)) > 2 * len(pair.tasks):
            raise RunError(
                f"seeds {other} and {seed} trained the same baseline to the bit, so they are one observation: expected "
                "build_model() to draw from torch's generator as it stands, or train_batches(seed) to follow its seed"
            )


def _row_estimates(
    first: RowDifferences,
    rows: NDArray[np.bool_] | None,
    loss: Floats,
    difference: Floats,
    placements: Sequence[Floats],
    tasks: tuple[str, ...],
) -> SliceRows:
    """Return the row intervals of some rows: ``rows`` of those of ``first``, or all; the arrays hold only these."""
    placed = np.mean(placements, axis=0)
    weights, groups = (x if x is None or rows is None else x[rows] for x in (first.weights, first.groups))
    labels = first.labels if rows is None else first.labels[rows]
    ne, auc = {}, {}
    for column, name in enumerate(tasks):
        if (loss[:, column] if weights is None else loss[:, column] * weights).sum() > 0:
            estimate = statistics.clustered_ratio(difference[:, column], loss[:, column], weights, groups)
            ne[name] = RowEstimate.of(estimate)
        if len(placed) and np.isfinite(placed[:, column]).all():
            estimate = statistics.clustered_auc(placed[:, column], labels[:, column], weights, groups)
            auc[name] = RowEstimate.of(estimate)
    return SliceRows(ne=ne, auc=auc)


def summarise(losses: Floats) -> LossSummary:
    """Summarise the training loss [steps]: ends over a tenth of the steps each, and at most 100 points between."""
    tenth = max(len(losses) // 10, 1)
    edges = np.unique(np.linspace(0, len(losses), min(_CURVE_POINTS, len(losses)) + 1).astype(int))
    curve = tuple((int(b), _finite(losses[a:b].mean())) for a, b in itertools.pairwise(edges))
    return LossSummary(first=_finite(losses[:tenth].mean()), last=_finite(losses[-tenth:].mean()), curve=curve)


def _quality(trained: Trained, names: tuple[str, ...], rates: Sequence[float | None]) -> dict[str, TaskQuality]:
    if trained.logits is None or trained.labels is None:
        return {name: TaskQuality(log_loss=None, ne=None, auc=None, calibration=None, note=_BROKEN) for name in names}
    logits, labels, weights = trained.logits, trained.labels, trained.row_weights
    strange = labels[~np.isin(labels, (0.0, 1.0))]
    if strange.size:
        row, column = (int(i[0]) for i in np.nonzero(~np.isin(labels, (0.0, 1.0))))
        raise NarrowgateError(
            f"predict() returned a label {strange[0]:.6g} of task {names[column]} in held-out row {row}, expected 0 or "
            "1 for all tasks in every row"
        )
    if weights is not None and not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise NarrowgateError("predict() returned sample weights that are negative or not finite")
    if weights is not None and weights.size and not weights.sum() > 0:
        raise NarrowgateError("predict() returned sample weights that sum to zero over all held-out rows")
    found = {}
    for column, (name, rate) in enumerate(zip(names, rates, strict=True)):
        own, truth, gauc = logits[:, column], labels[:, column], None
        if trained.groups is not None and np.isfinite(own).all():
            gauc = metrics.group_aucs(own, truth, weights, trained.groups).mean
        slices = {
            part: SliceQuality(**_values(own[mask], truth[mask], None if weights is None else weights[mask], rate))
            for part, mask in trained.slices.items()
        }
        found[name] = TaskQuality(**_values(own, truth, weights, rate), gauc=gauc, slices=slices)
    return found


def _values(logits: Floats, labels: Floats, weights: Floats | None, rate: float | None) -> dict[str, Any]:
    return asdict(metrics.evaluate(logits, labels, weights, rate)) | {"rows": len(logits)}


def _row_differences(baseline: Trained, candidate: Trained) -> RowDifferences | None:
    own, other, labels = candidate.logits, baseline.logits, baseline.labels
    if own is None or other is None or labels is None or not (np.isfinite(own).all() and np.isfinite(other).all()):
        return None
    before = metrics.row_log_loss(other, labels)
    everything = np.ones(len(labels), dtype=bool)
    return RowDifferences(
        log_loss=before,
        log_loss_difference=metrics.row_log_loss(own, labels) - before,
        placement_difference=_placement_differences(baseline, candidate, everything),
        labels=labels,
        weights=baseline.row_weights,
        groups=baseline.groups,
        group_aucs=_group_auc_differences(baseline, candidate),
        slices={
            name: SliceDifferences(mask, _placement_differences(baseline, candidate, mask))
            for name, mask in baseline.slices.items()
        },
    )


def _placement_differences(baseline: Trained, candidate: Trained, rows: NDArray[np.bool_]) -> Floats:
    assert baseline.logits is not None
    assert candidate.logits is not None
    assert baseline.labels is not None
    own, other, labels = candidate.logits[rows], baseline.logits[rows], baseline.labels[rows]
    weights = None if baseline.row_weights is None else baseline.row_weights[rows]
    placed = np.full_like(own, np.nan)
    for column in range(labels.shape[1]):
        if 0 < labels[:, column].sum() < len(labels):
            args = (labels[:, column], weights)
            placed[:, column] = metrics.placements(other[:, column], *args) - metrics.placements(own[:, column], *args)
    return placed


def _group_auc_differences(baseline: Trained, candidate: Trained) -> tuple[metrics.GroupAucs, ...]:
    """Return, by task, the baseline's AUC less the candidate's in each group; both arms have the same groups."""
    if baseline.groups is None:
        return ()
    assert baseline.logits is not None
    assert candidate.logits is not None
    assert baseline.labels is not None
    found = []
    for column in range(baseline.labels.shape[1]):
        args = (baseline.labels[:, column], baseline.row_weights, baseline.groups)
        own = metrics.group_aucs(candidate.logits[:, column], *args)
        other = metrics.group_aucs(baseline.logits[:, column], *args)
        found.append(metrics.GroupAucs(other.auc - own.auc, other.weight))
    return tuple(found)


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
    same = baseline.held_out == candidate.held_out
    same = same and all(_equal(getattr(baseline, name), getattr(candidate, name)) for name in names)
    marked = baseline.slices.keys() == candidate.slices.keys()
    return same and marked and all(_equal(mask, candidate.slices[name]) for name, mask in baseline.slices.items())


def _equal(a: NDArray | None, b: NDArray | None) -> bool:
    """Return whether both have the same values; what is not a number equals itself, and is named by its own check."""
    return b is None if a is None else b is not None and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
