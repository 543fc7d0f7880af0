"""Errors that a user can cause and mend. The command line prints their text and exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NarrowgateError(ValueError):
    """Something the user gave cannot be used; ``str(error)`` is one clear line (or one line a fault)."""


class NotBuiltError(NarrowgateError):
    """The contract names it, this version does not run it: said aloud instead of ignored."""


class SpecError(NarrowgateError):
    """A format expression that does not parse or contradicts itself.

    ``offset`` is the 0-based position in the expression at which the fault begins.
    """

    def __init__(self, message: str, offset: int = 0) -> None:
        """Keep the message and where in the expression it points."""
        super().__init__(message)
        self.offset = offset


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def on_one_line(text: str) -> str:
    """Return ``text`` with control characters (a newline, a terminal's escape) as Python writes them in a string."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0))}
