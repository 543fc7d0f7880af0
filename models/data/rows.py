"""What every data source hands over: columns of rows and one pool of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..features import FeatureSpec

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Array = NDArray[Any]

#: Buckets of an event's age: 0 for none, 1 + floor(log2(seconds)) up to the last.
AGE_BUCKETS = 40


@dataclass(frozen=True, eq=False)
class RowData:
    """``N`` rows in columns. A row's history is a slice of the pool of ``E`` events, which is sorted by user and time.

    No label of a held-out row may be in the pool: no input can then show it.
    """

    features: FeatureSpec
    #: [N, categorical fields].
    sparse: Ints
    #: One [N, width] a multi-valued field, padded with 0.
    bags: tuple[Ints, ...]
    #: [N, numbers].
    dense: Floats
    #: [N, tasks], 0 or 1.
    labels: Floats
    #: [N]: rows of one user share a group.
    groups: Ints
    #: [N]: seconds, or where ``seconds`` is false anything that rises.
    times: Ints
    #: [N]: events strictly before the row, as a slice of the pool.
    history_start: Ints
    history_end: Ints
    #: [E, event fields - 1]: all event fields but the age.
    events: Ints
    #: [E]: in the unit of ``times``.
    event_times: Ints
    #: Row numbers of both sides of the split.
    train: Ints
    held_out: Ints
    #: JSON-able: what a report says about this data.
    facts: dict[str, Any] = field(default_factory=dict)
    #: [held-out rows, tasks]: the true probabilities, where the source knows them.
    probabilities: NDArray[np.float64] | None = None
    #: Whether times are more than an order.
    seconds: bool = True


def strictly_earlier(group: Ints, times: Ints, pool_group: Ints, pool_times: Ints) -> tuple[Ints, Ints]:
    """For each row, return the slice of a pool sorted by (group, time) that is its group's strictly earlier part.

    Args:
        group: [N] group of each row, counted from 0.
        times: [N] time of each row, not negative.
        pool_group: [E] group of each pool entry, sorted.
        pool_times: [E] time of each pool entry, sorted within a group.

    Returns:
        start [N] and end [N]; equal where nothing is earlier.
    """
    span = 1 + max(int(times.max(initial=0)), int(pool_times.max(initial=0)))
    keys = pool_group * span + pool_times
    return np.searchsorted(keys, group * span), np.searchsorted(keys, group * span + times)
