"""Units of FSDP2, each compiled by itself, on one rank in this process: what it traces and how often."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import nop
from narrowgate.gates.sharded import shard
from narrowgate.precision import sharding
from narrowgate.precision.layer import layer_state
from narrowgate.recipes import Recipe, apply_recipe
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_equal_units_share_a_graph_and_compute_what_they_did(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", partial(compile_with, backend=backend))
    torch._dynamo.reset()
    torch.manual_seed(0)
    models = [nn.Sequential(*(Block() for _ in range(4))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    mesh = init_device_mesh("cpu", (1,))
    for model, compiled in zip(models, (False, True), strict=True):
        shard(model, [str(i) for i in range(4)], mesh, compiled=compiled)
    x = torch.randn(8, 16)
    for _ in range(3):
        for model in models:
            model(x.requires_grad_()).float().square().sum().backward()
    assert 0 < len(graphs) < 4, "fewer graphs than units"
    gradients: list[list[Any]] = [[p.grad for p in model.parameters()] for model in models]
    assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(*gradients, strict=True))
    torch._dynamo.reset()


def _recipe(weight: str, gather: str, **shards: Any) -> Recipe:
    x = {"128x128": "fp8_e4m3/1x128", "32x32": "mxfp8"}.get(weight.partition("/")[2], weight)
    rule = {
        "layers": "**", "fprop": {"input": x, "weight": weight}, "dgrad": {"grad": x, "weight": weight},
        "wgrad": {"grad": x, "input": x},
    }  # fmt: skip
    return Recipe.from_dict({"recipe": "codes", "rules": [rule], "shards": {"all_gather": gather, **shards}})


@pytest.mark.parametrize("compiled", ["units", "whole"])
@pytest.mark.parametrize(
    ("weight", "gather", "shards"),
    [
        ("fp8_e4m3", "fp8_e4m3", {}),
        ("fp8_e4m3/row", "fp8_e4m3", {}),
        ("fp8_e4m3/row", "fp8_e4m3/row", {"requantize": True}),
        ("fp8_e4m3/128x128", "fp8_e4m3/128x128", {}),
        ("mxfp8/32x32", "mxfp8/32x32", {}),
        ("nvfp4/16x16", "nvfp4/16x16", {}),
    ],
)
def test_units_of_gathered_codes_are_whole_graphs_forward_and_backward(
    one_rank: None, weight: str, gather: str, shards: dict[str, Any], compiled: str
) -> None:
    """Where a graph breaks at a weight, no cast is fused with what makes its tensor."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_autograd(fw_compiler=nop)(graph, inputs)

    torch._dynamo.reset()
    torch.manual_seed(0)
    models = [nn.Sequential(Block(), Block()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    mesh = init_device_mesh("cpu", (1,))
    for model in models:
        apply_recipe(model, _recipe(weight, gather, **shards))
    torch._dynamo.reset()
    if compiled == "units":
        for model in models:
            for block in model:
                if model is models[1]:
                    block.compile(backend=backend, fullgraph=True)
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
    else:  # never sharded: one process, and the codes that a gather would give
        models[1].compile(backend=backend, fullgraph=True)
    x = torch.randn(8, 16)
    found = []
    for model in models:
        own = x.clone().requires_grad_()
        model(own).float().square().sum().backward()
        gradients = [p.grad for p in model.parameters()]
        found.append([own.grad, *(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)])
    assert graphs
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("weight", "gather", "shards"),
    [
        ("fp8_e4m3", "fp8_e4m3", {}),
        ("fp8_e4m3/row", "fp8_e4m3/row", {"requantize": True}),
        ("mxfp8/32x32", "mxfp8/32x32", {}),
        ("nvfp4/16x16", "nvfp4/16x16", {}),
    ],
)
def test_nothing_made_of_a_gathered_weight_outlives_the_forward(
    one_rank: None, weight: str, gather: str, shards: dict[str, Any]
) -> None:
    """Backward makes it anew of what FSDP2 gathers again: kept, it would be a whole weight a layer on every rank."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    apply_recipe(model, _recipe(weight, gather, **shards))
    for module in model.modules():
        if isinstance(module, nn.Linear) and weight == "fp8_e4m3":
            layer_state(module).native = dict.fromkeys(("fprop", "dgrad", "wgrad"), True)
    model.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        flatten = getattr(x, "__tensor_flatten__", None)
        kept.extend([x] if flatten is None else [getattr(x, name) for name in flatten()[0]])
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = model(torch.randn(4, 128, requires_grad=True))
    alive = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in kept}
    assert alive
    assert sum(alive.values()) < 256 * 128 // 2, "a weight's codes are this many bytes, or half as many"
    y.sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("kept", [False, True])
def test_codes_are_made_once_a_forward_or_once_a_step(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2's own calls, of one of two ranks whose collectives do nothing."""
    made: list[Any] = []
    quantize_rows = sharding.quantize_rows
    monkeypatch.setattr(sharding, "quantize_rows", lambda *args: made.append(args) or quantize_rows(*args))
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = nn.Sequential(Block(), Block())
        plan = apply_recipe(model, _recipe("fp8_e4m3/row", "fp8_e4m3/row", requantize=True))
        mesh = init_device_mesh("cpu", (2,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if kept:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                plan.wrap_optimizer(optimizer, keep_weights=True)
        for step in range(2):
            for micro_batch in range(2):
                model(torch.randn(8, 16)).sum().backward()
                assert len(made) == 4 * (1 + (step if kept else 2 * step + micro_batch)), "four layers"
            optimizer.step()
        plan.refresh()
        model(torch.randn(8, 16))
        assert len(made) == (12 if kept else 20)
    finally:
        dist.destroy_process_group()
