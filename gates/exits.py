"""Exit codes: what a shell or a CI job is told."""

from __future__ import annotations

from collections.abc import Iterable

ACCEPT = 0
REJECT = 1
USAGE = 2
INCONCLUSIVE = 3
FAILED = 4
INTERRUPTED = 130

#: Stands for a verdict where a run failed before there was one.
FAILED_RUN = "failed"
_OF_VERDICT = {"accept": ACCEPT, "reject": REJECT, "inconclusive": INCONCLUSIVE, FAILED_RUN: FAILED}
_WORST_FIRST = (FAILED, REJECT, INCONCLUSIVE, ACCEPT)


def exit_code(verdicts: Iterable[str]) -> int:
    """Return the code of the worst verdict: a failed run, then reject, inconclusive, accept."""
    return min((_OF_VERDICT[verdict] for verdict in verdicts), key=_WORST_FIRST.index)


def failure_text(error: BaseException) -> str:
    """Return in one line why a run failed; no library is imported to know its kinds of errors."""
    text = " ".join(str(error).split())
    if type(error).__name__ == "RunError":
        return text
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU's memory ran out; a smaller batch or model fits"
    return f"{type(error).__name__}: {text}".removesuffix(": ")
