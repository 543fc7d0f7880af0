"""Counting what quantization does to the operands of real steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from narrowgate.precision import measure
from narrowgate.precision.config import GemmConfig, LinearConfig
from narrowgate.precision.linear import lower_linear
from narrowgate.precision.matmul import MatMul, lower_matmul
from narrowgate.precision.observer import Observer, OperandNumerics, observe
from narrowgate.precision.spec import as_spec
from torch import Tensor, nn


def gemm(first: str, second: str) -> GemmConfig:
    return GemmConfig(as_spec(first), as_spec(second))


CONFIG = LinearConfig(
    fprop=gemm("fp8_e4m3/row", "fp8_e4m3/row"),
    dgrad=gemm("fp8_e5m2/row", "fp8_e4m3/row"),
    wgrad=gemm("fp8_e5m2", "fp8_e4m3+clip(rms=2)"),
)


def layer(config: LinearConfig = CONFIG) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(48, 32)
    lower_linear(module, config, name="tower.0")
    return module


def watched(module: nn.Module, *inputs: Tensor) -> dict[tuple[str, str], OperandNumerics]:
    observer = Observer()
    with observe(observer):
        for observer.step, x in enumerate(inputs, 1):
            module(x.requires_grad_()).square().sum().backward()
    return {(found.path, found.operand): found for found in observer.result()}


def test_every_quantized_operand_is_named_and_counted_as_measure_does() -> None:
    module, x = layer(), torch.randn(24, 48)
    found = watched(module, x)
    assert set(found) == {
        ("fprop", "input"), ("fprop", "weight"), ("dgrad", "grad"), ("dgrad", "weight"),
        ("wgrad", "grad"), ("wgrad", "input"),
    }  # fmt: skip
    assert {entry.layer for entry in found.values()} == {"tower.0"}
    expected = measure(x, "fp8_e4m3+clip(rms=2)", dim=0)
    own = found["wgrad", "input"]
    assert own.format == "fp8_e4m3/tensor+clip(rms=2)"
    assert (own.clipped, own.saturated) == (expected.clipped, expected.saturated)
    assert own.clipped > 0
    assert own.amax == pytest.approx(expected.amax)
    assert own.elements == x.numel()
    dense = measure(x, "fp8_e4m3/row", dim=1)
    assert found["fprop", "input"].sqnr_db == pytest.approx(dense.sqnr_db, abs=1e-6)
    assert found["fprop", "input"].clipped == 0


def test_the_worst_step_is_told_from_all_steps() -> None:
    wide = torch.randn(24, 48)
    wide[:, ::2] *= 1e-9  # under one scale a row, half of it becomes zero
    found = watched(layer(), torch.randn(24, 48), wide)["fprop", "input"]
    assert found.steps == 2
    assert found.worst_underflowed_step == 2
    assert found.worst_underflowed == pytest.approx(0.5, abs=0.02)
    assert found.underflowed == pytest.approx(found.worst_underflowed / 2, abs=0.02)


def test_underflow_is_a_share_of_what_was_not_zero() -> None:
    x = torch.zeros(16, 48)
    x[:, 0], x[:, 1] = 1.0, 1e-9
    assert watched(layer(), x)["fprop", "input"].worst_underflowed == pytest.approx(0.5)


def test_a_stale_delayed_scale_shows_as_saturation() -> None:
    delayed = gemm("fp8_e4m3+delayed(4)", "fp8_e4m3")
    module = layer(LinearConfig(fprop=delayed, dgrad=gemm("bf16", "bf16"), wgrad=gemm("bf16", "bf16")))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    observer = Observer()
    with observe(observer):
        for observer.step, factor in enumerate((1.0, 8.0, 8.0), 1):
            module(factor * torch.randn(64, 48)).sum().backward()
            optimizer.step()
    found = next(entry for entry in observer.result() if entry.operand == "input")
    assert found.worst_saturated_step == 2
    assert found.worst_saturated > 0.1


def test_values_that_are_not_finite_are_counted_and_spoil_no_sum() -> None:
    x = torch.randn(16, 48)
    x[3, 5] = torch.inf
    found = watched(layer(), x)["fprop", "input"]
    assert found.nonfinite == pytest.approx(1 / 16)
    assert found.sqnr_db is not None
    assert found.sqnr_db > 20


def test_batched_products_are_watched_too() -> None:
    module: Any = MatMul()
    lower_matmul(module, CONFIG.__class__(fprop=gemm("fp8_e4m3/row", "fp8_e4m3/row")), name="cross")
    observer = Observer()
    with observe(observer):
        module(torch.randn(3, 8, 16), torch.randn(3, 16, 4))
    assert [(f.layer, f.operand, f.elements) for f in observer.result()] == [
        ("cross", "input", 384), ("cross", "weight", 192),
    ]  # fmt: skip


def test_watching_changes_no_result() -> None:
    module, x = layer(), torch.randn(24, 48)
    alone = module(x)
    with observe(Observer()):
        assert torch.equal(module(x), alone)


def test_nothing_is_counted_outside() -> None:
    observer = Observer()
    with observe(observer):
        pass
    layer()(torch.randn(4, 48))
    assert observer.result() == []


def test_a_compiled_graph_neither_sees_the_observer_nor_recompiles_for_it() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    module = layer()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    x = torch.randn(24, 48)
    expected = compiled(x)
    observer = Observer()
    with observe(observer):
        assert torch.equal(compiled(x), expected)
        module(x)
    assert len(graphs) == 1
    assert observer.result() != []
    assert all(found.elements == found.steps * (24 * 48 if found.operand == "input" else 32 * 48)
               for found in observer.result())  # fmt: skip
