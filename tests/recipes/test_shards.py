from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from narrowgate.precision import MatMul
from narrowgate.precision.errors import NarrowgateError, NotBuiltError
from narrowgate.precision.observer import Observer, observe
from narrowgate.precision.sharding import ShardedWeight, gathered_as
from narrowgate.recipes import Recipe, RecipeError, Rule, Shards, Tables, apply_recipe, remove_recipe, resolve
from torch import nn


def recipe(weight: str, gather: str | None = None, **shards: Any) -> Recipe:
    """``weight`` on fprop and dgrad of the interaction layers, gathered so too."""
    paths = {path: dict.fromkeys(operands, weight) for path, operands in
             (("fprop", ("input", "weight")), ("dgrad", ("grad", "weight")))}  # fmt: skip
    return Recipe.from_dict(
        {
            "recipe": "r",
            "rules": [{"layers": "interaction.*", **paths}],
            "shards": {"all_gather": gather or weight, **shards},
        }
    )


def test_the_plan_says_what_is_gathered_low(tower):
    plan = resolve(recipe("fp8_e4m3"), tower)
    assert [layer.name for layer in plan.gathered] == [f"interaction.{i}" for i in range(4)]
    assert "FSDP2 gathers fp8_e4m3/tensor for 4 of 6 layers" in plan.to_text()
    assert plan.to_dict()["gathered"] == [layer.name for layer in plan.gathered]
    only_fprop = Rule(layers="interaction.*", fprop="fp8_e4m3")
    assert resolve(Recipe(name="r", rules=[only_fprop], shards=Shards(all_gather="fp8_e4m3")), tower).gathered == ()


def test_codes_of_delayed_scales_are_planned_and_refused_by_name(tower):
    delayed = recipe("fp8_e4m3+delayed(16)")
    assert len(resolve(delayed, tower).gathered) == 4
    with pytest.raises(NotBuiltError, match=r"shards\.all_gather: fp8_e4m3/tensor\+delayed\(16\) is not built yet"):
        apply_recipe(tower, delayed)


def test_row_scales_do_not_serve_dgrad(tower):
    with pytest.raises(RecipeError) as caught:
        resolve(recipe("fp8_e4m3/row"), tower)
    assert "scales along fprop's rows, over which dgrad contracts" in str(caught.value)
    assert "expected granularity tensor or a square block on both, or shards.requantize: true" in str(caught.value)
    assert resolve(recipe("fp8_e4m3/row", requantize=True), tower).gathered


def test_a_product_of_two_tensors_gathers_nothing():
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = MatMul()

    rules = [Rule(layers="product", all="fp8_e4m3/row")]
    assert (
        resolve(Recipe(name="r", rules=rules, shards=Shards(all_gather="fp8_e4m3/128x128")), Product()).gathered == ()
    )


