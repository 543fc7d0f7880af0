"""Generated impressions with a planted signal, whose true probabilities are known.

Users meet items of power-law popularity. The log odds of a click add up

- the affinity of the user's segment to the item's category, a low-rank product,
- a product of user and item factors, and a bias of each item,
- the user's current interest: a fading trace of the categories clicked lately, which a model can only read from the
  order of events in the history.

A click converts with odds of its own, from the item's price level and the user's segment. The held-out impressions
of a user follow its last training impression as one slate, so their probabilities depend on nothing but the features
and the history that a model sees. They are known, hence so is the normalized entropy of a perfect model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..features import FeatureSpec, Field
from ..presets import SyntheticConfig
from .rows import AGE_BUCKETS, Floats, Ints, RowData, strictly_earlier

_SEGMENTS, _CATEGORIES, _PRICES, _TAGS, _RANK = 12, 16, 8, 24, 4
#: Share of a user's impressions that is held out: its last ones.
_HELD_OUT = 0.2
#: What is left of an interest one impression later.
_FADE = 0.75
_MEAN_GAP_S = 3 * 3600
Floats64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _World:
    """Everything that does not depend on what users do. Columns of users are [U], of items [I]."""

    segment: Ints
    category: Ints
    price: Ints
    tags: Ints
    popularity: Floats64
    #: [U, impressions]: the item of each.
    item: Ints
    #: [U, impressions]: seconds.
    times: Ints
    #: [U, impressions]: log odds of a click without interest, and of a conversion after a click.
    click_odds: Floats64
    conversion_odds: Floats64


def generate(config: SyntheticConfig) -> RowData:
    """Generate ``users * impressions`` rows, always the same for one configuration."""
    rng = np.random.default_rng(config.seed)
    train_length = config.impressions - max(1, round(_HELD_OUT * config.impressions))
    world = _make_world(rng, config, train_length)
    labels, probabilities = _simulate(rng, world, train_length)
    return _as_rows(config, world, labels, probabilities, train_length)


def _make_world(rng: np.random.Generator, config: SyntheticConfig, train_length: int) -> _World:
    users, items, length = config.users, config.items, config.impressions
    segment, category = rng.integers(_SEGMENTS, size=users), rng.integers(_CATEGORIES, size=items)
    price, tags = rng.integers(_PRICES, size=items), 1 + rng.integers(_TAGS, size=(items, 3))
    popularity = (1.0 + np.arange(items)) ** -0.8
    popularity /= popularity.sum()
    item = rng.choice(items, size=(users, length), p=popularity)
    gaps = 1 + rng.exponential(_MEAN_GAP_S, size=(users, length)).astype(np.int64)
    gaps[:, train_length + 1 :] = 1

    def factors(rows: int) -> Floats64:
        return rng.standard_normal((rows, _RANK)) / _RANK**0.5

    affinity = 1.6 * factors(_SEGMENTS) @ factors(_CATEGORIES).T
    of_users, of_items = factors(users), factors(items)
    tag_odds = 0.3 * rng.standard_normal(_TAGS + 1)
    bias = 0.4 * rng.standard_normal(items) + tag_odds[tags].sum(1)
    person = np.arange(users)[:, None]
    click = affinity[segment[:, None], category[item]] + bias[item]
    click += 0.4 * np.einsum("uk,ulk->ul", of_users, of_items[item])
    price_odds = 0.7 * rng.standard_normal((_SEGMENTS, _PRICES))
    conversion = -1.0 + price_odds[segment[person], price[item]]
    return _World(segment, category, price, tags, popularity, item, gaps.cumsum(1), click, conversion)


def _simulate(rng: np.random.Generator, world: _World, train_length: int) -> tuple[Floats, Floats64]:
    """Draw clicks and conversions in time order: labels and probabilities, each [U, impressions, 2]."""
    users, length = world.item.shape
    uniform = rng.random((2, users, length))
    person = np.arange(users)
    interest = np.zeros((users, _CATEGORIES))
    labels, probabilities = np.empty((users, length, 2), np.float32), np.empty((users, length, 2))
    for t in range(length):
        category = world.category[world.item[:, t]]
        click = _sigmoid(world.click_odds[:, t] - 2.2 + 2.0 * np.minimum(interest[person, category], 2.0))
        both = click * _sigmoid(world.conversion_odds[:, t])
        clicked = uniform[0, :, t] < click
        probabilities[:, t] = np.stack([click, both], 1)
        # Conditional on the click, so the second uniform meets the ratio of both.
        labels[:, t] = np.stack([clicked, clicked & (uniform[1, :, t] < both / click)], 1)
        if t < train_length:
            interest *= _FADE
            interest[person, category] += clicked
    return labels, probabilities


def _as_rows(
    config: SyntheticConfig, world: _World, labels: Floats, probabilities: Floats64, train_length: int
) -> RowData:
    users, length = world.item.shape
    at = np.tile(np.arange(length), users)
    train, held_out = np.flatnonzero(at < train_length), np.flatnonzero(at >= train_length)
    user, item, times = np.repeat(np.arange(users), length), world.item.reshape(-1), world.times.reshape(-1)
    flat_labels = labels.reshape(-1, 2)
    category = 1 + world.category[item]
    start, end = strictly_earlier(user, times, user[train], times[train])
    segment = 1 + world.segment[user]
    sparse = np.stack([1 + user, 1 + item, segment, category, 1 + world.price[item]], 1)
    events = np.stack([1 + item, category, 1 + flat_labels.sum(1).astype(np.int64)], 1)
    seen = np.log1p(end - start) / 4
    dense = np.stack([seen, 1 + np.log(world.popularity[item]) / 8], 1).astype(np.float32)
    digest = hashlib.sha256()
    for column in (sparse, times, flat_labels):
        digest.update(np.ascontiguousarray(column).tobytes())
    facts: dict[str, Any] = {
        "name": "synthetic",
        "seed": config.seed,
        "users": users,
        "items": config.items,
        "split": f"the last {length - train_length} of each user's {length} impressions are held out, as one slate",
        "sha256": digest.hexdigest(),
    }
    return RowData(
        features=_features(users, config.items),
        sparse=sparse,
        bags=(world.tags[item],),
        dense=dense,
        labels=flat_labels,
        groups=user,
        times=times,
        history_start=start,
        history_end=end,
        events=events[train],
        event_times=times[train],
        train=train,
        held_out=held_out,
        facts=facts,
        probabilities=probabilities.reshape(-1, 2)[held_out],
    )


def _features(users: int, items: int) -> FeatureSpec:
    category = Field("category", _CATEGORIES + 1)
    return FeatureSpec(
        categorical=(
            Field("user", users + 1),
            Field("item", items + 1),
            Field("segment", _SEGMENTS + 1),
            category,
            Field("price", _PRICES + 1),
        ),
        bags=(Field("tags", _TAGS + 1),),
        numeric=("seen", "popularity"),
        events=(Field("item", items + 1), category, Field("action", 4), Field("gap", AGE_BUCKETS)),
        tasks=("click", "conversion"),
    )


def _sigmoid(x: Floats64) -> Floats64:
    return 1 / (1 + np.exp(-x))
