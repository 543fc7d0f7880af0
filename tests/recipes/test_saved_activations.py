"""``activations.save`` on models: applied and removed, planned in bytes, and warned about where it is lossy."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from narrowgate.precision.capability import named_device
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.saved import SavedForward
from narrowgate.recipes import (
    Activations,
    Recipe,
    RecipeError,
    Rule,
    apply_recipe,
    plan_saved,
    recipe_state,
    remove_recipe,
    resolve,
)
from torch import Tensor, nn

ROWS, D, H = 64, 32, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * H, bias=False), nn.Linear(H, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.blocks, self.head = nn.Linear(D, D), nn.Sequential(Block(), Block()), nn.Linear(D, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.inner(x)))


def recipe(save: str = "fp8_e4m3/row", *, fp8: str = "blocks.**") -> Recipe:
    text = f"recipe: r\nactivations: {{save: {save}}}\nrules: [{{layers: '{fp8}', all: fp8_e4m3/row}}]\n"
    return Recipe.from_yaml(text, file="r.yaml")


def grads(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    y = model(torch.randn(ROWS, D, generator=torch.Generator().manual_seed(1)))
    y.square().mean().backward()
    return y.detach(), [p.grad.clone() for p in model.parameters()]


def test_applying_changes_what_backward_reads_and_removing_undoes_it():
    model = Model()
    plain = grads(model)
    keys = list(model.state_dict())
    apply_recipe(model, recipe("operand"))
    assert not any(isinstance(module.__dict__.get("forward"), SavedForward) for module in model.modules())
    operand = grads(model)
    remove_recipe(model)
    apply_recipe(model, recipe())
    kept = grads(model)
    assert list(model.state_dict()) == keys
    assert set(recipe_state(model)) == {"version", "recipes", "names", "layers", "reductions", "exchanges"}
    assert torch.equal(kept[0], operand[0])
    assert not any(torch.equal(a, b) for a, b in zip(kept[1][:2], operand[1][:2], strict=True))
    copied = grads(copy.deepcopy(model))
    assert all(torch.equal(a, b) for a, b in zip(copied[1], kept[1], strict=True))
    remove_recipe(model)
    again = grads(model)
    assert all(torch.equal(a, b) for a, b in zip(again[1], plain[1], strict=True))
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_recipe_that_cannot_be_applied_leaves_no_hooks():
    model = Model()
    with pytest.raises(NarrowgateError):
        apply_recipe(model, recipe("nvfp4"))
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_bf16_wgrad_that_reads_a_narrow_input_is_warned_about_with_its_line():
    plan = resolve(recipe(), Model())
    (warning,) = (str(w) for w in plan.warnings if "lossy" in w.message)
    assert warning.startswith("r.yaml:2:21: warning: activations.save: lossy: 2 layers with a BF16 wgrad multiply")
    assert "fp8_e4m3/row" in warning
    assert "'inner'" in warning
    assert plan.to_dict()["activations"]["lossy"] == ["inner", "head"]
    for harmless in (recipe("bf16"), recipe("operand"), recipe(fp8="**")):
        assert not any("lossy" in w.message for w in resolve(harmless, Model()).warnings)


def test_a_plan_says_how_each_input_is_kept_and_in_how_many_bytes():
    plan = resolve(recipe(), Model(), rows=ROWS, device=named_device("h200"))
    kept = {entry["layer"]: entry for entry in plan.to_dict()["activations"]["inputs"]}
    assert plan.to_dict()["activations"]["save"] == "fp8_e4m3/row"
    # A wgrad operand has one FP32 scale for each feature, a saved tensor one for each row.
    assert kept["blocks.0.up"] == {
        "layer": "blocks.0.up", "format": "fp8_e4m3/row", "operand": True,
        "bf16_bytes": 2 * ROWS * D, "bytes": ROWS * D + 4 * D,
    }  # fmt: skip
    assert kept["head"] == {
        "layer": "head", "format": "fp8_e4m3/row", "operand": False,
        "bf16_bytes": 2 * ROWS * D, "bytes": ROWS * D + 4 * ROWS,
    }  # fmt: skip
    text = plan.to_text()
    assert "backward keeps what is saved outside low-precision products as fp8_e4m3/row" in text
    assert "inputs that layers keep for wgrad" in text
    unknown = resolve(recipe(), Model()).to_dict()["activations"]["inputs"]
    assert all(entry["bytes"] is None for entry in unknown)
    assert "backward keeps" not in resolve(recipe("operand"), Model()).to_text()


def test_a_run_step_tells_what_each_module_saves():
    def run(model: nn.Module) -> Tensor:
        return model(torch.randn(ROWS, D)).square().mean()

    found = {entry.name: entry for entry in plan_saved(Model(), recipe(), run, device=named_device("cpu"))}
    block = found["blocks.1"]  # gate for SiLU (a part of the product's output), silu(gate) and up for their product
    assert block.type == "Block"
    assert block.before >= 2 * 2 * ROWS * H
    assert block.bytes < 0.6 * block.before
    norm = found["blocks.1.norm"]  # its input, and mean and 1 / deviation of each row in FP32
    assert (norm.tensors, norm.before, norm.bytes) == (3, 2 * ROWS * D + 8 * ROWS, ROWS * D + 4 * ROWS + 8 * ROWS)
    codes = found["blocks.1.down"]  # the wgrad operand's codes and scales, and the weight's for dgrad
    assert codes.bytes == codes.before == (ROWS * H + 4 * H) + (D * H + 4 * H)
    plan = resolve(recipe(), Model()).with_saved(tuple(found.values()))
    assert "saved in one eager step" in plan.to_text()
    assert len(plan.to_dict()["activations"]["modules"]) == len(found)


def test_a_step_that_runs_nothing_of_the_model_is_an_error():
    with pytest.raises(NarrowgateError, match="saved nothing in the model"):
        plan_saved(Model(), recipe(), lambda model: torch.zeros(()), device=named_device("cpu"))


@pytest.mark.parametrize("backend", ["torchao", "transformer_engine"])
def test_another_backend_decides_for_itself_what_it_saves(backend):
    plan = resolve(Recipe(name="r", rules=[Rule(layers="**", all="bf16")], activations=Activations(save="fp8_e4m3")),
                   Model(), backend=backend)  # fmt: skip
    assert "what it saves for backward is its own choice" in plan.to_text()


def test_modifiers_are_refused_where_the_file_is_read():
    with pytest.raises(RecipeError, match=r"r\.yaml:2:21: activations\.save: found sr"):
        recipe("fp8_e4m3/row+sr")
