"""The decision: one pure function from measurements and a policy to a verdict with its reasons.

Quality and speed each claim something about a mean, so each has a level; ACCEPT needs every gate to pass (an
intersection-union test: no correction across gates). Several recipes in one run are a family: the accepting side of
every bound then uses the level that Holm's procedure gives the recipe (:func:`decide_family`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from . import looks, statistics
from .gate_modules import judge_module_time
from .gate_quality import judge_auc, judge_gauc, judge_ne
from .gate_run import judge_memory, judge_step_time
from .gate_stability import judge_stability
from .gate_wire import wire_faults
from .judgement import Gate, Judgement, Levels, Reason
from .measurements import Measurements, Record
from .policy import Policy, matches

__all__ = ["Decision", "Gate", "Reason", "decide", "decide_family"]


class Decision(Record):
    """The verdict, why, and the gates it stands on."""

    verdict: Literal["accept", "reject", "inconclusive"]
    reasons: tuple[Reason, ...]
    gates: tuple[Gate, ...]
    #: Level of the rejecting and of the accepting side of every bound, and the recipes decided together.
    alpha: float
    accept_alpha: float
    family: int


def decide(
    measurements: Measurements, policy: Policy, *, accept_alpha: float | None = None, family: int = 1
) -> Decision:
    """Decide one recipe.

    Args:
        measurements: what was measured.
        policy: margins and limits.
        accept_alpha: level of the accepting side, where a family's correction lowers it; the policy's alpha else.
        family: how many recipes are decided together; only recorded.
    """
    levels = Levels(policy.alpha, policy.alpha if accept_alpha is None else accept_alpha)
    judged = _judge(measurements, policy, levels)
    gates = tuple(j.gate for j in judged)
    found = [reason for j in judged for reason in j.reasons]
    status = {id(reason): j.gate.status for j in judged for reason in j.reasons}
    failing = [r for r in found if status[id(r)] == "fail"]
    open_ = [r for r in found if status[id(r)] == "undecided"]
    insane = [*_baseline_faults(measurements), *wire_faults(measurements)]
    anomalies = [r for r in open_ if r.code == "anomaly"]
    verdict: Literal["accept", "reject", "inconclusive"]
    if insane:
        verdict, reasons = "inconclusive", insane + failing + open_
    elif anomalies:
        verdict, reasons = "inconclusive", anomalies + failing + [r for r in open_ if r.code != "anomaly"]
    elif failing:
        verdict, reasons = "reject", failing + open_
    elif open_:
        verdict, reasons = "inconclusive", open_
    else:
        verdict, reasons = "accept", [Reason(code="all_gates_pass", text=f"All {len(gates)} gates pass.")]
    assert all(g.status == "pass" for g in gates) or verdict != "accept"
    return Decision(
        verdict=verdict,
        reasons=tuple(reasons),
        gates=gates,
        alpha=levels.reject,
        accept_alpha=levels.accept,
        family=family,
    )


def decide_family(measured: Sequence[Measurements], policy: Policy) -> list[Decision]:
    """Decide several recipes with Holm's correction: the chance of any false accept stays within alpha."""
    p_values = [accept_p(m, policy) for m in measured]
    levels = statistics.holm_levels(p_values, policy.alpha)
    return [
        decide(m, policy, accept_alpha=level, family=len(levels)) for m, level in zip(measured, levels, strict=True)
    ]


def accept_p(measurements: Measurements, policy: Policy) -> float:
    """Return the p value of the claim "this recipe is acceptable": the largest over its gates."""
    judged = _judge(measurements, policy, Levels(policy.alpha, policy.alpha))
    return max((1.0 if j.accept_p is None else _overall(measurements, j) for j in judged), default=1.0)


