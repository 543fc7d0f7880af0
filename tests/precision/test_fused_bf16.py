"""BF16 layers on the fused kernels: an ordinary linear layer's numbers, and what moves into its writes."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from narrowgate.precision import fusion
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.fused_bf16 import FusedBF16Linear, lower_fused_bf16
from narrowgate.precision.kernels.program import Program
from narrowgate.precision.kernels.reference import values
from narrowgate.precision.linear import restore_linear
from torch import nn
from torch._inductor import config as inductor_config

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"


def results(call, block, x):
    x.grad = None
    block.zero_grad()
    y = call(x)
    y.float().square().mean().backward()
    return [t.detach().float() for t in (y, x.grad, block.up.weight.grad, block.down.bias.grad, block.norm.weight.grad)]


@pytest.mark.parametrize("autocast", [False, True])
def test_in_eager_mode_it_is_the_ordinary_layer(autocast):
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    plain = nn.Linear(64, 48).to(dtype)
    lowered = copy.deepcopy(plain)
    lower_fused_bf16(lowered)
    assert isinstance(lowered, FusedBF16Linear)
    found = []
    for layer in (plain, lowered):
        x = torch.randn(3, 5, 64, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = layer(x)
        y.float().square().sum().backward()
        found.append((y, x.grad, layer.weight.grad, layer.bias.grad))
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        # An FP32 layer under autocast rounds its gradients to BF16, this one accumulates them in FP32.
        assert ((a.float() - b.float()).norm() / a.float().norm()) < 5e-3
    restore_linear(lowered)
    assert type(lowered) is nn.Linear


def test_a_layer_is_lowered_once():
    layer = nn.Linear(16, 16)
    lower_fused_bf16(layer, name="tower")
    with pytest.raises(NarrowgateError, match="'tower' is low-precision already"):
        lower_fused_bf16(layer, name="tower")


def _check_compiled(device, block, monkeypatch):
    programs = []
    original = fusion.fuse_casts

    def fuse(graph):
        count = original(graph)
        programs.extend(node.args[1] for node in graph.nodes if node.target is torch.ops.narrowgate.write_bf16.default)
        return count

    monkeypatch.setattr(fusion, "fuse_casts", fuse)
    block = block.to(device, torch.bfloat16)
    reference = copy.deepcopy(block)
    for name in ("up", "down"):
        lower_fused_bf16(getattr(block, name), name=name)
    x = torch.randn(64, block.norm.weight.numel(), device=device).bfloat16().requires_grad_()
    torch._dynamo.reset()
    with inductor_config.patch(post_grad_custom_pre_pass=fusion.CastFusion(), force_disable_caches=True):
        found = results(torch.compile(block, fullgraph=True), block, x)
    torch._dynamo.reset()
    for a, b in zip(results(reference, reference, x), found, strict=True):
        assert ((a - b).norm() / a.norm()) < 2e-2
    # The norm into `up`, the gate into `down`, both halves of the gate's gradient; what was BF16 in memory already,
    # the gradient of `down`, is not written again.
    assert len(programs) == 3
    assert all(Program.parse(text).instructions for text in programs)
    assert sorted(Program.parse(text).pieces for text in programs) == [1, 1, 2]


def test_compiled_its_producers_move_where_a_cast_would_have_been(monkeypatch, gated_block):
    torch.manual_seed(0)
    _check_compiled("cpu", gated_block(128, 256), monkeypatch)


@pytest.mark.gpu
def test_compiled_on_a_gpu_its_producers_move_too(monkeypatch, gated_block):
    torch.manual_seed(0)
    _check_compiled("cuda", gated_block(256, 512), monkeypatch)


@pytest.mark.parametrize("shape", [(64, 256), (70, 130), (1, 8), (0, 16)], ids=str)
@pytest.mark.parametrize("program", [
    "mn|0", "mn,mn,m,n;sigmoid 0;mul 0 4;mul 5 1;mul 6 2;mul 7 3|8", "mn,mn|0,1",
    "mn,mn;neg 0;exp 2;add #1.0 3;div 0 4;mul 5 1|6",
    "mn;exp 0;neg 0;exp 2;add 3 1;div 0 4;add 3 #2.0;div 0 6;sigmoid 0|5,7,8",
])  # fmt: skip
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
class TestKernel:
    pytestmark = GPU

    def test_it_writes_what_the_reference_rounds(self, shape, program, layout):
        generator = torch.Generator().manual_seed(0)
        parsed = Program.parse(program)
        sizes = {"mn": shape, "m": (shape[0], 1), "n": (shape[1],)}
        leaves = [torch.randn(sizes[kind], generator=generator).to(DEVICE, torch.bfloat16) for kind in parsed.leaves]
        if layout == "strided":
            leaves[0] = torch.randn(shape[0], 2 * shape[1], generator=generator).to(DEVICE)[:, : shape[1]]
        for _ in range(2):  # the second launch takes what the first one compiled
            found = torch.ops.narrowgate.write_bf16(leaves, program)
            expected = values(leaves, parsed).to(torch.bfloat16)
            assert found.shape == expected.shape
            if parsed.instructions or INTERPRETED:
                # The sigmoid of a GPU differs in its last bits, and the interpreter truncates where a GPU rounds.
                torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)
            else:
                assert torch.equal(found, expected)
