"""Time of each lowered module alone: its region in both arms, forward and backward, in quartets like whole steps.

A region is compiled by itself as the whole model is, on the shapes of a real step, and a step's calls of it are
counted. The heaviest regions come first, and what the budget leaves out is listed with its share. Optimizer and scale
updates belong to the step and are not in here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from .arithmetic import Arithmetic
from .measurements import ModuleLeft, ModuleProduct, ModuleRun, ModuleTime, Quartet
from .regions import Found, Region, find_regions
from .speed import BlockTime, CudaTimer, StepFunction, Timer, run_quartets, stage
from .train import Arm, compile_model, honest_compilation, seed_generators

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..recipes.plan import Plan
    from .policy import SpeedPlan

#: Calls of a region before anything is timed: compilation, autotuning, allocator growth.
_WARMUP_CALLS = 3
#: Seconds by which the host launches ahead of a block before it is known how long that takes, and at most.
_FIRST_LEAD, _MOST_LEAD = 0.01, 0.05
#: Lead over the time that launching the block took last.
_MARGIN = 1.5
#: Clock cycles that make a second at least: a GPU with a slower clock waits a little longer.
_CYCLES = 2_000_000_000


class AheadTimer(CudaTimer):
    """Times blocks that the host has launched before the device begins them, as it does within a long step.

    Alone, a small module takes the host longer to launch than the device to run, and device events would time the
    launching. ``host_ms`` is that: what the host needs to launch a call.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # By identity: a step that were kept here would keep its tensors.
        self._leads: dict[int, float] = {}

    def block(self, step: StepFunction, steps: int) -> BlockTime:
        """Time a block behind a kernel that only waits."""
        torch.cuda.synchronize(self._device)
        torch.cuda._sleep(int(_CYCLES * min(self._leads.get(id(step), _FIRST_LEAD), _MOST_LEAD)))
        events, launched = self._launch(step, steps)
        torch.cuda.synchronize(self._device)
        self._leads[id(step)] = _MARGIN * launched
        return BlockTime(self._median(events), launched * 1000 / steps)


def measure_module_time(
    baseline: Arm, candidate: Arm, plan: Plan, limits: SpeedPlan, alpha: float, told: Callable[[int, int, str], None]
) -> ModuleTime:
    """Time every region that the recipe changes on a GPU, heaviest first, within the budget.

    Args:
        baseline: on a CUDA device.
        candidate: on the same device.
        plan: what the candidate's layers run.
        limits: number of quartets, steps of a block, and ``module_budget_seconds``.
        alpha: level of the intervals.
        told: hears of every region before it is timed: its number from 1, of how many, and its name.
    """
    device, started = baseline.device, time.perf_counter()
    seed_generators(0)
    (batch,) = stage(baseline.batches(0)[0], device, 1)
    models = baseline.module(0), candidate.module(0)
    arithmetic = Arithmetic.of(device)

    def loss() -> Tensor:
        with arithmetic.context():
            return baseline.task.loss(models[0], batch)

    timer = AheadTimer(device)
    with honest_compilation():
        regions = find_regions(models[0], loss, plan)
        found = time_regions(regions, models, device, timer, limits, alpha, told, compiled=bool(baseline.compiled))
    for arm in (baseline, candidate):
        arm.park()
    update = {"seconds": time.perf_counter() - started, "clocks_note": timer.note}
    return found.model_copy(update=update)


def time_regions(
    found: Sequence[Found],
    models: tuple[nn.Module, nn.Module],
    device: torch.device,
    timer: Timer,
    limits: SpeedPlan,
    alpha: float,
    told: Callable[[int, int, str], None] = lambda i, n, name: None,
    *,
    compiled: bool = False,
) -> ModuleTime:
    """Time regions in both models, one after the other, until the budget ends.

    Args:
        found: regions with their calls and layers, heaviest first.
        models: baseline and candidate, on ``device`` and in training mode.
        device: where to run.
        timer: what times blocks.
        limits: number of quartets, steps of a block, and the budget.
        alpha: level of the intervals.
        told: hears of every region before it is timed.
        compiled: compile each region by itself, as an arm's model is compiled.
    """
    whole, started = sum(entry.flops for entry in found), timer.now()
    modules: list[ModuleRun] = []
    left: list[ModuleLeft] = []
    for i, entry in enumerate(found):
        facts = _facts(entry, entry.flops / whole if whole else 0.0)
        rest = limits.module_budget_seconds - (timer.now() - started)
        why: str | None = f"the budget of {limits.module_budget_seconds:g} s ended"
        if rest > 0:
            told(i + 1, len(found), entry.region.name)
            try:
                quartets = _time(entry.region, models, device, timer, limits, rest, alpha, compiled)
                if len(quartets) >= limits.min_quartets:
                    modules.append(ModuleRun(**facts, quartets=quartets))
                    why = None
            except torch.OutOfMemoryError:
                why = "the GPU's memory ran out"
            except Exception as error:  # whatever a compiler or a user's module raises: the other regions still count
                why = f"it does not run alone: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            _release(models)
        if why is not None:
            left.append(ModuleLeft(**facts, why=why))
    return ModuleTime(status="measured", modules=tuple(modules), left_out=tuple(left))


def _time(
    region: Region,
    models: tuple[nn.Module, nn.Module],
    device: torch.device,
    timer: Timer,
    limits: SpeedPlan,
    seconds: float,
    alpha: float,
    compiled: bool,
) -> tuple[Quartet, ...]:
    """Return the quartets of one region: ``min_quartets``, or fewer where the seconds ended."""
    begun = timer.now()
    leaves = [leaf.make(device) for leaf in region.leaves.values()]
    steps = [_call(region.build(model), leaves, device, compiled) for model in models]
    for step in steps:
        for i in range(_WARMUP_CALLS):
            step(i)
        timer.block(step, limits.steps_per_block)
    rest = seconds - (timer.now() - begun)
    if rest <= 0:
        return ()
    few = {"max_quartets": limits.min_quartets, "budget_seconds": rest}
    return run_quartets(steps[0], steps[1], timer, limits.model_copy(update=few), alpha)[0]


def _call(region: nn.Module, leaves: Sequence[Tensor], device: torch.device, compiled: bool) -> StepFunction:
    """Return what runs a region once, forward and backward, from the gradients of random outputs."""
    run = compile_model(region) if compiled else region
    trained = [*region.parameters(), *leaves]
    arithmetic = Arithmetic.of(device)
    gradients: list[Tensor] = []

    def step(_: int) -> None:
        for tensor in trained:
            tensor.grad = None
        with arithmetic.context():
            outputs = [out for out in run(*leaves) if out.requires_grad]
        if len(gradients) < len(outputs):
            gradients[:] = [torch.randn_like(out) for out in outputs]
        torch.autograd.backward(outputs, gradients)

    return step


def _release(models: Sequence[nn.Module]) -> None:
    """Give back what a region held, before the next one asks for as much."""
    for model in models:
        model.zero_grad(set_to_none=True)
    gc.collect()


def _facts(found: Found, share: float) -> dict[str, Any]:
    return {
        "products": tuple(ModuleProduct(**asdict(product)) for product in found.region.products),
        "around": found.region.around,
        "calls": found.calls,
        "layers": found.layers,
        "share": share,
    }
