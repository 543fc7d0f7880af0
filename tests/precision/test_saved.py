"""Saved activations in eager mode: gradients against hand-written backwards, and what is left alone."""

from __future__ import annotations

import copy
import io

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowgate.precision import saved
from narrowgate.precision.config import GemmConfig, LinearConfig
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.linear import lower_linear
from narrowgate.precision.saved import decode_saved, encode_saved, keep_saved, release_saved
from narrowgate.precision.saved_formats import pays, saved_bytes, unsupported_save
from narrowgate.precision.spec import Spec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROW = "fp8_e4m3/row+pow2"
D, H, ROWS = 32, 64, 96


class Gate(nn.Module):
    """out(LayerNorm(silu(gate x) * up x)): a gate, a norm and three layers."""

    def __init__(self, width: int = D, hidden: int = H) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.norm, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(F.silu(self.gate(x)) * self.up(x)))


def rounded(x: Tensor) -> Tensor:
    """FP8 E4M3 in rows, scales the next power of two over amax / 448, by ml_dtypes."""
    values = x.detach().float().numpy()
    scale = np.exp2(np.ceil(np.log2(np.abs(values).max(-1, keepdims=True) / np.float32(448))))
    codes = (values / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return torch.from_numpy(codes * scale).float().to(x.dtype)


def by_hand(model: Gate, x: Tensor, dy: Tensor, keep) -> dict[str, Tensor]:
    """Gradients of the parameters where autograd's saved activations go through ``keep``."""
    wg, wu, wo = model.gate.weight, model.up.weight, model.out.weight
    g, u = x @ wg.T, x @ wu.T
    s = g * torch.sigmoid(g)
    p = s * u
    mean = p.mean(-1, keepdim=True)
    rstd = (p.var(-1, unbiased=False, keepdim=True) + model.norm.eps).rsqrt()
    n = (p - mean) * rstd * model.norm.weight + model.norm.bias
    grads = {"out.weight": dy.T @ keep(n)}
    dn = dy @ wo
    hat = (keep(p) - mean) * rstd
    grads |= {"norm.weight": (dn * hat).sum(0), "norm.bias": dn.sum(0)}
    dn = dn * model.norm.weight
    dp = rstd * (dn - dn.mean(-1, keepdim=True) - hat * (dn * hat).mean(-1, keepdim=True))
    du, ds = dp * keep(s), dp * keep(u)
    sig = torch.sigmoid(keep(g))
    dg = ds * sig * (1 + keep(g) * (1 - sig))
    return grads | {"gate.weight": dg.T @ x, "up.weight": du.T @ x}


def run(model: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, D, generator=generator), torch.randn(ROWS, D, generator=generator)


@pytest.fixture
def packed(monkeypatch) -> list[Tensor]:
    """Every tensor that is encoded from here on."""
    found: list[Tensor] = []

    def encode(x, spec, **options):
        found.append(x)
        return encode_saved(x, spec, **options)

    monkeypatch.setattr(saved, "encode_saved", encode)
    return found


def test_gradients_are_those_of_a_backward_that_reads_rounded_tensors(batch):
    x, dy = batch
    model = Gate()
    torch.nn.init.uniform_(model.norm.weight, 0.5, 2)
    before, exact = run(model, x, dy)
    keep_saved(model, ROW)
    after, grads = run(model, x, dy)
    assert torch.equal(before, after)
    with torch.no_grad():
        expected, plain = by_hand(model, x, dy, rounded), by_hand(model, x, dy, lambda t: t)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(exact[name], plain[name], rtol=2e-5, atol=2e-5)
        if name != "norm.bias":
            assert (grad - exact[name]).norm() > 1e-3 * exact[name].norm()


def test_bf16_keeps_half_of_fp32(batch):
    x, dy = batch
    model = Gate()
    keep_saved(model, "bf16")
    _, grads = run(model, x, dy)
    with torch.no_grad():
        expected = by_hand(model, x, dy, lambda t: t.bfloat16().float())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "text", ["bf16", "fp8_e4m3", "fp8_e5m2/row", "fp8_e4m3/1x128", "fp8_e4m3/128x128", "fp8_e4m3/1x32", "mxfp8"]
)
def test_every_format_comes_back_near_in_shape_and_with_the_bytes_it_says(text):
    spec = Spec.parse(text)
    x = torch.randn(3, 70, 200) * torch.logspace(-3, 3, 70)[:, None]
    parts = encode_saved(x, spec)
    for ours, fused in zip(parts, encode_saved(x, spec, kernels=False), strict=True):
        assert torch.equal(ours.reshape(-1).view(torch.uint8), fused.reshape(-1).view(torch.uint8))
    assert sum(part.numel() * part.element_size() for part in parts) == saved_bytes(x.shape, spec)
    back = decode_saved(parts, spec, x.dtype)
    assert back.shape == x.shape
    assert back.dtype == x.dtype
    error = (back - x).norm() / x.norm()
    assert 1e-4 < error < (0.08 if "e5m2" in text else 0.04)


