"""A whole training step of a GEM-like model, optimizer and everything inside, its arms side by side in one run.

**Turns.** A round runs a block of steps of every arm in some order and then in the opposite order (A B C C B A), so a
drift that is linear over the round falls on all alike; orders rotate. Each round gives one log ratio an arm, of the
geometric means of both its blocks; ratio and interval are those of Student's t over rounds, as the gates have it.
``ratio`` is the reference's time over the arm's: above 1 the arm is faster. ``ci`` holds both one-sided 95 % bounds.

**Alike.** Every arm starts from the same weights and meets the same staged batches; all run under ``torch.compile``
with the same optimizer. Gradients are freed at the end of a step, so that arms at rest hold weights and optimizer
state only. ``peak_bytes`` is an arm's own peak: above what lay on the device before the arm was made.

``breakdown`` is milliseconds a step by class of kernels, from a few profiled steps after the timed ones.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics as plain
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config as functorch
from torch import nn

from ...models.checkpointing import checkpoint_activations
from ...models.task import GemTask
from ...precision.errors import NarrowgateError
from .. import statistics
from ..arithmetic import Arithmetic
from ..attribution import attribute
from ..compilation import compile_model, honest_compilation
from ..measurements import Quartet
from ..speed import BlockTime, CudaTimer, HostTimer, StepFunction, Timer, stage
from ..task import make_optimizer
from ..train import seed_generators
from .gem_arms import REFERENCES, GemArm
from .timing import Say, compiled_already, graphs_compiled, load_libraries

if TYPE_CHECKING:
    from ...recipes.plan import Plan

Row = dict[str, Any]
_ALPHA = 0.05
#: Rounds without which there is no interval worth the name, whatever time is left.
_LEAST_ROUNDS = 3
#: Walks over all staged batches before anything is timed.
_WARMUPS = 2
#: Walks at most until no arm compiles any more.
_SETTLING = 3
#: Share of the time allowed after which no further arm is compiled: the rest is for measuring those that are.
_BUILD_SHARE = 0.65
#: Room that a step needs over its peak, for fragments.
_HEADROOM = 1.1


@dataclass(frozen=True)
class GemSettings:
    """How to measure."""

    device: torch.device
    say: Say
    rounds: int = 20
    steps: int = 5
    #: What the whole run may take; it then ends with what it has.
    seconds: float = 450.0
    #: Staged batches that steps go round.
    batches: int = 4

    @property
    def gpu(self) -> bool:
        """On a CPU nothing is compiled, low precision is emulated, and no time means anything: a dry run."""
        return self.device.type == "cuda"


@dataclass
class Running:
    """An arm that is ready to be timed."""

    arm: GemArm
    step: StepFunction
    plan: Plan | None
    #: Linear layers that are not what the model was built with.
    lowered: int
    first_loss: float
    #: At the height of a step, and between steps.
    peak_bytes: int | None
    rest_bytes: int | None
    ready_seconds: float
    #: Graphs of it that were compiled again once other arms were there.
    compiled_again: int = 0


@dataclass
class GemResult:
    """What a run found."""

    case: str
    rows: list[Row] = field(default_factory=list)
    #: What holds for all rows.
    facts: dict[str, Any] = field(default_factory=dict)
    #: Arms that could not run: name, reason, and whether that is a fault of ours.
    skipped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Arms of ours that could not run, one line each."""
        return [f"{entry['name']}: {entry['reason']}" for entry in self.skipped if entry["fault"]]


