"""A user's CSV or Parquet file: values, splits, shuffling, bad rows, memory, a training on it."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.models import Batch, GemTask, Preset, TrainingConfig, open_data
from narrowgate.models.data.balance import Balance
from narrowgate.models.data.loader import BatchSource
from narrowgate.models.data.table import TableDataset
from narrowgate.precision.errors import NarrowgateError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SCHEMA = """\
labels: [click]
categorical:
  user: 1000
  item: {rows: 500, table: item}
numeric: {price: {log: true}, age: {}}
multi_hot:
  tags: {rows: 40, width: 3}
history:
  fields: {seen: {rows: 500, table: item}, did: 8}
  times: at
user: user
timestamp: time
split: {last: 0.25}
shuffle: 64
"""


def columns(count: int = 200) -> dict[str, list[Any]]:
    """Rows with everything that a schema can name; ``item`` is the row's number."""
    generator = np.random.default_rng(5)
    lengths = generator.integers(0, 9, count)
    times = 1_700_000_000 + 60 * np.arange(count)
    return {
        "click": [int(x) for x in generator.random(count) < 0.4],
        "user": [f"u{x}" for x in generator.integers(0, 12, count)],
        "item": list(range(1, count + 1)),
        "price": [None if x < 0.2 else float(np.round(100 * x, 3)) for x in generator.random(count)],
        "age": [int(x) for x in generator.integers(18, 80, count)],
        "tags": [[f"t{x}" for x in generator.integers(0, 30, n)] for n in generator.integers(0, 6, count)],
        "seen": [[int(x) for x in generator.integers(1, count, n)] for n in lengths],
        "did": [["view", "buy", "skip"][: n % 3 + 1] * 9 for n in lengths],
        "at": [[int(t) - 2 ** (n - i) for i in range(n)] for n, t in zip(lengths, times, strict=True)],
        "time": [int(t) for t in times],
    }


def write_csv(path: Path, data: dict[str, list[Any]], schema: str = SCHEMA, delimiter: str = ",") -> str:
    def text(value: Any) -> str:
        return "" if value is None else "|".join(map(str, value)) if isinstance(value, list) else str(value)

    lines = [delimiter.join(data), *(delimiter.join(map(text, row)) for row in zip(*data.values(), strict=True))]
    content = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    (path.parent / (path.name.split(".")[0] + ".yaml")).write_text(schema)
    return f"table:{path}"


@pytest.fixture
def data() -> dict[str, list[Any]]:
    found = columns()
    found["did"] = [did[: len(seen)] for did, seen in zip(found["did"], found["seen"], strict=True)]
    return found


def opened(uri: str, small: Preset, **training: Any) -> TableDataset:
    preset = dataclasses.replace(small, training=dataclasses.replace(small.training, **training))
    found = open_data(uri, preset)
    assert isinstance(found, TableDataset)
    return found


def fault(uri: str, small: Preset) -> str:
    with pytest.raises(NarrowgateError) as caught:
        open_data(uri, small)
    return str(caught.value)


def rows_of(batches: Any) -> list[tuple[Any, ...]]:
    """Every row of batches as plain values."""
    rows = []
    for b in batches:
        for i in range(b.rows):
            at = slice(int(b.offsets[i]), int(b.offsets[i + 1]))
            bags = tuple(tuple(bag[i].tolist()) for bag in b.bags)
            rows.append(
                (
                    tuple(b.sparse[i].tolist()),
                    bags,
                    tuple(b.dense[i].tolist()),
                    tuple(map(tuple, b.events[at].tolist())),
                    tuple(b.labels[i].tolist()),
                    int(b.groups[i]),
                )
            )
    return rows


def same(a: Batch, b: Batch) -> bool:
    names = ("sparse", "dense", "events", "event_rows", "offsets", "labels", "groups")
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in names)


def test_csv_tsv_gzip_and_parquet_give_the_same_rows(data: Any, small: Preset, tmp_path: Path) -> None:
    sources = [write_csv(tmp_path / "a.csv", data), write_csv(tmp_path / "b.csv.gz", data)]
    sources.append(write_csv(tmp_path / "c.tsv", data, delimiter="\t"))
    parquet.write_table(pa.table(data), tmp_path / "d.parquet", row_group_size=37)
    (tmp_path / "d.yaml").write_text(SCHEMA)
    sources.append(f"table:{tmp_path / 'd.parquet'}")
    found = [rows_of(opened(uri, small).eval_batches()) for uri in sources]
    assert len(found[0]) == 50
    assert all(other == found[0] for other in found[1:])


