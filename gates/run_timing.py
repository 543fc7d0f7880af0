"""A run's timing: each candidate against the baseline, in one process, and where there are several ranks on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..recipes.recipe import OptimizerState
from .distributed_time import measure_distributed
from .fused_time import measure_fused_time
from .measurements import FusedTime, ModuleTime, StepTime
from .measurements_distributed import DistributedRun
from .module_time import measure_module_time
from .policy import Policy
from .progress import Progress
from .rank_arm import RankArm, RankJob
from .rank_data import RankTask
from .ranks import Ranks
from .seeds import Job
from .speed import measure_step_time
from .task import Task
from .train import Arm

if TYPE_CHECKING:
    from ..recipes.plan import Plan

_TOO_LARGE = "the whole model does not fit one GPU"


@dataclass(frozen=True)
class Timed:
    """What was timed of one candidate."""

    step: StepTime
    modules: ModuleTime | None = None
    fused: FusedTime | None = None
    distributed: DistributedRun | None = None


def time_recipes(
    policy: Policy,
    job: Job,
    task: Task,
    arms: Sequence[tuple[str, Arm]],
    plans: Sequence[Plan],
    progress: Progress,
) -> list[Timed]:
    """Time every candidate of a job.

    Args:
        policy: how long.
        job: what was trained.
        task: the opened task.
        arms: the job's, the baseline first.
        plans: the candidates'.
        progress: hears what is timed.
    """
    if isinstance(job, RankJob):
        return _on_ranks(policy, job, task, arms, plans, progress)
    baseline = arms[0][1]
    return [_alone(policy, plan, baseline, arm, progress) for plan, (_, arm) in zip(plans, arms[1:], strict=True)]


def _on_ranks(
    policy: Policy,
    job: RankJob,
    task: Task,
    arms: Sequence[tuple[str, Arm]],
    plans: Sequence[Plan],
    progress: Progress,
) -> list[Timed]:
    """As in one process, on each rank by itself and its own rows; then on all ranks together."""
    ranks = job.ranks
    assert ranks is not None
    view = RankTask.of(task, ranks.rank, ranks.count)
    whole = [arm for _, arm in Job(job.source, job.recipes, job.backend, job.limits).arms(view.task, arms[0][1].device)]
    found = []
    for i, plan in enumerate(plans):
        own, fits = _where_it_fits(ranks, policy, plan, whole[0], whole[i + 1], progress)
        baseline, candidate = arms[0][1], arms[i + 1][1]
        assert isinstance(baseline, RankArm)
        assert isinstance(candidate, RankArm)
        together = measure_distributed(
            ranks,
            (baseline, candidate),
            (whole[0], whole[i + 1]) if fits else None,
            plan,
            policy.speed,
            policy.alpha,
            lambda text, name=plan.recipe.name: progress.phase(f"timing steps of {name} on all ranks: {text}"),
        )
        found.append(Timed(own.step, own.modules, own.fused, together))
    return found


def _where_it_fits(
    ranks: Ranks, policy: Policy, plan: Plan, baseline: Arm, candidate: Arm, progress: Progress
) -> tuple[Timed, bool]:
    """Return the times of one rank alone (the first's), and whether the whole model fits on every rank."""
    own: Timed | None = None
    try:
        own = _alone(policy, plan, baseline, candidate, progress)
    except torch.OutOfMemoryError:
        baseline.discard()
        candidate.discard()
    if all(ranks.gather(own is not None)):
        return ranks.from_first(own), True  # type: ignore[return-value]
    nothing = Timed(StepTime(status="skipped"), ModuleTime(status="failed", why=_TOO_LARGE), FusedTime(why=_TOO_LARGE))
    return nothing, False


def _alone(policy: Policy, plan: Plan, baseline: Arm, candidate: Arm, progress: Progress) -> Timed:
    step = _time_steps(policy, plan, baseline, candidate, progress)
    fused = _time_fused(policy, plan, candidate, progress)
    return Timed(step, time_modules(policy, plan, baseline, candidate, progress), fused)


def _time_steps(policy: Policy, plan: Plan, baseline: Arm, candidate: Arm, progress: Progress) -> StepTime:
    if candidate.device.type != "cuda":
        return StepTime(status="no_gpu")
    if not plan.native:
        return StepTime(status="emulated")
    most = policy.speed.max_quartets
    progress.phase(f"timing steps of {plan.recipe.name}: warming up")

    def told(n: int, ratio: float) -> None:
        progress.phase(f"timing steps of {plan.recipe.name}: quartet {n} of at most {most}, speedup {ratio:.4f}x")

    return measure_step_time(baseline, candidate, policy.speed, policy.alpha, told)


def _time_fused(policy: Policy, plan: Plan, candidate: Arm, progress: Progress) -> FusedTime:
    if candidate.device.type != "cuda":
        return FusedTime(why="this run had no GPU")
    if not plan.native:
        return FusedTime(why=f"{plan.device.name} emulates part of the recipe")
    progress.phase(f"timing steps of {plan.recipe.name} against the same fusion in BF16")
    return measure_fused_time(candidate, plan, policy.speed, policy.alpha)


def time_modules(policy: Policy, plan: Plan, baseline: Arm, candidate: Arm, progress: Progress) -> ModuleTime:
    """Time the lowered modules alone, in both arms, or say why there is nothing to time."""
    if not plan.lowered and _changes_beyond_layers(plan):
        return ModuleTime(status="no_modules")
    if candidate.device.type != "cuda":
        return ModuleTime(status="no_gpu")
    if not plan.lowered:
        return ModuleTime(status="nothing_lowered")
    if not plan.native:
        return ModuleTime(status="emulated")
    progress.phase(f"timing modules of {plan.recipe.name}: noting a step")

    def told(text: str) -> None:
        progress.phase(f"timing modules of {plan.recipe.name}: {text}")

    return measure_module_time(baseline, candidate, plan, policy.speed, told)


def _changes_beyond_layers(plan: Plan) -> bool:
    """Whether a step changes where no layer is lowered: gathers, which are of lowered layers' weights, do not."""
    state = OptimizerState() if plan.recipe.optimizer is None else plan.recipe.optimizer
    return plan.reduce is not None or plan.tables is not None or state.state != OptimizerState().state
