"""Training that moves between two ranks, one, and none, by torch.distributed.checkpoint: the bits of one that stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from narrowgate.precision import quantize
from narrowgate.recipes import recipe_state

#: Seconds for all stages. A collective that lacks a rank gives up after 20 (see the script), and all end with it.
_LIMIT = 120

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module, for the same training in this process."""
    return load_script("checkpoint")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> Path:
    """Where the script's stages left their checkpoints and what they found."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_script("checkpoint", folder, limit=_LIMIT)
    return folder


@pytest.fixture(scope="module")
def found(folder) -> list[dict[str, Any]]:
    """What rank 0 of each stage found: two ranks, one, two."""
    return [torch.load(folder / f"stage{number}.pt") for number in range(3)]


@pytest.fixture(scope="module")
def alone(script) -> dict[str, list[dict[str, Any]]]:
    """The same training in this process, unsharded and never stopped, as it stands after each stage."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for state in script.STATES:
        model, optimizer = script.build(state)
        for number in range(3):
            losses = script.train(model, optimizer, number * script.STEPS)
            runs.setdefault(state, []).append({"losses": losses, **script.everything(model, optimizer)})
    return runs


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for index, value in enumerate(theirs):
            assert_same(ours[index], value, f"{where}.{index}")
    else:
        equal = torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
        assert equal, where


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["two ranks", "two to one", "one to two"])
@pytest.mark.parametrize("state", ["bf16+sr", "fp8_e4m3/1x128+sr"])
def test_resuming_on_another_number_of_ranks_repeats_a_run_that_never_stopped(found, alone, state, stage):
    """Losses, weights, moments, amax histories and draws of stochastic rounding, to the bit."""
    assert_same(found[stage][state], alone[state][stage])


@pytest.mark.parametrize("case", ["replicas", "codes"])
def test_so_does_it_with_replicas_of_shards_and_with_weights_that_travel_as_codes(found, alone, script, case):
    expected = alone[script.STATES[1]][1]
    if case == "codes":
        model, optimizer = script.build(script.STATES[1], gather="fp8_e4m3")
        losses = script.train(model, optimizer, 0, 2 * script.STEPS)
        expected = {"losses": losses[script.STEPS :], **script.everything(model, optimizer)}
    assert_same(found[2][case], expected)


def test_a_model_without_recipe_takes_weights_and_moments(folder, alone, script):
    expected = alone["fp8_e4m3/1x128+sr"][0]
    model = script.plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    script.load(model, optimizer, folder / "0.1", with_recipe=False, no_dist=True)
    assert_same(dict(model.state_dict()), expected["model"])
    assert_same(dict(optimizer.state_dict()["state"]), expected["optimizer"])
    low = script.plain().bfloat16()
    script.load(low, torch.optim.Adam(low.parameters()), folder / "0.1", with_recipe=False, no_dist=True)
    assert_same(dict(low.state_dict()), {name: value.bfloat16() for name, value in expected["model"].items()})


def test_sharded_ranks_take_them_from_a_model_without_recipe(found, script):
    """Its FP32 moments are rounded to nearest."""
    model = script.plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    script.train(model, optimizer, 0)
    loaded = found[2]["from_plain"]
    assert_same(loaded["model"], dict(model.state_dict()))
    for number, state in optimizer.state_dict()["state"].items():
        ours = loaded["optimizer"][number]
        assert torch.equal(ours["step"], state["step"])
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours[name], quantize(state[name], "bf16").data), (number, name)


def test_another_recipe_is_warned_of_once_by_both_names_and_hashes(found, script):
    saved, here = script.recipe("bf16+sr"), script.recipe("bf16+sr", grad="fp8_e4m3+delayed(3)+sr")
    about = [text for text in found[2]["warnings"] if "recipe" in text]
    assert about == [
        f"recipe state was saved under recipe 'saved' ({saved.hash()[:12]}), "
        f"this model carries 'here' ({here.hash()[:12]})"
    ]


def test_delayed_scales_were_in_force(found, script):
    """So histories that did not travel would have given other bits above."""
    fresh, _ = script.build("bf16+sr")
    for name, state in found[2]["bf16+sr"]["recipe"]["layers"].items():
        assert (state["fprop.input.history"] > 0).all()
        assert not recipe_state(fresh)["layers"][name]["fprop.input.history"].any()
