"""``shards.reduce_scatter`` on a model: taken over by itself, and never passed over in silence."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from narrowgate.precision import install_reduction, reduction_errors
from narrowgate.precision.errors import NarrowgateError, NotBuiltError
from narrowgate.precision.reduction import LowPrecisionReduceScatter, reduction_of
from narrowgate.recipes import (
    Recipe,
    Shards,
    apply_recipe,
    load_recipe_state,
    recipe_state,
    remove_recipe,
    resolve,
)
from torch import nn

REDUCE = Recipe(name="r", shards=Shards(reduce_scatter="fp8_e5m2+sr"))


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


@pytest.fixture
def alone(tmp_path):
    """A mesh of this process."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def shard(module: nn.Module, mesh: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh, **options)


def comm(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm


X = torch.ones(3, 8)


def test_the_plan_says_how_gradients_are_reduced(tower):
    plan = resolve(REDUCE, tower)
    assert "FSDP2 reduces gradients as fp8_e5m2/tensor+sr, summed in FP32" in plan.to_text()
    assert plan.to_dict()["reduce"] == "fp8_e5m2/tensor+sr"
    unset = resolve(Recipe(name="r"), tower)
    assert "reduces" not in unset.to_text()
    assert unset.to_dict()["reduce"] is None


def test_a_model_that_is_never_sharded_trains_as_ever(alone):
    reduced, plain = model(), model()
    apply_recipe(reduced, REDUCE)
    for each in (reduced, plain, copy.deepcopy(reduced), pickle.loads(pickle.dumps(reduced))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(X).sum().backward()
        optimizer.step()
        assert torch.equal(each[0].weight, reduced[0].weight)
    assert reduced.state_dict().keys() == plain.state_dict().keys()
    copied = copy.deepcopy(reduced)
    remove_recipe(copied)
    assert not copied._forward_pre_hooks
    assert reduced._forward_pre_hooks
    assert recipe_state(reduced)["reductions"] == {"": {"step": 0}}
    with pytest.raises(NarrowgateError, match="found no module that FSDP2 shards"), reduction_errors(reduced):
        pass


def test_it_does_not_keep_a_model_from_being_one_graph():
    reduced = model()
    apply_recipe(reduced, REDUCE)
    assert torch.equal(torch.compile(reduced, backend="eager", fullgraph=True)(X), reduced(X))


@pytest.mark.parametrize("before", [True, False])
def test_the_first_forward_takes_reductions_over_and_remove_recipe_gives_them_back(alone, before):
    reduced = model()
    if before:
        apply_recipe(reduced, REDUCE)
    shard(reduced[0], alone)
    shard(reduced, alone)
    if not before:
        apply_recipe(reduced, REDUCE)
    own = comm(reduced)
    compiled: Any = torch.compile(reduced, backend="eager")
    compiled(X)
    assert isinstance(comm(reduced), LowPrecisionReduceScatter)
    assert isinstance(comm(reduced[0]), LowPrecisionReduceScatter)
    assert install_reduction(reduced) == install_reduction(compiled) == 2
    remove_recipe(reduced)
    assert comm(reduced) is own
    with pytest.raises(NarrowgateError, match=r"found no shards.reduce_scatter on this .*Sequential"):
        install_reduction(reduced)


@pytest.mark.parametrize("late", [True, False])
def test_another_reduction_in_its_place_is_an_error(alone, late):
    class Other:
        pass

    reduced = shard(model(), alone)
    apply_recipe(reduced, REDUCE)
    if late:
        reduced(X)
    reduced.set_custom_reduce_scatter(Other())
    with pytest.raises(NarrowgateError, match="module '': found Other in place of"):
        reduced(X)


def test_a_module_above_the_recipe_s_would_reduce_in_its_own_way(alone):
    reduced = model()
    apply_recipe(reduced, REDUCE)
    whole = shard(nn.Sequential(reduced), alone)
    whole(X).sum().backward()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    before = reduced[0].weight.full_tensor().clone()
    with pytest.raises(NarrowgateError, match=r"parameter '0.weight': its gradient was not reduced by shards.reduce"):
        optimizer.step()
    assert torch.equal(reduced[0].weight.full_tensor(), before)


def test_so_would_a_method_that_is_no_forward_until_the_reduction_is_installed(alone):
    from torch.distributed.fsdp import register_fsdp_forward_method

    class Scorer(nn.Sequential):
        def score(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](self[0](x))

    reduced: Any = shard(Scorer(*model()), alone)
    register_fsdp_forward_method(reduced, "score")
    apply_recipe(reduced, REDUCE)
    optimizer = torch.optim.SGD(reduced.parameters(), lr=0.1)
    reduced.score(X).sum().backward()
    with pytest.raises(NarrowgateError, match="install_reduction"):
        optimizer.step()
    install_reduction(reduced)
    reduced.score(X).sum().backward()
    optimizer.step()


def test_distributed_data_parallel_is_refused(alone):
    reduced = model()
    apply_recipe(reduced, REDUCE)
    with pytest.raises(NarrowgateError, match=r"found DistributedDataParallel.*needs fully_shard"):
        nn.parallel.DistributedDataParallel(reduced)(X)


def test_columns_are_refused_with_the_parameter(alone):
    from torch.distributed.tensor import Shard

    reduced = shard(model(), alone, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    apply_recipe(reduced, REDUCE)
    with pytest.raises(NotBuiltError, match=r"parameter '0.weight': found it sharded by another dimension than rows"):
        reduced(X)


def test_the_step_of_stochastic_rounding_is_restored():
    first, second = model(), model()
    for each in (first, second):
        apply_recipe(each, REDUCE)
    reduction = reduction_of(first)
    assert reduction is not None
    reduction.step = 7
    load_recipe_state(second, recipe_state(first))
    assert recipe_state(second)["reductions"] == {"": {"step": 7}}
