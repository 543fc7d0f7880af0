"""Faults of a recipe, each with its place: what a user reads, and what GitHub prints beside the line."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass

from ..precision.errors import NarrowgateError

_MAX_LINES = 100


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """One finding about a recipe: ``file:line:column: field: message``."""

    message: str
    #: The file as the user wrote it, ``<builtin>/NAME.yaml``, or ``<python>`` for a recipe built from objects.
    file: str = "<python>"
    #: 1-based; None where the finding belongs to the whole file.
    line: int | None = None
    #: 1-based, counted in characters.
    column: int | None = None
    #: Where in the recipe, for example ``rules[1].fprop.input``; empty for the recipe itself.
    field: str = ""
    #: ``error``, ``warning`` or ``note``.
    severity: str = "error"

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        label = "" if self.severity == "error" else f"{self.severity}: "
        field = f"{self.field}: " if self.field else ""
        return f"{place}: {label}{field}{self.message}"

    def to_dict(self) -> dict[str, str | int | None]:
        """Return the finding as JSON-ready data."""
        return {
            "severity": self.severity,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "field": self.field,
            "message": self.message,
        }

    def github(self) -> str:
        """Return the workflow command that annotates this place in a GitHub run."""
        command = {"note": "notice"}.get(self.severity, self.severity)
        properties = {"file": self.file, "line": self.line, "col": self.column}
        where = ",".join(f"{key}={_property(str(value))}" for key, value in properties.items() if value is not None)
        text = f"{self.field}: {self.message}" if self.field else self.message
        return f"::{command} {where}::{_data(text)}"


class RecipeError(NarrowgateError):
    """A recipe that cannot be used; ``str(error)`` has one line for each of its ``diagnostics`` (the first 100)."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        assert self.diagnostics, "a RecipeError says what is wrong"
        lines = [str(d) for d in self.diagnostics[:_MAX_LINES]]
        if len(self.diagnostics) > _MAX_LINES:
            lines.append(f"... and {len(self.diagnostics) - _MAX_LINES} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[RecipeError], tuple[tuple[Diagnostic, ...]]]:
        return type(self), (self.diagnostics,)


class ExpressionError(NarrowgateError):
    """A pattern or a ``where`` expression that does not parse; ``offset`` is the 0-based place in it."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxdict = _SHORT.maxlist = 3
_SHORT.maxlevel = 2


def found(value: object) -> str:
    """Return ``value`` as an error shows it: quoted, typed, and never longer than a line."""
    if isinstance(value, str):
        return f"'{value}'" if len(value) <= 60 and value.isprintable() else _SHORT.repr(value)
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return f"a mapping {_SHORT.repr(value)}"
    if isinstance(value, list | tuple):
        return f"a list {_SHORT.repr(list(value))}"
    return _SHORT.repr(value)


def github_annotations(diagnostics: Iterable[Diagnostic]) -> list[str]:
    """Return one workflow command (``::error file=..,line=..,col=..::message``) for each finding."""
    return [d.github() for d in diagnostics]


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