def test_values_become_ids_numbers_and_histories(data: Any, small: Preset, tmp_path: Path) -> None:
    source = opened(write_csv(tmp_path / "a.csv", data), small)
    rows = rows_of(source.eval_batches())
    held = slice(150, None)
    prices = [None if x is None else np.log1p(x) for x in data["price"]]
    known = [x for x in prices[:150] if x is not None]
    ids: dict[Any, int] = {}
    for row, price, seen, at, time, tags, label in zip(
        rows, prices[held], data["seen"][held], data["at"][held], data["time"][held], data["tags"][held],
        data["click"][held], strict=True,
    ):  # fmt: skip
        sparse, bags, dense, events, labels, _ = row
        expected = 0 if price is None else (price - np.mean(known)) / np.std(known)
        assert dense[0] == pytest.approx(expected, abs=1e-5)
        assert labels == (label,)
        assert len(events) == min(len(seen), 6), "two of eight tokens are the summary's"
        for event, item, t in zip(events, seen[-6:], at[-6:], strict=True):
            assert ids.setdefault(item, event[0]) == event[0]
            assert 1 <= event[0] < 500
            assert event[2] == 1 + int(np.log2(time - t))
        assert [x > 0 for x in bags[0]] == [len(tags) > i for i in range(3)]
        assert 1 <= sparse[0] < 1000
    item = {row[0][1]: number for row, number in zip(rows, data["item"][held], strict=True)}
    assert all(ids.get(number, place) == place for place, number in item.items()), "history and candidate share ids"
    assert len(set(ids.values())) > 0.85 * len(ids)
    assert source.base_rates() == [pytest.approx(np.mean(data["click"][:150]))]
    groups = {row[5] for row in rows}
    assert len(groups) == len(set(data["user"][held]))


def with_times(preset: Preset) -> Preset:
    return dataclasses.replace(preset, model=dataclasses.replace(preset.model, time_buckets=16))


def test_times_travel_with_their_events_where_the_model_asks(data: Any, small: Preset, tmp_path: Path) -> None:
    uri = write_csv(tmp_path / "a.csv", data)
    plain, timed = opened(uri, small), opened(uri, with_times(small))
    batches = list(timed.eval_batches())
    assert rows_of(batches) == rows_of(plain.eval_batches())
    assert all(batch.event_times is None for batch in plain.eval_batches())
    found = []
    for batch in batches:
        assert batch.event_times is not None
        ends = batch.offsets.tolist()
        found += [batch.event_times[first:last].tolist() for first, last in itertools.pairwise(ends)]
        assert not batch.event_times[ends[-1] :].any()
    assert found[:50] == [at[-6:] for at in data["at"][150:]]
    # Shuffled in several buffers.
    training = {tuple(at[-6:]) for at in data["at"][:150]}
    for batch in itertools.islice(timed.train_batches(0), 6):
        assert batch.event_times is not None
        assert batch.event_times.shape == batch.event_rows.shape
        for first, last in itertools.pairwise(batch.offsets.tolist()):
            assert tuple(batch.event_times[first:last].tolist()) in training


def test_times_that_are_not_there_are_missed_in_one_line(data: Any, small: Preset, tmp_path: Path) -> None:
    uri = write_csv(tmp_path / "a.csv", data, SCHEMA.replace("  times: at\n", ""))
    needs = "model field 'time_buckets' needs the times of events, but"
    assert fault(uri, with_times(small)) == f"{tmp_path}/a.csv: {needs} its schema has no field 'history.times'"
    (tmp_path / "b.txt").write_text("1\t" + "\t".join(["2"] * 13 + ["0a1b2c3d"] * 26) + "\n")
    assert fault(f"criteo:{tmp_path}/b.txt", with_times(small)) == f"criteo: {needs} there is no history"


def test_hashes_are_the_same_everywhere() -> None:
    from narrowgate.models.data.table_columns import bucket, hash_texts

    texts = pa.array([b"", b"a", b"b", None, b"item 17", b"x" * 300, b"x" * 301], pa.binary())
    hashes = hash_texts(texts)
    assert [int(x) for x in hashes[:3]] == [int(hash_texts(texts.slice(i, 1))[0]) for i in range(3)]
    assert hash_texts(pa.array([b"a"], pa.binary()))[0] == reference_hash(b"a")
    assert hashes[4] == reference_hash(b"item 17")
    assert hashes[5] != hashes[6]
    assert bucket(hashes, texts, 100).tolist()[0::3] == [0, 0, 1 + int(hashes[6]) % 99]


