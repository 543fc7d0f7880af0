"""The low-precision linear layer: what it multiplies, and that it stays an nn.Linear to everything around it."""

import copy
import pickle

import pytest
import torch
import torch.utils.checkpoint
from narrowgate.precision import (
    GemmConfig,
    LinearConfig,
    LowPrecisionLinear,
    NarrowgateError,
    lower_linear,
    restore_linear,
)
from narrowgate.precision.layer import layer_state
from narrowgate.precision.linear import linear_state, load_linear_state
from narrowgate.precision.quantization import quantize
from narrowgate.precision.spec import Spec
from torch import nn


def config(input: str, weight: str, grad: str, *, wgrad: tuple[str, str] | None = None) -> LinearConfig:
    i, w, g = map(Spec.parse, (input, weight, grad))
    wg = GemmConfig(*map(Spec.parse, wgrad)) if wgrad else GemmConfig(g, i)
    return LinearConfig(GemmConfig(i, w), GemmConfig(g, w), wg)


TENSOR = config("fp8_e4m3", "fp8_e4m3", "fp8_e5m2")
ROW = config("fp8_e4m3/row", "fp8_e4m3/row", "fp8_e5m2/row")
STOCHASTIC = config("fp8_e4m3/row", "fp8_e4m3/row", "fp8_e5m2/row+sr")
MIXED = config("fp8_e4m3/row", "fp8_e4m3/row", "fp8_e5m2/row", wgrad=("bf16", "bf16"))
CONFIGS = {
    "tensor": TENSOR,
    "row": ROW,
    "row, stochastic gradients": STOCHASTIC,
    "row, BF16 wgrad": MIXED,
    "block": config("fp8_e4m3/1x128", "fp8_e4m3/128x128", "fp8_e4m3/1x128"),
    "mxfp8": config("mxfp8", "mxfp8/32x32", "mxfp8_e5m2"),
    "nvfp4": config("nvfp4", "nvfp4/16x16", "nvfp4+sr", wgrad=("nvfp4+sr+hadamard(16)", "nvfp4+hadamard(16)")),
    "fp6": config("mxfp6_e2m3", "mxfp6_e2m3", "mxfp6_e3m2"),
}
#: Largest relative error of a GEMM, by mantissa bits of its coarser operand: uniform rounding error of both operands.
TOLERANCE = {"tensor": 0.08, "row": 0.08, "row, stochastic gradients": 0.1, "row, BF16 wgrad": 0.08, "block": 0.05,
             "mxfp8": 0.08, "nvfp4": 0.25, "fp6": 0.09}  # fmt: skip


def lowered(conf: LinearConfig, k: int = 48, n: int = 40, *, seed: int = 0, bias: bool = True) -> LowPrecisionLinear:
    torch.manual_seed(3)
    module = nn.Linear(k, n, bias=bias)
    lower_linear(module, conf, name="tower.0", seed=seed)
    assert isinstance(module, LowPrecisionLinear)
    return module


