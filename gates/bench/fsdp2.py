"""A sharded training step under FSDP2, FP8 payload against BF16 payload, on all ranks of one job.

**Arms.** Each variant is measured beside the same products with BF16 payload and beside a BF16 model, in turns as
:func:`narrowgate.gates.bench.gem.take_turns` has them (A B C C B A, orders rotating), all resident at once; other
variants come before and after. A step is forward, backward, optimizer, and what the arm calls after it. Times are the
slowest rank's.

**Exposed.** Every arm also takes its turns with ``local`` collectives: the same step, in which a gather repeats this
rank's shard in place of the others' (the same writes to memory, nothing on the wire) and a reduce-scatter keeps this
rank's part. ``exposed_ms`` is the step minus that one. The all-reduces of amaxes, a few bytes, stay in both.
A recipe that reduces gradients itself (``shards.reduce_scatter``) is timed without such turns.

**Bytes** are counted at the collectives in a step of a few rows (:class:`narrowgate.precision.WireCount`), and compared
with what :mod:`narrowgate.recipes.wire_plan` plans; a difference is a fault of the run. What a DTensor's own operators
send is not seen: torchao's one all-reduce a step, four bytes a weight.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...models.optimizers import table_parameters
from ...precision.wire import WireCount
from ...recipes import resolve
from ...recipes.topology import example_topology
from ...recipes.wire_plan import Layout, predict_wire
from ...recipes.wire_units import Sharding
from ..compilation import honest_compilation
from ..sharded import Local, RankTimer, shard, switch_collectives, without_wire
from ..speed import BlockTime, CudaTimer, HostTimer, StepFunction
from ..train import seed_generators
from .fsdp2_arms import ShardedArm, ShardedCase
from .gem import GemSettings, ratio, take_turns

Row = dict[str, Any]
Blocks = Mapping[str, list[tuple[BlockTime, BlockTime]]]
_WARMUPS = 3
#: So small that steps without collectives, in which ranks part, do no harm to what is timed after them.
_RATE = 1e-6
_LOCAL = " (local)"


@dataclass
class ShardedResult:
    """What a run found."""

    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    #: What makes the result none, one line each.
    faults: list[str] = field(default_factory=list)


@dataclass
class Running:
    """An arm that is sharded, compiled and warm."""

    arm: ShardedArm
    step: StepFunction
    #: None where the recipe reduces gradients itself, which nothing can stand in for.
    switches: tuple[Local, ...] | None
    loss: float
    wire: WireCount
    #: At the height of a step, above what lies there between steps.
    peak_bytes: int | None


def measure_sharded(
    case: ShardedCase, groups: list[tuple[ShardedArm, ...]], mesh: DeviceMesh, settings: GemSettings
) -> ShardedResult:
    """Measure a BF16 model and ``groups`` of arms on all ranks, and return a row for each arm.

    Args:
        case: the model.
        groups: (FP8 payload, the same products with BF16 payload, ...) each.
        mesh: of all ranks, one dimension.
        settings: how; ``seconds`` is what the case may take once the BF16 model is compiled.
    """
    result = ShardedResult()
    timer = RankTimer(CudaTimer(settings.device) if settings.gpu else HostTimer(), settings.device)
    with honest_compilation():
        bf16 = _make(ShardedArm("bf16", "bf16", coded=False), case, mesh, settings)
        began = timer.now()
        for number, group in enumerate(groups or [()]):
            spent = timer.now() - began
            if number and spent > settings.seconds:
                result.skipped += [{"name": arm.name, "reason": "the time allowed was over"} for arm in group]
                continue
            share = (settings.seconds - spent) / max(len(groups) - number, 1)
            _measure_group(bf16, group, case, mesh, settings, timer, result, share)
            # All that was made for the group is gone: the next one needs the room.
            _release(settings)
        clocks = timer.clocks()
    result.facts = {**case.facts, "clocks": None if clocks is None else clocks.model_dump()}
    return result


def _measure_group(
    bf16: Running,
    group: tuple[ShardedArm, ...],
    case: ShardedCase,
    mesh: DeviceMesh,
    settings: GemSettings,
    timer: RankTimer,
    result: ShardedResult,
    seconds: float,
) -> None:
    """Measure the arms of a group beside BF16, and add their rows; BF16's own with the first group."""
    deadline = timer.now() + seconds
    running = {bf16.arm.name: bf16, **_ready(group, case, mesh, settings, result)}
    steps: dict[str, StepFunction] = {}
    for name, one in running.items():
        steps[name] = one.step
        if one.switches is not None:
            steps[name + _LOCAL] = without_wire(one.step, one.switches)
    found, stopped = take_turns(steps, timer, settings, deadline)
    for name, one in running.items():
        if one is bf16 and result.rows:
            continue
        row = _row(case, one, found, mesh, settings) | {"stopped": stopped}
        result.rows.append(row)
        settings.say(describe(row))
        if row["planned_bytes"] not in (None, row["bytes"]):
            fault = f"{case.name}: {name}: counted {row['bytes']} bytes, planned {row['planned_bytes']}"
            result.faults.append(fault)


def describe(row: Row) -> str:
    """Return a row as a line of progress."""
    parts = [f"  {row['arm']:10} {row['variant']:34} {row['ms']:9.3f} ms"]
    parts.append(" " * 16 if row["exposed_ms"] is None else f"{row['exposed_ms']:8.3f} exposed")
    parts.append(f"{sum(row['bytes'].values()) / 1e6:9.1f} MB")
    if row.get("ratio") is not None:
        parts.append(f"{row['ratio']:.3f}x bf16")
    if row.get("ratio_to_bf16_payload") is not None:
        low, high = row["ci_to_bf16_payload"]
        parts.append(f"{row['ratio_to_bf16_payload']:.3f}x [{low:.3f}, {high:.3f}] of BF16 payload")
    return "  ".join([*parts, *(["dry run"] if row.get("dry_run") else [])])


