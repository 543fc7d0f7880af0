"""A gate run from end to end: open, train, time, decide, report."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..precision.errors import NarrowgateError, did_you_mean
from ..recipes import apply_recipe
from . import task as tasks
from .arithmetic import Arithmetic
from .batches import weights_fingerprint
from .decision import decide_family, more_seeds_may_decide
from .distributed_time import planned_wire
from .environment import environment
from .evidence import evidence_of, statistics_of
from .looks import planned
from .measurements import Measurements, PartQuality, StepTime
from .outputs import OWN_NAMES
from .pairs import Pair, combine, refuse_copies
from .policy import Policy
from .progress import Progress
from .quality_parts import part_quality, parts_of
from .rank_arm import RankJob, arithmetic_of, rank_store, tables_of
from .rank_data import RankTask
from .report import SCHEMA_VERSION, RecipeFacts, Report, Reuse
from .resume import SeedStore, open_store
from .rows import rows_for
from .run_timing import Timed, time_recipes
from .seeds import Job, train_in_process
from .task import Task, TaskSource
from .train import Arm, seed_generators
from .wall import Marks, wall_seconds
from .workers import train_seeds

if TYPE_CHECKING:
    from ..recipes.plan import Plan
    from ..recipes.recipe import Recipe
    from .ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """What to gate.

    Attributes:
        source: how to open the task.
        recipes: at least one, with different names.
        policy: margins, limits and the number of seeds.
        backend: overrides the recipes' backends.
        seeds: overrides the policy's number of paired seeds.
        attribute_quality: also train with the recipe on one part of the model at a time, to say where quality is lost.
        store: folder in which finished trainings are kept and found; None keeps none.
    """

    source: TaskSource
    recipes: tuple[Recipe, ...]
    policy: Policy
    backend: str | None = None
    seeds: int | None = None
    store: Path | None = None
    attribute_quality: bool = False

    def __post_init__(self) -> None:
        repeated = [name for name, n in Counter(r.name for r in self.recipes).items() if n > 1]
        if repeated:
            raise NarrowgateError(f"recipe '{repeated[0]}' is given twice; every report needs a name of its own")
        taken = [recipe.name for recipe in self.recipes if recipe.name.lower() in OWN_NAMES]
        if taken and len(self.recipes) > 1:
            raise NarrowgateError(
                f"recipe '{taken[0]}': a run of several writes a file of that name beside their folders;"
                " name it otherwise"
            )
        if self.seeds is not None and self.seeds < 1:
            raise NarrowgateError(f"seeds: found {self.seeds}, expected at least 1")

    def looks(self) -> tuple[int, ...]:
        """Return the numbers of seeds after which the run looks at the data; empty where it looks once, at the end."""
        return planned(self.policy.looks, self.policy.seeds if self.seeds is None else self.seeds)


def run_gate(run: Run, progress: Progress, ranks: Ranks | None = None) -> list[Report]:
    """Train, time and decide; return one report a recipe.

    Args:
        run: what to gate.
        progress: hears what happens.
        ranks: the job whose ranks do this together, each of them calling it; all return the same but for what is
            their own, such as times that passed. None is one process.

    Raises:
        NarrowgateError: bad input, found before training wherever it can be.
        RunError: the run failed.
    """
    started = time.monotonic()
    progress.phase(f"opening {run.source.task or f'{run.source.model} on {run.source.data}'}")
    task = run.source.open()
    device = torch.device(run.source.device)
    if ranks is not None:
        tables_of(run.recipes)  # or what is wrong with them
    plans = [_plan(task, recipe, run.backend, device, ranks) for recipe in run.recipes]
    store = _open_store(run, task, device, ranks)
    _check_tasks(task, run.policy)
    opened = time.monotonic()

    job = _job(run, store, ranks)
    arms = job.arms(task, device)
    pairs = _train(run, job, task, arms, plans, progress)
    trained = time.monotonic()
    parts = [_parts(run, job, task, plan, device, progress) if run.attribute_quality else () for plan in plans]
    attributed = time.monotonic()

    timed = time_recipes(run.policy, job, task, arms, plans, progress)
    marks = Marks(started, opened, trained, attributed if run.attribute_quality else trained, time.monotonic())
    looks = run.looks()
    measured = [_measurements(pairs[i], timed[i], plan, looks, parts[i]) for i, plan in enumerate(plans)]
    wall = wall_seconds(marks, measured, device.type == "cuda")
    reuse = [
        _reuse(own, _on_first(ranks, lambda arm=arm, own=own: _looked(store, arm, len(own))))
        for (_, arm), own in zip(arms[1:], pairs, strict=True)
    ]
    return [
        _report(run, task, plan, m, decision, wall, own, ranks)
        for plan, m, decision, own in zip(plans, measured, decide_family(measured, run.policy), reuse, strict=True)
    ]


def _train(
    run: Run, job: Job, task: Task, arms: Sequence[tuple[str, Arm]], plans: Sequence[Plan], progress: Progress
) -> list[list[Pair]]:
    """Train up to each look in turn, until quality is decided or the last is reached; return each recipe's pairs."""
    pairs: list[list[Pair]] = [[] for _ in plans]
    looks = run.looks()
    device, last = torch.device(run.source.device), run.policy.seeds if run.seeds is None else run.seeds
    for until in looks or (last,):
        seeds = range(len(pairs[0]), until)
        text = f"training {len(seeds)} paired seeds of {1 + len(plans)} arms on {device.type}"
        if looks:
            text += f", up to the look at {until} of at most {last} seeds"
        progress.phase(text, trainings=len(seeds) * (1 + len(plans)))
        if device.type == "cuda" or isinstance(job, RankJob):
            by_seed = train_in_process(job, task, arms, seeds, progress)
        else:
            by_seed = train_seeds(job, seeds, progress)
        for i, own in enumerate(pairs):
            own += [by_seed[seed][i] for seed in seeds]
            refuse_copies(own)  # before anything is timed
        if until == last:
            break
        untimed, accept = Timed(StepTime(status="skipped")), run.policy.alpha / len(plans)
        found = [_measurements(own, untimed, plan, looks) for own, plan in zip(pairs, plans, strict=True)]
        if not any(more_seeds_may_decide(m, run.policy, accept) for m in found):
            break
    return pairs


