"""MovieLens in its three layouts: the same rows, the split by time, and nothing that shows a held-out label."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from narrowgate.models import Dataset, open_data
from narrowgate.models.data.movielens import read_ml_1m, read_ml_100k
from narrowgate.models.data.rows import RowData

COLUMNS = ("sparse", "dense", "labels", "groups", "times", "history_start", "history_end", "events", "event_times",
           "train", "held_out")  # fmt: skip
INPUTS = tuple(name for name in COLUMNS if name != "labels")


def assert_same(one: RowData, two: RowData, names: tuple[str, ...] = COLUMNS) -> None:
    for name in names:
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
    np.testing.assert_array_equal(one.bags[0], two.bags[0])


def test_both_layouts_of_the_small_set_give_the_same_rows(movielens: Any, tmp_path: Path) -> None:
    original, recbole = movielens.original(tmp_path / "a"), movielens.recbole(tmp_path / "b")
    assert_same(read_ml_100k(original), read_ml_100k(recbole))


def test_the_order_of_lines_means_nothing(movielens: Any, tmp_path: Path) -> None:
    before = read_ml_100k(movielens.original(tmp_path / "a"))
    movielens.ratings = movielens.ratings[::-1]
    assert_same(before, read_ml_100k(movielens.original(tmp_path / "b")))


def test_line_ends_of_other_systems_are_read(movielens: Any, tmp_path: Path) -> None:
    folder = movielens.original(tmp_path)
    before = read_ml_100k(folder)
    for name in ("u.data", "u.user"):
        (folder / name).write_bytes((folder / name).read_bytes().replace(b"\n", b"\r\n"))
    assert_same(before, read_ml_100k(folder))


def test_the_million_layout_gives_the_same_histories_and_labels(movielens: Any, tmp_path: Path) -> None:
    small, million = read_ml_100k(movielens.original(tmp_path / "a")), read_ml_1m(movielens.million(tmp_path / "b"))
    assert_same(small, million, tuple(name for name in COLUMNS if name != "sparse"))
    np.testing.assert_array_equal(small.sparse[:, :4], million.sparse[:, :4])


def test_a_sample_of_the_million_set_is_found_by_its_name(movielens: Any, tmp_path: Path) -> None:
    movielens.million(tmp_path, ratings="ratings_sample.dat")
    assert list(read_ml_1m(tmp_path).facts["files"]) == ["ratings_sample.dat", "movies.dat", "users.dat"]


def test_labels_are_the_two_thresholds(movielens: Any, tmp_path: Path) -> None:
    rows = read_ml_100k(movielens.original(tmp_path))
    ratings = movielens.ratings[np.lexsort((movielens.ratings[:, 1], movielens.ratings[:, 3], movielens.ratings[:, 0]))]
    assert rows.features.tasks == ("rating>=4", "rating==5")
    np.testing.assert_array_equal(rows.labels[:, 0], ratings[:, 2] >= 4)
    np.testing.assert_array_equal(rows.labels[:, 1], ratings[:, 2] == 5)


def test_each_users_latest_fifth_is_held_out(movielens: Any, tmp_path: Path) -> None:
    rows = read_ml_100k(movielens.original(tmp_path))
    assert np.bincount(rows.groups[rows.held_out])[1:].tolist() == [4] * 6
    for user in range(1, 7):
        mine = rows.groups == user
        held_out = np.isin(np.arange(len(mine)), rows.held_out)
        assert rows.times[mine & held_out].min() >= rows.times[mine & ~held_out].max()


def test_held_out_ratings_show_in_no_input(movielens: Any, tmp_path: Path) -> None:
    before = read_ml_100k(movielens.original(tmp_path / "a"))
    order = np.lexsort((movielens.ratings[:, 1], movielens.ratings[:, 3], movielens.ratings[:, 0]))
    held_out = order[before.held_out]
    movielens.ratings[held_out, 2] = 6 - movielens.ratings[held_out, 2]
    after = read_ml_100k(movielens.original(tmp_path / "b"))
    assert not np.array_equal(before.labels, after.labels)
    assert_same(before, after, INPUTS)


def test_a_rating_shows_in_no_row_that_is_not_later(movielens: Any, tmp_path: Path) -> None:
    before = read_ml_100k(movielens.original(tmp_path / "a"))
    order = np.lexsort((movielens.ratings[:, 1], movielens.ratings[:, 3], movielens.ratings[:, 0]))
    changed = before.train[7]
    movielens.ratings[order[changed], 2] = 6 - movielens.ratings[order[changed], 2]
    after = read_ml_100k(movielens.original(tmp_path / "b"))
    moved = (before.dense != after.dense).any(1)
    assert (before.times[moved] > before.times[changed]).all()
    place = int(np.flatnonzero((before.events != after.events).any(1))[0])
    shows = (before.history_start <= place) & (place < before.history_end)
    assert (before.times[shows] > before.times[changed]).all()


def test_running_means_are_those_of_earlier_training_ratings(movielens: Any, tmp_path: Path) -> None:
    rows = read_ml_100k(movielens.original(tmp_path))
    rating = movielens.ratings[
        np.lexsort((movielens.ratings[:, 1], movielens.ratings[:, 3], movielens.ratings[:, 0])), 2
    ]
    for row in range(len(rating)):
        for column, group in ((0, rows.sparse[:, 0]), (1, rows.sparse[:, 1])):
            seen = [r for r in rows.train if group[r] == group[row] and rows.times[r] < rows.times[row]]
            mean = (rating[seen].sum() + 5 * 3.5) / (len(seen) + 5) - 3.5
            assert rows.dense[row, column] == pytest.approx(np.log1p(len(seen)) / 4, abs=1e-6)
            assert rows.dense[row, 2 + column] == pytest.approx(mean, abs=1e-6)


def test_opens_through_its_name_and_batches(movielens: Any, small: Any, tmp_path: Path) -> None:
    data = open_data(f"ml-100k:{movielens.original(tmp_path)}", small)
    assert sum(batch.rows for batch in data.eval_batches()) == 24
    assert {"name", "sha256", "users", "items", "split", "rows_train", "base_rate"} <= data.describe().keys()


def test_real_movielens_100k(real: Callable[[str], Path]) -> None:
    data = open_data(f"ml-100k:{real('ml-100k')}", "gem-tiny")
    facts = data.describe()
    assert (facts["users"], facts["items"], facts["rows_train"], facts["rows_eval"]) == (943, 1682, 80367, 19633)
    assert facts["base_rate"] == {
        "rating>=4": pytest.approx(0.57269, abs=1e-5),
        "rating==5": pytest.approx(0.22115, abs=1e-5),
    }
    assert isinstance(data, Dataset)
    assert data.rows.labels.sum(0).tolist() == [55375, 21201]
    assert not np.array_equal(data.rows.bags[0], np.zeros_like(data.rows.bags[0]))


def test_real_movielens_1m(real: Callable[[str], Path]) -> None:
    data = open_data(f"ml-1m:{real('ml-1m')}", "gem-small")
    facts = data.describe()
    assert facts["rows_train"] > 3.9 * facts["rows_eval"]
    assert 0.55 < facts["base_rate"]["rating>=4"] < 0.62
    assert data.task_names == ("rating>=4", "rating==5")


def test_a_baseline_learns_on_real_movielens(real: Callable[[str], Path]) -> None:
    import torch
    from narrowgate.models import GemTask, get_preset
    from sklearn.metrics import log_loss, roc_auc_score

    preset = get_preset("gem-tiny")
    training = dataclasses.replace(preset.training, eval_batch_size=5000)
    task = GemTask.open(dataclasses.replace(preset, training=training), f"ml-100k:{real('ml-100k')}", steps=40)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.optimizer(model)
    for batch in task.train_batches(0):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    model.eval()
    part = task.predict(model, next(iter(task.eval_batches())))
    for place, base in enumerate(task.base_rates()):
        labels, scores = part.labels[:, place].numpy(), part.logits[:, place].double().sigmoid().numpy()
        entropy = -(base * np.log(base) + (1 - base) * np.log(1 - base))
        assert log_loss(labels, scores) / entropy < 1
        assert roc_auc_score(labels, scores) > 0.7
