"""What is watched of tensors during a training, and how the stability gate judges it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates import train
from narrowgate.gates.compilation import honest_compilation
from narrowgate.gates.decision import decide
from narrowgate.gates.measurements import Measurements, Operand
from narrowgate.gates.policy import BUILTIN_POLICIES, StabilityLimits
from narrowgate.gates.stability import Observed, numerics_lines, stability
from narrowgate.gates.task import load_task
from narrowgate.gates.tensor_watch import TensorWatch
from narrowgate.recipes import apply_recipe, load_recipe
from torch import nn

CPU = torch.device("cpu")
STANDARD = BUILTIN_POLICIES["standard"]


def quiet(*_: Any) -> None:
    pass


def operand(**changes: Any) -> Operand:
    fields: dict[str, Any] = {
        "layer": "tower.0", "path": "dgrad", "operand": "grad", "format": "fp8_e4m3/tensor", "steps": 3,
        "elements": 3000, "amax": 1.0, "saturated": 0.0, "worst_saturated": 0.0, "worst_saturated_step": 1,
        "underflowed": 0.0, "worst_underflowed": 0.0, "worst_underflowed_step": 1, "clipped": 0.0,
        "worst_clipped": 0.0, "nonfinite": 0.0, "sqnr_db": 30.0,
    }  # fmt: skip
    return Operand(**fields | changes)


def with_tensors(m: Measurements, seed: int, **changes: Any) -> Measurements:
    seeds = list(m.seeds)
    run = seeds[seed].candidate
    run = run.model_copy(update={"stability": run.stability.model_copy(update=changes)})
    seeds[seed] = seeds[seed].model_copy(update={"candidate": run})
    return m.model_copy(update={"seeds": tuple(seeds)})


def stability_reasons(m: Measurements) -> list[str]:
    return [reason.text for reason in decide(m, STANDARD).reasons if reason.gate == "stability"]


def test_underflow_past_the_limit_rejects_and_names_layer_path_operand_and_step(measurements) -> None:
    bad = operand(worst_underflowed=0.62, worst_underflowed_step=50)
    m = with_tensors(measurements([0.0] * 8), 3, underflow=0.62, worst=(operand(layer="other"), bad))
    assert decide(m, STANDARD).verdict == "reject"
    assert stability_reasons(m) == [
        "In seed 3 underflow reached 62.00 % of the grad of tower.0 in dgrad (fp8_e4m3/tensor) at step 50;"
        " the policy allows 50 %."
    ]


def test_saturation_in_many_seeds_is_told_once_by_the_worst(measurements) -> None:
    m = measurements([0.0] * 8)
    for seed, share in ((1, 0.06), (5, 0.08), (6, 0.07)):
        m = with_tensors(m, seed, saturation=share, worst=(operand(worst_saturated=share),))
    (reason,) = stability_reasons(m)
    assert reason.startswith("In seed 5 (and 2 other seeds) saturation reached 8.00 %")
    gate = next(g for g in decide(m, STANDARD).gates if g.name == "stability")
    assert gate.measured == 3


def test_shares_at_the_limit_and_clipped_values_pass(measurements) -> None:
    limits = STANDARD.stability
    m = with_tensors(
        measurements([0.0] * 8), 0, saturation=limits.max_saturation, underflow=limits.max_underflow, clipped=0.9
    )
    assert stability_reasons(m) == []


def with_ends(m: Measurements, ends: Sequence[tuple[float, float]], first: float = 0.69) -> Measurements:
    """Measurements whose seeds end at these training losses, of the baseline and of the candidate."""
    seeds = []
    for seed, losses in zip(m.seeds, ends, strict=True):
        arms = {}
        for arm, last in zip(("baseline", "candidate"), losses, strict=True):
            run = getattr(seed, arm)
            arms[arm] = run.model_copy(update={"losses": run.losses.model_copy(update={"first": first, "last": last})})
        seeds.append(seed.model_copy(update=arms))
    return m.model_copy(update={"seeds": tuple(seeds)})


@pytest.mark.parametrize("end", [-1.56, 0.0, 1e-9, 0.5])
def test_the_same_training_never_diverges_whatever_sign_its_loss_has(measurements, end: float) -> None:
    m = with_ends(measurements([0.0] * 5), [(end + i / 1e3, end + i / 1e3) for i in range(5)], first=2.0)
    assert stability_reasons(m) == []


@pytest.mark.parametrize(("end", "candidate"), [(-1.56, -0.9), (0.0, 0.3), (0.5, 0.56)])
def test_a_candidate_that_ends_past_its_baseline_and_the_baselines_spread_diverged(
    measurements, end: float, candidate: float
) -> None:
    ends = [(end + i / 1e3, end + i / 1e3) for i in range(5)]
    ends[2] = (ends[2][0], candidate)
    (reason,) = stability_reasons(with_ends(measurements([0.0] * 5), ends, first=2.0))
    assert f"In seed 2 the candidate ended at a training loss of {candidate:.5f}" in reason


def test_what_a_baselines_own_seeds_do_is_no_divergence(measurements) -> None:
    ends = [(0.40, 0.46), (0.50, 0.45), (0.45, 0.50), (0.42, 0.42), (0.47, 0.52)]
    assert stability_reasons(with_ends(measurements([0.0] * 5), ends)) == []
    # One seed of the baseline that diverges itself excuses no other.
    ends[3] = (9.0, 9.0)
    ends[0] = (0.40, 0.9)
    (reason,) = stability_reasons(with_ends(measurements([0.0] * 5), ends))
    assert "In seed 0" in reason


def test_a_parameter_that_only_the_baseline_trains_is_named(measurements) -> None:
    m = measurements([0.0] * 8)
    seeds = [
        seed.model_copy(
            update={"baseline": seed.baseline.model_copy(
                update={"stability": seed.baseline.stability.model_copy(
                    update={"observed_steps": 4, "without_gradient": ("unused",)})})}
        )
        for seed in m.seeds
    ]  # fmt: skip
    m = m.model_copy(update={"seeds": tuple(seeds)})
    m = with_tensors(m, 2, observed_steps=4, without_gradient=("unused",))
    assert stability_reasons(m) == []
    m = with_tensors(m, 2, observed_steps=4, without_gradient=("unused", "body.weight"))
    assert stability_reasons(m) == [
        "In seed 2 the candidate's body.weight had no gradient in any observed step where the baseline's had."
    ]
    # Two steps do not tell a path that is cut from one that is idle.
    assert stability_reasons(with_tensors(m, 2, observed_steps=2)) == []


def test_an_arm_counts_every_operand_at_the_stated_steps(room: Path) -> None:
    arm = train.Arm(load_task("ranker:good"), CPU, load_recipe("all-fp8.yaml"), observe_every=25)
    observed = arm.train(0, quiet).observed
    assert observed.steps == 3  # 1, 25 and 50 of 60
    # What two paths share is counted once, so only those are sure that no other path can have quantized.
    assert {(o.layer, o.path, o.operand) for o in observed.operands} >= {
        ("body", "fprop", "input"), ("body", "fprop", "weight"), ("body", "wgrad", "grad"),
        ("head", "fprop", "input"), ("head", "fprop", "weight"), ("head", "dgrad", "grad"),
    }  # fmt: skip
    found = stability(np.ones(60), np.ones(60), StabilityLimits(), observed)
    assert found.saturation == 0
    assert found.underflow is not None
    assert found.observed_steps == 3
    lines = numerics_lines([found])
    assert "counted in 3 steps a seed" in lines[0]
    assert 1 < len(lines) <= 6


def test_where_no_operand_was_quantized_none_is_listed() -> None:
    found = stability(np.ones(10), np.ones(10), StabilityLimits(), Observed(steps=2))
    assert numerics_lines([found]) == [
        "saturation and underflow: watched for in 2 steps a seed, in which no operand was quantized"
    ]


def test_what_nobody_counts_is_said_so(room: Path) -> None:
    arm = train.Arm(load_task("ranker:good"), CPU, steps=10, observe_every=5)
    found = stability(np.ones(10), np.ones(10), StabilityLimits(), arm.train(0, quiet).observed)
    assert found.saturation is None
    assert found.not_observed == "nothing is quantized"
    assert "not counted (nothing is quantized)" in numerics_lines([found])[0]


def test_counting_beside_a_compiled_arm_changes_nothing_of_its_training(
    room: Path, compile_by: Callable[..., None]
) -> None:
    text = (room / "all-fp8.yaml").read_text()
    text = text.replace("grad: fp8_e5m2", "grad: fp8_e5m2+sr").replace("fprop: fp8_e4m3", "fprop: fp8_e4m3+delayed(4)")
    (room / "all-fp8.yaml").write_text(text)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_by(backend)
    runs = []
    for every in (None, 5):
        torch._dynamo.reset()
        graphs.clear()
        arm = train.Arm(
            load_task("ranker:good"), CPU, load_recipe("all-fp8.yaml"), steps=12, compiled=True, observe_every=every
        )
        with honest_compilation():
            runs.append((arm.train(0, quiet), len(graphs)))
    (alone, built), (watched, built_watched) = runs
    assert built == built_watched
    np.testing.assert_array_equal(alone.losses, watched.losses)
    np.testing.assert_array_equal(alone.logits, watched.logits)
    assert watched.observed.steps == 3
    assert {o.layer for o in watched.observed.operands} == {"body", "head"}


def test_an_extra_pass_puts_everything_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
    apply_recipe(model, "fp8-tensor")
    x = torch.randn(8, 16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(3), np.random.rand(), random.random()
    torch.manual_seed(1)
    drawn = np.random.get_state(), random.getstate()

    def loss() -> torch.Tensor:
        random.random()
        np.random.rand()
        return model(x).sum()

    np.random.seed(3)
    random.seed(3)
    expected = expected[0], np.random.rand(), random.random()
    np.random.seed(3)
    random.seed(3)
    TensorWatch(1, counts=True).probe(1, model, loss)
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(), random.random()) == expected[1:]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    np.random.set_state(drawn[0])
    random.setstate(drawn[1])


def test_memory_that_runs_out_in_the_extra_pass_ends_the_counting_not_the_training() -> None:
    watch, model = TensorWatch(1, counts=True), nn.Linear(16, 16)
    apply_recipe(model, "fp8-tensor")

    def loss() -> torch.Tensor:
        raise torch.OutOfMemoryError("no")

    watch.probe(1, model, loss)
    observed = watch.result()
    assert observed.not_counted is not None
    assert "memory ran out" in observed.not_counted


def test_arms_that_train_with_other_hyperparameters_are_no_pair(room: Path) -> None:
    from narrowgate.gates.pairs import Pairing

    task = load_task("ranker:good")
    baseline = train.Arm(task, CPU, steps=4).train(0, quiet)
    task.optimizer = lambda model: torch.optim.Adam(model.parameters(), lr=2e-2)  # type: ignore[attr-defined]
    candidate = train.Arm(task, CPU, load_recipe("all-fp8.yaml"), steps=4).train(0, quiet)
    with pytest.raises(
        train.RunError, match=r"seed 0: .* with lr 0.02 and the baseline with 0.01, so they are no pair"
    ):
        Pairing(task, StabilityLimits()).pair(baseline, candidate)
