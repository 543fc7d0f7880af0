from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from narrowgate.gates.decision import Decision, decide, decide_family
from narrowgate.gates.measurements import Measurements, RowEstimate, StepTime
from narrowgate.gates.measurements_speed import BUDGET, HALF_WIDTH
from narrowgate.gates.policy import BUILTIN_POLICIES, RunToRun

STANDARD = BUILTIN_POLICIES["standard"]
#: Eight seeds whose relative NE differences average to zero with a spread of 0.01 %.
FLAT = [1e-4 * x for x in (-1, 1, -1, 1, -1, 1, -1, 1)]


def gate(decision: Decision, name: str) -> Any:
    return next(g for g in decision.gates if g.name == name)


def codes(decision: Decision) -> list[str]:
    return [reason.code for reason in decision.reasons]


def with_candidate(m: Measurements, index: int, **changes: Any) -> Measurements:
    """Change the candidate of one seed: stability and loss fields by name, ``quality`` as a whole."""
    return _with_arm(m, index, "candidate", **changes)


def _with_arm(m: Measurements, index: int, arm: str, **changes: Any) -> Measurements:
    seeds = list(m.seeds)
    run = getattr(seeds[index], arm)
    for part in ("stability", "losses"):
        record = getattr(run, part)
        own = {k: v for k, v in changes.items() if k in type(record).model_fields}
        run = run.model_copy(update={part: record.model_copy(update=own)})
    run = run.model_copy(update={k: v for k, v in changes.items() if k in type(run).model_fields})
    seeds[index] = seeds[index].model_copy(update={arm: run})
    return m.model_copy(update={"seeds": tuple(seeds)})


def test_a_good_and_faster_recipe_is_accepted(measurements) -> None:
    decision = decide(measurements(FLAT), STANDARD)
    assert decision.verdict == "accept"
    assert codes(decision) == ["all_gates_pass"]
    assert {g.name for g in decision.gates} == {"step_time", "ne", "auc", "stability", "memory"}
    assert all(g.status == "pass" for g in decision.gates)


def test_every_gate_reports_its_bounds_and_threshold(measurements) -> None:
    decision = decide(measurements(FLAT), STANDARD)
    ne, step = gate(decision, "ne"), gate(decision, "step_time")
    assert (ne.task, ne.metric, ne.direction, ne.threshold) == ("click", "relative NE increase", "below", 0.0005)
    assert ne.ci_low < ne.measured < ne.ci_high
    assert ne.sign_flip_p == 1 / 256
    assert (step.metric, step.direction, step.threshold) == ("speedup", "above", 1.05)
    assert step.ci_low < step.measured < step.ci_high
    assert step.measured == pytest.approx(1.2)


def test_swapped_arms_flip_the_sign(measurements, step_time) -> None:
    rng = np.random.default_rng(0)
    m = measurements(rng.normal(3e-4, 1e-4, 8), rng.normal(1e-4, 1e-4, 8), step_time(rng.normal(0.1, 0.01, 20)))
    swapped = m.model_copy(
        update={
            "seeds": tuple(s.model_copy(update={"baseline": s.candidate, "candidate": s.baseline}) for s in m.seeds),
            "step_time": step_time([-r for r in np.random.default_rng(0).normal(0.1, 0.01, 20)]),
        }
    )
    before, after = decide(m, STANDARD), decide(swapped, STANDARD)
    for name in ("ne", "auc"):
        assert gate(after, name).measured == pytest.approx(-gate(before, name).measured, rel=1e-2)
        assert gate(after, name).ci_low == pytest.approx(-gate(before, name).ci_high, rel=1e-2)
    assert gate(after, "step_time").measured < 1 < gate(before, "step_time").measured


