"""Exit codes: what a shell or a CI job is told."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import PurePath

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
    return f"{type(error).__name__}: {text}".removesuffix(": ") + users_line(error)


def users_line(error: BaseException) -> str:
    """Return where an error arose in a user's code that a run called, `` (in loss() at ranker.py:57)``, or nothing."""
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    called, found, trace = False, "", error.__traceback__
    while trace is not None:
        code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__", ""))
        path = PurePath(code.co_filename)
        if module.partition(".")[0] == "narrowgate":
            called = True
        elif (
            called
            and path.suffix == ".py"
            and not (
                installed.intersection(map(str, path.parents))
                or {"site-packages", "dist-packages"}.intersection(path.parts)
            )
        ):
            found = f" (in {code.co_name}() at {path.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found
