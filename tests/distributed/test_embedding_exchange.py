"""Embedding rows quantized on their way between ranks against one process with the same formats: the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from narrowgate.models import GemTask
from narrowgate.models.embedding_exchange import place_tables, shard_tables
from narrowgate.models.row_wire import RowWire
from narrowgate.precision import quantize
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.exchanged_rows import Exchanged, Request
from narrowgate.recipes import Recipe, RecipeState, Tables, apply_recipe, load_recipe_state, recipe_state
from narrowgate.recipes.wire_tables import busiest, table_calls
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

CASES = ("fp32", "bf16", "fp8", "fp8_both", "fp8_random")


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module, for the same cases in this process."""
    return load_script("exchange")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("exchange")
    run_script("exchange", folder, limit=120)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, where NaN counts as itself."""
    return torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))


@pytest.mark.parametrize("case", [*CASES, "alone"])
def test_rows_and_gradients_are_those_of_one_process(ranks: list[Any], script: ModuleType, case: str) -> None:
    requests = script.ALONE if case == "alone" else script.REQUESTS
    expected = script.exchange(script.FORMATS["fp8_both" if case == "alone" else case], requests)
    for step in range(script.STEPS):
        for i, rows in enumerate(expected["rows"][step]):
            assert same(torch.cat([found[case]["rows"][step][i] for found in ranks]), rows), i
        for name, gradient in expected["gradients"][step].items():
            owner = ranks[ranks[0][case]["owners"][name]]
            assert same(owner[case]["gradients"][step][name], gradient), name
            assert gradient.any()


def test_each_table_lies_on_one_rank_and_a_rank_may_have_none(ranks: list[Any]) -> None:
    assert ranks[0]["fp8"]["owners"] == ranks[1]["fp8"]["owners"] == {"item": 0, "tags": 1, "user": 1}
    assert [list(found["fp8"]["gradients"][0]) for found in ranks] == [["item"], ["user", "tags"]]
    assert [list(found["alone"]["gradients"][0]) for found in ranks] == [["item"], []]


def test_what_arrives_is_what_was_quantized(script: ModuleType) -> None:
    """Against the numerics themselves, not against this exchange in one process."""
    found, tables = script.exchange(script.FORMATS["fp8"]), script.tables()
    for i, (name, _, _) in enumerate(script.REQUESTS):
        rows = tables[name](torch.cat(script.ids(i, script.REQUESTS, 0))).detach()
        assert same(found["rows"][0][i], quantize(rows, "fp8_e4m3/row", dim=1).dequantize())
    wanted = torch.zeros(script.SIZES["user"], script.WIDTH)
    gradient = quantize(script.gradient(1, 10, 0) / 2, "bf16").dequantize()
    wanted.index_add_(0, torch.cat(script.ids(1, script.REQUESTS, 0)), gradient)
    assert torch.equal(found["gradients"][0]["user"], wanted)


def test_random_bits_change_from_step_to_step_and_with_the_lookup(script: ModuleType) -> None:
    formats = ("fp32", "fp8_e5m2/row+sr")
    sender = script.EmbeddingExchange({"a": 0}, 16, forward=formats[0], backward=formats[1])
    table = torch.nn.Embedding(4, 16)
    upstream = torch.linspace(0.1, 1.7, 64).view(4, 16)
    drawn = []
    for what in ("features", "features", "events"):
        table.zero_grad()
        (rows,) = sender.look_up(what, [("a", torch.arange(4))], {"a": table}, torch.zeros(0, requires_grad=True))
        rows.backward(upstream)
        assert table.weight.grad is not None
        drawn.append(table.weight.grad.clone())
    assert len({tuple(x.flatten().tolist()) for x in drawn}) == 3
    with torch.no_grad():
        sender.look_up("features", [("a", torch.arange(4))], {"a": table}, torch.zeros(0))
    assert sender.draws == {"features": 2, "events": 1}


def test_a_nan_takes_its_own_row_with_it_and_no_other(ranks: list[Any]) -> None:
    lost = [found["fp8"]["rows"][0][1].isnan().all(1).tolist() for found in ranks]
    assert not any(lost[0])
    assert lost[1][0]
    assert sum(lost[1]) == int(ranks[1]["fp8"]["rows"][0][1].isnan().any(1).sum())


@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_all_that_travels(ranks: list[Any], script: ModuleType, case: str) -> None:
    ahead, back = (RowWire(spec, "x").row_bytes(script.WIDTH) for spec in script.FORMATS[case])
    size = {"fp32": 4 * script.WIDTH, "bf16": 2 * script.WIDTH}
    assert (ahead, back) == tuple(size.get(spec.split("+")[0], script.WIDTH + 4) for spec in script.FORMATS[case])
    for rank, found in enumerate(ranks):
        wire, owners = found[case]["wire"], found[case]["owners"]
        # A rank hands over the rows it owns, of all who ask, and the gradients of all that it asked for.
        gave = sum(sum(counts) for name, _, counts in script.REQUESTS if owners[name] == rank)
        asked = sum(counts[rank] for _, _, counts in script.REQUESTS)
        ids = sum(counts[rank] * max(bag, 1) for _, bag, counts in script.REQUESTS)
        given = dict(wire["given"])
        assert given.pop(torch.int64) == 8 * ids
        # Values are handed over as what they are, so that a count by dtype tells them from codes.
        sent = [getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}.get(spec.split("+")[0], "uint8"))
                for spec in script.FORMATS[case]]  # fmt: skip
        assert given.keys() == set(sent)
        assert sum(given.values()) == gave * ahead + asked * back
        assert wire["calls"] == {"all_gather": 1, "all_to_all": 3}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_of_every_rank_are_those_planned(ranks: list[Any], script: ModuleType, case: str) -> None:
    requests = [Request(name, counts, max(bag, 1)) for name, bag, counts in script.REQUESTS]
    sizes = {name: rows * script.WIDTH for name, rows in script.SIZES.items()}
    exchanged = Exchanged(sizes, script.WIDTH, lookups=(requests,))
    forward, backward = script.FORMATS[case]
    for rank, found in enumerate(ranks):
        wire = found[case]["wire"]
        planned = {"all_gather": 0, "all_to_all": 0}
        for call in table_calls(exchanged, Tables(forward=forward, backward=backward), script.RANKS, rank):
            planned[call.collective] += sum(call.given.values())
            assert 0 < call.sent < sum(call.given.values()) or call.collective == "all_gather"
        assert planned == {"all_gather": wire["all_gather"], "all_to_all": sum(wire["given"].values())}
    assert busiest(exchanged, script.RANKS) == max(
        (0, 1), key=lambda rank: sum(ranks[rank]["fp32"]["wire"]["given"].values())
    )


def test_fp8_is_less_than_a_third_of_fp32_on_the_wire(ranks: list[Any]) -> None:
    given = {case: ranks[0][case]["wire"]["given"] for case in ("fp8_both", "fp32")}
    assert given["fp8_both"][torch.uint8] < given["fp32"][torch.float32] / 3


def test_a_sharded_model_trains_as_the_whole_one(ranks: list[Any], script: ModuleType) -> None:
    whole = script.train(None)
    for case, tolerance in (("fp32", 1e-5), ("fp8_both", 2e-2)):
        first, second = (found["trained"][case] for found in ranks)
        assert first["losses"] == second["losses"]
        assert first["losses"] == pytest.approx(whole["losses"], rel=tolerance)
    first, second = (found["trained"]["fp32"] for found in ranks)
    tables = {name for name in whole["state"] if name.startswith(("sparse.tables.", "sparse.bags."))}
    assert first["missing"] | second["missing"] == tables
    assert not first["missing"] & second["missing"]
    together = first["state"] | second["state"]
    assert together.keys() == whole["state"].keys()
    for name, value in whole["state"].items():
        torch.testing.assert_close(together[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("spec", ["fp32", "bf16", "fp8_e4m3/row"])
def test_few_rows_of_any_width_travel(spec: str, rows: int) -> None:
    x, wire = torch.arange(5.0 * rows).view(rows, 5), RowWire(spec, "x")
    payload = wire.pack(x)
    assert payload.shape == (rows, wire.row_bytes(5))
    assert torch.equal(wire.unpack(payload, 5), quantize(x, spec, dim=1).dequantize())


def test_tables_go_where_least_lies() -> None:
    assert place_tables({"a": 5, "b": 9, "c": 4, "d": 4, "e": 1}, 2) == {"b": 0, "a": 1, "c": 1, "d": 0, "e": 1}
    assert set(place_tables({"a": 5, "b": 9}, 1).values()) == {0}


@pytest.mark.parametrize("spec", ["fp8_e4m3", "fp8_e4m3/1x128", "nvfp4", "mxfp8", "fp6_e2m3/row",
                                  "fp8_e4m3/row+clip(rms=8)"])  # fmt: skip
def test_formats_that_cannot_travel_are_named(script: ModuleType, spec: str) -> None:
    model = GemTask.open(script.PRESET, "synthetic").build_model()
    with pytest.raises(NarrowgateError, match=r"forward: found '.*', expected fp32, bf16, or fp8_e4m3 or fp8_e5m2"):
        shard_tables(model, forward=spec)


def test_tables_are_sharded_once(script: ModuleType) -> None:
    model = GemTask.open(script.PRESET, "synthetic").build_model()
    shard_tables(model)
    with pytest.raises(NarrowgateError, match="sharded already"):
        shard_tables(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_resumed_training_draws_the_bits_that_follow(script: ModuleType, tmp_path: Path) -> None:
    task = GemTask.open(script.PRESET, "synthetic")
    tables = {"forward": "fp8_e4m3/row+sr", "backward": "fp8_e5m2/row+sr"}
    recipe = Recipe.from_dict({"recipe": "x", "rules": [{"layers": "**", "all": "bf16"}], "shards": {"tables": tables}})
    batches = list(task.train_batches(0))[:3]

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        made = task.build_model()
        apply_recipe(made, recipe)
        shard_tables(made, **tables)
        return made

    def step(made: torch.nn.Module, number: int) -> list[torch.Tensor]:
        made.zero_grad()
        task.loss(made, batches[number]).backward()
        return [parameter.grad.clone() for parameter in made.parameters() if parameter.grad is not None]

    straight = model()
    found = [step(straight, number) for number in range(3)]
    first = model()
    for number in range(2):
        step(first, number)
    resumed = model()
    load_recipe_state(resumed, copy.deepcopy(recipe_state(first)))
    assert all(map(torch.equal, step(resumed, 2), found[2]))
    checkpoint = model()
    state_dict_saver.save({"recipe": RecipeState(first)}, checkpoint_id=str(tmp_path))
    state_dict_loader.load({"recipe": RecipeState(checkpoint)}, checkpoint_id=str(tmp_path))
    assert all(map(torch.equal, step(checkpoint, 2), step(first, 2)))
    assert not all(map(torch.equal, step(model(), 2), found[2]))


@pytest.mark.parametrize(
    ("exchanges", "message"),
    [
        (None, "exchanges of a recipe state: found nothing, expected counts by module"),
        ({"sparse": None}, "exchanges of 'sparse' in a recipe state: found None, expected counts by lookup"),
        ({"sparse": {"features": "x"}}, "expected counts by lookup"),
        ({"sparse": {"features": -1}}, "expected counts by lookup"),
        ({"sparse": {"features": True}}, "expected counts by lookup"),
    ],
)
def test_counts_that_are_none_are_refused_before_anything_is_restored(
    script: ModuleType, exchanges: Any, message: str
) -> None:
    recipe = Recipe.from_dict({"recipe": "x", "rules": [{"layers": "**", "all": "fp8_e4m3+delayed(4)"}]})
    model = GemTask.open(script.PRESET, "synthetic").build_model()
    apply_recipe(model, recipe)
    shard_tables(model)
    state = copy.deepcopy(recipe_state(model))
    for layer in state["layers"].values():
        for value in layer.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.fill_(7)
    with pytest.raises(NarrowgateError, match=message):
        load_recipe_state(model, state | {"exchanges": exchanges})
    for layer in recipe_state(model)["layers"].values():
        assert all(not (v == 7).any() for v in layer.values() if isinstance(v, torch.Tensor))


def test_a_model_may_have_an_attribute_of_that_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    model.register_buffer("exchange_state", torch.zeros(3))
    model.exchange_state = torch.ones(3)
    apply_recipe(model, "fp8-row")
    assert recipe_state(model)["exchanges"] == {}
