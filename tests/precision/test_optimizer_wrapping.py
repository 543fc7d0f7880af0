"""Optimizers with state in few bits as a training meets them: checkpoints, copies, hooks, schedules, misuse, a GPU."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from narrowgate.precision import NarrowgateError, NotBuiltError, call_key, optimizer_state, quantize, stream_key
from narrowgate.precision.optimizer_state import lower_state
from torch import nn
from torch.optim import Adam

from .test_optimizer_state import SPECS, Net, assert_same_run, backward, lowered, names_of, train

# Checkpoints and copies.


@pytest.mark.parametrize("spec", SPECS)
def test_a_resumed_run_repeats_one_that_never_stopped(spec):
    straight = Net()
    whole = lowered(straight, spec)
    train(straight, whole, range(2))
    buffer = io.BytesIO()
    torch.save({"model": straight.state_dict(), "optimizer": whole.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed = Net()
    resumed.load_state_dict(saved["model"])
    rest = lowered(resumed, spec)
    rest.load_state_dict(saved["optimizer"])
    for ours, theirs in zip(rest.state.values(), whole.state.values(), strict=True):
        assert {name: x.dtype for name, x in ours.items()} == {name: x.dtype for name, x in theirs.items()}
    assert_same_run(resumed, rest, straight, whole)
    train(straight, whole, range(2, 4))
    train(resumed, rest, range(2, 4))
    assert_same_run(resumed, rest, straight, whole)


@pytest.mark.parametrize("spec", ["fp8_e4m3/1x128", "fp8_e5m2/1x128+sr"])
def test_codes_survive_a_checkpoint_whatever_their_scales(spec):
    """A scale is saved as seven times itself, rounded, and loaded as a seventh of that: for many sizes of blocks."""
    model = nn.Linear(128, 4000, bias=False)
    optimizer = lowered(model, spec, betas=(0.0, 0.9))
    model.weight.grad = torch.randn(4000, 128) * torch.logspace(-18, 18, 4000)[:, None]
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    optimizer.load_state_dict(optimizer.state_dict())
    for name, value in optimizer.state[model.weight].items():
        assert torch.equal(value.float(), before[name].float()), name


@pytest.mark.parametrize("spec", ["bf16+sr", "fp8_e4m3/1x128+sr"])
def test_checkpoints_of_fp32_state_load_and_ours_load_without_us(spec):
    model, plain_model = Net(), Net()
    plain, ours = Adam(plain_model.parameters(), lr=0.01), lowered(model, spec)
    train(plain_model, plain, range(2))
    ours.load_state_dict(plain.state_dict())
    for state, theirs in zip(ours.state_dict()["state"].values(), plain.state.values(), strict=True):
        nearest = spec.removesuffix("+sr")
        for name in ("exp_avg", "exp_avg_sq"):
            x = theirs[name]
            eight = "fp8" in spec and x.numel() >= 4096
            expected = quantize(x, nearest, dim=-1).dequantize() if eight or "bf16" in spec else x
            if eight and name == "exp_avg_sq":
                expected = torch.where((expected == 0) & (x > 0), state[name], expected)
            assert torch.equal(state[name].float(), expected)
    train(model, ours, range(2, 4))
    back = Adam(plain_model.parameters(), lr=0.01)
    back.load_state_dict(ours.state_dict())
    assert {x.dtype for state in back.state.values() for x in state.values()} == {torch.float32}
    train(plain_model, back, range(4, 5))


def test_state_that_was_there_before_is_kept_rounded():
    model = Net()
    optimizer = Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    before = optimizer.state[model.wide.weight]["exp_avg"].clone()
    lower_state(optimizer, "bf16+sr", names=names_of(model))
    assert torch.equal(optimizer.state[model.wide.weight]["exp_avg"], before.bfloat16())


def test_copies_and_pickles_go_on_alike():
    model = Net()
    optimizer = lowered(model, "fp8_e4m3/1x128+sr")
    train(model, optimizer, range(2))
    twin, copied = copy.deepcopy((model, optimizer))
    buffer = io.BytesIO()
    torch.save((model, optimizer), buffer)
    buffer.seek(0)
    third, unpickled = torch.load(buffer, weights_only=False)
    for net, its in ((model, optimizer), (twin, copied), (third, unpickled)):
        train(net, its, range(2, 4))
    assert_same_run(twin, copied, model, optimizer)
    assert_same_run(third, unpickled, model, optimizer)


# Around the step.


def test_hooks_schedules_closures_and_scalers_see_one_step(monkeypatch):
    monkeypatch.setattr(optimizer_state, "BUCKET", 1)
    model = Net()
    optimizer = lowered(model, "bf16+sr")
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(0))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(len(o.param_groups[0]["params"])))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> float:
        optimizer.zero_grad()
        backward(model, 0)
        return 1.5

    assert optimizer.step(closure) == 1.5
    schedule.step()
    assert seen == [0, 4]
    assert optimizer.param_groups[0]["lr"] == 0.005
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)  # type: ignore[attr-defined]
    before = [parameter.clone() for parameter in model.parameters()]
    model.wide.weight.grad = torch.full_like(model.wide.weight, torch.inf)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.filterwarnings("error")
def test_a_schedule_may_be_there_before():
    models = Net(), Net()
    plain = Adam(models[0].parameters(), lr=0.01)
    early = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = lower_state(plain, "bf16+sr", names=names_of(models[0]), seed=3)
    late = torch.optim.lr_scheduler.StepLR(lowered(models[1], "bf16+sr"), 1, 0.5)
    for model, its, schedule in ((models[0], optimizer, early), (models[1], late.optimizer, late)):
        for number in range(3):
            train(model, its, range(number, number + 1))
            schedule.step()
    assert optimizer.state[models[0].wide.weight]["exp_avg"].dtype == torch.bfloat16
    assert_same_run(models[0], optimizer, models[1], late.optimizer)


def test_a_group_that_is_added_later_is_stored_alike():
    model, extra = Net(), nn.Parameter(torch.ones(70, 70))
    optimizer = lowered(model, "bf16+sr")
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(70, 70)
    optimizer.step()
    assert optimizer.state[extra]["exp_avg"].dtype == torch.bfloat16


def test_fp32_changes_nothing():
    optimizer = Adam(Net().parameters())
    assert lower_state(optimizer, "fp32") is optimizer
    assert type(optimizer) is Adam


# What is refused.


class Clipped(Adam):
    """Limits the norm over all gradients, so what it does to one parameter depends on the others."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        return Adam.step.__wrapped__(self, closure)  # type: ignore[attr-defined]


