"""What moves into a cast: graphs before and after the pass, and compiled layers against eager ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from narrowgate.precision import cast_operators, casting, fusion
from narrowgate.precision.config import GemmConfig, LinearConfig
from narrowgate.precision.fusion import fuse_casts
from narrowgate.precision.kernels.program import Program
from narrowgate.precision.kernels.reference import values
from narrowgate.precision.linear import lower_linear
from narrowgate.precision.spec import Spec
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

M, N = 96, 256


def cast(x, rows="fp8_e4m3", columns="="):
    """As a layer casts its input: leading axes flattened."""
    flat = x.reshape(-1, x.shape[-1])
    return torch.ops.narrowgate.cast_fp8([flat], "mn|0", rows, columns, None, None, None, None, None, None)


def fused(function, *inputs):
    """Trace, fuse, and return (the casts' programs and leaf names, outputs before, outputs after)."""
    module = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    before = module(*inputs)
    fuse_casts(module.graph)
    module.recompile()
    module.graph.lint()
    found = [
        (Program.parse(node.args[1]), [leaf.name for leaf in node.args[0]])
        for node in module.graph.nodes
        if node.target is torch.ops.narrowgate.cast_fp8.default
    ]
    return found, before, module(*inputs)


def near(before, after):
    """Equal but for elements that intermediate rounding to BF16 moved by one step of FP8, and they are few."""
    for a, b in zip(before, after, strict=True):
        if a.dtype is torch.float8_e4m3fn:
            a, b = a.float(), b.float()
            assert (a != b).float().mean() < 0.2
            assert ((a - b).abs() <= 0.126 * torch.maximum(a.abs(), b.abs()) + 448 * 2**-8).all()
        else:
            torch.testing.assert_close(a, b, rtol=1e-2, atol=0)


def bf16(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _gelu_by_tanh(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("activation", [
    F.silu, F.gelu, F.relu, F.hardswish, F.sigmoid, torch.tanh, torch.square, F.leaky_relu, F.softplus, _gelu_by_tanh,
])  # fmt: skip
def test_an_activation_moves_into_the_cast(activation):
    found, before, after = fused(lambda x: cast(activation(x)), bf16(M, N))
    ((program, leaves),) = found
    assert program.leaves == ("mn",)
    assert leaves == ["x_1"]
    assert program.instructions
    near(before, after)


def test_a_gate_of_two_halves_of_one_gemm_output_moves_into_the_cast():
    def swiglu(h):
        gate, up = h.chunk(2, -1)
        return cast(F.silu(gate) * up)

    found, before, after = fused(swiglu, bf16(4, M, 2 * N))
    assert found[0][0].leaves == ("mn", "mn")
    near(before, after)


def test_both_halves_of_a_gates_gradient_come_out_of_one_cast():
    def backward(gate, up, grad):
        s = torch.sigmoid(gate.float())
        d_up = (grad * gate * s).bfloat16()
        d_gate = (grad * up * s * (1 + gate * (1 - s))).bfloat16()
        return cast(torch.cat([d_gate, d_up], -1))

    found, before, after = fused(backward, *(bf16(M, N, seed=i) for i in range(3)))
    ((program, leaves),) = found
    assert program.pieces == 2
    assert len(leaves) == 3
    assert after[0].shape == (M, 2 * N)
    near(before, after)


def test_a_product_of_tokens_that_a_layer_flattens_moves_as_rows_of_the_layer():
    def mixed(a, b, scale):
        return cast((F.silu(a) * b * scale).flatten(1))

    tokens = [bf16(M, 4, 64, seed=seed) for seed in range(2)]
    found, before, after = fused(mixed, *tokens, bf16(1))
    ((program, _),) = found
    assert sorted(program.leaves) == ["mn", "mn", "s"]
    assert after[0].shape == (M, 256)
    near(before, after)


def test_what_lies_along_the_rows_of_tokens_or_out_of_order_is_not_flattened():
    weight, token = bf16(64), bf16(M, 4, 1)
    for other in (weight, token):
        found, before, after = fused(lambda a, b: cast((F.silu(a) * b).flatten(1)), bf16(M, 4, 64), other)
        assert found[0][1] == ["view"]
        near(before, after)
    found, before, after = fused(
        lambda a, b: cast((F.silu(a.transpose(1, 2)) * b).flatten(1)), bf16(M, 64, 4), bf16(M, 4, 64, seed=1)
    )
    near(before, after)


def test_a_constant_that_a_layer_flattens_stays_in_memory():
    found, before, after = fused(lambda a: cast(torch.full((M, 4, 64), 0.5, dtype=a.dtype).flatten(1)), bf16(M, 4, 64))
    assert found[0][0].instructions == ()
    near(before, after)


@pytest.mark.parametrize(("granularity", "pieces"), [("row", 2), ("1x128", 1)])
def test_results_of_any_width_come_out_of_one_cast_but_for_blocks_that_would_reach_over_two(granularity, pieces):
    spec = f"fp8_e4m3/{granularity}"
    found, before, after = fused(
        lambda a, b: cast(torch.cat([F.relu(a), F.silu(b)], -1), spec, spec), bf16(M, 96), bf16(M, 96, seed=1)
    )
    assert found[0][0].pieces == pieces
    near(before, after)


@pytest.mark.parametrize("norm", ["rms", "layer", "affine-free"])
def test_a_norm_keeps_its_statistics_apart_and_its_scaling_moves(norm):
    weight, bias = torch.randn(N), torch.randn(N)

    def normalized(x, weight, bias):
        if norm == "rms":
            return cast(F.rms_norm(x, (N,), weight.bfloat16(), 1e-6))
        affine = (weight.bfloat16(), bias.bfloat16()) if norm == "layer" else (None, None)
        return cast(F.layer_norm(x, (N,), *affine))

    found, before, after = fused(normalized, bf16(4, 24, N), weight, bias)
    ((program, _),) = found
    assert sorted(program.leaves)[:2] == ["m", "m"][: program.leaves.count("m")] + ["mn"] * (
        2 - program.leaves.count("m")
    )
    assert "mn" in program.leaves
    assert "m" in program.leaves
    near(before, after)


def test_a_sum_that_a_residual_carries_on_stays_in_memory_and_is_read_from_there():
    def block(x, y):
        s = x + y
        return (*cast(F.silu(s)), s)

    found, before, after = fused(block, bf16(M, N), bf16(M, N, seed=1))
    assert found[0][1] == ["add"]
    near(before, after)


def test_what_an_unquantized_consumer_reads_too_stays_in_memory():
    def two_consumers(x):
        a = F.silu(x)
        return (*cast(a), a @ a.t())

    found, before, after = fused(two_consumers, bf16(M, N))
    assert not found[0][0].instructions
    near(before, after)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_norm_in_fp32_of_a_bf16_tensor_is_read_as_bf16(norm):
    """The statistics read an FP32 copy too; nobody writes it for the cast."""

    def normalized(x, weight):
        y = F.rms_norm(x.float(), (N,), weight, 1e-6) if norm == "rms" else F.layer_norm(x.float(), (N,), weight)
        return cast(y)

    found, before, after = fused(normalized, bf16(M, N), torch.randn(N))
    ((program, leaves),) = found
    assert [leaf for leaf, kind in zip(leaves, program.leaves, strict=True) if kind == "mn"] == ["x_1"]
    near(before, after)


def test_what_a_bf16_product_reads_rounded_is_computed_once_more_rather_than_written_in_fp32():
    def two_consumers(g, u):
        a = F.silu(g.float()) * u.float()
        return (*cast(a), a.bfloat16() @ a.bfloat16().t())

    found, before, after = fused(two_consumers, bf16(M, N), bf16(M, N, seed=1))
    ((program, leaves),) = found
    assert leaves == ["g_1", "u_1"]
    assert program.instructions
    near(before, after)


def test_what_lies_in_memory_anyway_is_read_unless_it_is_made_of_less():
    def kept(g, u):
        a = g.float() * u.float()
        return (*cast(a), a @ a.t())

    found, before, after = fused(kept, bf16(M, N), bf16(M, N, seed=1))
    assert not found[0][0].instructions

    def converted(g):
        a = g.float() * 2.0
        return (*cast(a), a @ a.t())

    found, before, after = fused(converted, bf16(M, N))
    assert found[0][1] == ["g_1"], "half the bytes"
    near(before, after)


def test_bias_of_the_layer_before_and_a_dropout_mask_move_too():
    def masked(x, bias, mask):
        return cast(torch.where(mask, F.relu(x + bias) * 1.25, 0.0))

    found, before, after = fused(masked, bf16(M, N), bf16(N), torch.rand(M, N) > 0.2)
    assert sorted(found[0][0].leaves) == ["mn", "mn", "n"]
    near(before, after)


def test_what_a_program_cannot_express_stays_outside_and_the_rest_still_moves():
    found, before, after = fused(lambda x: cast(F.silu(torch.cumsum(x.float(), 0))), bf16(M, N))
    assert found[0][0].leaves == ("mn",)
    assert found[0][0].instructions
    near(before, after)


def test_two_layers_that_read_one_activation_share_its_program():
    def two_layers(x):
        a = F.silu(x)
        return (*cast(a), *cast(a, "fp8_e5m2/row", ""))

    found, before, after = fused(two_layers, bf16(M, N))
    assert [bool(program.instructions) for program, _ in found] == [True, True]
    near(before[:4], after[:4])


def test_a_cast_of_an_input_is_left_alone():
    found, before, after = fused(lambda x: cast(x), bf16(M, N))
    assert str(found[0][0]) == "mn|0"
    near(before, after)


@pytest.mark.parametrize("text", ["mn|0", "mn,m,n;mul 0 1;mul 3 2|4", "mn,s;add 0 #1.5;where 1 2 #-inf|3,0"])
def test_a_programs_text_reads_back(text):
    assert str(Program.parse(text)) == text


def test_a_programs_reference_broadcasts_its_leaves():
    x, m, n = torch.randn(2, 3, 8), torch.randn(2, 3, 1), torch.randn(8)
    found = values([x, m, n], Program.parse("mn,m,n;mul 0 1;add 3 2|4"))
    torch.testing.assert_close(found, (x * m + n).reshape(6, 8))


def _block_config(text):
    spec = Spec.parse(text)
    gemm = GemmConfig(spec, spec)
    return LinearConfig(gemm, gemm, gemm)


@pytest.fixture
def programs(monkeypatch):
    """Collects the programs of the casts in every compiled graph; on a CPU the operators are their reference."""
    found = []

    def fuse(graph):
        count = fuse_casts(graph)
        for node in graph.nodes:
            if node.op == "call_function" and fusion._operator(node) in fusion._cast_operators():
                found.append(fusion._argument(node, 1))
        return count

    monkeypatch.setattr(fusion, "fuse_casts", fuse)
    torch._dynamo.reset()
    with inductor_config.patch(post_grad_custom_pre_pass=fusion.CastFusion(), force_disable_caches=True):
        yield found
    torch._dynamo.reset()


def test_a_compiled_block_casts_in_its_producers(programs, monkeypatch, gated_block):
    # With a history the operator writes to its arguments, which compilers wrap: the harder case of the two.
    _check_block(programs, monkeypatch, "fp8_e4m3+delayed(4)", "cpu", gated_block(128, 256))


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["fp8_e4m3", "fp8_e4m3+delayed(4)", "fp8_e4m3/row", "fp8_e4m3/1x128"])
def test_a_compiled_block_on_a_gpu_casts_in_its_producers(programs, monkeypatch, gated_block, text):
    _check_block(programs, monkeypatch, text, "cuda", gated_block(256, 512))


def _check_block(programs, monkeypatch, text, device, block):
    if device == "cpu":
        monkeypatch.setattr(casting, "kernels_on_cpu", lambda: torch.compiler.is_compiling())
        monkeypatch.setattr(cast_operators, "kernels_on_cpu", lambda: False)
    block = block.to(device, torch.bfloat16)
    config = _block_config(text)
    if text.endswith("1x128"):
        square = Spec.parse("fp8_e4m3/128x128")
        row = Spec.parse(text)
        config = LinearConfig(GemmConfig(row, square), GemmConfig(row, square), GemmConfig(row, row))
    for name in ("up", "down"):
        lower_linear(getattr(block, name), config, name=name)
    x = bf16(64, block.norm.weight.numel()).to(device).requires_grad_()
    results = []
    for call in (block, torch.compile(block, fullgraph=True)):
        x.grad = None
        block.zero_grad()
        y = call(x)
        y.float().square().mean().backward()
        results.append([t.detach().float() for t in (y, x.grad, block.up.weight.grad, block.norm.weight.grad)])
    for a, b in zip(*results, strict=True):
        assert ((a - b).norm() / a.norm()) < 0.05
    fused = [text for text in programs if text != "mn|0"]
    # The norm into `up`, the gate into `down`, and in backward both halves of the gate's gradient.
    assert len(fused) >= 3, programs
    assert any(Program.parse(text).pieces == 2 for text in fused)
