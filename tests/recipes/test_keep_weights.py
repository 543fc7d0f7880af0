"""``optimizer.keep_weights`` of a recipe: read, written, hashed, planned, and followed where optimizers are wrapped."""

from __future__ import annotations

import json
import os

import pytest
import torch
from narrowgate.precision import NarrowgateError, Spec, casting
from narrowgate.precision.config import GemmConfig, LinearConfig
from narrowgate.precision.kept_weights import can_keep
from narrowgate.precision.layer import layer_state
from narrowgate.recipes import (
    OptimizerState,
    Recipe,
    RecipeError,
    Rule,
    apply_recipe,
    low_precision,
    resolve,
    wrap_optimizer,
)
from torch import nn

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROW = [Rule(layers="interaction.*", all="fp8_e4m3/row")]


def recipe(*, state: str = "fp32", keep: bool = True, rules: list[Rule] = ROW) -> Recipe:
    return Recipe(name="r", rules=rules, optimizer=OptimizerState(state=state, keep_weights=keep))


@pytest.fixture
def kernels(monkeypatch):
    """A CPU as if it had cast kernels: weights there are worth keeping."""
    monkeypatch.setattr(casting, "kernels_on_cpu", lambda: True)
    yield
    monkeypatch.undo()


def told(recwarn) -> list[str]:
    """What was warned of by the code under test; libraries warn of other things."""
    return [text for w in recwarn.list if (text := str(w.message)).startswith(("recipe '", "keep_weights"))]


def kept(model) -> list[bool]:
    return [layer_state(layer).kept is not None for layer in model.interaction]


def test_a_file_says_it_beside_the_state_or_alone():
    head = "recipe: x\noptimizer: "
    for text, state, keep in (
        ("{state: bf16+sr, keep_weights: true}", "bf16+sr", True),
        ("{keep_weights: true}", "fp32", True),
        ("{state: bf16, keep_weights: false}", "bf16", False),
        ("{state: bf16}", "bf16", False),
    ):
        found = Recipe.from_yaml(f"{head}{text}\n").optimizer
        assert found == OptimizerState(state=state, keep_weights=keep)
    assert recipe().optimizer == OptimizerState(keep_weights=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("keep_weights: 'yes'", "r.yaml:2:27: optimizer.keep_weights: found 'yes', expected true or false"),
        ("keep_weights: 1", "r.yaml:2:27: optimizer.keep_weights: found 1, expected true or false"),
        ("keep_weights: ", "r.yaml:2:13: optimizer.keep_weights: found no value, expected one"),
        ("keep_weight: true", "r.yaml:2:13: optimizer.keep_weight: unknown field 'keep_weight'; did you mean "
         "'keep_weights'? (known: keep_weights, state)"),
    ],
)  # fmt: skip
def test_what_is_no_boolean_is_said_in_one_line_with_its_place(faults, text, expected):
    (line,) = faults(f"recipe: x\noptimizer: {{{text}}}\n")
    assert line.startswith(expected)


def test_data_and_objects_refuse_it_too():
    with pytest.raises(RecipeError, match=r"optimizer.keep_weights: found 'yes', expected true or false"):
        Recipe.from_dict({"recipe": "x", "optimizer": {"keep_weights": "yes"}})
    with pytest.raises(NarrowgateError, match=r"keep_weights: found 1, expected True or False"):
        OptimizerState(keep_weights=1)  # type: ignore[arg-type]


def test_it_is_written_where_it_is_set_and_hashed_where_it_is_true():
    for state in ("fp32", "bf16+sr"):
        plain = Recipe(name="r", optimizer=OptimizerState(state=state))
        off, on = (Recipe(name="r", optimizer=OptimizerState(state=state, keep_weights=keep)) for keep in (False, True))
        assert plain.hash() == off.hash() != on.hash()
        assert off.to_dict()["optimizer"] == {"state": state}
        assert on.to_dict()["optimizer"] == {"state": state, "keep_weights": True}
        assert Recipe.from_yaml(on.to_yaml()) == on
    assert Recipe(name="r").hash() == Recipe(name="r", optimizer=OptimizerState()).hash()


def test_it_comes_with_the_optimizer_part_of_the_base(tmp_path):
    (tmp_path / "base.yaml").write_text("recipe: base\noptimizer: {state: bf16, keep_weights: true}\n")
    for own, expected in (("", True), ("optimizer: {state: bf16}\n", False)):
        path = tmp_path / "r.yaml"
        path.write_text(f"recipe: r\nextends: base.yaml\n{own}")
        optimizer = resolve(path, nn.Linear(16, 16)).recipe.optimizer
        assert optimizer is not None
        assert optimizer.keep_weights is expected


