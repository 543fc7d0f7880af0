"""Which optimizers write the codes of weights in their pass, and of which weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from narrowgate.precision import AmaxHistory, NarrowgateError, Spec, casting
from narrowgate.precision.delayed import roll
from narrowgate.precision.kept_weights import keep_weights, kept_history
from narrowgate.precision.layer import layer_state
from narrowgate.precision.linear import lower_linear
from narrowgate.precision.moments import MOMENTS
from narrowgate.precision.optimizer_state import lower_state, state_spec, write_codes
from narrowgate.recipes import Recipe, Rule, apply_recipe
from narrowgate.recipes.recipe import OptimizerState
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from .test_adam_codes import config
from .test_adam_kernel import DEVICE, kernel_test
from .test_kept_codes import Run, kept_of, model, plain_fp32_step


@kernel_test
def test_an_optimizer_without_kept_weights_is_left_alone():
    layers = model()
    optimizer = Adam(layers.parameters(), fused=True)
    write_codes(optimizer)
    assert type(optimizer) is Adam
    keep_weights(layers.parameters())
    unfused = Adam(layers.parameters(), fused=False)
    write_codes(unfused)
    assert type(unfused) is Adam


@kernel_test
def test_an_unlowered_optimizer_stays_what_it_looked_like(monkeypatch):
    run = Run("fp32")
    plain = Adam(model().parameters(), lr=0.05, fused=True)
    for _ in range(2):
        run.micro_batch()
        run.step(monkeypatch)
    assert repr(run.optimizer) == repr(plain)
    state = run.optimizer.state_dict()
    assert all(value["exp_avg"].dtype == torch.float32 for value in state["state"].values())
    plain.load_state_dict(state)
    run.optimizer.load_state_dict(plain.state_dict())
    twin = copy.deepcopy(run.optimizer)
    assert type(twin) is type(run.optimizer)
    run.micro_batch()
    run.step(monkeypatch)
    assert [kept.passes for kept in kept_of(run.layers)] == [2, 2]


@kernel_test
@pytest.mark.parametrize("why", ["shared amaxes", "shared weight", "captured before", "narrow"])
def test_what_the_pass_cannot_write_is_cast_where_it_is_used(why, monkeypatch):
    from narrowgate.precision.kernels import adam_codes

    launched: list[Tensor] = []
    original = adam_codes.launch_adam_codes

    def spied(rule: Any, tensors: Any, *others: Any) -> None:
        launched.append(tensors.parameter)
        original(rule, tensors, *others)

    monkeypatch.setattr(adam_codes, "launch_adam_codes", spied)
    run = Run("bf16")
    state, kept = layer_state(run.layers[0]), kept_of(run.layers)
    if why == "shared amaxes":
        state.group = object()  # type: ignore[assignment]
        monkeypatch.setattr("narrowgate.precision.layer.roll", lambda histories, group: roll(histories))
    elif why == "shared weight":
        twin = nn.Linear(40, 64).to(DEVICE)
        twin.weight = run.weight
        lower_linear(twin, config(), name="twin")
        assert keep_weights([twin.weight]) == {}
    elif why == "captured before":
        kept[0]._stamp.captured = True
    else:
        run.layers[0] = nn.Linear(36, 64).to(DEVICE)
        lower_linear(run.layers[0], config(), name="0")
        run.layers.insert(0, nn.Linear(40, 36).to(DEVICE))
        run.optimizer = lower_state(Adam(run.layers.parameters(), fused=True), "bf16")
        assert keep_weights(run.layers.parameters()) == {}
        kept = [codes for i in (1, 3) if (codes := layer_state(run.layers[i]).kept) is not None]
    for _ in range(3):
        run.micro_batch()
        run.step(monkeypatch)
    assert [codes.passes for codes in kept] == [0, 2]
    assert {x.shape for x in launched} == {(48, 64)}


@kernel_test
@pytest.mark.parametrize("state", ["bf16+sr", "fp32"])
def test_a_plan_wraps_an_optimizer_that_writes_codes(state):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).to(DEVICE)
    recipe = Recipe(
        name="r", optimizer=OptimizerState(state=state), rules=[Rule(layers="0", all="fp8_e4m3+delayed(4)"),
                                                              Rule(layers="2", all="fp8_e4m3")],
    )  # fmt: skip
    optimizer = Adam(layers.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert apply_recipe(layers, recipe).wrap_optimizer(optimizer, keep_weights=True) is optimizer
    for _ in range(3):
        layers(torch.ones(8, 32, device=DEVICE)).sum().backward()
        optimizer.step()
        scheduler.step()
    found = [layer_state(layers[i]).kept for i in (0, 2)]
    assert [kept.passes for kept in found if kept is not None] == [2, 0]


@kernel_test
def test_an_optimizer_that_writes_codes_can_still_be_lowered(monkeypatch):
    plain_fp32_step(monkeypatch)
    run = Run("fp32")
    run.micro_batch()
    run.step(monkeypatch)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    with pytest.raises(NarrowgateError, match=r"found torch\.float64"):
        lower_state(run.optimizer, "bf16")
    run.optimizer.param_groups.pop()
    run.micro_batch()
    run.step(monkeypatch)  # still as before
    assert state_spec(run.optimizer) == Spec(format="fp32")
    lower_state(run.optimizer, "bf16+sr", seed=3)
    assert state_spec(run.optimizer) == Spec.parse("bf16+sr")
    for _ in range(2):
        run.micro_batch()
        run.step(monkeypatch)
    assert {run.optimizer.state[p][m].dtype for p in run.layers.parameters() for m in MOMENTS} == {torch.bfloat16}
    assert [kept.passes for kept in kept_of(run.layers)] == [3, 3]


class Around(Optimizer):
    """Steps another optimizer, whose parameters and state are its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inners, self.param_groups, self.state = [inner], inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inners[0].step(closure)


