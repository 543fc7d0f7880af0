"""MovieLens-100K and -1M as ratings, from their original files and from the layout that RecBole ships.

Both layouts of MovieLens-100K give the same rows. Labels are ``rating >= 4`` and ``rating == 5``. Each user's ratings
are split in time order, the last fifth held out; histories and running means show ratings of the training part only,
and of those only strictly earlier ones. The order of lines in a file means nothing.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...precision.errors import NarrowgateError, did_you_mean
from ..features import FeatureSpec, Field
from .rows import AGE_BUCKETS, Floats, Ints, RowData, strictly_earlier
from .text import TextTable

GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
#: Genres that a movie keeps; none of either set has more.
_MAX_GENRES = 6
_HELD_OUT = 0.2
#: Ratings that pull a running mean towards the middle of the scale.
_PRIOR_WEIGHT, _PRIOR_MEAN = 5.0, 3.5
_FIRST_YEAR, _LAST_YEAR = 1900, 2030
_YEAR = re.compile(r"\((\d{4})\)\s*$")
_INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
_ITEM = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"
_USER = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"
RATING_FIELDS = ("user id", "item id", "rating", "timestamp")


#: Ids above this are taken for a corrupt file.
_MAX_ID = 10_000_000


@dataclass(frozen=True, eq=False)
class Movies:
    """The movies of a set, in the order of their file."""

    table: TextTable
    #: [movies]: 0 for unknown.
    year: Ints
    #: [movies, 6], padded with 0.
    genres: Ints

    @staticmethod
    def of(table: TextTable, years: list[str], genres: list[list[str]]) -> Movies:
        """Make the columns from texts that end with a year, or are anything else, and from names of genres."""
        return Movies(table, np.array([_year(text) for text in years], dtype=np.int64), _genre_table(table, genres))


@dataclass(frozen=True, eq=False)
class Users:
    """The users of a set, in the order of their file."""

    table: TextTable
    #: [users, 4]: age bracket, gender, occupation, region of the postal code, each from 1.
    sides: Ints
    #: How many occupations there can be.
    occupations: int

    @staticmethod
    def of(table: TextTable, occupation: Ints, occupations: int) -> Users:
        """Make the columns; ``occupation`` counts from 1."""
        columns = [
            _age_bracket(table.integers("age", 0, 150)),
            table.one_of("gender", ("F", "M")),
            occupation,
            _region(table.text("zip code")),
        ]
        return Users(table, np.stack(columns, 1), occupations)


@dataclass(frozen=True, eq=False)
class _Files:
    """The three files of a MovieLens set."""

    name: str
    ratings: TextTable
    movies: Movies
    users: Users

    def facts(self) -> dict[str, Any]:
        """Return the name and one hash over the contents of the files."""
        return {"name": self.name} | file_facts(
            {table.path.name: table.sha256 for table in (self.ratings, self.movies.table, self.users.table)}
        )


def file_facts(hashes: dict[str, str]) -> dict[str, Any]:
    """Return hashes by file name, and one over all of them."""
    joined = "".join(f"{name} {digest}\n" for name, digest in hashes.items())
    return {"files": hashes, "sha256": hashlib.sha256(joined.encode()).hexdigest()}


def places(table: TextTable, field: str) -> Ints:
    """Return [largest id + 1]: the line of each id in its own file, counted from 1; 0 where there is none."""
    ids = table.integers(field, 1, _MAX_ID)
    found = np.zeros(int(ids.max()) + 1, np.int64)
    found[ids] = np.arange(1, len(ids) + 1)
    return found


def find(ids: Ints, known: Ints) -> Ints:
    """Return the place of each id in ``known``, as :func:`places` makes it; 0 where there is none."""
    return np.where(ids < len(known), known[np.minimum(ids, len(known) - 1)], 0)


def lookup(ratings: TextTable, field: str, table: TextTable) -> Ints:
    """Return the place of each rating's user or item in its own file.

    Raises:
        NarrowgateError: naming the first rating whose id the other file lacks.
    """
    ids = ratings.integers(field, 1, _MAX_ID)
    found = find(ids, places(table, field))
    if not found.all():
        index = int(np.argmin(found != 0))
        raise ratings.fault(index, f"{field} {ids[index]} is not in {table.path.name}")
    return found


def read_ml_100k(folder: Path) -> RowData:
    """Read ``u.data``, ``u.item``, ``u.user``, or RecBole's ``ml-100k.inter``, ``.item``, ``.user``.

    Raises:
        NarrowgateError: files missing or corrupt.
    """
    original = ("u.data", "u.item", "u.user")
    recbole = ("ml-100k.inter", "ml-100k.item", "ml-100k.user")
    for files, read in ((original, _original_100k), (recbole, _recbole_100k)):
        if (folder / files[0]).is_file():
            _require(folder, "ml-100k", files)
            return read(folder)
    raise NarrowgateError(
        f"ml-100k: folder '{folder}' holds no ratings: expected {', '.join(original)} or {', '.join(recbole)},"
        f" found {_listing(folder)}"
    )


def read_ml_1m(folder: Path) -> RowData:
    """Read ``ratings.dat`` (or the only ``ratings*.dat``), ``movies.dat`` and ``users.dat``.

    Raises:
        NarrowgateError: files missing or corrupt.
    """
    candidates = sorted(path.name for path in folder.glob("ratings*.dat"))
    if "ratings.dat" in candidates:
        candidates = ["ratings.dat"]
    if len(candidates) != 1:
        found = f"several: {', '.join(candidates)}" if candidates else _listing(folder)
        raise NarrowgateError(
            f"ml-1m: folder '{folder}': expected ratings.dat or exactly one ratings*.dat, beside movies.dat and"
            f" users.dat, found {found}"
        )
    _require(folder, "ml-1m", (candidates[0], "movies.dat", "users.dat"))
    ratings = TextTable(folder / candidates[0], "::", RATING_FIELDS, encoding="latin-1")
    return _as_rows(_Files("ml-1m", ratings, *million_sides(folder)))


def million_sides(folder: Path) -> tuple[Movies, Users]:
    """Read ``movies.dat`` and ``users.dat`` of MovieLens-1M.

    Raises:
        NarrowgateError: files missing or corrupt.
    """
    _require(folder, "ml-1m", ("movies.dat", "users.dat"))
    movies = TextTable(folder / "movies.dat", "::", ("item id", "title", "genres"), encoding="latin-1")
    users = TextTable(
        folder / "users.dat", "::", ("user id", "gender", "age", "occupation", "zip code"), encoding="latin-1"
    )
    years = [_YEAR.search(title) for title in movies.text("title")]
    return (
        Movies.of(
            movies, [match[1] if match else "" for match in years], [g.split("|") for g in movies.text("genres")]
        ),
        Users.of(users, 1 + users.integers("occupation", 0, 20), 21),
    )


def _original_100k(folder: Path) -> RowData:
    ratings = TextTable(folder / "u.data", "\t", RATING_FIELDS)
    flags = tuple(f"flag of {genre}" for genre in GENRES)
    sides = ("item id", "title", "release date", "video release date", "url", *flags)
    movies = TextTable(folder / "u.item", "|", sides, encoding="latin-1")
    users = TextTable(
        folder / "u.user", "|", ("user id", "age", "gender", "occupation", "zip code"), encoding="latin-1"
    )
    marks = np.stack([movies.integers(flag, 0, 1) for flag in flags], 1)
    genres = [[GENRES[place] for place in np.flatnonzero(row)] for row in marks]
    return _small_rows(ratings, movies, users, list(movies.text("release date")), genres)


def _recbole_100k(folder: Path) -> RowData:
    ratings = TextTable(folder / "ml-100k.inter", "\t", RATING_FIELDS, header=_INTER)
    movies = TextTable(folder / "ml-100k.item", "\t", ("item id", "title", "year", "genres"), header=_ITEM)
    users = TextTable(
        folder / "ml-100k.user", "\t", ("user id", "age", "gender", "occupation", "zip code"), header=_USER
    )
    genres = [entry.split(" ") for entry in movies.text("genres")]
    return _small_rows(ratings, movies, users, list(movies.text("year")), genres)


def _small_rows(
    ratings: TextTable, movies: TextTable, users: TextTable, years: list[str], genres: list[list[str]]
) -> RowData:
    words = users.text("occupation")
    places = {word: 1 + place for place, word in enumerate(sorted(set(words)))}
    occupation = np.array([places[word] for word in words], dtype=np.int64)
    sides = Movies.of(movies, years, genres), Users.of(users, occupation, len(places))
    return _as_rows(_Files("ml-100k", ratings, *sides))


def _as_rows(files: _Files) -> RowData:
    """Put the three files together."""
    ratings = files.ratings
    item = lookup(ratings, "item id", files.movies.table)
    user = lookup(ratings, "user id", files.users.table)
    rating = ratings.integers("rating", 1, 5)
    time = ratings.integers("timestamp", 0)
    # The item breaks ties in time: the same rows whatever the order of lines.
    order = np.lexsort((item, time, user))
    user, item, rating, time = user[order], item[order], rating[order], time[order]

    counts = np.bincount(user, minlength=len(files.users.table) + 1)
    rank = np.arange(len(user)) - (counts.cumsum() - counts)[user]
    training = rank < np.ceil(counts[user] * (1 - _HELD_OUT))
    train, held_out = np.flatnonzero(training), np.flatnonzero(~training)
    start, end = strictly_earlier(user, time, user[train], time[train])

    return RowData(
        features=_features(files.users, files.movies),
        sparse=sparse_columns(user, item, files.users, files.movies),
        bags=(files.movies.genres[item - 1],),
        dense=_running_means(user, item, time, rating, train, end - start),
        labels=np.stack([rating >= 4, rating == 5], 1).astype(np.float32),
        groups=user,
        times=time,
        history_start=start,
        history_end=end,
        events=np.stack([item[train], rating[train]], 1),
        event_times=time[train],
        train=train,
        held_out=held_out,
        facts=files.facts()
        | {
            "users": len(np.unique(user)),
            "items": len(np.unique(item)),
            "split": "each user's last 20 % of ratings by time are held out; no input shows any of them",
        },
    )


def sparse_columns(user: Ints, item: Ints, users: Users, movies: Movies) -> Ints:
    """Return [N, 7]: the ids of :func:`categorical_fields` for places of users and movies, [N] each, from 1."""
    return np.concatenate([np.stack([user, item], 1), users.sides[user - 1], movies.year[item - 1, None]], 1)


def categorical_fields(users: Users, movies: Movies) -> tuple[Field, ...]:
    """The fields of one id a row that every MovieLens task has."""
    return (
        Field("user", len(users.table) + 1),
        Field("item", len(movies.table) + 1),
        Field("age", len(_AGES) + 2),
        Field("gender", 3),
        Field("occupation", users.occupations + 1),
        Field("region", 12),
        Field("year", _LAST_YEAR - _FIRST_YEAR + 2),
    )


def genre_field() -> Field:
    """The multi-valued field of a movie's genres."""
    return Field("genres", len(GENRES) + 1)