def test_a_plan_says_whose_weights_are_quantized_once_a_step(tower):
    rules = [*ROW, Rule(layers="interaction.0", all="fp8_e4m3+sr"), Rule(layers="interaction.1", all="bf16")]
    plan = resolve(recipe(state="bf16+sr", rules=rules), tower)
    assert "\nweights are quantized once an optimizer step, where kernels cast them: 2 of 3 layers\n" in str(plan)
    found = json.loads(plan.to_json())
    assert found["optimizer"] == {"state": "bf16+sr", "keep_weights": True}
    assert found["once_a_step"] == ["interaction.2", "interaction.3"]
    plain = resolve(recipe(keep=False), tower)
    assert "quantized once" not in str(plain)
    assert json.loads(plain.to_json())["optimizer"] == {"state": "fp32", "keep_weights": False}
    assert json.loads(resolve("bf16", tower).to_json())["once_a_step"] == []


def test_other_backends_keep_nothing_and_the_plan_says_so(tower):
    plan = resolve(recipe(rules=[Rule(layers="interaction.*", all="fp8_e4m3")]), tower, backend="torchao")
    assert "where kernels cast them: 0 of 4 layers" in str(plan)


@pytest.mark.parametrize(("fprop", "dgrad", "expected"), [
    ("fp8_e4m3+delayed(4)", "fp8_e4m3+delayed(4)", True),
    ("fp8_e4m3/row", "fp8_e5m2", True),
    ("fp8_e4m3", "bf16", True),
    ("fp8_e4m3+delayed(4)", "fp8_e5m2+delayed(4)", False),
    ("fp8_e4m3+delayed(4)+clip(rms=2)", "fp8_e4m3+delayed(4)+clip(rms=2)", False),
    ("fp8_e4m3+sr", "fp8_e4m3+sr", False),
    ("mxfp8", "mxfp8", False),
    ("bf16", "fp8_e4m3", False),
])  # fmt: skip
def test_formats_that_a_plan_counts_are_those_that_are_kept(fprop, dgrad, expected, kernels):
    from narrowgate.precision.kept_weights import keep_weights
    from narrowgate.precision.linear import lower_linear

    row = Spec.parse("fp8_e4m3/row")
    config = LinearConfig(
        GemmConfig(row, Spec.parse(fprop)), GemmConfig(row, Spec.parse(dgrad)), GemmConfig(row, row)
    )  # fmt: skip
    layer = nn.Linear(32, 32)
    lower_linear(layer, config)
    keep_weights(layer.parameters())
    assert can_keep(config) is expected
    assert (layer_state(layer).kept is not None) is expected


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("state", ["fp32", "bf16+sr"])
def test_wrapping_follows_the_recipe_unless_told_otherwise(asked, declared, state, make_tower, kernels, recwarn):
    for by_plan in (True, False):
        model = make_tower()
        plan = apply_recipe(model, recipe(state=state, keep=declared))
        optimizer = torch.optim.Adam(model.parameters())
        found = (
            plan.wrap_optimizer(optimizer, keep_weights=asked)
            if by_plan
            else wrap_optimizer(model, optimizer, keep_weights=asked)
        )
        assert found is optimizer
        assert kept(model) == [declared if asked is None else asked] * 4
    assert not told(recwarn)


def test_recipes_in_parts_of_a_model_are_followed_where_any_asks(tower, kernels):
    apply_recipe(tower.interaction, recipe(rules=[Rule(layers="*", all="fp8_e4m3/row")]))
    apply_recipe(tower.heads, Recipe(name="b"))
    wrap_optimizer(tower, torch.optim.Adam(tower.parameters()))
    assert kept(tower) == [True] * 4


def test_a_plan_that_keeps_weights_needs_its_model(tower):
    with pytest.raises(NarrowgateError, match="found a plan without its model"):
        resolve(recipe(), tower).wrap_optimizer(torch.optim.Adam(tower.parameters()))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has the kernels")
def test_on_a_cpu_a_recipe_that_asks_for_it_trains_the_same_and_says_nothing(make_tower, ids, recwarn):
    runs = []
    for keep in (True, False):
        torch.manual_seed(0)
        model = make_tower()
        optimizer = apply_recipe(model, recipe(keep=keep)).wrap_optimizer(torch.optim.Adam(model.parameters()))
        assert kept(model) == [False] * 4
        for _ in range(2):
            model(ids).square().mean().backward()
            optimizer.step()
        runs.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert not told(recwarn)


