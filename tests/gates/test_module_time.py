"""Modules alone: how they are timed, what decides them, and who is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates import module_time
from narrowgate.gates.decision import decide, decide_family
from narrowgate.gates.measurements import (
    ModuleLeft,
    ModuleProduct,
    ModuleRun,
    ModuleTime,
    Quartet,
)
from narrowgate.gates.module_sums import owners_of_loss, total_log_ratios
from narrowgate.gates.module_time import measure_module_time, time_regions
from narrowgate.gates.policy import BUILTIN_POLICIES, SpeedPlan
from narrowgate.gates.progress import Progress
from narrowgate.gates.regions import Found, find_regions
from narrowgate.gates.run_timing import time_modules
from narrowgate.gates.speed import BlockTime, HostTimer, StepFunction
from narrowgate.gates.task import load_task
from narrowgate.gates.train import Arm
from narrowgate.recipes import apply_recipe, load_recipe
from torch import nn

STANDARD = BUILTIN_POLICIES["standard"]
CPU = torch.device("cpu")
NOISE = 0.002 * np.resize([1, -1], 20)


class CountingTimer(HostTimer):
    """Times blocks by the host's clock; counts them, and can make time pass."""

    def __init__(self, seconds_a_block: float = 0.0) -> None:
        self.blocks, self.passes = 0, seconds_a_block
        self.steps: list[StepFunction] = []

    def block(self, step: StepFunction, steps: int) -> BlockTime:
        self.blocks += 1
        self.steps.append(step)
        return super().block(step, steps)

    def now(self) -> float:
        return self.blocks * self.passes


def run(
    name: str, baseline: float, candidate: float, calls: int = 1, share: float = 1.0, noise: Sequence[float] = NOISE
) -> ModuleRun:
    quartets = tuple(
        Quartet(
            order="ABBA",
            baseline_ms=(baseline * np.exp(x), baseline * np.exp(x)),
            candidate_ms=(candidate, candidate),
            baseline_host_ms=(0.1, 0.1),
            candidate_host_ms=(0.3, 0.3),
        )
        for x in noise
    )
    products = (ModuleProduct(name=name, type="Linear", m=64, k=32, n=16),)
    return ModuleRun(
        products=products, around=("RMSNorm",), calls=calls, layers=(name,), share=share, quartets=quartets
    )


def left(name: str, share: float, why: str = "the budget of 60 s ended") -> ModuleLeft:
    products = (ModuleProduct(name=name, type="Linear", m=64, k=32, n=16),)
    return ModuleLeft(products=products, around=(), calls=1, layers=(name,), share=share, why=why)


def timed(*modules: ModuleRun, left_out: Sequence[ModuleLeft] = ()) -> ModuleTime:
    return ModuleTime(status="measured", modules=modules, left_out=tuple(left_out), seconds=12.0)


@pytest.fixture
def decided(measurements: Callable[..., Any]) -> Callable[..., Any]:
    """Decide a run of good quality and a fast step whose modules are those given."""

    def decide_modules(module_time: ModuleTime, **changes: Any) -> Any:
        m = measurements([0.0] * 8, module_time=module_time, **changes)
        decision = decide(m, STANDARD)
        gate = next((g for g in decision.gates if g.name == "module_time"), None)
        reasons = [r for r in decision.reasons if r.gate == "module_time"]
        return decision, gate, reasons

    return decide_modules


def test_modules_that_gain_what_is_asked_pass_and_both_speed_gates_must(decided) -> None:
    decision, gate, reasons = decided(timed(run("a", 3.0, 2.0)))
    assert (decision.verdict, gate.status, reasons) == ("accept", "pass", [])
    assert gate.measured == pytest.approx(1.5)
    assert gate.ci_low < 1.5 < gate.ci_high
    assert gate.threshold == STANDARD.min_speedup
    assert [g.name for g in decision.gates][:2] == ["step_time", "module_time"]


