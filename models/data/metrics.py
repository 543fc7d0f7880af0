"""Normalized entropy of known probabilities: the mark that no model can beat but by luck."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def normalized_entropy(
    probabilities: NDArray[np.float64], labels: NDArray[np.float32], base_rates: Sequence[float]
) -> list[float]:
    """Return the log loss per task over the entropy of the base rate (He et al. 2014).

    Args:
        probabilities: [n, tasks], inside (0, 1).
        labels: [n, tasks], 0 or 1.
        base_rates: per task, the positive share that normalizes; the training set's by InterFormer's convention.
    """
    loss = -(labels * np.log(probabilities) + (1 - labels) * np.log1p(-probabilities)).mean(0)
    p = np.asarray(base_rates)
    return [float(value) for value in loss / -(p * np.log(p) + (1 - p) * np.log1p(-p))]
