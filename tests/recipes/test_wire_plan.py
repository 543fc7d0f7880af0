"""Planned traffic of a sharded step, by hand for a small model. That it is what Gloo counts: tests/distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from narrowgate.precision.errors import NarrowgateError, NotBuiltError
from narrowgate.precision.exchanged_rows import Exchanged, Request
from narrowgate.recipes import Recipe, RecipeError, resolve
from narrowgate.recipes.plan import Plan
from narrowgate.recipes.rates import shipped_rates
from narrowgate.recipes.topology import Link, Tier, Topology
from narrowgate.recipes.wire_plan import Layout, Payload, Wire, predict_wire
from narrowgate.recipes.wire_tables import COUNTS, IDS, ROW_GRADIENTS, ROWS
from narrowgate.recipes.wire_units import Sharding, default_units
from torch import nn

LINKS = Topology(
    topology="links",
    measured=False,
    launch_us=4,
    domain=Tier(gpus=4, gb_per_s=100, latency_us=2),
    zone=Tier(gpus=16, gb_per_s=10, latency_us=5),
    across=Link(gb_per_s=1, latency_us=11),
)


class Tower(nn.Module):
    """Two blocks, a table, and a head; on the meta device, since shapes are all that is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(64, 3)


def tower() -> Tower:
    with torch.device("meta"):
        return Tower()


def planned(model: nn.Module, gather: str = "fp8_e4m3/128x128", rows: int | None = None, **shards: Any) -> Plan:
    low = gather if gather != "bf16" else "fp8_e4m3"
    other = "fp8_e4m3/1x128" if "128" in low else "fp8_e4m3/row"
    rule = {
        "layers": "blocks.**",
        "fprop": {"input": other, "weight": low},
        "dgrad": {"grad": other, "weight": low},
        "wgrad": "fp8_e4m3/row",
    }
    recipe = Recipe.from_dict({"recipe": "r", "rules": [rule], "shards": {"all_gather": gather, **shards}})
    return resolve(recipe, model, rows=rows, rates=shipped_rates()["NVIDIA H200"] if rows else None)


def wire(layout: Layout = Layout(4, 4), gather: str = "fp8_e4m3/128x128", **sharding: Any) -> Wire:  # noqa: B008
    model = tower()
    return predict_wire(model, planned(model, gather), layout, LINKS, Sharding(**sharding))


def given(payload: Payload) -> dict[str, dict[str, int]]:
    return {entry.what: dict(entry.given) for entry in payload.traffic}


def test_codes_and_amaxes_instead_of_bf16_values() -> None:
    # Each of 4 ranks gives 16 rows of a block's 64 x 64; of the table's 30 rows and the head's 3 it gives 8 and 1.
    root = 2 * (8 * 64 + 1 * 64 + 1)
    found = wire()
    assert given(found.plain) == {
        "all-gather, forward": {"bf16": root + 2 * 2 * 16 * 64},
        "all-gather, backward": {"bf16": 2 * 2 * 16 * 64},
        "reduce-scatter": {"bf16": 2 * (32 * 64 + 2 * 64 * 64 + 4 * 64 + 4)},
    }
    assert given(found.recipe) == {
        # 16 rows split a block of 128: its scale takes one amax, at each of two gathers of two blocks.
        "all-reduce of amaxes": {"fp32": 4 * 4},
        "all-gather, forward": {"bf16": root, "fp8_e4m3": 2 * 16 * 64},
        "all-gather, backward": {"fp8_e4m3": 2 * 16 * 64},
        "reduce-scatter": {"bf16": 2 * (32 * 64 + 2 * 64 * 64 + 4 * 64 + 4)},
    }
    assert found.units == ("blocks.0", "blocks.1", "")
    calls = {entry.what: entry.calls for entry in found.recipe.traffic}
    assert calls == {
        "all-reduce of amaxes": 4, "all-gather, forward": 3, "all-gather, backward": 2, "reduce-scatter": 3,
    }  # fmt: skip


def test_a_scale_within_a_shard_travels_behind_its_codes() -> None:
    model = tower()
    plan = planned(model, "fp8_e4m3/row", requantize=True)
    found = predict_wire(model, plan, Layout(4, 4), LINKS)
    (backward,) = (entry for entry in found.recipe.traffic if entry.what == "all-gather, backward")
    assert backward.given == {"fp8_e4m3": 2 * 16 * 64, "fp32 scales": 2 * 16 * 4}
    assert "all-reduce of amaxes" not in given(found.recipe)


