"""Regions of a step: what belongs to a layer, what does not, and that they compute what the model computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from narrowgate.gates.regions import Found, find_regions
from narrowgate.precision import MatMul
from narrowgate.precision.grouped import GroupedLinear
from narrowgate.recipes import Recipe, Rule, apply_recipe
from torch import Tensor, nn

FP8 = Recipe(name="fp8", rules=(Rule(layers=("**",), all="fp8_e4m3"),))


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """A residual block: norm, SwiGLU, projection."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.norm = Norm(d)
        self.gate, self.up = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def regions_of(model: nn.Module, call: Callable[[nn.Module], Any], recipe: Recipe = FP8) -> dict[str, Found]:
    plan = apply_recipe(copy.deepcopy(model), recipe)
    return {found.region.name: found for found in find_regions(model, lambda: call(model), plan)}


def test_layers_behind_one_norm_share_a_region_with_what_is_fused_around_them() -> None:
    found = regions_of(Block(8, 16), lambda m: m(torch.randn(4, 8, requires_grad=True)))
    assert set(found) == {"gate, up", "down"}
    first, second = found["gate, up"].region, found["down"].region
    assert first.around == ("Norm", "silu", "mul")
    assert second.around == ("silu", "mul", "add"), "the residual stream is read by the sum, not by a cast"
    assert [(p.m, p.k, p.n) for p in (*first.products, *second.products)] == [(4, 8, 16), (4, 8, 16), (4, 16, 8)]
    assert [leaf.shape for leaf in first.leaves.values()] == [(4, 8)]
    assert [leaf.shape for leaf in second.leaves.values()] == [(4, 16), (4, 16), (4, 8)]


def test_a_region_computes_what_the_model_computed_and_in_any_arms_model() -> None:
    model, x = Block(8, 16), torch.randn(4, 8)
    regions = regions_of(model, lambda m: m(x.clone().requires_grad_()))
    other = copy.deepcopy(model)
    apply_recipe(other, FP8)
    (hidden,) = regions["gate, up"].region.build(model)(x)
    h = model.norm(x)
    torch.testing.assert_close(hidden, F.silu(model.gate(h)) * model.up(h), rtol=0, atol=0)
    (lowered,) = regions["gate, up"].region.build(other)(x)
    torch.testing.assert_close(lowered, F.silu(other.gate(h)) * other.up(h), rtol=0, atol=0)
    assert not torch.equal(hidden, lowered)


def test_alike_regions_are_one_and_are_counted() -> None:
    model = nn.Sequential(Block(8, 16), Block(8, 16), Block(8, 32))
    found = regions_of(model, lambda m: m(torch.randn(4, 8, requires_grad=True)))
    calls = {name: entry.calls for name, entry in found.items()}
    assert calls == {"0.gate, 0.up": 2, "0.down": 2, "2.gate, 2.up": 1, "2.down": 1}
    assert found["0.down"].layers == ("0.down", "1.down")
    flops = [entry.flops for entry in found.values()]
    assert flops == sorted(flops, reverse=True)
    without = regions_of(model, lambda m: m(torch.randn(4, 8)))
    assert without["0.gate, 0.up"].calls == 1, "an input without gradient has no dgrad"


def test_formats_and_shapes_tell_regions_apart() -> None:
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def call(m: Any) -> None:
        for i, layer in enumerate(m):
            layer(torch.randn(2 if i == 3 else 4, 8))

    rules = (Rule(layers=("**",), all="fp8_e4m3"), Rule(layers=("2",), fprop="fp8_e4m3/row"))
    found = regions_of(model, call, Recipe(name="mixed", rules=rules))
    assert {name: entry.layers for name, entry in found.items()} == {"0": ("0", "1"), "2": ("2",), "3": ("3",)}


def test_layers_that_the_recipe_leaves_alone_are_no_regions_of_their_own() -> None:
    rules = (Rule(layers=("up",), all="fp8_e4m3"),)
    found = regions_of(Block(8, 16), lambda m: m(torch.randn(4, 8)), Recipe(name="part", rules=rules))
    assert set(found) == {"gate, up"}, "gate is behind the same norm as up"
    assert regions_of(Block(8, 16), lambda m: m(torch.randn(4, 8)), Recipe(name="none")) == {}


