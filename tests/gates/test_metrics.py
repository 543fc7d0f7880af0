from __future__ import annotations

import numpy as np
import pytest
from narrowgate.gates import metrics
from sklearn.metrics import log_loss, roc_auc_score


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = (rng.uniform(size=500) < 0.3).astype(np.float64)
    logits = np.round(rng.normal(size=500) + labels - 1, 1)  # rounded, so that scores tie
    return logits, labels, rng.uniform(0.1, 3, 500)


def test_metrics_match_scikit_learn(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    logits, labels, weights = rows
    probability = 1 / (1 + np.exp(-logits))
    for w in (None, weights):
        found = metrics.evaluate(logits, labels, w, base_rate=0.25)
        expected = log_loss(labels, probability, sample_weight=w)
        assert found.log_loss == pytest.approx(expected, rel=1e-12)
        assert found.ne == pytest.approx(expected / -(0.25 * np.log(0.25) + 0.75 * np.log(0.75)), rel=1e-12)
        assert found.auc == pytest.approx(roc_auc_score(labels, logits, sample_weight=w), rel=1e-12)
        ones = np.ones_like(labels) if w is None else w
        assert found.calibration == pytest.approx((ones @ probability) / (ones @ labels))


def test_ne_matches_published_values() -> None:
    # torcheval's documented example: predictions 0.2 and 0.3 for labels 1 and 0, with and without weights.
    logits = np.log(np.array([0.2, 0.3]) / np.array([0.8, 0.7]))
    labels = np.array([1.0, 0.0])
    assert metrics.evaluate(logits, labels, None, None).ne == pytest.approx(1.4183, abs=5e-5)
    assert metrics.evaluate(logits, labels, np.array([5.0, 1.0]), None).ne == pytest.approx(3.1087, abs=5e-5)


def test_log_loss_stays_exact_where_the_probability_underflows() -> None:
    found = metrics.evaluate(np.array([800.0, -800.0]), np.array([0.0, 1.0]), None, 0.5)
    assert found.log_loss == 800.0


def test_placements_average_to_the_auc_with_and_without_weights(
    rows: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    logits, labels, weights = rows
    for w in (None, weights, np.ones_like(weights)):
        placed = metrics.placements(logits, labels, w)
        ones = np.ones_like(labels) if w is None else w
        expected = roc_auc_score(labels, logits, sample_weight=w)
        for rows_of_class in (labels == 1, labels == 0):
            mean = np.average(placed[rows_of_class], weights=ones[rows_of_class])
            assert mean == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("logits", "labels", "weights", "note"),
    [
        ([0.5, np.nan], [1, 0], None, "1 of 2 predictions are not finite"),
        ([], [], None, "no held-out rows"),
        ([0.5, 1.0], [1, 0], [0, 0], "the sample weights sum to zero"),
        ([0.5, 1.0], [0, 0], None, "one class only"),
        ([0.5, 1.0], [1, 1], None, "one class only"),
    ],
)
def test_what_cannot_be_computed_is_none_with_a_reason(logits, labels, weights, note) -> None:
    given = [None if x is None else np.array(x, dtype=np.float64) for x in (logits, labels, weights)]
    found = metrics.evaluate(*given, 0.5)  # type: ignore[arg-type]
    assert found.auc is None
    assert found.note is not None
    assert note in found.note
