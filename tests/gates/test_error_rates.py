"""Error rates of the real decision function, by simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from narrowgate.gates.decision import decide, decide_family
from narrowgate.gates.measurements import Measurements, ModuleProduct, ModuleRun, ModuleTime, Quartet
from narrowgate.gates.policy import BUILTIN_POLICIES, Policy, RunToRun, SpeedPlan
from scipy import signal

STANDARD = BUILTIN_POLICIES["standard"]
MARGIN = STANDARD.max_ne_increase
DRAWS = 1200
#: Four standard errors above alpha at that many draws.
ALLOWED = STANDARD.alpha + 4 * (STANDARD.alpha * (1 - STANDARD.alpha) / DRAWS) ** 0.5


#: The same, but for what it knows of other runs.
ONE_RUN = STANDARD.model_copy(update={"speed": SpeedPlan(run_to_run=RunToRun(sd=0))})


def status_rate(
    make: Callable[[np.random.Generator], Measurements],
    gate: str,
    status: str,
    seed: int = 0,
    policy: Policy = STANDARD,
) -> float:
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(DRAWS):
        decision = decide(make(rng), policy)
        hits += next(g for g in decision.gates if g.name == gate).status == status
    return hits / DRAWS


@pytest.mark.parametrize("n", [5, 8, 12])
def test_a_loss_at_the_margin_is_accepted_no_more_often_than_alpha(measurements, n: int) -> None:
    rate = status_rate(lambda rng: measurements(MARGIN + 3e-4 * rng.standard_normal(n)), "ne", "pass", n)
    assert 0.02 < rate < ALLOWED


@pytest.mark.parametrize("n", [5, 8, 12])
def test_a_loss_at_the_margin_is_rejected_no_more_often_than_alpha(measurements, n: int) -> None:
    rate = status_rate(lambda rng: measurements(MARGIN + 3e-4 * rng.standard_normal(n)), "ne", "fail", n)
    assert 0.02 < rate < ALLOWED


@pytest.mark.parametrize(("n", "power"), [(5, 0.58), (8, 0.82), (12, 0.95)])
def test_half_the_margin_passes_with_the_power_that_theory_gives(measurements, n: int, power: float) -> None:
    rate = status_rate(lambda rng: measurements(MARGIN / 2 + MARGIN / 2 * rng.standard_normal(n)), "ne", "pass", n)
    assert rate == pytest.approx(power, abs=0.05)


def elsewhere(rng: np.random.Generator) -> float:
    """What all quartets of one run share: how its process and GPU favour one arm."""
    return float(np.exp(STANDARD.speed.run_to_run.sd * rng.standard_normal()))


def test_an_a_a_run_passes_quality_and_claims_no_speedup(measurements, step_time) -> None:
    def same(rng: np.random.Generator) -> Measurements:
        noise = rng.standard_normal
        return measurements(3e-5 * noise(8), 3e-5 * noise(8), step_time(0.01 * noise(20)))

    assert status_rate(same, "ne", "pass") > 0.99
    assert status_rate(same, "auc", "pass") > 0.99
    assert status_rate(same, "step_time", "pass") == 0


@pytest.mark.parametrize("drift", ["none", "warm_up", "random_walk"])
def test_drift_and_resembling_steps_fake_no_speedup(measurements, drift: str) -> None:
    """Blocks of correlated steps (AR(1), rho 0.8, 0.3 %) under drift; the truth of all runs is the speedup asked."""
    from narrowgate.gates.measurements import StepTime

    def simulate(rng: np.random.Generator) -> Measurements:
        steps, blocks = 10, 80
        noise = np.empty(steps * blocks)
        state = 0.0
        for i, shock in enumerate(rng.standard_normal(steps * blocks)):
            state = 0.8 * state + 0.003 * 0.6 * shock
            noise[i] = state
        t = np.linspace(0, 1, len(noise))
        trend = {
            "none": 0 * t,
            "warm_up": 0.03 * np.exp(-5 * t),
            "random_walk": np.cumsum(rng.standard_normal(len(noise))) * 0.03 / len(noise) ** 0.5,
        }[drift]
        blocks_ms = 10 * np.exp(np.median((noise + trend).reshape(blocks, steps)[:, 2:], axis=1))
        quartets, here = [], elsewhere(rng)
        for q in range(20):
            four = blocks_ms[4 * q : 4 * q + 4]
            outer, inner = (float(four[0]), float(four[3])), (float(four[1]), float(four[2]))
            a, b = (outer, inner) if q % 2 == 0 else (inner, outer)
            a = (a[0] * STANDARD.min_speedup * here, a[1] * STANDARD.min_speedup * here)
            quartets.append(
                {
                    "order": "ABBA" if q % 2 == 0 else "BAAB",
                    "baseline_ms": a, "candidate_ms": b, "baseline_host_ms": a, "candidate_host_ms": b,
                }
            )  # fmt: skip
        return measurements([0.0] * 8, speed=StepTime.model_validate({"status": "measured", "quartets": quartets}))

    assert status_rate(simulate, "step_time", "pass") < ALLOWED
    # One run's quartets alone take its own process for the truth.
    assert status_rate(simulate, "step_time", "pass", policy=ONE_RUN) > 5 * STANDARD.alpha


def test_modules_timed_in_rounds_under_drift_fake_no_speedup(measurements) -> None:
    """Two modules of unlike weight and gain, whose sum gains exactly what is asked; noise as for steps."""
    quartets, steps = 20, 10
    # 2 calls of 3.0 to 2.5 ms and 1 of 1.0 to 1.0 ms, each divided so that the sums' ratio is the threshold.
    truth = ((2, 3.0, 2.5, 2 / 3), (1, 1.0, 1.0, 1 / 3))
    scale = STANDARD.min_speedup * (2 * 2.5 + 1.0) / (2 * 3.0 + 1.0)

    def simulate(rng: np.random.Generator) -> Measurements:
        count = len(truth) * quartets * 4 * steps
        noise = signal.lfilter([0.003 * 0.6], [1, -0.8], rng.standard_normal(count))
        noise += np.cumsum(rng.standard_normal(count)) * 0.03 / count**0.5
        blocks = np.exp(np.median(noise.reshape(quartets, len(truth), 4, steps)[..., 2:], axis=-1)).swapaxes(0, 1)
        modules, here = [], elsewhere(rng)
        for (calls, before, after, share), own in zip(truth, blocks, strict=True):
            timed = []
            for q, four in enumerate(own.tolist()):
                outer, inner = (four[0], four[3]), (four[1], four[2])
                a, b = (outer, inner) if q % 2 == 0 else (inner, outer)
                a, b = tuple(scale * here * before * x for x in a), tuple(after * x for x in b)
                order: Any = "ABBA" if q % 2 == 0 else "BAAB"
                timed.append(
                    Quartet(order=order, baseline_ms=a, candidate_ms=b, baseline_host_ms=a, candidate_host_ms=b)
                )
            product = ModuleProduct(name=f"m{calls}", type="Linear", m=1, k=1, n=1)
            modules.append(
                ModuleRun(
                    products=(product,), around=(), calls=calls, layers=(product.name,), share=share,
                    quartets=tuple(timed),
                )
            )  # fmt: skip
        return measurements([0.0] * 8, module_time=ModuleTime(status="measured", modules=tuple(modules)))

    assert 0 < status_rate(simulate, "module_time", "pass") < ALLOWED
    assert status_rate(simulate, "module_time", "pass", policy=ONE_RUN) > 5 * STANDARD.alpha


def test_the_best_of_five_recipes_at_the_margin_is_accepted_no_more_often_than_alpha(measurements) -> None:
    rng = np.random.default_rng(7)
    draws, wrong, uncorrected = 300, 0, 0
    for _ in range(draws):
        family: list[Any] = [measurements(MARGIN + 3e-4 * rng.standard_normal(8)) for _ in range(5)]
        wrong += any(d.verdict == "accept" for d in decide_family(family, STANDARD))
        uncorrected += any(decide(m, STANDARD).verdict == "accept" for m in family)
    assert wrong / draws < 0.05 + 4 * (0.05 * 0.95 / draws) ** 0.5
    assert uncorrected / draws > 0.15  # what the correction is for
