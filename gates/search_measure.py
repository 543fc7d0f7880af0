"""What measures for a search: screens on seeds of their own, kept for the next run, and the full gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..precision.errors import NarrowgateError
from .batches import length, weights_fingerprint
from .decision import decide
from .measurements import Measurements, StepTime
from .pairs import Pair
from .policy import Policy
from .progress import Progress
from .quality_parts import effects_of
from .report import Report
from .resume import SeedStore, open_store
from .run import Run, run_gate
from .search import SCREEN_SEEDS, Screened
from .search_store import Member, SearchStore, as_family, screen_key, task_name
from .seeds import Job, train_in_process
from .task import Task, TaskSource
from .train import seed_generators
from .workers import train_seeds, usable_cores

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe

#: Seeds of a screen where nobody says, and the part of the steps that it trains.
DEFAULT_SEEDS = 3
DEFAULT_SHARE = 0.5


@dataclass
class TaskMeasurer:
    """Measures recipes on one task.

    Attributes:
        source: the task as the full gate opens it.
        policy: of the full gate; its stability limits judge screens too.
        progress: hears what happens.
        kept: results of screens and the family; None keeps none.
        trainings: folder of finished trainings; None keeps none.
        backend: overrides the recipes' backends.
        seeds: overrides the policy's number of paired seeds in the full gate.
        screen_seeds: paired seeds of a screen.
        screen_steps: its training steps; None is half of the full gate's where that is known, else as many.
    """

    source: TaskSource
    policy: Policy
    progress: Progress
    kept: SearchStore | None = None
    trainings: Path | None = None
    backend: str | None = None
    seeds: int | None = None
    screen_seeds: int = DEFAULT_SEEDS
    screen_steps: int | None = None
    _screens: dict[str, Screened] = field(default_factory=dict, init=False)
    #: Keys of those that this search asked for.
    _used: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        most = self.policy.seeds if self.seeds is None else self.seeds
        if most > SCREEN_SEEDS:
            raise NarrowgateError(
                f"search: found {most} seeds for the full gate, expected at most {SCREEN_SEEDS}; screens use others"
            )
        self.steps = steps_of(self.source)
        if self.screen_steps is None and self.steps is not None:
            self.screen_steps = max(1, round(self.steps * DEFAULT_SHARE))
        if self.steps is not None and self.screen_steps is not None:
            self.screen_steps = min(self.screen_steps, self.steps)
        source = self.source if self.screen_steps is None else replace(self.source, steps=self.screen_steps)
        self._screen_source, self._task = source, source.open()
        self._device = torch.device(source.device)
        seed_generators(0)
        weights = weights_fingerprint(self._task.build_model().to(self._device))
        self._store = open_store(self.trainings or Path(), source, self._task, weights)
        if self.kept is not None:
            self._screens = self.kept.screens()

    @property
    def task(self) -> Task:
        """The task as screens open it."""
        return self._task

    @property
    def earlier(self) -> list[Member]:
        """Recipes that the gate judged on this task into this folder before."""
        return [] if self.kept is None else self.kept.family(task_name(self.source))

    def screen(self, recipes: Sequence[Recipe], text: str) -> list[Screened]:
        """Screen recipes together, on the same baselines; those that were screened before are not trained again."""
        seeds = range(SCREEN_SEEDS, SCREEN_SEEDS + self.screen_seeds)
        content, limits, steps = self._store.content, self.policy.stability, self.screen_steps
        keys = [screen_key(content, recipe.hash(), self.backend, limits, steps, seeds) for recipe in recipes]
        known = sum(key in self._screens for key in keys)
        missing = {key: recipe for key, recipe in zip(keys, recipes, strict=True) if key not in self._screens}
        found = f", {known} of them known" if known else ""
        trainings = len(seeds) * (1 + len(missing)) if missing else 0
        of = "" if self.screen_steps is None else f" of {self.screen_steps} steps"
        self.progress.phase(
            f"screening {text}: {len(recipes)} recipe{'s' * (len(recipes) > 1)}{found}, {len(seeds)} seeds{of}",
            trainings,
        )
        if missing:
            for key, pairs in zip(missing, self._train(list(missing.values()), seeds), strict=True):
                self._screens[key] = screened(pairs, self.policy)
            if self.kept is not None:
                self.kept.keep_screens(self._screens)
        self._used.update(keys)
        return [self._screens[key] for key in keys]

    def gate(self, recipes: Sequence[Recipe]) -> list[Report]:
        """Put recipes through the full gate, in one family with those that it judged into this folder before."""
        run = Run(self.source, tuple(recipes), self.policy, self.backend, self.seeds, self.trainings)
        reports, members = as_family(run_gate(run, self.progress), self.earlier, task_name(self.source))
        if self.kept is not None:
            self.kept.keep_family(members)
        return reports

    def reserve(self, recipes: int) -> float:
        """Return about how many seconds the full gate will train, from what screens took; 0 before the first."""
        if not self._used:
            return 0.0
        mean = sum(self._screens[key].seconds for key in self._used) / len(self._used)
        longer = self.steps / self.screen_steps if self.steps and self.screen_steps else 1.0
        seeds = self.policy.seeds if self.seeds is None else self.seeds
        side_by_side = 1 if self._device.type == "cuda" else min(usable_cores(), seeds)
        return mean * longer * (1 + recipes) * seeds / side_by_side

    def _train(self, recipes: Sequence[Recipe], seeds: Sequence[int]) -> list[list[Pair]]:
        """Train baseline and recipes under every seed; return each recipe's pairs."""
        store: SeedStore | None = None if self.trainings is None else self._store
        job = Job(self._screen_source, tuple(recipes), self.backend, self.policy.stability, store)
        if self._device.type == "cuda":
            arms = job.arms(self._task, self._device)
            by_seed = train_in_process(job, self._task, arms, seeds, self.progress, keep=False)
            # Nothing of it is used again, and what stays compiled counts towards the limit of recompilations.
            torch.compiler.reset()
        else:
            by_seed = train_seeds(job, seeds, self.progress)
        return [[by_seed[seed][i] for seed in seeds] for i in range(len(recipes))]


def screened(pairs: Sequence[Pair], policy: Policy) -> Screened:
    """Return what pairs of a screen showed; stability and the baseline are judged as the gate judges them.

    Raises:
        NarrowgateError: the baseline is not sane, so nothing that is compared with it tells anything.
    """
    m = Measurements(
        tasks=pairs[0].tasks,
        seeds=tuple(pair.run for pair in pairs),
        rows=None,
        step_time=StepTime(status="skipped"),
        device="of a screen",
    )
    decision = decide(m, policy)
    broken = next((reason.text for reason in decision.reasons if reason.code == "baseline_not_sane"), None)
    if broken is not None:
        raise NarrowgateError(f"search: a screen of so few steps tells nothing: {broken} Give more --screen-steps")
    unstable = any(gate.name == "stability" and gate.status == "fail" for gate in decision.gates)
    fault = next((reason.text for reason in decision.reasons if unstable and reason.gate == "stability"), None)
    own = [arm.seconds for pair in pairs for arm in (pair.run.baseline, pair.run.candidate)]
    return Screened(seeds=len(pairs), effects=effects_of(pairs), fault=fault, seconds=sum(own) / len(own))


def steps_of(source: TaskSource) -> int | None:
    """Return the training steps of a seed; None where the task does not say how many batches it has."""
    total = length(source.open().train_batches(0))
    if source.steps is None:
        return total
    return source.steps if total is None else min(source.steps, total)
