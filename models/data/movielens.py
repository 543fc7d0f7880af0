"""MovieLens-100K and -1M from their original files, and from the layout that RecBole ships.

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
_RATING_FIELDS = ("user id", "item id", "rating", "timestamp")


#: Ids above this are taken for a corrupt file.
_MAX_ID = 10_000_000


@dataclass(frozen=True, eq=False)
class _Files:
    """The three files of a MovieLens set."""

    name: str
    ratings: TextTable
    movies: TextTable
    users: TextTable

    def places(self, table: TextTable, field: str) -> Ints:
        """Return [largest id + 1]: the line of each id in its own file, counted from 1; 0 where there is none."""
        ids = table.integers(field, 1, _MAX_ID)
        places = np.zeros(int(ids.max()) + 1, np.int64)
        places[ids] = np.arange(1, len(ids) + 1)
        return places

    def lookup(self, field: str, places: Ints, table: TextTable) -> Ints:
        """Return the place of each rating's user or item.

        Raises:
            NarrowgateError: naming the first rating whose id the other file lacks.
        """
        ids = self.ratings.integers(field, 1, _MAX_ID)
        found = np.where(ids < len(places), places[np.minimum(ids, len(places) - 1)], 0)
        if not found.all():
            index = int(np.argmin(found != 0))
            raise self.ratings.fault(index, f"{field} {ids[index]} is not in {table.path.name}")
        return found

    def facts(self) -> dict[str, Any]:
        """Return the name and one hash over the contents of the files."""
        tables = (self.ratings, self.movies, self.users)
        joined = "".join(f"{table.path.name} {table.sha256}\n" for table in tables)
        return {
            "name": self.name,
            "files": {table.path.name: table.sha256 for table in tables},
            "sha256": hashlib.sha256(joined.encode()).hexdigest(),
        }


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
    ratings = TextTable(folder / candidates[0], "::", _RATING_FIELDS, encoding="latin-1")
    movies = TextTable(folder / "movies.dat", "::", ("item id", "title", "genres"), encoding="latin-1")
    users = TextTable(
        folder / "users.dat", "::", ("user id", "gender", "age", "occupation", "zip code"), encoding="latin-1"
    )
    years = [_YEAR.search(title) for title in movies.text("title")]
    occupation = 1 + users.integers("occupation", 0, 20)
    return _as_rows(
        _Files("ml-1m", ratings, movies, users),
        [match[1] if match else "" for match in years],
        [entry.split("|") for entry in movies.text("genres")],
        occupation,
        occupations=21,
    )


def _original_100k(folder: Path) -> RowData:
    ratings = TextTable(folder / "u.data", "\t", _RATING_FIELDS)
    flags = tuple(f"flag of {genre}" for genre in GENRES)
    sides = ("item id", "title", "release date", "video release date", "url", *flags)
    movies = TextTable(folder / "u.item", "|", sides, encoding="latin-1")
    users = TextTable(
        folder / "u.user", "|", ("user id", "age", "gender", "occupation", "zip code"), encoding="latin-1"
    )
    marks = np.stack([movies.integers(flag, 0, 1) for flag in flags], 1)
    genres = [[GENRES[place] for place in np.flatnonzero(row)] for row in marks]
    return _small_rows(_Files("ml-100k", ratings, movies, users), list(movies.text("release date")), genres)


def _recbole_100k(folder: Path) -> RowData:
    ratings = TextTable(folder / "ml-100k.inter", "\t", _RATING_FIELDS, header=_INTER)
    movies = TextTable(folder / "ml-100k.item", "\t", ("item id", "title", "year", "genres"), header=_ITEM)
    users = TextTable(
        folder / "ml-100k.user", "\t", ("user id", "age", "gender", "occupation", "zip code"), header=_USER
    )
    genres = [entry.split(" ") for entry in movies.text("genres")]
    return _small_rows(_Files("ml-100k", ratings, movies, users), list(movies.text("year")), genres)


def _small_rows(files: _Files, years: list[str], genres: list[list[str]]) -> RowData:
    words = files.users.text("occupation")
    places = {word: 1 + place for place, word in enumerate(sorted(set(words)))}
    occupation = np.array([places[word] for word in words], dtype=np.int64)
    return _as_rows(files, years, genres, occupation, occupations=len(places))


def _as_rows(
    files: _Files, years: list[str], genres: list[list[str]], occupation: Ints, *, occupations: int
) -> RowData:
    """Put the three files together.

    Args:
        files: ratings, movies and users.
        years: of each movie: text that ends with its year, or anything else for an unknown one.
        genres: of each movie, by name.
        occupation: of each user, counted from 1.
        occupations: how many there can be.
    """
    item_of, user_of = files.places(files.movies, "item id"), files.places(files.users, "user id")
    ratings = files.ratings
    item = files.lookup("item id", item_of, files.movies)
    user = files.lookup("user id", user_of, files.users)
    rating = ratings.integers("rating", 1, 5)
    time = ratings.integers("timestamp", 0)
    # The item breaks ties in time: the same rows whatever the order of lines.
    order = np.lexsort((item, time, user))
    user, item, rating, time = user[order], item[order], rating[order], time[order]

    counts = np.bincount(user, minlength=len(files.users) + 1)
    rank = np.arange(len(user)) - (counts.cumsum() - counts)[user]
    training = rank < np.ceil(counts[user] * (1 - _HELD_OUT))
    train, held_out = np.flatnonzero(training), np.flatnonzero(~training)
    start, end = strictly_earlier(user, time, user[train], time[train])

    sides = np.stack(
        [
            _age_bracket(files.users.integers("age", 0, 150)),
            files.users.one_of("gender", ("F", "M")),
            occupation,
            _region(files.users.text("zip code")),
        ],
        1,
    )
    year = np.array([_year(text) for text in years], dtype=np.int64)
    return RowData(
        features=_features(len(files.users), len(files.movies), occupations),
        sparse=np.concatenate([np.stack([user, item], 1), sides[user - 1], year[item - 1, None]], 1),
        bags=(_genre_table(files.movies, genres)[item - 1],),
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


def _features(users: int, items: int, occupations: int) -> FeatureSpec:
    return FeatureSpec(
        categorical=(
            Field("user", users + 1),
            Field("item", items + 1),
            Field("age", len(_AGES) + 2),
            Field("gender", 3),
            Field("occupation", occupations + 1),
            Field("region", 12),
            Field("year", _LAST_YEAR - _FIRST_YEAR + 2),
        ),
        bags=(Field("genres", len(GENRES) + 1),),
        numeric=("ratings of the user", "ratings of the item", "mean of the user", "mean of the item"),
        events=(Field("item", items + 1), Field("rating", 6), Field("gap", AGE_BUCKETS)),
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
