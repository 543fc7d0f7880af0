"""Each backend against our own layers on a GPU: outputs, gradients, checkpoints, autocast, compile."""

from __future__ import annotations

import copy

import pytest
import torch
from narrowgate.precision import current_device, sqnr_db
from narrowgate.precision.backends import LayerFacts, get_backend
from torch import nn

pytestmark = pytest.mark.gpu

K, N, ROWS = 512, 768, (4, 250)
_TENSOR = ("tensor", "tensor_pow2", "tensor_bf16_wgrad", "fprop_only")
CASES = [
    *(("torchao", name) for name in (*_TENSOR, "row", "row_with_gw_hp")),
    *(("transformer_engine", name) for name in (*_TENSOR, "block")),
]


@pytest.fixture
def ready():
    """Return a backend by name, or skip with what it says is missing; refuse what it cannot express here."""

    def get(name, config):
        backend = get_backend(name)
        there, reason = backend.available()
        if not there:
            pytest.skip(reason)
        device = current_device("cuda")
        unable = backend.inexpressible(config, LayerFacts("x", K, N), device)
        if unable:
            pytest.skip(str(unable))
        if not all(backend.support(gemm, device).native for _, gemm in config.gemms()):
            pytest.skip(f"{device.name} only emulates it")
        return backend

    return get


@pytest.fixture
def pair(ready, configs):
    """Return (our own layer, the backend's), of the same values."""

    def make(name, case, dtype=torch.bfloat16):
        backend = ready(name, configs[case])
        ours = nn.Linear(K, N, device="cuda", dtype=dtype)
        theirs = copy.deepcopy(ours)
        get_backend("native").lower(ours, configs[case], name="x")
        backend.lower(theirs, configs[case], name="x")
        return ours, theirs

    return make


def _compare(expected, actual, at_least):
    for (what, a), (_, b) in zip(expected.tensors(), actual.tensors(), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype, what
        assert sqnr_db(a.float(), b.float()) > at_least, what


@pytest.mark.parametrize(("name", "case"), CASES)
def test_output_and_gradients_agree_with_our_own_layers(pair, run_layer, name, case):
    ours, theirs = pair(name, case)
    _compare(run_layer(ours, rows=ROWS), run_layer(theirs, rows=ROWS), 38)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_fp32_weights_under_autocast(pair, run_layer, name, case):
    ours, theirs = pair(name, case, torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected, actual = run_layer(ours, rows=ROWS), run_layer(theirs, rows=ROWS)
    assert actual.y.dtype == torch.bfloat16
    assert actual.dw.dtype == torch.float32
    _compare(expected, actual, 27)  # torchao rounds its input to BF16 before it quantizes


@pytest.mark.parametrize("name", ["torchao", "transformer_engine"])
def test_a_bf16_checkpoint_loads_both_ways_and_an_optimizer_stays_valid(pair, run_layer, name):
    _, theirs = pair(name, "tensor")
    plain = nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0)
    before = run_layer(theirs, rows=ROWS)
    optimizer.step()
    after = run_layer(theirs, rows=ROWS)
    assert not torch.equal(before.y, after.y)
    assert list(theirs.state_dict()) == ["weight", "bias"]
    plain.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(run_layer(theirs, rows=ROWS).y, after.y)


@pytest.mark.parametrize("name", ["torchao", "transformer_engine"])
@pytest.mark.parametrize("rows", [(1,), (17,), (3, 5)])
def test_odd_row_counts(pair, run_layer, name, rows):
    ours, theirs = pair(name, "tensor")
    _compare(run_layer(ours, rows=rows), run_layer(theirs, rows=rows), 38)


@pytest.mark.parametrize("name", ["torchao", "transformer_engine"])
def test_evaluation_and_inference_mode(pair, name):
    ours, theirs = pair(name, "tensor")
    x = torch.randn(64, K, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        assert sqnr_db(ours(x).float(), theirs(x).float()) > 38


@pytest.mark.parametrize("name", ["torchao", "transformer_engine"])
def test_compiled_agrees_with_eager(pair, run_layer, name):
    _, theirs = pair(name, "tensor")
    plain = nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    plain.load_state_dict(theirs.state_dict())
    model = nn.Sequential(theirs, nn.GELU())
    compiled = torch.compile(model, fullgraph=name == "torchao")  # Transformer Engine breaks the graph
    x = torch.randn(64, K, device="cuda", dtype=torch.bfloat16)

    def run(module, linear):
        inner = x.clone().requires_grad_()
        y = module(inner)
        y.float().square().sum().backward()
        return [t.float() for t in (y.detach(), inner.grad, linear.weight.grad)]

    exact, eager = run(nn.Sequential(plain, nn.GELU()), plain), run(model, theirs)
    theirs.weight.grad = None
    traced = run(compiled, theirs)
    for reference, a, b in zip(exact, eager, traced, strict=True):
        # Compiled code keeps the GELU's gradient unrounded, so amax, scale and thereby codes may differ by a step:
        # as near as two quantizations of one tensor are, nearer than either is to BF16.
        assert sqnr_db(a, b) > sqnr_db(reference, a)


def test_delayed_scales_of_transformer_engine_follow_the_data(ready, configs):
    backend = ready("transformer_engine", configs["delayed"])
    model = nn.Sequential(nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False)).to("cuda", torch.bfloat16)
    plain = copy.deepcopy(model)
    for index, layer in enumerate(model.children()):
        backend.lower(layer, configs["delayed"], name=str(index))
    backend.attach(model, [configs["delayed"]])
    x = torch.randn(512, K, device="cuda", dtype=torch.bfloat16)
    y = model(x)
    for _ in range(4):
        model.zero_grad()
        y = model(x)
        y.float().square().mean().backward()
    plain(x).float().square().mean().backward()
    assert sqnr_db(plain(x).float(), y.float()) > 20
    expected, actual = (next(m.parameters()).grad for m in (plain, model))
    assert expected is not None
    assert actual is not None
    assert sqnr_db(expected.float(), actual.float()) > 15
    backend.detach(model)