def test_a_transposed_tensor_comes_back_with_its_strides(batch):
    x, _ = batch
    model = nn.Sequential(nn.Linear(D, H), Transposed())
    keep_saved(model, ROW)
    y = model(x)
    node = y.grad_fn
    assert node is not None
    with torch.no_grad():
        kept = node._saved_result
    assert kept.stride() == y.stride() == (1, H)
    torch.testing.assert_close(kept, rounded(y), rtol=0, atol=0)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t().sigmoid()


def test_parameters_inputs_masks_statistics_and_small_tensors_are_left_alone(packed):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.scale = nn.Linear(D, 3 * D), nn.Parameter(torch.rand(64, D))
            self.register_buffer("table", torch.rand(64, D))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(2, 48, 3, 1, D).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v).reshape(ROWS, D)
            y = y[:64] * self.scale * self.table
            y = torch.where(y > 0, y, 0.1 * y)
            return F.log_softmax(y, -1) * y.norm(dim=-1, keepdim=True)

    model = Mixed()
    keep_saved(model, ROW)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(ROWS, D, requires_grad=True))
    out.float().sum().backward()
    assert packed
    places = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    for x in packed:
        assert x.dtype in (torch.float32, torch.bfloat16)
        assert x.shape[-1] == D, "only rows of features"
        assert x.untyped_storage().data_ptr() not in places
        assert not torch.allclose(x.float().exp().sum(-1), torch.ones(x.shape[:-1]), atol=1e-2), "a log-softmax"
    weight = model.qkv.weight.detach().bfloat16()
    assert not any(x.shape in (weight.shape, weight.t().shape) for x in packed), "a weight cast by autocast"


def test_values_that_several_operations_save_are_kept_once(packed, batch):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(D, H), nn.LayerNorm(H), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).view(4, -1, H)
            return self.norm(y) + self.second(y) + F.silu(y)  # one tensor, whole and flattened

    model = Twice()
    keep_saved(model, ROW)
    model(batch[0]).sum().backward()
    assert len(packed) == 1


def test_another_tensor_in_the_same_place_is_not_taken_for_the_old_one():
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, H)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.layer(x))

    model = Step()
    keep_saved(model, ROW)
    for seed in range(20):  # the allocator reuses what the step before has freed
        x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(seed))
        y = model(x)
        with torch.no_grad():
            h = rounded(model.layer(x))
            sig = torch.sigmoid(h)
            expected = (sig * (1 + h * (1 - sig))).sum(0)
        y.sum().backward()
        torch.testing.assert_close(model.layer.bias.grad, expected, rtol=1e-4, atol=1e-4)
        model.zero_grad()


def low_precision(model: nn.Module) -> nn.Module:
    row = Spec.parse("fp8_e4m3/row")
    gemm = GemmConfig(row, row)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            lower_linear(module, LinearConfig(fprop=gemm, dgrad=gemm, wgrad=gemm), name=name)
    return model


