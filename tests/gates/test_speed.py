from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from narrowgate.gates.measurements import Clocks
from narrowgate.gates.policy import SpeedPlan
from narrowgate.gates.speed import BlockTime, StepFunction, run_quartets, stage

PLAN = SpeedPlan(min_quartets=5, max_quartets=12, steps_per_block=4, half_width=0.005, budget_seconds=1000)


class FakeTimer:
    """A timer in which a step takes what the step function says, with drift and noise."""

    def __init__(self, noise: float = 0.0, drift: float = 0.0) -> None:
        self.time, self.noise, self.drift = 0.0, noise, drift
        self.rng = np.random.default_rng(0)
        self.spent = 0.0
        self.blocks = 0

    def spend(self, ms: float) -> None:
        self.spent = ms

    def block(self, step: StepFunction, steps: int) -> BlockTime:
        for i in range(steps):
            step(i)
        ms = self.spent * np.exp(self.drift * self.blocks + self.noise * self.rng.standard_normal())
        self.blocks += 1
        self.time += ms * steps / 1000
        return BlockTime(float(ms), float(ms * 1.01))

    def now(self) -> float:
        return self.time

    def clocks(self) -> Clocks | None:
        return Clocks(sm_mhz=1980, watts=600.0, celsius=60, throttle=())


def arms(timer: FakeTimer, calls: list[str]) -> tuple[Callable[[int], None], Callable[[int], None]]:
    def baseline(i: int) -> None:
        calls.append(f"A{i}")
        timer.spend(12.0)

    def candidate(i: int) -> None:
        calls.append(f"B{i}")
        timer.spend(10.0)

    return baseline, candidate


def test_orders_alternate_and_blocks_run_whole() -> None:
    timer, calls = FakeTimer(), []
    quartets, why = run_quartets(*arms(timer, calls), timer, PLAN, 0.05)
    assert len(quartets) == 5
    assert "half-width" in why
    assert [q.order for q in quartets] == ["ABBA", "BAAB", "ABBA", "BAAB", "ABBA"]
    blocks = ["".join(c[0] for c in calls[i : i + 4]) for i in range(0, len(calls), 4)]
    assert blocks[:8] == ["AAAA", "BBBB", "BBBB", "AAAA", "BBBB", "AAAA", "AAAA", "BBBB"]
    assert calls[:4] == ["A0", "A1", "A2", "A3"]
    assert quartets[0].baseline_ms == (12.0, 12.0)
    assert quartets[1].candidate_ms == (10.0, 10.0)
    assert quartets[0].baseline_host_ms[0] == pytest.approx(12.12)
    assert quartets[0].clocks is not None


def test_a_linear_drift_leaves_the_ratio_alone() -> None:
    timer = FakeTimer(drift=0.01)
    quartets, _ = run_quartets(*arms(timer, []), timer, PLAN, 0.05)
    for q in quartets:
        ratio = (q.baseline_ms[0] * q.baseline_ms[1]) / (q.candidate_ms[0] * q.candidate_ms[1])
        assert ratio**0.5 == pytest.approx(1.2)


def test_noise_asks_for_more_quartets_up_to_the_most() -> None:
    timer = FakeTimer(noise=0.1)
    told: list[int] = []
    quartets, why = run_quartets(*arms(timer, []), timer, PLAN, 0.05, lambda n, ratio: told.append(n))
    assert len(quartets) == 12
    assert "12 quartets" in why
    assert told == list(range(1, 13))


def test_the_budget_ends_it() -> None:
    timer = FakeTimer(noise=0.1)
    quartets, why = run_quartets(*arms(timer, []), timer, PLAN.model_copy(update={"budget_seconds": 1.0}), 0.05)
    assert "budget" in why
    assert len(quartets) == 6


def test_staging_takes_the_first_batches_and_no_more() -> None:
    import torch

    taken = []

    def batches():
        for i in range(100):
            taken.append(i)
            yield torch.tensor([i])

    staged = stage(batches(), torch.device("cpu"), 3)
    assert [int(b) for b in staged] == [0, 1, 2]
    assert taken == [0, 1, 2]


@pytest.mark.gpu
def test_on_a_gpu_the_step_time_of_both_arms_is_measured(room) -> None:
    import torch
    from narrowgate.gates.speed import measure_step_time
    from narrowgate.gates.task import load_task
    from narrowgate.gates.train import Arm
    from narrowgate.recipes import load_recipe

    plan = SpeedPlan(min_quartets=3, max_quartets=3, steps_per_block=4)
    task, device = load_task("ranker:good"), torch.device("cuda")
    baseline, candidate = Arm(task, device), Arm(task, device, load_recipe("all-fp8.yaml"))
    found = measure_step_time(baseline, candidate, plan, 0.05, lambda n, r: None)
    assert found.status == "measured"
    assert len(found.quartets) == 3
    for quartet in found.quartets:
        assert min(*quartet.baseline_ms, *quartet.candidate_ms) > 0
        assert quartet.clocks is not None or found.clocks_note
    times = {c.name: c for c in found.kernels}
    assert times["gemm"].baseline_ms > 0
    assert times["gemm fp8"].baseline_ms == 0 < times["gemm fp8"].candidate_ms