def measure_steps(task: GemTask, arms: Sequence[GemArm], settings: GemSettings, case: str) -> GemResult:
    """Measure ``arms``, of which the first is compiled BF16, and return a row for each.

    Args:
        task: model, data and optimizer; on ``settings.device``.
        arms: as :func:`narrowgate.gates.bench.gem_arms.pick_arms` returns them.
        settings: how.
        case: what the rows call it.

    Raises:
        NarrowgateError: BF16 itself cannot run, or its loss is not finite.
    """
    began = time.perf_counter()
    result = GemResult(case, facts={"alpha": _ALPHA})
    with honest_compilation():
        batches = stage(task.train_batches(0), settings.device, settings.batches)
        result.facts |= shape_facts(task, batches)
        load_libraries(arm.arm for arm in arms)
        running = _ready(task, arms, batches, settings, began, result)
        timer: Timer = CudaTimer(settings.device) if settings.gpu else HostTimer()
        steps = {name: one.step for name, one in running.items()}
        if settings.gpu:
            settle(running, len(batches), settings.say)
        with compiled_already():
            found, stopped = take_turns(steps, timer, settings, deadline=began + settings.seconds)
        breakdowns = _breakdowns(steps, found) if settings.gpu else {}
        clocks = timer.clocks()
    result.facts |= {
        "stopped": stopped,
        "steps_per_block": settings.steps,
        "clocks": None if clocks is None else clocks.model_dump(),
        "clocks_note": getattr(timer, "note", None),
    }
    for name, one in running.items():
        row = result_row(case, one, found, name, settings) | {"breakdown": breakdowns.get(name)}
        result.rows.append(row)
        settings.say(describe(row))
    return result


def shape_facts(task: GemTask, batches: Sequence[Any]) -> dict[str, Any]:
    """Return the shapes of staged batches: rows, tokens with and without dead ones, and what of padding is full."""
    config = task.preset.model
    size = task.preset.training.batch_size
    live = [int(batch.offsets[-1]) for batch in batches]
    lengths = [batch.offsets.diff() for batch in batches]
    # Summary tokens close every row, and attention looks at the latest max_tokens.
    kept = [int((n + config.n_summary).clamp_max(config.max_tokens).sum()) for n in lengths]
    return {
        "batch": size,
        "tokens": int(batches[0].events.shape[0]),
        "live_tokens": round(sum(live) / len(live)),
        "max_tokens": config.max_tokens,
        "fill": round(sum(kept) / (len(kept) * size * config.max_tokens), 4),
    }