def test_padding_is_counted_and_told() -> None:
    (gather,) = (entry for entry in wire().plain.traffic if entry.what == "all-gather, forward")
    # 32 rows for the table's 30, 4 for the head's and for its bias's 3, in BF16, averaged over 4 ranks.
    assert gather.padding == 2 * (2 * 64 + 64 + 1) / 4


def test_replicas_reduce_their_shard_among_themselves() -> None:
    found = wire(Layout(16, 4))
    scattered = given(found.recipe)["reduce-scatter"]["bf16"]
    assert given(found.recipe)["all-reduce of replicas"] == {"bf16": scattered // 4}
    (replicas,) = (entry for entry in found.recipe.traffic if entry.what == "all-reduce of replicas")
    assert replicas.sent == 2 * 3 / 4 * scattered / 4
    assert given(found.plain)["all-gather, forward"] == given(wire().plain)["all-gather, forward"]


def test_one_rank_to_a_shard_gathers_nothing() -> None:
    found = wire(Layout(4, 1))
    values = 30 * 64 + 2 * 64 * 64 + 3 * 64 + 3
    assert given(found.recipe) == given(found.plain) == {"all-reduce of replicas": {"bf16": 2 * values}}


def test_times_are_those_of_each_unit_s_collectives() -> None:
    found = wire()
    group = LINKS.group(4)
    units = [2 * 16 * 64] * 2 + [2 * (8 * 64 + 64 + 1)]
    (forward,) = (entry for entry in found.plain.traffic if entry.what == "all-gather, forward")
    assert forward.us == pytest.approx(sum(LINKS.all_gather_us(group, 4 * size) for size in units))
    assert forward.sent == 3 * sum(units)
    assert found.recipe.us == pytest.approx(sum(entry.us for entry in found.recipe.traffic))


@pytest.mark.parametrize(("sharding", "dropped"), [
    ({"reshard": False}, "all-gather, backward"),
    ({"ignored": ["table"]}, None),
    ({"units": []}, "all-gather, backward"),
])  # fmt: skip
def test_what_is_handed_to_fsdp2_decides(sharding: dict[str, Any], dropped: str | None) -> None:
    usual, found = given(wire().plain), given(wire(**sharding).plain)
    assert (dropped in usual, dropped in found) == (dropped is not None, False)
    table = 2 * 8 * 64 if "ignored" in sharding else 0
    assert found["all-gather, forward"]["bf16"] == usual["all-gather, forward"]["bf16"] - table


def test_policies_dtypes_are_those_of_what_has_no_codes() -> None:
    found = given(wire(param_dtype=None, reduce_dtype="fp32").recipe)
    assert set(found["all-gather, forward"]) == {"fp32", "fp8_e4m3"}
    assert set(found["reduce-scatter"]) == {"fp32"}
    with pytest.raises(NarrowgateError, match="reduce_dtype: found 'fp23', expected fp32, bf16, fp16; did you mean"):
        Sharding(reduce_dtype="fp23")
    with pytest.raises(NarrowgateError, match="reshard: found 2, expected True or False: FSDP2 refuses"):
        Sharding(reshard=2)  # type: ignore[arg-type]


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    model = tower()
    model.table.requires_grad_(False)
    found = predict_wire(model, planned(model), Layout(4, 4), LINKS).plain
    assert given(found)["reduce-scatter"] == {"bf16": 2 * (2 * 64 * 64 + 4 * 64 + 4)}
    assert given(found)["all-gather, forward"] == given(wire().plain)["all-gather, forward"]


def test_a_shared_parameter_travels_once_with_the_unit_that_has_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    plan = resolve(Recipe(name="r"), model)
    found = predict_wire(model, plan, Layout(4, 4), LINKS, Sharding(units=["0"]))
    assert given(found.plain)["reduce-scatter"] == {"bf16": 2 * 64}
    assert found.units == ("0",)


def test_blocks_are_the_entries_of_the_outermost_lists() -> None:
    inner = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Identity()])
    model = nn.ModuleDict({"rows": nn.ModuleList([inner, nn.Linear(2, 2)]), "lone": nn.Linear(2, 2)})
    assert default_units(model) == ["rows.0.0", "rows.1"]
    assert default_units(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))) == ["0", "2"]


