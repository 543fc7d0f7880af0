"""Step time of baseline and candidate: ABBA quartets of blocks of whole steps in one process.

Per-step bootstraps accept a false speedup up to a quarter of the time, because steps of one stretch of time resemble
each other; one log ratio a quartet, with both arms on both sides of any drift, holds its level.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from . import statistics
from .attribution import attribute
from .batches import to_device
from .compilation import honest_compilation
from .measurements import Clocks, Quartet, StepTime
from .measurements_speed import BUDGET, HALF_WIDTH
from .policy import SpeedPlan

if TYPE_CHECKING:
    import torch

    from .train import Arm

#: Runs step number i of a block.
StepFunction = Callable[[int], None]
#: Steps at a block's start that its median leaves out: the device's queue fills and caches turn over.
_SETTLE = 2
#: Rounds over all staged batches before anything is timed: compilation, autotuning, allocator growth.
_WARMUP_ROUNDS = 3


@dataclass(frozen=True)
class BlockTime:
    """Milliseconds a step of one block: median by device events, mean by the host's clock."""

    device_ms: float
    host_ms: float


class Timer(Protocol):
    """Times blocks of steps and tells the time."""

    def block(self, step: StepFunction, steps: int) -> BlockTime:
        """Run ``steps`` steps and return their time."""
        ...

    def now(self) -> float:
        """Seconds since some fixed point."""
        ...

    def clocks(self) -> Clocks | None:
        """The device's clocks now, None where they cannot be read."""
        ...


class CudaTimer:
    """Device events at every step boundary, so that gaps in which the device waits are counted too."""

    def __init__(self, device: torch.device) -> None:
        from .nvml import ClockReader

        self._device, self._reader = device, ClockReader()

    @property
    def note(self) -> str | None:
        """Why clocks are absent, None where they are recorded."""
        return self._reader.note

    def block(self, step: StepFunction, steps: int) -> BlockTime:
        """Time a block; the device is waited for before and after it, never inside."""
        import torch

        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        events, _ = self._launch(step, steps)
        torch.cuda.synchronize(self._device)
        host = (time.perf_counter() - started) * 1000 / steps
        return BlockTime(self._median(events), host)

    def _launch(self, step: StepFunction, steps: int) -> tuple[list[Any], float]:
        """Launch a block; return the events at the boundaries of its steps, and the seconds that launching took."""
        import torch

        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        started = time.perf_counter()
        events[0].record()
        for i in range(steps):
            step(i)
            events[i + 1].record()
        return events, time.perf_counter() - started

    @staticmethod
    def _median(events: Sequence[Any]) -> float:
        """Milliseconds between two events: the median of those that ran after the block settled."""
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        return float(np.median(times[min(_SETTLE, len(times) - 1) :]))

    def now(self) -> float:
        """The host's monotonic clock."""
        return time.perf_counter()

    def clocks(self) -> Clocks | None:
        """Clocks, power and temperature through NVML."""
        return self._reader.read()


def run_quartets(
    baseline: StepFunction,
    candidate: StepFunction,
    timer: Timer,
    plan: SpeedPlan,
    alpha: float,
    told: Callable[[int, float], None] = lambda n, ratio: None,
) -> tuple[tuple[Quartet, ...], str]:
    """Time quartets until the interval is tight enough or the budget ends.

    Orders alternate between ABBA and BAAB. Stopping looks at the interval's width only, never at where it lies: to
    stop once it favours someone would raise the error rate.

    Args:
        baseline: one whole step of the baseline (A).
        candidate: one whole step of the candidate (B).
        timer: what times blocks.
        plan: sample sizes and budget.
        alpha: level of the interval whose half-width is wanted.
        told: hears of every quartet: how many there are, and its speedup.

    Returns:
        The quartets, and why it stopped.
    """
    quartets: list[Quartet] = []
    started = timer.now()
    while True:
        quartets.append(run_quartet(baseline, candidate, timer, len(quartets), plan.steps_per_block))
        ratios = _ratios(quartets)
        told(len(quartets), float(np.exp(ratios[-1])))
        if len(quartets) >= plan.min_quartets:
            estimate = statistics.paired(ratios)
            if estimate.upper(alpha) - estimate.mean <= plan.half_width:
                return tuple(quartets), f"{HALF_WIDTH} {plan.half_width:g}"
            if len(quartets) >= plan.max_quartets:
                return tuple(quartets), f"{plan.max_quartets} quartets, the most the policy allows"
        if timer.now() - started > plan.budget_seconds:
            return tuple(quartets), f"{BUDGET} {plan.budget_seconds:g} s ended"


