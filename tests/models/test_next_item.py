"""MovieLens-1M as next-item prediction: both layouts, what is held out, and that no input tells a label."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from narrowgate.models import Dataset, GemTask, Trainer, open_data
from narrowgate.models.data.movielens import read_ml_1m
from narrowgate.models.data.next_item import read_ml_1m_next
from narrowgate.models.data.rows import RowData
from narrowgate.precision.errors import NarrowgateError

COLUMNS = ("sparse", "dense", "labels", "groups", "times", "history_start", "history_end", "events", "event_times",
           "train", "held_out")  # fmt: skip


@pytest.fixture
def folder(movielens: Any, tmp_path: Path) -> Path:
    # Distinct times, so that the order of both layouts is one.
    movielens.ratings[:, 3] = np.arange(len(movielens.ratings))
    return movielens.million(tmp_path / "million")


def sequences(movielens: Any) -> dict[int, list[int]]:
    """Each user's movies in time order, independently of the reader."""
    found: dict[int, list[int]] = {}
    for user, item, _, _ in sorted(movielens.ratings.tolist(), key=lambda row: row[3]):
        found.setdefault(user, []).append(item)
    return found


def compact(movielens: Any, folder: Path, **changes: Any) -> Path:
    """The folder with the npz in place of ``ratings.dat``; users in falling order, which means nothing."""
    movielens.million(folder)
    (folder / "ratings.dat").unlink()
    order = sequences(movielens)
    users = sorted(order, reverse=True)
    arrays = {
        "user_id": np.array(users, np.int16),
        "offsets": np.cumsum([0, *(len(order[user]) for user in users)]).astype(np.int32),
        "item_id": np.concatenate([order[user] for user in users]).astype(np.int16),
    } | changes
    np.savez(folder / "ml1m_chrono.npz", **{name: value for name, value in arrays.items() if value is not None})
    return folder


def history(rows: RowData, row: int) -> list[int]:
    return rows.events[rows.history_start[row] : rows.history_end[row], 0].tolist()


def test_both_layouts_give_the_same_rows(movielens: Any, folder: Path, tmp_path: Path) -> None:
    one, two = read_ml_1m_next(folder), read_ml_1m_next(compact(movielens, tmp_path / "compact"))
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
    assert list(two.facts["files"]) == ["ml1m_chrono.npz", "movies.dat", "users.dat"]


def test_a_row_asks_for_the_next_movie_after_all_earlier_ones(movielens: Any, folder: Path) -> None:
    rows, order = read_ml_1m_next(folder, negatives=3), sequences(movielens)
    assert len(rows.labels) == sum(map(len, order.values())) * 4
    assert rows.labels.reshape(-1, 4).tolist() == [[1, 0, 0, 0]] * 120
    for row in np.flatnonzero(rows.labels[:, 0]):
        user, when = int(rows.groups[row]), int(rows.times[row])
        assert rows.sparse[row, :2].tolist() == [user, order[user][when]]
        assert history(rows, row) == order[user][:when]
    for row in range(len(rows.labels)):
        # Negatives stand where their positive stands: nothing but the movie tells them apart.
        positive = row - row % 4
        np.testing.assert_array_equal(rows.sparse[row, [0, 2, 3, 4, 5]], rows.sparse[positive, [0, 2, 3, 4, 5]])
        assert history(rows, row) == history(rows, positive)
    ages = rows.times[0] - rows.event_times[: rows.history_end[0]]
    assert (ages > 0).all()


def test_each_users_last_movie_is_held_out_and_in_no_history(movielens: Any, folder: Path) -> None:
    rows, order = read_ml_1m_next(folder), sequences(movielens)
    held = [row for row in rows.held_out if rows.labels[row, 0]]
    assert [int(rows.sparse[row, 1]) for row in held] == [order[user][-1] for user in sorted(order)]
    assert not set(rows.train) & set(rows.held_out)
    pool = rows.events[:, 0].tolist()
    assert pool == [item for user in sorted(order) for item in order[user][:-1]]


