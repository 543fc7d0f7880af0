"""The report's levels of evidence and its statement of method, from what was measured."""

from __future__ import annotations

import math
from typing import Any

from . import looks, statistics
from .decision import Decision
from .measurements import ArmRun, Measurements, PartQuality, StepTime
from .report import ClassTime, Evidence, Level, Statistics

_METHOD = (
    "Quality: paired seeds, one-sided Student t bounds on the mean difference, exact sign-flip p beside them;"
    " a cluster-robust row interval can only withhold a pass."
    " Speed: one-sided Student t bounds on the mean log ratio of ABBA/BAAB quartets."
    " Looks declared ahead spend the level by an O'Brien-Fleming-like function."
    " Holm across recipes, no correction across gates."
)
_STEP_SCOPE = (
    "one process, the same staged batches for both arms, whole steps: zero_grad, forward, backward, optimizer,"
    " weight casts and scale updates"
)
_METRICS = ("ne", "auc", "calibration", "log_loss", "gauc")
_NOT_BUILT = "this version measures no such level"


def statistics_of(m: Measurements, decision: Decision) -> Statistics:
    """State the method behind ``decision``."""
    return Statistics(
        method=_METHOD,
        alpha=decision.alpha,
        accept_alpha=decision.accept_alpha,
        n=len(m.seeds),
        looks=max(len(m.looks), 1),
        family=decision.family,
        look_seeds=m.looks,
        seed_alpha=looks.level_at(m.looks, len(m.seeds), decision.alpha),
    )


def evidence_of(m: Measurements, alpha: float, arithmetic: str) -> Evidence:
    """Lay out what was measured at each level, with its baseline and scope.

    Args:
        m: the measurements.
        alpha: level of the one-sided bounds shown.
        arithmetic: what the baseline computed in.
    """

    def absent(baseline: str, scope: str, why: str = _NOT_BUILT) -> Level:
        return Level(status="not_measured", why=why, baseline=baseline, scope=scope)

    return Evidence(
        kernel=absent("the same kernel writing BF16", "one kernel, caches flushed"),
        module=absent("the module in BF16 under torch.compile", "the smallest region that holds a layer"),
        step=_step(m, alpha),
        distributed=absent("the same step with BF16 payload", "all ranks of one job"),
        quality=_quality(m, alpha, arithmetic),
    )


def _step(m: Measurements, alpha: float) -> Level:
    baseline, step = "BF16 autocast under torch.compile", m.step_time
    if len(step.quartets) < 2:
        why = {
            "no_gpu": "this run had no GPU",
            "emulated": f"{m.device} emulates part of the recipe: {'; '.join(m.emulated)}",
            "skipped": "skipped on request",
        }.get(step.status, "fewer than two quartets were measured")
        return Level(status="not_measured", why=why, baseline=baseline, scope=_STEP_SCOPE)
    results: dict[str, Any] = {"quartets": len(step.quartets), "steps_per_block": step.steps_per_block}
    for clock, own, other in (
        ("device_events", [q.baseline_ms for q in step.quartets], [q.candidate_ms for q in step.quartets]),
        ("host_clock", [q.baseline_host_ms for q in step.quartets], [q.candidate_host_ms for q in step.quartets]),
    ):
        ratio = statistics.paired(statistics.log_ratios(own, other))
        results[clock] = {
            "baseline_ms": _geometric_mean(own),
            "candidate_ms": _geometric_mean(other),
            "speedup": math.exp(ratio.mean),
            "ci_low": math.exp(ratio.lower(alpha)),
            "ci_high": math.exp(ratio.upper(alpha)),
        }
    results["clocks"] = _clocks(step)
    results["warmup_seconds"] = step.warmup_seconds
    # Each arm compiles within the first step of its first seed, apart from everything that is timed.
    first = m.seeds[0]
    results["compile_seconds"] = {
        "baseline": first.baseline.first_step_seconds,
        "candidate": first.candidate.first_step_seconds,
    }
    results["stopped"] = step.stopped
    results["bf16_fused"] = "not measured: this version does not write BF16 from its fused kernels"
    attribution: tuple[ClassTime, ...] = tuple(
        {"class": c.name, "baseline_ms": c.baseline_ms, "candidate_ms": c.candidate_ms} for c in step.kernels
    )
    return Level(
        status="measured",
        baseline=baseline,
        scope=_STEP_SCOPE,
        results=results,
        attribution=attribution or None,
    )


