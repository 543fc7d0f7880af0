"""Tracing a step: every product is found, attributed to its layer and call site, and nothing is left changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from narrowgate.precision.errors import NarrowgateError
from narrowgate.recipes import apply_recipe
from narrowgate.recipes.tracing import trace_gemms
from torch import nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

LINES = Path(__file__).read_text().split("\n")


class Mixed(nn.Module):
    """A linear layer, and products that are no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.block = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU())
        self.conv = nn.Conv1d(4, 6, 3, groups=2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        y = self.block(self.linear(x))  # the linears
        pairs = torch.bmm(y, y.mT)  # free
        mixed = torch.einsum("bij,bjk->bik", pairs, y)  # written as einsum
        attended = F.scaled_dot_product_attention(y, y, mixed)  # fused
        return self.drop(self.conv(attended)).sum()  # conv


class Squared(nn.Module):
    """Calls an operation through a function of the file that defines it."""

    def __init__(self, square: Any) -> None:
        super().__init__()
        self.square = square

    def call(self, x):
        return self.square(x)

    def forward(self, x):
        return self.call(x) @ x  # operation


def line(comment: str) -> int:
    return next(i for i, text in enumerate(LINES, 1) if text.endswith(f"# {comment}"))


@pytest.fixture
def model() -> Mixed:
    return Mixed()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, 8)


def test_every_product_is_listed_with_its_flops_layer_and_call_site(model, x):
    trace = trace_gemms(model, lambda: model(x))
    by_line = {gemm.line: gemm for gemm in trace.gemms if gemm.layer is None}
    layers = {gemm.layer: gemm.flops for gemm in trace.gemms if gemm.layer is not None}
    assert layers == {"linear": 2 * 12 * 8 * 16, "block.0": 2 * 12 * 16 * 16}
    assert all(gemm.line == line("the linears") for gemm in trace.gemms if gemm.layer is not None)
    assert {number: gemm.flops for number, gemm in by_line.items()} == {
        line("free"): 2 * 3 * 4 * 16 * 4,
        line("written as einsum"): 2 * 3 * 4 * 4 * 16,
        line("fused"): 2 * 3 * 4 * 4 * (16 + 16),
        line("conv"): 2 * 3 * 14 * 6 * 2 * 3,
    }
    assert {gemm.file for gemm in trace.gemms} == {"tests/recipes/test_tracing.py"}
    assert {gemm.function for gemm in trace.gemms} == {"forward"}
    assert "einsum" in by_line[line("written as einsum")].op
    assert by_line[line("conv")].module == "conv"
    assert by_line[line("conv")].reason == "convolutions are not lowered"
    assert "narrowgate.precision.MatMul" in by_line[line("free")].reason


def test_shares_add_up_and_the_largest_comes_first(model, x):
    trace = trace_gemms(model, lambda: model(x))
    assert sum(map(trace.share, trace.gemms)) == pytest.approx(1)
    assert [gemm.flops for gemm in trace.gemms] == sorted((gemm.flops for gemm in trace.gemms), reverse=True)
    assert trace.reachable_share == pytest.approx((2 * 12 * 8 * 16 + 2 * 12 * 16 * 16) / trace.flops)
    assert trace.to_dict()["gemms"][0]["share"] == trace.share(trace.gemms[0])


def test_calls_at_one_place_add_up(model, x):
    once = trace_gemms(model, lambda: model(x))
    twice = trace_gemms(model, lambda: [model(x) for _ in range(2)])
    assert [gemm.calls for gemm in twice.gemms] == [2 * gemm.calls for gemm in once.gemms]
    assert twice.flops == 2 * once.flops


def test_everything_is_restored_even_after_an_error(model, x):
    model.conv.eval()
    state, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()

    def fail():
        model(x)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        trace_gemms(model, fail)
    trace_gemms(model, lambda: model(x))
    assert model.training
    assert not model.conv.training
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert not nn.modules.module._global_forward_pre_hooks
    assert not nn.modules.module._global_forward_hooks
    assert torch.backends.mha.get_fastpath_enabled()
    assert all(p.grad is None for p in model.parameters())
    model(x).backward()
    assert model.linear.weight.grad is not None


