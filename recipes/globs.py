"""Patterns over module names: ``*`` is one level, ``**`` zero or more, ``re:REGEX`` a full match.

A glob becomes a regular expression without nested backtracking: what follows each wildcard is taken at its
leftmost place, inside a lookahead that is never reopened. Leftmost is enough, because the last part alone is
tied to the end of the name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .errors import ExpressionError, found

MAX_LENGTH = 512
_REGEX_PREFIX = "re:"


@dataclass(frozen=True)
class Pattern:
    """One compiled entry of a rule's ``layers``."""

    text: str
    _regex: re.Pattern[str]
    _is_glob: bool

    def matches(self, name: str) -> bool:
        """Return whether the module called ``name`` is meant; the root module's name is empty."""
        return self.among(Names([name]))[0]

    def among(self, names: Names) -> list[bool]:
        """Return :meth:`matches` of each name."""
        against = names.dotted if self._is_glob else names.plain
        return [match is not None for match in map(self._regex.fullmatch, against)]


class Names:
    """Module names, prepared for many patterns."""

    def __init__(self, names: Sequence[str]) -> None:
        self.plain = list(names)
        #: With a dot after every level, as globs are compiled; the root's empty name has no level.
        self.dotted = [name and name + "." for name in names]


@lru_cache(maxsize=4096)
def parse_pattern(text: str) -> Pattern:
    """Compile one pattern.

    Raises:
        ExpressionError: with the offset at which the pattern stops making sense.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"found a pattern of {len(text)} characters, expected at most {MAX_LENGTH}")
    if text.startswith(_REGEX_PREFIX):
        return Pattern(text, _compile_regex(text[len(_REGEX_PREFIX) :]), _is_glob=False)
    return Pattern(text, re.compile(_translate(text), re.DOTALL), _is_glob=True)


def _compile_regex(regex: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(regex)
    except re.error as error:
        offset = len(_REGEX_PREFIX) + (error.pos or 0)
        raise ExpressionError(f"found {found(regex)}, expected a regular expression: {error.msg}", offset) from None
    except (RecursionError, OverflowError):
        raise ExpressionError("found a regular expression too large to compile", len(_REGEX_PREFIX)) from None


def _translate(text: str) -> str:
    """Return the regular expression of a glob over names in which every level ends with a dot."""
    if not text:
        raise ExpressionError("found an empty pattern, expected a module name, a glob or re:REGEX")
    groups = _Groups()
    runs: list[str] = [""]  # the parts between the '**' of the pattern
    offset = 0
    for level in text.split("."):
        if not level:
            raise ExpressionError(f"found an empty level in {found(text)}, expected names separated by one dot", offset)
        if level == "**":
            runs.append("")
        elif "**" in level:
            raise ExpressionError(
                f"found {found(level)}, expected '**' alone between dots (it stands for whole levels)",
                offset + level.index("**"),
            )
        else:
            runs[-1] += _level(level, groups) + r"\."
        offset += len(level) + 1
    first, *rest = runs
    if not rest:
        return first
    *middle, last = rest
    lazy = r"(?:[^.]+\.)*?"
    return first + "".join(groups.leftmost(lazy + run) for run in middle if run) + r"(?:[^.]+\.)*" + last


def _level(level: str, groups: _Groups) -> str:
    if level == "*":
        return "[^.]+"
    first, *rest = (re.escape(part) for part in level.split("*"))
    if not rest:
        return first
    *middle, last = rest
    return first + "".join(groups.leftmost("[^.]*?" + part) for part in middle if part) + "[^.]*" + last


class _Groups:
    """Numbers the groups that make a lookahead's match final (Python 3.10 has no atomic groups)."""

    def __init__(self) -> None:
        self.count = 0

    def leftmost(self, regex: str) -> str:
        self.count += 1
        # A back reference inside an outer lookahead still names its own group: names are never reused.
        return f"(?=(?P<g{self.count}>{regex}))(?P=g{self.count})"
