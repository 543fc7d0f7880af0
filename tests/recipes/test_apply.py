from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from narrowgate.precision.errors import NarrowgateError, NotBuiltError
from narrowgate.precision.linear import LowPrecisionLinear
from narrowgate.recipes import (
    Recipe,
    RecipeError,
    Rule,
    apply_recipe,
    load_recipe,
    recipe_state,
    remove_recipe,
    resolve,
)
from torch import nn


@pytest.fixture
def fp8() -> Recipe:
    return Recipe(name="r", rules=[Rule(layers="interaction.*", all="fp8_e4m3/row")])


def lowered(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, LowPrecisionLinear)]


INTERACTION = [f"interaction.{i}" for i in range(4)]


def test_it_lowers_what_the_plan_says_and_nothing_else(tower, fp8, ids):
    plan = apply_recipe(tower, fp8)
    assert lowered(tower) == [p.name for p in plan.lowered] == INTERACTION
    tower(ids).sum().backward()
    assert all(p.grad is not None for p in tower.parameters())


def test_outputs_change_a_little_and_come_back_exactly(tower, fp8, ids):
    before = tower(ids)
    apply_recipe(tower, fp8)
    low = tower(ids)
    assert not torch.equal(low, before)
    torch.testing.assert_close(low, before, rtol=0.2, atol=0.2)
    remove_recipe(tower)
    assert lowered(tower) == []
    assert torch.equal(tower(ids), before)


def test_parameters_stay_the_same_objects_and_an_optimizer_built_before_stays_valid(tower, fp8, ids):
    before = dict(tower.named_parameters())
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    plan = apply_recipe(tower, fp8)
    assert plan.wrap_optimizer(optimizer) is optimizer
    assert all(parameter is before[name] for name, parameter in tower.named_parameters())
    assert all(isinstance(layer, nn.Linear) for layer in tower.interaction)
    old = tower.interaction[0].weight.detach().clone()
    tower(ids).sum().backward()
    optimizer.step()
    plan.refresh()
    assert not torch.equal(tower.interaction[0].weight, old)


def test_checkpoints_load_strictly_both_ways(tower, make_tower, fp8):
    other = make_tower()
    apply_recipe(tower, fp8)
    assert list(tower.state_dict()) == list(other.state_dict())
    assert all(
        a.dtype == b.dtype for a, b in zip(tower.state_dict().values(), other.state_dict().values(), strict=True)
    )
    other.load_state_dict(tower.state_dict(), strict=True)
    tower.load_state_dict(make_tower().state_dict(), strict=True)
    remove_recipe(tower)
    tower.load_state_dict(other.state_dict(), strict=True)


def test_loaded_and_overwritten_weights_are_seen_at_once(tower, fp8, ids):
    apply_recipe(tower, fp8)
    tower(ids)
    with torch.no_grad():
        tower.interaction[0].weight.mul_(0)
        tower.interaction[0].bias.mul_(0)
    x = torch.randn(4, 32)
    assert torch.count_nonzero(tower.interaction[0](x)) == 0


def test_deepcopy_is_independent_and_keeps_the_recipe(tower, fp8, ids):
    apply_recipe(tower, fp8)
    twin = copy.deepcopy(tower)
    assert lowered(twin) == INTERACTION
    assert torch.equal(twin(ids), tower(ids))
    remove_recipe(twin)
    assert lowered(tower) == INTERACTION
    with pytest.raises(NarrowgateError, match="carries recipe 'r' already"):
        apply_recipe(copy.deepcopy(tower), fp8)


def test_a_pickled_model_comes_back_with_its_recipe(fp8, ids):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    apply_recipe(model, Recipe(name="r", rules=[Rule(layers="0", all="fp8_e4m3")]))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    back = torch.load(buffer, weights_only=False)
    x = torch.randn(3, 32)
    assert lowered(back) == ["0"]
    assert torch.equal(back(x), model(x))
    remove_recipe(back)


def test_hooks_already_on_the_module_keep_running(tower, fp8, ids):
    seen: list[str] = []
    layer = tower.interaction[0]
    layer.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    layer.register_forward_hook(lambda module, args, out: seen.append("forward"))
    layer.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("backward"))
    layer.weight.register_hook(lambda grad: seen.append("weight"))
    apply_recipe(tower, fp8)
    tower(ids).sum().backward()
    assert set(seen) == {"pre", "forward", "backward", "weight"}
    remove_recipe(tower)
    seen.clear()
    tower(ids).sum().backward()
    assert set(seen) == {"pre", "forward", "backward", "weight"}


def test_tied_weights_stay_tied(tower, fp8, ids):
    tower.interaction[1].weight = tower.interaction[0].weight
    apply_recipe(tower, fp8)
    assert tower.interaction[1].weight is tower.interaction[0].weight
    tower(ids).sum().backward()


def test_a_subclass_keeps_its_methods_and_its_type(tower, fp8, ids):
    class Named(nn.Linear):
        def title(self) -> str:
            return "named"

    tower.interaction[2] = Named(32, 32)
    apply_recipe(tower, fp8)
    assert isinstance(tower.interaction[2], Named)
    assert isinstance(tower.interaction[2], LowPrecisionLinear)
    assert tower.interaction[2].title() == "named"
    tower(ids)
    remove_recipe(tower)
    assert type(tower.interaction[2]) is Named


