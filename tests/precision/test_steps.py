"""Optimizer steps as layers see them: delayed scales and the numbering of stochastic draws."""

import copy
import pickle

import pytest
import torch
import torch.utils.checkpoint
from narrowgate.precision import GemmConfig, LinearConfig, LowPrecisionLinear, call_key, lower_linear, stream_key
from narrowgate.precision.layer import end_step, layer_state
from narrowgate.precision.linear import linear_state, load_linear_state
from narrowgate.precision.quantization import quantize
from narrowgate.precision.spec import Spec
from torch import nn


def config(input: str, weight: str, grad: str) -> LinearConfig:
    i, w, g = map(Spec.parse, (input, weight, grad))
    return LinearConfig(GemmConfig(i, w), GemmConfig(g, w), GemmConfig(g, i))


DELAYED = config("fp8_e4m3+delayed(3)", "fp8_e4m3+delayed(3)", "fp8_e5m2+delayed(3)")
STOCHASTIC = config("fp8_e4m3+sr", "fp8_e4m3", "fp8_e5m2+sr")


def lowered(conf: LinearConfig, *, bias: bool = False) -> LowPrecisionLinear:
    torch.manual_seed(3)
    module = nn.Linear(16, 8, bias=bias)
    lower_linear(module, conf, name="tower.0")
    assert isinstance(module, LowPrecisionLinear)
    return module


