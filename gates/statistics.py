"""The statistics behind the gates. Every bound is one-sided; nothing is rounded before it is compared.

Why a t interval and not a bootstrap: on few seeds a percentile bootstrap accepts at the margin two to four times
as often as stated, while Student's t and the exact sign-flip test hold their level.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

#: Up to this many pairs every sign pattern is enumerated; beyond it the test draws patterns.
EXACT_SIGN_FLIPS = 16
_SIGN_FLIP_DRAWS = 2**EXACT_SIGN_FLIPS
_SIGN_FLIP_CHUNK = 2**12
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error, read against Student's t on ``df`` degrees of freedom."""

    mean: float
    #: Standard error of ``mean``; 0 where all observations agree.
    error: float
    df: float

    def lower(self, alpha: float) -> float:
        """Return the one-sided lower ``1 - alpha`` confidence bound."""
        return self.mean - self._width(alpha)

    def upper(self, alpha: float) -> float:
        """Return the one-sided upper ``1 - alpha`` confidence bound."""
        return self.mean + self._width(alpha)

    def p_below(self, margin: float) -> float:
        """Return the p value of the claim "the mean lies below ``margin``" (H0: mean >= margin)."""
        if self.error == 0:
            return 0.0 if self.mean < margin else 1.0
        return float(special.stdtr(self.df, (self.mean - margin) / self.error))

    def p_above(self, margin: float) -> float:
        """Return the p value of the claim "the mean lies above ``margin``" (H0: mean <= margin)."""
        if self.error == 0:
            return 0.0 if self.mean > margin else 1.0
        return float(special.stdtr(self.df, (margin - self.mean) / self.error))

    def _width(self, alpha: float) -> float:
        if self.error == 0:
            return 0.0
        return -float(special.stdtrit(self.df, alpha)) * self.error


def paired(differences: ArrayLike) -> Estimate:
    """Summarise paired differences [n], n >= 2, as a mean with n - 1 degrees of freedom.

    Its bounds are those of ``scipy.stats.ttest_1samp(differences, 0).confidence_interval``, also where all
    differences are equal and the interval shrinks to a point.
    """
    values = np.asarray(differences, dtype=np.float64)
    assert values.ndim == 1, values.shape
    assert values.size >= 2, "one pair has no spread"
    spread = float(values.std(ddof=1)) if np.ptp(values) > 0 else 0.0
    return Estimate(float(values.mean()), spread / math.sqrt(values.size), values.size - 1)


def speedup(log_ratios: ArrayLike, sd: float, df: float) -> Estimate:
    """Summarise one run's log speedups [quartets], n >= 2, as what other runs would find, too.

    Quartets of one process share where its memory lies, its compiled code and its GPU, so their interval says nothing
    of what another process would measure. Both variances add up, with the degrees of freedom of Welch and
    Satterthwaite (1946).

    Args:
        log_ratios: of :func:`log_ratios`.
        sd: standard deviation of a log speedup between runs; 0 leaves the quartets' own interval.
        df: degrees of freedom that ``sd`` was measured with.
    """
    within = paired(log_ratios)
    if not sd:
        return within
    own, between = within.error**2, sd**2
    freedom = (own + between) ** 2 / (own**2 / within.df + between**2 / df)
    return Estimate(within.mean, math.sqrt(own + between), freedom)


