"""The report's evidence of speed: whole steps, and lowered modules alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from . import statistics
from .attribution import casting_overhead
from .measurements import FusedTime, Measurements, ModuleRegion, ModuleRun, Quartet
from .module_sums import total_log_ratios
from .policy import RunToRun
from .report import ClassTime, Level

_STEP_SCOPE = (
    "one process, the same staged batches for both arms, whole steps: zero_grad, forward, backward, optimizer,"
    " weight casts and scale updates"
)
_MODULE_BASELINE = "the same region of the baseline: BF16 autocast under torch.compile"
_MODULE_SCOPE = (
    "each region that holds a lowered layer alone: the layer with what is fused before and behind it, on random tensors"
    " of a real step's shapes, forward and backward, launched ahead of the device, weighted by a step's calls; without"
    " optimizer and scale updates"
)


def step_level(m: Measurements, alpha: float, apart: RunToRun) -> Level:
    """Return the evidence of whole steps: both clocks, where the time goes, and what of it is casting.

    Intervals hold what runs differ by (``apart``), as the gates' do.
    """
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
        results[clock] = {
            "baseline_ms": _geometric_mean(own),
            "candidate_ms": _geometric_mean(other),
            **_speedup(statistics.log_ratios(own, other), alpha, apart),
        }
    results["clocks"] = _clocks(step.quartets, step.clocks_note)
    results["warmup_seconds"] = step.warmup_seconds
    # Each arm compiles within the first step of its first seed, apart from everything that is timed.
    first = m.seeds[0]
    results["compile_seconds"] = {
        "baseline": first.baseline.first_step_seconds,
        "candidate": first.candidate.first_step_seconds,
    }
    results["stopped"] = step.stopped
    results["casting_overhead"] = casting_overhead(
        step.kernels, results["device_events"]["candidate_ms"], m.fused_time.write_ms if m.fused_time else None
    )
    results["bf16_fused"] = _fused(m.fused_time, alpha, apart)
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


def _fused(found: FusedTime | None, alpha: float, apart: RunToRun) -> dict[str, Any] | str:
    """Return the candidate against the same fusion in BF16: what the formats gain, without what fusion gains."""
    if found is None or len(found.quartets) < 2:
        return f"not measured: {(found and found.why) or 'fewer than two quartets'}"
    own, other = ([getattr(q, arm) for q in found.quartets] for arm in ("baseline_ms", "candidate_ms"))
    return {
        "fused_ms": _geometric_mean(own),
        "candidate_ms": _geometric_mean(other),
        **_speedup(statistics.log_ratios(own, other), alpha, apart),
        "quartets": len(found.quartets),
    }


def module_level(m: Measurements, alpha: float, apart: RunToRun) -> Level:
    """Return the evidence of modules: each region that was timed, all together, and what was left out."""
    found = m.module_time

    def absent(why: str) -> Level:
        return Level(status="not_measured", why=why, baseline=_MODULE_BASELINE, scope=_MODULE_SCOPE)

    if found is None:
        return absent("the version that made this report measured no such level")
    if found.status != "measured":
        whys = {
            "no_gpu": "this run had no GPU",
            "emulated": f"{m.device} emulates part of the recipe: {'; '.join(m.emulated)}",
            "nothing_lowered": "the recipe lowers no layer",
            "no_modules": "the recipe lowers no layer, only what travels or the optimizer's state",
            "failed": found.why or "it failed",
        }
        return absent(whys.get(found.status, "skipped on request"))
    if not found.modules:
        return absent("; ".join(dict.fromkeys(left.why for left in found.left_out)) or "a step calls no lowered layer")
    ratios = total_log_ratios(found.modules)
    sums = {
        f"{arm}_ms": math.fsum(
            run.calls * _geometric_mean(getattr(q, f"{arm}_ms") for q in run.quartets) for run in found.modules
        )
        for arm in ("baseline", "candidate")
    }
    results = {
        "modules": [_module(run, alpha, apart) for run in found.modules],
        "total": sums | _speedup(ratios, alpha, apart),
        "covered": found.covered,
        "left_out": [{**_region(left), "why": left.why} for left in found.left_out],
        "clocks": _clocks([q for run in found.modules for q in run.quartets], found.clocks_note),
        "seconds": found.seconds,
    }
    return Level(status="measured", baseline=_MODULE_BASELINE, scope=_MODULE_SCOPE, results=results)


def _module(run: ModuleRun, alpha: float, apart: RunToRun) -> dict[str, Any]:
    own, other = ([getattr(q, arm) for q in run.quartets] for arm in ("baseline_ms", "candidate_ms"))
    return {
        **_region(run),
        "baseline_ms": _geometric_mean(own),
        "candidate_ms": _geometric_mean(other),
        **_speedup(statistics.log_ratios(own, other), alpha, apart),
        "quartets": len(run.quartets),
        "launch_ms": {
            arm: _geometric_mean(getattr(q, f"{arm}_host_ms") for q in run.quartets)
            for arm in ("baseline", "candidate")
        },
    }


def _region(region: ModuleRegion) -> dict[str, Any]:
    return {
        "name": region.name,
        "type": ", ".join(dict.fromkeys(product.type for product in region.products)),
        "mkn": [[product.m, product.k, product.n] for product in region.products],
        "around": list(region.around),
        "calls": region.calls,
        "layers": list(region.layers),
        "share": region.share,
    }


def _speedup(log_ratios: Any, alpha: float, apart: RunToRun) -> dict[str, float]:
    ratio = statistics.speedup(log_ratios, apart.sd, apart.df)
    return {
        "speedup": math.exp(ratio.mean),
        "ci_low": math.exp(ratio.lower(alpha)),
        "ci_high": math.exp(ratio.upper(alpha)),
    }


def _clocks(quartets: Sequence[Quartet], note: str | None) -> dict[str, Any] | str:
    clocks = [q.clocks for q in quartets if q.clocks]
    if not clocks:
        return note or "not recorded"
    return {
        "sm_mhz": [min(c.sm_mhz for c in clocks), max(c.sm_mhz for c in clocks)],
        "watts": [min(c.watts for c in clocks), max(c.watts for c in clocks)],
        "celsius": [min(c.celsius for c in clocks), max(c.celsius for c in clocks)],
        "throttle": sorted({reason for c in clocks for reason in c.throttle}),
    }


def _geometric_mean(times: Iterable[tuple[float, float]]) -> float:
    logs = [math.log(t) for pair in times for t in pair]
    return math.exp(math.fsum(logs) / len(logs))