def sgd(module: nn.Module, lr: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def history(module: nn.Module, path: str = "fprop", operand: str = "input") -> list[float]:
    return layer_state(module).histories[path, operand].history.tolist()


def tensor(amax: float, rows: int = 4) -> torch.Tensor:
    x = torch.linspace(-1, 1, rows * 16).reshape(rows, 16)
    return x * amax


def train(module: nn.Module, amax: float, grad: float = 1.0) -> torch.Tensor:
    x = tensor(amax).requires_grad_()
    y = module(x)
    y.backward(torch.full_like(y, grad))
    return y.detach()


def test_every_operand_keeps_its_own_history_of_optimizer_steps():
    module = lowered(DELAYED)
    optimizer = sgd(module)
    for amax, grad in ((1.0, 4.0), (2.0, 8.0), (0.5, 2.0), (0.25, 1.0)):
        train(module, amax, grad)
        optimizer.step()
    assert history(module) == [0.25, 0.5, 2.0]
    assert history(module, "dgrad", "grad") == [1.0, 2.0, 8.0]
    assert history(module, "fprop", "weight") == [pytest.approx(float(module.weight.detach().abs().max()))] * 3


def test_the_scale_of_a_step_comes_from_the_steps_before_it():
    module = lowered(DELAYED)
    optimizer = sgd(module)
    train(module, 1.0)
    optimizer.step()
    got = train(module, 3.0)
    # Three times too large for the history: everything beyond 1 saturates in this step, and fits in the next.
    x = quantize(tensor(3.0), "fp8_e4m3", amax=torch.tensor(1.0)).dequantize()
    w = quantize(module.weight.detach(), "fp8_e4m3").dequantize()
    torch.testing.assert_close(got, x @ w.t(), rtol=1e-5, atol=1e-5)
    assert x.abs().max() == 1.0
    assert int(layer_state(module).histories["fprop", "input"].saturated) > 20
    optimizer.step()
    saturated = layer_state(module).histories["fprop", "input"].saturated.clone()
    x = quantize(tensor(3.0), "fp8_e4m3").dequantize()
    torch.testing.assert_close(train(module, 3.0), x @ w.t(), rtol=1e-5, atol=1e-5)
    assert layer_state(module).histories["fprop", "input"].saturated == saturated


def test_micro_batches_of_a_step_share_one_scale_and_enter_together():
    module = lowered(DELAYED)
    optimizer = sgd(module)
    train(module, 1.0)
    optimizer.step()
    one, two = train(module, 2.0), train(module, 2.0)
    assert torch.equal(one, two)
    train(module, 0.5)
    optimizer.step()
    assert history(module) == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_evaluation_reads_the_history_and_does_not_write_it(how):
    module = lowered(DELAYED)
    optimizer = sgd(module)
    train(module, 1.0)
    optimizer.step()
    before = linear_state(module)
    if how == "eval":
        module.eval()
        y = module(tensor(9.0))
        module.train()
    else:
        with getattr(torch, how)():
            y = module(tensor(9.0))
    assert y.abs().max() < 9
    assert all(torch.equal(before[key], value) for key, value in linear_state(module).items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_is_recorded_once(reentrant):
    plain, recomputed = (nn.Sequential(lowered(DELAYED), nn.Tanh()) for _ in range(2))
    optimizers = sgd(plain), sgd(recomputed)
    for amax in (1.0, 4.0, 2.0):
        for model, optimizer in zip((plain, recomputed), optimizers, strict=True):
            for part in (0.5, 1.0):
                x = tensor(amax * part).requires_grad_()
                checkpoint = torch.utils.checkpoint.checkpoint
                (model(x) if model is plain else checkpoint(model, x, use_reentrant=reentrant)).sum().backward()
            optimizer.step()
    assert torch.equal(plain[0].weight.grad, recomputed[0].weight.grad)
    states = linear_state(plain[0]), linear_state(recomputed[0])
    assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


def test_a_non_finite_amax_never_enters():
    module = lowered(DELAYED)
    optimizer = sgd(module)
    train(module, 1.0)
    optimizer.step()
    bad = tensor(1.0)
    bad[0, 0] = float("inf")
    assert module(bad).isnan().all()
    optimizer.step()
    assert history(module) == [1.0, 0.0, 0.0]
    assert train(module, 1.0).isfinite().all()


def test_a_step_that_the_grad_scaler_skips_joins_the_next():
    module = lowered(DELAYED)
    optimizer = sgd(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for amax, poison in ((1.0, 1.0), (4.0, float("inf")), (2.0, 1.0)):
        y = module(tensor(amax).requires_grad_())
        scaler.scale(y.sum() * poison).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert history(module) == [4.0, 1.0, 0.0]


def test_another_models_optimizer_ends_no_step():
    module, other = lowered(DELAYED), lowered(DELAYED)
    train(module, 1.0)
    sgd(other).step()
    assert history(module) == [0.0] * 3
    sgd(module).step()
    sgd(module).step()  # nothing ran in between
    assert history(module) == [1.0, 0.0, 0.0]


def test_weight_and_bias_may_have_an_optimizer_each():
    module = lowered(DELAYED, bias=True)
    optimizers = torch.optim.SGD([module.weight], lr=0.0), torch.optim.SGD([module.bias], lr=0.0)
    for amax in (1.0, 2.0):
        train(module, amax)
        for optimizer in optimizers:
            optimizer.step()
    assert history(module) == [2.0, 1.0, 0.0]


def test_a_frozen_layer_follows_the_optimizer_of_what_is_trained():
    module = lowered(DELAYED)
    module.weight.requires_grad_(False)
    adapter = nn.Linear(8, 8)
    train(nn.Sequential(module, adapter), 2.0)
    sgd(adapter).step()
    assert history(module) == [2.0, 0.0, 0.0]


def test_steps_without_a_torch_optimizer_are_ended_by_hand():
    model = nn.Sequential(lowered(DELAYED))
    train(model, 2.0)
    end_step(model)
    assert history(model[0]) == [2.0, 0.0, 0.0]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_have_histories_of_their_own_that_steps_reach(clone):
    module = lowered(DELAYED)
    train(module, 1.0)
    sgd(module).step()
    twin = clone(module)
    train(twin, 2.0)
    sgd(twin).step()
    assert history(twin) == [2.0, 1.0, 0.0]
    assert history(module) == [1.0, 0.0, 0.0]
    twin.eval()
    assert torch.equal(twin(tensor(1.0)), twin(tensor(1.0)))


def test_state_resumes_in_the_middle_of_a_step():
    module, resumed = lowered(DELAYED), lowered(DELAYED)
    train(module, 1.0)
    sgd(module).step()
    train(module, 5.0)
    load_linear_state(resumed, linear_state(module))
    for layer in (module, resumed):
        train(layer, 2.0)
        sgd(layer).step()
    assert history(resumed) == history(module) == [5.0, 1.0, 0.0]


@pytest.mark.parametrize("conf", [DELAYED, STOCHASTIC], ids=["delayed", "stochastic"])
def test_compiled_is_eager_over_steps_and_micro_batches(conf):
    eager, traced = lowered(conf), lowered(conf)
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    optimizers = sgd(eager, 0.1), sgd(traced, 0.1)
    for amaxes in ((1.0, 2.0), (8.0, 1.0), (1.0, 1.0)):
        for amax in amaxes:
            torch.testing.assert_close(train(compiled, amax), train(eager, amax), rtol=1e-5, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(eager.weight, traced.weight)
    for key, value in linear_state(eager).items():
        torch.testing.assert_close(linear_state(traced)[key], value, rtol=1e-5, atol=1e-5)


def test_inductor_keeps_the_histories_too():
    eager, traced = lowered(DELAYED), lowered(DELAYED)
    compiled = torch.compile(traced, fullgraph=True)
    for amax in (1.0, 3.0):
        torch.testing.assert_close(train(compiled, amax), train(eager, amax), rtol=1e-4, atol=1e-4)
        end_step(eager)
        end_step(traced)
    for key, value in linear_state(eager).items():
        torch.testing.assert_close(linear_state(traced)[key], value, rtol=1e-5, atol=1e-5)


def test_new_steps_do_not_recompile():
    compiles = 0

    def backend(graph, inputs):
        nonlocal compiles
        compiles += 1
        return graph

    module = lowered(config("fp8_e4m3+delayed(2)+sr", "fp8_e4m3+delayed(2)", "fp8_e5m2+delayed(2)+sr"))
    compiled, optimizer = torch.compile(module, backend=backend), sgd(module)
    for _ in range(3):
        train(compiled, 1.0)
        optimizer.step()
    assert compiles == 1


def test_a_compiled_optimizer_step_ends_the_step():
    module = lowered(DELAYED)
    optimizer = sgd(module)
    step = torch.compile(optimizer.step, backend="eager")
    for amax in (1.0, 2.0):
        train(module, amax)
        step()
    assert history(module) == [2.0, 1.0, 0.0]


def test_the_random_key_is_of_step_micro_batch_and_call():
    module = lowered(STOCHASTIC)
    optimizer = sgd(module)
    for step in range(3):
        for call in range(2):
            key = call_key(stream_key(0, "tower.0", "fprop", "input"), step, 0, call)
            x = quantize(tensor(1.0), "fp8_e4m3+sr", seed=key).dequantize()
            w = quantize(module.weight.detach(), "fp8_e4m3").dequantize()
            torch.testing.assert_close(train(module, 1.0), x @ w.t(), rtol=1e-5, atol=1e-5)
        optimizer.step()


def test_a_step_draws_the_same_however_many_forwards_the_step_before_had():
    one, two = lowered(STOCHASTIC), lowered(STOCHASTIC)
    train(one, 1.0)
    for _ in range(3):
        train(two, 1.0)
    for module in (one, two):
        sgd(module).step()
    assert torch.equal(train(one, 1.0), train(two, 1.0))


def test_a_forward_that_a_cuda_graph_replays_is_counted():
    """A replay runs what was captured on the tensors of then, and no Python: it reads one and writes another again."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 32)
    sr = Spec.parse("fp8_e4m3+sr")
    lower_linear(layer, LinearConfig(*[GemmConfig(sr, sr)] * 3), name="a")
    state = layer_state(layer)
    read = state.draw
    layer(torch.randn(4, 32))
    written = state.draw
    for expected in (1, 2, 3):
        written.copy_(read + 1)
        end_step(layer)
        assert state.draw is read
        assert int(read) == expected << 32
    end_step(layer)
    assert int(read) == 3 << 32, "a step without a forward is none"


def test_a_backward_after_somebody_elses_step_draws_as_its_forward_did():
    torch.manual_seed(0)
    sr = Spec.parse("fp8_e4m3+sr")
    layer, other, x = nn.Linear(32, 32), nn.Linear(4, 4), torch.randn(4, 32)
    lower_linear(layer, LinearConfig(*[GemmConfig(sr, sr)] * 3), name="a")
    layer.requires_grad_(False)
    grads = []
    for stepping in (False, True):
        layer_state(layer).load_state_dict({"draw": torch.zeros((), dtype=torch.int64)})
        y = layer(inner := x.clone().requires_grad_())
        if stepping:
            other(torch.randn(2, 4)).sum().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
        y.sum().backward()
        grads.append(inner.grad)
    assert torch.equal(*grads)


def test_an_old_forward_without_backward_does_not_confuse_a_recompute():
    """A reentrant region counts its forward when it is recomputed; a forward of the last step must not stand in."""
    plain, recomputed = lowered(STOCHASTIC), lowered(STOCHASTIC)
    for module in (plain, recomputed):
        train(module, 1.0)
        sgd(module).step()
    x = tensor(1.0).requires_grad_()
    want = plain(x)
    got = torch.utils.checkpoint.checkpoint(recomputed, x, use_reentrant=True)
    assert torch.equal(got, want)
    want.sum().backward()
    dx = x.grad.clone()
    x.grad = None
    got.sum().backward()
    assert torch.equal(x.grad, dx)


def test_a_checkpointed_region_inside_a_compiled_one_is_recorded_once():
    eager, traced = lowered(DELAYED), lowered(DELAYED)

    def region(x):
        return torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(traced(torch.tanh(t))), x, use_reentrant=False)

    compiled = torch.compile(region, fullgraph=True, backend="aot_eager")
    for amax in (1.0, 3.0, 2.0):
        grads = []
        for run in (lambda t: torch.tanh(eager(torch.tanh(t))), compiled):
            x = tensor(amax).requires_grad_()
            run(x).sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
        for layer in (eager, traced):
            end_step(layer)
    for key, value in linear_state(eager).items():
        torch.testing.assert_close(linear_state(traced)[key], value, rtol=1e-5, atol=1e-5)