def test_the_sum_over_a_steps_calls_decides_not_the_best_module(decided) -> None:
    modules = (run("fast", 3.0, 2.0, share=0.5), run("slow", 1.0, 1.4, calls=4, share=0.5))
    decision, gate, (reason,) = decided(timed(*modules))
    assert (decision.verdict, gate.status) == ("reject", "fail")
    assert gate.measured == pytest.approx((3 + 4 * 1) / (2 + 4 * 1.4))
    assert "below the 1.05x asked" in reason.text
    assert reason.text.endswith("Most of it is lost in slow (1.000 to 1.400 ms at 64x32x16, 4 calls).")
    ratios = total_log_ratios(modules)
    expected = np.log(3 * np.exp(NOISE) + 4 * np.exp(NOISE)) - np.log(2 + 4 * 1.4)
    np.testing.assert_allclose(ratios, expected, rtol=1e-12)


def test_an_interval_that_holds_the_threshold_is_undecided_and_says_what_would_decide(decided) -> None:
    noise = 0.09 * np.resize([1, -1], 20)
    decision, gate, (reason,) = decided(timed(run("a", 1.09, 1.0, noise=noise)))
    assert (decision.verdict, gate.status, reason.code) == ("inconclusive", "undecided", "module_interval")
    assert "more quartets would decide it: raise the policy's speed.min_quartets" in reason.text


@pytest.mark.parametrize("ratio", [1.06, 1.04])
def test_what_is_closer_than_runs_are_to_each_other_is_undecided_however_long_a_run_measures(decided, ratio) -> None:
    decision, gate, (reason,) = decided(timed(run("a", ratio, 1.0, noise=0.001 * np.resize([1, -1], 20))))
    assert (decision.verdict, gate.status, reason.code) == ("inconclusive", "undecided", "module_interval")
    assert "closer than runs come to each other (speed.run_to_run)" in reason.text


def test_without_a_lowered_layer_the_step_alone_decides_on_what_travels_and_on_the_state(decided) -> None:
    decision, gate, reasons = decided(ModuleTime(status="no_modules"))
    assert (decision.verdict, gate, reasons) == ("accept", None, [])
    assert [g.status for g in decision.gates if g.name == "step_time"] == ["pass"]


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        ("shards: {reduce_scatter: bf16}", "no_modules"),
        ("optimizer: {state: bf16+sr}", "no_modules"),
        ("optimizer: {keep_weights: true}", "no_gpu"),
        ("shards: {all_gather: fp8_e4m3}", "no_gpu"),
        ("", "no_gpu"),
        (
            "shards: {reduce_scatter: bf16}\nrules: [{layers: body, fprop: {input: fp8_e4m3, weight: fp8_e4m3}}]",
            "no_gpu",
        ),
    ],
)
def test_a_recipe_that_lowers_nothing_has_no_modules_if_it_changes_something_else(room, rest, status) -> None:
    (room / "other.yaml").write_text(f"recipe: other\ndefaults: bf16\n{rest}\n")
    task, recipe = load_task("ranker:good"), load_recipe("other.yaml")
    baseline, candidate = Arm(task, CPU, steps=2), Arm(task, CPU, recipe, steps=2)
    plan = apply_recipe(task.build_model(), recipe)
    assert time_modules(STANDARD, plan, baseline, candidate, Progress()).status == status


