"""The driver of ``narrowgate search``: screens candidates cheaply, then puts the best through the full gate.

A **screen** trains few seeds for fewer steps and compares mean losses with the margins. It is no test: it has no
level, and the best of many screens looks better than it is. So nothing is accepted on one. Screens draw from seeds of
their own (:data:`SCREEN_SEEDS` on, past every seed of a gate), the full gate measures its finalists anew, and Holm's
procedure counts every recipe that the gate ever judged on this task into the folder.

What is measured comes from a :class:`Measurer`, and the order of work follows from it alone: the same measurements
lead to the same candidates, so a search that was interrupted goes on by finding its trainings done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..precision.errors import NarrowgateError
from ..recipes.descent import TARGET, Descent
from ..recipes.recipe import Recipe
from ..recipes.search import DENSE, LOW, WGRAD, Setting, Start, total_worth
from .measurements import PartEffect, Record
from .policy import Policy
from .quality_parts import layer_groups
from .report import Report

#: The first seed of screens; a gate's seeds end before it.
SCREEN_SEEDS = 1000
#: Margins that a candidate lost which broke: a loss that is not finite, an unstable training.
BROKEN = 10.0


class Screened(Record):
    """What a screen measured of one recipe."""

    seeds: int
    #: Paired differences by task.
    effects: dict[str, PartEffect]
    #: Why the stability gate would fail it; None where it would not.
    fault: str | None = None
    #: That one training took, on the mean.
    seconds: float = 0.0

    def losses(self, policy: Policy) -> dict[str, float]:
        """Return mean losses by gate and task, in margins of the policy; 1 is a loss at the margin."""
        found: dict[str, float] = {}
        for task, effect in self.effects.items():
            for gate, values, margin in (
                ("ne", effect.ne_increase, policy.margin("max_ne_increase", task)),
                ("auc", effect.auc_loss, policy.margin("max_auc_loss", task)),
            ):
                assert margin is not None
                if len(values) == self.seeds:
                    found[f"{gate} {task}"] = sum(values) / self.seeds / margin
                elif gate == "ne" or values:  # an AUC that no seed has does not exist on these rows
                    found[f"{gate} {task}"] = BROKEN
        return found | ({} if self.fault is None else {"stability": BROKEN})


class Measurer(Protocol):
    """Trains and judges; a test may bring its own."""

    def screen(self, recipes: Sequence[Recipe], text: str) -> list[Screened]:
        """Screen recipes on the same seeds; ``text`` says what for."""
        ...

    def gate(self, recipes: Sequence[Recipe]) -> list[Report]:
        """Put recipes through the full gate, on seeds that no screen used, as one family."""
        ...

    def reserve(self, recipes: int) -> float:
        """Return about how many seconds the full gate of so many recipes will train."""
        ...


@dataclass(frozen=True)
class Limits:
    """How far a search goes.

    Attributes:
        candidates: recipes screened at most; those that only tell what parts of a recipe cost are not counted.
        seconds: when screening ends, so that the full gate fits before it; None is never.
        finalists: recipes that the full gate judges at most.
    """

    candidates: int = 12
    seconds: float | None = None
    finalists: int = 2


@dataclass(frozen=True)
class Candidate:
    """A recipe that was screened."""

    recipe: Recipe
    #: The recipe that it was made from, and where its units stand; units at the recipe's own formats are left out.
    base: str
    levels: Mapping[str, str]
    #: Predicted microseconds gained, or operations in low precision.
    worth: float
    #: Predicted speedup of the linear layers; None without predicted times.
    ratio: float | None
    screened: Screened
    #: By gate and task, in margins.
    losses: Mapping[str, float]
    #: It was screened to tell what a part costs; it may be a finalist all the same.
    probe: bool

    @property
    def worst(self) -> float:
        """The largest loss, in margins."""
        return max(self.losses.values(), default=0.0)

    @property
    def promising(self) -> bool:
        """Whether the screen lets it into the full gate."""
        return self.worst <= TARGET


@dataclass
class Found:
    """What a search has found so far."""

    #: Recipes to begin with that were left out, and why.
    skipped: dict[str, str] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    finalists: list[Candidate] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    #: Why screening ended.
    ended: str | None = None
    #: Recipes that the gate judged on this task into this folder before.
    earlier: tuple[str, ...] = ()

    @property
    def verdict(self) -> Literal["accept", "reject", "inconclusive"]:
        """``accept`` where a recipe was accepted, ``reject`` where all that were judged were rejected."""
        verdicts = {report.verdict for report in self.reports}
        return "accept" if "accept" in verdicts else "reject" if verdicts == {"reject"} else "inconclusive"


def search(
    starts: Sequence[Start],
    measurer: Measurer,
    policy: Policy,
    limits: Limits,
    *,
    found: Found | None = None,
    told: Callable[[Found], None] = lambda found: None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Screen candidates of ``starts`` and put the best through the full gate.

    Args:
        starts: with lowered layers, and different base names.
        measurer: trains and judges.
        policy: margins.
        limits: how far to go.
        found: where to note what is found; a new one where None.
        told: hears of every change of it.
        clock: seconds.

    Raises:
        NarrowgateError: bad input that only running shows.
        RunError: a run failed.
    """
    if not starts:
        raise NarrowgateError("search: found no recipe to begin with, expected at least one")
    run = _Search(measurer, policy, limits, Found() if found is None else found, told, clock)
    run.screen_all(starts)
    run.judge()
    return run.found


