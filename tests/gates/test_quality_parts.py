"""Where quality is lost: the recipe on one part alone, and on all but it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from narrowgate.gates.decision import decide
from narrowgate.gates.measurements import PartEffect, PartQuality
from narrowgate.gates.policy import BUILTIN_POLICIES
from narrowgate.gates.quality_parts import MOST_GROUPS, layer_groups, parts_of
from narrowgate.gates.task import load_task
from narrowgate.recipes import load_recipe, resolve

STANDARD = BUILTIN_POLICIES["standard"]


def test_layers_are_grouped_by_as_many_components_as_stay_few() -> None:
    names = [f"layers.{i}.{block}.{k}" for i in range(2) for block in ("mlp", "attention") for k in range(3)]
    assert list(layer_groups(names)) == [f"layers.{i}.{block}" for i in range(2) for block in ("mlp", "attention")]
    many = [f"l{i}" for i in range(20)]
    groups = layer_groups(many)
    assert len(groups) == MOST_GROUPS
    assert [name for group in groups.values() for name in group] == many
    assert next(iter(groups)) == "l0 to l1"


@pytest.mark.parametrize("towers", [1, 2, 9])
@pytest.mark.parametrize("blocks", [1, 2, 8, 9, 100])
def test_many_layers_are_always_a_few_groups_of_neighbours(towers: int, blocks: int) -> None:
    names = [f"tower{t}.blocks.{i}.{part}" for t in range(towers) for i in range(blocks) for part in ("up", "down")]
    groups = layer_groups(names)
    assert 2 <= len(groups) <= MOST_GROUPS
    assert sorted(name for group in groups.values() for name in group) == sorted(names)


def test_one_layer_or_none_is_what_it_is() -> None:
    assert layer_groups(["a.b"]) == {"a.b": ["a.b"]}
    assert layer_groups([]) == {}


def test_each_part_is_quantized_alone_and_left_out(room: Path) -> None:
    model = load_task("ranker:good").build_model()
    plan = resolve(load_recipe("all-fp8.yaml"), model)
    parts = {part.name: part for part in parts_of(plan)}
    assert set(parts) == {"body", "head", "fprop", "dgrad", "wgrad"}

    def quantized(recipe: Any) -> set[tuple[str, str]]:
        layers = resolve(recipe, load_task("ranker:good").build_model()).layers
        return {(x.name, path) for x in layers for path, gemm in x.config.gemms() if not gemm.high_precision}

    paths, layers = ("fprop", "dgrad", "wgrad"), ("body", "head")
    everything = {(layer, path) for layer in layers for path in paths}
    for name, part in parts.items():
        own = {(layer, path) for layer, path in everything if name in (layer, path)}
        assert quantized(part.only) == own
        assert quantized(part.without) == everything - own
        assert part.only.hash() != part.without.hash()


def test_a_run_says_what_each_part_loses(measure: Callable[..., Any]) -> None:
    report = measure(seeds=2, steps=25, attribute_quality=True)
    parts = {part["name"]: part for part in report.evidence.quality.results["click"]["parts"]}
    assert {name: part["kind"] for name, part in parts.items()} == {
        "body": "layers", "head": "layers", "fprop": "path", "dgrad": "path", "wgrad": "path",
    }  # fmt: skip
    # Of two layers, leaving one out is having the other alone.
    assert parts["body"]["without"] == parts["head"]["only"]
    assert parts["head"]["without"] == parts["body"]["only"]
    assert parts["body"]["only"]["ne_increase"] != parts["head"]["only"]["ne_increase"] != 0
    assert parts["body"]["only"]["ci_low"] <= parts["body"]["only"]["ne_increase"] <= parts["body"]["only"]["ci_high"]
    assert report.wall_seconds["quality attribution"] > 0


def test_the_reason_names_who_loses_most(measurements) -> None:
    def part(kind: Any, name: str, loss: float) -> PartQuality:
        effect = {"click": PartEffect(seeds=5, ne_increase=(loss,) * 5, auc_loss=(0.0,) * 5)}
        return PartQuality(kind=kind, name=name, layers=3, only=effect, without={})

    parts = (part("layers", "tower", 0.001), part("layers", "heads", 0.009), part("path", "wgrad", 0.008))
    decision = decide(measurements([0.01 + x for x in (1e-5, -1e-5) * 4], parts=parts), STANDARD)
    assert decision.verdict == "reject"
    assert decision.reasons[0].text.endswith(
        "Most is lost by layers heads (+0.9000 % NE by itself) and path wgrad (+0.8000 % NE by itself)."
    )


def test_a_part_that_broke_off_in_a_seed_has_no_mean() -> None:
    assert PartEffect(seeds=2, ne_increase=(0.1,), auc_loss=()).mean_ne_increase() is None
    assert PartEffect(seeds=0, ne_increase=(), auc_loss=()).mean_ne_increase() is None