def _features(users: Users, movies: Movies) -> FeatureSpec:
    return FeatureSpec(
        categorical=categorical_fields(users, movies),
        bags=(genre_field(),),
        numeric=("ratings of the user", "ratings of the item", "mean of the user", "mean of the item"),
        events=(Field("item", len(movies.table) + 1), Field("rating", 6), Field("gap", AGE_BUCKETS)),
        tasks=("rating>=4", "rating==5"),
    )


def _running_means(user: Ints, item: Ints, time: Ints, rating: Ints, train: Ints, seen: Ints) -> Floats:
    """Return [N, 4]: log counts and shrunk means of strictly earlier training ratings, of the user and of the item."""
    columns: list[np.ndarray] = [np.log1p(seen) / 4]
    means: list[np.ndarray] = []
    for group in (user, item):
        pool = train[np.lexsort((time[train], group[train]))]
        start, end = strictly_earlier(group, time, group[pool], time[pool])
        total = np.concatenate([[0], rating[pool].cumsum()])
        count = end - start
        means.append((total[end] - total[start] + _PRIOR_WEIGHT * _PRIOR_MEAN) / (count + _PRIOR_WEIGHT) - _PRIOR_MEAN)
        if group is item:
            columns.append(np.log1p(count) / 4)
    return np.stack([*columns, *means], 1).astype(np.float32)