@kernel_test
def test_an_optimizer_around_another_is_left_alone():
    layers = model()
    groups = [{"params": [p for p in layers.parameters() if p.dim() == dim]} for dim in (2, 1)]
    optimizer = Around(Adam(groups, fused=True))
    layers(torch.ones(4, 40, device=DEVICE)).square().mean().backward()
    before = [p.detach().clone() for p in layers.parameters()]
    keep_weights(layers.parameters())
    write_codes(optimizer)
    assert type(optimizer) is Around
    assert all(torch.equal(p, b) for p, b in zip(layers.parameters(), before, strict=True))
    with pytest.raises(NarrowgateError, match=r"holds another optimizer \('inners', Adam\), expected that one itself"):
        lower_state(optimizer, "bf16")
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


@kernel_test
def test_an_optimizer_that_writes_codes_is_missed_where_its_state_should_be_lower(recwarn):
    layers = nn.Sequential(nn.Linear(32, 64)).to(DEVICE)
    rules = [Rule(layers="0", all="fp8_e4m3+delayed(4)")]
    apply_recipe(layers, Recipe(name="r", optimizer=OptimizerState(state="bf16+sr"), rules=rules))
    optimizer = Adam(layers.parameters(), fused=True)
    keep_weights(layers.parameters())
    write_codes(optimizer)
    layers(torch.ones(8, 32, device=DEVICE)).sum().backward()
    optimizer.step()
    assert any("asks for optimizer state in bf16+sr, this Adam keeps its own" in str(w.message) for w in recwarn.list)


def test_only_weights_of_one_set_of_codes_are_kept_with_a_history(monkeypatch):
    monkeypatch.setattr(casting, "kernels_on_cpu", lambda: True)
    weight, delayed = nn.Parameter(torch.ones(8, 16)), "fp8_e4m3+delayed(3)"

    def found(fprop: str, dgrad: str, weight: Tensor = weight) -> bool:
        history = AmaxHistory(3)
        kept = kept_history(config(fprop, dgrad), weight, {("fprop", "weight"): history})
        assert kept in (None, history)
        return kept is history

    assert found(delayed, delayed)
    assert not found(delayed, "fp8_e5m2+delayed(3)")
    assert not found(delayed, "fp8_e4m3")
    assert not found("fp8_e4m3", "fp8_e4m3")
    assert not found("fp8_e4m3+sr+delayed(3)", "fp8_e4m3+sr+delayed(3)")
    assert not found("fp8_e4m3+delayed(3)+clip(rms=2)", "fp8_e4m3+delayed(3)+clip(rms=2)")
    assert not found(delayed, delayed, torch.ones(8, 16))
