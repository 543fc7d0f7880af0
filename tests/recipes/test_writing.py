"""Recipes back to text, their hash, and the schema that editors read."""

from __future__ import annotations

import json

import pytest
from narrowgate.recipes import (
    Activations,
    OptimizerState,
    Path,
    Recipe,
    RecipeError,
    Rule,
    Shards,
    builtin_names,
    builtin_text,
    load_recipe,
    recipe_schema,
    recipe_schema_text,
)
from narrowgate.recipes.schema import shipped_schema_text


def test_yaml_and_objects_round_trip(contract_text):
    built = Recipe(
        name="x",
        description="two lines\nand a: colon # no comment",
        extends="fp8-row",
        defaults="fp8_e4m3",
        rules=[
            Rule(layers=["a.**", "re:b[0-9]"], where='type == "Linear"', fprop="mxfp8+rceil", optional=True),
            Rule(layers="**", all="nvfp4+sr", dgrad=Path(accumulate="fast"), when="profitable"),
            Rule(layers="c", wgrad={"grad": "fp8_e5m2+clip(p=99.99)"}),
        ],
        shards=Shards(all_gather="fp8_e4m3/128x128", requantize=True),
        activations=Activations(save="bf16"),
        optimizer=OptimizerState(state="bf16+sr", keep_weights=True),
        backend="native",
    )
    for recipe in (built, Recipe.from_yaml(contract_text), *map(load_recipe, builtin_names())):
        assert Recipe.from_yaml(recipe.to_yaml()) == recipe
        assert Recipe.from_dict(recipe.to_dict()) == recipe
        assert Recipe.from_yaml(recipe.to_yaml()).hash() == recipe.hash()


def test_data_faults_name_the_field():
    with pytest.raises(RecipeError, match=r"rules\[0\].fprop.weigth: unknown field 'weigth'; did you mean 'weight'"):
        Recipe.from_dict({"recipe": "x", "rules": [{"layers": "a", "fprop": {"weigth": "bf16"}}]})
    with pytest.raises(RecipeError, match="expected a mapping"):
        Recipe.from_dict([])  # type: ignore[arg-type]


def test_the_hash_is_of_what_the_recipe_does_not_of_its_spelling():
    plain = Recipe.from_yaml(
        "recipe: a\nrules:\n- layers: x.*\n  where: depth >= 0.5\n  fprop: fp8_e4m3/row+sr+pow2\n"
        "  wgrad: {grad: fp8_e5m2, input: fp8_e4m3}\n"
    )
    spelled = Recipe.from_yaml(
        "backend: native\ndescription: other words\nrules:\n- wgrad: {input: fp8_e4m3/tensor, grad: fp8_e5m2/tensor}\n"
        "  where: '(depth)>=.5'\n  fprop: {weight: fp8_e4m3/row+pow2+sr, input: fp8_e4m3/row+sr+pow2}\n"
        "  layers: [x.*]\n"
        "recipe: b\ndefaults: bf16\nshards: {all_gather: bf16}\nactivations: {save: operand}\n"
    )
    assert plain.hash() == spelled.hash()


def test_the_hash_follows_extends():
    assert Recipe(name="mine", extends="fp8-row").hash() == load_recipe("fp8-row").hash()


@pytest.mark.parametrize(
    "change",
    [
        "rules: [{layers: a, all: fp8_e5m2}]",
        "rules: [{layers: b, all: fp8_e4m3}]",
        "rules: [{layers: a, all: fp8_e4m3, optional: true}]",
        "rules: [{layers: a, all: fp8_e4m3, where: depth > 0}]",
        "rules: [{layers: a, all: fp8_e4m3, fprop: {accumulate: fast}}]",
        "rules: [{layers: a, all: fp8_e4m3}, {layers: a, all: bf16}]",
        "rules: [{layers: a, all: fp8_e4m3}]\ndefaults: fp32",
        "rules: [{layers: a, all: fp8_e4m3}]\noptimizer: {state: bf16}",
        "rules: [{layers: a, all: fp8_e4m3}]\noptimizer: {keep_weights: true}",
        "rules: [{layers: a, all: fp8_e4m3}]\nshards: {reduce_scatter: fp8_e5m2}",
        "rules: [{layers: a, all: fp8_e4m3}]\nshards: {reduce_scatter: bf16}",
    ],
)
def test_the_hash_sees_every_change_of_meaning(change):
    base = Recipe.from_yaml("recipe: a\nrules: [{layers: a, all: fp8_e4m3}]\n")
    assert Recipe.from_yaml(f"recipe: a\n{change}\n").hash() != base.hash()


def test_the_hash_of_a_recipe_never_moves():
    recipe = Recipe.from_yaml(
        "recipe: a\nrules: [{layers: a.**, where: in_features > 16, fprop: fp8_e4m3/row, wgrad: bf16}]\n"
    )
    assert recipe.hash() == "6b453c1bfc2b82cf1eacd15d619a0e2cc6f77e5c9f6ab55a95963457afbca7c3"


def test_the_shipped_schema_is_current():
    assert shipped_schema_text() == recipe_schema_text()


def test_the_schema_accepts_what_the_parser_accepts_and_refuses_wrong_keys(contract_text):
    jsonschema = pytest.importorskip("jsonschema")
    from ruamel.yaml import YAML

    validator = jsonschema.Draft202012Validator(recipe_schema())
    for text in (contract_text, *map(builtin_text, builtin_names())):
        data = json.loads(json.dumps(YAML(typ="safe", pure=True).load(text)))
        assert list(validator.iter_errors(data)) == []
    for wrong in (
        {"recipe": "x", "defaults": 3},
        {"recipe": "x", "colour": "red"},
        {"rules": []},
        {"recipe": "x", "rules": [{"layers": "a", "fprop": {"grad": "bf16"}}]},
        {"recipe": "x", "rules": [{"layers": "a", "when": "now"}]},
        {"recipe": "x", "rules": [{"layers": [], "all": "bf16"}]},
        {"recipe": "x", "optimizer": {"keep_weights": "yes"}},
    ):
        assert list(validator.iter_errors(wrong)), wrong