def test_where_the_producer_cannot_be_told_the_region_begins_at_the_layer() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            scores = torch.softmax(self.a(x) @ x.T, -1)  # a product outside of layers
            y = torch.relu(self.b(scores @ x))
            y.mul_(2)  # written over: what relu made is gone
            z = Double.apply(y)  # a backward of its own
            return self.c(z)

    found = regions_of(Opaque(), lambda m: m(torch.randn(4, 8)))
    assert {name: entry.region.around for name, entry in found.items()} == {"a": (), "b": ("relu",), "c": ()}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def test_attention_experts_and_products_are_regions_of_their_modules() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.experts = GroupedLinear(2, 8, 4)
            self.product = MatMul()

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            y, _ = self.attention(x, x, x, need_weights=False)
            return self.product(self.experts(y.flatten(0, 1), ends), torch.ones(4, 3))

    ends = torch.tensor([5, 6])
    model = Mixed()
    found = regions_of(model, lambda m: m(torch.randn(2, 3, 8), ends))
    assert set(found) == {"attention.in_proj, attention.out_proj", "experts", "product"}
    shapes = {p.name: (p.m, p.k, p.n) for entry in found.values() for p in entry.region.products}
    assert shapes == {
        "attention.in_proj": (6, 8, 24), "attention.out_proj": (6, 8, 8), "experts": (6, 8, 4), "product": (6, 4, 3),
    }  # fmt: skip
    experts = found["experts"].region
    kept = [leaf.values for leaf in experts.leaves.values() if leaf.values is not None]
    assert [value.tolist() for value in kept] == [[5, 6]], "integers are no random numbers"
    for entry in found.values():
        leaves = [leaf.make(torch.device("cpu")) for leaf in entry.region.leaves.values()]
        assert all(out.isfinite().all() for out in entry.region.build(model)(*leaves))


def test_leaves_keep_layout_type_and_whether_they_have_gradients() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.narrow(1, 2, 4))

    for needs in (False, True):
        x = torch.randn(6, 10, dtype=torch.float32, requires_grad=needs)
        (found,) = regions_of(Narrow(), lambda m, x=x: m(x)).values()
        (leaf,) = found.region.leaves.values()
        made = leaf.make(torch.device("cpu"))
        assert (made.shape, made.stride(), made.dtype, made.requires_grad) == ((6, 4), (10, 1), torch.float32, needs)


def test_noting_a_step_leaves_generators_and_gradients_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    before = torch.get_rng_state()
    regions_of(model, lambda m: m(torch.ones(3, 4)).sum())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_within_a_checkpoint_are_found(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model = Block(8, 16)
    found = regions_of(model, lambda m: checkpoint(m, torch.randn(4, 8, requires_grad=True), use_reentrant=reentrant))
    assert {name for entry in found.values() for name in entry.layers} == {"gate", "up", "down"}
    assert all(leaf.requires_grad for entry in found.values() for leaf in entry.region.leaves.values())


def test_every_lowered_layer_of_a_built_in_model_is_in_a_region_that_runs() -> None:
    from narrowgate.models import GemTask

    task = GemTask.open("gem-tiny", "synthetic")
    model = task.build_model()
    lowered = copy.deepcopy(model)
    plan = apply_recipe(lowered, "fp8-tensor")
    batch = next(iter(task.train_batches(0)))
    found = find_regions(model, lambda: task.loss(model, batch), plan)
    named = [name for entry in found for name in entry.layers]
    assert sorted(named) == sorted(layer.name for layer in plan.lowered)
    for entry in found[-3:]:
        leaves = [leaf.make(torch.device("cpu")) for leaf in entry.region.leaves.values()]
        own, other = (entry.region.build(m)(*leaves) for m in (model, lowered))
        for a, b in zip(own, other, strict=True):
            assert 0 < (a - b).norm() / a.norm() < 0.1
