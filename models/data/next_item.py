"""MovieLens-1M as next-item prediction: which movie a user rates next, against sampled ones.

A row asks whether a movie is the one that the user rated next, after a history of all that the user rated before. Each
user's last movie is held out, as SASRec (arXiv:1808.09781) and HSTU (arXiv:2402.17152) have it; every earlier one
is a training row. Each comes with sampled negatives, the same ones always.

**No label shows in an input.** Histories hold training events only, and each row those before its own. Training
negatives are movies that are not among the user's training events: the held-out one may be drawn, as nothing in
training knows it. Held-out negatives are movies that the user never rated. Both are drawn evenly from the catalogue.
How popular a movie is counts the training events of *other* users: with the user's own, a positive would give itself
away.

Order is all that is used of time: the compact file of the whole set, ``ml1m_chrono.npz``, has no more. An event's age
is how many of the user's events it lies back.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...precision.errors import NarrowgateError
from ..features import FeatureSpec, Field
from .movielens import (
    RATING_FIELDS,
    Movies,
    Users,
    categorical_fields,
    file_facts,
    find,
    genre_field,
    lookup,
    million_sides,
    places,
    sparse_columns,
)
from .rows import AGE_BUCKETS, Floats, Ints, RowData
from .text import TextTable

RATINGS, SEQUENCES = "ratings.dat", "ml1m_chrono.npz"
#: Sampled movies beside each one that was rated.
NEGATIVES = 4
_SEED = 20260803


@dataclass(frozen=True, eq=False)
class _Events:
    """All ratings, sorted by user and time."""

    #: [E]: places in the files of users and movies, from 1.
    user: Ints
    item: Ints
    hashes: dict[str, str]


def read_ml_1m_next(folder: Path, *, negatives: int = NEGATIVES, latest: int | None = None) -> RowData:
    """Read ``ratings.dat`` or ``ml1m_chrono.npz``, beside ``movies.dat`` and ``users.dat``.

    The npz has ``user_id`` [U], ``offsets`` [U + 1] and ``item_id`` [E]: user u's movies in time order are
    ``item_id[offsets[u]:offsets[u + 1]]``. Ties in time keep its order; in ``ratings.dat`` they go by movie id.

    Args:
        folder: holds the files.
        negatives: sampled movies a positive row, in training and held out alike.
        latest: positive training rows a user, the latest ones; None for all. Histories are whole either way.

    Raises:
        NarrowgateError: files missing or corrupt, or a user who rated every movie.
    """
    movies, users = million_sides(folder)
    events = _read(folder, movies, users)
    user, item = events.user, events.item
    count = np.bincount(user, minlength=len(users.table) + 1)
    first = count.cumsum() - count
    at = np.arange(len(user)) - first[user]
    last = at == count[user] - 1

    # The pool: all but each user's last event, which leaves a user's slice one shorter.
    pool = np.flatnonzero(~last)
    pool_first = first - np.cumsum(count > 0) + (count > 0)
    positives = np.flatnonzero(last | (at >= (0 if latest is None else count[user] - 1 - latest)))
    held = last[positives]
    sampled = _sample(events, pool, positives, held, negatives, len(movies.table))

    owner, when = np.repeat(positives, 1 + negatives), np.repeat(at[positives], 1 + negatives)
    row_user, row_item = user[owner], np.concatenate([item[positives, None], sampled], 1).reshape(-1)
    label = np.tile(np.arange(1 + negatives) == 0, len(positives))
    row_held = np.repeat(held, 1 + negatives)
    start = pool_first[row_user]
    return RowData(
        features=_features(users, movies),
        sparse=sparse_columns(row_user, row_item, users, movies),
        bags=(movies.genres[row_item - 1],),
        dense=_numbers(when, row_item, item[pool], own=label & ~row_held),
        labels=label[:, None].astype(np.float32),
        groups=row_user,
        times=when,
        history_start=start,
        history_end=start + when,
        events=item[pool, None],
        event_times=at[pool],
        train=np.flatnonzero(~row_held),
        held_out=np.flatnonzero(row_held),
        facts={"name": "ml-1m", "task": "next-item"}
        | file_facts(events.hashes)
        | {
            "users": len(np.unique(user)),
            "items": len(np.unique(item)),
            "events": len(user),
            "negatives": negatives,
            "latest": latest,
            "split": "each user's last rating is held out, with sampled negatives; no input shows any of them",
        },
        seconds=False,
    )


def _features(users: Users, movies: Movies) -> FeatureSpec:
    return FeatureSpec(
        categorical=categorical_fields(users, movies),
        bags=(genre_field(),),
        numeric=("earlier ratings of the user", "ratings of the item by others"),
        events=(Field("item", len(movies.table) + 1), Field("gap", AGE_BUCKETS)),
        tasks=("next",),
    )


def _numbers(when: Ints, item: Ints, pool_items: Ints, own: NDArray[np.bool_]) -> Floats:
    """Return [N, 2]: log counts of the user's earlier events, and of the training events of others on the movie."""
    popularity = np.bincount(pool_items, minlength=int(item.max()) + 1)[item] - own
    return np.stack([np.log1p(when) / 4, np.log1p(popularity) / 4], 1).astype(np.float32)