def test_operands_of_low_precision_layers_are_kept_as_they_are(packed, batch):
    x, dy = batch
    model = low_precision(Gate())
    _, exact = run(model, x, dy)
    keep_saved(model, ROW)
    _, grads = run(model, x, dy)
    assert len(packed) == 4, "g, u, silu(g) and the norm's input: not what layers multiply"
    assert torch.equal(grads["out.weight"], exact["out.weight"])
    assert not torch.equal(grads["norm.weight"], exact["norm.weight"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_repeats_its_forward_from_what_it_was(packed, batch, reentrant):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(D, D), Gate()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    model = Outer()
    exact = run(model, *batch)
    keep_saved(model, ROW)
    again = run(model, *batch)
    assert packed == []
    assert torch.equal(exact[0], again[0])
    for name, grad in again[1].items():
        assert torch.equal(grad, exact[1][name])


def test_a_checkpoint_around_the_model_keeps_working(batch):
    x, dy = batch
    model = Gate()
    exact = run(model, x, dy)[1]
    keep_saved(model, ROW)
    model.zero_grad()
    checkpoint(model, x, use_reentrant=False).backward(dy)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, exact[name])


def test_a_second_derivative_is_one_clear_error(batch):
    x = batch[0].clone().requires_grad_()
    model = Gate()
    keep_saved(model, ROW)
    with pytest.raises(NarrowgateError, match=r"saved as fp8_e4m3/row\+pow2, which has no second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_copies_pickles_and_states_are_the_models_own(batch):
    x, dy = batch
    model = Gate()
    state = model.state_dict()
    keep_saved(model, ROW)
    assert list(model.state_dict()) == list(state)
    expected = run(model, x, dy)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.gate.weight.mul_(2)  # its own forward runs, not the first model's
        assert not torch.equal(other(x), expected[0])
        with torch.no_grad():
            other.gate.weight.div_(2)
        found = run(other, x, dy)
        assert torch.equal(found[0], expected[0])
        for name, grad in found[1].items():
            assert torch.equal(grad, expected[1][name])


def test_release_leaves_nothing_behind(packed, batch):
    model = Gate()
    other = model.norm.forward
    model.norm.forward = lambda input: other(input) * 2
    own = model.norm.forward
    exact = run(model, *batch)
    keep_saved(model, ROW)
    assert torch.equal(run(model, *batch)[0], exact[0])
    release_saved(model)
    packed.clear()
    again = run(model, *batch)
    assert packed == []
    assert model.norm.forward is own
    assert not any("forward" in module.__dict__ for name, module in model.named_modules() if name != "norm")
    assert torch.equal(again[1]["gate.weight"], exact[1]["gate.weight"])


def test_without_gradients_nothing_is_saved(packed, batch):
    model = Gate()
    keep_saved(model, ROW)
    with torch.no_grad():
        model(batch[0])
    with torch.inference_mode():
        model(batch[0])
    assert packed == []


def test_what_is_not_built_is_refused():
    for text, instead in (
        ("nvfp4", "eight bits"), ("fp32", "eight bits"), ("fp8_e4m3+sr", "to nearest"),
        ("fp8_e4m3+delayed(4)", "dynamic"), ("fp8_e4m3/row+clip(p=99)", "unclipped"), ("bf16+sr", "eight bits"),
    ):  # fmt: skip
        assert instead in str(unsupported_save(Spec.parse(text)))
        with pytest.raises(NarrowgateError, match=instead):
            keep_saved(Gate(), text)


def test_what_is_too_small_does_not_pay():
    row = Spec.parse("fp8_e4m3/row")
    assert pays((64, 64), 2, row)
    assert not pays((4096,), 4, row)
    assert not pays((4096, 1), 4, row)
    assert not pays((8, 64), 2, row)
    assert not pays((64, 64), 2, Spec.parse("bf16"))
    assert pays((64, 64), 4, Spec.parse("bf16"))
