"""Moments in few bits: against a loop that quantizes by hand, in statistics, and in bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from narrowgate.precision import Shard, call_key, optimizer_state, quantize, stream_key
from narrowgate.precision.moments import Place, _stochastic_bf16, restore, store
from narrowgate.precision.optimizer_state import lower_state, state_bytes
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

SPECS = ["bf16", "bf16+sr", "fp8_e4m3/1x128", "fp8_e4m3/1x128+sr", "fp8_e5m2/1x32+pow2", "mxfp8+sr"]
STEPS = 4


class Net(nn.Module):
    """A weight [48, 130] that eight bits are kept for, with ragged last blocks; the others are too small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(130, 48)
        self.head = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wide(x)))


def names_of(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def lowered(model: nn.Module, spec: str, kind: Callable[..., Optimizer] = Adam, **options: Any) -> Optimizer:
    optimizer = kind(model.parameters(), **{"lr": 0.01, **options})
    return lower_state(optimizer, spec, names=names_of(model), seed=3)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 130, generator=generator) * torch.logspace(0, -4, 130)
    model(x).square().mean().backward()


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def by_hand(spec: str, kind: Callable[..., Optimizer], **options: Any) -> tuple[nn.Module, Optimizer]:
    """The plain optimizer, whose moments are quantized and dequantized between steps."""
    model = Net()
    optimizer = kind(model.parameters(), **{"lr": 0.01, **options})
    for step in range(STEPS):
        train(model, optimizer, range(step, step + 1))
        for name, parameter in model.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                if not spec.startswith("bf16") and parameter.numel() < 4096:
                    continue
                x = optimizer.state[parameter][moment]
                key = call_key(stream_key(3, name, "optimizer", moment), step + 1)
                y = quantize(x, spec, dim=-1, seed=key).dequantize()
                if moment == "exp_avg_sq" and not spec.startswith("bf16"):
                    ones = quantize(x, spec, dim=-1, seed=key)
                    smallest = torch.ones_like(ones.data.view(torch.uint8)).view(ones.data.dtype)
                    ones = type(ones)(smallest, ones.scale, None, ones.spec, ones.dim, ones.shape)
                    y = torch.where((y == 0) & (x > 0), ones.dequantize(), y)
                x.copy_(y)
    return model, optimizer


def assert_same_run(model: nn.Module, optimizer: Optimizer, other: nn.Module, reference: Optimizer) -> None:
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    mine, plain = optimizer.state_dict()["state"], reference.state_dict()["state"]
    for number, state in plain.items():
        assert list(mine[number]) == list(state)
        for name, value in state.items():
            assert torch.equal(mine[number][name].float(), value.float()), name


@pytest.mark.parametrize("spec", SPECS)
def test_moments_are_what_quantizing_by_hand_makes_of_them(spec):
    model = Net()
    optimizer = lowered(model, spec)
    train(model, optimizer)
    assert_same_run(model, optimizer, *by_hand(spec, Adam))


@pytest.mark.parametrize(
    ("kind", "options"),
    [(AdamW, {"weight_decay": 0.1}), (Adam, {"fused": True}), (Adam, {"foreach": True}), (torch.optim.NAdam, {})],
)
def test_so_are_those_of_other_optimizers_of_the_family_and_their_implementations(kind, options):
    model = Net()
    optimizer = lowered(model, "fp8_e4m3/1x128+sr", kind, **options)
    train(model, optimizer)
    assert isinstance(optimizer, kind)
    assert_same_run(model, optimizer, *by_hand("fp8_e4m3/1x128+sr", kind, **options))


def test_how_many_parameters_are_updated_at_a_time_changes_nothing(monkeypatch):
    models = Net(), Net()
    train(models[0], lowered(models[0], "bf16+sr"))
    monkeypatch.setattr(optimizer_state, "BUCKET", 200)
    train(models[1], lowered(models[1], "bf16+sr"))
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_a_step_keeps_fp32_moments_of_one_bucket_at_a_time(monkeypatch):
    monkeypatch.setattr(optimizer_state, "BUCKET", 200)
    seen: list[int] = []

    class Watching(Adam):
        def step(self, closure: Any = None) -> Any:
            wide = [s["exp_avg"] for s in self.state.values() if s and s["exp_avg"].dtype == torch.float32]
            seen.append(sum(x.numel() for x in wide))
            return Adam.step.__wrapped__(self)  # type: ignore[attr-defined]

    model = Net()
    optimizer = lowered(model, "bf16", Watching)
    train(model, optimizer, range(1))
    seen.clear()
    train(model, optimizer, range(1, 2))
    assert max(seen) == 48 * 130
    assert sum(seen) == sum(p.numel() for p in model.parameters())