def _sample(events: _Events, pool: Ints, positives: Ints, held: NDArray[np.bool_], negatives: int, movies: int) -> Ints:
    """Return [positives, negatives] movies, drawn evenly from all of the catalogue that the user did not rate.

    A training row's are not among the user's training events; a held-out row's not among any of the user's.
    """
    rng = np.random.default_rng(_SEED)
    rated = np.zeros((int(events.user.max()) + 1, movies + 1), bool)
    sampled = np.empty((len(positives), negatives), np.int64)
    for rows, more in ((np.flatnonzero(~held), pool), (np.flatnonzero(held), np.arange(len(events.user)))):
        rated[events.user[more], events.item[more]] = True
        owner = np.repeat(events.user[positives[rows]], negatives)
        complete: NDArray[np.bool_] = np.asarray(rated[:, 1:].all(1))
        full = complete[owner]
        if full.any():
            raise NarrowgateError(f"ml-1m: user {int(owner[full][0])} rated every movie, expected one left to sample")
        drawn = np.empty(len(owner), np.int64)
        open_ = np.arange(len(owner))
        while len(open_):
            drawn[open_] = rng.integers(1, movies + 1, len(open_))
            open_ = open_[rated[owner[open_], drawn[open_]]]
        sampled[rows] = drawn.reshape(-1, negatives)
    return sampled


def _read(folder: Path, movies: Movies, users: Users) -> _Events:
    sides = {table.path.name: table.sha256 for table in (movies.table, users.table)}
    if (folder / RATINGS).is_file():
        ratings = TextTable(folder / RATINGS, "::", RATING_FIELDS, encoding="latin-1")
        item, user = lookup(ratings, "item id", movies.table), lookup(ratings, "user id", users.table)
        order = np.lexsort((item, ratings.integers("timestamp", 0), user))
        return _Events(user[order], item[order], {RATINGS: ratings.sha256} | sides)
    path = folder / SEQUENCES
    if not path.is_file():
        raise NarrowgateError(
            f"ml-1m: folder '{folder}': task=next-item needs the whole set, expected {RATINGS} or {SEQUENCES}"
        )
    numbers = _arrays(path)
    offsets, ids = numbers["offsets"], {"user_id": numbers["user_id"], "item_id": numbers["item_id"]}
    whole = len(offsets) == len(ids["user_id"]) + 1 and offsets[0] == 0 and offsets[-1] == len(ids["item_id"])
    if not whole or (np.diff(offsets) < 0).any():
        raise NarrowgateError(
            f"{path}: offsets: expected {len(ids['user_id']) + 1} rising numbers from 0 to {len(ids['item_id'])}"
        )
    found: dict[str, Ints] = {}
    for name, table in (("user_id", users.table), ("item_id", movies.table)):
        found[name] = find(np.maximum(ids[name], 0), places(table, name.replace("_", " ")))
        if not found[name].all():
            index = int(np.argmin(found[name] != 0))
            raise NarrowgateError(f"{path}: {name}[{index}]: {ids[name][index]} is not in {table.path.name}")
    user = np.repeat(found["user_id"], np.diff(offsets))
    order = np.argsort(user, kind="stable")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return _Events(user[order], found["item_id"][order], {SEQUENCES: digest} | sides)


def _arrays(path: Path) -> dict[str, Ints]:
    """Return the whole numbers of the npz by name; nothing in it is executed."""
    names = ("user_id", "offsets", "item_id")
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in names if name not in archive]
            found: dict[str, Any] = {} if missing else {name: archive[name] for name in names}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise NarrowgateError(f"{path}: expected an npz file: {' '.join(str(error).split())}") from None
    if missing:
        raise NarrowgateError(f"{path}: lacks {', '.join(missing)} (expected {', '.join(names)})")
    for name, values in found.items():
        if values.ndim != 1 or values.dtype.kind not in "iu" or not len(values):
            raise NarrowgateError(f"{path}: {name}: expected whole numbers [n], found {values.dtype} {values.shape}")
    return {name: values.astype(np.int64) for name, values in found.items()}