def test_a_lowered_compiled_model_traces_as_the_plain_one(model, x):
    plain = trace_gemms(model, lambda: model(x))
    apply_recipe(model, "fp4-naive")
    compiled = torch.compile(model, backend="eager")
    lowered = trace_gemms(compiled, lambda: compiled(x))
    assert {(g.layer, g.line, g.flops) for g in lowered.gemms} == {(g.layer, g.line, g.flops) for g in plain.gemms}


def test_a_hand_written_operation_counts_by_the_formula_it_told(model, x):
    library = torch.library.Library("narrowgate_tests", "FRAGMENT")
    library.define("square(Tensor x) -> Tensor")
    library.impl("square", lambda x: x @ x.mT, "CompositeExplicitAutograd")
    square = torch.ops.narrowgate_tests.square
    try:
        model.block.append(Squared(square))
        silent = trace_gemms(model, lambda: model(x))
        register_flop_formula(square)(lambda shape, out_shape=None: 7 * shape[0])
        told = trace_gemms(model, lambda: model(x))
    finally:
        flop_registry.pop(square, None)
    (found,) = (gemm for gemm in told.gemms if gemm.op == "square")
    assert "square" not in {gemm.op for gemm in silent.gemms}
    assert (found.flops, found.calls, found.layer) == (7 * 3, 1, None)
    assert (found.line, found.module) == (line("operation"), "block.2")
    assert found.reason == "the products inside this operation are its own"
    assert told.flops == silent.flops + 21


def test_attention_over_jagged_rows_counts_what_its_queries_see():
    found = []
    for device in ("cpu", "meta"):
        task = jagged_task(device)
        model = task.build_model()
        batch = next(iter(task.train_batches(0)))
        found.append(trace_gemms(model, lambda task=task, model=model, batch=batch: task.loss(model, batch)))
    batch = next(iter(jagged_task("cpu").train_batches(0)))
    config = jagged_task("cpu").preset.model
    lengths = (batch.offsets.diff() + config.n_summary).clamp_max(config.max_tokens)
    own = int((lengths * (lengths + 1) // 2).sum() + config.pffn_tokens * lengths.sum())
    # Feed-forward and self-attention of a sequence are called at two places.
    entries = [[g for g in trace.gemms if g.op == "jagged_attention"] for trace in found]
    here, planned = (
        {name: sum(g.flops for g in gemms if g.module == name) for name in {g.module: g for g in gemms}}
        for gemms in entries
    )
    assert here.keys() == planned.keys() == {"layers.0.sequence", "layers.0.cross.pooling", "cross.pooling"}
    # Two products of d multiplications and additions a pair.
    assert here["layers.0.sequence"] == 4 * config.d * own
    assert here["cross.pooling"] == 4 * config.d * config.n_pma * int(lengths.sum())
    assert {g.file.rpartition("models/")[2] for g in entries[0]} == {"attention.py", "jagged_operator.py"}
    assert {g.reason for g in entries[0]} == {"fused attention kernels are not lowered"}
    assert {g.layer for g in entries[0]} == {None}
    # Without lengths, as if all rows were equally long: said, and near.
    assert all("counted as if all rows were equally long" in g.reason for g in entries[1])
    assert planned["layers.0.sequence"] == pytest.approx(4 * config.d * own, rel=0.25)


def jagged_task(device: str) -> Any:
    from narrowgate.models import GemTask, get_preset

    preset = get_preset("gem-tiny")
    model = dataclasses.replace(preset.model, attention="jagged")
    return GemTask.open(dataclasses.replace(preset, model=model), "synthetic", device=device)


def test_a_step_without_the_model_is_an_error(model):
    with pytest.raises(NarrowgateError, match="multiplied nothing in the model"):
        trace_gemms(model, lambda: torch.randn(3, 3) @ torch.randn(3, 3))


@pytest.mark.parametrize("name", ["gem-tiny"])
def test_a_built_in_model_is_traced_on_its_data(name):
    from narrowgate.models.task import GemTask

    task = GemTask.open(model=name, data="synthetic")
    model = task.build_model()
    batch = next(iter(task.train_batches(0)))
    trace = trace_gemms(model, lambda: task.loss(model, batch))
    assert trace.reachable_share > 0.3
    assert {gemm.layer for gemm in trace.gemms} - {None}
    assert all(gemm.file.endswith(".py") for gemm in trace.gemms)