def run_quartet(
    baseline: StepFunction, candidate: StepFunction, timer: Timer, number: int, steps_per_block: int
) -> Quartet:
    """Time one quartet of blocks: ABBA where its ``number`` is even, BAAB where it is odd."""
    order: Literal["ABBA", "BAAB"] = "ABBA" if number % 2 == 0 else "BAAB"
    times: dict[str, list[BlockTime]] = {"A": [], "B": []}
    for arm in order:
        times[arm].append(timer.block(baseline if arm == "A" else candidate, steps_per_block))
    return Quartet(
        order=order,
        baseline_ms=(times["A"][0].device_ms, times["A"][1].device_ms),
        candidate_ms=(times["B"][0].device_ms, times["B"][1].device_ms),
        baseline_host_ms=(times["A"][0].host_ms, times["A"][1].host_ms),
        candidate_host_ms=(times["B"][0].host_ms, times["B"][1].host_ms),
        clocks=timer.clocks(),
    )


class HostTimer:
    """The host's clock: for a device that has no events."""

    def block(self, step: StepFunction, steps: int) -> BlockTime:
        """Run ``steps`` steps and return their mean time."""
        began = time.perf_counter()
        for i in range(steps):
            step(i)
        ms = (time.perf_counter() - began) * 1000 / steps
        return BlockTime(ms, ms)

    def now(self) -> float:
        """The host's monotonic clock."""
        return time.perf_counter()

    def clocks(self) -> Clocks | None:
        """Nothing to read."""
        return None


def measure_step_time(
    baseline: Arm, candidate: Arm, plan: SpeedPlan, alpha: float, told: Callable[[int, float], None]
) -> StepTime:
    """Measure both arms' whole steps on a GPU, compiled alike, on the same staged batches of seed 0.

    Args:
        baseline: on a CUDA device; what it compiled for training serves here.
        candidate: on the same device.
        plan: sample sizes and budget.
        alpha: level of the interval.
        told: hears of every quartet.
    """
    device = baseline.device
    batches = stage(baseline.batches(0)[0], device, plan.steps_per_block)
    started = time.perf_counter()
    with honest_compilation():
        timer = CudaTimer(device)
        steps = warm_steps((baseline, candidate), batches, timer, plan)
        warmup = time.perf_counter() - started
        quartets, stopped = run_quartets(steps[0], steps[1], timer, plan, alpha, told)
        measured = time.perf_counter()
        kernels = attribute(steps[0], steps[1], quartets)
        profiled = time.perf_counter() - measured
    for arm in (baseline, candidate):
        arm.park()
    return StepTime(
        status="measured",
        quartets=quartets,
        steps_per_block=plan.steps_per_block,
        warmup_seconds=warmup,
        stopped=stopped,
        clocks_note=timer.note,
        kernels=kernels,
        profile_seconds=profiled,
    )


def warm_steps(arms: Sequence[Arm], batches: Sequence[Any], timer: Timer, plan: SpeedPlan) -> list[StepFunction]:
    """Return each arm's whole step on staged batches, compiled and warm."""
    steps = [_on(arm.stepper(0), batches) for arm in arms]
    for _ in range(_WARMUP_ROUNDS):
        for step in steps:
            for i in range(len(batches)):
                step(i)
    for step in steps:
        timer.block(step, plan.steps_per_block)
    return steps


def stage(batches: Any, device: torch.device, count: int) -> list[Any]:
    """Return the first ``count`` batches (or all) on the device."""
    staged = []
    for batch in batches:
        staged.append(to_device(batch, device))
        if len(staged) == count:
            break
    return staged


def _on(step: Callable[[Any], None], batches: Sequence[Any]) -> StepFunction:
    return lambda i: step(batches[i % len(batches)])


def _ratios(quartets: Sequence[Quartet]) -> Any:
    return statistics.log_ratios([q.baseline_ms for q in quartets], [q.candidate_ms for q in quartets])