def test_parametrized_weights_keep_their_parametrization(tower, fp8, ids):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    for layer in tower.interaction:
        nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    before = tower(ids)
    keys = list(tower.state_dict())
    plan = apply_recipe(tower, fp8)
    assert len(plan.lowered) == 4
    assert plan.layers[0].type == "ParametrizedLinear"
    torch.testing.assert_close(tower(ids), before, rtol=0.2, atol=0.2)
    tower(ids).sum().backward()
    assert all(p.grad is not None for p in tower.parameters())
    assert list(tower.state_dict()) == keys
    remove_recipe(tower)
    assert torch.equal(tower(ids), before)


def test_frozen_weights_get_no_gradient(tower, fp8, ids):
    tower.interaction[0].weight.requires_grad_(False)
    apply_recipe(tower, fp8)
    tower(ids).sum().backward()
    assert tower.interaction[0].weight.grad is None
    assert tower.interaction[1].weight.grad is not None


def test_a_meta_model_can_be_applied_to_and_materialized(make_tower, fp8, ids):
    with torch.device("meta"):
        model = make_tower()
    apply_recipe(model, fp8)
    assert model(ids.to("meta")).shape == make_tower()(ids).shape  # for its shapes, before any memory is spent
    model.to_empty(device="cpu")
    model.load_state_dict(make_tower().state_dict())
    assert lowered(model) == INTERACTION
    assert torch.isfinite(model(ids)).all()


@pytest.mark.parametrize("by", ["assigned state", "attributes"])
def test_a_meta_model_whose_parameters_are_replaced_trains_as_one_built_in_place(make_tower, ids, by):
    recipe = Recipe(name="r", rules=[Rule(layers="interaction.*", all="fp8_e4m3+delayed(2)+sr")])
    with torch.device("meta"):
        model = make_tower()
    apply_recipe(model, recipe)
    want = make_tower()
    state = {name: value.clone() for name, value in want.state_dict().items()}
    if by == "assigned state":
        model.load_state_dict(state, assign=True)
    else:
        for name in state:
            module, _, part = name.rpartition(".")
            setattr(model.get_submodule(module), part, nn.Parameter(state[name]))
    apply_recipe(want, recipe)
    for _ in range(2):
        losses = []
        for each in (model, want):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            loss = each(ids).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        assert torch.equal(*losses)


def test_applying_twice_is_an_error_wherever_the_first_one_is(tower, make_tower, fp8):
    apply_recipe(tower, fp8)
    with pytest.raises(NarrowgateError, match="this model carries recipe 'r' already, found a second one, 'bf16'"):
        apply_recipe(tower, "bf16")
    outer = nn.ModuleDict({"tower": tower})
    with pytest.raises(NarrowgateError, match="'tower' of this model carries recipe 'r' already"):
        apply_recipe(outer, fp8)
    with pytest.raises(NarrowgateError, match="layer '0' is low-precision already, found a second recipe, 'fp8-row'"):
        apply_recipe(tower.interaction, "fp8-row")
    bf16 = make_tower()
    apply_recipe(bf16, "bf16")
    with pytest.raises(NarrowgateError, match="carries recipe 'bf16' already"):
        apply_recipe(bf16, "bf16")
    remove_recipe(bf16)
    apply_recipe(bf16, "bf16")


def test_two_parts_of_a_model_can_have_their_own_recipes(make_tower):
    model = nn.ModuleDict({"a": make_tower(), "b": make_tower()})
    apply_recipe(model["a"], "fp8-row")
    apply_recipe(model["b"], "fp8-tensor")
    remove_recipe(model)
    assert lowered(model) == []


def test_removing_nothing_is_an_error(tower):
    with pytest.raises(NarrowgateError, match="found no recipe on this Tower"):
        remove_recipe(tower)


