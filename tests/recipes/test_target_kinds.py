"""Recipes on what is no plain linear layer: attention's projections, products of two tensors, grouped experts."""

from __future__ import annotations

import copy

import pytest
import torch
from narrowgate.precision import NAMED_DEVICES, GroupedLinear, LinearConfig, MatMul
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.grouped import lower_grouped
from narrowgate.precision.layer import LowPrecisionLayer, layer_state
from narrowgate.recipes import (
    Recipe,
    RecipeError,
    Rule,
    apply_recipe,
    load_recipe_state,
    measure_rows,
    recipe_state,
    remove_recipe,
    resolve,
)
from narrowgate.recipes.tracing import trace_gemms
from torch import nn

OFFSETS = torch.tensor([6, 6, 20])


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(32, 2, batch_first=True)
        self.pairs = MatMul()
        self.experts = GroupedLinear(3, 32, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        y, _ = self.attn(x, x, x, need_weights=False)
        y = self.pairs(torch.softmax(self.pairs(y, y.mT), -1), y)
        return self.head(self.experts(y.flatten(0, 1), OFFSETS))


@pytest.fixture
def model() -> Everything:
    return Everything()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 5, 32)


def recipe(*rules: Rule) -> Recipe:
    return Recipe(name="r", rules=list(rules))


EVERY = recipe(Rule(layers="**", all="fp8_e4m3/row+sr"))
NAMES = ["attn.in_proj", "attn.out_proj", "pairs", "experts", "head"]


def lowered(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, LowPrecisionLayer)]


def nearer(got: torch.Tensor, this: torch.Tensor, that: torch.Tensor) -> bool:
    return bool(20 * (got - this).norm() < (got - that).norm())


def test_the_plan_names_every_kind_of_target_and_what_is_emulated(model):
    plan = resolve(EVERY, model)
    assert [(p.name, p.kind, p.in_features, p.out_features) for p in plan.layers] == [
        ("attn.in_proj", "attention", 32, 96),
        ("attn.out_proj", "attention", 32, 32),
        ("pairs", "product", 0, 0),
        ("experts", "grouped", 32, 16),
        ("head", "linear", 16, 1),
    ]
    assert not plan.unreachable
    assert any("no batched low-precision product is wired up" in reason for reason in plan.emulated_reasons())
    assert " - " in plan.to_text()


def test_the_plan_says_which_experts_multiply_in_one_grouped_gemm_and_why_others_do_not(model):
    row, e5m2 = "fp8_e4m3/row", {"grad": "fp8_e5m2/row", "weight": "fp8_e4m3/row"}
    grouped = recipe(Rule(layers="experts", all=row))
    in_turns = recipe(Rule(layers="experts", all=row, dgrad=e5m2))
    h200, b200 = NAMED_DEVICES["h200"], NAMED_DEVICES["b200"]
    plan = resolve(grouped, model, device=h200)
    assert plan.native
    assert plan.layers[3].in_turns is None
    assert "one expert after another" not in plan.to_text()
    plan = resolve(in_turns, model, device=h200)
    assert plan.native  # each expert's product is; only not all of them in one launch
    reason = "dgrad: the grouped GEMM multiplies E4M3 by E4M3, not fp8_e5m2"
    assert f"one expert after another: {reason} (1 layer, first experts)" in plan.to_text()
    assert [layer["in_turns"] for layer in plan.to_dict()["layers"]] == [None, None, None, reason, None]
    plan = resolve(grouped, model, device=b200)
    assert "Hopper only, not on NVIDIA B200" in plan.to_text()
    plan = resolve(grouped, model, device=NAMED_DEVICES["cpu"])
    assert not plan.layers[3].support["fprop"].native
    assert plan.layers[3].in_turns == "a CPU runs the reference, an expert at a time"
    assert resolve(recipe(), model).layers[3].in_turns is None  # BF16 is no recipe's business


def test_every_kind_trains_evaluates_and_comes_back(model, x):
    before, keys = model(x), list(model.state_dict())
    plan = apply_recipe(model, EVERY)
    assert lowered(model) == ["attn", "attn.out_proj", "pairs", "experts", "head"]
    low = model(x)
    assert not torch.equal(low, before)
    torch.testing.assert_close(low, before, rtol=0.2, atol=0.2)
    low.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert list(model.state_dict()) == keys
    model.load_state_dict(Everything().state_dict())
    model.load_state_dict(copy.deepcopy(model).state_dict(), strict=True)
    assert len(plan.lowered) == 5
    remove_recipe(model)
    assert lowered(model) == []
    assert type(model.attn) is nn.MultiheadAttention


@pytest.mark.parametrize("only", NAMES)
def test_each_kind_can_be_lowered_alone_and_changes_the_output(model, x, only):
    before = model(x)
    apply_recipe(model, recipe(Rule(layers=only, all="fp8_e4m3")))
    after = model(x)
    assert not torch.equal(after, before)
    after.sum().backward()
    model.eval()
    with torch.no_grad():
        # Attention that is left alone takes PyTorch's fast path here, which rounds otherwise.
        assert nearer(model(x), after, before)
    remove_recipe(model.train())
    assert torch.equal(model(x), before)