def more_seeds_may_decide(measurements: Measurements, policy: Policy, accept_alpha: float) -> bool:
    """Return whether, at a look before the last, quality is still open and nothing rejects."""
    levels = Levels(policy.alpha, accept_alpha)
    judged = [*_judge_quality(measurements, policy, levels), judge_stability(measurements, policy)]
    if any(j.gate.status == "fail" for j in judged):
        return False
    return any(reason.code in _OPEN_TO_SEEDS for j in judged for reason in j.reasons)


#: Codes of reasons that further seeds may take away.
_OPEN_TO_SEEDS = ("ne_interval", "auc_interval", "gauc_interval", "row_interval", "too_few_seeds")


def _overall(m: Measurements, judgement: Judgement) -> float:
    """Return a gate's p value over all looks; gates that are not over seeds have one look."""
    p = judgement.accept_p
    assert p is not None
    return looks.overall_p(m.looks, len(m.seeds), p) if judgement.gate.name in ("ne", "auc", "gauc") else p


def _judge(m: Measurements, policy: Policy, levels: Levels) -> list[Judgement]:
    quality = _judge_quality(m, policy, levels)
    modules = judge_module_time(m, policy, levels)
    speed = [judge_step_time(m, policy, levels), *([] if modules is None else [modules])]
    return [*speed, *quality, judge_stability(m, policy), judge_memory(m, policy)]


def _judge_quality(m: Measurements, policy: Policy, levels: Levels) -> list[Judgement]:
    n = len(m.seeds)
    here = Levels(looks.level_at(m.looks, n, levels.reject), looks.level_at(m.looks, n, levels.accept))
    # A task or slice that the policy names and nobody measured is a gate that is undecided, not one that is left out.
    names = [*m.tasks, *(name for name in policy.tasks if name not in m.tasks)]
    judged = [judge(m, task, policy, here) for task in names for judge in (judge_ne, judge_auc, judge_gauc)]
    marked = list(m.rows.slices) if m.rows else []
    parts = [part for part in marked if policy.judges(part)]
    parts += [pattern for pattern in policy.slices if not any(matches(pattern, part) for part in marked)]
    judged += [
        judge(m, task, policy, here, part) for part in parts for task in m.tasks for judge in (judge_ne, judge_auc)
    ]
    return [judgement for judgement in judged if judgement is not None]


def _baseline_faults(m: Measurements) -> list[Reason]:
    """A broken baseline makes every candidate pass, so nothing may be concluded from it."""
    faults = []

    def fault(text: str, task: str | None = None) -> None:
        hint = "Nothing can be concluded from it: train longer, or check the data and the model."
        faults.append(Reason(code="baseline_not_sane", text=f"{text} {hint}", task=task))

    for task in m.tasks:
        quality = [s.baseline.quality.get(task) for s in m.seeds]
        notes = sorted({q.note for q in quality if q is not None and q.ne is None and q.note is not None})
        ne = [q.ne for q in quality if q is not None and q.ne is not None]
        auc = [q.auc for q in quality if q is not None and q.auc is not None]
        if len(ne) < len(m.seeds):
            fault(f"The baseline has no NE on task {task}: {'; '.join(notes) or 'not measured'}.", task)
        elif ne and not math.fsum(ne) / len(ne) < 1:
            mean = math.fsum(ne) / len(ne)
            fault(f"The baseline's NE on task {task} is {mean:.5f}, no better than the background rate.", task)
        if auc and not math.fsum(auc) / len(auc) > 0.5:
            fault(f"The baseline's AUC on task {task} is {math.fsum(auc) / len(auc):.5f}, no better than chance.", task)
    broken = [s.seed for s in m.seeds if s.baseline.stability.first_non_finite is not None]
    if broken:
        fault(f"The baseline's own loss or gradient was not finite in seed {', '.join(map(str, broken))}.")
    ends = [(s.baseline.losses.first, s.baseline.losses.last) for s in m.seeds if s.seed not in broken]
    fallen = [first - last for first, last in ends if first is not None and last is not None]
    if m.seeds and not broken and not math.fsum(fallen) > 0:
        fault("The baseline's training loss did not fall.")
    return faults