def reference_hash(text: bytes) -> int:
    state, size = 0xCBF29CE484222325, 2**64
    for byte in text[:256]:
        state = (state ^ byte) * 0x100000001B3 % size
    state ^= len(text) * 0x9E3779B97F4A7C15 % size
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> shift)) * factor % size
    return state ^ (state >> 31)


def test_an_epoch_shows_every_training_row_once_in_the_seeds_order(data: Any, small: Preset, tmp_path: Path) -> None:
    source = opened(write_csv(tmp_path / "a.csv", data), small, batch_size=30, steps=10, epochs=2)
    assert source.steps == 10
    batches = list(source.train_batches(3))
    order = [row[0] for row in rows_of(batches)]
    assert len(order) == 300
    counted = {row: order.count(row) for row in set(order)}
    assert set(counted.values()) == {2}
    assert len(counted) == 150
    assert same(next(source.train_batches(3).starting_at(4)), batches[4])
    assert same(next(iter(pickle.loads(pickle.dumps(source)).train_batches(3))), batches[0])
    assert not same(next(iter(source.train_batches(4))), batches[0])


def test_balanced_batches_hold_the_same_rows_with_even_tokens(data: Any, small: Preset, tmp_path: Path) -> None:
    uri = write_csv(tmp_path / "a.csv", data)
    plain = opened(uri, small, batch_size=48, steps=3, epochs=1)
    even = opened(uri, small, batch_size=48, steps=3, epochs=1, balance=Balance(sub_batch=4, pool=3))
    spread = []
    for source in (plain, even):
        tokens = [int(batch.offsets[-1]) for batch in source.train_batches(0)]
        spread.append(max(tokens) - min(tokens))
        assert len({row[0] for row in rows_of(source.train_batches(0))}) == 144
    assert spread[1] < 0.5 * spread[0]


@pytest.mark.parametrize("split", ["{users: 0.3}", "{column: part, held_out: [b]}"])
def test_splits_by_user_and_by_column(split: str, data: Any, small: Preset, tmp_path: Path) -> None:
    data["part"] = ["b" if i % 5 == 0 else "a" for i in range(200)]
    source = opened(write_csv(tmp_path / "a.csv", data, SCHEMA.replace("{last: 0.25}", split)), small)
    held = {row[0] for row in rows_of(source.eval_batches())}
    train = {row[0] for row in rows_of(source.train_batches(0))}
    assert len(held) + len(train) == 200
    assert not held & train
    if "users" in split:
        assert 0 < len(held) < 120
        assert not {user for user, _ in held} & {user for user, _ in train}
    else:
        assert len(held) == 40


def test_bad_rows_are_left_out_counted_and_named(data: Any, small: Preset, tmp_path: Path) -> None:
    uri = write_csv(tmp_path / "a.csv", data)
    lines = (tmp_path / "a.csv").read_text().split("\n")
    lines[3] = lines[3].replace(",", ";", 2)
    cells = lines[5].split(",")
    lines[5] = ",".join(["2", *cells[1:]])
    cells = lines[11].split(",")
    lines[11] = ",".join([*cells[:4], "old", *cells[5:]])
    cells = lines[20].split(",")
    lines[20] = ",".join([*cells[:6], "1|2", "view", "5|6", cells[-1]])
    cells = lines[21].split(",")
    lines[21] = ",".join([*cells[:6], "1", "view", cells[-1], cells[-1]])
    lines.insert(30, "")
    (tmp_path / "a.csv").write_text("\n".join(lines))
    with pytest.warns(UserWarning, match="6 bad rows left out"):
        facts = opened(uri, small).describe()
    bad = facts["bad_rows"]
    assert bad["count"] == 6
    assert bad["first"][1:] == [
        "line 6: column 'click': found '2', expected 0 or 1",
        "line 12: column 'age': found 'old', expected a number",
        "line 21: column 'did': found 'view', expected as many events as 'seen' has",
        f"line 22: column 'at': found '{cells[-1]}', expected times before the row's own",
    ]
    assert bad["first"][0].startswith("line 4: expected 10 fields, found 8: '")
    assert facts["rows_train"] + facts["rows_eval"] == 195
    (tmp_path / "a.yaml").write_text(SCHEMA + "bad_rows: 2\n")
    message = fault(uri, small)
    assert message.startswith(
        f"{tmp_path / 'a.csv'}: found more than 2 bad rows (bad_rows): line 4: expected 10 fields"
    )
    assert "line 12: column 'age'" in message
    assert "\n" not in message


