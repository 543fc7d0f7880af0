"""Columns of a record batch as arrays: ids hashed, numbers parsed, lists flattened; what cannot be used is marked.

CSV columns come as bytes, Parquet columns in their own types; both give the same arrays for the same values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from .rows import Ints

#: Its functions are made at import, where type checkers do not see them.
pc: Any = pyarrow.compute
Mask = NDArray[np.bool_]
_NUMBER = r"^[ \t]*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?[ \t\r]*$"
#: Bytes of a text that count for its hash.
_HASHED_BYTES = 256
_SHOWN = 40


@dataclass(eq=False)
class Faults:
    """Which rows of a piece cannot be used, and the first reason for each."""

    count: int
    bad: Mask = field(init=False)
    reasons: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bad = np.zeros(self.count, bool)

    def mark(self, rows: Mask, name: str, column: Any, expected: str) -> None:
        """Mark rows [n] whose value of ``column`` is not what is ``expected``."""
        for row in np.flatnonzero(rows & ~self.bad):
            self.reasons[int(row)] = f"column '{name}': found {_show(column[int(row)].as_py())}, expected {expected}"
        self.bad |= rows


def numbers(column: pa.Array, name: str, faults: Faults) -> tuple[NDArray[np.float64], Mask]:
    """Return the values [n] and which of them are there; an empty text, null and NaN are missing."""
    values, missing = _parsed(column)
    faults.mark(~missing & ~np.isfinite(values), name, column, "a number")
    return np.where(missing, 0.0, values), ~missing


def required_numbers(column: pa.Array, name: str, faults: Faults, expected: str) -> NDArray[np.float64]:
    """Return the values [n]; a missing one is a fault too."""
    values, there = numbers(column, name, faults)
    faults.mark(~there, name, column, expected)
    return values


def seconds(column: pa.Array, name: str, faults: Faults) -> Ints:
    """Return times [n] in whole seconds."""
    if is_dated(column.type):
        column = column.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
    values = required_numbers(column, name, faults, "a time in seconds")
    faults.mark(np.abs(values) >= 2.0**53, name, column, "a time in seconds")
    return np.where(faults.bad, 0, np.floor(values)).astype(np.int64)


def ids(column: pa.Array, name: str, rows: int, faults: Faults, *, hexadecimal: bool = False) -> Ints:
    """Return ids [n] in ``[0, rows)``: 0 where the value is missing, else a hash."""
    texts = _as_bytes(column, name, faults)
    if hexadecimal:
        good = pc.fill_null(pc.match_substring_regex(texts, "^[0-9a-fA-F]{8}$"), True)
        faults.mark(~_numpy(good), name, column, "eight hexadecimal digits")
    return bucket(hash_texts(texts), texts, rows)


def bucket(hashes: NDArray[np.uint64], texts: pa.Array, rows: int) -> Ints:
    """Return 0 where the text is missing or empty, else ``1 + hash mod (rows - 1)``."""
    empty = _numpy(pc.fill_null(pc.equal(pc.binary_length(texts), 0), True))
    return np.where(empty, 0, 1 + (hashes % np.uint64(rows - 1)).astype(np.int64))


def texts(column: pa.Array, name: str, faults: Faults) -> pa.Array:
    """Return a column of any plain type as bytes: whole numbers without a point, as in CSV."""
    return _as_bytes(column, name, faults)


def lists(column: pa.Array, name: str, separator: str, faults: Faults) -> tuple[pa.Array, Ints]:
    """Return the entries of all rows, flat, and their offsets [n + 1]; null and an empty text are empty lists."""
    if not _is_list(column.type):
        text = _as_bytes(column, name, faults)
        text = pc.if_else(pc.equal(pc.binary_length(text), 0), pa.scalar(None, pa.binary()), text)
        column = pc.split_pattern(text, separator)
    lengths = _numpy(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    return pc.list_flatten(column), np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])


def hash_texts(column: pa.Array) -> NDArray[np.uint64]:
    """Return a 64-bit hash [n] of each text: FNV-1a over its first bytes and its length, then mixed.

    The same on every machine and in every process; null hashes like an empty text.
    """
    offsets, data = _buffers(column)
    starts, lengths = offsets[:-1], offsets[1:] - offsets[:-1]
    state = np.full(len(column), 0xCBF29CE484222325, np.uint64)
    prime = np.uint64(0x100000001B3)
    hashed = np.minimum(lengths, _HASHED_BYTES)
    active = np.arange(len(column))
    for place in range(int(hashed.max(initial=0))):
        active = active[hashed[active] > place]
        state[active] = (state[active] ^ data[starts[active] + place]) * prime
    state ^= lengths.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    # The finalizer of splitmix64: FNV's low bits alone are weak.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return state ^ (state >> np.uint64(31))


def _buffers(column: pa.Array) -> tuple[Ints, NDArray[np.uint64]]:
    """Return the offsets [n + 1] and the bytes of a binary column."""
    _, offsets, data = column.buffers()
    if not len(column):
        return np.zeros(1, np.int64), np.zeros(0, np.uint64)
    at = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    bytes_ = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return at - at[0], bytes_[at[0] : at[-1]].astype(np.uint64)


def _as_bytes(column: pa.Array, name: str, faults: Faults) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if pa.types.is_floating(kind):
        # Whole numbers with gaps are floats in many files.
        whole = pc.fill_null(pc.equal(pc.floor(column), column), True)
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
        whole = pc.or_(pc.and_(whole, pc.less(pc.abs(column), 2.0**63)), pc.is_null(column))
        whole = pc.fill_null(whole, True)
        faults.mark(~_numpy(whole), name, column, "a whole number or a text")
        column = pc.if_else(whole, column, pa.scalar(None, kind)).cast(pa.int64())
    if not (pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        column = column.cast(pa.string())
    return column.cast(pa.binary())


def _parsed(column: pa.Array) -> tuple[NDArray[np.float64], Mask]:
    """Return values [n] (NaN where there is no number) and which are missing."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind):
        text = column.cast(pa.binary())
        empty = pc.fill_null(pc.equal(pc.binary_length(text), 0), True)
        good = pc.fill_null(pc.match_substring_regex(text, _NUMBER), False)
        plain = pc.if_else(good, text, pa.scalar(None, pa.binary())).cast(pa.string())
        plain = pc.ascii_ltrim(pc.ascii_trim_whitespace(plain), "+")
        values = _numpy(pc.fill_null(plain.cast(pa.float64()), float("nan")))
        return values, _numpy(empty)
    missing = _numpy(pc.is_null(column, nan_is_null=pa.types.is_floating(column.type)))
    return _numpy(pc.fill_null(column.cast(pa.float64(), safe=False), float("nan"))), missing


def is_plain(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold ids, numbers or texts."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
    )


def is_dated(kind: pa.DataType) -> bool:
    """Whether a column of this type holds times of its own."""
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def is_list(kind: pa.DataType, *, dated: bool = False) -> bool:
    """Whether a column of this type holds lists of plain values, or with ``dated`` of times."""
    return _is_list(kind) and (is_plain(kind.value_type) or (dated and is_dated(kind.value_type)))


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _numpy(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _show(value: Any) -> str:
    if value is None or value in (b"", ""):
        return "nothing"
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