def _parts(
    run: Run, job: Job, task: Task, plan: Plan, device: torch.device, progress: Progress
) -> tuple[PartQuality, ...]:
    """Train each part of the recipe alone and all but it, over the fewest seeds that can decide."""
    parts = parts_of(plan)
    recipes = [recipe for part in parts for recipe in (part.only, part.without)]
    if not recipes:
        return ()
    seeds = range(min(run.policy.min_seeds, run.policy.seeds if run.seeds is None else run.seeds))
    progress.phase(
        f"attributing quality of {plan.recipe.name}: {len(parts)} parts, {len(seeds)} seeds",
        trainings=len(seeds) * (1 + len(recipes)),
    )
    part_job = replace(job, recipes=tuple(recipes))
    if device.type == "cuda" or isinstance(job, RankJob):
        by_seed = train_in_process(part_job, task, part_job.arms(task, device), seeds, progress, keep=False)
    else:
        by_seed = train_seeds(part_job, seeds, progress)
    pairs = [[by_seed[seed][i] for seed in seeds] for i in range(len(recipes))]
    return tuple(part_quality(part, pairs[2 * i], pairs[2 * i + 1]) for i, part in enumerate(parts))


def _check_tasks(task: Task, policy: Policy) -> None:
    names: Any = getattr(task, "task_names", None)
    # A task that does not name its columns gets names with its first prediction; what is then missing is undecided.
    if names is None:
        return
    for name in policy.tasks:
        if name not in names:
            hint = did_you_mean(name, names)
            raise NarrowgateError(f"policy {policy.policy}: tasks: found '{name}', expected {', '.join(names)}{hint}")


def _job(run: Run, store: SeedStore | None, ranks: Ranks | None) -> Job:
    if ranks is None:
        return Job(run.source, run.recipes, run.backend, run.policy.stability, store)
    return RankJob(run.source, run.recipes, run.backend, run.policy.stability, store, ranks)


