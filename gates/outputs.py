"""A run's outcomes as files: a report's own set, a folder for each of several, and the summary over them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import exits
from .files import write_together
from .junit import junit_failed_run
from .render import render_summary
from .report import FILES, Report

SUMMARY_FILES: tuple[str, ...] = ("summary.json", "summary.md")
#: What a folder of several reports has beside theirs, in lower case: folders on some systems do not tell cases apart.
OWN_NAMES = frozenset((*FILES, *SUMMARY_FILES))


@dataclass(frozen=True)
class Outcome:
    """What became of one of several gates."""

    #: Its folder among the reports.
    name: str
    recipe: str
    #: None where the run failed.
    report: Report | None
    #: Why the run failed, in one line.
    failure: str | None = None

    def __post_init__(self) -> None:
        assert (self.report is None) == (self.failure is not None), "a report, or why there is none"

    @property
    def verdict(self) -> str:
        """``accept``, ``reject``, ``inconclusive`` or ``failed``."""
        return exits.FAILED_RUN if self.report is None else self.report.verdict


def write_report(report: Report, folder: Path) -> None:
    """Write a report's files into ``folder``, all or none; an older run's summary there goes."""
    write_together(folder, report.files(), stale=SUMMARY_FILES)


def write_failure(recipe: str, message: str, folder: Path) -> None:
    """Leave a JUnit error in place of an older run's files, which would read as this run's."""
    stale = tuple(name for name in (*FILES, *SUMMARY_FILES) if name != "junit.xml")
    write_together(folder, {"junit.xml": junit_failed_run(recipe, message)}, stale=stale)


def forget_summary(out: Path) -> None:
    """Remove what an older run left beside the folders: until the new summary stands, none says what they hold."""
    for name in (*SUMMARY_FILES, *FILES):
        (out / name).unlink(missing_ok=True)


def write_outcome(outcome: Outcome, out: Path) -> None:
    """Write one of several gates into its folder of ``out``."""
    folder = out / outcome.name
    if outcome.report is not None:
        write_report(outcome.report, folder)
    else:
        write_failure(outcome.recipe, outcome.failure or "", folder)


def write_summary(outcomes: Sequence[Outcome], out: Path) -> None:
    """Write ``summary.json`` and ``summary.md`` over the folders of ``out``."""
    data = json.dumps(summary_of(outcomes), indent=1, allow_nan=False) + "\n"
    write_together(out, dict(zip(SUMMARY_FILES, (data, render_summary(outcomes)), strict=True)))


def summary_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the data of ``summary.json``: one entry a gate, the worst one's exit code over them."""
    return {
        "schema_version": 1,
        "exit_code": exits.exit_code(outcome.verdict for outcome in outcomes),
        "family": max((o.report.statistics.family for o in outcomes if o.report), default=len(outcomes)),
        "recipes": [_entry(outcome) for outcome in outcomes],
    }


def _entry(outcome: Outcome) -> dict[str, Any]:
    report = outcome.report
    return {
        "name": outcome.name,
        "recipe": outcome.recipe,
        "hash": report.recipe.hash if report else None,
        "model": report.model.get("name") if report else None,
        "data": report.data.get("name") if report else None,
        "policy": report.policy.policy if report else None,
        "verdict": outcome.verdict,
        "failure": outcome.failure,
        "family": report.statistics.family if report else None,
        "reasons": [reason.model_dump() for reason in report.reasons] if report else [],
        "gates": [gate.model_dump() for gate in report.gates] if report else [],
        "report": f"{outcome.name}/{FILES[0]}" if report else None,
    }
