"""A batch of rows with jagged histories."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """``B`` rows and their ``T`` event tokens, flat.

    Row ``b`` owns the tokens ``offsets[b]:offsets[b + 1]``, oldest first. Tokens from ``offsets[B]`` on are dead: they
    fill ``T`` up to a friendly multiple, belong to no row and carry id 0. Rows from ``rows`` on fill the last batch
    of an evaluation up to the common ``B`` and have empty histories.
    """

    #: [B, fields] int64.
    sparse: Tensor
    #: One [B, width] int64 a multi-valued field, padded with 0.
    bags: tuple[Tensor, ...]
    #: [B, numbers] FP32.
    dense: Tensor
    #: [T, event fields] int64.
    events: Tensor
    #: [T] int64: the row of each token, B for dead ones.
    event_rows: Tensor
    #: [B + 1] int64.
    offsets: Tensor
    #: [B, tasks] FP32.
    labels: Tensor
    #: [B] int64.
    groups: Tensor
    #: Rows that count, known on the host.
    rows: int
    #: [T] int64: when each event was, in seconds, 0 for dead tokens; only differences within a row mean anything. None
    #: where the source was not asked for them.
    event_times: Tensor | None = None

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Batch:
        """Return the batch with its tensors on ``device``."""
        moved = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value = value.to(device, non_blocking=non_blocking)
            elif isinstance(value, tuple):
                value = tuple(part.to(device, non_blocking=non_blocking) for part in value)
            moved[field.name] = value
        return Batch(**moved)
