"""The report's levels of evidence and its statement of method, from what was measured."""

from __future__ import annotations

import math
from typing import Any

from . import looks, statistics
from .decision import Decision
from .evidence_distributed import distributed_level
from .evidence_speed import module_level, step_level
from .measurements import ArmRun, Measurements, PartQuality
from .policy import Policy
from .report import Evidence, Level, Statistics

_METHOD = (
    "Quality: paired seeds, one-sided Student t bounds on the mean difference, exact sign-flip p beside them;"
    " a cluster-robust row interval can only withhold a pass."
    " Speed: one-sided Student t bounds on the mean log ratio of ABBA/BAAB quartets; of modules, on that of their sums;"
    " what runs differ by (speed.run_to_run) added to their variance."
    " Looks declared ahead spend the level by an O'Brien-Fleming-like function."
    " Holm across recipes, no correction across gates."
)
_METRICS = ("ne", "auc", "calibration", "log_loss", "gauc")


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


def evidence_of(m: Measurements, policy: Policy, arithmetic: str) -> Evidence:
    """Lay out what was measured at each level, with its baseline and scope.

    Args:
        m: the measurements.
        policy: has the level of the one-sided bounds shown, and what runs differ by.
        arithmetic: what the baseline computed in.
    """
    alpha, apart = policy.alpha, policy.speed.run_to_run
    kernel = Level(
        status="not_measured",
        why="this version measures no such level",
        baseline="the same kernel writing BF16",
        scope="one kernel, caches flushed",
    )
    return Evidence(
        kernel=kernel,
        module=module_level(m, alpha, apart),
        step=step_level(m, alpha, apart),
        distributed=distributed_level(m, alpha, apart),
        quality=_quality(m, alpha, arithmetic),
    )


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