class Nested(Adam):
    """Calls a step that has hooks."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, "SGD keeps 'momentum_buffer' for every element, expected exp_avg and"),
        (torch.optim.Adamax, {}, "Adamax keeps 'exp_inf' for every element"),
        (Adam, {"amsgrad": True}, "Adam keeps 'max_exp_avg_sq' for every element"),
        (torch.optim.LBFGS, {}, "LBFGS cannot keep its state in bf16: a step on dense parameters"),
        (torch.optim.SparseAdam, {}, "SparseAdam cannot keep its state in bf16"),
        (
            Clipped,
            {},
            "Clipped cannot keep its state in bf16: its step depends on which parameters it updates together",
        ),
        (Nested, {}, "Nested cannot keep its state in bf16: its step calls that of another optimizer"),
    ],
)
def test_an_optimizer_whose_state_is_not_known_is_refused_untouched(kind, options, text):
    Adam(Net().parameters())
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    with pytest.raises(NarrowgateError, match="^" + text) as caught:
        lower_state(optimizer, "bf16")
    assert "\n" not in str(caught.value)
    assert type(optimizer) is kind
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), Net().parameters(), strict=True))


def test_other_misuse_is_one_clear_line():
    model = Net()
    optimizer = lowered(model, "bf16")
    with pytest.raises(NarrowgateError, match="stored as bf16 already"):
        lower_state(optimizer, "bf16")
    with pytest.raises(NarrowgateError, match=r"'0\.0': found torch\.bfloat16, expected FP32 parameters"):
        lower_state(Adam(Net().bfloat16().parameters()), "bf16+sr")
    replaced = Adam(model.parameters())
    replaced.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(NarrowgateError, match="step was replaced on the instance"):
        lower_state(replaced, "bf16")
    with pytest.raises(NarrowgateError, match=r"found a Net, expected a torch\.optim\.Optimizer"):
        lower_state(model, "bf16")  # type: ignore[arg-type]
    for spec in ("fp8_e4m3", "fp8_e4m3/row", "fp8_e4m3/128x128", "nvfp4", "mxfp8/32x32", "fp8_e4m3/1x128+clip(p=99)"):
        with pytest.raises(NotBuiltError, match="is not built yet, only fp32, bf16"):
            lower_state(Adam(model.parameters()), spec)


def test_keys_reach_the_kernels_at_aligned_addresses(monkeypatch):
    seen = []
    original = optimizer_state.store

    def spied(name, values, spec, place, key):
        if key is not None:
            seen.append(key.data_ptr() % 16)
        return original(name, values, spec, place, key)

    model = Net()
    optimizer = lowered(model, "bf16+sr")
    monkeypatch.setattr(optimizer_state, "store", spied)
    backward(model, 0)
    optimizer.step()
    assert len(seen) == 2 * len(list(model.parameters()))
    assert not any(seen)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": True, "capturable": True}])
@pytest.mark.parametrize("spec", ["bf16+sr", "fp8_e4m3/1x128", "fp8_e4m3/1x128+sr"])
def test_a_gpu_stores_what_quantizing_by_hand_makes_of_its_moments(spec, options):
    generator = torch.Generator().manual_seed(0)
    pairs = [(nn.Parameter(x.cuda()), nn.Parameter(x.cuda())) for x in (torch.ones(48, 130), torch.ones(7))]
    ours = lower_state(Adam([p for p, _ in pairs], lr=0.1, **options), spec, seed=3)
    plain = Adam([q for _, q in pairs], lr=0.1, **options)
    for step in range(3):
        for p, q in pairs:
            p.grad = torch.randn(p.shape, generator=generator).cuda()
            q.grad = p.grad.clone()
        ours.step()
        plain.step()
        for index, (p, q) in enumerate(pairs):
            assert torch.equal(p, q)
            for moment in ("exp_avg", "exp_avg_sq"):
                x = plain.state[q][moment]
                if spec == "bf16+sr" or x.numel() >= 4096:
                    key = call_key(stream_key(3, f"0.{index}", "optimizer", moment), step + 1)
                    stored = ours.state_dict()["state"][index][moment].float()
                    y = quantize(x.cpu(), spec, dim=-1, seed=key).dequantize().cuda()
                    x.copy_(torch.where((y == 0) & (x > 0), stored, y) if moment == "exp_avg_sq" else y)
                    assert torch.equal(stored, x)


def assert_replays(warm: int, **options: Any) -> None:
    """A step that was captured in a CUDA graph after ``warm`` others does on each replay what one outside does."""
    group = [nn.Parameter(torch.ones(64, 128, device="cuda")) for _ in range(2)]
    optimizers = [lower_state(Adam([p], lr=0.1, capturable=True, **options), "bf16+sr", seed=1) for p in group]
    for parameter, optimizer in zip(group, optimizers, strict=True):
        parameter.grad = torch.linspace(-1, 1, parameter.numel(), device="cuda").view(parameter.shape)
        for _ in range(warm):
            optimizer.step()  # compiles, and makes the state
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        optimizers[0].step()
    for _ in range(3):
        graph.replay()
        optimizers[1].step()
    torch.cuda.synchronize()
    assert torch.equal(*group)
    states = [next(iter(optimizer.state.values())) for optimizer in optimizers]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.gpu
def test_a_captured_step_is_replayed_on_the_stored_moments():
    assert_replays(1)


@pytest.mark.parametrize(
    ("fused", "spec", "gpu", "slower"),
    [(None, "bf16+sr", True, True), (False, "bf16", True, True), (True, "bf16+sr", True, False),
     (None, "fp8_e4m3/1x128+sr", True, False), (None, "bf16+sr", False, False)],
)  # fmt: skip
def test_a_step_that_bf16_moments_make_slower_is_warned_of(monkeypatch, recwarn, fused, spec, gpu, slower):
    monkeypatch.setattr(optimizer_state, "_on_gpu", lambda parameter: gpu)
    lower_state(Adam([nn.Parameter(torch.ones(64, 128))], fused=fused), spec)
    found = [str(w.message) for w in recwarn if issubclass(w.category, RuntimeWarning)]
    assert len(found) == slower
    assert all("Adam is not fused" in text and "fused=True" in text for text in found)