def test_bad_rows_of_parquet_are_numbered_by_row(data: Any, small: Preset, tmp_path: Path) -> None:
    data["click"][7] = 3
    parquet.write_table(pa.table(data), tmp_path / "a.parquet")
    (tmp_path / "a.yaml").write_text(SCHEMA)
    with pytest.warns(UserWarning, match="row 8: column 'click': found 3, expected 0 or 1"):
        opened(f"table:{tmp_path / 'a.parquet'}", small)


def test_reading_stops_at_the_rows_asked_for(data: Any, small: Preset, tmp_path: Path) -> None:
    facts = opened(write_csv(tmp_path / "a.csv", data) + "?rows=100", small).describe()
    assert (facts["rows_train"], facts["rows_eval"], facts["rows_read"]) == (75, 25, 100)


def test_a_file_larger_than_the_memory_it_gets_streams_through(small: Preset, tmp_path: Path) -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("no /proc to read the resident memory from")
    path, padding = tmp_path / "big.csv", "x" * 2000
    with path.open("w") as file:
        file.write("click,item,price,note\n")
        for i in range(50_000):
            file.write(f"{i % 3 == 0:d},{i % 97},{i % 11},{padding}\n")
    schema = "labels: [click]\ncategorical: {item: 50}\nnumeric: [price]\nshuffle: 512\n"
    (tmp_path / "big.yaml").write_text(schema)
    size = path.stat().st_size
    assert size > 100e6

    opened(f"table:{path}?rows=2000", small)  # what pyarrow itself takes

    def resident() -> int:
        return int(statm.read_text().split()[1]) * 4096

    before = resident()
    source = opened(f"table:{path}", small, batch_size=64, steps=600, epochs=1)
    peak, rows = resident(), 0
    for batch in source.train_batches(0):
        rows += batch.rows
        peak = max(peak, resident())
    assert rows == 600 * 64
    assert peak - before < 0.6 * size


def test_a_shuffle_of_more_rows_than_there_are_asks_for_no_more_than_the_file_has(
    data: Any, small: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def read(items: Any, ahead: int = 4) -> Any:
        asked.append(ahead)
        return items

    monkeypatch.setattr("narrowgate.models.data.table.read_ahead", read)
    place = write_csv(tmp_path / "a.csv", data, SCHEMA.replace("shuffle: 64", "shuffle: 1000000000"))
    source = opened(place, small)
    assert sum(batch.rows for batch in source.train_batches(0)) > 0
    assert max(asked) <= 4


def test_a_model_trains_on_a_table(data: Any, small: Preset, tmp_path: Path) -> None:
    task = GemTask.open(small, write_csv(tmp_path / "a.csv", data))
    model = task.build_model()
    for batch in task.train_batches(0):
        task.loss(model, batch).backward()
        break
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert task.describe()["data"]["name"] == "a.csv"
    assert sum(len(task.predict(model, batch).logits) for batch in task.eval_batches()) == 50


def criteo_line(generator: np.random.Generator, label: int) -> str:
    numbers = ["" if generator.random() < 0.2 else str(generator.integers(-2, 3000)) for _ in range(13)]
    categories = ["" if generator.random() < 0.1 else f"{generator.integers(2**32):08x}" for _ in range(26)]
    return "\t".join([str(label), *numbers, *categories])


@pytest.mark.parametrize("name", ["day.tsv", "train.txt.gz"])
def test_criteos_layout(name: str, small: Preset, tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    lines = [criteo_line(generator, int(i % 4 == 0)) for i in range(700)]
    lines[9] = lines[9][:-8] + "zzzzzzzz"
    content = ("\n".join(lines) + "\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.warns(UserWarning, match="line 10: column 'C26': found 'zzzzzzzz', expected eight hexadecimal digits"):
        source = opened(f"criteo:{tmp_path / name}?buckets=64", small)
    facts = source.describe()
    assert (facts["rows_train"], facts["rows_eval"]) == (599, 100)
    assert facts["base_rate"]["label"] == pytest.approx(0.25, abs=0.01)
    batch = next(iter(source.train_batches(0)))
    assert batch.sparse.shape == (32, 26)
    assert int(batch.sparse.max()) < 64
    assert batch.dense.shape == (32, 13)
    assert int(batch.offsets[-1]) == 0
    task = GemTask(small, source)
    task.loss(task.build_model(), batch).backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("labels: [click]", "labels: []"), "1:1: labels: found a list [], expected"),
        (("numeric:", "numerics:"), "5:1: numerics: unknown field; did you mean 'numeric'?"),
        (("width: 3", "widht: 3"), "7:20: multi_hot.tags.widht: unknown field; did you mean 'width'?"),
        (("rows: 40,", "rows: 1,"), "7:10: multi_hot.tags.rows: found 1, expected greater than or equal to 2"),
        (("{rows: 500, table: item}\nn", "{rows: 400, table: item}\nn"), "'item' has 400 rows and, for 'seen', 500"),
        (("timestamp: time\n", ""), "history.times needs the field timestamp"),
        (("{last: 0.25}", "{last: 0.25, users: 0.1}"), "expected exactly one of last, users, column"),
        (("age: {}", "click: {}"), "label 'click' is also an input"),
        (("shuffle: 64", "shuffle: 64\nshuffle: 5"), "found key 'shuffle' twice"),
    ],
)  # fmt: skip
def test_schema_faults_name_line_and_field(
    change: tuple[str, str], message: str, data: Any, small: Preset, tmp_path: Path
) -> None:
    assert change[0] in SCHEMA
    found = fault(write_csv(tmp_path / "a.csv", data, SCHEMA.replace(*change)), small)
    assert str(tmp_path / "a.yaml") in found
    assert message in found


