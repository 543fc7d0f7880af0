"""The judge of ``module_time``: the speedup of the lowered modules alone, summed over a step's calls."""

from __future__ import annotations

import math

from . import statistics
from .gate_run import more_quartets
from .judgement import Gate, Judgement, Levels, Reason, Status
from .measurements import Measurements, ModuleTime
from .module_sums import owners_of_loss, total_log_ratios
from .policy import Policy

#: Share of the lowered modules' FLOPs that must have been timed: less says nothing of the whole.
ENOUGH = 0.5
#: Code and text of why modules were not timed, by status. The step's own reason stands before it and says what helps.
_ABSENT = {
    "no_gpu": ("no_gpu", "Modules alone could not be timed either: this run had no GPU."),
    "skipped": ("speed_not_measured", "Modules alone were not timed in this run either."),
    "nothing_lowered": (
        "nothing_lowered",
        "There is no module to time: the recipe lowers no layer of this model. Gate a recipe that lowers some.",
    ),
}


def judge_module_time(m: Measurements, policy: Policy, levels: Levels) -> Judgement | None:
    """Judge the sum over modules by device events: its t interval on the log ratio, over quartets and runs.

    None where the report is of a version without this gate, and where the recipe lowers no layer but changes what
    travels or the optimizer's state: ``step_time`` judges that alone. The host's clock decides nothing here: launching
    a module alone takes what a whole step's graph pays once, and ``step_time`` judges that by both clocks.
    """
    found = m.module_time
    if found is None or found.status == "no_modules":
        return None
    threshold = module_threshold(policy)
    apart = policy.speed.run_to_run
    several = _quartets(found) >= 2
    estimate = statistics.speedup(total_log_ratios(found.modules), apart.sd, apart.df) if several else None
    low = math.exp(estimate.lower(levels.accept)) if estimate else None
    high = math.exp(estimate.upper(levels.reject)) if estimate else None

    def result(status: Status, reason: tuple[str, str] | None = None, accept_p: float | None = None) -> Judgement:
        gate = Gate(
            name="module_time",
            status=status,
            metric="speedup of modules",
            measured=math.exp(estimate.mean) if estimate else None,
            ci_low=low,
            ci_high=high,
            threshold=threshold,
            direction="above",
        )
        reasons = (Reason(code=reason[0], text=reason[1], gate="module_time"),) if reason else ()
        return Judgement(gate, reasons, accept_p)

    if found.status in _ABSENT:
        return result("undecided", _ABSENT[found.status])
    if found.status == "failed":
        return result("undecided", ("modules_failed", f"Modules alone could not be timed: {found.why}."))
    if m.emulated:
        text = f"Modules alone were not judged either: {m.device} emulates part of the recipe."
        return result("undecided", ("emulated", text))
    if estimate is None or _quartets(found) < policy.speed.min_quartets or found.covered < ENOUGH:
        return result("undecided", ("modules_left_out", _too_little(found, policy)))
    shown = f"{math.exp(estimate.mean):.4f}x [{low:.4f}, {high:.4f}]"
    if estimate.upper(levels.reject) < math.log(threshold):
        text = f"The lowered modules' speedup is {shown} alone: below the {threshold:g}x asked.{_left_out(found)}"
        owner = owners_of_loss(found.modules, threshold)
        return result("fail", ("modules_too_slow", f"{text} Most of it is lost in {owner}." if owner else text))
    if estimate.lower(levels.accept) < math.log(threshold):
        text = f"The lowered modules' speedup is {shown} alone: the interval holds {threshold:g}x.{_left_out(found)}"
        return result("undecided", ("module_interval", f"{text} {_more_quartets(found, policy, threshold)}"))
    return result("pass", accept_p=estimate.p_above(math.log(threshold)))


def module_threshold(policy: Policy) -> float:
    """Return the speedup asked of modules: the policy's own, or else that of the step."""
    return policy.min_speedup if policy.min_module_speedup is None else policy.min_module_speedup


def _quartets(found: ModuleTime) -> int:
    return min((len(module.quartets) for module in found.modules), default=0)


def _left_out(found: ModuleTime) -> str:
    n = len(found.left_out)
    if not n:
        return ""
    return f" {n} module{'s' * (n > 1)} with {100 * (1 - found.covered):.1f} % of the FLOPs were left out."


def _too_little(found: ModuleTime, policy: Policy) -> str:
    whys = "; ".join(dict.fromkeys(module.why for module in found.left_out)) or "too few quartets"
    needed = max(policy.speed.min_quartets, 2)
    return (
        f"Modules: {100 * found.covered:.0f} % of the lowered modules' FLOPs were timed in {_quartets(found)} quartets;"
        f" {100 * ENOUGH:.0f} % in {needed} decide ({whys}). Raise the policy's speed.module_budget_seconds."
    )


def _more_quartets(found: ModuleTime, policy: Policy, threshold: float) -> str:
    return more_quartets(
        total_log_ratios(found.modules), math.log(threshold), policy, lambda _: "raise the policy's speed.min_quartets"
    )
