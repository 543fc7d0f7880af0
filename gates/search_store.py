"""What a search keeps beside its reports: results of screens, and which recipes the gate judged in this folder before.

Screens are found again by the content of what they trained (task, data, source, device, steps, seeds and recipe), as
finished trainings are (:mod:`narrowgate.gates.resume`), and hold no rows: a later search with a larger budget goes on
from them. The family is found by the task's name alone: another version of the program is no reason to forget a chance
to accept that was taken on the same data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .decision import accept_p, decide
from .files import write_together
from .measurements import Record
from .policy import StabilityLimits
from .report import Report, decided
from .search import Screened
from .statistics import holm_levels
from .task import TaskSource

#: The folder among a search's reports.
FOLDER = ".search"
_SCREENS, _FAMILY = "screens.json", "family.json"


class Member(Record):
    """A recipe that the full gate judged."""

    #: What it was judged on.
    task: str
    name: str
    hash: str
    #: Its p value over the level of the policy in force: below 1 where it would be accepted on its own.
    share: float


_SCREENS_TYPE = TypeAdapter(dict[str, Screened])
_FAMILY_TYPE = TypeAdapter(list[Member])


@dataclass(frozen=True)
class SearchStore:
    """Keeps and finds what earlier searches into a folder measured."""

    folder: Path

    def screens(self) -> dict[str, Screened]:
        """Return results of screens by key; nothing where they cannot be read."""
        return _read(self.folder / _SCREENS, _SCREENS_TYPE) or {}

    def keep_screens(self, screens: dict[str, Screened]) -> None:
        """Replace what :meth:`screens` returns."""
        text = _SCREENS_TYPE.dump_json(screens).decode()
        write_together(self.folder, {_SCREENS: text + "\n"})

    def forget_screens(self) -> None:
        """Remove results of screens; the family stays, whose chances were taken."""
        with contextlib.suppress(OSError):  # where nothing can be removed nothing can be written, which is said then
            (self.folder / _SCREENS).unlink(missing_ok=True)

    def family(self, task: str) -> list[Member]:
        """Return the recipes that were judged on ``task``."""
        return [member for member in _read(self.folder / _FAMILY, _FAMILY_TYPE) or [] if member.task == task]

    def keep_family(self, members: Sequence[Member]) -> None:
        """Add members, in place of those of the same recipe on the same task."""
        new = {(member.task, member.hash) for member in members}
        before = _read(self.folder / _FAMILY, _FAMILY_TYPE) or []
        kept = [member for member in before if (member.task, member.hash) not in new]
        text = _FAMILY_TYPE.dump_json([*kept, *members], indent=1).decode()
        write_together(self.folder, {_FAMILY: text + "\n"})


def screen_key(
    content: str, recipe: str, backend: str | None, limits: StabilityLimits, steps: int | None, seeds: Sequence[int]
) -> str:
    """Return what a screen is found by: hashes of its task's content and of its recipe, how it trains and is judged."""
    parts = [content, recipe, backend, limits.model_dump(mode="json"), steps, list(seeds)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def task_name(source: TaskSource) -> str:
    """Return what a task is known by in a family."""
    return source.task or f"{source.model} on {source.data}"


def as_family(reports: Sequence[Report], earlier: Sequence[Member], task: str) -> tuple[list[Report], list[Member]]:
    """Decide reports again as one family with what was judged before; return them, and them as members.

    Args:
        reports: of one run of the gate.
        earlier: judged before; those of the same recipes count once, as what they are now.
        task: what all were judged on.
    """
    members = [
        Member(
            task=task,
            name=report.recipe.name,
            hash=report.recipe.hash,
            share=accept_p(report.measurements, report.policy) / report.policy.alpha,
        )
        for report in reports
    ]
    now = {member.hash for member in members}
    others = [member for member in earlier if member.hash not in now]
    if not others:
        return list(reports), members
    # Policies may have different levels, so p values are compared in multiples of each one's own.
    levels = holm_levels([member.share for member in (*members, *others)], 1.0)

    def again(report: Report, level: float) -> Report:
        alpha, size = report.policy.alpha, len(levels)
        decision = decide(report.measurements, report.policy, accept_alpha=level * alpha, family=size)
        return decided(report, decision, report.policy)

    return [again(report, level) for report, level in zip(reports, levels, strict=False)], members


def _read(path: Path, kind: TypeAdapter[Any]) -> Any:
    """Return what a file holds; None where there is none, or it is damaged."""
    try:
        return kind.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