def take_turns(
    steps: Mapping[str, StepFunction], timer: Timer, settings: GemSettings, deadline: float = math.inf
) -> tuple[dict[str, list[tuple[BlockTime, BlockTime]]], str]:
    """Time blocks of all ``steps`` in rounds; return each one's two blocks a round, and why it stopped.

    Args:
        steps: one whole step each, warmed up.
        timer: what times blocks.
        settings: how many rounds, and steps a block.
        deadline: by ``timer.now()``; no round starts after it, once there are a few.
    """
    found: dict[str, list[tuple[BlockTime, BlockTime]]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(settings.rounds):
        if turn >= _LEAST_ROUNDS and timer.now() > deadline:
            return found, f"the time allowed ended after {turn} rounds"
        there = names if turn % 2 == 0 else names[::-1]
        first = {name: timer.block(steps[name], settings.steps) for name in there}
        second = {name: timer.block(steps[name], settings.steps) for name in reversed(there)}
        for name in names:
            found[name].append((first[name], second[name]))
        if turn % 2:
            names = names[1:] + names[:1]
    return found, f"{settings.rounds} rounds, as asked"


def ratio(
    reference: Sequence[tuple[BlockTime, BlockTime]], arm: Sequence[tuple[BlockTime, BlockTime]]
) -> tuple[float, tuple[float, float]]:
    """Return the reference's time over the arm's, and its one-sided 95 % bounds, by rounds."""
    pairs = [[(a.device_ms, b.device_ms) for a, b in blocks] for blocks in (reference, arm)]
    estimate = statistics.paired(statistics.log_ratios(*pairs))
    return math.exp(estimate.mean), (math.exp(estimate.lower(_ALPHA)), math.exp(estimate.upper(_ALPHA)))


def describe(row: Row) -> str:
    """Return a row as a line of progress."""
    parts = [f"  {row['arm']:20} {row['variant']:34} {row['ms']:9.3f} ms"]
    if row.get("ratio") is not None:
        parts.append(f"{row['ratio']:.3f}x [{row['ci'][0]:.3f}, {row['ci'][1]:.3f}]")
    if row.get("peak_bytes") is not None:
        parts.append(f"peak {row['peak_bytes'] / 2**30:.1f} GiB")
    if row.get("dry_run"):
        parts.append("dry run")
    return "  ".join(parts)


def _ready(
    task: GemTask, arms: Sequence[GemArm], batches: Sequence[Any], settings: GemSettings, began: float,
    result: GemResult,
) -> dict[str, Running]:  # fmt: skip
    running: dict[str, Running] = {}

    def skip(arm: GemArm, reason: str, *, fault: bool) -> None:
        result.skipped.append({"name": arm.name, "reason": reason, "fault": fault})
        settings.say(f"  skipped: {arm.name}: {reason}")

    for number, arm in enumerate(arms):
        spent = time.perf_counter() - began
        if number and spent > _BUILD_SHARE * settings.seconds:
            skip(arm, f"{spent:.0f} of {settings.seconds:g} s were over before its turn", fault=False)
            continue
        try:
            running[arm.name] = make_running(arm, task, batches, settings)
        except Exception as error:  # whatever a library raises while it compiles, or an arm that does not fit
            if not number:
                raise
            text = (str(error).strip().splitlines() or [""])[0][:300]
            skip(arm, f"{type(error).__name__}: {text}", fault=not arm.may_fail)
        # Outside of the handler: in it, the error still holds the frames that hold the model.
        release(settings)
        if number and arm.name in running and not _fits(running.values(), settings):
            del running[arm.name]
            release(settings)
            skip(arm, "no room beside the arms before it: ask for fewer in one run", fault=False)
    return running


def settle(running: Mapping[str, Running], batches: int, say: Say) -> None:
    """Step all arms until none compiles any more; what caches had to give back is taken again on the way.

    A library that one arm brings may change what the others' compiled code depends on. What is timed then is what they
    were compiled to last, and their rows say so.
    """
    for _ in range(_SETTLING):
        again = 0
        for name, one in running.items():
            before = graphs_compiled()
            for i in range(batches):
                one.step(i)
            found = graphs_compiled() - before
            if found:
                say(f"  {name}: {found} graphs were compiled again beside the other arms")
            one.compiled_again += found
            again += found
        if not again:
            return


def _fits(running: Iterable[Running], settings: GemSettings) -> bool:
    """Whether each arm's step fits beside what all arms keep between steps."""
    if not settings.gpu:
        return True
    largest = max((one.peak_bytes or 0) - (one.rest_bytes or 0) for one in running)
    return torch.cuda.mem_get_info(settings.device)[0] > _HEADROOM * largest


def make_running(arm: GemArm, task: GemTask, batches: Sequence[Any], settings: GemSettings) -> Running:
    """Build, compile and warm up one arm, whose step ``i`` takes the batch ``i`` modulo their number.

    Raises:
        NarrowgateError: its first loss is not finite.
    """
    began = time.perf_counter()
    before = torch.cuda.memory_allocated(settings.device) if settings.gpu else 0
    own = arm.task(task)
    seed_generators(0)
    model = own.build_model().to(settings.device).train()
    plan = arm.prepare(own, model)
    if arm.checkpoint:
        checkpoint_activations(model, arm.checkpoint)
    optimizer = make_optimizer(own, model)
    if plan is not None:
        optimizer = plan.wrap_optimizer(optimizer, keep_weights=arm.keep_weights)
    forward, arithmetic = compile_model(model) if settings.gpu else model, Arithmetic.of(settings.device)
    losses: list[torch.Tensor] = []

    def step(i: int) -> None:
        with determinism(arm.deterministic), functorch.patch(activation_memory_budget=arm.memory_budget):
            with arithmetic.context():
                loss = own.loss(forward, batches[i % len(batches)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not losses:
            losses.append(loss.detach())

    seed_generators(1)  # the same dropout in every arm's first step
    for i in range(_WARMUPS * len(batches) if settings.gpu else 1):
        step(i)
    first = float(losses[0])
    if not math.isfinite(first):
        raise NarrowgateError(f"the first loss is {first}")
    peak = rest = None
    if settings.gpu:
        torch.cuda.reset_peak_memory_stats(settings.device)
        step(0)
        torch.cuda.synchronize(settings.device)
        peak = torch.cuda.max_memory_allocated(settings.device) - before
        rest = torch.cuda.memory_allocated(settings.device) - before
    ready = time.perf_counter() - began
    settings.say(f"  ready: {arm.name}, first loss {first:.5f}, {ready:.0f} s")
    lowered = sum(type(module) is not nn.Linear for module in model.modules() if isinstance(module, nn.Linear))
    return Running(arm, step, plan, lowered, first, peak, rest, ready)


def release(settings: GemSettings) -> None:
    """Give back what nobody holds any more."""
    if settings.gpu:
        gc.collect()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Within, only algorithms that repeat their bits, where ``wanted``.

    cuBLAS needs ``CUBLAS_WORKSPACE_CONFIG`` in the environment before the process first uses the GPU.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _breakdowns(
    steps: Mapping[str, StepFunction], found: Mapping[str, Sequence[tuple[BlockTime, BlockTime]]]
) -> dict[str, dict[str, float]]:
    """Milliseconds a step by class of kernels, by arm."""
    reference = next(iter(steps))
    breakdowns: dict[str, dict[str, float]] = {}
    for name in itertools.islice(steps, 1, None):
        classes = attribute(steps[reference], steps[name], quartets(found[reference], found[name]))
        breakdowns.setdefault(reference, {c.name: round(c.baseline_ms, 4) for c in classes if c.baseline_ms})
        breakdowns[name] = {c.name: round(c.candidate_ms, 4) for c in classes if c.candidate_ms}
    if len(steps) == 1:
        own = found[reference]
        classes = attribute(steps[reference], steps[reference], quartets(own, own))
        breakdowns[reference] = {c.name: round(c.baseline_ms, 4) for c in classes if c.baseline_ms}
    return breakdowns


def quartets(
    reference: Sequence[tuple[BlockTime, BlockTime]], arm: Sequence[tuple[BlockTime, BlockTime]]
) -> list[Quartet]:
    """Return two arms' blocks of each round as the gates' quartets, which these rounds hold."""
    return [
        Quartet(
            order="ABBA",
            baseline_ms=(a.device_ms, b.device_ms),
            candidate_ms=(c.device_ms, d.device_ms),
            baseline_host_ms=(a.host_ms, b.host_ms),
            candidate_host_ms=(c.host_ms, d.host_ms),
        )
        for (a, b), (c, d) in zip(reference, arm, strict=True)
    ]


def result_row(
    case: str, one: Running, found: Mapping[str, Sequence[tuple[BlockTime, BlockTime]]], name: str,
    settings: GemSettings,
) -> Row:  # fmt: skip
    """Return what ``found`` says of the arm ``name``, with its ratios to the references among the others."""
    blocks = [block for pair in found[name] for block in pair]
    row: Row = {
        "case": case,
        "arm": one.arm.arm,
        "variant": one.arm.variant,
        "ms": round(plain.median(block.device_ms for block in blocks), 4),
        "host_ms": round(plain.median(block.host_ms for block in blocks), 4),
        "rounds": len(found[name]),
        "peak_bytes": one.peak_bytes,
        "rest_bytes": one.rest_bytes,
        "first_loss": one.first_loss,
        "ready_seconds": round(one.ready_seconds, 1),
        "lowered": one.lowered,
        "recipe_hash": None if one.plan is None else one.plan.recipe.hash(),
    }
    for reference, suffix in REFERENCES.items():
        if reference not in found or not settings.gpu:
            continue
        mean, bounds = (1.0, (1.0, 1.0)) if reference == name else ratio(found[reference], found[name])
        row |= {f"ratio{suffix}": round(mean, 4), f"ci{suffix}": [round(bound, 4) for bound in bounds]}
    if one.compiled_again:
        row["compiled_again"] = one.compiled_again
    if not settings.gpu:
        # Emulated, uncompiled: the code was run, nothing was measured.
        row |= {"ratio": None, "ci": None, "dry_run": True}
    return row
