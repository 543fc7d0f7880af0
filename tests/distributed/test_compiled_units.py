"""Units of FSDP2, each compiled by itself, on one rank in this process: what it traces and how often."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from narrowgate.gates.sharded import shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh


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