def test_the_size_of_a_product_is_unknown_so_conditions_on_it_are_false(model):
    rules = [Rule(layers="pairs", where="in_features < 10 or in_features >= 10", all="fp8_e4m3", optional=True)]
    assert not resolve(recipe(*rules), model).lowered
    assert len(resolve(recipe(Rule(layers="**", where='type == "MatMul"', all="fp8_e4m3")), model).lowered) == 1


def test_state_of_every_kind_travels(x):
    torch.manual_seed(0)
    straight = Everything()
    resumed = copy.deepcopy(straight)
    for model in (straight, resumed):
        apply_recipe(model, EVERY, seed=3)
    straight(x)
    load_recipe_state(resumed, recipe_state(straight))
    assert torch.equal(resumed(x), straight(x))


def test_rows_and_the_trace_see_every_kind(model, x):
    assert measure_rows(model, lambda: model(x)) == {
        "attn.in_proj": 20, "attn.out_proj": 20, "pairs": 40, "experts": 20, "head": 20,
    }  # fmt: skip
    for _ in range(2):  # as it is, and lowered
        trace = trace_gemms(model, lambda: model(x))
        assert {gemm.layer for gemm in trace.gemms if gemm.layer} == set(NAMES)
        assert [gemm.module for gemm in trace.unreachable] == ["attn"]  # scores and values, fused
        if not lowered(model):
            apply_recipe(model, EVERY)


def test_a_grouped_product_is_one_gemm_of_its_layer_in_the_trace(model, x):
    def products() -> list[tuple[str, int, int]]:
        trace = trace_gemms(model, lambda: model(x))
        return [(gemm.op, gemm.calls, gemm.flops) for gemm in trace.gemms if gemm.layer == "experts"]

    flops = 2 * 20 * 32 * 16
    assert [(calls, total) for _, calls, total in products()] == [(3, flops)]
    lower_grouped(model.experts, LinearConfig())
    layer_state(model.experts).here = NAMED_DEVICES["h200"]  # its BF16 grouped product runs on a CPU too
    assert products() == [("grouped_mm", 1, flops)]


def test_attention_that_cannot_be_lowered_is_listed_with_the_reason():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(32, 2, kdim=16), "b": nn.Linear(8, 8)})
    plan = resolve(recipe(Rule(layers="b", all="fp8_e4m3")), model)
    assert [layer.name for layer in plan.layers] == ["b"]
    assert {entry.name: entry.reason.split(":")[0] for entry in plan.unreachable} == {
        "a": "kdim or vdim differs from embed_dim",
        "a.out_proj": "nn.MultiheadAttention reads this weight directly and never calls the module",
    }
    with pytest.raises(RecipeError, match=r"'a\.\*\*' matches only modules that cannot be lowered"):
        resolve(recipe(Rule(layers="a.**", all="fp8_e4m3")), model)


def test_other_backends_refuse_what_only_ours_lowers(model):
    with pytest.raises(NarrowgateError, match=r"(?s)attn\.in_proj.*lowers nn\.Linear only|torchao"):
        apply_recipe(model, recipe(Rule(layers="attn.*", all="fp8_e4m3")), backend="torchao")
    assert lowered(model) == []


@pytest.mark.parametrize("only", ["linear1", "self_attn.out_proj"])
def test_a_transformer_encoder_layer_evaluates_through_its_lowered_layers(only):
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    x = torch.randn(3, 4, 32)
    before = layer(x)
    apply_recipe(layer, recipe(Rule(layers=only, all="fp4_e2m1")))
    low = layer(x)
    assert not torch.allclose(low, before, atol=1e-3)
    layer.eval()
    with torch.inference_mode():
        assert nearer(layer(x), low, before)
    remove_recipe(layer)
    assert not layer._forward_pre_hooks
    torch.testing.assert_close(layer(x), before)


@pytest.mark.parametrize("only", ["**.in_proj", "**.linear1"])
def test_an_encoder_over_padded_rows_evaluates_as_it_trains(only):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 2)
    x, padding = torch.randn(3, 4, 32), torch.arange(4) >= torch.tensor([[2], [4], [3]])
    assert encoder.use_nested_tensor  # PyTorch's default, which no low-precision layer takes
    apply_recipe(encoder, recipe(Rule(layers=only, all="fp8_e4m3")))
    low = encoder(x, src_key_padding_mask=padding)
    encoder.eval()
    with torch.inference_mode():
        torch.testing.assert_close(encoder(x, src_key_padding_mask=padding)[~padding], low[~padding])
    remove_recipe(encoder)
    assert encoder.use_nested_tensor


def test_a_traced_plan_says_what_is_not_reached_and_shares_the_flops_of_the_step(model, x):
    plan = resolve(recipe(Rule(layers="pairs", all="fp8_e4m3")), model).with_trace(trace_gemms(model, lambda: model(x)))
    projections, products = 2 * 20 * 32 * (96 + 32), 2 * 2 * 4 * 5 * 5 * 32
    total = projections + products + 2 * 20 * 32 * 16 + 2 * 20 * 16
    assert plan.flops_share()["fp8_e4m3"] == pytest.approx(products / total)
    text = plan.to_text()
    assert "not reachable: _scaled_dot_product_flash_attention_for_cpu" in text or "scaled_dot_product" in text
    assert "test_target_kinds.py:" in text
    assert "rules reach 9" in text
    (entry,) = [gemm for gemm in plan.to_dict()["trace"]["gemms"] if gemm["layer"] is None]
    assert entry["share"] == pytest.approx(1 - plan.trace.reachable_share)
