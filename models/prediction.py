"""What a model said about a batch of held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Prediction:
    """Scores and truth of ``n`` rows, in the data's order."""

    #: [n, tasks], FP32: log odds.
    logits: Tensor
    #: [n, tasks]: 0 or 1.
    labels: Tensor
    #: [n], or None where every row counts once.
    weights: Tensor | None = None
    #: [n] int64: rows with the same id (one user's) are not independent; None where rows are.
    groups: Tensor | None = None
    #: Parts of the rows to be looked at on their own, by name, [n] each: booleans mark one slice, integers (an age
    #: band, a market) one slice a value, called ``name=value``.
    slices: Mapping[str, Tensor] | None = None