def run(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    return torch.randn(6, 7, 48), torch.randn(6, 7, 40)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_three_gemms_stay_within_the_formats_error(name, batch):
    low = lowered(CONFIGS[name])
    reference = copy.deepcopy(low)
    restore_linear(reference)
    for got, want in zip(run(low, *batch), run(reference, *batch), strict=True):
        error = (got - want).norm() / want.norm()
        assert error < TOLERANCE[name]


def test_each_gemm_multiplies_exactly_the_quantized_operands(batch):
    """The three products, written out from dequantized operands in float64."""
    x, dy = batch[0].flatten(0, 1), batch[1].flatten(0, 1)
    low = lowered(ROW, bias=False)
    w = low.weight.detach()
    y, dx, dw = run(low, x, dy)

    def value(t, spec, dim):
        return quantize(t, spec, dim=dim).dequantize().double()

    torch.testing.assert_close(
        y.double(), value(x, "fp8_e4m3/row", 1) @ value(w, "fp8_e4m3/row", 1).t(), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        dx.double(), value(dy, "fp8_e5m2/row", 1) @ value(w, "fp8_e4m3/row", 0), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        dw.double(), value(dy, "fp8_e5m2/row", 0).t() @ value(x, "fp8_e4m3/row", 0), rtol=1e-5, atol=1e-5
    )


def test_a_path_left_in_bf16_is_the_bf16_product(batch):
    low = lowered(MIXED, bias=False)
    x, dy = batch[0].flatten(0, 1), batch[1].flatten(0, 1)
    dw = run(low, x, dy)[2]
    torch.testing.assert_close(dw, (dy.bfloat16().t() @ x.bfloat16()).float(), rtol=2e-2, atol=1e-2)


def test_backward_keeps_one_byte_an_element_of_an_fp8_activation():
    saved = []
    x = torch.randn(64, 48, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        lowered(TENSOR)(x)
    activations = [t for t in saved if t.shape in ((64, 48), (48, 64))]
    assert [t.element_size() for t in activations] == [1]


def test_stochastic_rounding_draws_anew_each_training_call_and_repeats_under_its_seed(batch):
    first, second = lowered(STOCHASTIC, seed=5), lowered(STOCHASTIC, seed=5)
    a, b = run(first, *batch), run(first, *batch)
    assert not torch.equal(a[1], b[1])
    c, d = run(second, *batch), run(second, *batch)
    assert torch.equal(a[1], c[1])
    assert torch.equal(b[1], d[1])
    assert not torch.equal(a[1], run(lowered(STOCHASTIC, seed=6), *batch)[1])


def test_stochastic_rounding_leaves_the_global_generator_alone(batch):
    low = lowered(STOCHASTIC)
    before = torch.get_rng_state()
    run(low, *batch)
    assert torch.equal(before, torch.get_rng_state())


def test_evaluating_does_not_shift_the_stochastic_draws_of_training(batch):
    plain, evaluated = lowered(STOCHASTIC), lowered(STOCHASTIC)
    for module in (plain, evaluated):
        run(module, *batch)
    with torch.no_grad():
        evaluated(batch[0])
    evaluated.eval()
    evaluated(batch[0])
    evaluated.train()
    assert torch.equal(run(plain, *batch)[1], run(evaluated, *batch)[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_draws_of_the_forward(batch, reentrant):
    conf = config("fp8_e4m3/row+sr", "fp8_e4m3/row", "fp8_e5m2/row+sr")
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 40))
    for i in (0, 2):
        lower_linear(plain[i], conf, name=str(i))
    recomputed = copy.deepcopy(plain)
    x = batch[0].clone().requires_grad_()
    z = batch[0].clone().requires_grad_()
    for _ in range(2):  # two micro-batches
        plain(x).backward(batch[1])
        out = torch.utils.checkpoint.checkpoint(recomputed, z, use_reentrant=reentrant)
        out.backward(batch[1])
    assert torch.equal(x.grad, z.grad)
    for p, q in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_its_state_travels_by_itself_and_never_in_the_state_dict(batch):
    first = lowered(STOCHASTIC)
    run(first, *batch)
    resumed = lowered(STOCHASTIC)
    load_linear_state(resumed, linear_state(first))
    assert torch.equal(run(first, *batch)[1], run(resumed, *batch)[1])
    assert set(first.state_dict()) == {"weight", "bias"}


def test_lowering_keeps_parameters_hooks_and_type(batch):
    torch.manual_seed(3)
    module = nn.Linear(48, 40)
    seen = []
    module.register_forward_hook(lambda *_: seen.append("hook"))
    weight = module.weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    lower_linear(module, ROW)
    assert isinstance(module, nn.Linear)
    assert module.weight is weight
    assert list(module.state_dict()) == ["weight", "bias"]
    run(module, *batch)
    before = weight.detach().clone()
    optimizer.step()
    assert seen == ["hook"]
    assert not torch.equal(before, module.weight)


def test_restoring_gives_the_layer_back(batch):
    torch.manual_seed(3)
    module = nn.Linear(48, 40)
    want = run(module, *batch)
    lower_linear(module, ROW)
    restore_linear(module)
    assert type(module) is nn.Linear
    assert "_narrowgate" not in vars(module)
    for got, expected in zip(run(module, *batch), want, strict=True):
        assert torch.equal(got, expected)


class Tagged(nn.Linear):
    """A subclass that keeps nn.Linear's forward."""

    tag = "mine"


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def test_a_subclass_keeps_its_class_attributes_and_pickles(batch):
    module = Tagged(48, 40)
    lower_linear(module, ROW, name="t")
    assert isinstance(module, Tagged)
    assert module.tag == "mine"
    again = pickle.loads(pickle.dumps(module))
    assert isinstance(again, Tagged)
    assert isinstance(again, LowPrecisionLinear)
    assert torch.equal(again(batch[0]), module(batch[0]))
    restore_linear(module)
    assert type(module) is Tagged


def test_a_subclass_with_its_own_forward_is_refused():
    with pytest.raises(NarrowgateError, match=r"layer 'odd': OwnForward has a forward of its own"):
        lower_linear(OwnForward(4, 4), ROW, name="odd")


def test_lowering_twice_is_refused():
    with pytest.raises(NarrowgateError, match="low-precision already"):
        lower_linear(lowered(ROW), ROW, name="x")


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_independent_and_equal(clone, batch):
    module = lowered(STOCHASTIC)
    run(module, *batch)
    twin = clone(module)
    assert torch.equal(run(module, *batch)[1], run(twin, *batch)[1])
    run(twin, *batch)
    assert linear_state(module)["draw"] != linear_state(twin)["draw"]


@pytest.mark.parametrize("shape", [(48,), (0, 48), (1, 48), (13, 48), (2, 3, 5, 48)])
@pytest.mark.parametrize("name", ["tensor", "row", "block", "nvfp4"])
def test_any_number_of_rows_and_dimensions(name, shape):
    x = torch.randn(*shape, requires_grad=True)
    module = lowered(CONFIGS[name])
    y = module(x)
    assert y.shape == (*shape[:-1], 40)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert module.weight.grad is not None
    assert module.weight.grad.shape == module.weight.shape
    assert torch.isfinite(module.weight.grad).all()


@pytest.mark.parametrize(("k", "n"), [(1, 1), (7, 3), (33, 17), (130, 5)])
def test_any_width(k, n):
    module = lowered(ROW, k, n)
    x = torch.randn(9, k, requires_grad=True)
    y = module(x)
    y.sum().backward()
    reference = nn.functional.linear(x, module.weight, module.bias)
    assert (y - reference).norm() / reference.norm() < 0.15


def test_a_non_contiguous_input_gives_what_its_contiguous_copy_gives(batch):
    x = torch.randn(48, 42).t()
    module = lowered(ROW)
    assert not x.is_contiguous()
    assert torch.equal(module(x), module(x.contiguous()))


def test_a_frozen_weight_gets_no_gradient_and_a_frozen_input_none(batch):
    module = lowered(ROW)
    module.weight.requires_grad_(False)
    x = batch[0].clone().requires_grad_()
    module(x).backward(batch[1])
    assert module.weight.grad is None
    assert x.grad is not None
    module = lowered(ROW)
    module(batch[0]).backward(batch[1])
    assert module.weight.grad is not None


@pytest.mark.parametrize("shape", [(48,), (6, 48), (2, 3, 48)])
def test_hooks_on_its_result_survive_a_write_in_place(shape):
    """As FSDP2's, which gathers a weight for backward where what the layer returned gets its gradient."""
    ran = []
    y = lowered(ROW)(torch.randn(shape))
    y.register_hook(lambda grad: ran.append(grad.shape))
    expected = y.detach().relu()
    y.relu_()
    y.sum().backward()
    assert torch.equal(y, expected)
    assert ran == [y.shape]


def test_gradients_accumulate_over_micro_batches(batch):
    module = lowered(ROW)
    once = run(module, *batch)[2]
    x = batch[0]
    module(x).backward(batch[1])
    torch.testing.assert_close(module.weight.grad, 2 * once)


def test_autocast_decides_the_output_dtype_and_not_the_gemms(batch):
    module = lowered(ROW)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(batch[0])
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, module(batch[0]).to(torch.bfloat16), rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32


def test_inference_mode_works(batch):
    module = lowered(ROW)
    with torch.inference_mode():
        y = module(batch[0])
    assert torch.equal(y, module(batch[0]))


def test_a_weight_changed_in_place_is_seen(batch):
    module = lowered(ROW, bias=False)
    before = module(batch[0])
    with torch.no_grad():
        module.weight.mul_(2.0)
    torch.testing.assert_close(module(batch[0]), 2 * before)
    module.load_state_dict({"weight": torch.zeros(40, 48)})
    assert module(batch[0]).abs().max() == 0


def test_a_non_finite_row_poisons_itself_only():
    module = lowered(ROW, bias=False)
    x = torch.randn(4, 48)
    x[1, 5] = float("inf")
    y = module(x)
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()


def test_double_backward_says_so(batch):
    module = lowered(ROW)
    x = batch[0].clone().requires_grad_()
    with pytest.raises(NarrowgateError, match=r"layer 'tower\.0'.*no second derivative"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def test_a_wrong_input_width_names_the_layer():
    with pytest.raises(NarrowgateError, match=r"tower\.0: expected an input of \[\.\.\., 48\], found \[2, 47\]"):
        lowered(ROW)(torch.randn(2, 47))


@pytest.mark.parametrize("name", ["tensor", "row, stochastic gradients", "block", "nvfp4"])
def test_compiled_is_eager_without_a_graph_break(name, batch):
    eager, traced = lowered(CONFIGS[name]), lowered(CONFIGS[name])
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for got, want in zip(run(compiled, *batch), run(eager, *batch), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_meta_initialised_layers_can_be_lowered_and_materialised(batch):
    with torch.device("meta"):
        module = nn.Linear(48, 40)
    lower_linear(module, STOCHASTIC)
    module.to_empty(device="cpu")
    nn.init.normal_(module.weight)
    nn.init.zeros_(module.bias)
    assert all(t.isfinite().all() for t in run(module, *batch))


def test_weights_loaded_in_place_leave_the_state_where_the_layer_computes(monkeypatch):
    """FSDP2 that keeps shards on the CPU has Parameters there between steps, and computes elsewhere."""
    module, placed = lowered(STOCHASTIC), []
    state = layer_state(module)
    monkeypatch.setattr(state, "draw", state.draw.to("meta"))  # stands for the device that computes
    monkeypatch.setattr(state, "place", placed.append)
    module.load_state_dict(nn.Linear(48, 40).state_dict())
    assert placed == []
    module.load_state_dict(nn.Linear(48, 40, device="meta").state_dict(), assign=True)
    assert placed == [torch.device("meta")]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("compiled", [False, True])
def test_on_the_gpu_each_gemm_agrees_with_the_same_codes_on_the_cpu(name, compiled):
    torch.manual_seed(5)
    x, dy = torch.randn(160, 256), torch.randn(160, 128)
    low = lowered(CONFIGS[name], 256, 128)
    gpu = copy.deepcopy(low).cuda()
    call = torch.compile(gpu, fullgraph=True) if compiled else gpu
    for got, want in zip(run(call, x.cuda(), dy.cuda()), run(low, x, dy), strict=True):
        error = (got.cpu() - want).norm() / want.norm()
        # The same codes in another order of summation, and on Hopper's accumulator of 22 bits; a scale that Inductor
        # rounds differently by one unit moves a few codes by one step.
        assert error < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tensor", "row", "row, BF16 wgrad", "block"])
def test_on_hopper_fp8_gemms_run_natively(name):
    low = lowered(CONFIGS[name], 256, 128).cuda()
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        low(x).sum().backward()
    calls = sum(e.count for e in profile.key_averages() if e.key in ("aten::_scaled_mm", "aten::_scaled_mm_v2"))
    assert calls == sum(not gemm.high_precision for _, gemm in CONFIGS[name].gemms())


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k", "n"), [(1, 16, 16), (5, 7, 3), (33, 130, 17), (0, 64, 32), (257, 96, 200)])
@pytest.mark.parametrize("name", ["tensor", "row", "block"])
def test_on_the_gpu_odd_sizes_are_padded(name, m, k, n):
    low = lowered(CONFIGS[name], k, n)
    x, dy = torch.randn(m, k), torch.randn(m, n)
    gpu = copy.deepcopy(low).cuda()
    for got, want in zip(run(gpu, x.cuda(), dy.cuda()), run(low, x, dy), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(
            got.cpu(),
            want,
            rtol=1e-2,
            atol=1e-2 * max(1.0, float(want.abs().max().nan_to_num(0)) if want.numel() else 1.0),
        )
