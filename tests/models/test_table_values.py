"""What files of users hold beside plain values: stray quotes, packed bytes, large numbers, Parquet's own types."""

from __future__ import annotations

import bz2
import dataclasses
import datetime
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from narrowgate.models import Preset, open_data
from narrowgate.models.data.table import TableDataset
from narrowgate.precision.errors import NarrowgateError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SCHEMA = """\
labels: [click]
categorical: {user: 100, item: 100}
numeric: {price: {}}
user: user
split: {users: 0.2}
bad_rows: 5
"""
HISTORY = SCHEMA.replace(
    "split: {users: 0.2}", "timestamp: time\nhistory: {fields: {seen: 100}, times: at}\nsplit: {last: 0.2}"
)


def lines(count: int = 400) -> list[str]:
    draw = np.random.default_rng(0)
    return ["click,user,item,price", *(f"{i % 2},u{draw.integers(90)},i{i},{draw.random():.3f}" for i in range(count))]


def opened(path: Path, small: Preset, content: bytes | None = None, schema: str = SCHEMA) -> TableDataset:
    if content is not None:
        path.write_bytes(content)
    (path.parent / "schema.yaml").write_text(schema)
    training = dataclasses.replace(small.training, batch_size=40, steps=8, epochs=1)
    found = open_data(
        f"table:{path}?schema={path.parent / 'schema.yaml'}", dataclasses.replace(small, training=training)
    )
    assert isinstance(found, TableDataset)
    return found


def joined(rows: list[str], end: str = "\n") -> bytes:
    return (end.join(rows) + end).encode()


def rows_of(found: TableDataset) -> tuple[int, int]:
    facts = found.describe()
    return facts["rows_train"] + facts["rows_eval"], facts["bad_rows"]["count"]


OPEN = "found a quote that no other one on its line closes"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("changed", "reasons"),
    [
        ({300: '1,"u1,i1,3'}, [f"line 301: {OPEN}"]),
        ({100: '1,"u1,i1,3', 300: '1,u1",i1,3'}, [f"line 101: {OPEN}"]),
        ({100: '1,u1,"i1', 101: 'b",3'}, [f"line 101: {OPEN}", "line 102: expected 4 fields, found 2"]),
        ({400: '1,"u1,i1,3'}, ["line 401: "]),
        ({100: '1,a"b,"c,3', 200: "1,u1", 300: '1,"","'}, [f"line 101: {OPEN}", "line 201: exp", "line 301: "]),
        ({100: '1,"u,""1""","i",3', 200: '1,5" u,i"1",3', 300: '"1","u"x,"",3'}, []),
    ],
)
def test_a_quote_that_nothing_closes_costs_its_own_line(
    changed: dict[int, str], reasons: list[str], end: str, small: Preset, tmp_path: Path
) -> None:
    rows = lines()
    for place, text in changed.items():
        rows[place] = text
    if not reasons:
        assert rows_of(opened(tmp_path / "a.csv", small, joined(rows, end))) == (400, 0)
        return
    with pytest.warns(UserWarning, match="bad rows left out"):
        found = opened(tmp_path / "a.csv", small, joined(rows, end))
    assert rows_of(found) == (400 - len(reasons), len(reasons))
    said = found.describe()["bad_rows"]["first"]
    assert all(one.startswith(reason) for one, reason in zip(said, reasons, strict=True))


def test_bad_rows_are_named_in_their_order_whatever_is_wrong_with_them(small: Preset, tmp_path: Path) -> None:
    """Lines that cannot be split are found before values of lines that can."""
    rows = lines()
    for place in range(10, 60, 10):
        rows[place] = "7,u1,i1,1.0" if place % 20 else "1,u1"
    with pytest.warns(UserWarning, match="5 bad rows left out: line 11: column 'click'.*; line 21: expected 4 fields"):
        found = opened(tmp_path / "a.csv", small, joined(rows, "\n"))
    said = found.describe()["bad_rows"]["first"]
    assert [one.partition(":")[0] for one in said] == [f"line {place + 1}" for place in range(10, 60, 10)]
    for place in (300, 310):
        rows[place] = "1,u1"
    with pytest.raises(NarrowgateError, match=r"found more than 5 bad rows \(bad_rows\): line 11: .*; line 21: "):
        opened(tmp_path / "a.csv", small, joined(rows, "\n"))


def test_a_file_of_bad_lines_alone_has_no_rows(small: Preset, tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="2 bad rows left out"),
        pytest.raises(NarrowgateError, match="too few rows: 0 to train on"),
    ):
        opened(tmp_path / "a.csv", small, joined([lines()[0], '1,"u1,i1,3', '0,"u1,i1,3']))


