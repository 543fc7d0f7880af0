"""Grouped products of experts: the same codes, scales and results as one expert after another.

PyTorch has no FP8 grouped GEMM on a CPU, so a stand-in with the kernel's demands takes its operator there, and a layer
that is told it lies on an H200 takes the grouped way: layouts, offsets, padding and scales are tested without a GPU.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from narrowgate.precision import GemmConfig, LinearConfig, NarrowgateError
from narrowgate.precision.capability import MOST_GROUPS, NAMED_DEVICES, grouped_obstacle
from narrowgate.precision.grouped import GroupedLinear, dense_grouped_linear, lower_grouped
from narrowgate.precision.grouped_operands import Forward, prepare_matrices, prepare_rows
from narrowgate.precision.grouped_rows import STEP, Groups, group_bits
from narrowgate.precision.layer import layer_state
from narrowgate.precision.observer import Observer, observe
from narrowgate.precision.quantization import quantize
from narrowgate.precision.spec import Spec
from narrowgate.precision.stochastic import random_bits
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
H200 = NAMED_DEVICES["h200"]
E, K, N = 4, 24, 12
#: Ends of the experts' rows: ragged with an empty one, one expert with all, none at all, a row each, multiples of 16.
OFFSETS = {
    "ragged": [5, 5, 12, 45],
    "all in one": [0, 37, 37, 37],
    "no rows": [0, 0, 0, 0],
    "a row each": [1, 2, 3, 4],
    "aligned": [16, 48, 64, 96],
}


def gemm(first: str, second: str) -> GemmConfig:
    return GemmConfig(Spec.parse(first), Spec.parse(second))


def config(input: str, weight: str, grad: str) -> LinearConfig:
    return LinearConfig(gemm(input, weight), gemm(grad, weight), gemm(grad, input))


CONFIGS = {
    "row": config(*["fp8_e4m3/row"] * 3),
    "row, stochastic": config("fp8_e4m3/row+sr", "fp8_e4m3/row+sr", "fp8_e4m3/row+sr"),
    "tensor": config(*["fp8_e4m3"] * 3),
    "tensor, powers of two": config("fp8_e4m3+pow2", "fp8_e4m3+pow2", "fp8_e4m3/row+pow2"),
    "tensor, stochastic": config("fp8_e4m3+sr", "fp8_e4m3", "fp8_e4m3+sr"),
    "delayed": config(*["fp8_e4m3+delayed(2)"] * 3),
    "delayed, stochastic": config("fp8_e4m3+delayed(2)+sr", "fp8_e4m3+delayed(2)+sr", "fp8_e4m3+delayed(3)+sr"),
    "bf16 wgrad": LinearConfig(gemm("fp8_e4m3/row", "fp8_e4m3/row"), gemm("fp8_e4m3/row", "fp8_e4m3"), GemmConfig()),
    "bf16 dgrad": LinearConfig(gemm("fp8_e4m3", "fp8_e4m3/row"), GemmConfig(), gemm("fp8_e4m3/row", "fp8_e4m3")),
    "bf16 stochastic": LinearConfig(gemm("fp8_e4m3", "fp8_e4m3"), gemm("bf16+sr", "bf16+sr"), gemm("bf16+sr", "bf16")),
}


def stand_in(a, b, scale_a, scale_b, offs=None, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    """What PyTorch's FP8 grouped GEMM computes, after its checks (GroupedBlas.cpp, GroupMMCommon.cuh)."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.shape[-1] % 16 == b.shape[-1] % 16 == b.shape[-2] % 16 == 0
    assert a.stride(-1) == 1
    assert b.stride(-2) == 1
    assert a.stride(0) % 16 == b.stride(-1) % 16 == 0
    assert offs.dtype == torch.int32
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    assert bias is None
    assert scale_result is None
    assert out_dtype == torch.bfloat16
    starts = [0, *offs.tolist()[:-1]]
    groups = list(zip(starts, offs.tolist(), strict=True))
    x, w = a.float(), b.float()
    if b.dim() == 3:
        assert scale_a.shape == (a.shape[0],)
        assert scale_b.shape == (b.shape[0], b.shape[2])
        parts = [x[i:j] @ w[e] * scale_a[i:j, None] * scale_b[e] for e, (i, j) in enumerate(groups)]
        return torch.cat(parts).to(torch.bfloat16)
    assert all(j > i and i % 16 == j % 16 == 0 for i, j in groups)
    scale_a, scale_b = scale_a.view(len(groups), -1, 1), scale_b.view(len(groups), 1, -1)
    assert (scale_a.shape[1], scale_b.shape[2]) == (a.shape[0], b.shape[1])
    parts = [x[:, i:j] @ w[i:j] * scale_a[e] * scale_b[e] for e, (i, j) in enumerate(groups)]
    return torch.stack(parts).to(torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def fp8_grouped_gemm_on_the_cpu():
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_grouped_mm", stand_in, "CPU")
        yield


def layer(name: str, *, grouped: bool, bias: bool = True, shape: tuple[int, int] = (K, N)) -> GroupedLinear:
    torch.manual_seed(2)
    module = GroupedLinear(E, *shape, bias=bias)
    lower_grouped(module, CONFIGS[name], name="experts")
    layer_state(module).here = H200 if grouped else NAMED_DEVICES["cpu"]
    return module


def rows(name: str, width: int = K, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows over many magnitudes, each expert's own, and their offsets."""
    ends = torch.tensor(OFFSETS[name], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(int(ends[-1]), width, generator=generator)
    x = x * torch.exp(2 * torch.randn(len(x), 1, generator=generator))
    return x.to(torch.bfloat16), ends


def step(run, x: torch.Tensor, ends: torch.Tensor, module: nn.Module | None = None) -> list[torch.Tensor]:
    """Output and all gradients; of the Parameters of ``module`` where ``run`` is none itself."""
    module = module or run
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        y = run(x, ends)
    grad = torch.linspace(-1, 2, y.numel(), device=x.device).view(y.shape).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], grad)]


