"""What a step costs on several ranks: the bytes on the wire, and the time with it, without it, and on one rank alone.

**Bytes** are counted at the collectives of one eager step of each arm (:class:`narrowgate.precision.WireCount`) and
stand beside those that :mod:`narrowgate.recipes.wire_plan` plans for the recipe. A setting that something on the way
ignored shows as a difference (:mod:`narrowgate.gates.gate_wire`). Where ranks exchange rows of embedding tables, bytes
differ by rank: they are those of the rank that hands over most, in both arms.

**Times** are the slowest rank's. All arms take turns within each round: the step; the same step with *local*
collectives, in which a gather repeats this rank's shard in place of the others' (the same writes to memory, nothing on
the wire), a reduce-scatter keeps this rank's part, and a rank's own tables answer for all; and a step of the whole
model on each rank alone, on as many rows. Exposed communication is the first less the second; the third over the first
is the throughput of a GPU among the ranks over that of a GPU alone. Weights hardly move meanwhile: steps without a wire
would drive ranks apart. On a CPU the same code runs in a few rounds, and its times mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..models.embedding_exchange import exchanged_tables
from ..precision.wire import WireCount
from ..recipes.topology import example_topology
from ..recipes.wire_plan import Layout, Payload, predict_wire
from ..recipes.wire_units import Sharding
from .compilation import honest_compilation
from .measurements import StepTime
from .measurements_distributed import DistributedArm, DistributedRun, Planned, RankTime, Traffic, Wire
from .policy import SpeedPlan
from .rank_arm import RankArm
from .ranks import Ranks
from .sharded import Local, RankTimer, switch_collectives, without_wire
from .speed import CudaTimer, HostTimer, StepFunction, run_quartets, stage
from .train import Arm, seed_generators

if TYPE_CHECKING:
    import torch

    from ..precision.exchanged_rows import Request
    from ..recipes.plan import Plan
    from .task import Task

#: Rounds of turns on a GPU, as far as the budget goes, and on a CPU, where one step makes a block.
_ROUNDS, _LEAST_ROUNDS, _CPU_ROUNDS = 10, 3, 2
_WARMUP_ROUNDS = 3
#: Of the policy's seconds for step timing, those for the turns; the quartets have theirs whole.
_SHARE = 0.5


@dataclass(frozen=True)
class _Sent:
    """What one rank handed over in a step."""

    #: By collective and dtype's name.
    bytes: dict[tuple[str, str], int]
    calls: dict[str, int]


@dataclass
class _Running:
    """An arm that is sharded and warm."""

    step: StepFunction
    #: None where the recipe reduces gradients itself or replicas do, which nothing can stand in for.
    switches: tuple[Local, ...] | None
    #: By rank.
    sent: list[_Sent]
    #: Of each lookup in tables that lie on several ranks, what all of them asked for.
    lookups: tuple[tuple[Request, ...], ...]


def measure_distributed(
    ranks: Ranks,
    arms: tuple[RankArm, RankArm],
    alone: tuple[Arm, Arm] | None,
    plan: Plan,
    speed: SpeedPlan,
    alpha: float,
    told: Callable[[str], None],
) -> DistributedRun:
    """Measure baseline and candidate on all ranks; every rank returns the same.

    Args:
        ranks: the job.
        arms: baseline and candidate, trained by all ranks.
        alone: both on one rank; None where the whole model does not fit there.
        plan: the candidate's.
        speed: sample sizes and budget.
        alpha: level of the interval on the step's speedup.
        told: hears what is being done.
    """
    began = time.perf_counter()
    gpu = arms[0].device.type == "cuda"
    with honest_compilation():
        batches = stage(arms[0].batches(0)[0], arms[0].device, speed.steps_per_block if gpu else 1)
        running = []
        for arm, name in zip(arms, ("baseline", "candidate"), strict=True):
            told(f"counting what the {name} sends")
            running.append(_ready(arm, batches))
        payloads = planned_wire(arms[1].task, arms[1].device, plan, ranks.count, ranks.replicas, running[1].lookups)
        steps = {}
        for name, one in zip(("baseline", "candidate"), running, strict=True):
            steps[name] = one.step
            if one.switches is not None:
                steps[f"{name} local"] = without_wire(one.step, one.switches)
        for name, arm in zip(("baseline", "candidate"), alone or (), strict=False):
            steps[f"{name} alone"] = _on(arm.stepper(0), batches)
        timer = RankTimer(CudaTimer(arms[0].device) if gpu else HostTimer(), arms[0].device)
        quartets = StepTime(status="no_gpu" if not gpu else "emulated")
        told("warming up")
        for _ in range(_WARMUP_ROUNDS if gpu else 1):
            for step in steps.values():
                for i in range(len(batches)):
                    step(i)
                ranks.watch.tick()
        if gpu and plan.native:
            quartets = _quartets(running, timer, speed, alpha, told)
        times, rounds = _turns(steps, timer, speed, gpu, told)
    made = []
    for name, one, payload in zip(("baseline", "candidate"), running, payloads, strict=True):
        own = RankTime(
            ms=times[name], local_ms=times.get(f"{name} local"), alone_ms=times.get(f"{name} alone"), rounds=rounds
        )
        sent = one.sent[payload.rank]
        wire = _wire(sent, payload, plan if name == "candidate" else None)
        tables = arms[len(made)].tables
        made.append(DistributedArm(wire=wire.model_copy(update={"tables": tables and str(tables)}), time=own))
    for arm in (*arms, *(alone or ())):
        arm.park()
        if isinstance(arm, RankArm):
            arm.steady = False
    return DistributedRun(
        ranks=ranks.count,
        replicas=ranks.replicas,
        transport="nccl" if gpu else "gloo",
        baseline=made[0],
        candidate=made[1],
        step=quartets,
        why_not_alone=None if alone is not None else "the whole model does not fit one GPU",
        seconds=time.perf_counter() - began,
    )


def _ready(arm: RankArm, batches: Sequence[Any]) -> _Running:
    arm.steady = True
    train, model = arm.stepper(0), arm.module_in_place()
    # With low-precision gradients FSDP2's own reduce-scatter is taken already; its all-reduce never is anybody's.
    switches = None
    if not (arm.reduces_itself or arm.sends_beside_shards):
        switches = (*switch_collectives(model), *([] if arm.exchange is None else [arm.exchange]))
    wire = WireCount()
    # Nothing compiles under a dispatch mode.
    with arm.eagerly():
        train(batches[0])  # until the first step no amax is known
        with wire:
            train(batches[0])
    own = _Sent(
        {(name, str(dtype).removeprefix("torch.")): count for (name, dtype), count in wire.bytes.items()},
        dict(wire.calls),
    )
    lookups = () if arm.exchange is None else tuple(arm.exchange.asked.values())
    return _Running(_on(train, batches), switches, arm.job.gather(own), lookups)


def _on(step: Callable[[Any], None], batches: Sequence[Any]) -> StepFunction:
    return lambda i: step(batches[i % len(batches)])


def planned_wire(
    task: Task,
    device: torch.device,
    plan: Plan,
    ranks: int,
    replicas: int = 1,
    lookups: tuple[tuple[Request, ...], ...] = (),
) -> tuple[Payload, Payload]:
    """Return what a step of ``ranks`` ranks, in so many ``replicas``, sends in BF16, and as a candidate's plan says.

    Args:
        task: builds the model.
        device: where.
        plan: the candidate's.
        ranks: of the job.
        replicas: groups of ranks that hold a whole model each, in shards.
        lookups: what all ranks ask of tables that lie on one rank each, if the plan has such.

    Raises:
        NarrowgateError: a parameter that FSDP2 cannot shard, a weight that could not be gathered as planned, or no
            tables of which rows could be exchanged as planned.
    """
    seed_generators(0)
    model = task.build_model().to(device)
    # Bytes do not depend on the links: any will do that join so many.
    links = example_topology()
    joined = links.model_copy(update={"domain": links.domain.model_copy(update={"gpus": ranks}), "zone": None})
    exchanged = None if plan.tables is None else replace(exchanged_tables(model), lookups=lookups)
    layout = Layout(ranks, ranks // replicas)
    wire = predict_wire(model, plan, layout, joined, Sharding(joint_amaxes=True), exchanged)
    return wire.plain, wire.recipe


def _wire(counted: _Sent, payload: Payload, plan: Plan | None) -> Wire:
    gather = None if plan is None or plan.gather.high_precision else str(plan.gather)
    return Wire(
        all_gather=gather,
        reduce_scatter=None if plan is None or plan.reduce is None else str(plan.reduce),
        gathered=0 if plan is None else len(plan.gathered),
        planned=tuple(
            Planned(what=entry.what, collective=entry.collective, calls=entry.calls, given=dict(entry.given))
            for entry in payload.traffic
        ),
        counted=tuple(
            Traffic(collective=name, dtype=dtype, bytes=count)
            for (name, dtype), count in sorted(counted.bytes.items(), key=str)
        ),
        calls=dict(sorted(counted.calls.items())),
    )


def _quartets(
    running: Sequence[_Running], timer: RankTimer, speed: SpeedPlan, alpha: float, told: Callable[[str], None]
) -> StepTime:
    """Time whole steps of all ranks, baseline and candidate; all ranks stop alike, by the first one's clock."""
    began = time.perf_counter()
    for one in running:
        timer.block(one.step, speed.steps_per_block)
    warmup = time.perf_counter() - began

    def heard(n: int, ratio: float) -> None:
        told(f"quartet {n} of at most {speed.max_quartets}, speedup {ratio:.4f}x")

    quartets, stopped = run_quartets(running[0].step, running[1].step, timer, speed, alpha, heard)
    return StepTime(
        status="measured",
        quartets=quartets,
        steps_per_block=speed.steps_per_block,
        warmup_seconds=warmup,
        stopped=stopped,
        clocks_note=getattr(timer.inner, "note", None),
    )


def _turns(
    steps: dict[str, StepFunction], timer: RankTimer, speed: SpeedPlan, gpu: bool, told: Callable[[str], None]
) -> tuple[dict[str, float], int]:
    """Return the median milliseconds of each step over rounds in which all take turns, each round another first."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    names, began, rounds = list(steps), timer.now(), 0
    most = _ROUNDS if gpu else _CPU_ROUNDS
    while rounds < most:
        if rounds >= _LEAST_ROUNDS and timer.now() - began > _SHARE * speed.budget_seconds:
            break
        first = rounds % len(names)
        for name in (*names[first:], *names[:first]):
            found[name].append(timer.block(steps[name], speed.steps_per_block if gpu else 1).device_ms)
        rounds += 1
        told(f"round {rounds} of at most {most}")
    return {name: statistics.median(times) for name, times in found.items()}, rounds
