"""The candidate's steps against BF16 on the same fused kernels: what formats gain, apart from what fusion gains.

Decides nothing, so whatever fails here is told and the run goes on. Beside the speedup it profiles what the fused
kernels take where they write BF16, which casting overhead is counted from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .attribution import write_milliseconds
from .compilation import honest_compilation
from .measurements import FusedTime
from .speed import CudaTimer, Timer, run_quartets, stage, warm_steps
from .train import Arm

if TYPE_CHECKING:
    from ..recipes.plan import Plan
    from .policy import SpeedPlan


def measure_fused_time(
    candidate: Arm, plan: Plan, limits: SpeedPlan, alpha: float, timer: Callable[[torch.device], Timer] = CudaTimer
) -> FusedTime:
    """Compile the BF16 arm and time it against the candidate on a GPU, for ``bf16_fused_seconds``.

    Args:
        candidate: on a CUDA device; what it compiled for training serves here.
        plan: what its layers run.
        limits: steps of a block, quartets at most (``min_quartets``), and the budget.
        alpha: level of the interval whose half-width ends measuring early.
        timer: what times blocks, for a device.
    """
    why = _not_comparable(plan, limits)
    if why is not None:
        return FusedTime(why=why)
    started = time.perf_counter()
    fused = Arm(
        candidate.task, candidate.device, candidate.recipe, candidate.backend, candidate.steps, candidate.compiled,
        fused_bf16=True,
    )  # fmt: skip
    few = {"max_quartets": limits.min_quartets, "budget_seconds": limits.bf16_fused_seconds}
    try:
        with honest_compilation():
            batches, clock = (
                stage(candidate.batches(0)[0], candidate.device, limits.steps_per_block),
                timer(fused.device),
            )
            steps = warm_steps((fused, candidate), batches, clock, limits)
            quartets, _ = run_quartets(steps[0], steps[1], clock, limits.model_copy(update=few), alpha)
            write_ms = write_milliseconds(steps[0])
        found = FusedTime(quartets=quartets, write_ms=write_ms)
    except torch.OutOfMemoryError:
        found = FusedTime(why="the GPU's memory ran out")
    except Exception as error:  # whatever a compiler raises
        found = FusedTime(why=f"it failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    fused.discard()
    candidate.park()
    return found.model_copy(update={"seconds": time.perf_counter() - started})


def _not_comparable(plan: Plan, limits: SpeedPlan) -> str | None:
    if not limits.bf16_fused_seconds:
        return "the policy's speed.bf16_fused_seconds is 0"
    if plan.backend != "native":
        return f"backend {plan.backend} casts with kernels of its own"
    if not plan.lowered:
        return "the recipe lowers no layer"
    if any(rule.when == "profitable" for rule in plan.recipe.rules):
        return "the recipe decides by prices, which its BF16 counterpart does not know"
    return None