def test_negatives_are_movies_that_the_user_did_not_rate(movielens: Any, folder: Path) -> None:
    rows, order = read_ml_1m_next(folder, negatives=40), sequences(movielens)
    held_out = set(rows.held_out.tolist())
    drawn: set[int] = set()
    for row in np.flatnonzero(rows.labels[:, 0] == 0):
        user, item = int(rows.groups[row]), int(rows.sparse[row, 1])
        assert item not in (order[user] if row in held_out else order[user][:-1])
        drawn.add(item)
    assert drawn == {item for item in range(1, 25) for items in order.values() if item not in items[:-1]}
    # Training does not know which movie is held out, so it is drawn as often as others.
    last = {(user, items[-1]) for user, items in order.items()}
    mine = [(int(rows.groups[r]), int(rows.sparse[r, 1])) for r in rows.train if not rows.labels[r, 0]]
    assert sum(pair in last for pair in mine) / len(mine) == pytest.approx(1 / 5, abs=0.03)


def test_popularity_counts_the_training_events_of_others(movielens: Any, folder: Path) -> None:
    rows, order = read_ml_1m_next(folder), sequences(movielens)
    for row in range(len(rows.labels)):
        user, item, when = int(rows.groups[row]), int(rows.sparse[row, 1]), int(rows.times[row])
        others = sum(item in items[:-1] for other, items in order.items() if other != user)
        assert rows.dense[row].tolist() == pytest.approx([np.log1p(when) / 4, np.log1p(others) / 4], abs=1e-6)


def test_what_is_held_out_shows_in_no_training_row(movielens: Any, folder: Path, tmp_path: Path) -> None:
    before = read_ml_1m_next(folder)
    order = sequences(movielens)
    for row in movielens.ratings:
        if row[1] == order[row[0]][-1]:
            row[1] = next(item for item in range(1, 25) if item not in order[row[0]])
    after = read_ml_1m_next(movielens.million(tmp_path / "changed"))
    for name in ("sparse", "dense", "labels", "history_start", "history_end"):
        np.testing.assert_array_equal(getattr(before, name)[before.train], getattr(after, name)[after.train], name)
    np.testing.assert_array_equal(before.events, after.events)
    assert not np.array_equal(before.sparse[before.held_out], after.sparse[after.held_out])


def test_latest_keeps_each_users_latest_rows_and_whole_histories(movielens: Any, folder: Path) -> None:
    rows, order = read_ml_1m_next(folder, latest=2, negatives=1), sequences(movielens)
    positives = [row for row in rows.train if rows.labels[row, 0]]
    assert [(int(rows.groups[row]), int(rows.times[row])) for row in positives] == [
        (user, at) for user in sorted(order) for at in (17, 18)
    ]
    assert history(rows, positives[0]) == order[1][:17]


def test_it_trains_through_its_uri(folder: Path, small: Any) -> None:
    data = open_data(f"ml-1m:{folder}?task=next-item&negatives=3&latest=15", small)
    assert isinstance(data, Dataset)
    facts = data.describe()
    assert (facts["task"], facts["negatives"], facts["latest"]) == ("next-item", 3, 15)
    assert (facts["rows_train"], facts["rows_eval"]) == (6 * 15 * 4, 6 * 4)
    assert facts["base_rate"] == {"next": pytest.approx(0.25)}
    trainer = Trainer(GemTask(small, data))
    losses = trainer.fit(4)
    assert np.isfinite(losses).all()
    assert trainer.predict().logits.shape == (24, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("task=next", "ml-1m: option 'task' is one of ratings, next-item, found 'next'; did you mean 'next-item'?"),
        ("negatives=3", "ml-1m: option 'negatives' needs task=next-item"),
        ("task=next-item&negatives=0", "option 'negatives' must be a whole number of at least 1, found '0'"),
        ("task=next-item&last=3", "unknown option 'last'"),
    ],
)
def test_options_that_cannot_be_meant(folder: Path, options: str, message: str) -> None:
    with pytest.raises(NarrowgateError) as caught:
        open_data(f"ml-1m:{folder}?{options}")
    assert message in str(caught.value)


