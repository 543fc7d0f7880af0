"""What a data source offers a model: its fields, in the order of a batch's columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """A field of ids in ``[0, rows)``; id 0 stands for unknown or padding.

    Fields that name the same ``table`` share one embedding table (a candidate item and the items of the history).
    """

    name: str
    rows: int
    table: str = ""

    def __post_init__(self) -> None:
        if not self.table:
            object.__setattr__(self, "table", self.name)


@dataclass(frozen=True)
class FeatureSpec:
    """The fields of a data source and the tasks it labels."""

    #: One id a row.
    categorical: tuple[Field, ...]
    #: Up to a fixed number of ids a row, padded with id 0.
    bags: tuple[Field, ...]
    #: Numbers, roughly standardized.
    numeric: tuple[str, ...]
    #: One id an event; the last field is the bucket of log2 of the event's age.
    events: tuple[Field, ...]
    tasks: tuple[str, ...]

    @property
    def n_tokens(self) -> int:
        """Feature tokens of a row: one a field, one for all numbers."""
        return len(self.categorical) + len(self.bags) + bool(self.numeric)

    def tables(self) -> dict[str, int]:
        """Rows of each single-id embedding table, by table name in order of appearance."""
        sizes: dict[str, int] = {}
        for field in (*self.categorical, *self.events):
            rows = sizes.setdefault(field.table, field.rows)
            assert rows == field.rows, f"table {field.table} has two sizes"
        return sizes
