"""Exit codes: what a shell or a CI job is told."""

from __future__ import annotations

from collections.abc import Iterable

ACCEPT = 0
REJECT = 1
USAGE = 2
INCONCLUSIVE = 3
FAILED = 4
INTERRUPTED = 130

_OF_VERDICT = {"accept": ACCEPT, "reject": REJECT, "inconclusive": INCONCLUSIVE}
_WORST_FIRST = (FAILED, REJECT, INCONCLUSIVE, ACCEPT)


def exit_code(verdicts: Iterable[str]) -> int:
    """Return the code of the worst verdict: reject, then inconclusive, then accept."""
    return min((_OF_VERDICT[verdict] for verdict in verdicts), key=_WORST_FIRST.index)