@pytest.mark.parametrize(
    ("module_time", "changes", "code"),
    [
        (ModuleTime(status="no_gpu"), {}, "no_gpu"),
        (ModuleTime(status="skipped"), {}, "speed_not_measured"),
        (ModuleTime(status="nothing_lowered"), {}, "nothing_lowered"),
        (ModuleTime(status="failed", why="the GPU's memory ran out"), {}, "modules_failed"),
        (ModuleTime(status="emulated"), {"emulated": ("mxfp4 on Hopper",)}, "emulated"),
        # Times that were measured all the same say nothing where a format is emulated.
        (timed(run("a", 3.0, 1.0)), {"emulated": ("mxfp4 on Hopper",)}, "emulated"),
        (timed(run("a", 3.0, 1.0, noise=NOISE[:19])), {}, "modules_left_out"),
        (timed(run("a", 3.0, 1.0, share=0.4), left_out=[left("b", 0.6)]), {}, "modules_left_out"),
        (timed(left_out=[left("b", 1.0)]), {}, "modules_left_out"),
    ],
)
def test_without_gpu_native_formats_and_enough_modules_nothing_passes(decided, module_time, changes, code) -> None:
    decision, gate, (reason,) = decided(module_time, **changes)
    assert gate.status == "undecided"
    assert reason.code == code
    assert decision.verdict == "inconclusive"


def test_what_was_left_out_is_said_with_its_share(decided) -> None:
    few = timed(run("a", 1.0, 1.0, share=0.9), left_out=[left("b", 0.06), left("c", 0.04)])
    _, gate, (reason,) = decided(few)
    assert gate.status == "fail"
    assert "2 modules with 10.0 % of the FLOPs were left out." in reason.text
    _, _, (reason,) = decided(timed(run("a", 2.0, 1.0, share=0.4), left_out=[left("b", 0.6)]))
    assert "40 % of the lowered modules' FLOPs" in reason.text
    assert "the budget of 60 s ended" in reason.text


def test_a_policy_may_ask_another_speedup_of_modules(measurements) -> None:
    m = measurements([0.0] * 8, module_time=timed(run("a", 1.2, 1.0)))
    asked = STANDARD.model_copy(update={"min_module_speedup": 1.3})
    assert decide(m, STANDARD).verdict == "accept"
    assert decide(m, asked).verdict == "reject"


def test_a_report_without_the_level_has_no_such_gate(measurements) -> None:
    decision = decide(measurements([0.0] * 8), STANDARD)
    assert decision.verdict == "accept"
    assert "module_time" not in {gate.name for gate in decision.gates}


def test_within_a_family_the_accepting_level_of_modules_is_lowered_too(measurements) -> None:
    noise = 0.03 * np.resize([1, -1], 20)
    m = measurements([0.0] * 8, module_time=timed(run("a", 1.081, 1.0, noise=noise)))
    assert decide(m, STANDARD).verdict == "accept"
    (in_family, *_) = decide_family([m] * 4, STANDARD)
    assert next(g for g in in_family.gates if g.name == "module_time").status == "undecided"


def test_nobody_owns_what_is_no_loss_and_small_parts_are_not_named() -> None:
    assert owners_of_loss([run("a", 2.0, 1.0)], 1.05) is None
    assert owners_of_loss([], 1.05) is None
    lost = [run("a", 1.0, 2.0), run("b", 1.0, 1.9), run("c", 1.0, 1.1), run("d", 1.0, 0.5)]
    named = owners_of_loss(lost, 1.0)
    assert named is not None
    assert named.startswith("a (1.000 to 2.000 ms")
    assert " and b (" in named
    assert "c (" not in named


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.top, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.top(torch.relu(self.body(x)))))


@pytest.fixture
def regions(room: Path) -> tuple[list[Found], tuple[nn.Module, nn.Module]]:
    """Regions of a small ranker, and its models of both arms."""
    torch.set_num_threads(1)
    baseline, candidate = Ranker(), Ranker()
    plan = apply_recipe(candidate, "all-fp8.yaml")
    return find_regions(baseline, lambda: baseline(torch.randn(64, 16)), plan), (baseline, candidate)


FEW = SpeedPlan(min_quartets=3, max_quartets=3, steps_per_block=3)