def _clocks(step: StepTime) -> dict[str, Any] | str:
    clocks = [q.clocks for q in step.quartets if q.clocks]
    if not clocks:
        return step.clocks_note or "not recorded"
    return {
        "sm_mhz": [min(c.sm_mhz for c in clocks), max(c.sm_mhz for c in clocks)],
        "watts": [min(c.watts for c in clocks), max(c.watts for c in clocks)],
        "celsius": [min(c.celsius for c in clocks), max(c.celsius for c in clocks)],
        "throttle": sorted({reason for c in clocks for reason in c.throttle}),
    }


def _geometric_mean(times: list[tuple[float, float]]) -> float:
    logs = [math.log(t) for pair in times for t in pair]
    return math.exp(math.fsum(logs) / len(logs))


def _quality(m: Measurements, alpha: float, arithmetic: str) -> Level:
    baseline = arithmetic
    if not m.seeds:
        why = "no seed was trained"
        return Level(status="not_measured", why=why, baseline=baseline, scope="paired seeds")
    rows = m.rows
    clusters = f"{rows.rows} held-out rows" + (
        f" in {rows.clusters} groups" if rows and rows.clusters != rows.rows else " (no groups named)"
    ) if rows else "held-out rows"  # fmt: skip
    scope = f"{len(m.seeds)} paired seeds (same weights, batches and dropout), {clusters}"
    results: dict[str, Any] = {}
    for task in m.tasks:
        results[task] = {
            arm: {metric: _mean(runs, task, metric) for metric in _METRICS}
            for arm, runs in (
                ("baseline", [s.baseline for s in m.seeds]),
                ("candidate", [s.candidate for s in m.seeds]),
            )
        }
        for metric, found in (
            ("ne", rows.ne.get(task) if rows else None),
            ("auc", rows.auc.get(task) if rows else None),
        ):
            results[task][f"{metric}_row_interval"] = found.model_dump() if found else None
        results[task]["slices"] = _slices(m, task)
        if m.parts:
            results[task]["parts"] = [_part(part, task, alpha) for part in m.parts]
    return Level(status="measured", baseline=baseline, scope=scope, results=results)


def _slices(m: Measurements, task: str) -> dict[str, Any]:
    """Return the means of both arms within each slice."""
    quality = [(s.baseline.quality.get(task), s.candidate.quality.get(task)) for s in m.seeds]
    names = dict.fromkeys(name for pair in quality for arm in pair if arm is not None for name in arm.slices)
    found: dict[str, Any] = {}
    for name in names:
        arms: dict[str, Any] = {}
        for i, arm in enumerate(("baseline", "candidate")):
            parts = [None if (own := pair[i]) is None else own.slices.get(name) for pair in quality]
            arms[arm] = {metric: _average([getattr(p, metric, None) for p in parts]) for metric in _METRICS[:3]}
        rows = [arm.slices[name].rows for pair in quality for arm in pair if arm is not None and name in arm.slices]
        found[name] = {"rows": rows[0]} | arms
    return found


def _part(part: PartQuality, task: str, alpha: float) -> dict[str, Any]:
    """Return what a part of the recipe costs on alone, and what is left to pay with all but it on."""
    found: dict[str, Any] = {"kind": part.kind, "name": part.name, "layers": part.layers}
    for how, effects in (("only", part.only), ("without", part.without)):
        effect = effects.get(task)
        values = () if effect is None else effect.ne_increase
        estimate = statistics.paired(values) if len(values) >= 2 else None
        found[how] = {
            "ne_increase": None if effect is None else effect.mean_ne_increase(),
            "ci_low": estimate.lower(alpha) if estimate else None,
            "ci_high": estimate.upper(alpha) if estimate else None,
            "auc_loss": None if effect is None else _average(list(effect.auc_loss)),
        }
    return found


def _mean(runs: list[ArmRun], task: str, metric: str) -> float | None:
    return _average([getattr(run.quality[task], metric) for run in runs if task in run.quality])


def _average(values: list[Any]) -> float | None:
    return None if not values or None in values else math.fsum(values) / len(values)
