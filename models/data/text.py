"""Delimited text, read whole and checked: every fault names its file and line."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...precision.errors import NarrowgateError

_SHOWN = 60


class TextTable:
    """The fields of a delimited file, by column.

    Args:
        path: the file.
        separator: between fields.
        fields: names of the columns, for messages; each line must have as many.
        encoding: of the file.
        header: the first line to expect, or None for a file that starts with data.

    Raises:
        NarrowgateError: empty file, wrong encoding, or a line with another number of fields.
    """

    def __init__(
        self, path: Path, separator: str, fields: tuple[str, ...], *, encoding: str = "utf-8", header: str | None = None
    ) -> None:
        self.path = path
        self.fields = fields
        raw = path.read_bytes()
        self.sha256 = hashlib.sha256(raw).hexdigest()
        lines = _decode(path, raw, encoding).replace("\r\n", "\n").removesuffix("\n").split("\n")
        self._first_line = 1
        if header is not None:
            if lines[0] != header:
                raise self._fault(0, f"expected the header {_quote(header)}, found {_quote(lines[0])}")
            lines, self._first_line = lines[1:], 2
        if not lines or lines == [""]:
            raise NarrowgateError(f"{path}: no data lines, expected {separator.join(fields)!r}")
        split = [line.split(separator) for line in lines]
        for index, parts in enumerate(split):
            if len(parts) != len(fields):
                raise self._fault(
                    index,
                    f"expected {len(fields)} fields ({', '.join(fields)}) separated by {separator!r}, found"
                    f" {len(parts)}: {_quote(lines[index])}",
                )
        self._columns = list(zip(*split, strict=True))

    def __len__(self) -> int:
        return len(self._columns[0])

    def text(self, field: str) -> tuple[str, ...]:
        """Return a column as it stands in the file."""
        return self._columns[self.fields.index(field)]

    def integers(self, field: str, low: int, high: int = 2**53) -> NDArray[np.int64]:
        """Return a column of whole numbers (``3``, ``3.0``) within ``[low, high]``.

        Raises:
            NarrowgateError: naming the first line that holds something else.
        """
        column = self.text(field)
        try:
            values = np.asarray(column, dtype=np.float64)
        except ValueError:
            values = np.array([_number(entry) for entry in column])
        with np.errstate(invalid="ignore"):
            good = (values >= low) & (values <= high) & (values == np.floor(values))
        if not good.all():
            index = int(np.argmin(good))
            limit = f"from {low} to {high}" if high < 2**53 else f"of at least {low}"
            raise self._fault(index, f"expected {field} to be a whole number {limit}, found {_quote(column[index])}")
        return values.astype(np.int64)

    def one_of(self, field: str, known: tuple[str, ...]) -> NDArray[np.int64]:
        """Return each entry's place in ``known``, counted from 1.

        Raises:
            NarrowgateError: naming the first line that holds something else.
        """
        places = {word: 1 + place for place, word in enumerate(known)}
        column = self.text(field)
        for index, entry in enumerate(column):
            if entry not in places:
                raise self._fault(index, f"expected {field} to be one of {', '.join(known)}, found {_quote(entry)}")
        return np.array([places[entry] for entry in column], dtype=np.int64)

    def fault(self, index: int, what: str) -> NarrowgateError:
        """Return the error that names the line of data row ``index``, counted from 0."""
        return self._fault(index, what)

    def _fault(self, index: int, what: str) -> NarrowgateError:
        return NarrowgateError(f"{self.path}:{self._first_line + index}: {what}")


def _decode(path: Path, raw: bytes, encoding: str) -> str:
    if not raw.strip():
        raise NarrowgateError(f"{path}: the file is empty")
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise NarrowgateError(
            f"{path}:{line}: expected {encoding.upper()} text, found byte 0x{raw[error.start]:02x}"
        ) from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _quote(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