def _on_first(ranks: Ranks | None, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, of several ranks on the first."""
    return work() if ranks is None else ranks.from_first(work)


def _open_store(run: Run, task: Task, device: torch.device, ranks: Ranks | None) -> SeedStore | None:
    if run.store is None:
        return None
    seed_generators(0)
    weights = weights_fingerprint(task.build_model().to(device))
    store = open_store(run.store, run.source, task, weights)
    return store if ranks is None else rank_store(store, ranks, tables_of(run.recipes))


def _plan(task: Task, recipe: Recipe, backend: str | None, device: torch.device, ranks: Ranks | None) -> Plan:
    """Apply a recipe to a throw-away model: whatever does not fit shows before any training."""
    if ranks is not None:
        task = RankTask.of(task, ranks.rank, ranks.count).task
    seed_generators(0)
    model = task.build_model().to(device)
    rows = _on_first(ranks, lambda: rows_for(recipe, task, model))
    plan = apply_recipe(model, recipe, backend=backend, rows=rows)
    if ranks is not None:
        planned_wire(task, device, plan, ranks.count, ranks.replicas)
    return plan


def _measurements(
    pairs: Sequence[Pair],
    timed: Timed,
    plan: Plan,
    looks: tuple[int, ...] = (),
    parts: tuple[PartQuality, ...] = (),
) -> Measurements:
    return Measurements(
        tasks=pairs[0].tasks,
        seeds=tuple(pair.run for pair in pairs),
        rows=combine(pairs),
        step_time=timed.step,
        module_time=timed.modules,
        fused_time=timed.fused,
        distributed=timed.distributed,
        device=plan.device.name,
        emulated=tuple(plan.emulated_reasons()),
        looks=looks,
        parts=parts,
    )


def _looked(store: SeedStore | None, arm: Arm, seeds: int) -> list[str]:
    """Say where a decision pools seeds that an earlier run already decided on."""
    earlier = [] if store is None else store.earlier_looks(arm, seeds)
    if not earlier:
        return []
    runs = f"{len(earlier)} earlier run{'s' * (len(earlier) > 1)}"
    return [
        f"{runs} into this folder looked at the first {', '.join(map(str, earlier))} seeds, and this one at {seeds}:"
        " its bounds do not count those looks; declare looks ahead (the policy's looks) to keep the level"
    ]


def _reuse(pairs: Sequence[Pair], notes: Sequence[str]) -> Reuse:
    return Reuse(
        trainings=2 * len(pairs),
        baseline=sum(pair.run.baseline.reused for pair in pairs),
        candidate=sum(pair.run.candidate.reused for pair in pairs),
        notes=(*notes, *dict.fromkeys(note for pair in pairs for note in pair.notes)),
    )


def _report(
    run: Run,
    task: Task,
    plan: Plan,
    m: Measurements,
    decision: Any,
    wall: dict[str, float],
    reuse: Reuse,
    ranks: Ranks | None,
) -> Report:
    model, data = tasks.describe(task)
    recipe = plan.recipe
    arithmetic = (
        str(Arithmetic.of(torch.device(run.source.device)))
        if ranks is None
        else arithmetic_of(ranks, tables_of(run.recipes))
    )
    return Report(
        schema_version=SCHEMA_VERSION,
        verdict=decision.verdict,
        reasons=decision.reasons,
        recipe=RecipeFacts(
            name=recipe.name,
            description=recipe.description,
            hash=recipe.hash(),
            backend=plan.backend,
            resolved=recipe.to_dict(),
            plan={**plan.to_dict(), "groups": plan_groups(plan)},
        ),
        model=model,
        data=data,
        environment=environment(run.source.device) | ({} if ranks is None else {"ranks": ranks.count}),
        gates=decision.gates,
        statistics=statistics_of(m, decision),
        evidence=evidence_of(m, run.policy, arithmetic),
        policy=run.policy,
        wall_seconds=wall,
        measurements=m,
        reuse=reuse,
    )


def plan_groups(plan: Plan) -> list[dict[str, Any]]:
    """Return the plan's layers grouped by what they run, most layers first; emulated paths say so."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for layer in plan.layers:
        cells = []
        for path, gemm in layer.config.gemms():
            text = str(gemm.first) if gemm.first == gemm.second else f"{gemm.first} · {gemm.second}"
            cells.append(text if layer.support[path].native else f"{text} (emulated)")
        groups[tuple(cells)].append(layer.name)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [
        {"layers": len(names), "fprop": cells[0], "dgrad": cells[1], "wgrad": cells[2], "example": names[0]}
        for cells, names in ordered
    ]
