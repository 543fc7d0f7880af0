"""A CSV or Parquet file as a stream of record batches that know their lines; what is wrong with it, by line."""

from __future__ import annotations

import gzip
import hashlib
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

#: Of one read; the reader keeps some tens of them ahead, and a line must fit into one.
_BLOCK_BYTES = 1 << 20
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
        self.first: list[str] = []

    def add(self, number: int, what: str) -> None:
        """Note that row ``number`` is left out because of ``what``.

        Raises:
            NarrowgateError: too many; names the first ones.
        """
        self.count += 1
        if len(self.first) < _SPELLED_OUT:
            self.first.append(f"{self.unit} {number}: {what}")
        if self.count > self.limit:
            shown = "; ".join(self.first)
            raise NarrowgateError(f"{self.path}: found more than {self.limit} bad rows (bad_rows): {shown}")

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
        default = "\t" if name.removesuffix(".gz").endswith(".tsv") else ","
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
        packed = self.path.name.lower().endswith(".gz")
        try:
            with self.path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
                    if not (packed or self.parquet):
                        lines, last = lines + block.count(b"\n"), block[-1:]
            if packed:
                with gzip.open(self.path) as file:
                    while block := file.read(_BLOCK_BYTES):
                        lines, last = lines + block.count(b"\n"), block[-1:]
        except (OSError, EOFError) as error:
            raise NarrowgateError(f"{self.path}: cannot be read: {_one_line(error)}") from None
        if self.parquet:
            return digest.hexdigest(), self._open_parquet().metadata.num_rows
        records = lines + (last != b"\n") - self.schema.header
        if records < 1:
            raise NarrowgateError(f"{self.path}: found no data lines, expected at least one")
        return digest.hexdigest(), records

    def _check_columns(self) -> None:
        import pyarrow as pa

        try:
            names = self._open_parquet().schema_arrow.names if self.parquet else self._open_csv(None).schema.names
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

    def _open_csv(self, on_bad: Any) -> Any:
        import pyarrow as pa
        from pyarrow import csv

        # Every column as bytes: what is wrong with a value is found and said here, not by the reader. One thread, as
        # only that knows the numbers of lines.
        used = None if on_bad is None else self.schema.used_columns()
        return csv.open_csv(
            pa.input_stream(str(self.path)),
            csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES, column_names=self.schema.columns),
            csv.ParseOptions(
                delimiter=self.delimiter, ignore_empty_lines=False, invalid_row_handler=on_bad or (lambda row: "skip")
            ),
            csv.ConvertOptions(
                column_types=dict.fromkeys(self.schema.used_columns(), pa.binary()),
                include_columns=used,
                null_values=[""],
                strings_can_be_null=True,
            ),
        )

    def _csv(self, bad: BadRows) -> Iterator[Piece]:
        end = self.first + self.records
        # Lines left out that no batch has passed yet, and what to say of them: the reader calls back from inside.
        left_out: list[int] = []
        said: list[tuple[int, str]] = []

        def skip(row: Any) -> str:
            if row.number < end:
                left_out.append(row.number)
                wrong = f"expected {row.expected_columns} fields, found {row.actual_columns}: {_quote(row.text)}"
                said.append((row.number, wrong if len(said) <= bad.limit else ""))
            return "skip"

        at = self.first
        with self._open_csv(skip) as reader:
            for batch in reader:
                for number, wrong in said:
                    bad.add(number, wrong)
                said.clear()
                # The reader may be ahead: lines left out that lie beyond this batch wait for the next.
                numbers = np.arange(at, at + batch.num_rows + len(left_out))
                numbers = numbers[~np.isin(numbers, left_out)][: batch.num_rows]
                if batch.num_rows:
                    yield Piece(batch, numbers)
                    at = int(numbers[-1]) + 1
                    left_out[:] = [number for number in left_out if number >= at]
        for number, wrong in said:
            bad.add(number, wrong)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def _quote(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
