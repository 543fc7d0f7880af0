"""torch.compile gives the same bits as eager. Few cases, each a whole pipeline: compiling is slow."""

from __future__ import annotations

import pytest
import torch
from narrowgate.precision import (
    AmaxHistory,
    GemmConfig,
    LinearConfig,
    Spec,
    call_key,
    lower_linear,
    quantize,
    roll,
    stream_key,
)

SPECS = [
    "fp8_e4m3",
    "fp8_e5m2/row+sr",
    "mxfp8+rceil",
    "mxfp6_e3m2/32x32",
    "nvfp4+hadamard(16)",
    "fp4_e2m1/1x16+clip(rms=4)",
    "fp8_e4m3/1x128+pow2+clip(p=99)",
]
DELAYED, STOCHASTIC = Spec.parse("fp8_e4m3+delayed(2)"), Spec.parse("fp8_e4m3+sr")
_KEY = stream_key(0, "layer", "fprop", "input")


def _same(eager: torch.Tensor | None, graph: torch.Tensor | None) -> bool:
    """Equal bits; a NaN equals any NaN, and E8M0 scales equal their codes, which compiled CPU code keeps as uint8."""
    if eager is None or graph is None:
        return eager is graph
    if not eager.is_floating_point() or eager.dtype == torch.float8_e8m0fnu:
        return torch.equal(eager.view(torch.uint8), graph.view(torch.uint8))
    assert eager.dtype == graph.dtype
    a, b = eager.float(), graph.float()
    return torch.equal(torch.nan_to_num(a, 1e33), torch.nan_to_num(b, 1e33)) and torch.equal(
        torch.signbit(a) & ~torch.isnan(a), torch.signbit(b) & ~torch.isnan(b)
    )


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


@pytest.mark.parametrize("spec", SPECS)
def test_compiled_quantization_gives_eagers_bits(spec):
    parsed = Spec.parse(spec)

    def pipeline(x: torch.Tensor, step: torch.Tensor):
        q = quantize(x, parsed, seed=call_key(_KEY, step))
        return q.data, q.scale, q.tensor_scale, q.dequantize()

    compiled = torch.compile(pipeline, fullgraph=True)
    x = torch.randn(33, 70) * torch.exp2(torch.randint(-20, 20, (33, 1)).float())
    step = torch.tensor(3)
    # The last two see what differs between casts: values out of range, NaN and infinity, zeros with a sign.
    poisoned = x.clone()
    poisoned[4, 5], poisoned[20, 40] = torch.nan, -torch.inf
    special = torch.zeros_like(x)
    special[0, :6] = torch.tensor([1e-40, -1e-40, 3e38, -0.0, 449.0, 464.0])
    for case in (x, poisoned, special):
        for eager, graph in zip(pipeline(case, step), compiled(case, step), strict=True):
            assert _same(eager, graph)


def test_compiled_delayed_scaling_follows_its_history():
    def run(history: AmaxHistory, x: torch.Tensor) -> torch.Tensor:
        return quantize(x, DELAYED, history=history).dequantize()

    compiled = torch.compile(run, fullgraph=True)
    eager_history, history = AmaxHistory(2), AmaxHistory(2)
    for size in (1.0, 30.0, 2.0, 2.0, 2.0):
        x = torch.randn(16, 32) * size
        assert torch.equal(run(eager_history, x), compiled(history, x))
        roll([eager_history])
        roll([history])
        assert torch.equal(eager_history.history, history.history)
        assert torch.equal(eager_history.saturated, history.saturated)
    assert int(history.saturated) > 0


def test_a_new_step_does_not_recompile():
    compiles = 0

    def backend(graph, inputs):
        nonlocal compiles
        compiles += 1
        return graph

    run = torch.compile(
        lambda x, step: quantize(x, STOCHASTIC, seed=call_key(_KEY, step)).dequantize(), backend=backend
    )
    x = torch.randn(64)
    results = [run(x, torch.tensor(step)) for step in range(4)]
    assert compiles == 1
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize(("spec", "dim", "expected"), [("fp8_e4m3/row+sr", 1, 1), ("mxfp8", 0, 2), ("fp8_e5m2", 1, 1)])
def test_graphs_do_not_multiply_with_batch_sizes(spec, dim, expected):
    graphs = 0

    def backend(graph, inputs):
        nonlocal graphs
        graphs += 1
        return graph

    parsed = Spec.parse(spec)
    run = torch.compile(
        lambda x: quantize(x, parsed, dim=dim, seed=1).dequantize(), backend=backend, dynamic=True, fullgraph=True
    )
    for rows in (24, 33, 50, 1000, 7):  # along the batch, one block is a graph of its own: Dynamo specializes on 1
        x = torch.randn(rows, 64)
        assert torch.equal(run(x), quantize(x, parsed, dim=dim, seed=1).dequantize())
    assert graphs == expected


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("spec", [*SPECS, "nvfp4/16x16+sr", "fp8_e4m3+hadamard(128)", "bf16+sr", "mxfp4/32x32"])
def test_the_gpu_gives_the_cpus_bits(spec, compiled):
    parsed = Spec.parse(spec)

    def pipeline(x: torch.Tensor):
        q = quantize(x, parsed, seed=3)
        return q.data, q.scale, q.tensor_scale, q.dequantize()

    run = torch.compile(pipeline) if compiled else pipeline
    x = torch.randn(65, 150) * torch.exp2(torch.randint(-20, 20, (65, 1)).float())
    poisoned = x.clone()
    poisoned[4, 5], poisoned[20, 40] = torch.nan, -torch.inf
    for case in (x, poisoned, torch.zeros_like(x)):
        *stored, value = zip(pipeline(case), run(case.cuda()), strict=True)
        for host, device in stored:
            assert _same(host, None if device is None else device.cpu())
        host, device = value
        assert device is not None
        if parsed.hadamard is None:
            assert _same(host, device.cpu())
        else:
            # Rotating back adds products, which a compiler may contract to multiply-adds: equal to FP32 rounding of
            # the largest element of a row.
            size = host.nan_to_num(0.0, 0.0, 0.0).abs().amax(1, keepdim=True)
            assert torch.equal(host.isnan(), device.cpu().isnan())
            assert ((host - device.cpu()).nan_to_num(0.0).abs() <= 1e-5 * size).all()


def test_ragged_blocks_compile_within_autocast() -> None:
    # Neither dimension is a multiple of 128, in forward or backward.
    layer = torch.nn.Linear(64, 48)
    blocks = GemmConfig(Spec.parse("fp8_e4m3/1x128"), Spec.parse("fp8_e4m3/1x128"))
    lower_linear(layer, LinearConfig(blocks, blocks, blocks))
    x = torch.randn(32, 64, requires_grad=True)
    found = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [x, layer.weight])])
    assert all(map(torch.equal, *found))
