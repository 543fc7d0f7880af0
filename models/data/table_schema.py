"""The schema of a user's table: which columns are labels, ids, numbers, lists, histories; how rows are split."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ...precision.errors import NarrowgateError, did_you_mean
from ...recipes.document import Node, parse_document
from ...recipes.errors import Diagnostic, RecipeError, found
from .. import features
from .rows import AGE_BUCKETS

#: More values than this for one column are taken for a slip.
_MAX_ROWS = 2**31


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _rows_only(value: Any) -> Any:
    return {"rows": value} if isinstance(value, int) and not isinstance(value, bool) else value


class Ids(_Section):
    """A column of ids, hashed to ``1 .. rows - 1``; 0 stands for a missing one."""

    rows: int = Field(ge=2, le=_MAX_ROWS)
    #: Columns that name the same table share one embedding; the column's own where empty.
    table: str = ""
    #: Values must be eight hexadecimal digits, as Criteo's are.
    hexadecimal: bool = False


class Lists(_Section):
    """A column of several ids a row."""

    rows: int = Field(ge=2, le=_MAX_ROWS)
    #: Ids that a row keeps, the first ones.
    width: int = Field(ge=1, le=1024)
    separator: str = Field(default="|", min_length=1)


class Numbers(_Section):
    """A column of numbers; standardized over the training rows, missing ones then 0."""

    #: sign(x) log(1 + |x|) first.
    log: bool = False


IdColumn = Annotated[Ids, BeforeValidator(_rows_only)]


class History(_Section):
    """Columns of lists that hold a row's earlier events, oldest first, one entry an event in each column."""

    fields: dict[str, IdColumn] = Field(min_length=1)
    #: Column of the events' times, in the units of ``timestamp``; without it models see no ages.
    times: str | None = None
    separator: str = Field(default="|", min_length=1)


class Split(_Section):
    """Which rows are held out: the last share of the file, the rows of a share of users, or what a column says."""

    last: float | None = Field(default=None, gt=0, lt=1)
    users: float | None = Field(default=None, gt=0, lt=1)
    column: str | None = None
    #: Values of ``column`` that mark a held-out row.
    held_out: list[str | int] = Field(default=["test"], min_length=1)

    @model_validator(mode="after")
    def _one(self) -> Split:
        if sum(x is not None for x in (self.last, self.users, self.column)) != 1:
            raise ValueError("expected exactly one of last, users, column")
        return self


def _mapping(value: Any) -> Any:
    return {name: {} for name in value} if isinstance(value, list) and all(isinstance(n, str) for n in value) else value


