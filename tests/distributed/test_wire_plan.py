"""The planned bytes against those counted at the collectives of Gloo: the same number, padding and scales included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from narrowgate.recipes import Recipe, resolve
from narrowgate.recipes.topology import example_topology
from narrowgate.recipes.wire_plan import Layout, Wire, predict_wire
from narrowgate.recipes.wire_units import Sharding
from torch import nn

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
#: The model's own units; the test's policy leaves everything in the master's FP32.
AS_TRAINED = Sharding(units=("0", "2"), param_dtype=None)


def planned(training: Any, case: str, layout: Layout) -> Wire:
    """The case's plan: it is made of the same recipe, for a model without one."""
    _, _, _, (width, hidden, out) = training.CASES[case]
    model = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, out), nn.Linear(out, 8))
    plan = resolve(Recipe.from_dict(training.recipe(case)), model)
    return predict_wire(model, plan, layout, example_topology(), AS_TRAINED)


def counts(wire: Wire) -> tuple[dict[str, int], dict[str, int]]:
    calls: dict[str, int] = dict.fromkeys(COLLECTIVES, 0)
    for entry in wire.recipe.traffic:
        calls[entry.collective] += entry.calls
    return {name: wire.recipe.given(name) for name in COLLECTIVES}, calls


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_case_gives_the_collectives_what_was_planned(found, training, ranks):
    compared = 0
    for case in training.CASES:
        if case not in found[ranks]:
            continue
        wire = found[ranks][case]["wire"]
        given, calls = counts(planned(training, case, Layout(ranks, ranks)))
        assert {name: wire[name] for name in COLLECTIVES} == given, case
        assert {name: wire["calls"].get(name, 0) for name in COLLECTIVES} == calls, case
        compared += 1
    assert compared == (len(training.CASES) if ranks == 2 else 6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_so_do_gradients_that_travel_as_codes(found, training, ranks):
    compared = 0
    for case, (_, (width, hidden, out), dtype, _, parts) in training.REDUCED.items():
        if case not in found[ranks]:
            continue
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", None: None}
        model = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, out), nn.Linear(out, 8))
        sharding = Sharding(units=("0", "2"), param_dtype=None, reduce_dtype=names[dtype])
        plan = resolve(training.reduced_recipe(case), model)
        recipe = predict_wire(model, plan, Layout(ranks, ranks), example_topology(), sharding).recipe
        (entry,) = (entry for entry in recipe.traffic if entry.collective == "all_to_all")
        syncs = 2 if parts == "each" else 1
        assert found[ranks][case]["calls"] == {"all_to_all": syncs * entry.calls}, case
        assert found[ranks][case]["sent"] == syncs * entry.total, case
        compared += 1
    assert compared == (len(training.REDUCED) if ranks == 2 else 2)


@pytest.mark.parametrize("case", ["tensor_uneven", "row_uneven"])
def test_so_do_replicas_of_shards(found, training, case):
    wire = found[4]["replicas"][case]["wire"]
    given, calls = counts(planned(training, case, Layout(4, 2)))
    assert {name: wire[name] for name in COLLECTIVES} == given
    assert {name: wire["calls"].get(name, 0) for name in COLLECTIVES} == calls


def test_one_all_reduce_for_all_amaxes_is_planned_too(found, training):
    _, _, _, (width, hidden, out) = training.CASES["tensor"]
    model = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, out), nn.Linear(out, 8))
    plan = resolve(Recipe.from_dict(training.recipe("tensor")), model)
    joint = Sharding(units=("0", "2"), param_dtype=None, joint_amaxes=True)
    (amaxes,) = (
        entry
        for entry in predict_wire(model, plan, Layout(2, 2), example_topology(), joint).recipe.traffic
        if entry.collective == "all_reduce"
    )
    assert found[2]["reduced"]["reduce"] == {"all_reduce": amaxes.calls}
    assert amaxes.total == 4 * found[2]["reduced"]["known"]
