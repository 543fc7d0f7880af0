"""Time of each lowered module alone: its region in both arms, forward and backward, in quartets like whole steps.

A region is compiled by itself as the whole model is, on the shapes of a real step, and a step's calls of it are
counted. Optimizer and scale updates belong to the step and are not in here.

First the regions are made ready, the heaviest first, until the budget has no room for the quartets of one more; what
is left out is listed with its share. Then they are timed in rounds, a quartet of each in turn. One after the other
would not do: clocks that drift from one region to the next change the regions' weights in the sum for all quartets
alike, which no interval over quartets sees; in simulation a speedup that is not there was accepted 10 % of the time
where 5 % is meant.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .arithmetic import Arithmetic
from .compilation import compile_model, honest_compilation
from .measurements import ModuleLeft, ModuleProduct, ModuleRun, ModuleTime, Quartet
from .regions import Found, find_regions
from .speed import BlockTime, CudaTimer, StepFunction, Timer, run_quartet, stage
from .train import Arm, seed_generators

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


@dataclass
class _Ready:
    """A region that is compiled and warm, with what is timed of it."""

    found: Found
    #: Baseline and candidate.
    steps: tuple[StepFunction, StepFunction]
    #: Tensors that collect gradients.
    trained: Sequence[Tensor]
    #: Seconds that a quartet takes.
    quartet_seconds: float
    quartets: list[Quartet] = field(default_factory=list)

    def release(self) -> None:
        """Give back the gradients, before another region asks for as much."""
        for tensor in self.trained:
            tensor.grad = None


def measure_module_time(
    baseline: Arm, candidate: Arm, plan: Plan, limits: SpeedPlan, told: Callable[[str], None]
) -> ModuleTime:
    """Time every region that the recipe changes on a GPU, as many as the budget has room for.

    Args:
        baseline: on a CUDA device.
        candidate: on the same device.
        plan: what the candidate's layers run.
        limits: number of quartets, steps of a block, and ``module_budget_seconds``.
        told: hears what comes next.
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
    regions: list[Found] = []
    with honest_compilation():
        why = _failure(lambda: regions.extend(find_regions(models[0], loss, plan)), "noting a step failed")
        if why is None:
            found = time_regions(regions, models, device, timer, limits, told, compiled=bool(baseline.compiled))
        else:
            found = ModuleTime(status="failed", why=why)
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
    told: Callable[[str], None] = lambda text: None,
    *,
    compiled: bool = False,
) -> ModuleTime:
    """Make regions ready in both models while the budget has room for them, and time them in rounds.

    Args:
        found: regions with their calls and layers, heaviest first.
        models: baseline and candidate, on ``device`` and in training mode.
        device: where to run.
        timer: what times blocks.
        limits: number of quartets, steps of a block, and the budget.
        told: hears what comes next.
        compiled: compile each region by itself, as an arm's model is compiled.
    """
    started, budget = timer.now(), limits.module_budget_seconds
    ready: list[_Ready] = []
    whys: dict[int, str] = {}
    full = False
    for i, entry in enumerate(found):
        needed = limits.min_quartets * math.fsum(region.quartet_seconds for region in ready)
        full = full or timer.now() - started + needed > budget
        if full:
            whys[id(entry)] = f"the budget of {budget:g} s has no room for it"
            continue
        told(f"making ready {i + 1} of {len(found)}, {entry.region.name}")
        why = _failure(lambda entry=entry: ready.append(_make_ready(entry, models, device, timer, limits, compiled)))
        if why is not None:
            whys[id(entry)] = why
        elif timer.now() - started + needed + limits.min_quartets * ready[-1].quartet_seconds > budget:
            full = True
            whys[id(ready.pop().found)] = f"the budget of {budget:g} s has no room for it"
    for number in range(limits.min_quartets):
        told(f"round {number + 1} of {limits.min_quartets}, {len(ready)} regions")
        for region in list(ready):
            why = _failure(lambda region=region, number=number: _quartet(region, timer, number, limits))
            if why is not None:
                whys[id(region.found)] = why
                ready.remove(region)
    whole = sum(entry.flops for entry in found)
    return ModuleTime(
        status="measured",
        modules=tuple(ModuleRun(**_facts(r.found, whole), quartets=tuple(r.quartets)) for r in ready),
        left_out=tuple(ModuleLeft(**_facts(e, whole), why=whys[id(e)]) for e in found if id(e) in whys),
    )


def _make_ready(
    found: Found,
    models: tuple[nn.Module, nn.Module],
    device: torch.device,
    timer: Timer,
    limits: SpeedPlan,
    compiled: bool,
) -> _Ready:
    leaves = [leaf.make(device) for leaf in found.region.leaves.values()]
    regions = [found.region.build(model) for model in models]
    steps = [_call(region, leaves, device, compiled) for region in regions]
    trained = [*leaves, *(p for region in regions for p in region.parameters())]
    for step in steps:
        for i in range(_WARMUP_CALLS):
            step(i)
    begun = timer.now()
    for step in steps:
        timer.block(step, limits.steps_per_block)
    ready = _Ready(found, (steps[0], steps[1]), trained, 2 * (timer.now() - begun))
    ready.release()
    return ready


def _quartet(ready: _Ready, timer: Timer, number: int, limits: SpeedPlan) -> None:
    ready.quartets.append(run_quartet(*ready.steps, timer, number, limits.steps_per_block))
    ready.release()


def _failure(work: Callable[[], object], what: str = "it does not run alone") -> str | None:
    """Do ``work``; return why it failed, None where it did not. What fails here takes nothing else with it."""
    try:
        work()
    except torch.OutOfMemoryError:
        why = "the GPU's memory ran out"
    except Exception as error:  # whatever a compiler or a user's module raises
        why = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        return None
    gc.collect()
    return why


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


def _facts(found: Found, whole: int) -> dict[str, Any]:
    return {
        "products": tuple(ModuleProduct(**asdict(product)) for product in found.region.products),
        "around": found.region.around,
        "calls": found.calls,
        "layers": found.layers,
        "share": found.flops / whole if whole else 0.0,
    }