def test_a_failure_halfway_leaves_the_model_as_it_was(tower, fp8, ids, monkeypatch):
    from narrowgate.precision.backends.native import NativeBackend

    before = tower(ids)
    real, calls = NativeBackend.lower, []

    def failing(self, target, config, **kwargs):
        calls.append(kwargs["name"])
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        real(self, target, config, **kwargs)

    monkeypatch.setattr(NativeBackend, "lower", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        apply_recipe(tower, fp8)
    assert lowered(tower) == []
    assert torch.equal(tower(ids), before)
    monkeypatch.undo()
    apply_recipe(tower, fp8)


def test_a_recipe_that_does_not_fit_leaves_the_model_as_it_was(tower):
    with pytest.raises(RecipeError):
        apply_recipe(tower, Recipe(name="r", rules=[Rule(layers="**", all="fp8_e4m3"), Rule(layers="x", all="bf16")]))
    assert lowered(tower) == []
    apply_recipe(tower, "bf16")


def test_layer_names_are_free_of_wrapper_parts_so_random_streams_are_too(tower, make_tower, ids):
    recipe = Recipe(name="r", rules=[Rule(layers="**", all="fp8_e4m3+sr")])
    wrapped = nn.ModuleDict({"_orig_mod": make_tower()})
    wrapped["_orig_mod"].load_state_dict(tower.state_dict())
    apply_recipe(tower, recipe, seed=3)
    apply_recipe(wrapped, recipe, seed=3)
    assert torch.equal(tower(ids), wrapped["_orig_mod"](ids))


def test_the_seed_decides_stochastic_rounding(make_tower, ids):
    def output(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = make_tower()
        apply_recipe(model, Recipe(name="r", rules=[Rule(layers="**", all="fp8_e4m3+sr")]), seed=seed)
        return model(ids)

    assert torch.equal(output(1), output(1))
    assert not torch.equal(output(1), output(2))


@pytest.mark.parametrize(
    ("parts", "place", "what"),
    [
        (
            "shards: {all_gather: mxfp8/32x32+hadamard(16), requantize: true}",
            "r.yaml:2:22",
            "shards.all_gather: mxfp8/32x32+hadamard(16) is",
        ),
        ("shards: {all_gather: fp8_e4m3+sr, requantize: true}", "r.yaml:2:22", "only codes rounded to nearest"),
        ("shards: {reduce_scatter: mxfp8}", "r.yaml:2:26", "only bf16 and FP8 with FP32 scales"),
        ("shards: {reduce_scatter: fp8_e5m2+delayed(4)}", "r.yaml:2:26", "only FP8 with dynamic scales of unclipped"),
        (
            "activations: {save: nvfp4}",
            "r.yaml:2:21",
            "activations.save: nvfp4 is not built yet, only operand, bf16 and",
        ),
        ("activations: {save: fp8_e4m3+clip(rms=8)}", "r.yaml:2:21", "with dynamic scales of unclipped values"),
        (
            "optimizer: {state: nvfp4}",
            "r.yaml:2:20",
            "optimizer.state: nvfp4 is not built yet, only fp32, bf16, and FP8",
        ),
    ],
)
def test_parts_that_are_not_built_are_named_with_their_line_and_change_nothing(tower, parts, place, what):
    recipe = Recipe.from_yaml(
        f"recipe: r\n{parts}\nrules: [{{layers: 'interaction.*', all: fp8_e4m3/row}}]\n", file="r.yaml"
    )
    with pytest.raises(NotBuiltError) as caught:
        apply_recipe(tower, recipe)
    assert str(caught.value).startswith(place)
    assert what in str(caught.value)
    assert lowered(tower) == []


def test_a_rule_without_effect_may_ask_for_what_is_not_known(tower):
    rules = [
        Rule(layers="interaction.*", all="fp8_e4m3", when="profitable"),
        Rule(layers="interaction.*", when="always"),
        Rule(layers="heads.*", all="bf16", when="profitable"),
    ]
    apply_recipe(tower, Recipe(name="r", rules=rules))
    assert lowered(tower) == INTERACTION


def test_the_argument_wins_over_the_recipes_backend(tower, fp8):
    recipe = Recipe.from_yaml("recipe: r\nbackend: torchao\nextends: fp8-row\n")
    assert resolve(recipe, tower).backend == "torchao"
    assert apply_recipe(tower, recipe, backend="native").backend == "native"
    with pytest.raises(RecipeError, match="did you mean 'native'"):
        apply_recipe(tower, fp8, backend="nativ")


def test_wrong_arguments_are_one_clear_line(tower):
    with pytest.raises(NarrowgateError, match=r"expected a torch\.nn\.Module"):
        apply_recipe("model", "bf16")  # type: ignore[arg-type]
    with pytest.raises(NarrowgateError, match="seed: found '7', expected a whole number"):
        apply_recipe(tower, "bf16", seed="7")  # type: ignore[arg-type]


def test_a_wrapped_and_compiled_model_can_be_applied_to(tower, fp8, ids):
    before = tower(ids)
    compiled: Any = torch.compile(tower, backend="eager")
    plan = apply_recipe(compiled, fp8)
    assert [p.name for p in plan.lowered] == INTERACTION
    assert not torch.equal(compiled(ids), before)
    assert lowered(tower) == INTERACTION
    assert list(recipe_state(tower)["layers"]) == list(recipe_state(compiled)["layers"]) == INTERACTION
    with pytest.raises(NarrowgateError, match="this model carries recipe 'r' already"):
        apply_recipe(tower, fp8)
    remove_recipe(tower)
    apply_recipe(compiled, fp8)


def test_distributed_data_parallel_wraps_a_lowered_model(tower, fp8, ids, tmp_path):
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        apply_recipe(tower, fp8)
        wrapped = nn.parallel.DistributedDataParallel(tower)
        wrapped(ids).sum().backward()
        assert [p.name for p in resolve("bf16", wrapped).layers][:4] == INTERACTION
        remove_recipe(wrapped)
        apply_recipe(wrapped, load_recipe("fp8-row"))
        wrapped(ids).sum().backward()
    finally:
        # Were the reducer the last to hold the process group, it would wait for its thread while it holds the GIL.
        wrapped = None
        gc.collect()
        distributed.destroy_process_group()