def test_every_region_is_timed_in_both_arms_forward_and_backward(regions) -> None:
    found, models = regions
    seen: list[str] = []
    measured = time_regions(found, models, CPU, CountingTimer(), FEW, seen.append)
    assert [module.name for module in measured.modules] == ["body", "top", "head"]
    assert seen[:4] == [
        *(f"making ready {i} of 3, {n}" for i, n in ((1, "body"), (2, "top"), (3, "head"))),
        "round 1 of 3, 3 regions",
    ]
    assert measured.left_out == ()
    assert measured.covered == pytest.approx(1.0)
    assert measured.modules[0].share == pytest.approx(16 * 32 / (16 * 32 + 32 * 16 + 16))
    for module in measured.modules:
        assert len(module.quartets) == 3
        assert all(min(*q.baseline_ms, *q.candidate_ms) > 0 for q in module.quartets)
    assert all(p.grad is None for model in models for p in model.parameters()), "gradients of timing are given back"


def test_quartets_go_in_rounds_so_that_regions_drift_together(regions) -> None:
    found, models = regions
    timer = CountingTimer()
    time_regions(found, models, CPU, timer, FEW)
    arms = {id(step): name for step, name in zip(timer.steps[:6], "AaBbCc", strict=True)}
    order = "".join(arms[id(step)] for step in timer.steps[6:])
    assert order == "AaaABbbBCccC" + "aAAabBBbcCCc" + "AaaABbbBCccC"


def test_a_region_that_fails_in_a_round_takes_no_other_with_it(regions) -> None:
    found, models = regions
    calls: list[int] = []

    def breaks(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) > 10:
            raise RuntimeError("too often")

    models[1].body.register_forward_pre_hook(breaks)
    measured = time_regions(found, models, CPU, CountingTimer(), FEW)
    assert [(m.name, len(m.quartets)) for m in measured.modules] == [("top", 3), ("head", 3)]
    assert [(m.name, m.why) for m in measured.left_out] == [("body", "it does not run alone: RuntimeError: too often")]


def test_backward_runs_too(regions) -> None:
    found, models = regions
    seen: list[int] = []
    models[1].body.weight.register_hook(lambda grad: seen.append(1))
    time_regions(found[:1], models, CPU, CountingTimer(), FEW)
    # Warm-up calls, the block that warms up, and two blocks of three steps in each of three quartets.
    assert len(seen) == 3 + 3 + 3 * 2 * 3


