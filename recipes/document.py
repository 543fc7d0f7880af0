"""YAML text to plain data that remembers where every key and value stood.

ruamel.yaml scans and parses (YAML 1.2); the tree is built here from its events, because a recipe may come
from anywhere: size, depth and alias expansion are bounded, duplicate keys and tags are refused, and nothing
is ever constructed but text, numbers, booleans, lists and mappings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from .errors import Diagnostic, RecipeError, found

MAX_BYTES = 256 * 1024
MAX_DEPTH = 24
MAX_NODES = 20_000

#: YAML 1.2 core schema.
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


@dataclass(eq=False)
class Node:
    """One YAML value. ``line`` and ``column`` are 1-based."""

    value: Any
    line: int
    column: int
    #: Column of the first character of a scalar's text where text and source run side by side, else None.
    text_column: int | None = None
    #: Where each key of a mapping stands.
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Nodes below and including this one, aliases expanded.
    size: int = 1

    def plain(self) -> Any:
        """Return the value without positions."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def find(self, path: Sequence[str | int]) -> tuple[Node, int]:
        """Return the node at ``path``, or the deepest one on the way to it, and how many parts led there."""
        node = self
        for depth, part in enumerate(path):
            value = node.value
            if isinstance(value, dict):
                child = value.get(part)
            else:
                child = value[part] if isinstance(value, list) and isinstance(part, int) and part < len(value) else None
            if child is None:
                return node, depth
            node = child
        return node, len(path)

    def key(self, path: Sequence[str | int]) -> tuple[int, int] | None:
        """Return line and column of the key that ends ``path``, None where a key cannot be there."""
        return self.find(path[:-1])[0].keys.get(str(path[-1])) if path else None


def parse_document(text: str, file: str, what: str = "recipe") -> tuple[Node, list[Diagnostic]]:
    """Parse one YAML document.

    Args:
        text: the document.
        file: its name in faults.
        what: what the document is, in faults.

    Returns:
        The document, and the faults that reading could go on after (keys that stand twice).

    Raises:
        RecipeError: not one YAML document within the limits; names line and column.
    """
    builder = _Builder(file, what)
    return builder.build(text), builder.faults


class _Builder:
    def __init__(self, file: str, what: str) -> None:
        self.file, self.what = file, what
        self.faults: list[Diagnostic] = []
        self.anchors: dict[str, Node] = {}
        self.nodes = 0

    def build(self, text: str) -> Node:
        root: Node | None = None
        stack: list[_Open] = []
        for event in self._events(text):
            kind = type(event).__name__
            if kind == "DocumentStartEvent" and root is not None:
                self._stop(event, f"found a second document, expected one {self.what} a file")
            if kind in ("MappingStartEvent", "SequenceStartEvent"):
                if len(stack) >= MAX_DEPTH:
                    self._stop(event, f"nested deeper than {MAX_DEPTH} levels")
                self._refuse_tag(event)
                node = self._node(event, {} if kind == "MappingStartEvent" else [])
                stack.append(_Open(node, event.anchor))
                continue
            if kind in ("MappingEndEvent", "SequenceEndEvent"):
                closed = stack.pop()
                node = closed.node
                if closed.anchor:
                    self.anchors[closed.anchor] = node
            elif kind == "ScalarEvent":
                node = self._scalar(event)
            elif kind == "AliasEvent":
                node = self._alias(event)
            else:
                continue
            if stack:
                self._attach(stack[-1], node, event)
            else:
                root = node
        if root is None:
            raise RecipeError([Diagnostic(file=self.file, message=f"found an empty file, expected a {self.what}")])
        return root

    def _events(self, text: str) -> Iterator[Any]:
        line, column = 1, 1
        try:
            for event in YAML(typ="safe", pure=True).parse(text):
                line, column = event.end_mark.line + 1, event.end_mark.column + 1
                yield event
        except RecipeError:
            raise
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            if mark is not None:
                line, column = mark.line + 1, mark.column + 1
            problem = " ".join(part for part in (error.problem, error.context) if part)
            self._fail(line, column, f"not YAML: {_one_line(problem)}")
        except YAMLError as error:
            position = getattr(error, "position", None)
            if isinstance(position, int):
                before = text[:position]
                line, column = before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1
            self._fail(line, column, f"not YAML: {_one_line(getattr(error, 'reason', None) or str(error))}")
        except Exception as error:  # the scanner lets Python's own errors through, e.g. for an escape beyond Unicode
            self._fail(line, column, f"not YAML: {_one_line(str(error)) or type(error).__name__}")

    def _node(self, event: Any, value: Any) -> Node:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self._stop(event, f"more than {MAX_NODES} values")
        return Node(value, event.start_mark.line + 1, event.start_mark.column + 1)

    def _scalar(self, event: Any) -> Node:
        self._refuse_tag(event)
        value = event.value
        if any("\ud800" <= c <= "\udfff" for c in value):
            self._stop(event, "found half of a surrogate pair, expected whole characters")
        node = self._node(event, _resolve(value) if event.style is None else value)
        start, end = event.start_mark, event.end_mark
        if start.line == end.line and event.style in (None, "'", '"'):
            quotes = 0 if event.style is None else 1
            if end.column - start.column == len(value) + 2 * quotes:
                node.text_column = node.column + quotes
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def _alias(self, event: Any) -> Node:
        target = self.anchors.get(event.anchor)
        if target is None:
            return self._stop(event, f"found alias '*{event.anchor}', expected one whose anchor is complete before it")
        self.nodes += target.size
        if self.nodes > MAX_NODES:
            self._stop(event, f"aliases expand to more than {MAX_NODES} values")
        return target

    def _attach(self, parent: _Open, node: Node, event: Any) -> None:
        holder = parent.node
        holder.size += node.size
        if isinstance(holder.value, list):
            holder.value.append(node)
        elif parent.key is None:
            if type(event).__name__ != "ScalarEvent":
                self._fail(node.line, node.column, "found a key that is not text, expected a field's name")
            parent.key = (event.value, node.line, node.column)
        else:
            (key, line, column), parent.key = parent.key, None
            if key in holder.keys:
                first = holder.keys[key][0]
                self._report(line, column, f"found key {found(key)} twice, first on line {first}; expected it once")
                return
            holder.keys[key] = (line, column)
            holder.value[key] = node

    def _refuse_tag(self, event: Any) -> None:
        if event.tag:
            self._stop(event, f"found tag {found(str(event.tag))}, expected a plain value (recipes take no tags)")

    def _report(self, line: int, column: int, message: str) -> None:
        self.faults.append(Diagnostic(file=self.file, line=line, column=column, message=message))

    def _fail(self, line: int, column: int, message: str) -> NoReturn:
        self._report(line, column, message)
        raise RecipeError(self.faults) from None

    def _stop(self, event: Any, message: str) -> NoReturn:
        self._fail(event.start_mark.line + 1, event.start_mark.column + 1, message)


@dataclass(eq=False)
class _Open:
    """A collection still being read; ``key`` waits for its value in a mapping."""

    node: Node
    anchor: str | None
    key: tuple[str, int, int] | None = None


def _resolve(text: str) -> object:
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if len(text) <= 40 and _FLOAT.fullmatch(text):
        return float(text)
    return text


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:197] + "..."