def _ready(
    group: tuple[ShardedArm, ...], case: ShardedCase, mesh: DeviceMesh, settings: GemSettings, result: ShardedResult
) -> dict[str, Running]:
    """The arms of a group that run on every rank; the others are told."""
    running: dict[str, Running] = {}
    for arm in group:
        made, reason = None, ""
        try:
            made = _make(arm, case, mesh, settings)
        except (ImportError, NotImplementedError, RuntimeError) as error:
            if arm.arm == "narrowgate":
                raise
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
        if not _agreed(made is not None, settings.device):
            result.skipped.append({"name": arm.name, "reason": reason or "it failed on another rank"})
            settings.say(f"  skipped: {arm.name}: {reason}")
            _release(settings)
        elif made is not None:
            running[arm.name] = made
    return running


def _make(arm: ShardedArm, case: ShardedCase, mesh: DeviceMesh, settings: GemSettings) -> Running:
    seed_generators(0)
    model = case.build()
    plan = arm.prepare(model, case.where, settings.device)
    # Tables stay whole.
    shard(model, case.units(model), mesh, compiled=settings.gpu, ignored=table_parameters(model))
    switches = switch_collectives(model) if arm.reduce is None else None
    dense = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(dense, lr=_RATE, fused=settings.gpu or None)
    if plan is not None:
        optimizer = plan.wrap_optimizer(optimizer)
    after = arm.after_step(model)
    losses: list[Tensor] = []

    def train(loss_of: Callable[[nn.Module], Tensor]) -> Tensor:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after()
        return loss.detach()

    def step(i: int) -> None:
        losses.append(train(case.loss))
        del losses[1:]

    wire = WireCount()
    # Nothing compiles under a dispatch mode, and eager steps need more memory: a few rows send the same.
    with torch.compiler.set_stance("force_eager"):
        train(case.probe)  # until the first step no amax is known
        with wire:
            train(case.probe)
    for i in range(_WARMUPS if settings.gpu else 1):
        step(i)
    peak = None
    if settings.gpu:
        torch.cuda.reset_peak_memory_stats(settings.device)
        before = torch.cuda.memory_allocated(settings.device)
        step(0)
        torch.cuda.synchronize(settings.device)
        peak = torch.cuda.max_memory_allocated(settings.device) - before
    return Running(arm, step, switches, float(losses[0]), wire, peak)


def _row(case: ShardedCase, one: Running, found: Blocks, mesh: DeviceMesh, settings: GemSettings) -> Row:
    arm = one.arm
    ms, host_ms = _median(found[arm.name])
    local_ms = _median(found[arm.name + _LOCAL])[0] if arm.name + _LOCAL in found else None
    row: Row = {
        "case": case.name,
        "arm": arm.arm,
        "variant": arm.told,
        "ms": round(ms, 4),
        "host_ms": round(host_ms, 4),
        "local_ms": None if local_ms is None else round(local_ms, 4),
        "exposed_ms": None if local_ms is None else round(ms - local_ms, 4),
        "bytes": {name: one.wire.total(name) for name in sorted(one.wire.calls)},
        "calls": {name: one.wire.calls[name] for name in sorted(one.wire.calls)},
        "planned_bytes": _planned(case, arm, mesh.size()),
        "rounds": len(found[arm.name]),
        "step_peak_bytes": one.peak_bytes,
        "loss": one.loss,
        "ratio": None,
        "ci": None,
    }
    if not settings.gpu:
        # Emulated, uncompiled, over the host's memory: the code was run, nothing was measured.
        return {**row, "dry_run": True}
    row["ratio"], row["ci"] = _rounded(ratio(found["bf16"], found[arm.name]))
    if arm.coded and arm.twin.name in found:
        row["ratio_to_bf16_payload"], row["ci_to_bf16_payload"] = _rounded(ratio(found[arm.twin.name], found[arm.name]))
    return row


def _planned(case: ShardedCase, arm: ShardedArm, ranks: int) -> dict[str, int] | None:
    """Bytes by collective as the plan of the wire has them; None for a peer's own gather."""
    if arm.arm == "torchao" and arm.coded:
        return None
    model = case.shape()
    plan = resolve(arm.recipe(case.where), model)
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    sharding = Sharding(units=case.units(model), ignored=tables, joint_amaxes=True)
    wire = predict_wire(model, plan, Layout(ranks, ranks), example_topology(), sharding)
    return {name: wire.recipe.given(name) for name in sorted({entry.collective for entry in wire.recipe.traffic})}


def _median(blocks: list[tuple[BlockTime, BlockTime]]) -> tuple[float, float]:
    times = [block for pair in blocks for block in pair]
    return statistics.median(t.device_ms for t in times), statistics.median(t.host_ms for t in times)


def _rounded(found: tuple[float, tuple[float, float]]) -> tuple[float, list[float]]:
    return round(found[0], 4), [round(bound, 4) for bound in found[1]]


def _agreed(own: bool, device: torch.device) -> bool:
    """Whether all ranks say so."""
    told = torch.tensor(int(own), device=device)
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told)


def _release(settings: GemSettings) -> None:
    gc.collect()
    if settings.gpu:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def job(device: torch.device, seconds: float) -> Iterator[DeviceMesh]:
    """The process group of a job that torchrun started, and its mesh; collectives give up after ``seconds``."""
    from datetime import timedelta

    from torch.distributed.device_mesh import init_device_mesh

    gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if gpu else "gloo", timeout=timedelta(seconds=seconds), device_id=device if gpu else None
    )
    try:
        yield init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
        dist.barrier()
    finally:
        dist.destroy_process_group()