@pytest.mark.parametrize(
    ("ne", "status", "code"),
    [
        ([d + 1e-3 for d in FLAT], "fail", "ne_loss"),
        ([d + 5e-4 for d in FLAT], "undecided", "ne_interval"),
        ([d + 4e-4 for d in FLAT], "pass", None),
        ([20 * d for d in FLAT], "undecided", "ne_interval"),
        (FLAT[:4], "undecided", "too_few_seeds"),
        ([d + 1e-2 for d in FLAT[:4]], "undecided", "too_few_seeds"),
        (FLAT[:1], "undecided", "too_few_seeds"),
        ([d - 1e-2 for d in FLAT], "undecided", "anomaly"),
        ([d - 2.4e-3 for d in FLAT], "pass", None),
        ([0.0] * 8, "pass", None),
    ],
)
def test_the_ne_gate_by_its_interval(measurements, ne: list[float], status: str, code: str | None) -> None:
    decision = decide(measurements(ne), STANDARD)
    assert gate(decision, "ne").status == status
    assert decision.verdict == {"pass": "accept", "fail": "reject", "undecided": "inconclusive"}[status]
    if code:
        assert codes(decision)[0] == code


@pytest.mark.parametrize(
    ("loss", "status"), [(0.0, "pass"), (0.0004, "pass"), (0.0005, "undecided"), (0.001, "fail"), (-0.01, "pass")]
)
def test_the_auc_gate_by_its_interval(measurements, loss: float, status: str) -> None:
    decision = decide(measurements(FLAT, [loss + d for d in FLAT]), STANDARD)
    assert gate(decision, "auc").status == status


def test_what_would_decide_it_is_said(measurements) -> None:
    wide = decide(measurements([10 * d for d in FLAT]), STANDARD)
    assert "more seeds would decide it" in wide.reasons[0].text
    assert "more held-out rows" not in wide.reasons[0].text
    close = decide(measurements([d + STANDARD.max_ne_increase for d in FLAT]), STANDARD)
    assert "unlikely to decide it" in close.reasons[0].text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (4e-4, "A pass may need more held-out rows too: with others it could be +0.0659 %."),
        (None, "A pass needs more groups of held-out rows too: all belong to one."),
    ],
)
def test_seeds_are_not_promised_to_decide_what_rows_would_hold_back(
    measurements, error: float | None, text: str
) -> None:
    row = RowEstimate(mean=0.0, error=error, df=500 if error else 1)
    decision = decide(measurements([10 * d for d in FLAT], row=row), STANDARD)
    assert codes(decision) == ["ne_interval"]
    assert decision.reasons[0].text.endswith(text)
    assert "more seeds would decide it" in decision.reasons[0].text
    worse = decide(measurements([10 * d + 6e-4 for d in FLAT], row=row), STANDARD)
    assert "held-out rows too" not in worse.reasons[0].text


@pytest.mark.parametrize(
    ("row", "code", "text"),
    [
        (RowEstimate(mean=0.0, error=4e-4, df=500), "row_interval", "times as many held-out rows"),
        (RowEstimate(mean=6e-4, error=1e-5, df=500), "row_interval", "unlikely"),
        (RowEstimate(mean=0.0, error=None, df=1), "row_interval", "Hold out more groups"),
    ],
)
def test_a_wide_row_interval_turns_pass_into_undecided(measurements, row, code: str, text: str) -> None:
    decision = decide(measurements(FLAT, row=row), STANDARD)
    assert decision.verdict == "inconclusive"
    assert codes(decision) == [code]
    assert text in decision.reasons[0].text


def test_a_row_interval_never_fails_a_gate_nor_rescues_one(measurements) -> None:
    bad_rows = RowEstimate(mean=5e-2, error=1e-5, df=500)
    assert gate(decide(measurements(FLAT, row=bad_rows), STANDARD), "ne").status == "undecided"
    worse = [d + 1e-3 for d in FLAT]
    assert gate(decide(measurements(worse), STANDARD), "ne").status == "fail"


def test_a_missing_row_interval_is_no_pass(measurements) -> None:
    decision = decide(measurements(FLAT, rows=None), STANDARD)
    assert codes(decision) == ["row_interval_missing", "row_interval_missing"]


@pytest.mark.parametrize(
    ("speed", "status", "code"),
    [
        (0.2, "pass", None),
        (0.0, "fail", "too_slow"),
        (math.log(1.05), "undecided", "speed_interval"),
        (-0.5, "fail", "too_slow"),
    ],
)
def test_the_step_time_gate_by_its_interval(measurements, step_time, speed, status: str, code: str | None) -> None:
    decision = decide(measurements(FLAT, speed=step_time(speed + 0.01 * np.resize([1, -1], 20))), STANDARD)
    assert gate(decision, "step_time").status == status
    if code:
        assert codes(decision) == [code]