class TableSchema(_Section):
    """What a CSV or Parquet file holds, by the names of its columns."""

    #: For the report; the file's name where empty.
    table: str = ""
    #: CSV only: between fields (a tab in ``.tsv`` files, else a comma), whether line 1 names the columns, and their
    #: names where it does not.
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    header: bool = True
    columns: list[str] | None = None
    #: Columns of 0 or 1.
    labels: list[str] = Field(min_length=1)
    categorical: dict[str, IdColumn] = Field(default_factory=dict)
    numeric: Annotated[dict[str, Numbers], BeforeValidator(_mapping)] = Field(default_factory=dict)
    multi_hot: dict[str, Lists] = Field(default_factory=dict)
    history: History | None = None
    #: Rows of one user are not independent: the gates' intervals take them together.
    user: str | None = None
    #: Seconds (any origin), or a Parquet timestamp.
    timestamp: str | None = None
    split: Split = Split(last=0.2)
    #: Bad rows that are left out and reported before reading gives up.
    bad_rows: int = Field(default=100, ge=0)
    #: Training rows that are shuffled at once, in memory.
    shuffle: int = Field(default=65536, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> TableSchema:
        if not (self.categorical or self.numeric or self.multi_hot):
            raise ValueError("expected at least one column under categorical, numeric or multi_hot")
        if self.header == (self.columns is not None):
            raise ValueError("expected columns exactly where header is false")
        if self.split.users is not None and self.user is None:
            raise ValueError("split.users needs the field user")
        if self.history is not None and self.history.times is not None and self.timestamp is None:
            raise ValueError("history.times needs the field timestamp")
        inputs = [*self.categorical, *self.numeric, *self.multi_hot, *(self.history.fields if self.history else ())]
        for name in self.labels:
            if name in inputs:
                raise ValueError(f"label '{name}' is also an input: a model would read the answer")
        if len(set(inputs)) < len(inputs):
            raise ValueError(f"column '{next(n for n in inputs if inputs.count(n) > 1)}' is an input twice")
        sizes: dict[str, int] = {}
        for name, column in self._id_columns():
            table = column.table or name
            if sizes.setdefault(table, column.rows) != column.rows:
                raise ValueError(f"table '{table}' has {sizes[table]} rows and, for '{name}', {column.rows}")
        safe = [_safe(name) for name in {*inputs, *sizes}]
        if len(set(safe)) < len(safe):
            raise ValueError("two columns differ in signs only, expected names that differ in letters or digits")
        return self

    def _id_columns(self) -> list[tuple[str, Ids]]:
        return [*self.categorical.items(), *(self.history.fields.items() if self.history else ())]

    def used_columns(self) -> list[str]:
        """Columns that are read, each once."""
        names = [*self.labels, *self.categorical, *self.numeric, *self.multi_hot]
        if self.history is not None:
            names += [*self.history.fields, *([self.history.times] if self.history.times is not None else [])]
        names += [name for name in (self.user, self.timestamp, self.split.column) if name is not None]
        return list(dict.fromkeys(names))

    def features(self) -> features.FeatureSpec:
        """The fields that the model gets."""

        def field(name: str, column: Ids) -> features.Field:
            return features.Field(_safe(name), column.rows, _safe(column.table or name))

        events = [field(name, column) for name, column in self.history.fields.items()] if self.history else []
        return features.FeatureSpec(
            categorical=tuple(field(name, column) for name, column in self.categorical.items()),
            bags=tuple(features.Field(_safe(name), column.rows) for name, column in self.multi_hot.items()),
            numeric=tuple(self.numeric),
            events=(*events, features.Field("age_of_event", AGE_BUCKETS)),
            tasks=tuple(self.labels),
        )


def _safe(name: str) -> str:
    # A name that torch takes for a submodule: no dots, and no attribute of a module.
    return "column_" + re.sub(r"\W", "_", name)


def load_schema(path: Path) -> TableSchema:
    """Read a schema file.

    Raises:
        NarrowgateError: no such file, or not a schema; each fault with file, line, column and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise NarrowgateError(f"{path}: cannot read the table's schema: {why}") from None
    if not text.strip():
        raise NarrowgateError(f"{path}: found an empty file, expected the schema of a table")
    root, faults = parse_document(text, str(path))
    if faults:
        raise RecipeError(faults)
    data = root.plain()
    if not isinstance(data, dict):
        raise NarrowgateError(f"{path}:{root.line}:{root.column}: found {found(data)}, expected a mapping of fields")
    try:
        return TableSchema.model_validate(data)
    except ValidationError as error:
        raise RecipeError(_diagnostic(fault, root, path) for fault in error.errors()) from None


_SECTIONS: dict[str, type[_Section]] = {
    "categorical": Ids, "numeric": Numbers, "multi_hot": Lists, "history": History, "split": Split,
}  # fmt: skip


def _diagnostic(fault: Any, root: Node, path: Path) -> Diagnostic:
    location = [part for part in fault["loc"] if isinstance(part, str | int)]
    node, _ = root.find(location)
    line, column = root.key(location) or (node.line, node.column)
    kind = fault["type"]
    if kind == "extra_forbidden":
        section = _SECTIONS[str(location[0])] if len(location) > 1 else TableSchema
        if location[:2] == ["history", "fields"]:
            section = Ids
        known = section.model_fields
        message = f"unknown field{did_you_mean(str(location[-1]), known)} (known: {', '.join(known)})"
    elif kind == "missing":
        message = "the field is missing"
    elif kind == "value_error":
        message = str(fault["ctx"]["error"])
    else:
        message = f"found {found(fault['input'])}, expected {fault['msg'].removeprefix('Input should be ')}"
    field = ".".join(str(part) for part in location)
    return Diagnostic(file=str(path), line=line, column=column, field=field, message=message)
