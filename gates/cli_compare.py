"""The command ``compare``: two reports side by side on the terminal or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..precision.errors import on_one_line
from .compare import Comparison, Difference, compare
from .judgement import Gate
from .render import gate_row
from .report import load_report

#: Layers named beside a change of plan before the rest is only counted.
_NAMED_LAYERS = 3
_WIDEST_VALUE = 60


def compare_command(a: str, b: str, as_json: bool) -> None:
    """Print how two stored reports differ.

    Raises:
        NarrowgateError: one of them cannot be read; one line.
    """
    found = compare(load_report(Path(a)), load_report(Path(b)))
    if as_json:
        print(json.dumps({"a": a, "b": b, **found.to_dict()}, indent=1, allow_nan=False))
    else:
        print(comparison_text(found, a, b), end="")


def comparison_text(found: Comparison, a: str, b: str) -> str:
    """Return the comparison as plain text: verdicts, gates side by side, then what differs."""
    names = [f"{v.upper()}: {on_one_line(name)}" for v, name in zip(found.verdicts, found.recipes, strict=True)]
    parts = [f"A  {names[0]}  ({a})\nB  {names[1]}  ({b})"]
    if found.warnings:
        parts.append("\n".join(map(on_one_line, found.warnings)))
    rows = [["gate", "A", "[low estimate high]", "B", "[low estimate high]", "intervals"]]
    for pair in found.gates:
        name = " ".join(part for part in (pair.name, pair.task, pair.slice) if part is not None)
        rows.append([name, *_cells(pair.a), *_cells(pair.b), pair.intervals or "-"])
    parts.append(_table(rows))
    if found.modules:
        speedups = [[m.name, *("-" if x is None else f"{x:.4f}x" for x in (m.a, m.b))] for m in found.modules]
        parts.append(_section("Speedups of modules alone", speedups))
    parts.append(
        "Recipes: the same." if found.same_recipe else _section("Recipes differ", [_cells_of(d) for d in found.recipe])
    )
    if found.plan:
        parts.append(_section("Plans differ", [_change(change) for change in found.plan]))
    for title, differences in (
        ("Policies differ", found.policy),
        ("Tasks differ", found.task),
        ("Environments differ", found.environment),
    ):
        if differences:
            parts.append(_section(title, [_cells_of(d) for d in differences]))
    return "\n\n".join(parts) + "\n"


def _cells(gate: Gate | None) -> list[str]:
    if gate is None:
        return ["-", "-"]
    row = gate_row(gate)
    return [row["status"], row["interval"]]


def _cells_of(difference: Difference) -> list[str]:
    return [difference.field, _short(difference.a), _short(difference.b)]


def _change(change: Any) -> list[str]:
    named = ", ".join(change.layers[:_NAMED_LAYERS])
    more = len(change.layers) - _NAMED_LAYERS
    return [change.operand, change.a or "-", change.b or "-", named + (f" and {more} more" if more > 0 else "")]


def _section(title: str, rows: Sequence[list[str]]) -> str:
    head = ["", "A", "B", *["layers"][: len(rows[0]) - 3]] if rows else []
    return f"{title}:\n{_table([head, *rows])}" if rows else f"{title} only in name or text."


def _table(rows: Sequence[list[str]]) -> str:
    rows = [[on_one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)


def _short(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= _WIDEST_VALUE else f"{text[: _WIDEST_VALUE - 3]}..."