@pytest.mark.parametrize(
    ("stopped", "noise", "remedy"),
    [
        (f"{HALF_WIDTH} 0.005", 0.02, "lower the policy's speed.half_width."),
        (f"{BUDGET} 90 s ended", 0.02, "raise the policy's speed.budget_seconds."),
        (
            f"{BUDGET} 90 s ended",
            0.03,
            "raise the policy's speed.max_quartets and raise the policy's speed.budget_seconds.",
        ),
        (
            "100 quartets, the most the policy allows",
            0.03,
            "quartets would decide it: raise the policy's speed.max_quartets.",
        ),
        (None, 0.02, "raise the policy's speed.budget_seconds."),
    ],
)
def test_a_reason_names_what_stopped_the_measuring(measurements, step_time, stopped, noise, remedy) -> None:
    exact = STANDARD.model_copy(update={"speed": STANDARD.speed.model_copy(update={"run_to_run": RunToRun(sd=0)})})
    speed = step_time(math.log(1.057) + noise * np.resize([1, -1], 20), stopped=stopped)
    decision = decide(measurements(FLAT, speed=speed), exact)
    (reason,) = [reason for reason in decision.reasons if reason.gate == "step_time"]
    assert reason.code == "speed_interval"
    assert reason.text.endswith(remedy)


def test_too_few_quartets_decide_nothing(measurements, step_time) -> None:
    for n in (0, 1, 19):
        decision = decide(measurements(FLAT, speed=step_time([0.2] * n)), STANDARD)
        assert codes(decision) == ["too_few_quartets"]


def test_a_host_bound_speedup_is_no_pass(measurements, step_time) -> None:
    speed = step_time(0.2 + 0.01 * np.resize([1, -1], 20), host=0.0 + 0.01 * np.resize([1, -1], 20))
    assert codes(decide(measurements(FLAT, speed=speed), STANDARD)) == ["clocks_disagree"]


@pytest.mark.parametrize("status", ["no_gpu", "skipped"])
def test_unmeasured_speed_is_inconclusive_and_says_what_to_do(measurements, status) -> None:
    decision = decide(measurements(FLAT, speed=StepTime(status=status)), STANDARD)
    assert decision.verdict == "inconclusive"
    assert "un" in decision.reasons[0].text
    assert decision.reasons[0].code in ("no_gpu", "speed_not_measured")


def test_an_emulated_format_never_passes_speed_even_when_it_looks_fast(measurements) -> None:
    decision = decide(measurements(FLAT, emulated=("fp4_e2m1: no matrix unit",)), STANDARD)
    assert decision.verdict == "inconclusive"
    assert codes(decision) == ["emulated"]
    assert "fp4_e2m1: no matrix unit" in decision.reasons[0].text


def test_bad_quality_rejects_even_without_a_gpu(measurements) -> None:
    decision = decide(measurements([d + 1e-3 for d in FLAT], speed=StepTime(status="no_gpu")), STANDARD)
    assert decision.verdict == "reject"
    assert codes(decision) == ["ne_loss", "no_gpu"]


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"first_non_finite": 50, "non_finite_losses": 3}, "non_finite", "loss was not finite at step 50"),
        ({"first_non_finite": 7, "non_finite_gradients": 1}, "non_finite", "gradient was not finite at step 7"),
        ({"spikes": 2, "first_spike": 31}, "loss_spike", "first at step 31"),
        ({"last": 0.7}, "diverged", "training loss of 0.70000"),
        ({"saturation": 0.2}, "saturation", "saturation reached 20.00 %"),
        ({"underflow": 0.9}, "underflow", "underflow reached 90.00 %"),
    ],
)
def test_one_unstable_seed_rejects_and_is_named(measurements, change, code: str, text: str) -> None:
    decision = decide(with_candidate(measurements(FLAT), 3, **change), STANDARD)
    assert decision.verdict == "reject"
    assert codes(decision) == [code]
    assert "seed 3" in decision.reasons[0].text
    assert text in decision.reasons[0].text
    assert gate(decision, "stability").measured == 1


def test_spikes_that_the_baseline_has_too_are_no_fault_of_the_recipe(measurements) -> None:
    m = with_candidate(measurements(FLAT), 0, spikes=1, first_spike=9)
    assert decide(_with_arm(m, 0, "baseline", spikes=1, first_spike=9), STANDARD).verdict == "accept"


