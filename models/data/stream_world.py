"""The rules behind the streamed synthetic data: who likes what, and how that turns over time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .stream_config import BAG_WIDTH, CATEGORIES, SEGMENTS, TAGS, StreamConfig

RANK = 8
#: Latest events that interest looks back on; what is left of one, one event later.
LOOK_BACK, FADE = 24, 0.75
_TAGS_OF_ITEM, _TAGS_OF_USER = 3, BAG_WIDTH


@dataclass(frozen=True, eq=False)
class World:
    """Everything that does not depend on a row, as tensors of one device; ids count from 1, row 0 is padding.

    ``U`` users, ``I`` items, ``S`` segments, ``C`` categories, ``R`` the rank of the factors.
    """

    #: [U + 1], [I + 1] int64.
    segment: Tensor
    category: Tensor
    #: [I + 1, 3], [U + 1, 6] int64.
    item_tags: Tensor
    user_tags: Tensor
    #: [U + 1, R], [I + 1, R].
    user_factors: Tensor
    item_factors: Tensor
    #: [2, I + 1]: the bias of an item when the drift begins, and a quarter turn later.
    item_bias: Tensor
    #: [2, S + 1, C + 1]: so the affinity of segments to categories.
    affinity: Tensor
    #: [S + 1, C + 1]: log odds of a conversion after a click.
    conversion: Tensor
    #: [contexts * (context_rows + 1), R]: factors of a factorization machine over the context fields.
    context_factors: Tensor
    #: [numbers].
    number_weights: Tensor

    @classmethod
    def make(cls, config: StreamConfig) -> World:
        """Draw the world on the CPU: the same on every machine."""
        generator = torch.Generator().manual_seed(config.seed)

        def normal(*shape: int, deviation: float) -> Tensor:
            return deviation * torch.randn(*shape, generator=generator)

        def ids(values: int, *shape: int) -> Tensor:
            return 1 + torch.randint(values, shape, generator=generator)

        users, items, segments, categories = config.users + 1, config.items + 1, SEGMENTS + 1, CATEGORIES + 1
        left, right = normal(2, segments, RANK, deviation=1.0), normal(2, categories, RANK, deviation=1.0)
        tags = ids(TAGS, items, _TAGS_OF_ITEM)
        of_tags = normal(TAGS + 1, deviation=0.2)
        return cls(
            segment=ids(SEGMENTS, users),
            category=ids(CATEGORIES, items),
            item_tags=tags,
            user_tags=ids(TAGS, users, _TAGS_OF_USER),
            user_factors=normal(users, RANK, deviation=RANK**-0.5),
            item_factors=normal(items, RANK, deviation=1.0),
            item_bias=normal(2, items, deviation=0.4) + of_tags[tags].sum(1),
            affinity=(left @ right.mT) * (0.8 / RANK**0.5),
            conversion=normal(segments, categories, deviation=0.7),
            context_factors=normal(config.contexts * (config.context_rows + 1), RANK, deviation=0.25),
            number_weights=normal(config.numeric, deviation=0.5 * config.numeric**-0.5),
        )

    def to(self, device: torch.device) -> World:
        """Return the world on ``device``."""
        return World(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def turned(self, pair: Tensor, angle: float) -> Tensor:
        """Return a pair of states mixed at the angle that the drift has reached."""
        return math.cos(angle) * pair[0] + math.sin(angle) * pair[1]

    def click_odds(
        self, user: Tensor, item: Tensor, contexts: Tensor, numbers: Tensor, interest: Tensor, angle: float
    ) -> Tensor:
        """Return the log odds of a click before centring.

        Args:
            user: [B] ids.
            item: [B] ids.
            contexts: [B, contexts] places in ``context_factors``.
            numbers: [B, numbers].
            interest: [B] fading trace of clicks on the item's category.
            angle: of the drift.

        Returns:
            [B] FP32.
        """
        odds = self.turned(self.affinity, angle)[self.segment[user], self.category[item]]
        odds = odds + self.turned(self.item_bias, angle)[item]
        odds = odds + 0.5 * (self.user_factors[user] * self.item_factors[item]).sum(1)
        factors = self.context_factors[contexts]
        pairs = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1)
        return odds + 0.3 * pairs + numbers @ self.number_weights + 1.2 * interest.clamp_max(2.0)

    def conversion_odds(self, user: Tensor, item: Tensor) -> Tensor:
        """Return the log odds [B] of a conversion after a click, before centring."""
        return self.conversion[self.segment[user], self.category[item]]

    def event_odds(self, segment: Tensor, item: Tensor, angle: float) -> Tensor:
        """Return the log odds [T] that an event of the history was a click."""
        odds = self.turned(self.affinity, angle)[segment, self.category[item]]
        return odds + self.turned(self.item_bias, angle)[item] - 1.5
