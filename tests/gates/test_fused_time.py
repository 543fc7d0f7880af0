"""The candidate against the same fusion in BF16: how it is timed, what is told of it, and casting overhead from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates import fused_time
from narrowgate.gates.attribution import casting_overhead, kernel_class
from narrowgate.gates.fused_time import measure_fused_time
from narrowgate.gates.measurements import FusedTime, KernelClass
from narrowgate.gates.policy import SpeedPlan
from narrowgate.gates.render import terminal_text
from narrowgate.gates.speed import HostTimer
from narrowgate.gates.task import load_task
from narrowgate.gates.train import Arm
from narrowgate.recipes import apply_recipe, load_recipe

CPU = torch.device("cpu")
FEW = SpeedPlan(min_quartets=3, max_quartets=9, steps_per_block=3, half_width=1e-9)
KERNELS = (
    KernelClass(name="cast", baseline_ms=0.0, candidate_ms=1.5),
    KernelClass(name="amax", baseline_ms=0.0, candidate_ms=0.5),
    KernelClass(name="gemm", baseline_ms=9.0, candidate_ms=4.0),
)


class DeviceTimer(HostTimer):
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> float:
        return 0.0


@pytest.fixture
def arm(room: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Arm, Any]:
    """A candidate and its plan; profiling says 0.7 ms."""
    torch.set_num_threads(1)
    monkeypatch.setattr(fused_time, "write_milliseconds", lambda step: 0.7)
    task, recipe = load_task("ranker:good"), load_recipe("all-fp8.yaml")
    return Arm(task, CPU, recipe), apply_recipe(task.build_model(), recipe)


def test_the_arm_multiplies_in_bf16_where_the_recipe_would_quantize(room: Path) -> None:
    task, recipe = load_task("ranker:good"), load_recipe("all-fp8.yaml")
    fused, plain = Arm(task, CPU, recipe, fused_bf16=True), Arm(task, CPU)
    model: Any = fused.module(0)
    other: Any = plain.module(0)
    assert "FusedBF16" in str([type(m).__mro__ for m in (model.body, model.head)])
    assert torch.equal(model.body.weight, other.body.weight), "the same weights for the same seed"
    x = torch.randn(4, 16)
    own, exact = model.eval()(x), other.eval()(x)
    assert 0 < (own - exact).abs().max() < 0.02
    fused.stepper(0)((1, torch.randn(8, 16), torch.ones(8)))


def test_quartets_are_few_and_set_the_candidate_against_the_bf16_arm(arm, monkeypatch) -> None:
    candidate, plan = arm
    found = measure_fused_time(candidate, plan, FEW, 0.05, DeviceTimer)
    assert found.why is None
    assert len(found.quartets) == FEW.min_quartets
    assert found.write_ms == 0.7
    assert found.seconds is not None
    assert found.seconds > 0


@pytest.mark.parametrize(
    ("limits", "changes", "why"),
    [
        ({"bf16_fused_seconds": 0}, {}, "bf16_fused_seconds is 0"),
        ({}, {"backend": "torchao"}, "backend torchao casts with kernels of its own"),
        ({}, {"layers": ()}, "lowers no layer"),
    ],
)
def test_where_there_is_no_counterpart_the_reason_is_told(arm, limits, changes, why) -> None:
    candidate, plan = arm
    found = measure_fused_time(
        candidate, dataclasses.replace(plan, **changes), FEW.model_copy(update=limits), 0.05, DeviceTimer
    )
    assert found.why is not None
    assert why in found.why
    assert found.quartets == ()


def test_an_arm_that_fails_fails_nothing_else(arm, monkeypatch) -> None:
    candidate, plan = arm

    def fail(*_: Any) -> float:
        raise RuntimeError("no kernel\nimage")

    monkeypatch.setattr(fused_time, "write_milliseconds", fail)
    found = measure_fused_time(candidate, plan, FEW, 0.05, DeviceTimer)
    assert found.why == "it failed: RuntimeError: no kernel image"
    candidate.stepper(0)


def test_what_the_same_kernels_take_in_bf16_is_no_casting_overhead() -> None:
    assert kernel_class("write_kernel") == "write"
    assert kernel_class("triton_poi_fused_overwrite_kernel_0") != "write"
    bound, exact = casting_overhead(KERNELS, 10.0), casting_overhead(KERNELS, 10.0, 0.7)
    assert bound is not None
    assert exact is not None
    assert (bound["ms"], bound["share"], bound["upper_bound"]) == (2.0, pytest.approx(0.2), True)
    assert (exact["ms"], exact["share"], exact["upper_bound"]) == (pytest.approx(1.3), pytest.approx(0.13), False)
    assert exact["write_bf16_ms"] == 0.7
    assert "less what the same fused kernels take" in exact["measured"]
    assert casting_overhead((), 10.0, 0.7) is None


def test_the_report_tells_formats_from_fusion(measurements, make_report, step_time) -> None:
    m = measurements([0.0] * 8)
    quartets = step_time(np.log(1.1) + 0.001 * np.resize([1, -1], 20)).quartets
    step = m.step_time.model_copy(update={"kernels": KERNELS})
    told = {"step_time": step, "fused_time": FusedTime(quartets=quartets, write_ms=0.7, seconds=9.0)}
    report = make_report(m.model_copy(update=told))
    found = report.evidence.step.results["bf16_fused"]
    assert found["speedup"] == pytest.approx(1.1)
    assert found["ci_low"] < 1.1 < found["ci_high"]
    assert found["fused_ms"] == pytest.approx(11.0)
    assert report.evidence.step.results["casting_overhead"]["ms"] == pytest.approx(1.3)
    text = terminal_text(report)
    assert "casting overhead: 13.0 % of the candidate's step" in text
    assert "against the same fusion in BF16 (11.000 ms a step), the formats alone: speedup [1.0" in text
    without = make_report(m.model_copy(update={"step_time": step, "fused_time": FusedTime(why="no room")}))
    assert without.evidence.step.results["bf16_fused"] == "not measured: no room"
    assert without.gates == report.gates, "nothing is decided by it"


@pytest.mark.gpu
def test_on_a_gpu_the_bf16_arm_writes_through_the_fused_kernels(room: Path) -> None:
    task, recipe, device = load_task("ranker:good"), load_recipe("all-fp8.yaml"), torch.device("cuda")
    plan = apply_recipe(task.build_model().to(device), recipe)
    found = measure_fused_time(Arm(task, device, recipe), plan, FEW, 0.05)
    assert found.why is None
    assert len(found.quartets) == FEW.min_quartets
    assert found.write_ms is not None
    assert found.write_ms > 0
