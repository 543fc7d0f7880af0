from __future__ import annotations

import io

import pytest
import torch
from narrowgate.precision.errors import NarrowgateError
from narrowgate.recipes import (
    Recipe,
    RecipeState,
    Rule,
    apply_recipe,
    load_recipe_state,
    recipe_state,
)
from torch.distributed import checkpoint


@pytest.fixture
def stochastic() -> Recipe:
    return Recipe(name="r", rules=[Rule(layers="interaction.*", all="fp8_e4m3+sr")])


def test_a_resumed_run_repeats_the_stochastic_rounding_of_one_that_never_stopped(make_tower, stochastic, ids):
    def fresh():
        torch.manual_seed(0)
        model = make_tower()
        apply_recipe(model, stochastic, seed=5)
        return model

    straight, resumed, ignorant = fresh(), fresh(), fresh()
    for _ in range(2):
        straight(ids)
    buffer = io.BytesIO()
    torch.save(recipe_state(straight), buffer)
    buffer.seek(0)
    load_recipe_state(resumed, torch.load(buffer, weights_only=True))
    expected = straight(ids)
    assert torch.equal(resumed(ids), expected)
    assert not torch.equal(ignorant(ids), expected)


def test_recipe_state_is_never_in_the_models_state_dict(tower, stochastic):
    keys = list(tower.state_dict())
    apply_recipe(tower, stochastic)
    assert list(tower.state_dict()) == keys


def test_another_recipe_warns_once_with_both_names_and_hashes(make_tower, stochastic):
    other = Recipe(name="other", rules=[Rule(layers="interaction.*", all="fp8_e5m2+sr")])
    a, b = make_tower(), make_tower()
    apply_recipe(a, stochastic)
    apply_recipe(b, other)
    with pytest.warns(UserWarning, match="saved under recipe") as caught:
        load_recipe_state(b, recipe_state(a))
    assert [str(warning.message) for warning in caught] == [
        f"recipe state was saved under recipe 'r' ({stochastic.hash()[:12]}), "
        f"this model carries 'other' ({other.hash()[:12]})"
    ]


def test_recipes_of_parts_are_told_by_the_name_of_their_part(make_tower):
    a, b = make_tower(), make_tower()
    for model, name, spec in ((a, "a", "fp8_e4m3"), (b, "b", "fp8_e5m2")):
        apply_recipe(model.interaction, Recipe(name=name, rules=[Rule(layers="1", all=spec)]))
    told = r"'a' \(\w{12}\) on 'interaction', this model carries 'b' \(\w{12}\) on 'interaction'"
    with pytest.warns(UserWarning, match=told):
        load_recipe_state(b, recipe_state(a))


def test_the_same_recipe_does_not_warn(make_tower, stochastic, recwarn):
    a, b = make_tower(), make_tower()
    apply_recipe(a, stochastic)
    apply_recipe(b, stochastic)
    load_recipe_state(b, recipe_state(a))
    assert not recwarn.list


def test_state_of_other_layers_is_refused(make_tower, stochastic):
    a, b, plain = make_tower(), make_tower(), make_tower()
    apply_recipe(a, stochastic)
    apply_recipe(b, Recipe(name="r", rules=[Rule(layers="**", all="fp8_e4m3")]))
    with pytest.raises(NarrowgateError, match=r"found no state of low-precision layer 'heads\.0'"):
        load_recipe_state(b, recipe_state(a))
    with pytest.raises(NarrowgateError, match=r"layer 'heads\.0', which is not low-precision in this model"):
        load_recipe_state(a, recipe_state(b))
    with pytest.raises(NarrowgateError, match="found no recipe on this Tower"):
        recipe_state(plain)
    with pytest.raises(NarrowgateError, match="expected what recipe_state returned"):
        load_recipe_state(a, {"layers": {}})
    with pytest.raises(NarrowgateError, match="version 99"):
        load_recipe_state(a, {**recipe_state(a), "version": 99})


def test_distributed_checkpoint_saves_and_loads_it(make_tower, stochastic, ids, tmp_path):
    torch.manual_seed(0)
    straight = make_tower()
    torch.manual_seed(0)
    resumed = make_tower()
    apply_recipe(straight, stochastic)
    apply_recipe(resumed, stochastic)
    straight(ids)
    checkpoint.state_dict_saver.save({"recipe": RecipeState(straight)}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint.state_dict_loader.load({"recipe": RecipeState(resumed)}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(resumed(ids), straight(ids))
