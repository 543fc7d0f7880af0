"""The casts of a compiled step, planned without a device: which compute their tensor, and which read it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from narrowgate.precision.capability import named_device
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.grouped import GroupedLinear
from narrowgate.recipes import Recipe, RecipeError, Rule, plan_casts, resolve
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def recipe(text: str) -> Recipe:
    return Recipe(name="r", rules=[Rule(layers="**.up", all=text), Rule(layers="**.down", all=text)])


@pytest.mark.parametrize(("device", "text"), [("cpu", "fp8_e4m3/row+clip(rms=8)"), ("meta", "fp8_e4m3+delayed(4)")])
def test_norms_and_gates_move_in_and_what_is_in_memory_anyway_is_read_from_there(device, text):
    model = nn.Sequential(Block(64, 128), Block(64, 128)).to(device, torch.bfloat16)
    before = dict(model.named_parameters())
    x = torch.randn(32, 64, device=device).bfloat16().requires_grad_()
    casts = plan_casts(model, recipe(text), lambda traced: traced(x).float().sum(), device=named_device("h200"))
    fused = {(cast.layer, cast.tensor): cast.fused for cast in casts}
    assert fused == {
        (f"{block}.{layer}", tensor): (layer, tensor) in {("up", "input"), ("up", "grad"), ("down", "input")}
        for block in (0, 1)
        for layer in ("up", "down")
        for tensor in ("input", "weight", "grad")
    }
    # The step was traced on a copy.
    assert dict(model.named_parameters()) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("LowPrecision" in type(module).__name__ for module in model.modules())


def test_a_step_that_cannot_run_is_one_clear_error():
    model = nn.Sequential(Block(64, 128))
    with pytest.raises(NarrowgateError, match=r"cannot be traced to plan its casts: .*63"):
        plan_casts(model, recipe("fp8_e4m3"), lambda traced: traced(torch.randn(8, 63)).sum(),
                   device=named_device("h200"))  # fmt: skip


def test_the_plan_shows_them(capsys):
    model = nn.Sequential(Block(64, 128))
    x = torch.randn(8, 64)
    plan = resolve(recipe("fp8_e4m3/row"), model, device=named_device("h200"))
    assert plan.to_dict()["casts"] is None
    plan = plan.with_casts(plan_casts(model, plan.recipe, lambda traced: traced(x).sum(), device=plan.device))
    lines = plan.to_text().splitlines()
    (down,) = [line for line in lines if line.startswith("0.down")]
    (up,) = [line for line in lines if line.startswith("0.up")]
    assert down.endswith("  input")
    assert up.endswith("  input, grad")
    assert any("2 of 2 of inputs, 1 of 2 of grads, 0 of 2 of weights" in line for line in lines)
    assert {(cast["layer"], cast["tensor"]) for cast in plan.to_dict()["casts"] if cast["fused"]} == {
        ("0.up", "input"), ("0.up", "grad"), ("0.down", "input")
    }  # fmt: skip


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = GroupedLinear(4, 64, 96), GroupedLinear(4, 96, 64)

    def forward(self, x, ends):
        return self.down(F.silu(self.up(x, ends)), ends)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_experts_are_planned_as_the_planned_device_multiplies_them(device):
    """All in one product, so that no offsets are read and one graph holds the casts."""
    model = Experts().to(device, torch.bfloat16)
    x = torch.randn(40, 64, device=device).bfloat16().requires_grad_()
    ends = torch.tensor([8, 16, 16, 40], dtype=torch.int32, device=device)
    casts = plan_casts(
        model, recipe("fp8_e4m3/row"), lambda traced: traced(x, ends).float().sum(), device=named_device("h200")
    )
    fused = {(cast.layer, cast.tensor): cast.fused for cast in casts}
    assert fused == {
        (layer, tensor): (layer, tensor) == ("down", "input")
        for layer in ("up", "down")
        for tensor in ("input", "weight", "grad")
    }


def test_a_layer_that_does_not_pay_has_no_casts_and_whether_it_pays_takes_rows():
    model = nn.Sequential(Block(64, 128))
    x = torch.randn(8, 64)
    profitable = Recipe(name="r", rules=[Rule(layers="**", all="fp8_e4m3/row", when="profitable")])
    with pytest.raises(RecipeError, match="rows"):
        plan_casts(model, profitable, lambda traced: traced(x).sum(), device=named_device("h200"))
    assert plan_casts(model, profitable, lambda traced: traced(x).sum(), device=named_device("h200"), rows=8) == ()
