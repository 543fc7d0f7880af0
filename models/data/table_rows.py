"""A piece of a user's table as rows: every column checked, rows that cannot be used reported and left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...precision.errors import NarrowgateError
from . import table_columns as columns
from .host_rows import HostRows
from .rows import AGE_BUCKETS, Floats, Ints
from .table_columns import Faults, Mask
from .table_file import BadRows, Piece
from .table_schema import TableSchema

#: From a column's name to its values.
Column = Callable[[str], pa.Array]
_LARGEST = float(np.finfo(np.float32).max)
_AGE_LIMITS = 2 ** np.arange(AGE_BUCKETS - 1, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Checked:
    """The good rows of a piece."""

    #: Without numbers: those are not standardized yet.
    rows: HostRows
    #: [n, numbers], and which of them are there.
    numbers: NDArray[np.float64]
    there: Mask
    #: [n].
    held_out: Mask


class RowReader:
    """Turns pieces into rows by a schema.

    Args:
        schema: of the table.
        max_events: events that a row keeps, the latest.
        cutoff: number of the first row that ``split.last`` holds out.
        times: whether rows carry the times of their events, which the schema then has.
    """

    def __init__(self, schema: TableSchema, max_events: int, cutoff: int, *, times: bool = False) -> None:
        self.schema = schema
        self.max_events = max_events
        self.cutoff = cutoff
        self.times = times

    def check_types(self, arrow: pa.Schema, file: str) -> None:
        """Refuse columns of a type that cannot hold what the schema says.

        Raises:
            NarrowgateError: naming the column, its type and what was expected.
        """
        schema = self.schema
        list_names = [*schema.multi_hot, *(schema.history.fields if schema.history else ())]
        times = [schema.timestamp] if schema.timestamp else []
        history_times = schema.history.times if schema.history is not None else None
        if history_times is not None:
            list_names.append(history_times)
        for name in schema.used_columns():
            kind = arrow.field(name).type
            dated = name in times and columns.is_dated(kind)
            wanted = name in list_names and columns.is_list(kind, dated=name == history_times)
            if not (columns.is_plain(kind) or dated or wanted):
                expected = "a list or a text" if name in list_names else "a number or a text"
                raise NarrowgateError(f"{file}: column '{name}' is of type {kind}, expected {expected}")

    def read(self, piece: Piece, bad: BadRows) -> Checked:
        """Return the good rows of ``piece``; the others go to ``bad``."""
        schema, count = self.schema, len(piece.numbers)
        faults = Faults(count)

        def column(name: str) -> pa.Array:
            return piece.rows.column(name)

        labels = self._labels(column, faults)
        times = columns.seconds(column(schema.timestamp), schema.timestamp, faults) if schema.timestamp else None
        sparse = [
            columns.ids(column(name), name, entry.rows, faults, hexadecimal=entry.hexadecimal)
            for name, entry in schema.categorical.items()
        ]
        parsed = [
            _number(column(name), name, logarithm=entry.log, faults=faults) for name, entry in schema.numeric.items()
        ]
        bags = tuple(self._bag(column(name), name, faults) for name in schema.multi_hot)
        lengths, events, event_times = self._history(column, times, faults)
        groups = self._groups(column, piece.numbers, faults)
        held_out = self._held_out(column, piece.numbers, groups, faults)
        rows = HostRows(
            sparse=np.stack(sparse, 1) if sparse else np.zeros((count, 0), np.int64),
            bags=bags,
            dense=np.zeros((count, 0), np.float32),
            labels=labels,
            groups=groups,
            lengths=lengths,
            events=events,
            event_times=event_times if self.times else None,
        )
        numbers = np.stack([value for value, _ in parsed], 1) if parsed else np.zeros((count, 0))
        there = np.stack([there for _, there in parsed], 1) if parsed else np.zeros((count, 0), bool)
        for row in np.flatnonzero(faults.bad):
            bad.add(int(piece.numbers[row]), faults.reasons[int(row)])
        good = np.flatnonzero(~faults.bad)
        return Checked(rows.take(good), numbers[good], there[good], held_out[good])

    def _labels(self, column: Column, faults: Faults) -> Floats:
        found = []
        for name in self.schema.labels:
            values = columns.required_numbers(column(name), name, faults, "0 or 1")
            faults.mark((values != 0) & (values != 1), name, column(name), "0 or 1")
            found.append(values)
        return np.stack(found, 1).astype(np.float32)

    def _bag(self, column: pa.Array, name: str, faults: Faults) -> Ints:
        entry = self.schema.multi_hot[name]
        flat, offsets = columns.lists(column, name, entry.separator, faults)
        values = _flat_ids(flat, name, entry.rows)
        out = np.zeros((len(column), entry.width), np.int64)
        owner = np.repeat(np.arange(len(column)), np.diff(offsets))
        place = np.arange(len(values)) - offsets[owner]
        kept = place < entry.width
        out[owner[kept], place[kept]] = values[kept]
        return out

    def _history(self, column: Column, times: Ints | None, faults: Faults) -> tuple[Ints, Ints, Ints | None]:
        """Return the lengths [n], the events [sum, fields]: ids, and the bucket of the age last, and times [sum]."""
        history, count = self.schema.history, faults.count
        if history is None:
            return np.zeros(count, np.int64), np.zeros((0, 1), np.int64), None
        names, first, parts = list(history.fields), None, []
        for name in names:
            flat, offsets = columns.lists(column(name), name, history.separator, faults)
            if first is None:
                first = offsets
            faults.mark(np.diff(offsets) != np.diff(first), name, column(name), f"as many events as '{names[0]}' has")
            parts.append((flat, offsets))
        assert first is not None
        found = None
        if history.times is not None:
            assert times is not None, "the schema asks for a timestamp"
            found = self._times(column(history.times), first, times, faults)
        # Rows that are fine keep their latest events; the others none.
        lengths = np.where(faults.bad, 0, np.minimum(np.diff(first), self.max_events))
        within = np.arange(int(lengths.sum())) - np.repeat(lengths.cumsum() - lengths, lengths)
        fields = []
        for name, (flat, offsets) in zip(names, parts, strict=True):
            place = np.repeat(offsets[1:] - lengths, lengths) + within
            fields.append(_flat_ids(flat, name, history.fields[name].rows)[place])
        place = np.repeat(first[1:] - lengths, lengths) + within
        if found is None or times is None:
            return lengths, np.stack([*fields, np.zeros(len(place), np.int64)], 1), None
        event_times = found[place]
        age = np.repeat(times, lengths) - event_times
        fields.append(np.searchsorted(_AGE_LIMITS, age, side="right"))
        return lengths, np.stack(fields, 1), event_times

    def _times(self, column: pa.Array, first: Ints, times: Ints, faults: Faults) -> Ints:
        """Return each event's time in seconds, along the flat events of ``first``; [first[-1]]."""
        history = self.schema.history
        assert history is not None
        assert history.times is not None
        name = history.times
        flat, offsets = columns.lists(column, name, history.separator, faults)
        faults.mark(np.diff(offsets) != np.diff(first), name, column, "as many times as there are events")
        inner = Faults(len(flat))
        at = columns.seconds(flat, name, inner)
        owner = np.repeat(np.arange(len(times)), np.diff(offsets))
        age = times[owner] - at
        faults.mark(_any(inner.bad, owner, len(times)), name, column, "times in seconds")
        faults.mark(_any(age <= 0, owner, len(times)), name, column, "times before the row's own")
        falling = np.concatenate([np.zeros(1, bool), (np.diff(at) < 0) & (np.diff(owner) == 0)])[: len(at)]
        faults.mark(_any(falling, owner, len(times)), name, column, "the oldest event first")
        out = np.zeros(int(first[-1]), np.int64)
        # Where the two disagree in length the row is bad already: its times are not read.
        aligned = np.repeat(np.diff(offsets) == np.diff(first), np.diff(offsets))
        target = np.arange(len(at)) - offsets[owner] + first[owner]
        out[target[aligned]] = at[aligned]
        return out

    def _groups(self, column: Column, numbers: Ints, faults: Faults) -> Ints:
        name = self.schema.user
        if name is None:
            return numbers.astype(np.int64)
        return (columns.hash_texts(columns.texts(column(name), name, faults)) >> np.uint64(1)).astype(np.int64)

    def _held_out(self, column: Column, numbers: Ints, groups: Ints, faults: Faults) -> Mask:
        split = self.schema.split
        if split.last is not None:
            return numbers >= self.cutoff
        if split.users is not None:
            return groups < split.users * 2.0**63
        assert split.column is not None
        texts = columns.texts(column(split.column), split.column, faults)
        wanted = {str(value).encode() for value in split.held_out}
        return np.array([value in wanted for value in texts.to_pylist()], bool)


def _number(column: pa.Array, name: str, *, logarithm: bool, faults: Faults) -> tuple[NDArray[np.float64], Mask]:
    values, there = columns.numbers(column, name, faults)
    # One of 1e300 would leave nothing of the others' differences.
    faults.mark(np.abs(values) > _LARGEST, name, column, f"a number of at most {_LARGEST:g}")
    values = np.where(faults.bad, 0.0, values)
    if logarithm:
        values = np.sign(values) * np.log1p(np.abs(values))
    return values, there


def _flat_ids(flat: pa.Array, name: str, rows: int) -> Ints:
    # A list's entry that is no id (a broken float in Parquet) counts as unknown, like a missing one.
    return columns.ids(flat, name, rows, Faults(len(flat)))


def _any(flags: Mask, owner: Ints, count: int) -> Mask:
    """Return per row whether any of its flat entries is flagged."""
    return np.bincount(owner[flags], minlength=count).astype(bool)
