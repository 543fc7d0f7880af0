"""``gate`` under ``torchrun``: every rank runs it, the first alone prints and writes, and all end with one code."""

from __future__ import annotations

import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..precision.errors import NarrowgateError
from . import exits
from .progress import Progress, Step, make_progress, prints_aside
from .rank_watch import RankWatch, end
from .ranks import DEFAULT_LIMIT, Place, Ranks, join, meet

if TYPE_CHECKING:
    from .cli_gate import GateOptions


class RankProgress(Progress):
    """Tells the first rank's progress, and each rank's watch that there is some."""

    def __init__(self, inner: Progress, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks

    def phase(self, text: str, trainings: int = 0) -> None:
        """Hear of a new part of the run."""
        self._ranks.watch.tick()
        self._inner.phase(text, trainings)

    def step(self, step: Step) -> None:
        """Hear of a step."""
        self._ranks.watch.tick()
        self._inner.step(step)

    def trained(self, seed: int, arm: str) -> None:
        """Hear of a finished training."""
        self._ranks.watch.tick()
        self._inner.trained(seed, arm)

    def __enter__(self) -> Progress:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)


def gate_on_ranks(options: GateOptions, place: Place) -> NoReturn:
    """Run ``gate`` as one rank of a job, and end the process with the job's exit code.

    Raises:
        NarrowgateError: what no job can be joined with.
        RunError: the other ranks did not come.
    """
    from .cli_gate import DEFAULT_OUT, pick_device, write_failures

    for name, value in (("--from", options.source), ("--config", options.config)):
        if value is not None:
            if place.rank:
                end(exits.USAGE)
            raise NarrowgateError(f"gate {name} runs in one process: start it without torchrun")
    replicas = options.replicas or 1
    if place.ranks % replicas:
        if place.rank:
            end(exits.USAGE)
        raise NarrowgateError(f"gate --replicas: found {replicas}, expected a divisor of the {place.ranks} ranks")
    names: list[str] = []
    shown: list[Progress] = []
    out = Path(options.out or DEFAULT_OUT)

    def failed(text: str, code: int) -> None:
        for progress in shown:  # the main thread may wait within a collective
            progress.__exit__(None, None, None)
        if names and code == exits.FAILED:  # nothing was written over before the recipes were read
            write_failures(out, names, text)

    limit = options.collective_timeout or DEFAULT_LIMIT
    watch, store = meet(place, limit, failed)
    try:
        ranks = join(place, pick_device(options.device), limit, watch, store, replicas)
        code = _gate(options, ranks, out, names, shown)
        ranks.leave()
    except BaseException as error:
        _fail(watch, error)
    # At once: a launcher that sees one rank end with another code than 0 stops those that are still about to.
    end(code)


def _gate(options: GateOptions, ranks: Ranks, out: Path, names: list[str], shown: list[Progress]) -> int:
    """Run the gate; notes in ``names`` what it runs and in ``shown`` what is on the screen meanwhile."""
    from .cli_gate import finish, prepared
    from .files import check_writable
    from .resume import FOLDER, forget
    from .run import run_gate

    run = prepared(options, ranks.mesh.device_type)
    if not ranks.first:
        # Said once is enough: all ranks do the same.
        warnings.showwarning = lambda *_, **__: None
    if ranks.first:
        if options.fresh:
            forget(out / FOLDER)
        check_writable(out)
    names += [recipe.name for recipe in run.recipes]
    with RankProgress(make_progress(options.quiet or not ranks.first), ranks) as progress, prints_aside():
        shown.append(progress)
        reports = run_gate(run, progress, ranks)
    shown.clear()
    return ranks.from_first(lambda: finish(reports, out, options))


def _fail(watch: RankWatch, error: BaseException) -> NoReturn:
    """End the job for what went wrong on this rank."""
    if "--debug" in sys.argv:
        traceback.print_exc()
    if isinstance(error, KeyboardInterrupt):
        watch.fail("interrupted", exits.INTERRUPTED)
    if isinstance(error, NarrowgateError):
        from ..recipes.errors import RecipeError

        # A recipe's faults begin with file and line, as compilers write them.
        text = str(error) if isinstance(error, RecipeError) else f"narrowgate: {error}"
        watch.fail(text, exits.USAGE)
    text = exits.failure_text(error)
    waited = "timed out" in text.lower() or "timeout" in text.lower()
    if waited:
        text = f"a collective did not end within {watch.limit:g} s, the time limit: another rank is late, or hangs"
    watch.fail(text, exits.FAILED, waited=waited)
