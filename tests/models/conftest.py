"""A small preset, MovieLens files written by hand, and the real sets where the machine has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from narrowgate.models import GemConfig, GemTask, Preset, TrainingConfig
from narrowgate.models.presets import SyntheticConfig

_GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small() -> Preset:
    """Two layers and some hundred rows: everything a preset has, in milliseconds."""
    return Preset(
        name="small",
        model=GemConfig(
            d=16, heads=2, layers=2, max_tokens=8, fm_hidden=(32,), cross_rank=8, pffn_tokens=3, head_hidden=16
        ),
        training=TrainingConfig(batch_size=32, eval_batch_size=50, steps=12, epochs=10, lr=5e-3),
        synthetic=SyntheticConfig(users=40, items=25, impressions=15),
    )


@pytest.fixture
def task(small: Preset) -> GemTask:
    return GemTask.open(small, "synthetic")


@dataclass
class MovieLens:
    """Ratings [n, 4] of user, item, rating and time; files in any layout."""

    ratings: np.ndarray
    users: Sequence[tuple[int, int, str, str, str]]
    movies: Sequence[tuple[int, str, str, tuple[str, ...]]]

    def lines(self, separator: str) -> str:
        return "".join(separator.join(str(value) for value in row) + "\n" for row in self.ratings.tolist())

    def original(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "u.data").write_text(self.lines("\t"))
        flags = {name: [str(int(genre in genres)) for genre in _GENRES] for _, name, _, genres in self.movies}
        movies = [
            "|".join([str(item), f"{name} ({year})", f"01-Jan-{year}" if year else "", "", "http://x", *flags[name]])
            for item, name, year, _ in self.movies
        ]
        (folder / "u.item").write_bytes(("\n".join(movies) + "\n").encode("latin-1"))
        (folder / "u.user").write_text("".join("|".join(map(str, user)) + "\n" for user in self.users))
        return folder

    def recbole(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ml-100k.inter").write_text(
            "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + self.lines("\t")
        )
        movies = ["\t".join([str(item), name, year, " ".join(genres)]) for item, name, year, genres in self.movies]
        header = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        (folder / "ml-100k.item").write_text(header + "\n".join(movies) + "\n", encoding="utf-8")
        header = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        (folder / "ml-100k.user").write_text(header + "".join("\t".join(map(str, user)) + "\n" for user in self.users))
        return folder

    def million(self, folder: Path, ratings: str = "ratings.dat") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ratings).write_text(self.lines("::"))
        movies = [f"{item}::{name} ({year or 1990})::{'|'.join(genres)}\n" for item, name, year, genres in self.movies]
        (folder / "movies.dat").write_bytes("".join(movies).encode("latin-1"))
        (folder / "users.dat").write_text(
            "".join(f"{user}::{gender}::{age}::{user % 21}::{code}\n" for user, age, gender, _, code in self.users)
        )
        return folder


@pytest.fixture
def movielens() -> MovieLens:
    """Six users, 20 of 24 movies rated by each, shuffled, with ties in time."""
    generator = np.random.default_rng(3)
    users = [(user, 16 + 9 * user, "MF"[user % 2], ("artist", "none")[user % 2], f"{user}1234") for user in range(1, 7)]
    users[4] = (5, 33, "F", "other", "V6K1B2")
    movies = [
        (item, f"Movie {item} é", str(1950 + 2 * item), tuple(sorted({_GENRES[item % 18 + 1], _GENRES[item // 2 + 1]})))
        for item in range(1, 25)
    ]
    movies[7] = (8, "Lost film", "", ("unknown",))
    columns = [
        np.repeat(np.arange(1, 7), 20),
        np.concatenate([1 + generator.permutation(24)[:20] for _ in range(6)]),
        generator.integers(1, 6, 120),
        880_000_000 + 3600 * generator.integers(0, 60, 120),
    ]
    return MovieLens(generator.permutation(np.stack(columns, 1)), users, movies)


@pytest.fixture(scope="session")
def real() -> Callable[[str], Path]:
    """Return a function from a set's name to its folder; skips where the machine has none."""
    repository = Path(__file__).resolve().parents[2]

    def folder(name: str) -> Path:
        place = os.environ.get("NARROWGATE_DATA")
        found = Path(place) / name if place else repository / "data" / name
        if not found.is_dir():
            where = "the folder in NARROWGATE_DATA" if place else "data/ (set NARROWGATE_DATA or run scripts/get_data)"
            pytest.skip(f"no {name} in {where}")
        return found

    return folder