def test_kept_by_the_recipe_training_is_the_same_to_the_bit(make_tower, ids, monkeypatch):
    rules = [Rule(layers="interaction.*", all="fp8_e4m3+delayed(2)")]
    runs = []
    for keep in (True, False):
        torch.manual_seed(0)
        model = make_tower()
        plan = apply_recipe(model, recipe(keep=keep, rules=rules))
        with monkeypatch.context() as patch:
            patch.setattr(casting, "kernels_on_cpu", lambda: True)
            optimizer = plan.wrap_optimizer(torch.optim.Adam(model.parameters()))
        assert kept(model) == [keep] * 4
        found = []
        for _ in range(3):
            for part in ids.chunk(2):
                y = model(part)
                y.square().mean().backward()
                found.append(y.detach())
            optimizer.step()
            optimizer.zero_grad()
        runs.append([*found, *(p.detach() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_formats_that_cannot_be_kept_are_named_where_kernels_cast(tower, kernels):
    plan = apply_recipe(tower, recipe(rules=[Rule(layers="interaction.*", all="fp8_e4m3+sr")]))
    with pytest.warns(UserWarning, match=r"keep_weights: .* 4 weight\(s\), first 'interaction.0': .* drawn anew"):
        plan.wrap_optimizer(torch.optim.Adam(tower.parameters()))


class Sharded(nn.Parameter):
    """Stands for a shard: a Parameter of another type."""


def test_shards_are_passed_over_unless_the_caller_asks(tower, kernels, recwarn):
    for layer in tower.interaction:
        layer.weight = Sharded(layer.weight.detach())
    plan = apply_recipe(tower, recipe())
    plan.wrap_optimizer(torch.optim.Adam(tower.parameters()))
    assert not told(recwarn)
    with pytest.warns(UserWarning, match="the weight is no plain Parameter"):
        plan.wrap_optimizer(torch.optim.Adam(tower.parameters()), keep_weights=True)
    assert kept(tower) == [False] * 4


def train(model, optimizer, ids) -> None:
    for _ in range(2):
        model(ids).sum().backward()
        optimizer.step()


MISSED = (
    "recipe 'r' asks for weights quantized once a step, with this Adam each use quantizes them: expected "
    "plan.wrap_optimizer(optimizer), or narrowgate.recipes.wrap_optimizer(model, optimizer)"
)


def test_an_optimizer_that_was_not_wrapped_is_missed_once(make_tower, ids, recwarn):
    model = make_tower()
    apply_recipe(model, recipe())
    train(model, torch.optim.Adam(model.parameters()), ids)
    assert told(recwarn) == [MISSED]


@pytest.mark.parametrize("asked", [None, False])
def test_one_that_was_wrapped_either_way_is_not(asked, make_tower, tower_class, ids, recwarn):
    model = make_tower()
    optimizer = torch.optim.Adam(model.parameters())
    apply_recipe(model, recipe()).wrap_optimizer(optimizer, keep_weights=asked)
    train(model, optimizer, ids)
    decorated = low_precision(recipe())(lambda: tower_class())()
    train(decorated, wrap_optimizer(decorated, torch.optim.Adam(decorated.parameters()), keep_weights=asked), ids)
    part = make_tower()
    apply_recipe(part.interaction, recipe(rules=[Rule(layers="*", all="fp8_e4m3")]))
    train(part, wrap_optimizer(part, torch.optim.Adam(part.parameters()), keep_weights=asked), ids)
    assert not told(recwarn)


def test_what_does_not_quantize_weights_itself_misses_nothing(make_tower, ids, recwarn):
    pytest.importorskip("torchao")
    model = make_tower()
    apply_recipe(model, recipe(rules=[Rule(layers="interaction.*", all="fp8_e4m3")]), backend="torchao")
    train(model, torch.optim.Adam(model.parameters()), ids)
    assert not told(recwarn)


@pytest.mark.gpu
def test_on_a_gpu_a_recipe_has_adam_write_the_codes():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16)).cuda()
    kept = Recipe(name="kept", extends="gem-fp8", optimizer=OptimizerState(state="bf16+sr", keep_weights=True))
    optimizer = apply_recipe(model, kept).wrap_optimizer(torch.optim.Adam(model.parameters(), fused=True))
    for _ in range(3):
        model(torch.ones(16, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    first = layer_state(model[0]).kept
    assert first is not None
    assert first.passes == 2
