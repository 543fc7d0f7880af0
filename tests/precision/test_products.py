"""Targets besides nn.Linear: batched products, attention's projections, grouped experts."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from narrowgate.precision import GemmConfig, LinearConfig, NarrowgateError, lower_linear
from narrowgate.precision.attention import LowPrecisionAttention, attention_obstacle, lower_attention
from narrowgate.precision.grouped import GroupedLinear, lower_grouped
from narrowgate.precision.layer import LowPrecisionLayer, layer_state, restore_layer
from narrowgate.precision.matmul import MatMul, lower_matmul
from narrowgate.precision.quantization import quantize
from narrowgate.precision.spec import Spec
from torch import nn


def config(input: str, weight: str, grad: str) -> LinearConfig:
    i, w, g = map(Spec.parse, (input, weight, grad))
    return LinearConfig(GemmConfig(i, w), GemmConfig(g, w), GemmConfig(g, i))


BF16 = LinearConfig()
CONFIGS = {
    "tensor": config("fp8_e4m3", "fp8_e4m3", "fp8_e5m2"),
    "row": config("fp8_e4m3/row", "fp8_e4m3/row", "fp8_e5m2/row"),
    "stochastic": config("fp8_e4m3/row+sr", "fp8_e4m3/row", "fp8_e5m2/row+sr"),
    "delayed": config("fp8_e4m3+delayed(2)", "fp8_e4m3+delayed(2)", "fp8_e5m2+delayed(2)"),
    "delayed, stochastic": config("fp8_e4m3+delayed(2)+sr", "fp8_e4m3+delayed(2)", "fp8_e5m2+delayed(2)+sr"),
    "block": config("fp8_e4m3/1x128", "fp8_e4m3/128x128", "fp8_e4m3/1x128"),
    "mxfp8": config("mxfp8", "mxfp8/32x32", "mxfp8_e5m2"),
    "nvfp4": config("nvfp4+hadamard(16)", "nvfp4+hadamard(16)", "nvfp4+sr+hadamard(16)"),
}
TOLERANCE = {"nvfp4": 0.3, "block": 0.06}


def backward(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    grad = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
    return list(torch.autograd.grad(out, inputs, grad))


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    return got.shape == want.shape and bool((got - want).norm() <= tolerance * want.norm())


# Batched products.


def matmul(name: str) -> MatMul:
    module = MatMul()
    lower_matmul(module, CONFIGS[name], name="mm")
    return module


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batched_product_stays_within_the_formats_error_forward_and_backward(name):
    a, b = leaves((3, 20, 48), (3, 48, 33))
    low, exact = matmul(name)(a, b), MatMul()(a, b)
    for got, want in zip((low, *backward(low, [a, b])), (exact, *backward(exact, [a, b])), strict=True):
        assert close(got, want, TOLERANCE.get(name, 0.1))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("first", "second"), [((2, 0, 48), (2, 48, 33)), ((2, 0, 48), (48, 33)), ((0, 20, 48), (0, 48, 33))]
)
def test_a_product_of_no_rows_is_empty_and_its_gradients_are_zero(name, first, second):
    a, b = leaves(first, second)
    y = matmul(name)(a, b)
    assert y.shape == (a @ b).shape
    da, db = torch.autograd.grad(y.sum(), [a, b])
    assert (da.shape, db.shape) == (a.shape, b.shape)
    assert not db.any()


def test_each_matrix_of_a_batch_is_the_product_of_its_quantized_rows():
    a, b = leaves((3, 20, 48), (3, 48, 33))
    y = matmul("row")(a, b)
    for i in range(3):
        x = quantize(a[i], "fp8_e4m3/row", dim=1).dequantize().double()
        w = quantize(b[i], "fp8_e4m3/row", dim=0).dequantize().double()
        torch.testing.assert_close(y[i].double(), x @ w, rtol=1e-5, atol=1e-5)
    dy = torch.randn(3, 20, 33)
    da, db = torch.autograd.grad(y, [a, b], dy)
    for i in range(3):
        g = [quantize(dy[i], "fp8_e5m2/row", dim=d).dequantize().double() for d in (0, 1)]
        w = quantize(b[i], "fp8_e4m3/row", dim=1).dequantize().double()
        x = quantize(a[i], "fp8_e4m3/row", dim=0).dequantize().double()
        torch.testing.assert_close(da[i].double(), g[1] @ w.t(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(db[i].double(), x.t() @ g[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "second"),
    [((5, 8), (8, 6)), ((2, 3, 5, 8), (8, 6)), ((2, 1, 5, 8), (3, 8, 6)), ((5, 8), (4, 8, 6)), ((0, 5, 8), (0, 8, 6))],
)
def test_batch_dimensions_broadcast_as_in_torch_matmul(first, second):
    a, b = leaves(first, second)
    low, exact = matmul("row")(a, b), torch.matmul(a, b)
    for got, want in zip((low, *backward(low, [a, b])), (exact, *backward(exact, [a, b])), strict=True):
        assert close(got, want, 0.15)


def test_a_product_without_operands_to_train_keeps_nothing():
    a, b = torch.randn(2, 5, 8), torch.randn(2, 8, 6)
    with torch.inference_mode():
        assert matmul("row")(a, b).shape == (2, 5, 6)
    module = matmul("row")
    with torch.autocast("cpu", torch.bfloat16):
        assert module(a, b).dtype == torch.bfloat16
    with pytest.raises(NarrowgateError, match=r"mm: expected \[\.\.\., M, K\] and \[\.\.\., K, N\], found \[2, 5, 8\]"):
        module(a, torch.randn(2, 7, 6))


def test_a_compiled_product_is_the_eager_one():
    eager, traced = matmul("delayed, stochastic"), matmul("delayed, stochastic")
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        a, b = leaves((2, 5, 16), (2, 16, 8))
        one, two = eager(a, b), compiled(a, b)
        for got, want in zip((two, *backward(two, [a, b])), (one, *backward(one, [a, b])), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# Attention.


def attention(name: str | None, *, out: str | None = None, **options) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    module = nn.MultiheadAttention(32, 4, **options)
    nn.init.normal_(module.out_proj.bias) if module.out_proj.bias is not None else None
    if name is not None:
        lower_attention(module, CONFIGS.get(name, BF16), name="attn.in_proj")
        if out is not None:
            lower_linear(module.out_proj, CONFIGS[out], name="attn.out_proj")
    return module


ARGUMENTS = {
    "plain": {},
    "no weights": {"need_weights": False},
    "weights of every head": {"average_attn_weights": False},
    "boolean mask": {"attn_mask": torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)},
    "causal": {
        "attn_mask": torch.triu(torch.ones(6, 6, dtype=torch.bool), 1),
        "is_causal": True,
        "need_weights": False,
    },
    "mask of every head": {"attn_mask": torch.randn(12, 6, 6), "need_weights": False},
    "padding": {"key_padding_mask": torch.arange(6).expand(3, 6) >= torch.tensor([[6], [4], [2]])},
    "both": {
        "attn_mask": torch.triu(torch.ones(6, 6, dtype=torch.bool), 1),
        "key_padding_mask": torch.arange(6).expand(3, 6) >= torch.tensor([[6], [4], [2]]),
        "need_weights": False,
    },
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_attention_between_its_projections_is_pytorchs(arguments, batch_first):
    low, exact = attention("bf16", batch_first=batch_first), attention(None, batch_first=batch_first)
    (x,) = leaves((3, 6, 32) if batch_first else (6, 3, 32))
    for training in (True, False):
        low.train(training)
        exact.train(training)
        (y, w), (want, want_w) = low(x, x, x, **ARGUMENTS[arguments]), exact(x, x, x, **ARGUMENTS[arguments])
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(backward(y, [x])[0], backward(want, [x])[0], rtol=1e-4, atol=1e-5)
        if want_w is None:
            assert w is None
        else:
            torch.testing.assert_close(w, want_w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shapes", [((4, 32), (6, 32)), ((2, 4, 32), (2, 6, 32))])
@pytest.mark.parametrize("same_value", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention_and_single_sequences(shapes, same_value, bias):
    low, exact = attention("bf16", batch_first=True, bias=bias), attention(None, batch_first=True, bias=bias)
    q, k = leaves(*shapes)
    v = k if same_value else torch.randn_like(k)
    for got, want in zip(low(q, k, v), exact(q, k, v), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_both_projections_run_their_own_formats_forward_and_backward():
    (x,) = leaves((3, 6, 32))
    exact = attention(None, batch_first=True)
    outs = {}
    for formats in (("row", None), ("bf16", "row"), ("row", "row")):
        low = attention(formats[0], out=formats[1], batch_first=True)
        y, want = (module(x, x, x, need_weights=False)[0] for module in (low, exact))
        parameters = list(low.parameters())
        for got, reference in zip(backward(y, [x, *parameters]), backward(want, [x, *exact.parameters()]), strict=True):
            assert close(got, reference, 0.2)
        outs[formats] = y.detach()
        assert not torch.equal(y, want)
        assert close(y, want, 0.1)
    assert len({float(y.sum()) for y in outs.values()}) == 3


def test_evaluation_does_not_take_pytorchs_fast_path_around_the_recipe():
    x = torch.randn(3, 6, 32)
    low = attention("row", out="row", batch_first=True).eval()
    with torch.no_grad():
        fast = low(x, x, x, need_weights=False)[0]
    assert torch.equal(fast, low(x, x, x, need_weights=False)[0])
    assert not torch.equal(fast, attention(None, batch_first=True).eval()(x, x, x, need_weights=False)[0])


def test_dropout_of_attention_draws_from_the_generator():
    x = torch.randn(3, 6, 32)
    low = attention("bf16", dropout=0.5, batch_first=True)
    a, b = low(x, x, x)[0], low(x, x, x)[0]
    assert not torch.equal(a, b)
    low.eval()
    assert torch.equal(low(x, x, x)[0], low(x, x, x)[0])


def test_attention_keeps_its_state_dict_and_comes_back():
    low, plain = attention("row", out="row"), attention(None)
    assert list(low.state_dict()) == list(plain.state_dict())
    x = torch.randn(6, 3, 32)
    want = plain(x, x, x)[0]
    twin = pickle.loads(pickle.dumps(copy.deepcopy(low)))
    assert isinstance(twin, LowPrecisionAttention)
    assert torch.equal(twin(x, x, x)[0], low(x, x, x)[0])
    restore_layer(low.out_proj)
    restore_layer(low)
    assert type(low) is nn.MultiheadAttention
    assert torch.equal(low(x, x, x)[0], want)


def test_what_attention_cannot_do_is_said():
    assert attention_obstacle(nn.MultiheadAttention(32, 4)) is None
    assert "kdim or vdim" in attention_obstacle(nn.MultiheadAttention(32, 4, kdim=16))
    assert "add_bias_kv" in attention_obstacle(nn.MultiheadAttention(32, 4, add_bias_kv=True))
    with pytest.raises(NarrowgateError, match=r"layer 'a\.in_proj': add_bias_kv and add_zero_attn are not lowered"):
        lower_attention(nn.MultiheadAttention(32, 4, add_zero_attn=True), CONFIGS["row"], name="a.in_proj")
    low, x = attention("row"), torch.randn(6, 3, 32)
    with pytest.raises(NarrowgateError, match=r"attn_mask: expected \[6, 6\] or \[12, 6, 6\], found \[5, 6\]"):
        low(x, x, x, attn_mask=torch.zeros(5, 6))
    with pytest.raises(NarrowgateError, match=r"key_padding_mask: expected \[3, 6\]"):
        low(x, x, x, key_padding_mask=torch.zeros(6, 3, dtype=torch.bool))


def test_compiled_attention_is_the_eager_one():
    name = "delayed, stochastic"
    eager, traced = (attention(name, out=name, batch_first=True) for _ in range(2))
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        (x,) = leaves((2, 5, 32))
        one, two = (m(x, x, x, need_weights=False)[0] for m in (eager, compiled))
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(backward(two, [x]), backward(one, [x]), rtol=1e-4, atol=1e-5)


# Experts.

OFFSETS = torch.tensor([5, 5, 12, 16], dtype=torch.int32)


def experts(name: str | None, *, bias: bool = False) -> GroupedLinear:
    torch.manual_seed(2)
    module = GroupedLinear(4, 24, 12, bias=bias)
    if name is not None:
        lower_grouped(module, CONFIGS[name], name="experts")
    return module


@pytest.mark.parametrize("bias", [True, False])
def test_every_row_meets_its_experts_matrix(bias):
    module, x = experts(None, bias=bias), torch.randn(16, 24)
    y = module(x, OFFSETS)
    expert = torch.searchsorted(OFFSETS, torch.arange(16), right=True)
    for row, e in enumerate(expert.tolist()):
        want = F.linear(x[row], module.weight[e], module.bias[e] if bias else None)
        torch.testing.assert_close(y[row], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_stay_within_the_formats_error_and_empty_groups_get_zero_gradients(name):
    (x,) = leaves((16, 24))
    low, exact = experts(name, bias=True), experts(None, bias=True)
    y, want = low(x, OFFSETS), exact(x, OFFSETS)
    got = (y, *backward(y, [x, *low.parameters()]))
    for ours, theirs in zip(got, (want, *backward(want, [x, *exact.parameters()])), strict=True):
        assert close(ours, theirs, TOLERANCE.get(name, 0.12))
    assert got[2][1].abs().max() == 0  # the weight of the expert without rows


def test_each_expert_is_quantized_by_itself():
    module, x = experts("tensor"), torch.randn(16, 24)
    y = module(x, OFFSETS)
    quantized = quantize(x[5:12], "fp8_e4m3").dequantize() @ quantize(module.weight[2], "fp8_e4m3").dequantize().t()
    torch.testing.assert_close(y[5:12], quantized, rtol=1e-5, atol=1e-5)


def test_no_two_experts_draw_the_same_random_bits():
    module = experts("stochastic")
    with torch.no_grad():
        module.weight.copy_(module.weight[:1].expand_as(module.weight))
    x = torch.randn(4, 24).repeat(4, 1)
    y = module(x, torch.tensor([4, 8, 12, 16]))
    assert not torch.equal(y[:4], y[4:8])


def test_offsets_that_do_not_fit_are_named():
    module, x = experts("row"), torch.randn(16, 24)
    with pytest.raises(NarrowgateError, match=r"offsets that rise from 0 to 16, found \[5, 3, 12, 16\]"):
        module(x, torch.tensor([5, 3, 12, 16]))
    with pytest.raises(NarrowgateError, match=r"expected rows \[T, 24\] and offsets \[4\], found \[16, 24\] and \[3\]"):
        module(x, torch.tensor([5, 12, 16]))


@pytest.mark.parametrize("make", [lambda: matmul("row"), lambda: attention("row"), lambda: experts("row")])
def test_lowering_twice_is_refused_and_restoring_gives_the_class_back(make):
    module = make()
    lower = {"LowPrecisionMatMul": lower_matmul, "LowPrecisionAttention": lower_attention}.get(
        type(module).__name__, lower_grouped
    )
    with pytest.raises(NarrowgateError, match="low-precision already"):
        lower(module, CONFIGS["row"], name="x")
    assert "fprop=fp8_e4m3/row" in repr(module)
    original = layer_state(module).original
    restore_layer(module)
    assert type(module) is original
    assert not isinstance(module, LowPrecisionLayer)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["row", "delayed, stochastic", "block", "mxfp8"])
def test_on_the_gpu_products_agree_with_the_same_codes_on_the_cpu(name, compiled):
    a, b = leaves((3, 32, 48), (3, 48, 64))
    host, device = matmul(name), matmul(name).cuda()
    run = torch.compile(device, fullgraph=True) if compiled else device
    c, d = (t.detach().cuda().requires_grad_() for t in (a, b))
    y, z = host(a, b), run(c, d)
    grad = torch.randn(y.shape)
    wants = (y, *torch.autograd.grad(y, [a, b], grad))
    for want, got in zip(wants, (z, *torch.autograd.grad(z, [c, d], grad.cuda())), strict=True):
        assert close(got.cpu(), want, 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [attention, experts])
def test_on_the_gpu_attention_and_experts_train_as_on_the_cpu(kind):
    host = kind("delayed")
    device = copy.deepcopy(host).cuda()
    for _ in range(2):
        if kind is attention:
            x = torch.randn(6, 3, 32)
            want, got = host(x, x, x)[0], device(*[x.cuda()] * 3)[0]
        else:
            x = torch.randn(16, 24)
            want, got = host(x, OFFSETS), device(x.cuda(), OFFSETS.cuda())
        assert close(got.cpu(), want, 2e-2)
        for module, y in ((host, want), (device, got)):
            y.sum().backward()
            torch.optim.SGD(module.parameters(), lr=0.0).step()
    assert all(value.is_cuda for value in layer_state(device).state_dict().values())