def alike(found: list[torch.Tensor], expected: list[torch.Tensor], unrounded: float = 0.0) -> None:
    """Equal but for the order of sums and one rounding to BF16; ``unrounded``: largest addend not rounded to BF16."""
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype
        size = want.detach().float().nan_to_num().abs().max() if want.numel() else 0.0
        near = 2e-5 * float(size) + 2**-8 * unrounded
        torch.testing.assert_close(got, want, rtol=2**-7, atol=near, equal_nan=True)


# Rows in groups.


@pytest.mark.parametrize("name", OFFSETS)
def test_padded_groups_hold_their_rows_and_zeros_and_start_at_multiples_of_16(name):
    x, ends = rows(name, 3)
    groups = Groups(ends, len(x))
    padded, stops = groups.pad(x), groups.padded_ends.tolist()
    assert len(padded) == groups.padded_rows <= len(x) + STEP * (E + 1)
    assert padded.shape[0] % STEP == 0
    start = 0
    for part, stop in zip(x.split(groups.sizes()), stops, strict=True):
        assert stop % STEP == 0
        assert stop - start == max(STEP, -(-len(part) // STEP) * STEP)
        assert torch.equal(padded[start : start + len(part)], part)
        assert not padded[start + len(part) : stop].any()
        start = stop
    assert not padded[start:].any()


def test_no_way_to_fill_groups_outgrows_the_padded_tensor():
    for total in range(40):
        for first in range(total + 1):
            for second in range(first, total + 1):
                groups = Groups(torch.tensor([first, second, total], dtype=torch.int32), total)
                assert int(groups.padded_ends[-1]) <= groups.padded_rows


@pytest.mark.parametrize("width", [1, 5, 8, 24])
def test_a_groups_rows_draw_the_bits_of_its_own_matrix(width):
    keys = torch.tensor([7, -3, 1 << 40, 99])
    groups = Groups(torch.tensor(OFFSETS["ragged"], dtype=torch.int32), 45)
    bits = group_bits(keys, groups.group, groups.place, width)
    for key, part, size in zip(keys, bits.split(groups.sizes()), groups.sizes(), strict=True):
        assert torch.equal(part, random_bits(key, (size, width), "cpu"))


# Operands.


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("expression", ["/row", "", "/row+pow2", "/row+sr", "+sr"])
def test_codes_and_scales_are_each_experts_own_bit_for_bit(expression, offsets):
    spec = f"fp8_e4m3{expression}"
    x, ends = rows(offsets)
    if len(x) > 12:
        x[7, 3], x[9, 0] = torch.inf, torch.nan  # of expert 2, or of the only one
    module = layer("row", grouped=True)
    state = layer_state(module)
    state.config = config(spec, spec, spec)
    # Two draws: rounding by an operand's own stream keeps same_codes from joining the two uses.
    forward = Forward(state, Groups(ends, len(x)), torch.tensor(5 << 32), recording=False)
    operands = {
        ("fprop", 0, 1): prepare_rows(x, ("fprop", 0), ("wgrad", 1), forward)[0],
        ("wgrad", 1, 0): prepare_rows(x, ("fprop", 0), ("wgrad", 1), forward)[1],
        ("dgrad", 0, 1): prepare_rows(x, ("dgrad", 0), None, forward)[0],
        ("wgrad", 0, 0): prepare_rows(x, None, ("wgrad", 0), forward)[1],
    }
    weights = prepare_matrices(module.weight, ("fprop", 1), ("dgrad", 1), forward)
    stops = [0, *forward.groups.padded_ends.tolist()]
    for index, (part, weight) in enumerate(zip(x.split(forward.groups.sizes()), module.weight, strict=True)):
        begin = int(forward.groups.starts[index])
        seed = {use: forward.keys(use)[index] if "sr" in spec else None for use in SEEDS}
        for (path, position, dim), operand in operands.items():
            want = quantize(part, spec, dim=dim, seed=seed[path, position])
            same(operand.expert(index, begin, stops[index], len(part)), want)
        same(weights[0].expert(index, 0, 0, 0), quantize(weight, spec, dim=1, seed=seed["fprop", 1]))
        turned = weights[1].expert(index, 0, 0, 0)
        want = quantize(weight, spec, dim=0, seed=seed["dgrad", 1])
        assert torch.equal(turned.data.view(torch.uint8), want.data.t().view(torch.uint8))
        assert torch.equal(turned.scale.flatten(), want.scale.flatten())


SEEDS = [("fprop", 0), ("fprop", 1), ("dgrad", 0), ("dgrad", 1), ("wgrad", 0), ("wgrad", 1)]


def same(found, want) -> None:
    assert found.scale.shape == want.scale.shape
    assert torch.equal(found.scale.isnan(), want.scale.isnan())
    assert torch.equal(found.scale.nan_to_num(), want.scale.nan_to_num())
    unequal = found.data.view(torch.uint8) != want.data.view(torch.uint8)
    assert not (unequal & ~want.dequantize().isnan()).any()


# The layer.


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("name", CONFIGS)
def test_grouped_products_are_those_of_one_expert_after_another(name, offsets):
    grouped, loop = layer(name, grouped=True), layer(name, grouped=False)
    for seed in range(2):
        x, ends = rows(offsets, seed=seed)
        alike(step(grouped, x, ends), step(loop, x, ends))
        for module in (grouped, loop):
            torch.optim.SGD(module.parameters(), lr=0.0).step()  # ends the step: histories roll, draws count anew
    ours, theirs = (layer_state(module).state_dict() for module in (grouped, loop))
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key


def test_a_non_finite_row_spoils_its_expert_and_no_other():
    x, ends = rows("ragged")
    x[8, 2] = torch.inf
    grouped, loop = layer("row", grouped=True), layer("row", grouped=False)
    found, expected = step(grouped, x, ends), step(loop, x, ends)
    alike(found, expected)
    assert found[0][8].isnan().all()
    assert found[0][:8].isfinite().all()
    assert found[2][2].isnan().any()
    assert found[2][[0, 1, 3]].isfinite().all()


def test_a_delayed_scale_counts_what_saturates_and_takes_in_no_expert_that_is_not_finite():
    grouped, loop = layer("delayed", grouped=True), layer("delayed", grouped=False)
    ours: dict[str, torch.Tensor] = {}
    for factor, last in ((1.0, 1.0), (100.0, 1.0), (1000.0, torch.inf), (1.0, 1.0)):
        x, ends = rows("ragged")
        x = x * factor
        x[8, 2] = last
        alike(step(grouped, x, ends), step(loop, x, ends))
        ours, theirs = (layer_state(module).state_dict() for module in (grouped, loop))
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), key
        if factor == 100:
            assert ours["fprop.input.saturated"] > 0
        for module in (grouped, loop):
            layer_state(module).load_state_dict(ours)
            torch.optim.SGD(module.parameters(), lr=0.0).step()
    assert ours["fprop.input.history"].isfinite().all()
    assert ours["fprop.input.history"].max() > 1000


def test_experts_without_rows_have_zero_gradients():
    x, ends = rows("ragged")
    for module in (layer("row", grouped=True), layer("bf16 wgrad", grouped=True)):
        _, _, weight, bias = step(module, x, ends)
        assert not weight[1].any()
        assert not bias[1].any()
        assert weight[0].any()


@pytest.mark.parametrize("shape", [(16, 32), (7, 5), (1, 40)])
def test_sizes_that_no_kernel_takes_are_padded(shape):
    x, ends = rows("ragged", shape[0])
    found = step(layer("row", grouped=True, shape=shape), x, ends)
    alike(found, step(layer("row", grouped=False, shape=shape), x, ends))


def test_what_needs_no_gradient_gets_none_and_evaluation_records_nothing():
    x, ends = rows("ragged")
    module = layer("delayed", grouped=True)
    module.weight.requires_grad_(False)
    y = module(x.requires_grad_(), ends)
    (dx,) = torch.autograd.grad(y.sum(), [x])
    assert dx.shape == x.shape
    before = layer_state(module).state_dict()
    module.eval()
    with torch.inference_mode():
        assert module(x, ends).shape == (45, N)
    assert all(torch.equal(before[key], value) for key, value in layer_state(module).state_dict().items())


def test_a_second_derivative_and_offsets_that_do_not_fit_are_refused():
    x, ends = rows("ragged")
    module = layer("row", grouped=True)
    (dx,) = torch.autograd.grad(module(x.requires_grad_(), ends).sum(), [x])
    assert not dx.requires_grad
    with pytest.raises(NarrowgateError, match="layer 'experts': a low-precision layer has no second derivative"):
        torch.autograd.grad(module(x, ends).sum(), [x], create_graph=True)
    for wrong in ([5, 3, 12, 45], [5, 5, 12, 44], [-1, 5, 12, 45]):
        with pytest.raises(RuntimeError, match="expected offsets that rise from 0 to T"):
            module(x, torch.tensor(wrong))


def test_an_observer_sees_the_same_numerics():
    x, ends = rows("ragged")
    x[8, 2] = torch.inf
    found = []
    for grouped in (True, False):
        observer = Observer()
        with observe(observer):
            step(layer("tensor, stochastic", grouped=grouped), x, ends)
        found.append(observer.result())
    ours, theirs = found
    assert len(ours) == 6
    for a, b in zip(sorted(ours, key=key_of), sorted(theirs, key=key_of), strict=True):
        assert (a.path, a.operand, a.elements, a.nonfinite) == (b.path, b.operand, b.elements, b.nonfinite)
        assert a.sqnr_db == pytest.approx(b.sqnr_db)
        assert a.underflowed == pytest.approx(b.underflowed)


def key_of(numerics) -> tuple[str, str]:
    return numerics.path, numerics.operand


def test_a_copied_layer_keeps_to_its_device():
    x, ends = rows("ragged")
    module = layer("row", grouped=True)
    twin = copy.deepcopy(module)
    assert layer_state(twin).here == H200
    for got, want in zip(step(twin, x, ends), step(module, x, ends), strict=True):
        assert torch.equal(got, want)
    assert layer_state(twin.to("cpu")).here.kind == "cpu"  # it looks again when it is moved


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_grouped_bf16_products_are_those_of_one_expert_after_another(offsets, bias):
    torch.manual_seed(2)
    module = GroupedLinear(E, K, N, bias=bias)
    x, ends = rows(offsets)

    def grouped(x, ends):
        return dense_grouped_linear(x, module.weight, module.bias, ends)

    alike(step(grouped, x, ends, module), step(module, x, ends))


# Compilers.


@pytest.mark.parametrize("name", ["delayed, stochastic", "bf16 dgrad"])
def test_a_compiled_layer_has_no_break_and_one_graph_for_all_offsets(name):
    eager, traced = layer(name, grouped=True), layer(name, grouped=True)
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")

    def run(x, ends):
        torch._dynamo.mark_dynamic(x, 0)
        return compiled(x, ends)

    def both(offsets):
        x, ends = rows(offsets)
        alike(step(run, x, ends, traced), step(eager, x, ends))

    both("ragged")
    with torch._dynamo.config.patch(error_on_recompile=True):
        both("all in one")
        both("aligned")


def test_grouped_bf16_products_compile_without_a_break():
    module = GroupedLinear(E, K, N, bias=True)
    x, ends = rows("ragged")
    run = torch.compile(dense_grouped_linear, fullgraph=True, backend="aot_eager")

    def compiled(x, ends):
        return run(x, module.weight, module.bias, ends)

    alike(step(compiled, x, ends, module), step(module, x, ends))


def test_shapes_are_known_without_data():
    """Fake tensors have no numbers: whatever asked for a group's size would fail."""
    with FakeTensorMode():
        for name in ("row", "delayed", "bf16 wgrad"):
            module = layer(name, grouped=True)
            x, ends = torch.empty(45, K, dtype=torch.bfloat16), torch.empty(E, dtype=torch.int32)
            y, dx, dw, db = step(module, x, ends)
            assert (y.shape, dx.shape, dw.shape, db.shape) == ((45, N), (45, K), (E, N, K), (E, N))
            assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (*[torch.bfloat16] * 2, *[torch.float32] * 2)


# Which way.


def test_what_a_device_groups_and_why_not():
    cpu, h200, b200 = (NAMED_DEVICES[name] for name in ("cpu", "h200", "b200"))
    a100 = h200.__class__(name="NVIDIA A100", kind="cuda", capability=(8, 0))
    row, e5m2 = CONFIGS["row"], config("fp8_e4m3/row", "fp8_e4m3/row", "fp8_e5m2/row")
    assert grouped_obstacle(row, h200, 8) is None
    assert all(grouped_obstacle(c, h200, 8) is None for c in CONFIGS.values())
    assert grouped_obstacle(LinearConfig(), b200, 8) is None
    assert grouped_obstacle(row, cpu, 8) == "a CPU runs the reference, an expert at a time"
    assert "compute capability 9 and 10, not for NVIDIA A100" in grouped_obstacle(row, a100, 8)
    assert "row scales runs on Hopper only, not on NVIDIA B200" in grouped_obstacle(row, b200, 8)
    assert grouped_obstacle(e5m2, h200, 8) == "dgrad: the grouped GEMM multiplies E4M3 by E4M3, not fp8_e5m2"
    assert "at most 1023 experts" in grouped_obstacle(row, h200, MOST_GROUPS + 1)
    for spec, told in (
        ("fp8_e4m3/1x128", "row scales, not 1x128"),
        ("fp8_e4m3/row+clip(p=99)", "need to know how many there are"),
        ("fp8_e4m3/row+hadamard(16)", "need to know how many there are"),
        ("mxfp8", "E4M3 by E4M3, not mxfp8"),
        ("fp32", "no grouped GEMM multiplies fp32"),
    ):
        assert told in grouped_obstacle(config(*[spec] * 3), h200, 8)
