"""What a run shows while it works: on a terminal a live table, elsewhere plain lines; always on standard error."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Seconds between two plain lines.
_LINE_EVERY = 10.0


@dataclass(frozen=True)
class Step:
    """Where one training stands."""

    seed: int
    arm: str
    step: int
    #: None where the task does not say how many batches it has.
    steps: int | None
    loss: float


class Progress:
    """Hears what happens, as a context manager; this one shows nothing."""

    def phase(self, text: str, trainings: int = 0) -> None:
        """Hear of a new part of the run; ``trainings`` is how many trainings it holds."""

    def step(self, step: Step) -> None:
        """Hear of a step."""

    def trained(self, seed: int, arm: str) -> None:
        """Hear of a finished training."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Clock:
    """Counts finished work and estimates what is left."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.total = self.done = 0
        self.running: dict[tuple[int, str], Step] = {}

    def begin(self, trainings: int) -> None:
        self.started, self.total, self.done = time.monotonic(), trainings, 0
        self.running.clear()

    def finish(self, seed: int, arm: str) -> None:
        self.running.pop((seed, arm), None)
        self.done += 1

    @property
    def share(self) -> float:
        parts = sum(s.step / s.steps for s in self.running.values() if s.steps)
        return min((self.done + parts) / self.total, 1.0) if self.total else 0.0

    def left(self) -> str:
        if self.share < 0.01:
            return "time left unknown"
        seconds = (time.monotonic() - self.started) * (1 - self.share) / self.share
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} left"


def _at(step: Step) -> str:
    return f"{step.step}/{'?' if step.steps is None else step.steps}"


class Lines(Progress):
    """Plain lines: one a finished training, and one every ten seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._clock, self._last = stream, _Clock(), time.monotonic()

    def phase(self, text: str, trainings: int = 0) -> None:
        """Print the phase."""
        self._clock.begin(trainings)
        self._print(text)

    def step(self, step: Step) -> None:
        """Print the step where the last line is long ago."""
        self._clock.running[step.seed, step.arm] = step
        if time.monotonic() - self._last >= _LINE_EVERY:
            self._print(f"seed {step.seed} {step.arm} step {_at(step)} loss {step.loss:.5f}, {self._clock.left()}")

    def trained(self, seed: int, arm: str) -> None:
        """Print that a training ended."""
        self._clock.finish(seed, arm)
        clock = self._clock
        self._print(f"seed {seed} {arm} done, {clock.done} of {clock.total} trainings, {clock.left()}")

    def _print(self, text: str) -> None:
        self._last = time.monotonic()
        print(text, file=self._stream, flush=True)


class Live(Progress):
    """A table of running trainings over a bar with the time left, redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._clock, self._text = _Clock(), ""
        self._live: Any = RichLive(
            console=Console(file=stream), get_renderable=self._render, refresh_per_second=4, transient=True
        )

    def phase(self, text: str, trainings: int = 0) -> None:
        """Show the phase."""
        self._clock.begin(trainings)
        self._text = text

    def step(self, step: Step) -> None:
        """Show the step."""
        self._clock.running[step.seed, step.arm] = step

    def trained(self, seed: int, arm: str) -> None:
        """Drop the training's row and move the bar."""
        self._clock.finish(seed, arm)

    def __enter__(self) -> Progress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        clock = self._clock
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("seed", "arm", "step", "loss"):
            table.add_column(name, justify="left" if name == "arm" else "right")
        for step in list(clock.running.values()):
            table.add_row(str(step.seed), step.arm, _at(step), f"{step.loss:.5f}")
        if not clock.total:
            return Text(self._text)
        foot = Table.grid(padding=(0, 2, 0, 0))
        foot.add_row(
            ProgressBar(total=1.0, completed=clock.share, width=40),
            f"{clock.done}/{clock.total} trainings",
            clock.left(),
        )
        return Group(Text(self._text), table, foot) if clock.running else Group(Text(self._text), foot)


@contextmanager
def prints_aside() -> Iterator[None]:
    """Within, what a user's task prints goes to standard error: standard output holds the report, JSON perhaps."""
    with redirect_stdout(sys.stderr):
        yield


def make_progress(quiet: bool, stream: TextIO | None = None) -> Progress:
    """Return what fits the stream: silence, plain lines (no terminal, NO_COLOR, a dumb terminal), or a live table."""
    shown = stream or sys.stderr
    if quiet or shown is None:
        return Progress()
    if not shown.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return Lines(shown)
    return Live(shown)
