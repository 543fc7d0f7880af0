"""Rows on the host as columns, histories flat: what a streamed file is turned into on the way to batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..batch import Batch
from .loader import event_rows_of, to_device
from .rows import Floats, Ints


@dataclass(frozen=True, eq=False)
class HostRows:
    """``n`` rows in columns."""

    #: [n, categorical fields].
    sparse: Ints
    #: One [n, width] a multi-valued field, padded with 0.
    bags: tuple[Ints, ...]
    #: [n, numbers], standardized.
    dense: Floats
    #: [n, tasks], 0 or 1.
    labels: Floats
    #: [n].
    groups: Ints
    #: [n]: events of each row.
    lengths: Ints
    #: [sum of lengths, event fields], row after row.
    events: Ints
    #: [sum of lengths]: when each event was, in seconds; None where nobody asks.
    event_times: Ints | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Ints) -> HostRows:
        """Return the rows ``index``, in its order."""
        lengths = self.lengths[index]
        starts = self.lengths.cumsum() - self.lengths
        # Where each kept event lies: its row's start, and how far it is into its row.
        first = lengths.cumsum() - lengths
        place = np.repeat(starts[index] - first, lengths) + np.arange(int(lengths.sum()))
        return HostRows(
            self.sparse[index], tuple(bag[index] for bag in self.bags), self.dense[index], self.labels[index],
            self.groups[index], lengths, self.events[place],
            None if self.event_times is None else self.event_times[place],
        )  # fmt: skip

    @staticmethod
    def join(parts: Sequence[HostRows]) -> HostRows:
        """Return the rows of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        bags = tuple(np.concatenate(columns) for columns in zip(*(part.bags for part in parts), strict=True))
        names = ["sparse", "dense", "labels", "groups", "lengths", "events"]
        names += ["event_times"] if parts[0].event_times is not None else []
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return HostRows(bags=bags, **joined)

    def batch(self, size: int, tokens: int, device: torch.device) -> Batch:
        """Return a batch of ``size`` rows, the last ones fillers without history, and ``tokens`` tokens."""
        count = len(self)
        assert 0 < count <= size
        fill = np.minimum(np.arange(size), count - 1)
        lengths = np.where(np.arange(size) < count, self.lengths[fill], 0)
        events = np.zeros((tokens, self.events.shape[1]), np.int64)
        events[: len(self.events)] = self.events
        times = None
        if self.event_times is not None:
            times = np.zeros(tokens, np.int64)
            times[: len(self.event_times)] = self.event_times
        offsets = to_device(np.concatenate([np.zeros(1, np.int64), lengths.cumsum()]), device)
        return Batch(
            sparse=to_device(self.sparse[fill], device),
            bags=tuple(to_device(bag[fill], device) for bag in self.bags),
            dense=to_device(self.dense[fill], device),
            events=to_device(events, device),
            event_rows=event_rows_of(offsets, tokens)[0],
            offsets=offsets,
            labels=to_device(self.labels[fill], device),
            groups=to_device(self.groups[fill], device),
            rows=count,
            event_times=None if times is None else to_device(times, device),
        )
