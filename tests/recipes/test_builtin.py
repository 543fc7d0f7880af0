from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from narrowgate.precision.capability import NAMED_DEVICES
from narrowgate.recipes import (
    Recipe,
    RecipeError,
    apply_recipe,
    builtin_names,
    builtin_text,
    load_recipe,
    recipe_state,
    resolve,
    validate_file,
)
from torch import nn

GOLDEN = Path(__file__).with_name("golden")
DOCS = Path(__file__).parents[2] / "docs" / "recipes.md"
EXPECTED = [
    "bf16", "fp4-naive", "fp8-block", "fp8-delayed", "fp8-row", "fp8-tensor", "gem-fp8", "mxfp4", "mxfp8", "nvfp4",
]  # fmt: skip


class Unseen(nn.Module):
    """Nothing in it is called as in the built-in models."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(13, 64)
        self.blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        self.score = nn.Linear(64, 1)

    def forward(self, x):
        return self.score(self.blocks(self.stem(x)))


@pytest.fixture(scope="module", params=["gem-tiny", "gem-small", "gem-base", "gem-long"])
def built_in_model(request):
    from narrowgate.models.task import GemTask

    return request.param, GemTask.open(model=request.param, data="synthetic", device="meta").build_model()


def test_the_promised_recipes_ship():
    assert builtin_names() == EXPECTED
    with pytest.raises(RecipeError, match="did you mean 'nvfp4'"):
        builtin_text("nvfp5")


@pytest.mark.parametrize("name", EXPECTED)
def test_each_says_why_and_parses_without_findings(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert len(recipe.description) > 60
    assert validate_file(name).ok
    assert load_recipe(name) == Recipe.from_yaml(builtin_text(name))


@pytest.mark.parametrize("name", EXPECTED)
def test_each_trains_a_model_it_never_saw_without_touching_tiny_layers(name):
    model = Unseen()
    plan = apply_recipe(model, name)
    if name == "fp4-naive":
        assert len(plan.lowered) == len(plan.layers) == 8
    else:
        assert {"stem", "score"} & {layer.name for layer in plan.lowered} == set()
        assert (len(plan.lowered) >= 4) == (name != "bf16")
    model(torch.randn(5, 13)).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_delayed_scales_follow_the_steps_of_the_optimizer():
    model = Unseen()
    plan = apply_recipe(model, "fp8-delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(5, 13)).sum().backward()
        optimizer.step()
    histories = {
        key: value for name in plan.lowered for key, value in recipe_state(model)["layers"][name.name].items()
        if key.endswith(".history")
    }  # fmt: skip
    assert len(plan.lowered) >= 4
    # The wgrad operands share the codes of fprop and dgrad, so those histories take nothing in.
    assert {key for key, value in histories.items() if (value > 0).sum() == 2} == {
        "fprop.input.history", "fprop.weight.history", "dgrad.grad.history",
    }  # fmt: skip


def test_the_known_bad_recipe_hits_every_linear_of_every_model(built_in_model):
    _, model = built_in_model
    plan = resolve("fp4-naive", model)
    assert plan.flops_share() == {"fp4_e2m1": 1.0}
    assert {spec for p in plan.layers for _, g in p.config.gemms() for spec in (str(g.first), str(g.second))} == {
        "fp4_e2m1/tensor"
    }


def test_gem_fp8_keeps_the_sensitive_parts_in_bf16_and_is_native_on_hopper(built_in_model):
    _, model = built_in_model
    plan = resolve("gem-fp8", model, device=NAMED_DEVICES["h200"])
    assert plan.native
    for layer in plan.layers:
        if layer.name.startswith("heads.") or layer.name.endswith("_gate"):
            assert layer.config.high_precision, layer.name
        elif not layer.config.high_precision:
            assert layer.config.fprop.first.format == "fp8_e4m3"
            assert layer.config.dgrad.first.format == "fp8_e5m2"
    wgrad = [layer.config.wgrad.high_precision for layer in plan.lowered]
    assert wgrad == sorted(wgrad), "BF16 weight gradients come last"
    assert any(wgrad)
    assert sum(wgrad) < len(wgrad) / 2


@pytest.mark.parametrize("name", EXPECTED)
def test_resolved_plans_are_the_golden_ones(name, built_in_model):
    """``UPDATE_GOLDEN=1`` writes them anew: read the difference before committing it."""
    model_name, model = built_in_model
    text = resolve(name, model, device=NAMED_DEVICES["h200"]).to_text()
    path = GOLDEN / model_name / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


# Validation without a model.


def test_validate_reports_what_a_file_holds(tmp_path, contract_text):
    path = tmp_path / "r.yaml"
    path.write_text(contract_text)
    found = validate_file(path)
    assert found.ok
    assert found.recipe == Recipe.from_yaml(contract_text)
    assert found.summary == "valid"
    path.write_text(contract_text.replace("state: bf16+sr", "state: fp8_e4m3"))
    found = validate_file(path)
    assert found.ok
    assert found.summary.startswith("valid; not yet runnable: optimizer.state: fp8_e4m3/tensor is not built yet, only")
    assert found.github()[0].startswith(f"::notice file={path},line=19,col=20::optimizer.state")
    path.write_text("recipe: x\nrules: [{layers: a, all: fp7}]\n")
    broken = validate_file(str(path))
    assert not broken.ok
    assert broken.recipe is None
    assert broken.summary == "1 error"
    assert broken.github()[0].startswith(f"::error file={path},line=2,col=26::")
    assert validate_file(tmp_path / "none.yaml").summary == "1 error"


def test_validate_names_what_is_emulated_where_native_is_required(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("recipe: x\nrules:\n- {layers: a, fprop: fp8_e4m3, wgrad: fp8_e5m2}\n- {layers: b, all: nvfp4}\n")
    assert validate_file(path).ok
    found = validate_file(path, require_native="h200")
    assert not found.ok
    assert [f"{d.line}:{d.field}" for d in found.diagnostics] == [
        "3:rules[0].wgrad", "4:rules[1].fprop", "4:rules[1].dgrad", "4:rules[1].wgrad",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="unknown device"):
        validate_file(path, require_native="h300")


def test_validate_warns_of_a_pair_that_contradicts_itself(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("recipe: x\nrules:\n- {layers: a, fprop: {input: fp8_e4m3, weight: bf16}}\n")
    found = validate_file(path)
    assert found.ok
    assert "3:22: warning: rules[0].fprop: found fp8_e4m3/tensor and bf16, expected both" in str(found.diagnostics[0])


# What stands around the language.


def test_the_reference_holds_only_recipes_that_validate(tmp_path):
    texts = re.findall(r"```yaml\n(recipe:.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert texts
    for text in texts:
        Recipe.from_yaml(text)


def test_importing_and_listing_recipes_brings_in_neither_torch_nor_pydantic():
    code = (
        "import sys, narrowgate.recipes as r; r.builtin_names(); r.builtin_text('bf16');"
        "print({'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_public_name_is_there():
    import narrowgate.recipes as recipes

    assert all(getattr(recipes, name) is not None for name in recipes.__all__)
    assert set(recipes.__all__) <= set(dir(recipes))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        recipes.nothing  # noqa: B018
