"""Judges of what a run costs: ``step_time`` and ``memory``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from . import statistics
from .attribution import owner_of_loss
from .judgement import Gate, Judgement, Levels, Reason, Status
from .measurements import Measurements, StepTime
from .measurements_speed import BUDGET, HALF_WIDTH
from .module_sums import owners_of_loss
from .policy import Policy, SpeedPlan

#: Peaks that grow over so many seeds in a row do so by chance once in 24 runs at most.
_SEEDS_TO_GROW = 4
_SPEED_ABSENT = {
    "no_gpu": (
        "no_gpu",
        "Speed could not be measured: this run had no GPU. Run the same command on a GPU that multiplies the recipe's"
        " formats natively (`narrowgate doctor` says which it does).",
    ),
    "skipped": ("speed_not_measured", "Speed was not measured in this run. Run the gate again without skipping it."),
}


def judge_step_time(m: Measurements, policy: Policy, levels: Levels) -> Judgement:
    """Judge the speedup of the whole step: its t interval on the log ratio, over quartets and runs."""
    step, apart = m.deciding_step, policy.speed.run_to_run
    device_time = host_time = None
    if len(step.quartets) >= 2:
        device_time, host_time = (
            statistics.speedup(_log_ratios(step, clock), apart.sd, apart.df) for clock in ("ms", "host_ms")
        )
    low = math.exp(device_time.lower(levels.accept)) if device_time else None
    high = math.exp(device_time.upper(levels.reject)) if device_time else None

    def result(status: Status, reason: tuple[str, str] | None = None, accept_p: float | None = None) -> Judgement:
        gate = Gate(
            name="step_time",
            status=status,
            metric="speedup",
            measured=math.exp(device_time.mean) if device_time else None,
            ci_low=low,
            ci_high=high,
            threshold=policy.min_speedup,
            direction="above",
        )
        reasons = (Reason(code=reason[0], text=reason[1], gate="step_time"),) if reason else ()
        return Judgement(gate, reasons, accept_p)

    if step.status in _SPEED_ABSENT:
        return result("undecided", _SPEED_ABSENT[step.status])
    if m.emulated:
        text = (
            f"Speed was not judged: {m.device} emulates part of the recipe ({'; '.join(m.emulated)}), and an emulated"
            " format's time says nothing. Run on a GPU that multiplies it natively (`narrowgate doctor` says which)."
        )
        return result("undecided", ("emulated", text))
    if device_time is None or host_time is None or len(step.quartets) < policy.speed.min_quartets:
        text = (
            f"Speed: {len(step.quartets)} quartets cannot decide, {policy.speed.min_quartets} are needed."
            " Raise the policy's speed.budget_seconds."
        )
        return result("undecided", ("too_few_quartets", text))
    threshold = math.log(policy.min_speedup)
    shown = f"{math.exp(device_time.mean):.4f}x [{low:.4f}, {high:.4f}]"
    if device_time.upper(levels.reject) < threshold:
        text = f"The step's speedup is {shown}: below the {policy.min_speedup:g}x asked."
        kernels = owner_of_loss(step.kernels)
        modules = owners_of_loss(m.module_time.modules, policy.min_speedup) if m.module_time else None
        text += f" Most of what it loses: {kernels} a step." if kernels else ""
        return result("fail", ("too_slow", text + (f" Of modules alone, {modules} lack most." if modules else "")))
    if device_time.lower(levels.accept) < threshold:
        more = more_quartets(_log_ratios(step, "ms"), threshold, policy, partial(_remedy, step.stopped, policy.speed))
        text = f"The step's speedup is {shown}: the interval holds {policy.min_speedup:g}x. {more}"
        return result("undecided", ("speed_interval", text))
    if host_time.lower(levels.accept) < threshold:
        text = (
            f"The step's speedup is {shown} by device events, but {math.exp(host_time.mean):.4f}x by the host's clock:"
            " the host cannot feed the device. Fewer, larger kernels or CUDA graphs would decide it."
        )
        return result("undecided", ("clocks_disagree", text))
    return result("pass", accept_p=max(device_time.p_above(threshold), host_time.p_above(threshold)))


def _log_ratios(step: StepTime, clock: str) -> NDArray[np.float64]:
    """Return the log speedup of each quartet, by device events (``ms``) or by the host's clock (``host_ms``)."""
    baseline, candidate = ([getattr(q, f"{arm}_{clock}") for q in step.quartets] for arm in ("baseline", "candidate"))
    return statistics.log_ratios(baseline, candidate)