def _genre_table(movies: TextTable, genres: list[list[str]]) -> Ints:
    places = {genre: 1 + place for place, genre in enumerate(GENRES)}
    table = np.zeros((len(genres), _MAX_GENRES), np.int64)
    for index, names in enumerate(genres):
        unknown = [name for name in names if name not in places]
        if unknown or len(names) > _MAX_GENRES:
            what = f"unknown genre '{unknown[0]}'" if unknown else f"more than {_MAX_GENRES} genres"
            raise movies.fault(
                index, f"{what} in {' '.join(names)!r}{did_you_mean(unknown[0], GENRES) if unknown else ''}"
            )
        table[index, : len(names)] = sorted(places[name] for name in names)
    return table


#: First ages of the brackets that MovieLens-1M publishes, but for the youngest.
_AGES = (18, 25, 35, 45, 50, 56)


def _age_bracket(age: Ints) -> Ints:
    return 1 + np.digitize(age, _AGES)


def _region(postal_codes: tuple[str, ...]) -> Ints:
    """First digit of a US postal code, counted from 1; 11 for anything else."""
    return np.array([1 + int(code[0]) if code[:1].isdecimal() else 11 for code in postal_codes], dtype=np.int64)


def _year(text: str) -> int:
    year = int(text[-4:]) if text[-4:].isdecimal() else 0
    return 1 + year - _FIRST_YEAR if _FIRST_YEAR <= year <= _LAST_YEAR else 0


def _require(folder: Path, name: str, files: tuple[str, ...]) -> None:
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise NarrowgateError(
            f"{name}: folder '{folder}' lacks {', '.join(missing)} (expected {', '.join(files)}, found"
            f" {_listing(folder)})"
        )


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return (", ".join(names[:8]) + (", ..." if len(names) > 8 else "")) or "nothing"
