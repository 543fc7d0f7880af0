"""Running the gates of a file: those that share all settings share a baseline, those of one task are one family."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..precision.errors import NarrowgateError
from . import exits, statistics
from .decision import accept_p, decide
from .gates_file import GateSpec
from .outputs import Outcome
from .policy import Policy
from .progress import Progress
from .report import Report, decided
from .run import Run, run_gate

T = TypeVar("T")


def run_gates(
    specs: Sequence[GateSpec], progress: Progress, done: Callable[[Outcome], None], store: Path | None = None
) -> list[Outcome]:
    """Run every gate; one that fails does not keep the others from running.

    Args:
        specs: the gates; names differ.
        progress: hears what happens.
        done: called with each outcome once it is decided, task by task.
        store: folder of finished trainings; None keeps none.

    Returns:
        The outcomes in the order of ``specs``.

    Raises:
        NarrowgateError: bad input that only running a gate shows, after the outcomes before it; names the gate.
    """
    for source in dict.fromkeys(spec.source for spec in specs):
        _at(next(spec for spec in specs if spec.source == source), source.open)
    found: dict[str, Outcome] = {}
    for source in dict.fromkeys(spec.source for spec in specs):
        family = [spec for spec in specs if spec.source == source]
        outcomes = [outcome for group in _groups(family) for outcome in _run(group, progress, store)]
        for outcome in _as_family(outcomes, {spec.name: spec.policy for spec in family}):
            found[outcome.name] = outcome
            done(outcome)
    return [found[spec.name] for spec in specs]


def _groups(family: Sequence[GateSpec]) -> list[list[GateSpec]]:
    """Group gates of one task that one run can hold: the same settings, and each recipe's name once."""
    groups: dict[tuple[object, ...], list[list[GateSpec]]] = defaultdict(list)
    for spec in family:
        fitting = groups[spec.policy.model_dump_json(), spec.seeds, spec.backend]
        for group in fitting:
            if all(other.recipe.name != spec.recipe.name for other in group):
                group.append(spec)
                break
        else:
            fitting.append([spec])
    return [group for fitting in groups.values() for group in fitting]


def _run(group: Sequence[GateSpec], progress: Progress, store: Path | None) -> list[Outcome]:
    first = group[0]
    recipes = tuple(spec.recipe for spec in group)
    run = Run(first.source, recipes, first.policy, first.backend, first.seeds, store)
    try:
        reports = _at(first, lambda: run_gate(run, progress))
    except NarrowgateError:
        raise
    except Exception as error:
        return [Outcome(spec.name, spec.recipe.name, None, exits.failure_text(error)) for spec in group]
    return [Outcome(spec.name, spec.recipe.name, report) for spec, report in zip(group, reports, strict=True)]


def _as_family(outcomes: list[Outcome], policies: dict[str, Policy]) -> list[Outcome]:
    """Decide all gates of one task again, as the family they are, where they did not all run together.

    Policies may have different levels, so p values are compared in multiples of each one's own; a run that failed
    claims nothing and still counts.
    """
    reports = [outcome.report for outcome in outcomes]
    if all(report is None or report.statistics.family == len(outcomes) for report in reports):
        return outcomes
    alphas = [policies[outcome.name].alpha for outcome in outcomes]
    shares = [
        float("inf") if report is None else accept_p(report.measurements, report.policy) / alpha
        for report, alpha in zip(reports, alphas, strict=True)
    ]
    levels = statistics.holm_levels(shares, 1.0)

    def again(report: Report, level: float) -> Report:
        decision = decide(report.measurements, report.policy, accept_alpha=level, family=len(outcomes))
        return decided(report, decision, report.policy)

    return [
        outcome if outcome.report is None else replace(outcome, report=again(outcome.report, level * alpha))
        for outcome, level, alpha in zip(outcomes, levels, alphas, strict=True)
    ]


def _at(spec: GateSpec, work: Callable[[], T]) -> T:
    """Do ``work`` and put the gate's place before what is wrong with its input."""
    try:
        return work()
    except NarrowgateError as error:
        raise NarrowgateError(f"{spec.place}: {error}") from error
