"""Training all arms of all seeds: seed by seed on a CPU, arm by arm on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .compilation import honest_compilation
from .pairs import Pair, Pairing
from .policy import StabilityLimits
from .progress import Progress, Step
from .resume import SeedStore
from .task import Task, TaskSource
from .train import Arm, Trained, Watch

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe

BASELINE = "baseline"


@dataclass(frozen=True)
class Job:
    """What every seed of a run trains: the baseline, and one candidate a recipe."""

    source: TaskSource
    recipes: tuple[Recipe, ...]
    backend: str | None
    limits: StabilityLimits
    #: Where finished trainings are kept and found; None keeps none.
    store: SeedStore | None = None

    def arms(self, task: Task, device: torch.device) -> list[tuple[str, Arm]]:
        """Return the named arms, the baseline first."""
        steps = self.source.steps
        named: list[tuple[str, Recipe | None]] = [(BASELINE, None), *((r.name, r) for r in self.recipes)]
        every = self.limits.observe_every
        return [(name, Arm(task, device, recipe, self.backend, steps, observe_every=every)) for name, recipe in named]

    def train(self, arm: Arm, seed: int, watch: Watch) -> Trained:
        """Train an arm under a seed, or find that training done."""
        return arm.train(seed, watch) if self.store is None else self.store.train(arm, seed, watch)


def train_seed(
    job: Job,
    pairing: Pairing,
    arms: Sequence[tuple[str, Arm]],
    seed: int,
    told: Callable[[Step], None],
    trained: Callable[[int, str], None],
) -> list[Pair]:
    """Train every arm under one seed; return one pair a candidate."""
    runs: list[Trained] = []
    for name, arm in arms:
        runs.append(job.train(arm, seed, watcher(seed, name, told)))
        trained(seed, name)
    return [pairing.pair(runs[0], run) for run in runs[1:]]


def train_in_process(
    job: Job,
    task: Task,
    arms: Sequence[tuple[str, Arm]],
    seeds: Sequence[int],
    progress: Progress,
    *,
    keep: bool = True,
) -> dict[int, list[Pair]]:
    """Train arm by arm in this process, so that each is compiled once and its peak memory is its own.

    Leaves the arms parked; or, without ``keep``, drops their models, of which many would fill the host's memory.

    Returns:
        By seed, one pair a candidate.
    """
    by_arm: list[list[Trained]] = []
    with honest_compilation():
        for name, arm in arms:
            runs = []
            for seed in seeds:
                runs.append(job.train(arm, seed, watcher(seed, name, progress.step)))
                progress.trained(seed, name)
            arm.park() if keep else arm.discard()
            by_arm.append(runs)
    pairing = Pairing(task, job.limits)
    return {
        seed: [pairing.pair(by_arm[0][i], candidate[i]) for candidate in by_arm[1:]] for i, seed in enumerate(seeds)
    }


def watcher(seed: int, arm: str, told: Callable[[Step], None]) -> Watch:
    """Return a training's watch function that tells of its steps."""
    return lambda step, steps, loss: told(Step(seed, arm, step, steps, loss))
