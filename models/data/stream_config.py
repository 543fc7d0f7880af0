"""Size and difficulty of the streamed synthetic data, and the fields that it offers a model."""

from __future__ import annotations

from dataclasses import dataclass

from ...precision.errors import NarrowgateError
from ..features import FeatureSpec, Field

#: Values of the small fields, and of an event's action: nothing, seen, clicked, converted.
SEGMENTS, CATEGORIES, TAGS, ACTIONS = 64, 128, 1024, 4
#: Ids that a row's two multi-valued fields hold.
BAG_WIDTH = 6


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """What :mod:`narrowgate.models.data.stream` generates; nothing of it is ever held in memory as a whole.

    Raises:
        NarrowgateError: a value out of range.
    """

    users: int
    items: int
    #: Rows that one training may draw, and held-out rows.
    rows: int
    held_out: int
    #: Context fields of one id each, and their values.
    contexts: int = 23
    context_rows: int = 8192
    numeric: int = 8
    #: Log-normal history lengths: median, and deviation of the logarithm.
    median_events: float = 100.0
    length_spread: float = 0.8
    #: Exponent of the power law of users, items and contexts: the r-th most frequent has weight r^-exponent.
    exponent: float = 0.9
    #: Share of clicks that the odds are centred on, and of conversions among clicks.
    click_rate: float = 0.03
    conversion_rate: float = 0.1
    #: How far the world has turned at the end of the training rows, in radians.
    drift: float = 0.6
    #: Of the world and of the held-out rows; a training's own rows follow from its seed.
    seed: int = 20260803

    def __post_init__(self) -> None:
        for name in ("users", "items", "rows", "held_out", "contexts", "context_rows", "numeric"):
            if getattr(self, name) < 1:
                raise NarrowgateError(f"stream field '{name}' must be at least 1, found {getattr(self, name)}")
        for name in ("click_rate", "conversion_rate"):
            if not 0 < getattr(self, name) < 1:
                raise NarrowgateError(f"stream field '{name}' must lie between 0 and 1, found {getattr(self, name)}")
        for name in ("median_events", "length_spread", "exponent"):
            if getattr(self, name) <= 0:
                raise NarrowgateError(f"stream field '{name}' must be positive, found {getattr(self, name)}")

    def features(self) -> FeatureSpec:
        """The fields of every row; id 0 is padding everywhere."""
        from .rows import AGE_BUCKETS

        item, category = Field("item", self.items + 1), Field("category", CATEGORIES + 1)
        contexts = tuple(Field(f"context_{i}", self.context_rows + 1) for i in range(self.contexts))
        return FeatureSpec(
            categorical=(Field("user", self.users + 1), item, Field("segment", SEGMENTS + 1), category, *contexts),
            bags=(Field("item_tags", TAGS + 1), Field("user_tags", TAGS + 1)),
            numeric=tuple(f"number_{i}" for i in range(self.numeric)),
            events=(item, category, Field("action", ACTIONS), Field("gap", AGE_BUCKETS)),
            tasks=("click", "conversion"),
        )
