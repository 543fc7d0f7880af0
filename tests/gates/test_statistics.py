from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from narrowgate.gates import statistics
from scipy import stats

floats = st.lists(st.floats(-1, 1, allow_nan=False).map(lambda x: round(x, 6)), min_size=3, max_size=12)


@given(floats)
def test_paired_bounds_are_those_of_scipys_t_test(values: list[float]) -> None:
    estimate = statistics.paired(values)
    if np.ptp(values) == 0:
        assert estimate.upper(0.05) == estimate.lower(0.05) == pytest.approx(values[0])
        return
    less: Any = stats.ttest_1samp(values, 0.1, alternative="less")
    greater: Any = stats.ttest_1samp(values, 0.1, alternative="greater")
    assert estimate.upper(0.05) == pytest.approx(less.confidence_interval(0.95).high)
    assert estimate.lower(0.05) == pytest.approx(greater.confidence_interval(0.95).low)
    assert estimate.p_below(0.1) == pytest.approx(less.pvalue)
    assert estimate.p_above(0.1) == pytest.approx(greater.pvalue)


@pytest.mark.parametrize("n", [5, 8])
def test_sign_flip_matches_scipys_exact_permutation_test(n: int) -> None:
    values = np.random.default_rng(n).normal(0.1, 1, n)
    exact = stats.permutation_test(
        (values - 0.3,), np.mean, permutation_type="samples", alternative="less", n_resamples=2**n
    )
    assert statistics.sign_flip_p(values, 0.3) == pytest.approx(exact.pvalue)


def test_sign_flip_of_five_agreeing_pairs_is_one_in_32() -> None:
    assert statistics.sign_flip_p([-1, -2, -3, -4, -5], 0) == 1 / 32


def test_sign_flip_beyond_enumeration_agrees_with_the_t_test() -> None:
    values = np.random.default_rng(0).normal(-0.3, 1, 40)
    assert statistics.sign_flip_p(values, 0) == pytest.approx(statistics.paired(values).p_below(0), abs=0.01)


def test_the_row_interval_covers_the_truth_when_rows_of_a_user_agree() -> None:
    rng = np.random.default_rng(1)
    users, rows, truth, draws = 60, 20, 0.02, 800
    groups = np.repeat(np.arange(users), rows)
    clustered = naive = 0
    for _ in range(draws):
        base = rng.uniform(0.3, 0.9, users * rows)
        shift = truth * base + np.repeat(rng.normal(0, 0.02, users), rows) + rng.normal(0, 0.02, users * rows)
        clustered += statistics.clustered_ratio(shift, base, groups=groups).upper(0.05) < truth
        naive += statistics.clustered_ratio(shift, base).upper(0.05) < truth
    assert clustered / draws == pytest.approx(0.05, abs=0.025)
    assert naive / draws > 0.15  # what clustering is for


def test_the_clustered_ratio_is_the_relative_log_loss_and_weights_count_as_repeats() -> None:
    rng = np.random.default_rng(2)
    base, diff = rng.uniform(0.2, 1, 50), rng.normal(0, 0.1, 50)
    weights = rng.integers(1, 4, 50)
    weighted = statistics.clustered_ratio(diff, base, weights, groups=np.arange(50))
    repeated = statistics.clustered_ratio(
        diff.repeat(weights), base.repeat(weights), groups=np.arange(50).repeat(weights)
    )
    assert weighted.mean == pytest.approx((weights @ diff) / (weights @ base))
    assert weighted.mean == pytest.approx(repeated.mean)
    assert weighted.error == pytest.approx(repeated.error)


def test_one_cluster_gives_no_finite_interval() -> None:
    assert math.isinf(statistics.clustered_ratio([1.0, 2.0], [1.0, 1.0], groups=[7, 7]).upper(0.05))


def test_auc_error_matches_delongs_variance() -> None:
    from narrowgate.gates.metrics import placements

    rng = np.random.default_rng(3)
    labels = (rng.uniform(size=400) < 0.3).astype(float)
    scores = rng.normal(size=400) + labels
    placed = placements(scores, labels)
    positive = labels == 1
    delong = placed[positive].var(ddof=1) / positive.sum() + placed[~positive].var(ddof=1) / (~positive).sum()
    assert statistics.clustered_auc(placed, labels).error == pytest.approx(math.sqrt(delong), rel=0.01)


@pytest.mark.parametrize(("ratio", "seeds", "power"), [(1, 8, 0.82), (1.5, 5, 0.86), (2, 5, 0.97)])
def test_seeds_needed_follows_the_power_of_the_paired_t_test(ratio: float, seeds: int, power: float) -> None:
    assert statistics.seeds_needed(0, 1, ratio, 0.05, power - 0.01) == seeds
    assert statistics.seeds_needed(2 * ratio, 1, ratio, 0.05, power - 0.01) == seeds  # a fail needs as many


def test_seeds_needed_says_when_no_number_of_seeds_would_do() -> None:
    assert statistics.seeds_needed(0.999, 1, 1, 0.05) is None
    assert statistics.seeds_needed(1, 0, 1, 0.05) is None
    assert statistics.seeds_needed(0, 0, 1, 0.05) == 2


def test_a_quartet_cancels_linear_drift() -> None:
    # Times of blocks 1..4 grow by 1 % each; the true speedup is 1.2.
    drift = [1.00, 1.01, 1.02, 1.03]
    abba = statistics.log_ratios([[1.2 * drift[0], 1.2 * drift[3]]], [[drift[1], drift[2]]])
    assert math.exp(abba[0]) == pytest.approx(1.2, rel=1e-3)


def test_holm_tests_the_smallest_first_and_stops_at_the_first_failure() -> None:
    assert statistics.holm_levels([0.04, 0.001, 0.03], 0.05) == [0.025, 0.05 / 3, 0.025]
    assert statistics.holm_levels([0.01], 0.05) == [0.05]


def test_holm_keeps_the_chance_of_any_false_accept_within_alpha() -> None:
    p = np.random.default_rng(4).uniform(size=(4000, 5))
    wrong = [
        any(value < level for value, level in zip(row, statistics.holm_levels(row, 0.05), strict=True)) for row in p
    ]
    assert np.mean(wrong) == pytest.approx(0.05, abs=0.012)


def test_a_speedup_holds_what_runs_differ_by() -> None:
    """Two parts of a variance, each with its own degrees of freedom: Welch's t, as scipy has it of two samples."""
    own, other = np.array([0.1, 0.14, 0.09, 0.15]), np.array([0.02, -0.01, 0.03])
    found = statistics.speedup(own, float(other.std(ddof=1) / 3**0.5), 2)
    expected: Any = stats.ttest_ind(own, other, equal_var=False)
    assert found.df == pytest.approx(float(expected.df))
    t = (found.mean - float(other.mean())) / found.error
    assert t == pytest.approx(float(expected.statistic))
    assert statistics.speedup(own, 0.0, 3) == statistics.paired(own)


def test_however_many_quartets_agree_runs_may_not() -> None:
    found = statistics.speedup([0.2] * 50, 0.01, 3)
    assert (found.mean - found.lower(0.05)) / 0.01 == pytest.approx(float(stats.t.ppf(0.95, 3)))