def test_bounds_lie_between_the_longer_and_the_sum() -> None:
    model = tower()
    plan = planned(model, rows=4096)
    found = predict_wire(model, plan, Layout(4, 4), LINKS)
    totals = plan.totals()
    assert totals is not None
    assert (found.plain.compute_us, found.recipe.compute_us) == (totals.bf16_us, totals.us)
    for payload in (found.plain, found.recipe):
        assert payload.hidden_us == max(payload.compute_us, payload.us)
        assert payload.exposed_us == payload.compute_us + payload.us
    assert wire().recipe.hidden_us is None  # no rows, no prices


def test_what_cannot_be_planned_is_said() -> None:
    model = tower()
    with pytest.raises(NarrowgateError, match="found 6 GPUs in shard groups of 4, expected a size that divides them"):
        Layout(6, 4)
    with pytest.raises(
        NarrowgateError, match=r"units: found 'block\.0', which matches no module of the model; did you"
    ):
        wire(units=["block.0"])
    with pytest.raises(NarrowgateError, match="ignored: found 'tables'"):
        wire(ignored=["tables"])
    model.register_parameter("temperature", nn.Parameter(torch.ones((), device="meta")))
    with pytest.raises(NarrowgateError, match="'temperature': found a scalar parameter"):
        predict_wire(model, planned(model), Layout(4, 4), LINKS)


def test_shards_that_cannot_run_are_refused_like_applying_them() -> None:
    model = tower()
    with pytest.raises(RecipeError, match=r"shards\.all_gather"):
        predict_wire(model, planned(model, "fp8_e4m3+delayed(4)", requantize=True), Layout(4, 4), LINKS)
    linear = model.get_submodule("blocks.0.0")
    assert isinstance(linear, nn.Linear)
    model.table.weight = linear.weight
    with pytest.raises(NotBuiltError, match=r"its weight is 'table\.weight' too"):
        predict_wire(model, planned(model), Layout(4, 4), LINKS)


#: One table, which lies on the first rank; a bag of three ids and a row of one, 5 and 7 times on every rank.
EXCHANGED = Exchanged({"table": 30 * 64}, 64, ("table",), ((Request("table", (5,), 3), Request("table", (7,))),))


def test_rows_of_tables_are_none_of_fsdp2_s_and_cost_what_their_owner_sends() -> None:
    model = tower()
    plan = planned(model, "bf16", tables={"forward": "fp8_e4m3/row", "backward": "bf16+sr"})
    wired = predict_wire(model, plan, Layout(4, 2), LINKS, None, EXCHANGED)
    plain, recipe = ({entry.what: entry for entry in side.traffic} for side in (wired.plain, wired.recipe))
    assert (wired.recipe.rank, recipe[COUNTS].given, recipe[COUNTS].sent) == (0, {"int64": 16}, 48)
    # The rank that has the table asks itself, and answers four ranks' 12 rows.
    assert (recipe[IDS].given, recipe[IDS].sent) == ({"int64": 8 * (15 + 7)}, 0)
    assert recipe[ROWS].given == {"fp8_e4m3": 4 * 12 * 64, "fp32 scales": 4 * 12 * 4}
    assert recipe[ROWS].sent == 3 * 12 * 68
    assert (recipe[ROW_GRADIENTS].given, recipe[ROW_GRADIENTS].sent) == ({"bf16": 12 * 128}, 0)
    assert plain[ROWS].given == {"bf16": 4 * 12 * 128}
    assert recipe[ROWS].us == LINKS.all_to_all_us(LINKS.group(4), recipe[ROWS].total)
    # Of the tables nothing is gathered, nor reduced; all else is as it was.
    without = predict_wire(model, planned(model, "bf16"), Layout(4, 2), LINKS, Sharding(ignored=("table",)))
    assert {what: entry for what, entry in recipe.items() if what not in (COUNTS, IDS, ROWS, ROW_GRADIENTS)} == {
        entry.what: entry for entry in without.recipe.traffic
    }


def test_one_gpu_exchanges_nothing_and_tables_nobody_named_are_asked_for() -> None:
    model = tower()
    plan = planned(model, "bf16", tables={"forward": "fp8_e4m3/row"})
    assert predict_wire(model, plan, Layout(1, 1), LINKS, None, EXCHANGED).recipe.traffic == ()
    with pytest.raises(NarrowgateError, match=r"shards.tables fp8_e4m3/row, gradients as bf16: found no `exchanged`"):
        predict_wire(model, plan, Layout(4, 4), LINKS)