def zstd(content: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as packed:
        packed.write(content)
    return out.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.csv.bz2", bz2.compress), ("a.csv.zst", zstd), ("a.CSV.GZ", gzip.compress), ("a.tsv.bz2", bz2.compress)],
)
def test_packed_files_are_read_whole(name: str, pack: Any, small: Preset, tmp_path: Path) -> None:
    content = joined(lines(60_000))
    plain = opened(tmp_path / "plain.csv", small, content)
    found = opened(tmp_path / name, small, pack(content.replace(b",", b"\t") if ".tsv" in name else content))
    assert rows_of(found) == rows_of(plain) == (60_000, 0)
    assert found.describe()["base_rate"] == plain.describe()["base_rate"]


def numbers(found: TableDataset) -> np.ndarray:
    return np.concatenate([batch.dense[: batch.rows, 0].numpy() for batch in found.eval_batches()])


@pytest.mark.parametrize(("first", "apart"), [(1_700_000_000, 1.0), (1_700_000_000_000, 1.0), (0.0, 1e-3), (1e12, 1e6)])
def test_numbers_that_differ_by_little_keep_their_differences(
    first: float, apart: float, small: Preset, tmp_path: Path
) -> None:
    rows = [f"{i % 2},u{i % 90},i1,{first + apart * i!r}" for i in range(400)]
    found = numbers(opened(tmp_path / "a.csv", small, joined([lines()[0], *rows])))
    held_out = len(found)
    assert len(np.unique(found)) == held_out > 40
    assert abs(found.mean()) < 0.3
    assert found.std() == pytest.approx(1, abs=0.15)


def test_a_number_that_never_varies_is_zero_and_one_out_of_range_is_a_bad_row(small: Preset, tmp_path: Path) -> None:
    rows = [f"{i % 2},u{i % 90},i1,1700000000000.3" for i in range(400)]
    assert np.abs(numbers(opened(tmp_path / "a.csv", small, joined([lines()[0], *rows])))).max() < 1e-3
    rows[7] = "1,u1,i1,1e39"
    with pytest.warns(UserWarning, match="line 9: column 'price': found '1e39', expected a number of at most 3.4"):
        assert np.isfinite(numbers(opened(tmp_path / "a.csv", small, joined([lines()[0], *rows])))).all()


def table(count: int = 60, **changed: Any) -> dict[str, Any]:
    start = datetime.datetime(2026, 1, 1)
    times = [start + datetime.timedelta(hours=i) for i in range(count)]
    return {
        "click": [i % 2 for i in range(count)],
        "user": [f"u{i % 7}" for i in range(count)],
        "item": list(range(count)),
        "price": [float(i) for i in range(count)],
        "time": times,
        "seen": [[1, 2] for _ in range(count)],
        "at": [[time - datetime.timedelta(hours=2), time - datetime.timedelta(hours=1)] for time in times],
    } | changed


def of_parquet(columns: dict[str, Any], small: Preset, tmp_path: Path) -> TableDataset:
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    return opened(tmp_path / "a.parquet", small, schema=HISTORY)


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e20, 2.0**63, 1.5])
def test_a_number_that_is_no_id_is_a_bad_row(value: float, small: Preset, tmp_path: Path) -> None:
    item = [float(i) for i in range(60)]
    item[4] = value
    with pytest.warns(UserWarning, match="row 5: column 'item': found .* expected a whole number or a text"):
        assert rows_of(of_parquet(table(item=item), small, tmp_path)) == (59, 1)
    # Among others in a list it counts as unknown, as a missing one does.
    seen: list[Any] = [[1.0, 2.0] for _ in range(60)]
    seen[4] = [1.0, value]
    assert rows_of(of_parquet(table(seen=seen), small, tmp_path)) == (60, 0)


def test_times_of_events_may_be_timestamps_and_lists_of_one_length(small: Preset, tmp_path: Path) -> None:
    plain = table()
    of_numbers = plain | {
        "time": [int(time.replace(tzinfo=datetime.timezone.utc).timestamp()) for time in plain["time"]],
        "at": [[int(t.replace(tzinfo=datetime.timezone.utc).timestamp()) for t in at] for at in plain["at"]],
    }
    fixed = plain | {"seen": pa.array(plain["seen"], pa.list_(pa.int64(), 2))}
    found = []
    for columns in (plain, of_numbers, fixed):
        batches = of_parquet(columns, small, tmp_path).eval_batches()
        found.append([(batch.events.tolist(), batch.offsets.tolist()) for batch in batches])
    assert found[0] == found[1] == found[2]
    assert found[0][0][0]


def test_an_empty_text_is_a_history_without_events(small: Preset, tmp_path: Path) -> None:
    schema = SCHEMA.replace("user: user\n", "user: user\nhistory: {fields: {seen: 100}}\n")
    columns = table()
    del columns["at"], columns["time"]
    columns["seen"] = ["" if i % 3 == 0 else None if i % 3 == 1 else "1|2" for i in range(60)]
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = opened(tmp_path / "a.parquet", small, schema=schema)
    lengths = np.concatenate([batch.offsets.diff()[: batch.rows].numpy() for batch in found.eval_batches()])
    assert set(lengths.tolist()) == {0, 2}