def more_quartets(ratios: NDArray[np.float64], threshold: float, policy: Policy, remedy: Callable[[int], str]) -> str:
    """Say how many more quartets may decide, and what would allow them.

    Args:
        ratios: log speedup of each quartet.
        threshold: of the log speedup.
        policy: the policy.
        remedy: says what to change for so many quartets.
    """
    mean, n, apart = float(ratios.mean()), len(ratios), policy.speed.run_to_run
    # However long one run measures, what differs between runs stays.
    endless = statistics.speedup([mean, mean], apart.sd, apart.df)
    if endless.lower(policy.alpha) < threshold < endless.upper(policy.alpha):
        return "It is closer than runs come to each other (speed.run_to_run): more measuring would not decide it."
    needed = statistics.seeds_needed(mean, float(ratios.std(ddof=1)), threshold, policy.alpha)
    if needed is None or needed <= n:
        return "It is so close that more measuring is unlikely to decide it."
    return f"About {needed - n} more quartets would decide it: {remedy(needed)}."


def _remedy(stopped: str | None, plan: SpeedPlan, needed: int) -> str:
    """Return what of the plan of a step's measuring that ``stopped`` so to change for ``needed`` quartets."""
    changes = []
    if stopped is not None and stopped.startswith(HALF_WIDTH):
        changes.append("lower the policy's speed.half_width")
    if needed > plan.max_quartets:
        changes.append("raise the policy's speed.max_quartets")
    if stopped is None or stopped.startswith(BUDGET) or not changes:
        changes.append("raise the policy's speed.budget_seconds")
    return " and ".join(changes)


def judge_memory(m: Measurements, policy: Policy) -> Judgement:
    """Judge peak memory: candidate over baseline, each the median over seeds (the first one also compiles)."""
    peaks = [(s.baseline.peak_memory, s.candidate.peak_memory) for s in m.seeds]
    base = [b for b, c in peaks if b and c]
    own = [c for b, c in peaks if b and c]
    ratio = float(np.median(own) / np.median(base)) if base else None
    status: Status = "undecided" if ratio is None else "pass" if ratio <= policy.max_memory_ratio else "fail"
    gate = Gate(
        name="memory",
        status=status,
        metric="peak memory ratio",
        measured=ratio,
        ci_low=None,
        ci_high=None,
        threshold=policy.max_memory_ratio,
        direction="below",
    )
    reasons: tuple[Reason, ...] = ()
    if ratio is None:
        text = "Peak memory could not be measured: this run had no GPU. Run the same command on a GPU."
        reasons = (Reason(code="memory_not_measured", text=text, gate="memory"),)
    elif status == "fail":
        text = f"Peak memory is {ratio:.4f} times the baseline's; the policy allows {policy.max_memory_ratio:g}."
        # The first training also compiles and tunes, which may well need more than the next.
        if len(own) >= _SEEDS_TO_GROW and all(a < b for a, b in itertools.pairwise(own)):
            first, last = own[0] / 2**30, own[-1] / 2**30
            text += f" It grew with every seed, from {first:.2f} to {last:.2f} GiB, as a leak does."
        reasons = (Reason(code="memory", text=text, gate="memory"),)
    return Judgement(gate, reasons, 0.0 if status == "pass" else None)
