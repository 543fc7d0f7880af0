"""A CSV or Parquet file as a stream of record batches that know their lines; what is wrong with it, by line."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...precision.errors import NarrowgateError, did_you_mean
from .rows import Ints

if TYPE_CHECKING:
    import pyarrow as pa

    from .table_schema import TableSchema

#: Of one read.
_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 26
#: Files that are unpacked as they are read, by their last suffix.
_PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_PARQUET_ROWS = 16384
#: Bad rows that a message or a report spells out.
_SPELLED_OUT = 5
_SHOWN = 60


def need_pyarrow() -> None:
    """Raise :class:`NarrowgateError` where pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise NarrowgateError("reading tables needs pyarrow: pip install 'narrowgate[data]'") from None


class BadRows:
    """Counts rows that cannot be used, and gives up past a limit.

    Args:
        path: of the file.
        unit: ``line`` or ``row``: what the numbers count.
        limit: bad rows to bear.
    """

    def __init__(self, path: Path, unit: str, limit: int) -> None:
        self.path = path
        self.unit = unit
        self.limit = limit
        self.count = 0
        self._first: list[tuple[int, str]] = []

    def add(self, number: int, what: str) -> None:
        """Note that row ``number`` is left out because of ``what``.

        Raises:
            NarrowgateError: too many; names the first ones.
        """
        self.count += 1
        # Not found in their order: rows that cannot be split come before values of rows that can.
        self._first = sorted([*self._first, (number, what)])[:_SPELLED_OUT]
        if self.count > self.limit:
            shown = "; ".join(self.first)
            raise NarrowgateError(f"{self.path}: found more than {self.limit} bad rows (bad_rows): {shown}")

    @property
    def first(self) -> list[str]:
        """Of those with the smallest numbers so far: where each is, and what was found."""
        return [f"{self.unit} {number}: {what}" for number, what in self._first]

    def warn(self) -> None:
        """Warn where rows were left out."""
        if self.count:
            warnings.warn(
                f"{self.path}: {self.count} bad rows left out: {'; '.join(self.first)}", UserWarning, stacklevel=4
            )


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of the file, in its order."""

    rows: pa.RecordBatch
    #: [n]: the line (CSV) or row (Parquet) of each, counted from 1.
    numbers: Ints


class TableFile:
    """One file and the columns that are read of it; nothing is open between two walks over it.

    Raises:
        NarrowgateError: pyarrow is missing, or the file is: not there, of another kind, empty, without a column.
    """

    def __init__(self, path: Path, schema: TableSchema, *, rows: int | None = None) -> None:
        need_pyarrow()
        if not path.is_file():
            what = "is a folder, expected a file" if path.is_dir() else "does not exist"
            raise NarrowgateError(f"data file '{path}' {what}")
        self.path = path
        self.schema = schema
        #: Only the first so many lines or rows are read.
        self.limit = rows
        name = path.name.lower()
        self.parquet = name.endswith((".parquet", ".pq"))
        self.unit = "row" if self.parquet else "line"
        self.packed = _PACKED.get(path.suffix.lower())
        default = "\t" if name.removesuffix(path.suffix.lower() if self.packed else "").endswith(".tsv") else ","
        self.delimiter = schema.delimiter or default
        self.sha256, self.records = self._measure()
        if self.limit is not None:
            self.records = min(self.records, self.limit)
        #: Number of the first row of data.
        self.first = 1 if self.parquet or not schema.header else 2
        self._check_columns()

    def bad_rows(self) -> BadRows:
        """Return a new count of this file's bad rows."""
        return BadRows(self.path, self.unit, self.schema.bad_rows)

    def pieces(self, bad: BadRows) -> Iterator[Piece]:
        """Yield the file's rows from the first on; lines with another number of fields go to ``bad``."""
        import pyarrow as pa

        end = self.first + self.records
        try:
            for piece in self._parquet() if self.parquet else self._csv(bad):
                keep = int(np.searchsorted(piece.numbers, end))
                if keep < len(piece.numbers):
                    if keep:
                        yield Piece(piece.rows.slice(0, keep), piece.numbers[:keep])
                    return
                yield piece
        except (pa.ArrowException, OSError, EOFError) as error:
            raise NarrowgateError(f"{self.path}: cannot be read: {_one_line(error)}") from None

    def _measure(self) -> tuple[str, int]:
        """Return the file's SHA-256 and how many rows of data it holds."""
        digest = hashlib.sha256()
        lines, last = 0, b"\n"
        try:
            with self.path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
            if self.parquet:
                return digest.hexdigest(), self._open_parquet().metadata.num_rows
            with self._open() as file:
                while block := file.read(_BLOCK_BYTES):
                    lines, last = lines + block.count(b"\n"), block[-1:]
        except (OSError, EOFError) as error:
            raise NarrowgateError(f"{self.path}: cannot be read: {_one_line(error)}") from None
        records = lines + (last != b"\n") - self.schema.header
        if records < 1:
            raise NarrowgateError(f"{self.path}: found no data lines, expected at least one")
        return digest.hexdigest(), records

    def _open(self) -> Any:
        """Open the file's bytes, unpacked by its last suffix."""
        import pyarrow as pa

        return pa.input_stream(str(self.path), compression=self.packed)

    def _check_columns(self) -> None:
        import pyarrow as pa

        try:
            names = self._open_parquet().schema_arrow.names if self.parquet else self._csv_names()
        except (pa.ArrowException, OSError) as error:
            raise NarrowgateError(f"{self.path}: cannot be read: {_one_line(error)}") from None
        for name in self.schema.used_columns():
            if name not in names:
                hint = did_you_mean(name, names) or f" (columns: {', '.join(names[:40])})"
                raise NarrowgateError(f"{self.path}: has no column '{name}'{hint}")
            if names.count(name) > 1:
                raise NarrowgateError(f"{self.path}: has {names.count(name)} columns '{name}', expected one")

    def _open_parquet(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet

        try:
            return pyarrow.parquet.ParquetFile(self.path)
        except (pa.ArrowException, OSError) as error:
            raise NarrowgateError(f"{self.path}: is no Parquet file: {_one_line(error)}") from None

    def _parquet(self) -> Iterator[Piece]:
        with self._open_parquet() as file:
            start = 1
            for batch in file.iter_batches(_PARQUET_ROWS, columns=self.schema.used_columns()):
                yield Piece(batch, np.arange(start, start + batch.num_rows))
                start += batch.num_rows

    def _csv_names(self) -> list[str]:
        """Return the columns' names: the schema's, or those of the first line."""
        import pyarrow as pa
        from pyarrow import csv

        if self.schema.columns:
            return list(self.schema.columns)
        with self._open() as file:
            line = next(_whole_lines(file))[0].partition(b"\n")[0]
        parse = csv.ParseOptions(delimiter=self.delimiter)
        return csv.read_csv(pa.BufferReader(line + b"\n"), parse_options=parse).column_names

    def _csv(self, bad: BadRows) -> Iterator[Piece]:
        names, at = self._csv_names(), 1
        with self._open() as file:
            for block, count in _whole_lines(file):
                first, at = at, at + count
                if first == 1 and self.schema.header:
                    block, first = block.partition(b"\n")[2], 2
                if block:
                    piece = self._csv_block(block, first, names, bad)
                    if len(piece.numbers):
                        yield piece

    def _csv_block(self, block: bytes, first: int, names: list[str], bad: BadRows) -> Piece:
        """Read whole lines, of which ``first`` is the number of the first.

        The reader looks for the end of a quoted value behind the end of a line, too, and takes what it passes for one
        row. So lines whose last value is open are found here, wherever it returns fewer rows than there are lines.
        """
        import pyarrow as pa

        lines = block.count(b"\n") + (not block.endswith(b"\n"))
        try:
            table, left_out = self._parsed(block, names)
            whole = table.num_rows + len(left_out) == lines
        except pa.ArrowInvalid:  # a value that no line of the block closes
            table, left_out, whole = None, {}, False
        places = np.arange(lines)
        wrong: dict[int, str] = {}
        if not whole:
            block, open_ended = _without_open_ends(block, self.delimiter)
            places = np.delete(places, open_ended)
            wrong = dict.fromkeys(open_ended, "found a quote that no other one on its line closes")
            table, left_out = self._parsed(block, names) if len(places) else (self._no_rows(), {})
            if table.num_rows + len(left_out) != len(places):
                raise NarrowgateError(
                    f"{self.path}: found {table.num_rows + len(left_out)} rows in {len(places)} lines from line {first}"
                    " on, expected lines that end in LF or CR LF"
                )
        wrong |= {int(places[at]): text for at, text in left_out.items()}
        for place in sorted(wrong):
            if first + place < self.first + self.records:
                bad.add(first + place, wrong[place])
        return Piece(_one_batch(table), first + np.delete(places, list(left_out)))

    def _no_rows(self) -> pa.Table:
        import pyarrow as pa

        return pa.table({name: pa.array([], pa.binary()) for name in self.schema.used_columns()})

    def _parsed(self, block: bytes, names: list[str]) -> tuple[pa.Table, dict[int, str]]:
        """Parse lines; return the rows, and by their places in the block the lines that are none, with the reason."""
        import pyarrow as pa
        from pyarrow import csv

        left_out: dict[int, str] = {}

        def skip(row: Any) -> str:
            wrong = f"expected {row.expected_columns} fields, found {row.actual_columns}: {_quote(row.text)}"
            left_out[row.number - 1] = wrong
            return "skip"

        # Every column as bytes: what is wrong with a value is found and said here, not by the reader. One thread, as
        # only that knows the numbers of lines.
        table = csv.read_csv(
            pa.BufferReader(block),
            csv.ReadOptions(use_threads=False, block_size=max(len(block), 1), column_names=names),
            csv.ParseOptions(delimiter=self.delimiter, ignore_empty_lines=False, invalid_row_handler=skip),
            csv.ConvertOptions(
                column_types=dict.fromkeys(self.schema.used_columns(), pa.binary()),
                include_columns=self.schema.used_columns(),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        return table, left_out


def _whole_lines(file: Any) -> Iterator[tuple[bytes, int]]:
    """Yield blocks that end where a line does, and how many lines each has; the last may lack its line's end."""
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        head, end, tail = (rest + block).rpartition(b"\n")
        if end:
            yield head + end, head.count(b"\n") + 1
            rest = tail
        else:
            rest = tail
            if len(rest) > _LONGEST_LINE:
                raise OSError(f"a line is longer than {_LONGEST_LINE} bytes")
    if rest:
        yield rest, 1


def _without_open_ends(block: bytes, delimiter: str) -> tuple[bytes, list[int]]:
    """Leave out the lines whose last value begins with a quote that is not closed; return their places too."""
    d = re.escape(delimiter.encode())
    closed = rb'"(?:[^"]|"")*"[^%b]*' % d
    # Values in quotes, which may be followed by more, and values that begin otherwise.
    whole = re.compile(rb'(?:%b|(?!")[^%b]*)(?:%b(?:%b|(?!")[^%b]*))*' % (closed, d, d, closed, d))
    lines = block.split(b"\n")
    found = [place for place, line in enumerate(lines) if b'"' in line and not whole.fullmatch(line)]
    for place in reversed(found):
        del lines[place]
    return b"\n".join(lines), found


def _one_batch(table: Any) -> pa.RecordBatch:
    import pyarrow as pa

    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def _quote(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