@pytest.mark.parametrize(
    ("peak", "status"), [(11 * 10**8, "pass"), (11 * 10**8 + 1, "fail"), (None, "undecided"), (5 * 10**8, "pass")]
)
def test_the_memory_gate(measurements, peak: int | None, status: str) -> None:
    m = measurements(FLAT)
    for index in range(8):
        m = with_candidate(m, index, peak_memory=peak)
    assert gate(decide(m, STANDARD), "memory").status == status


def test_a_candidate_that_cannot_be_evaluated_is_rejected(measurements, arm) -> None:
    m = measurements(FLAT)
    broken = arm(None, None, "3 of 9 predictions are not finite").quality
    decision = decide(with_candidate(m, 2, quality=broken), STANDARD)
    assert decision.verdict == "reject"
    assert codes(decision) == ["candidate_not_evaluable"] * 2
    assert "seed 2: 3 of 9 predictions are not finite" in decision.reasons[0].text


def test_a_single_class_of_rows_leaves_auc_undecided(measurements, arm) -> None:
    m, one_class = measurements(FLAT), arm(0.8, None, "one class only").quality
    for index in range(8):
        m = _with_arm(_with_arm(m, index, "baseline", quality=one_class), index, "candidate", quality=one_class)
    decision = decide(m, STANDARD)
    assert decision.verdict == "inconclusive"
    assert codes(decision) == ["metric_undefined"]


@pytest.mark.parametrize(
    ("quality", "change", "text"),
    [
        ((1.0, 0.7), {}, "no better than the background rate"),
        ((0.8, 0.5), {}, "no better than chance"),
        ((None, None), {}, "has no NE"),
        (None, {"last": 0.69}, "did not fall"),
        (None, {"first_non_finite": 3, "non_finite_losses": 1}, "not finite"),
    ],
)
def test_a_baseline_that_is_not_sane_overrides_everything(measurements, arm, quality, change, text: str) -> None:
    m = measurements([d + 1e-2 for d in FLAT])
    for index in range(8):
        if quality:
            change = change | {"quality": arm(*quality, "broken" if quality[0] is None else None).quality}
        m = _with_arm(m, index, "baseline", **change)
    decision = decide(m, STANDARD)
    assert decision.verdict == "inconclusive"
    assert codes(decision)[0] == "baseline_not_sane"
    assert text in decision.reasons[0].text


def test_an_anomaly_is_never_hidden_by_a_failing_gate(measurements, step_time) -> None:
    decision = decide(measurements([d - 1e-2 for d in FLAT], speed=step_time([0.0] * 20)), STANDARD)
    assert decision.verdict == "inconclusive"
    assert codes(decision) == ["anomaly", "too_slow"]


def test_no_seeds_at_all_is_inconclusive(measurements) -> None:
    assert decide(measurements([]), STANDARD).verdict == "inconclusive"


def test_nothing_is_rounded_before_it_is_compared(measurements) -> None:
    just_past = [STANDARD.max_ne_increase * (1 + 1e-9)] * 8
    assert gate(decide(measurements(just_past), STANDARD), "ne").status != "pass"


def test_measurements_decide_the_same_after_a_round_trip_through_json(measurements) -> None:
    m = measurements(np.random.default_rng(5).normal(3e-4, 2e-4, 8))
    assert decide(Measurements.model_validate_json(m.model_dump_json()), STANDARD) == decide(m, STANDARD)


def test_a_family_lowers_the_accepting_level_only(measurements) -> None:
    clear, close = measurements(FLAT), measurements([d + 4.2e-4 for d in FLAT])
    assert decide(close, STANDARD).verdict == "accept"
    family = decide_family([close, close, clear], STANDARD)
    assert [d.verdict for d in family] == ["inconclusive", "inconclusive", "accept"]
    assert family[0].family == 3
    assert family[0].accept_alpha < family[0].alpha == 0.05
    bad = measurements([d + 1e-3 for d in FLAT])
    assert gate(decide_family([bad, bad, clear], STANDARD)[0], "ne").ci_low == gate(decide(bad, STANDARD), "ne").ci_low
    assert decide_family([bad, clear], STANDARD)[0].verdict == "reject"