def test_what_is_wrong_with_the_file_is_said(data: Any, small: Preset, tmp_path: Path) -> None:
    uri = write_csv(tmp_path / "a.csv", data)
    assert "none.csv' does not exist" in fault(f"table:{tmp_path / 'none.csv'}?schema={tmp_path / 'a.yaml'}", small)
    assert "none.yaml: cannot read the table's schema" in fault(f"table:{tmp_path / 'none.csv'}", small)
    assert "needs its file: table:FILE" in fault("table", small)
    assert "unknown option 'row'; did you mean 'rows'?" in fault(uri + "?row=3", small)
    assert "option 'rows' must be a whole number of at least 1, found '-3'" in fault(uri + "?rows=-3", small)
    (tmp_path / "a.yaml").write_text(SCHEMA.replace("user: 1000", "usr: 1000"))
    assert "has no column 'usr'; did you mean 'user'?" in fault(uri, small)
    (tmp_path / "e.csv").write_text("click,user\n")
    assert "found no data lines" in fault(f"table:{tmp_path / 'e.csv'}?schema={tmp_path / 'a.yaml'}", small)
    (tmp_path / "a.yaml").write_text(SCHEMA)
    (tmp_path / "p.parquet").write_text("no parquet")
    assert "is no Parquet file" in fault(f"table:{tmp_path / 'p.parquet'}?schema={tmp_path / 'a.yaml'}", small)
    (tmp_path / "g.csv.gz").write_bytes(gzip.compress(b"click\n1\n")[:-9])
    assert "g.csv.gz: cannot be read" in fault(f"table:{tmp_path / 'g.csv.gz'}?schema={tmp_path / 'a.yaml'}", small)
    assert "too few rows: 15 to train on and 5 held out" in fault(uri + "?rows=20", small)
    data["click"] = [0] * 200
    assert "label 'click' is 0 in every training row" in fault(write_csv(tmp_path / "a.csv", data), small)


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, small: Preset) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert fault("table:x.csv", small) == "reading tables needs pyarrow: pip install 'narrowgate[data]'"


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "narrowgate.gates", "gate", "fp8-row", "--data", f"criteo:{tmp_path}/none.tsv"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    opening, said = ran.stderr.splitlines()
    assert opening.startswith("opening gem-tiny on criteo:")
    assert said == f"narrowgate: data file '{tmp_path}/none.tsv' does not exist"


def test_all_sources_have_what_a_task_needs(data: Any, small: Preset, tmp_path: Path) -> None:
    source: BatchSource = opened(write_csv(tmp_path / "a.csv", data), small)
    assert isinstance(source.training, TrainingConfig)
    assert set(source.describe()) >= {"name", "sha256", "split", "rows_train", "rows_eval", "tasks", "base_rate"}