@dataclass
class _Line:
    """One start on its way down."""

    start: Start
    descent: Descent


class _Search:
    def __init__(
        self,
        measurer: Measurer,
        policy: Policy,
        limits: Limits,
        found: Found,
        told: Callable[[Found], None],
        clock: Callable[[], float],
    ) -> None:
        self.measurer, self.policy, self.limits, self.found, self.told = measurer, policy, limits, found, told
        self.clock, self.started = clock, clock()
        self.left = limits.candidates

    def screen_all(self, starts: Sequence[Start]) -> None:
        """Screen every start as it is, then descend from those that lose too much, the one worth most first."""
        ordered = sorted(starts, key=lambda start: -start.worth)
        lines = [_Line(start, Descent(start.units(layer_groups(start.lowered)))) for start in ordered]
        firsts, others = lines[: self.left], lines[self.left :]
        for line in others:
            self.found.skipped[line.start.base.name] = f"the budget of {self.limits.candidates} candidates has no room"
        # Together, on the same baselines.
        self._measure([(line, self._proposed(line)) for line in firsts], "the recipes to begin with")
        for i, line in enumerate(firsts):
            # Half of what is left, so that one hopeless start does not use it up.
            allowance = self.left if i == len(firsts) - 1 else -(-self.left // 2)
            self._descend(line, self.left - allowance)
        if self.found.ended is None:
            self.found.ended = "nothing that could still be worth more is left to try"
        self.told(self.found)

    def judge(self) -> None:
        """Put the finalists through the full gate: what promises most, or else what lost least."""
        found, promising = self.found, self._promising()
        found.finalists = promising[: self.limits.finalists] or [
            min(found.candidates, key=lambda c: (c.worst, -c.worth))
        ]
        self.told(found)
        found.reports = self.measurer.gate([candidate.recipe for candidate in found.finalists])
        self.told(found)

    def _descend(self, line: _Line, keep: int) -> None:
        """Screen what a start leads to, until ``keep`` candidates of the budget are left."""
        while not self._over(keep):
            # Every candidate of a start is worth less than it: none could be a finalist.
            if self._beaten(line.start.worth):
                return
            if line.descent.wants_risks:
                self._probe(line)
                continue
            setting = line.descent.propose()
            if setting is None:
                return
            self._measure([(line, setting)], f"candidate {self.limits.candidates - self.left + 1}")

    def _over(self, keep: int) -> bool:
        if self.left <= 0:
            self.found.ended = f"the budget of {self.limits.candidates} candidates is used up"
            return True
        seconds = self.limits.seconds
        if seconds is not None:
            spent = self.clock() - self.started
            if spent + self.measurer.reserve(self.limits.finalists) > seconds:
                self.found.ended = f"the full gate would not fit into the {seconds / 60:g} minutes otherwise"
                return True
        return self.left <= keep

    def _beaten(self, worth: float) -> bool:
        return sum(c.worth >= worth for c in self._promising()) >= self.limits.finalists

    def _promising(self) -> list[Candidate]:
        """Return what screens let through, once a recipe, worth most first."""
        unique = {candidate.recipe.hash(): candidate for candidate in reversed(self.found.candidates)}
        return sorted((c for c in unique.values() if c.promising), key=lambda c: (-c.worth, c.worst, c.recipe.name))

    def _proposed(self, line: _Line) -> Setting:
        setting = line.descent.propose()
        assert setting is not None, "a start itself is always proposed"
        return setting

    def _measure(self, wanted: Sequence[tuple[_Line, Setting]], text: str, *, probe: bool = False) -> list[Candidate]:
        """Screen settings together, note them and return them."""
        recipes = [line.start.candidate(line.descent.units, setting) for line, setting in wanted]
        screened = self.measurer.screen(recipes, text)
        new = []
        for (line, setting), recipe, own in zip(wanted, recipes, screened, strict=True):
            losses = own.losses(self.policy)
            units = line.descent.units
            levels = {unit.name: level for unit, level in zip(units, setting, strict=True) if level != LOW}
            worth = total_worth(units, setting)
            ratio = _ratio(line.start, worth)
            new.append(Candidate(recipe, line.start.base.name, levels, worth, ratio, own, losses, probe))
            if not probe:
                line.descent.learn(setting, losses)
                self.left -= 1
        self.found.candidates += new
        self.told(self.found)
        return new

    def _probe(self, line: _Line) -> None:
        """Train each unit alone, all but each, and all with BF16 weight gradients: what each costs, and that path."""
        units = line.descent.units
        count = range(len(units))
        whole: Setting = tuple(LOW for _ in count)
        only: list[Setting] = [tuple(LOW if j == i else DENSE for j in count) for i in count]
        without: list[Setting] = [tuple(DENSE if j == i else LOW for j in count) for i in count]
        wgrad: Setting = tuple(WGRAD if WGRAD in unit.levels else LOW for unit in units)
        safer = [*without, *([] if wgrad == whole else [wgrad])]
        settings = list(dict.fromkeys([*only, *safer]))  # of two units, one alone is all but the other
        text = f"what {len(units)} parts of {line.start.base.name} cost"
        measured = self._measure([(line, setting) for setting in settings], text, probe=True)
        losses = dict(zip(settings, (candidate.losses for candidate in measured), strict=True))
        first = line.start.candidate(units, whole).hash()
        all_on = next(c.losses for c in self.found.candidates if c.recipe.hash() == first)

        def risk(alone: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
            """Half of what the unit costs by itself and half of what leaving it out gives back: errors interact."""
            return {g: (alone.get(g, 0.0) + loss - others.get(g, 0.0)) / 2 for g, loss in all_on.items()}

        risks = {units[i].name: risk(losses[only[i]], losses[without[i]]) for i in count}
        line.descent.tell_risks(risks, _share(all_on, losses.get(wgrad)))
        for setting in safer:
            line.descent.learn(setting, losses[setting], probe=True)


def _share(all_on: Mapping[str, float], without: Mapping[str, float] | None) -> float | None:
    """Return the part of the worst loss that leaving a path out gives back; None where it is unknown."""
    worst = max(all_on, key=lambda gate: all_on[gate], default=None)
    if without is None or worst is None or all_on[worst] <= 0:
        return None
    return (all_on[worst] - without.get(worst, 0.0)) / all_on[worst]


def _ratio(start: Start, gain_us: float) -> float | None:
    """Return the predicted speedup of the linear layers of a candidate that gains so much; None without times."""
    totals = start.plan.totals() if start.by == "time" else None
    return None if totals is None else totals.bf16_us / (totals.bf16_us - gain_us)
