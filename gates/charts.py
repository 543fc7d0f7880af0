"""A few kinds of charts as data that a template draws: marks in the coordinates of an SVG, and the numbers behind them.

Written here because reports must open anywhere, follow the reader's light or dark scheme and stay small: colours are
left to the page's style sheet, which the SVG of plotting libraries cannot do, and those weigh more than narrowgate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Units of a chart's SVG; about pixels where the page is wide.
WIDTH = 480
_RIGHT, _TOP, _BOTTOM = 14, 10, 40
#: The largest size of a chart's text in the style sheet, which is that of narrow screens.
_TEXT = 14
#: Advances in shares of that size, those of DejaVu Sans rounded up: no other usual sans-serif is wider.
_ADVANCES = (("mM%@W…", 1.0), ("+=<>w", 0.84), (" .,:;|ijlftrI!'()[]-/", 0.42))
_ADVANCE, _CAPITAL = 0.64, 0.8
#: Room between the labels of two ticks.
_GAP = 6


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis, in the chart's coordinates."""

    at: float
    label: str

    @property
    def written_at(self) -> float:
        """The middle of the label under a horizontal axis: moved inwards where the label would leave the chart."""
        half = text_width(self.label) / 2
        return round(min(max(self.at, half), WIDTH - half), 2)


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from data to coordinates; ``start`` and ``end`` are where its ends are drawn."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool = False) -> Axis:
        """Return an axis that shows all of ``values`` with a little room at both ends."""
        assert values, "an axis needs values"
        low, high = min(values), max(values)
        if log:
            return cls(low / 1.1, high * 1.1, start, end, log=True)
        room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
        return cls(low - room, high + room, start, end)

    def __call__(self, value: float) -> float:
        """Return the coordinate of ``value``, held within the axis."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, low))
        share = min(max((at - low) / (high - low), 0.0), 1.0)
        return round(self.start + share * (self.end - self.start), 2)

    def apart(self, most: int, unit: str = "") -> tuple[Tick, ...]:
        """Return about ``most`` ticks of a horizontal axis, fewer where their labels would touch."""
        return next(
            (ticks for count in range(most, 1, -1) if _do_not_touch(ticks := self.ticks(count, unit))),
            self.ticks(2, unit)[:1],
        )

    def ticks(self, count: int = 5, unit: str = "") -> tuple[Tick, ...]:
        """Return about ``count`` ticks at round values."""
        if self.log:
            found = [m * 10.0**e for e in range(-12, 13) for m in (1, 2, 5) if self.low <= m * 10.0**e <= self.high]
            return tuple(Tick(self(v), f"{v:g}{unit}") for v in found)
        step = _round_step((self.high - self.low) / count)
        digits = max(0, -math.floor(math.log10(step)))
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return tuple(Tick(self(i * step), f"{i * step:.{digits}f}{unit}") for i in range(first, last + 1))


@dataclass(frozen=True)
class Mark:
    """Something drawn. ``kind`` is an SVG element or ``diamond``; ``style`` names the look in the style sheet."""

    kind: str
    style: str
    #: Numbers by the SVG element's own names.
    at: dict[str, float] = field(default_factory=dict)
    #: The path, for a ``path``.
    d: str = ""
    #: What is written, for a ``text``; else what a pointer that rests on the mark is told.
    text: str = ""
    #: start, middle or end, for a ``text``.
    anchor: str = "start"


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    style: str
    label: str


@dataclass(frozen=True)
class Table:
    """The numbers behind a chart."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A chart with what a reader who does not see it is told."""

    title: str
    #: One sentence that says what it shows.
    summary: str
    height: float
    marks: tuple[Mark, ...]
    x: tuple[Tick, ...]
    y: tuple[Tick, ...]
    table: Table
    keys: tuple[Key, ...] = ()
    x_label: str = ""
    left: float = 60
    #: Whether lines stand at the ticks.
    grid: str = "both"

    @property
    def frame(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the plotted area."""
        return frame(self.height, self.left)


def text_width(text: str) -> float:
    """Return the most room that ``text`` takes in a chart, in the chart's units, whatever font the reader has."""
    return _TEXT * math.fsum(_advance(char) for char in text)


def _advance(char: str) -> float:
    usual = _CAPITAL if char.isupper() else _ADVANCE
    return next((share for chars, share in _ADVANCES if char in chars), usual)


def room_for(labels: Sequence[str], gap: float = 8, least: float = 60) -> float:
    """Return the width of a column that holds each of ``labels`` and ``gap``."""
    return math.ceil(max([least, *(text_width(text) + gap for text in labels)]))


def shortened(text: str, room: float) -> str:
    """Return ``text``, without its beginning where it is wider than ``room``: the end of a name tells layers apart."""
    if text_width(text) <= room:
        return text
    while text and text_width(f"…{text}") > room:
        text = text[1:]
    return f"…{text}"


def frame(height: float, left: float = 60) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a chart's plotted area before it is made."""
    return left, _TOP, WIDTH - _RIGHT, height - _BOTTOM


def line(points: Sequence[tuple[float, float | None]], x: Axis, y: Axis, style: str) -> Mark:
    """Return a line through the points; a missing value breaks it."""
    parts, pen = [], "M"
    for at, value in points:
        if value is None:
            pen = "M"
            continue
        parts.append(f"{pen}{x(at):g} {y(value):g}")
        pen = "L"
    return Mark("path", f"line {style}", d="".join(parts))


def band(points: Sequence[tuple[float, float, float]], x: Axis, y: Axis, style: str) -> Mark:
    """Return the area between a lower and an upper value at every place."""
    upper = [f"{x(at):g} {y(high):g}" for at, _, high in points]
    lower = [f"{x(at):g} {y(low):g}" for at, low, _ in reversed(points)]
    return Mark("path", f"band {style}", d=f"M{'L'.join([*upper, *lower])}Z" if points else "")


def dot(x: float, y: float, style: str, text: str, r: float = 3.5) -> Mark:
    """Return a dot that says ``text`` to a pointer."""
    return Mark("circle", f"dot {style}", {"cx": x, "cy": y, "r": r}, text=text)


def diamond(x: float, y: float, style: str, text: str) -> Mark:
    """Return a diamond, which stands for a mean."""
    return Mark(
        "path", f"dot {style}", d=f"M{x - 6:g} {y:g}L{x:g} {y - 6:g}L{x + 6:g} {y:g}L{x:g} {y + 6:g}Z", text=text
    )


def rect(x0: float, x1: float, y0: float, y1: float, style: str, text: str = "") -> Mark:
    """Return a filled rectangle between two corners in any order."""
    at = {"x": min(x0, x1), "y": min(y0, y1), "width": round(abs(x1 - x0), 2), "height": round(abs(y1 - y0), 2)}
    return Mark("rect", style, at, text=text)


def segment(x0: float, y0: float, x1: float, y1: float, style: str, text: str = "") -> Mark:
    """Return a straight line."""
    return Mark("line", style, {"x1": x0, "y1": y0, "x2": x1, "y2": y1}, text=text)


def label(x: float, y: float, text: str, anchor: str = "start", style: str = "label") -> Mark:
    """Return a text; ``y`` is its base line."""
    return Mark("text", style, {"x": x, "y": y}, text=text, anchor=anchor)


def histogram(values: Sequence[float], most: int = 20) -> list[tuple[float, float, int]]:
    """Return bins (low, high, count) of equal width over the values."""
    low, high = min(values), max(values)
    if high == low:
        room = abs(high) * 0.01 or 0.5
        return [(low - room, high + room, len(values))]
    count = min(most, max(5, math.ceil(math.sqrt(len(values)))))
    width = (high - low) / count
    counts = [0] * count
    for value in values:
        counts[min(int((value - low) / width), count - 1)] += 1
    return [(low + i * width, low + (i + 1) * width, n) for i, n in enumerate(counts)]


def _do_not_touch(ticks: Sequence[Tick]) -> bool:
    ends = [(t.written_at - text_width(t.label) / 2, t.written_at + text_width(t.label) / 2) for t in ticks]
    return all(before[1] + _GAP <= after[0] for before, after in itertools.pairwise(ends))


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)