def test_regions_compile_by_themselves_each_for_its_own_sizes(regions, compile_by: Callable[..., None]) -> None:
    found, models = regions
    sizes: list[list[Any]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        sizes.append([size for value in inputs for size in getattr(value, "shape", (value,))])
        return graph.forward

    compile_by(backend)
    measured = time_regions(found, models, CPU, CountingTimer(), FEW, compiled=True)
    assert measured.left_out == ()
    assert len(found) == 3
    assert len(sizes) == 2 * 3, "once in each arm"
    assert all(isinstance(size, int) for graph in sizes for size in graph)


def test_the_budget_leaves_out_the_lightest_and_says_so(regions) -> None:
    found, models = regions
    # A block is a second: a region takes two to be made ready, and four in each of three rounds.
    plan = FEW.model_copy(update={"module_budget_seconds": 20})
    timer = CountingTimer(1.0)
    measured = time_regions(found, models, CPU, timer, plan)
    assert [module.name for module in measured.modules] == ["body"]
    assert [(region.name, region.why) for region in measured.left_out] == [
        ("top", "the budget of 20 s has no room for it"),
        ("head", "the budget of 20 s has no room for it"),
    ]
    assert timer.now() == 2 + 2 + 3 * 4 <= 20, "what has no room is not timed"
    assert measured.covered + sum(region.share for region in measured.left_out) == pytest.approx(1.0)


def test_a_region_that_fails_alone_is_left_out_with_its_error_and_the_others_count(regions) -> None:
    found, models = regions

    def broken(module: nn.Module, args: Any) -> None:
        raise ValueError("needs the\nwhole model")

    def full(module: nn.Module, args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    models[1].body.register_forward_pre_hook(broken)
    models[1].top.register_forward_pre_hook(full)
    measured = time_regions(found, models, CPU, CountingTimer(), FEW)
    assert [module.name for module in measured.modules] == ["head"]
    assert {region.name: region.why for region in measured.left_out} == {
        "body": "it does not run alone: ValueError: needs the whole model",
        "top": "the GPU's memory ran out",
    }


def test_planted_one_slow_module_is_named(regions, measurements) -> None:
    found, models = regions
    models[1].top.register_forward_pre_hook(lambda *_: time.sleep(0.03))
    measured = time_regions(found, models, CPU, CountingTimer(), FEW)
    policy = STANDARD.model_copy(update={"speed": FEW})
    decision = decide(measurements([0.0] * 8, module_time=measured), policy)
    assert decision.verdict == "reject"
    (reason,) = decision.reasons
    assert reason.code == "modules_too_slow"
    assert "Most of it is lost in top (" in reason.text
    assert "body (" not in reason.text


def test_the_arms_of_a_run_are_timed_on_the_first_batch_and_parked(room: Path, monkeypatch) -> None:
    class Timer(HostTimer):
        note = "not recorded: no NVML"

        def __init__(self, device: torch.device) -> None:
            super().__init__()

    monkeypatch.setattr(module_time, "AheadTimer", Timer)
    torch.set_num_threads(1)
    task, recipe = load_task("ranker:good"), load_recipe("all-fp8.yaml")
    arms = Arm(task, CPU), Arm(task, CPU, recipe)
    plan = apply_recipe(task.build_model(), recipe)
    found = measure_module_time(*arms, plan, FEW, lambda text: None)
    assert [(m.name, m.products[0].m, m.around) for m in found.modules] == [
        ("body", 64, ("relu", "Dropout")),
        ("head", 64, ("relu", "Dropout", "squeeze", "float")),
    ]
    assert found.seconds is not None
    assert found.seconds > 0
    assert found.clocks_note == Timer.note
    assert all(p.grad is None for arm in arms for p in arm.module(0).parameters())


def test_a_step_that_cannot_be_noted_fails_the_gate_alone(room: Path, monkeypatch, measurements, make_report) -> None:
    def fail(*_: Any) -> Any:
        raise TypeError("no strides\nhere")

    class Timer(HostTimer):
        note = None

        def __init__(self, device: torch.device) -> None:
            super().__init__()

    monkeypatch.setattr(module_time, "AheadTimer", Timer)
    monkeypatch.setattr(module_time, "find_regions", fail)
    task, recipe = load_task("ranker:good"), load_recipe("all-fp8.yaml")
    plan = apply_recipe(task.build_model(), recipe)
    found = measure_module_time(Arm(task, CPU), Arm(task, CPU, recipe), plan, FEW, lambda text: None)
    assert (found.status, found.why) == ("failed", "noting a step failed: TypeError: no strides here")
    report = make_report(measurements([0.0] * 8, module_time=found))
    assert report.verdict == "inconclusive"
    assert report.evidence.module.why == found.why
    (reason,) = report.reasons
    assert reason.text == "Modules alone could not be timed: noting a step failed: TypeError: no strides here."


@pytest.mark.gpu
def test_on_a_gpu_modules_are_timed_alone(room: Path) -> None:
    task, device = load_task("ranker:good"), torch.device("cuda")
    recipe = load_recipe("all-fp8.yaml")
    baseline, candidate = Arm(task, device), Arm(task, device, recipe)
    plan = apply_recipe(task.build_model().to(device), recipe)
    found = measure_module_time(baseline, candidate, plan, FEW, lambda text: None)
    assert found.status == "measured"
    assert found.left_out == ()
    assert {name for module in found.modules for name in module.layers} == {"body", "head"}
    for module in found.modules:
        for quartet in module.quartets:
            # Launched ahead: the device is not seen waiting for the host.
            assert min(*quartet.baseline_ms, *quartet.candidate_ms) > 0
            assert min(quartet.baseline_ms) < max(quartet.baseline_host_ms)
            assert quartet.clocks is not None or found.clocks_note
