"""Bad input: one clear line that names the file, the line and what was expected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from narrowgate.models import Preset, open_data
from narrowgate.precision.errors import NarrowgateError


def fault(uri: str, preset: str | Preset = "gem-tiny") -> str:
    with pytest.raises(NarrowgateError) as caught:
        open_data(uri, preset)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_unknown_source() -> None:
    assert "unknown data source 'ml-100'; did you mean 'ml-100k'?" in fault("ml-100:somewhere")
    assert "known: synthetic, ml-100k:DIR, ml-1m:DIR, criteo:FILE, table:FILE" in fault("movies")


@pytest.mark.parametrize("uri", ["ml-100k", "ml-100k:", "ml-1m"])
def test_source_without_its_folder(uri: str) -> None:
    assert re.search(r"needs its folder: ml-\w+:DIR, found", fault(uri))


def test_synthetic_takes_no_place() -> None:
    assert "'synthetic' takes no place, found 'synthetic:here'" in fault("synthetic:here")


def test_missing_folder(tmp_path: Path) -> None:
    assert f"ml-1m: folder '{tmp_path}/none' does not exist" in fault(f"ml-1m:{tmp_path}/none")
    assert "`scripts/get_data ml-100k` brings it" in fault(f"ml-100k:{tmp_path}/none")


def test_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("x")
    assert "is a file, expected the folder" in fault(f"ml-100k:{tmp_path / 'u.data'}")


def test_folder_without_the_files(tmp_path: Path) -> None:
    assert "holds no ratings: expected u.data, u.item, u.user or ml-100k.inter" in fault(f"ml-100k:{tmp_path}")
    assert "expected ratings.dat or exactly one ratings*.dat" in fault(f"ml-1m:{tmp_path}")
    assert fault(f"ml-1m:{tmp_path}").endswith("found nothing")


def test_folder_with_some_of_the_files(movielens: Any, tmp_path: Path) -> None:
    (movielens.original(tmp_path) / "u.item").unlink()
    assert "lacks u.item (expected u.data, u.item, u.user, found u.data, u.user)" in fault(f"ml-100k:{tmp_path}")


def test_several_rating_files(movielens: Any, tmp_path: Path) -> None:
    movielens.million(tmp_path, "ratings_a.dat")
    movielens.million(tmp_path, "ratings_b.dat")
    assert "found several: ratings_a.dat, ratings_b.dat" in fault(f"ml-1m:{tmp_path}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "1\t2\t3",
            r"expected 4 fields \(user id, item id, rating, timestamp\) separated by '\\t', found 3: '1\\t2\\t3'",
        ),
        ("1\t2\tgood\t5", "expected rating to be a whole number from 1 to 5, found 'good'"),
        ("1\t2\t6\t5", "expected rating to be a whole number from 1 to 5, found '6'"),
        ("1\t2\t3.5\t5", "expected rating to be a whole number from 1 to 5, found '3.5'"),
        ("1\t2\tnan\t5", "expected rating to be a whole number from 1 to 5, found 'nan'"),
        ("1\t2\t4\t-5", "expected timestamp to be a whole number of at least 0, found '-5'"),
        ("0\t2\t4\t5", "expected user id to be a whole number from 1 to"),
        ("1\t99\t4\t5", "item id 99 is not in u.item"),
        ("", r"expected 4 fields .* found 1: ''"),
    ],
)
def test_corrupt_rating_line(movielens: Any, tmp_path: Path, line: str, message: str) -> None:
    ratings = movielens.original(tmp_path) / "u.data"
    lines = ratings.read_text().splitlines()
    lines[16] = line
    ratings.write_text("\n".join(lines) + "\n")
    assert re.search(rf"u\.data:17: {message}", fault(f"ml-100k:{tmp_path}"))


def test_corrupt_line_of_the_layout_with_headers_counts_the_header(movielens: Any, tmp_path: Path) -> None:
    ratings = movielens.recbole(tmp_path) / "ml-100k.inter"
    lines = ratings.read_text().splitlines()
    lines[5] = "1\t2"
    ratings.write_text("\n".join(lines) + "\n")
    assert "ml-100k.inter:6: expected 4 fields" in fault(f"ml-100k:{tmp_path}")
    lines[0] = "user\titem"
    ratings.write_text("\n".join(lines) + "\n")
    assert "ml-100k.inter:1: expected the header 'user_id:token" in fault(f"ml-100k:{tmp_path}")


def test_corrupt_lines_of_the_other_files(movielens: Any, tmp_path: Path) -> None:
    folder = movielens.recbole(tmp_path)
    movies, users = folder / "ml-100k.item", folder / "ml-100k.user"
    good = movies.read_text(encoding="utf-8")
    movies.write_text(good.replace("Animation", "Animatoin", 1), encoding="utf-8")
    assert re.search(
        r"ml-100k\.item:\d+: unknown genre 'Animatoin' .*did you mean 'Animation'", fault(f"ml-100k:{folder}")
    )
    movies.write_text(good, encoding="utf-8")
    users.write_text(users.read_text().replace("\tF\t", "\tQ\t", 1))
    assert re.search(r"ml-100k\.user:\d+: expected gender to be one of F, M, found 'Q'", fault(f"ml-100k:{folder}"))


@pytest.mark.parametrize("content", [b"", b"\n", b"  \n"])
def test_empty_file(movielens: Any, tmp_path: Path, content: bytes) -> None:
    (movielens.original(tmp_path) / "u.data").write_bytes(content)
    assert fault(f"ml-100k:{tmp_path}").endswith("u.data: the file is empty")


def test_header_without_data(movielens: Any, tmp_path: Path) -> None:
    ratings = movielens.recbole(tmp_path) / "ml-100k.inter"
    ratings.write_text(ratings.read_text().splitlines()[0] + "\n")
    assert "ml-100k.inter: no data lines" in fault(f"ml-100k:{tmp_path}")


def test_bytes_that_are_no_text(movielens: Any, tmp_path: Path) -> None:
    ratings = movielens.original(tmp_path) / "u.data"
    lines = ratings.read_bytes().split(b"\n")
    lines[2] = b"\xff" + lines[2]
    ratings.write_bytes(b"\n".join(lines))
    assert "u.data:3: expected UTF-8 text, found byte 0xff" in fault(f"ml-100k:{tmp_path}")


def test_too_few_rows(movielens: Any, tmp_path: Path) -> None:
    assert "ml-100k: too few rows: 96 to train on and 24 held out" in fault(f"ml-100k:{movielens.original(tmp_path)}")
