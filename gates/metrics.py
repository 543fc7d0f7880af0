"""Quality metrics in float64 from FP32 logits: BF16 predictions would merge scores and move AUC.

NE (He et al. 2014): the model's mean log loss over the entropy of a background click-through rate. The rate is the
training set's and the same for both arms, so that a relative NE difference is a relative log-loss difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TaskMetrics:
    """One arm's quality on one task; None where a value does not exist, with the reason in ``note``."""

    log_loss: float | None
    ne: float | None
    auc: float | None
    calibration: float | None
    note: str | None = None


def row_log_loss(logits: Floats, labels: Floats) -> Floats:
    """Return the log loss in nats of each row: softplus(x) - x y, which no probability near 0 or 1 can overflow.

    Args:
        logits: [n] float64.
        labels: [n] in [0, 1].
    """
    return np.logaddexp(0.0, logits) - logits * labels


def entropy(rate: float) -> float:
    """Return the entropy in nats of a Bernoulli variable with the given rate, 0 < rate < 1."""
    return float(-special.xlogy(rate, rate) - special.xlog1py(1 - rate, -rate))


def placements(scores: Floats, labels: Floats, weights: Floats | None = None) -> Floats:
    """Return, for each row, the weighted share of the other class that it is ranked right against; ties count half.

    Averaged over the positives (or over the negatives) with their weights this is the AUC.

    Args:
        scores: [n] float64, finite.
        labels: [n] of 0 and 1, both present.
        weights: [n] sample weights, or None for ones.
    """
    positive = labels > 0.5
    if weights is None:
        # Mid-ranks among all less mid-ranks within the own class: the number of the other class below, ties half.
        ranks = stats.rankdata(scores)
        own = np.empty_like(ranks)
        own[positive], own[~positive] = stats.rankdata(scores[positive]), stats.rankdata(scores[~positive])
        below = ranks - own
        others = np.where(positive, np.count_nonzero(~positive), np.count_nonzero(positive))
        share = below / others
        return np.where(positive, share, 1 - share)
    result = np.empty_like(scores)
    for rows, others in ((positive, ~positive), (~positive, positive)):
        order = np.argsort(scores[others], kind="stable")
        ordered, mass = scores[others][order], np.concatenate([[0.0], np.cumsum(weights[others][order])])
        below = mass[np.searchsorted(ordered, scores[rows], side="left")]
        up_to = mass[np.searchsorted(ordered, scores[rows], side="right")]
        # Where all of the other class weigh nothing, nothing is ranked against it.
        share = (below + up_to) / 2 / mass[-1] if mass[-1] > 0 else np.full(below.shape, np.nan)
        result[rows] = share if rows is positive else 1 - share
    return result


@dataclass(frozen=True)
class GroupAucs:
    """AUC within each group (one user's rows) that holds both classes."""

    #: [groups] each: AUC, and the sum of its rows' weights.
    auc: Floats
    weight: Floats

    @property
    def mean(self) -> float | None:
        """GAUC: the mean over groups, weighted by their rows (Zhu et al. 2018, section 5.2); None without a group."""
        return float(self.weight @ self.auc / self.weight.sum()) if self.auc.size else None


def group_aucs(scores: Floats, labels: Floats, weights: Floats | None, groups: NDArray[np.int64]) -> GroupAucs:
    """Return the AUC within every group that holds both classes; ties count half.

    Args:
        scores: [n] float64, finite.
        labels: [n] of 0 and 1.
        weights: [n] sample weights, or None for ones.
        groups: [n] integers that name each row's group.
    """
    order = np.lexsort((scores, groups))
    score, group = scores[order], groups[order]
    mass = np.ones(len(order)) if weights is None else weights[order]
    positive, negative = mass * labels[order], mass * (1 - labels[order])
    below = np.concatenate([[0.0], np.cumsum(negative)])
    begins = np.concatenate([[True], group[1:] != group[:-1]])
    # Rows of one group with one score are ties: each has half of the ties' negatives below it.
    ties = np.flatnonzero(begins | np.concatenate([[True], score[1:] != score[:-1]]))
    ends = np.concatenate([ties[1:], [len(order)]])
    rank = np.repeat((below[ties] + below[ends]) / 2, ends - ties)
    index = np.cumsum(begins) - 1
    right = positive * (rank - below[np.flatnonzero(begins)][index])
    sums = [np.bincount(index, weights=x) for x in (right, positive, negative)]
    both = (sums[1] > 0) & (sums[2] > 0)
    right_sum, positives, negatives = (np.asarray(x[both], dtype=np.float64) for x in sums)
    return GroupAucs(right_sum / (positives * negatives), positives + negatives)


def evaluate(logits: Floats, labels: Floats, weights: Floats | None, base_rate: float | None) -> TaskMetrics:
    """Compute log loss, NE, AUC and calibration (sum of predictions over sum of labels) of one task.

    Args:
        logits: [n].
        labels: [n] of 0 and 1.
        weights: [n] non-negative sample weights, or None.
        base_rate: the training set's rate of positives; None takes that of these rows (the same for both arms too).
    """
    if logits.size == 0:
        return TaskMetrics(None, None, None, None, "no held-out rows")
    if not np.isfinite(logits).all():
        bad = int(np.count_nonzero(~np.isfinite(logits)))
        return TaskMetrics(None, None, None, None, f"{bad} of {logits.size} predictions are not finite")
    w = np.ones_like(logits) if weights is None else weights
    total = float(w.sum())
    if not total > 0:
        return TaskMetrics(None, None, None, None, "the sample weights sum to zero")
    loss = float(w @ row_log_loss(logits, labels)) / total
    positives = float(w @ labels)
    rate = positives / total if base_rate is None else base_rate
    ne = loss / entropy(rate) if 0 < rate < 1 else None
    calibration = float(w @ special.expit(logits)) / positives if positives > 0 else None
    if positives == 0 or positives == total:
        return TaskMetrics(loss, ne, None, calibration, "the held-out rows hold one class only, so AUC does not exist")
    return TaskMetrics(loss, ne, _auc(logits, labels, weights), calibration)


def _auc(logits: Floats, labels: Floats, weights: Floats | None) -> float:
    from sklearn.metrics import roc_auc_score

    value = float(roc_auc_score(labels, logits, sample_weight=weights))
    assert math.isfinite(value)
    return value