def test_the_small_set_takes_no_options(movielens: Any, tmp_path: Path) -> None:
    with pytest.raises(NarrowgateError, match=r"ml-100k: unknown option 'task' \(known: none\)"):
        open_data(f"ml-100k:{movielens.original(tmp_path)}?task=next-item")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": None}, "lacks offsets (expected user_id, offsets, item_id)"),
        ({"offsets": np.array([0, 5, 4, 60, 80, 100, 120])}, "offsets: expected 7 rising numbers from 0 to 120"),
        ({"offsets": np.array([0, 120])}, "offsets: expected 7 rising numbers from 0 to 120"),
        ({"user_id": np.array([1, 2, 3, 4, 5, 9])}, "user_id[5]: 9 is not in users.dat"),
        ({"item_id": np.full(120, -1)}, "item_id[0]: -1 is not in movies.dat"),
        ({"item_id": np.full(120, 1.5)}, "item_id: expected whole numbers [n], found float64 (120,)"),
    ],
)
def test_a_corrupt_npz_is_named(movielens: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NarrowgateError) as caught:
        read_ml_1m_next(compact(movielens, tmp_path, **changes))
    assert str(caught.value) == f"{tmp_path}/ml1m_chrono.npz: {message}"


def test_files_that_are_none(movielens: Any, tmp_path: Path) -> None:
    (compact(movielens, tmp_path) / "ml1m_chrono.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(NarrowgateError, match="expected an npz file"):
        read_ml_1m_next(tmp_path)
    (tmp_path / "ml1m_chrono.npz").unlink()
    movielens.million(tmp_path, ratings="ratings_sample.dat")
    with pytest.raises(NarrowgateError, match=r"needs the whole set, expected ratings.dat or ml1m_chrono.npz"):
        read_ml_1m_next(tmp_path)


def test_a_user_who_rated_everything_leaves_nothing_to_sample(movielens: Any, folder: Path) -> None:
    extra = [[1, item, 3, 500 + item] for item in range(1, 25) if item not in sequences(movielens)[1]]
    movielens.ratings = np.concatenate([movielens.ratings, extra])
    with pytest.raises(NarrowgateError, match="user 1 rated every movie"):
        read_ml_1m_next(movielens.million(folder))


def test_the_real_set(real: Callable[[str], Path]) -> None:
    rows = read_ml_1m_next(real("ml-1m"), negatives=1, latest=3)
    assert (rows.facts["users"], rows.facts["events"]) == (6040, 1_000_209)
    assert (len(rows.train), len(rows.held_out)) == (6040 * 3 * 2, 6040 * 2)
    assert len(rows.events) == 1_000_209 - 6040


def test_settings_of_the_quality_table_are_chosen_on_whole_questions(movielens: Any, folder: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "quality_table"
    split = runpy.run_path(str(script))["earlier_and_later"]
    for latest, expected in ((3, 1), (17, 2)):
        rows = read_ml_1m_next(folder, negatives=2, latest=latest)
        earlier, later = split(rows)
        assert sorted([*earlier, *later]) == rows.train.tolist()
        assert rows.labels[later].mean() == rows.labels[earlier].mean() == pytest.approx(1 / 3)
        assert len(later) == 6 * 3 * expected
        for user in range(1, 7):
            assert (
                rows.times[later][rows.groups[later] == user].min()
                > rows.times[earlier][rows.groups[earlier] == user].max()
            )
    ratings = read_ml_1m(folder)
    earlier, later = split(ratings)
    assert (len(earlier), len(later)) == (6 * 14, 6 * 2)


def test_a_quality_table_on_an_absent_gpu_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    script = Path(__file__).parents[2] / "scripts" / "quality_table"
    monkeypatch.setattr("sys.argv", [str(script), "--device", "cuda"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert runpy.run_path(str(script))["main"]() == 2
    assert capsys.readouterr().err == "quality_table: error: --device cuda: PyTorch finds no CUDA device here\n"