# Statistics.


def test_stochastic_moments_are_right_on_average():
    """Binomial: the mean over n keys lies within 5 standard deviations of at most step / (2 sqrt(n))."""
    generator = torch.Generator().manual_seed(1)
    x, trials = torch.randn(32, 128, generator=generator), 400
    for spec, step in (("bf16+sr", 2.0**-7), ("fp8_e4m3/1x128+sr", 2.0**-2)):
        total = torch.zeros_like(x, dtype=torch.float64)
        for step_number in range(trials):
            key = torch.tensor(call_key(stream_key(0, "w", "optimizer", "exp_avg"), step_number))
            stored = store("exp_avg", x, quantize(x, spec, seed=0).spec, Place((32, 128), None), key)
            values = stored["exp_avg"].float()
            total += values * stored.get("exp_avg_scale", torch.ones(32, 1))
        error = (total / trials - x).abs()
        assert (error <= 5 * step * x.abs().clamp(min=x.abs().amax() * 2**-6) / (2 * math.sqrt(trials))).all(), spec
        assert error.amax() > 0


@pytest.mark.parametrize("spec", ["bf16", "fp8_e4m3/1x128"])
def test_a_second_moment_follows_where_it_is_rounded_stochastically_and_stands_still_where_to_nearest(spec):
    """From 4 toward 1 with beta2 = 0.999: after n steps 1 + 3 * 0.999**n. A block's largest element is exact anyway."""
    steps, place = 1500, Place((8, 128), None)
    target = torch.ones(8, 128)
    target[:, 0] = 8
    means = []
    for text in (spec, f"{spec}+sr"):
        chosen = quantize(target, text, seed=0).spec
        x = torch.full_like(target, 4).where(target == 1, target)
        for step in range(steps):
            x = 0.999 * x + 0.001 * target
            stored = store("exp_avg_sq", x, chosen, place, torch.tensor(step) if chosen.sr else None)
            x = restore("exp_avg_sq", stored, chosen, place)
        means.append(x[:, 1:].mean().item())
    assert means[0] == 4
    assert means[1] == pytest.approx(1 + 3 * 0.999**steps, rel=0.03)


def test_draws_differ_by_parameter_moment_and_step_and_leave_the_generator_alone():
    model = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)) for _ in range(2)])
    optimizer = lowered(model, "bf16+sr", betas=(0.5, 0.5))
    before = torch.get_rng_state()
    found: list[Tensor] = []
    for _ in range(2):
        for parameter in model:
            parameter.grad = torch.full_like(parameter, 1.003)
        optimizer.step()
        found += [optimizer.state[p][m].float() > 0.5 for p in model for m in ("exp_avg", "exp_avg_sq")]
    assert torch.equal(torch.get_rng_state(), before)
    patterns = {tuple(x.flatten().tolist()) for x in found[:4]}
    assert len(patterns) == 4
    again = lowered(copy.deepcopy(model), "bf16+sr")
    assert again is not optimizer


@pytest.mark.parametrize("spec", ["bf16+sr", "fp8_e4m3/1x128+sr", "fp8_e4m3/1x128"])
@pytest.mark.parametrize("rows", [(0, 20), (20, 33), (33, 33)])
def test_shards_of_rows_store_what_the_whole_stores_there(spec, rows):
    x = torch.randn(33, 3, 50)
    key = torch.tensor(123456789)
    spec = quantize(x, spec, seed=0).spec
    whole = store("exp_avg", x, spec, Place((33, 3, 50), None), key)
    first, last = rows
    place = Place((last - first, 3, 50), Shard((33, 3, 50), (first, 0, 0)))
    part = store("exp_avg", x[first:last], spec, place, key)
    for name, value in part.items():
        assert torch.equal(value.float(), whole[name][first:last].float())