def sign_flip_p(differences: ArrayLike, margin: float) -> float:
    """Return the one-sided sign-flip p value of "the mean difference lies below ``margin``".

    Under H0 (mean = margin, symmetric about it) each ``difference - margin`` keeps or flips its sign with equal
    chance (Fisher's randomisation test). Exact to 16 pairs: all 2^n patterns. Beyond, 2^16 patterns are drawn from
    a fixed generator and the observed pattern is counted in, which keeps the level.
    """
    shifted = np.asarray(differences, dtype=np.float64) - margin
    n = shifted.size
    observed = float(shifted.sum())
    # Sums of the same terms in another order differ in the last bits; they are ties all the same.
    slack = 1e-12 * float(np.abs(shifted).sum())
    if n <= EXACT_SIGN_FLIPS:
        sums = np.zeros(1)
        for value in shifted:
            sums = np.concatenate([sums + value, sums - value])
        return float(np.mean(sums <= observed + slack))
    generator, hits = np.random.default_rng(0), 0
    for _ in range(_SIGN_FLIP_DRAWS // _SIGN_FLIP_CHUNK):
        signs = 2 * generator.integers(0, 2, size=(_SIGN_FLIP_CHUNK, n), dtype=np.int8) - 1
        hits += int(np.count_nonzero(signs @ shifted <= observed + slack))
    return (hits + 1) / (_SIGN_FLIP_DRAWS + 1)


def clustered_ratio(
    numerator: ArrayLike,
    denominator: ArrayLike,
    weights: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Estimate:
    """Estimate sum(w * numerator) / sum(w * denominator) over rows, with a cluster-robust standard error.

    With the numerator a row's log-loss difference and the denominator the baseline's log loss, both averaged over
    seeds, the ratio is the relative NE increase (the normaliser cancels). Linearised by the delta method, summed
    within each group (rows of one user are no independent evidence), with the G / (G - 1) correction and t on
    G - 1 degrees of freedom (Liang and Zeger 1986; Cameron and Miller 2015, section II).

    Args:
        numerator: [n] float.
        denominator: [n] float.
        weights: [n] sample weights, or None for ones.
        groups: [n] integers that name each row's cluster, or None where every row is its own.
    """
    a, b = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    w = np.ones_like(a) if weights is None else np.asarray(weights, dtype=np.float64)
    total = float(w @ b)
    ratio = float(w @ a) / total
    return Estimate(ratio, *_cluster_error(w * (a - ratio * b) / total, groups))


def clustered_auc(
    placements: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Estimate:
    """Estimate an AUC (or a difference of AUCs) from row placements, with a cluster-robust standard error.

    A row's placement is the weighted share of the other class that it is ranked right against
    (:func:`narrowgate.gates.metrics.placements`); differences of two models' placements give the difference of
    their AUCs. DeLong's components (DeLong et al. 1988), summed within clusters (Obuchowski 1997).

    Args:
        placements: [n] float, a placement or a difference of placements.
        labels: [n] of 0 and 1.
        weights: [n] sample weights, or None for ones.
        groups: [n] integers that name each row's cluster, or None where every row is its own.
    """
    v = np.asarray(placements, dtype=np.float64)
    positive = np.asarray(labels) > 0.5
    w = np.ones_like(v) if weights is None else np.asarray(weights, dtype=np.float64)
    weight = np.where(positive, w / w[positive].sum(), w / w[~positive].sum())
    mean = float(weight[positive] @ v[positive])
    return Estimate(mean, *_cluster_error(weight * (v - mean), groups))


def _cluster_error(influence: NDArray[np.float64], groups: ArrayLike | None) -> tuple[float, float]:
    """Return (standard error, degrees of freedom) of a sum of row influences [n] within clusters."""
    if groups is not None:
        _, index = np.unique(np.asarray(groups), return_inverse=True)
        influence = np.asarray(np.bincount(index.reshape(-1), weights=influence), dtype=np.float64)
    clusters = influence.size
    if clusters < 2:
        return math.inf, 1
    return math.sqrt(clusters / (clusters - 1) * float(influence @ influence)), clusters - 1


def seeds_needed(mean: float, spread: float, margin: float, alpha: float, power: float = 0.8) -> int | None:
    """Return how many pairs would decide with probability ``power``, were the truth what was measured.

    The power of a one-sided one-sample t test from the noncentral t distribution (as statsmodels' ``TTestPower``
    computes it), on the side of ``margin`` where ``mean`` lies. None where even 1000 pairs would not do.

    Args:
        mean: measured mean difference.
        spread: standard deviation of the paired differences.
        margin: the gate's margin, in the unit of ``mean``.
        alpha: level of the one-sided test.
        power: wanted probability of a decision.
    """
    if spread == 0:
        return 2 if mean != margin else None
    effect = abs(mean - margin) / spread

    def decides(n: int) -> bool:
        critical = -special.stdtrit(n - 1, alpha)
        return special.nctdtr(n - 1, effect * math.sqrt(n), critical) <= 1 - power

    # Power grows with n: the first n that suffices, by bisection.
    n = bisect.bisect_left(range(2, _MOST_SEEDS + 1), True, key=decides) + 2
    return n if n <= _MOST_SEEDS else None


def log_ratios(baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return one log speedup a quartet: log(baseline time / candidate time), times averaged in the log.

    Both orders (ABBA and BAAB) cancel a drift that is linear over the quartet.

    Args:
        baseline: [quartets][2] positive times of the baseline's two blocks.
        candidate: [quartets][2] of the candidate's.
    """
    return np.log(np.asarray(baseline, dtype=np.float64)).mean(axis=1) - np.log(
        np.asarray(candidate, dtype=np.float64)
    ).mean(axis=1)


def holm_levels(p_values: Sequence[float], alpha: float) -> list[float]:
    """Return the level at which each of a family of claims is tested under Holm's step-down procedure.

    Claims in order of p value get alpha / m, alpha / (m - 1), ...; from the first that fails on, all keep that
    failing level, at which none of them can pass (Holm 1979).
    """
    levels = [alpha] * len(p_values)
    level, failed = 0.0, False
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if not failed:
            level = alpha / (len(p_values) - rank)
            failed = not p_values[index] < level
        levels[index] = level
    return levels
