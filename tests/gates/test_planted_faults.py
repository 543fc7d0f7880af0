"""Faults planted into real runs are caught, and the reason names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowgate.gates.decision import decide
from narrowgate.gates.measurements import Measurements
from narrowgate.gates.policy import BUILTIN_POLICIES
from narrowgate.gates.report import load_report
from narrowgate.gates.train import RunError
from narrowgate.precision import quantization
from narrowgate.precision.grouping import Grouping

STANDARD = BUILTIN_POLICIES["standard"]


def reasons(report: Any) -> dict[str, str]:
    return {reason.code: reason.text for reason in report.reasons}


def status(report: Any, name: str) -> str:
    return next(gate.status for gate in report.gates if gate.name == name)


def test_nothing_planted_nothing_caught(measure: Callable[..., Any]) -> None:
    report = measure(seeds=2)
    assert status(report, "stability") == "pass"
    assert "fail" not in {gate.status for gate in report.gates}


def test_an_unscaled_cast_is_named_by_the_tensor_that_vanishes(
    room: Path, measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (room / "all-fp8.yaml").read_text().replace("grad: fp8_e5m2", "grad: fp8_e4m3")
    (room / "all-fp8.yaml").write_text(text)
    scales = quantization.scales_from_amax

    def unscaled(amax: torch.Tensor, *rest: Any) -> Any:
        return scales(torch.full_like(amax, 448.0), *rest)  # the amax at which E4M3's scale is one

    monkeypatch.setattr(quantization, "scales_from_amax", unscaled)
    report = measure(policy="standard", seeds=2)
    assert report.verdict == "reject"
    assert "underflow" in reasons(report)
    assert "of the grad of body in" in reasons(report)["underflow"]


def test_a_scale_of_the_wrong_row_is_named_by_the_tensor_that_saturates(
    room: Path, measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (room / "all-fp8.yaml").read_text().replace("fprop: fp8_e4m3", "fprop: fp8_e4m3/row")
    (room / "all-fp8.yaml").write_text(text)
    compact = Grouping.compact

    def turned(self: Grouping, values: torch.Tensor) -> torch.Tensor:
        found = compact(self, values)
        return found.flip(0) if found.dim() == 2 else found

    monkeypatch.setattr(Grouping, "compact", turned)
    report = measure(policy="standard", seeds=2)
    assert report.verdict == "reject"
    named = r"saturation reached .* % of the (input|weight) of (body|head) in fprop \(fp8_e4m3/row\) at step"
    assert re.search(named, reasons(report)["saturation"])


def test_a_dropped_weight_gradient_is_named_by_its_layer(measure: Callable[..., Any]) -> None:
    report = measure("ranker:dropped_wgrad", seeds=2)
    assert report.verdict == "reject"
    assert "the candidate's body.weight had no gradient" in reasons(report)["no_gradient"]


def test_a_learning_rate_of_one_arm_makes_no_pair(measure: Callable[..., Any]) -> None:
    with pytest.raises(RunError, match=r"optimizer\(\) trains the candidate with lr 0.02 and the baseline with 0.01"):
        measure("ranker:other_rate", seeds=1)


def test_labels_that_leak_into_one_arm_are_an_anomaly_and_never_accepted(measure: Callable[..., Any]) -> None:
    report = measure("ranker:leaky")
    assert report.verdict == "inconclusive"
    assert report.reasons[0].code == "anomaly"
    assert "Look for a leak" in report.reasons[0].text


def test_memory_that_grows_from_seed_to_seed_is_called_a_leak(measurements, arm) -> None:
    m: Measurements = measurements([0.0] * 8)

    def with_peaks(peak: Callable[[int], int]) -> Measurements:
        seeds = tuple(
            seed.model_copy(update={"candidate": seed.candidate.model_copy(update={"peak_memory": peak(seed.seed)})})
            for seed in m.seeds
        )
        return m.model_copy(update={"seeds": seeds})

    leak = decide(with_peaks(lambda seed: 10**9 + seed * 10**8), STANDARD)
    assert leak.verdict == "reject"
    assert "It grew with every seed, from 0.93 to 1.58 GiB, as a leak does" in leak.reasons[0].text
    heavy = decide(with_peaks(lambda seed: 13 * 10**8 + (seed % 2)), STANDARD)
    assert heavy.verdict == "reject"
    assert "leak" not in heavy.reasons[0].text


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("task", "gate", "text"),
    [
        ("ranker:hoarding", "memory", r"It grew with every seed, from .* GiB, as a leak does\."),
        ("ranker:sleepy", "step_time", r"below the 1\.05x asked\. Most of what it loses: \w+ \S+ to \S+ ms"),
    ],
)
def test_on_a_gpu_a_leak_and_a_sleep_reject_and_are_named(
    room: Path, narrowgate: Callable[..., Any], task: str, gate: str, text: str
) -> None:
    (room / "quick.yaml").write_text(
        "extends: loose\nspeed: {budget_seconds: 10, module_budget_seconds: 5, bf16_fused_seconds: 0}\n"
    )
    options = ("--task", task, "--policy", "quick.yaml", "--seeds", "5", "--device", "cuda", "-q")
    try:
        code, out, err = narrowgate("gate", "all-fp8.yaml", *options)
    finally:
        import_module("ranker").KEPT.clear()
    assert code == 1, out + err
    report = load_report(room / "reports" / "report.json")
    assert status(report, gate) == "fail"
    assert any(re.search(text, reason.text) for reason in report.reasons if reason.gate == gate)


@pytest.mark.gpu
def test_on_a_gpu_a_slow_cast_kernel_rejects_and_is_named(
    room: Path, narrowgate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from narrowgate.precision.kernels import launch

    run, large = launch._Cast.run, torch.zeros(2**14, 2**14, device="cuda", dtype=torch.bfloat16)
    spec, own = "fp8_e4m3/128x128", [True]

    def slow(self: Any, *inputs: Any) -> Any:
        if own[0]:
            own[0] = False
            for _ in range(3):  # of 1 GB: the device, not the host, is what takes longer
                torch.ops.narrowgate.cast_fp8([large], "mn|0", spec, spec, *[None] * 6)
            own[0] = True
        return run(self, *inputs)

    monkeypatch.setattr(launch._Cast, "run", slow)
    (room / "quick.yaml").write_text(
        "extends: loose\nspeed: {budget_seconds: 20, module_budget_seconds: 5, bf16_fused_seconds: 0}\n"
    )
    options = ("--task", "ranker:good", "--policy", "quick.yaml", "--seeds", "2", "--device", "cuda", "-q")
    code, out, err = narrowgate("gate", "all-fp8.yaml", *options)
    assert code == 1, out + err
    report = load_report(room / "reports" / "report.json")
    assert status(report, "step_time") == "fail"
    assert re.search(r"Most of what it loses: cast \S+ to \S+ ms a step", reasons(report)["too_slow"])


def test_a_run_against_itself_passes_quality_and_claims_no_speedup(measure: Callable[..., Any]) -> None:
    report = measure(recipe="bf16")
    assert [(g.status, g.measured) for g in report.gates if g.name in ("ne", "auc")] == [("pass", 0.0)] * 2
    assert status(report, "step_time") == "undecided"
    assert report.verdict == "inconclusive"


def test_swapped_arms_flip_the_sign_and_the_verdict(measure: Callable[..., Any]) -> None:
    m = measure(recipe="all-fp8.yaml").measurements
    swapped = m.model_copy(
        update={
            "seeds": tuple(s.model_copy(update={"baseline": s.candidate, "candidate": s.baseline}) for s in m.seeds)
        }
    )
    ne, auc = (
        [next(g.measured for g in decide(each, STANDARD).gates if g.name == name) for each in (m, swapped)]
        for name in ("ne", "auc")
    )
    assert ne[0] != 0
    assert ne[1] == pytest.approx(-ne[0], rel=0.01)
    assert auc[1] == pytest.approx(-auc[0])
