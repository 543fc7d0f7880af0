"""Lowered models inside what training loops do around them: wrappers, scalers, averages, accumulation."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.layer import LowPrecisionLayer
from narrowgate.recipes import Recipe, Rule, apply_recipe, recipe_state, remove_recipe, resolve
from torch import nn


@pytest.fixture
def inner() -> Recipe:
    return Recipe(name="r", rules=[Rule(layers="interaction.*", all="fp8_e4m3/row")])


class LoRA(nn.Module):
    """The usual adapter: a frozen layer, and two small ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_adapters_around_frozen_layers_train_and_end_their_steps(tower, ids):
    for i, layer in enumerate(tower.interaction):
        tower.interaction[i] = LoRA(layer)
    rules = [Rule(layers="interaction.*.base", all="fp8_e4m3+delayed(2)"), Rule(layers="**.down", all="bf16")]
    plan = apply_recipe(tower, Recipe(name="r", rules=rules))
    assert [layer.name for layer in plan.lowered] == [f"interaction.{i}.base" for i in range(4)]
    optimizer = torch.optim.AdamW([p for p in tower.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = tower(ids).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(layer.base.weight.grad is None for layer in tower.interaction)
    state = recipe_state(tower)["layers"]["interaction.0.base"]
    assert (state["fprop.input.history"] > 0).all()


def test_a_module_that_wraps_a_lowered_layer_calls_it(tower, inner, ids):
    apply_recipe(tower, inner)
    before = tower(ids)
    tower.interaction[1] = nn.Sequential(tower.interaction[1])
    assert torch.equal(tower(ids), before)
    remove_recipe(tower)


def test_the_grad_scaler_and_half_precision_autocast(tower, inner, ids):
    apply_recipe(tower, inner)
    optimizer, scaler = torch.optim.SGD(tower.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = tower.interaction[0].weight.detach().clone()
    scales = []
    for _ in range(40):
        with torch.autocast("cpu", torch.float16):
            out = tower(ids)
        loss = out.float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    # The gradient of the half-precision outputs overflows at first: the scaler has to see that through the layers.
    assert scales[-1] < scales[0]
    assert scales[-1] == scales[-2]
    assert tower.interaction[0].weight.dtype == torch.float32
    assert tower.interaction[0].weight.isfinite().all()
    assert not torch.equal(tower.interaction[0].weight, before)


def test_an_average_of_the_weights_swapped_in_is_seen_and_swapped_out_again(tower, inner, ids):
    apply_recipe(tower, inner)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.5)
    averaged = torch.optim.swa_utils.AveragedModel(tower)
    for _ in range(2):
        tower(ids).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(tower)
    live, average = copy.deepcopy(tower.state_dict()), averaged.module.state_dict()
    out = tower(ids)
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            parameter.copy_(average[name])
    assert torch.equal(tower(ids), averaged(ids))
    assert not torch.equal(tower(ids), out)
    tower.load_state_dict(live)
    assert torch.equal(tower(ids), out)


def test_loading_with_assign_replaces_the_weights_that_are_multiplied(tower, make_tower, inner, ids):
    apply_recipe(tower, inner)
    other = make_tower()
    tower.load_state_dict(other.state_dict(), assign=True)
    apply_recipe(other, inner)
    assert torch.equal(tower(ids), other(ids))


def test_two_micro_batches_are_the_whole_batch(tower, inner, ids):
    apply_recipe(tower, inner)
    tower(ids).sum().backward()
    whole = [p.grad.clone() for p in tower.parameters()]
    tower.zero_grad()
    for part in ids.chunk(2):
        tower(part).sum().backward()
    for parameter, want in zip(tower.parameters(), whole, strict=True):
        assert (parameter.grad - want).norm() <= 0.1 * want.norm() + 1e-5


def test_names_through_distributed_data_parallel_are_the_models_own(tower, ids, tmp_path):
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(tower)
        plain = Recipe(name="r", rules=[Rule(layers="interaction.**", all="fp8_e4m3+delayed(2)")])
        plan = apply_recipe(wrapped, plain)
        assert [layer.name for layer in plan.lowered] == [f"interaction.{i}" for i in range(4)]
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for part in ids.chunk(2):
            wrapped(part).sum().backward()
        optimizer.step()
        assert set(recipe_state(wrapped)["layers"]) == {f"interaction.{i}" for i in range(4)}
        assert set(recipe_state(tower)["layers"]) == {f"interaction.{i}" for i in range(4)}
    finally:
        # Were the reducer the last to hold the process group, it would wait for its thread while it holds the GIL.
        wrapped = plan = None
        gc.collect()
        distributed.destroy_process_group()


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_normalized_weights_are_quantized_after_their_normalization(tower, inner, ids, norm):
    for layer in tower.interaction:
        norm(layer)
    tower.eval()  # spectral_norm iterates in training
    before = tower(ids)
    plan = apply_recipe(tower, inner)
    assert len(plan.lowered) == 4
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    low = tower(ids)
    assert not torch.equal(low, before)
    torch.testing.assert_close(low, before, rtol=0.3, atol=0.3)
    low.sum().backward()
    optimizer.step()
    assert not torch.equal(tower(ids), low)


def test_hooks_added_after_applying_see_the_low_precision_output(tower, inner, ids):
    apply_recipe(tower, inner)
    seen = []
    handle = tower.interaction[0].register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    tower(ids)
    handle.remove()
    ((x, y),) = seen
    assert isinstance(tower.interaction[0], LowPrecisionLayer)
    assert torch.equal(tower.interaction[0](x), y)
    assert resolve("bf16", tower).layers[0].type == "Linear"


def test_weights_kept_between_micro_batches_train_the_same_and_refresh_sees_what_nothing_else_can(
    tower, make_tower, inner, ids, monkeypatch
):
    from narrowgate.precision import casting
    from narrowgate.precision.layer import layer_state

    twin = make_tower()
    twin.load_state_dict(tower.state_dict())
    results = []
    for model, keep in ((tower, False), (twin, True)):
        plan = apply_recipe(model, inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with monkeypatch.context() as patch:
            patch.setattr(casting, "kernels_on_cpu", lambda: True)  # a CPU has no cast to save
            assert plan.wrap_optimizer(optimizer, keep_weights=keep) is optimizer
        assert (layer_state(model.interaction[0]).kept is not None) == keep
        for _ in range(2):
            for _ in range(2):
                model(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = model(ids)
        model.interaction[0].weight.data.mul_(0.5)
        plan.refresh()
        after = model(ids)
        assert not torch.equal(before, after)
        results.append(after)
    assert torch.equal(*results)


def test_weights_that_cannot_be_kept_are_named_with_the_reason(tower, inner):
    plan = apply_recipe(tower, inner)
    optimizer = torch.optim.SGD(tower.parameters(), lr=1e-3)
    with pytest.warns(
        UserWarning, match=r"keep_weights: .* 4 weight\(s\), first 'interaction.0': no cast kernel .* on cpu"
    ):
        plan.wrap_optimizer(optimizer, keep_weights=True)


def test_an_exported_model_computes_the_same_for_other_batches_and_after_a_file(tower, inner, ids, tmp_path):
    apply_recipe(tower, inner)
    exported = torch.export.export(tower.eval(), (ids,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.export.save(exported, tmp_path / "tower.pt2")
    loaded = torch.export.load(tmp_path / "tower.pt2").module()
    for rows in (ids, ids[:3]):
        assert torch.equal(loaded(rows), tower(rows))


def test_tracing_and_transforms_that_cannot_work_name_the_layer_and_what_does(tower, inner, ids):
    apply_recipe(tower, inner)
    jit = r"layer 'interaction\.0': .* torch\.jit\.trace; torch\.export takes them; remove_recipe"
    with pytest.raises(NarrowgateError, match=jit):
        torch.jit.trace(tower.eval(), ids)
    parameters = dict(tower.named_parameters())
    with pytest.raises(NarrowgateError, match=r"layer 'interaction\.0': .* transforms of torch\.func; remove_recipe"):
        torch.func.grad(lambda p: torch.func.functional_call(tower, p, (ids,)).sum())(parameters)
    assert tower(ids).isfinite().all()