def test_shards_of_columns_draw_by_the_unsharded_index_in_bf16():
    x, key, spec = torch.randn(8, 64), torch.tensor(5), quantize(torch.ones(1), "bf16+sr", seed=0).spec
    whole = store("exp_avg", x, spec, Place((8, 64), None), key)["exp_avg"]
    part = store("exp_avg", x[:, 16:40], spec, Place((8, 24), Shard((8, 64), (0, 16))), key)["exp_avg"]
    assert torch.equal(part, whole[:, 16:40])


def test_a_positive_second_moment_is_never_stored_as_zero():
    x = torch.logspace(0, -30, 128).repeat(32, 1)
    x[:, 5] = 0
    for text in ("fp8_e4m3/1x128", "fp8_e4m3/1x128+sr", "mxfp8"):
        spec = quantize(x, text, seed=0).spec
        stored = store("exp_avg_sq", x, spec, Place((32, 128), None), torch.tensor(1))
        assert ((stored["exp_avg_sq"].float() > 0) == (x > 0)).all(), text
        first = store("exp_avg", x, spec, Place((32, 128), None), torch.tensor(1))
        assert (first["exp_avg"].float() == 0).sum() > 32, text


def test_compiled_rounding_gives_the_same_bits():
    x, key = torch.randn(1000), torch.tensor(77)
    x[:3] = torch.tensor([torch.nan, torch.inf, -0.0])
    compiled = torch.compile(_stochastic_bf16, dynamic=True)
    ours, eager = compiled(x, key, 24), _stochastic_bf16(x, key, 24)
    assert ours[0].isnan()
    assert torch.equal(ours[1:].view(torch.int16), eager[1:].view(torch.int16))


def test_a_compiled_step_is_the_same_step():
    models = Net(), Net()
    train(models[0], lowered(models[0], "bf16+sr"))
    optimizer = lowered(models[1], "bf16+sr")
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(STEPS):
        optimizer.zero_grad()
        backward(models[1], number)
        step()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize("spec", ["bf16+sr", "fp8_e4m3/1x128"])
def test_it_converges_as_fp32_state_does(spec):
    """A regression down to its noise, a variance of 0.01."""
    final = []
    for state in ("fp32", spec):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(32, 160), nn.GELU(), nn.Linear(160, 1))
        target = torch.randn(32, 1) / 4
        optimizer = lower_state(Adam(model.parameters(), lr=4e-3), state, names=names_of(model))
        losses = []
        for _ in range(250):
            x = torch.randn(64, 32)
            loss = (model(x) - x @ target - 0.1 * torch.randn(64, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        final.append((sum(losses[:5]) / 5, sum(losses[-50:]) / 50))
    (first, plain), (_, ours) = final
    assert plain < first / 20
    assert ours < 1.1 * plain


# Memory.


@pytest.mark.parametrize(
    ("spec", "bytes_each"), [("bf16+sr", 2.0), ("fp8_e4m3/1x128", 1 + 4 / 128), ("mxfp8", 1 + 1 / 32)]
)
def test_state_takes_the_bytes_of_its_format(spec, bytes_each):
    model = nn.Linear(256, 64, bias=False)
    optimizer = lowered(model, spec)
    for _ in range(2):
        model.weight.grad = torch.randn(64, 256)
        optimizer.step()
        assert state_bytes(optimizer) == 2 * 64 * 256 * bytes_each + 4  # and the FP32 step


def test_small_parameters_keep_fp32_beside_eight_bits_but_not_beside_bf16():
    model = Net()
    optimizer = lowered(model, "fp8_e4m3/1x128")
    train(model, optimizer, range(1))
    dtypes = {name: optimizer.state[p]["exp_avg"].dtype for name, p in model.named_parameters()}
    assert dtypes.pop("wide.weight") == torch.float8_e4m3fn
    assert set(dtypes.values()) == {torch.float32}
    model = Net()
    optimizer = lowered(model, "bf16")
    train(model, optimizer, range(1))
    assert {optimizer.state[p]["exp_avg"].dtype for p in model.parameters()} == {torch.bfloat16}
