"""Recipes on backends: the registry, one error for all that is inexpressible, and going back."""

from __future__ import annotations

import pytest
import torch
from narrowgate.precision import NAMED_DEVICES, NarrowgateError
from narrowgate.precision.backends import BACKENDS, Backend, LayerFacts, backend_of, get_backend, original_type
from narrowgate.recipes import Recipe, RecipeError, Rule, apply_recipe, recipe_state, remove_recipe, resolve
from narrowgate.recipes.recipe import BACKENDS as NAMES
from torch import nn

RECIPE = """\
recipe: r
rules:
- layers: "tower.*"
  fprop: {input: fp8_e4m3, weight: fp8_e4m3, accumulate: fast}
  dgrad: {grad: fp8_e5m2, weight: fp8_e4m3}
  wgrad: {grad: fp8_e5m2, input: fp8_e4m3}
"""


@pytest.fixture
def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    return nn.ModuleDict({"tower": layers, "head": nn.Linear(32, 1)})


@pytest.fixture
def recipe() -> Recipe:
    return Recipe.from_yaml(RECIPE, file="r.yaml")


def test_the_registry_is_frozen_and_an_unknown_name_lists_what_there_is():
    assert tuple(BACKENDS) == NAMES
    assert all(isinstance(backend, Backend) and backend.name == name for name, backend in BACKENDS.items())
    with pytest.raises(TypeError):
        BACKENDS["mine"] = BACKENDS["native"]  # type: ignore[index]
    with pytest.raises(NarrowgateError, match=r"found 'torchoa', expected native, torchao, .*did you mean 'torchao'"):
        get_backend("torchoa")


def test_one_plan_whatever_the_backend(model, recipe):
    plans = {name: resolve(recipe, model, backend=name, device=NAMED_DEVICES["h200"]) for name in BACKENDS}
    assert len({plan.recipe.hash() for plan in plans.values()}) == 1
    layers = {
        name: [(layer.name, layer.config, dict(layer.support)) for layer in plan.layers] for name, plan in plans.items()
    }
    assert layers["native"] == layers["torchao"] == layers["transformer_engine"]
    assert all(plan.native for plan in plans.values())
    assert f"backend {'torchao'}" in plans["torchao"].to_text()


def test_a_recipe_goes_on_and_off_a_torchao_model(model, recipe):
    pytest.importorskip("torchao")
    x = torch.randn(16, 32)
    expected = model["tower"](x)
    plan = apply_recipe(model, recipe, backend="torchao")
    assert [layer.name for layer in plan.lowered] == ["tower.0", "tower.2"]
    assert "has no low-precision matrix units" in plan.emulated_reasons()[0]
    assert backend_of(model["tower"][0]) is BACKENDS["torchao"]
    assert backend_of(model["head"]) is None
    assert not torch.equal(model["tower"](x), expected)
    assert recipe_state(model)["recipes"] == {"": recipe.hash()}
    again = resolve(recipe, model)
    assert [layer.type for layer in again.layers] == ["Linear"] * 3
    with pytest.raises(NarrowgateError, match="carries recipe 'r' already"):
        apply_recipe(model, recipe)
    remove_recipe(model)
    assert torch.equal(model["tower"](x), expected)
    apply_recipe(model, recipe, backend="native")


def test_what_a_backend_cannot_express_is_one_error_with_every_layer_path_and_reason(model):
    text = RECIPE.replace("grad: fp8_e5m2, weight", "grad: fp8_e5m2+sr, weight").replace(
        "input: fp8_e4m3}\n", "input: fp8_e4m3+clip(rms=8)}\n- {layers: head, fprop: fp8_e4m3}\n"
    )
    recipe = Recipe.from_yaml(text + "backend: torchao\n", file="r.yaml")
    with pytest.raises(RecipeError) as caught:
        apply_recipe(model, recipe)
    lines = str(caught.value).split("\n")
    assert [line.split(" cannot express ")[0] for line in lines] == [
        "r.yaml:5:17: rules[0].dgrad.grad: layer 'tower.0': torchao",
        "r.yaml:6:34: rules[0].wgrad.input: layer 'tower.0': torchao",
        "r.yaml:5:17: rules[0].dgrad.grad: layer 'tower.2': torchao",
        "r.yaml:6:34: rules[0].wgrad.input: layer 'tower.2': torchao",
        "r.yaml:7:12: rules[1].layers: layer 'head': torchao",
    ]
    assert lines[0].endswith(
        "fp8_e5m2/tensor+sr: stochastic rounding (sr) is not part of torchao's FP8 and MXFP8 training"
    )
    assert "out_features 1 is no multiple of 16" in lines[4]
    assert all(backend_of(module) is None for module in model.modules())
    assert lines[0] in resolve(recipe, model).to_text()


def test_a_backend_that_is_not_here_says_so_before_it_touches_the_model(model, recipe):
    there, _reason = BACKENDS["transformer_engine"].available()
    if there:
        pytest.skip("Transformer Engine is here")
    with pytest.raises(NarrowgateError, match="backend transformer_engine: transformer-engine"):
        apply_recipe(model, recipe, backend="transformer_engine")
    assert all(backend_of(module) is None for module in model.modules())
    apply_recipe(model, Recipe(name="b", rules=[Rule(layers="**", all="bf16")]), backend="transformer_engine")


def test_doctor_tells_what_each_backend_does_with_each_kind_of_layer():
    from narrowgate.gates.cli_doctor import doctor

    facts = {entry["name"]: entry for entry in doctor()["backends"]}
    assert list(facts) == list(BACKENDS)
    rows = {name: {row["layer"]: row for row in entry["formats"]} for name, entry in facts.items()}
    assert rows["torchao"]["fp8 block"]["status"] == "inexpressible"
    assert "1x128" in str(rows["torchao"]["fp8 block"]["reason"])
    assert rows["native"]["fp8 tensor"]["status"] in ("native", "emulated")
    if facts["transformer_engine"]["status"] == "absent":
        assert rows["transformer_engine"]["fp8 tensor"]["status"] == "absent"
        assert (
            "not installed" in facts["transformer_engine"]["reason"]
            or "no GPU" in facts["transformer_engine"]["reason"]
        )


def test_our_own_backend_lowers_every_kind_of_layer_and_the_others_refuse_all_but_linear(layer_config):
    from narrowgate.precision import GroupedLinear, MatMul

    config = layer_config(fprop=("fp8_e4m3", "fp8_e4m3"))
    for module in (nn.Linear(32, 32), MatMul(), GroupedLinear(2, 32, 32), nn.MultiheadAttention(32, 4)):
        kind = type(module)
        BACKENDS["native"].lower(module, config, name="x", device=torch.device("cpu"))
        assert backend_of(module) is BACKENDS["native"]
        assert original_type(module) is kind
        BACKENDS["native"].restore(module)
        assert type(module) is kind
    facts = LayerFacts("x", 32, 32, linear=False)
    for name in ("torchao", "transformer_engine"):
        assert "nn.Linear only" in BACKENDS[name].inexpressible(config, facts, None)["layers"]