@pytest.mark.parametrize(
    "weight", ["fp8_e4m3", "fp8_e4m3/128x128", "fp8_e4m3+pow2", "mxfp8/32x32", "mxfp4/32x32", "nvfp4/16x16"]
)
def test_on_one_device_gathered_codes_are_the_operand_that_the_layer_makes_itself(make_tower, ids, weight):
    outputs = []
    for shards in (None, Shards(all_gather=weight)):
        torch.manual_seed(0)
        model = make_tower()
        apply_recipe(model, Recipe(name="r", rules=recipe(weight).rules, shards=shards))
        out = model(ids)
        out.sum().backward()
        outputs.append([out, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.parametrize("shards", [{}, {"gather": "fp8_e4m3/row", "requantize": True}])
def test_an_observer_sees_gathered_weights_against_the_master(tower, ids, shards):
    weight = tower.interaction[0].weight.detach().clone()
    apply_recipe(tower, recipe("fp8_e4m3", **shards))
    with observe(Observer()) as observer:
        tower(ids).sum().backward()
    seen = {(o.path, o.operand): o for o in observer.result() if o.layer == "interaction.0"}
    for path in ("fprop", "dgrad"):
        assert seen[path, "weight"].amax == weight.abs().max()
        assert 20 < seen[path, "weight"].sqnr_db < 40


def test_a_tensor_scale_is_expanded_to_rows(make_tower, ids):
    outputs = []
    for weight, gather in (("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3/row", "fp8_e4m3")):
        torch.manual_seed(0)
        model = make_tower()
        apply_recipe(
            model,
            Recipe.from_dict(
                {
                    "recipe": "r",
                    "rules": [
                        {
                            "layers": "interaction.*",
                            "fprop": {"input": "fp8_e4m3/row", "weight": weight},
                            "dgrad": {"grad": "fp8_e5m2/row", "weight": weight},
                        }
                    ],
                    "shards": {"all_gather": gather},
                }
            ),
        )
        out = model(ids)
        out.sum().backward()
        outputs.append([out, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_names_values_and_checkpoints_stay(make_tower):
    plain, model = make_tower(), make_tower()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    apply_recipe(model, recipe("fp8_e4m3"))
    state = model.state_dict()
    assert list(state) == list(before)
    assert all(type(value) is torch.Tensor for value in state.values())
    assert all(torch.equal(value, before[name]) and value.dtype == before[name].dtype for name, value in state.items())
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model.state_dict()["interaction.0.weight"], plain.interaction[0].weight)
    model.load_state_dict(plain.state_dict(), assign=True)
    assert isinstance(model.interaction[0].weight, ShardedWeight)
    assert isinstance(copy.deepcopy(model).interaction[0].weight, ShardedWeight)


def test_taking_the_recipe_off_gives_ordinary_parameters_back(tower, ids):
    before = tower(ids)
    apply_recipe(tower, recipe("fp8_e4m3"))
    assert gathered_as(tower.interaction[0]) is not None
    remove_recipe(tower)
    assert type(tower.interaction[0].weight) is nn.Parameter
    assert gathered_as(tower.interaction[0]) is None
    assert torch.equal(tower(ids), before)
    model = tower.state_dict()
    apply_recipe(tower, recipe("fp8_e4m3"))
    assert list(tower.state_dict()) == list(model)


def test_an_optimizer_built_before_is_an_error(tower, ids):
    optimizer = torch.optim.Adam(tower.parameters())
    with pytest.raises(NarrowgateError, match=r"layer 'interaction.0' in an optimizer .Adam.*build the optimizer"):
        apply_recipe(tower, recipe("fp8_e4m3"))
    assert type(tower.interaction[0].weight) is nn.Parameter
    optimizer.cycle = optimizer  # type: ignore[attr-defined]
    gc.disable()
    try:
        del optimizer
        apply_recipe(tower, recipe("fp8_e4m3"))
    finally:
        gc.enable()


def test_a_weight_that_others_use_is_refused(tower):
    tower.embedding.weight = nn.Parameter(torch.randn(32, 32))
    tower.interaction[1].weight = tower.embedding.weight
    with pytest.raises(NotBuiltError, match=r"'interaction.1': its weight is 'embedding.weight' too"):
        apply_recipe(tower, recipe("fp8_e4m3"))
    assert type(tower.interaction[0].weight) is nn.Parameter


def test_layers_that_share_a_weight_go_on_sharing_it(tower, ids):
    tower.interaction[1].weight = tower.interaction[0].weight
    apply_recipe(tower, recipe("fp8_e4m3"))
    assert tower.interaction[0].weight is tower.interaction[1].weight
    tower(ids).sum().backward()
    remove_recipe(tower)
    assert tower.interaction[0].weight is tower.interaction[1].weight


def test_attention_is_named_as_not_built():
    attention = nn.MultiheadAttention(32, 4)
    rules = [Rule(layers="**", all="fp8_e4m3")]
    with pytest.raises(NotBuiltError, match=r"layer 'in_proj': shards.all_gather fp8_e4m3/tensor of nn.MultiheadAtt"):
        apply_recipe(attention, Recipe(name="r", rules=rules, shards=Shards(all_gather="fp8_e4m3")))


@pytest.fixture
def alone(tmp_path):
    """A mesh of this process."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_the_recipe_comes_before_sharding_and_goes_before_it(make_tower, ids, alone):
    from torch.distributed.fsdp import fully_shard

    late = fully_shard(make_tower(), mesh=alone)
    with pytest.raises(NarrowgateError, match=r"layer 'interaction.0': found its weight sharded already"):
        apply_recipe(late, recipe("fp8_e4m3"))
    model = make_tower()
    apply_recipe(model, recipe("fp8_e4m3"))
    before = model(ids)
    fully_shard(model, mesh=alone)
    assert torch.equal(model(ids), before)
    with pytest.raises(NarrowgateError, match=r"layer 'interaction.0': FSDP2 holds its low-precision shards"):
        remove_recipe(model)
    assert torch.equal(model(ids), before)


def test_a_weight_that_lost_its_hooks_does_not_pass_for_a_gathered_one(tower, ids):
    apply_recipe(tower, recipe("fp8_e4m3"))
    tower.interaction[0].weight = nn.Parameter(torch.zeros(32, 32))
    with pytest.raises(
        NarrowgateError, match=r"layer 'interaction.0': found an ordinary weight, expected one gathered"
    ):
        tower(ids)


def test_a_gathered_weight_is_read_as_its_values_and_never_written(tower, ids, alone):
    from torch.distributed.fsdp import fully_shard

    apply_recipe(tower, recipe("fp8_e4m3"))
    expected = tower.interaction[0].weight.dequantize()
    fully_shard(tower, mesh=alone)
    tower.unshard()
    weight = tower.interaction[0].weight
    assert torch.equal(weight.detach() * 1, expected)
    with pytest.raises(NarrowgateError, match="cannot be written to"), torch.no_grad():
        weight.mul_(2)


TABLES = """
recipe: r
shards:
  tables: {forward: fp8_e4m3/row, backward: fp8_e5m2/row+sr}
"""


def test_a_recipe_says_how_rows_of_tables_travel_and_reads_back_equal():
    read = Recipe.from_yaml(TABLES)
    made = Recipe(name="r", shards=Shards(tables=Tables(forward="fp8_e4m3/row", backward="fp8_e5m2/row+sr")))
    assert read == made == Recipe.from_yaml(read.to_yaml()) == Recipe.from_dict(read.to_dict())
    half = Recipe.from_yaml(TABLES.replace("forward: fp8_e4m3/row, ", ""))
    assert half.shards == Shards(tables=Tables(backward="fp8_e5m2/row+sr"))
    assert str(half.shards.tables) == "bf16, gradients as fp8_e5m2/row+sr"


def test_tables_count_in_the_hash_and_leave_that_of_recipes_without_them():
    none = Recipe(name="r")
    # Of before recipes had tables.
    assert none.hash().startswith("d4d085be5f11")
    assert Recipe(name="r", shards=Shards()).hash() == none.hash()
    hashes = {Recipe(name="r", shards=Shards(tables=tables)).hash() for tables in
              (None, Tables(), Tables(forward="fp8_e4m3/row"), Tables(backward="fp8_e4m3/row"))}  # fmt: skip
    assert len(hashes) == 4


def test_the_plan_says_how_rows_travel_and_that_one_process_exchanges_nothing(tower, ids):
    plan = resolve(Recipe.from_yaml(TABLES), tower)
    told = "ranks exchange rows of embedding tables as fp8_e4m3/row, gradients as fp8_e5m2/row+sr; one process "
    assert f"{told}exchanges nothing" in plan.to_text()
    assert plan.to_dict()["tables"] == {"forward": "fp8_e4m3/row", "backward": "fp8_e5m2/row+sr"}
    assert resolve(Recipe(name="r"), tower).to_dict()["tables"] is None
    before = tower(ids)
    apply_recipe(tower, Recipe.from_yaml(TABLES))
    assert torch.equal(tower(ids), before)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("{}", "4:11: shards.tables: found an empty mapping, expected forward, backward or both"),
        ("fp8_e4m3/row", "4:11: shards.tables: found 'fp8_e4m3/row', expected a mapping with keys of backward, forwa"),
        ("{fwd: bf16}", "4:12: shards.tables.fwd: unknown field 'fwd'"),
        ("{forward: fp9}", "4:21: shards.tables.forward: unknown format 'fp9'"),
    ],
)
def test_tables_that_say_nothing_useful_are_refused_where_they_stand(tables, message):
    with pytest.raises(RecipeError) as caught:
        Recipe.from_yaml(f"\nrecipe: r\nshards:\n  tables: {tables}\n")
    assert message in str(caught.value)
    assert len(caught.value.diagnostics) == 1


@pytest.mark.parametrize("spec", ["fp8_e4m3", "mxfp8", "fp8_e4m3/row+clip(rms=8)", "fp6_e2m3/row"])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_formats_that_rows_cannot_travel_in_are_named_with_their_place(tower, way, spec):
    text = f"recipe: r\nshards:\n  tables:\n    {way}: {spec}\n"
    with pytest.raises(NotBuiltError) as caught:
        apply_recipe(tower, Recipe.from_yaml(text, file="r.yaml"))
    assert str(caught.value).startswith(f"r.yaml:4:{7 + len(way)}: shards.tables.{way}: ")
    assert "is not built yet, only fp32, bf16, or fp8_e4m3 or fp8_e5m2 with /row" in str(caught.value)
