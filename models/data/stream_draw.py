"""One batch of the streamed synthetic data, drawn on its device from one key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch
from .loader import age_limits, event_rows_of, to_device
from .rows import Ints
from .stream_config import StreamConfig
from .stream_world import FADE, LOOK_BACK, World

_MEAN_GAP_S = 3 * 3600
#: Share of candidates that the user met lately, and of conversions among clicks of the history.
_MET, _CONVERTED = 0.4, 0.1


@dataclass(frozen=True, eq=False)
class Drawn:
    """A batch without its labels."""

    #: [B, fields], two of [B, 6], [B, numbers], [T, event fields], [T], [T], [B + 1].
    sparse: Tensor
    bags: tuple[Tensor, Tensor]
    numbers: Tensor
    events: Tensor
    event_times: Tensor
    event_rows: Tensor
    offsets: Tensor
    #: [B, 2]: log odds of a click, and of a conversion after it, before centring.
    odds: Tensor
    #: [2, B]: what both are compared with.
    uniform: Tensor

    def batch(self, labels: Tensor, rows: int, *, times: bool) -> Batch:
        """Return the batch with its labels [B, 2], and the times of events if they are asked for; ``rows`` count."""
        return Batch(
            sparse=self.sparse, bags=self.bags, dense=self.numbers, events=self.events, event_rows=self.event_rows,
            offsets=self.offsets, labels=labels, groups=self.sparse[:, 0], rows=rows,
            event_times=self.event_times if times else None,
        )  # fmt: skip


class Draw:
    """Draws the rows of one batch; every call to :meth:`rows` repeats them."""

    def __init__(self, config: StreamConfig, world: World, device: torch.device, key: int) -> None:
        self.config = config
        self.world = world
        self.device = device
        self.generator = torch.Generator(device).manual_seed(key)

    def rows(self, lengths: Ints, tokens: int, angle: float) -> Drawn:
        """Draw ``len(lengths)`` rows.

        Args:
            lengths: [B] events of each row, known on the host.
            tokens: T, at least their sum.
            angle: of the drift.
        """
        world, size = self.world, len(lengths)
        offsets = to_device(np.concatenate([np.zeros(1, np.int64), lengths.cumsum()]), self.device)
        event_rows, live = event_rows_of(offsets, tokens)
        row = event_rows.clamp_max(size - 1)
        user = self._popular(self.config.users, size)
        event_item = torch.where(live, self._popular(self.config.items, tokens), 0)
        clicked = self._uniform(tokens) < torch.sigmoid(world.event_odds(world.segment[user][row], event_item, angle))
        action = torch.where(live, 1 + clicked.long() * (1 + (self._uniform(tokens) < _CONVERTED).long()), 0)
        latest, present = _latest(offsets, tokens)
        item = self._candidate(event_item, latest, present)
        category = world.category[item]
        same = (world.category[event_item[latest]] == category.unsqueeze(1)) & clicked[latest] & present
        fading = FADE ** torch.arange(LOOK_BACK, device=self.device)
        interest = (same * fading).sum(1)
        contexts = self._popular(self.config.context_rows, size, self.config.contexts)
        numbers = torch.randn(size, self.config.numeric, device=self.device, generator=self.generator)
        places = contexts + (self.config.context_rows + 1) * torch.arange(self.config.contexts, device=self.device)
        click = world.click_odds(user, item, places, numbers, interest, angle)
        event_category = torch.where(live, world.category[event_item], 0)
        age = torch.where(live, self._ages(row, offsets), 0)
        gap = torch.bucketize(age, age_limits(self.device), right=True)
        events = torch.stack([event_item, event_category, action, gap], 1)
        return Drawn(
            sparse=torch.cat([torch.stack([user, item, world.segment[user], category], 1), contexts], 1),
            bags=(world.item_tags[item], world.user_tags[user]),
            numbers=numbers,
            events=events,
            # The request is at 0.
            event_times=-age,
            event_rows=event_rows,
            offsets=offsets,
            odds=torch.stack([click, world.conversion_odds(user, item)], 1),
            uniform=torch.rand(2, size, device=self.device, generator=self.generator),
        )

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device, generator=self.generator)

    def _popular(self, values: int, *shape: int) -> Tensor:
        """Return ids from 1 to ``values``, the r-th most frequent with a weight of about r^-exponent."""
        power, u = 1 - self.config.exponent, self._uniform(*shape)
        # The inverse of the distribution function of a continuous power law on [1, values + 1].
        last = values + 1.0
        drawn = last**u if abs(power) < 1e-6 else (1 + u * (last**power - 1)) ** (1 / power)
        return drawn.long().clamp(1, values)

    def _candidate(self, event_item: Tensor, latest: Tensor, present: Tensor) -> Tensor:
        """Return the item of each row: one of its latest events', or any."""
        size = len(latest)
        # Most present slots come first: a place below the count of those is one that is there.
        count = present.sum(1)
        place = (self._uniform(size) * count).long().clamp_max(LOOK_BACK - 1)
        met = event_item[latest.gather(1, place.unsqueeze(1)).squeeze(1)]
        again = (self._uniform(size) < _MET) & (count > 0)
        return torch.where(again, met, self._popular(self.config.items, size))

    def _ages(self, row: Tensor, offsets: Tensor) -> Tensor:
        """Return each event's age [T] in seconds: gaps are exponential, ages their sums from the newest back."""
        gaps = 1 + (-_MEAN_GAP_S * torch.log1p(-self._uniform(len(row)))).long()
        total = gaps.cumsum(0)
        return total[(offsets[1:][row] - 1).clamp_min(0)] - total + gaps


def _latest(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the tokens [B, LOOK_BACK] of each row's latest events, newest first, and which of them there are."""
    back = torch.arange(LOOK_BACK, device=offsets.device)
    at = offsets[1:].unsqueeze(1) - 1 - back
    present = at >= offsets[:-1].unsqueeze(1)
    return torch.where(present, at, 0).clamp_max(tokens - 1), present
