"""Adam that writes the FP8 codes of a weight in its own pass, against a step and the cast of its result, bit for bit.

Kernels run on a GPU or through Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from narrowgate.precision import AmaxHistory, Spec, weight_codes
from narrowgate.precision.config import GemmConfig, LinearConfig
from narrowgate.precision.delayed import roll
from narrowgate.precision.weight_codes import WeightCodes
from torch import nn

from .test_adam_kernel import DEVICE, kernel_test, reference, same

#: Weights [N, K]: of several tiles and programs, none of a tile's size, and odd N, K no multiple of 16.
SHAPES = [(64, 64), (128, 192), (33, 24), (1, 8), (37, 200), (65, 72)]


def config(weight: str = "fp8_e4m3+delayed(3)", other: str = "fp8_e4m3+delayed(3)") -> LinearConfig:
    spec, dgrad = Spec.parse(weight), Spec.parse(other)
    row = Spec.parse("fp8_e4m3")
    return LinearConfig(GemmConfig(row, spec), GemmConfig(row, dgrad), GemmConfig(row, row))


class Both:
    """One weight twice: stepped with its codes in one pass, and stepped, then cast as a forward would."""

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, spec: str = "fp8_e4m3+delayed(3)", sr: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(shape[0])
        self.weights = [torch.randn(shape, generator=generator).to(DEVICE)]
        self.grad = torch.randn(shape, generator=generator).to(DEVICE)
        self.moments = [[0.1 * self.grad.to(dtype), self.grad.square().to(dtype)]]
        self.weights.append(self.weights[0].clone())
        self.moments.append([x.clone() for x in self.moments[0]])
        self.config = config(spec, spec)
        self.histories = [AmaxHistory(3, DEVICE), AmaxHistory(3, DEVICE)]
        self.kept = [
            WeightCodes(self.config, nn.Parameter(w), h) for w, h in zip(self.weights, self.histories, strict=True)
        ]
        self.keys = torch.tensor([12345, -6789], device=DEVICE) if sr and dtype == torch.bfloat16 else None
        self.steps = 0

    def held(self, *entries: float, pending: float = -1.0) -> None:
        for history in self.histories:
            history.history.copy_(torch.tensor(entries))
            history.pending.fill_(pending)

    def step(self, *, scale: float | None = None, found: float | None = None, **options: Any) -> None:
        from narrowgate.precision.kernels.adam import AdamRule, AdamTensors, coefficients, launch_adam
        from narrowgate.precision.kernels.adam_codes import launch_adam_codes

        self.steps += 1
        options = {"lr": 0.1, "weight_decay": 0.0, "decoupled": True, "maximize": False, **options}
        decoupled, lr = options.pop("decoupled"), options["lr"]
        sr = self.keys is not None
        rule = AdamRule(0.9, 0.999, 1e-8, options["weight_decay"], decoupled, options["maximize"], sr)
        optional = [None if x is None else torch.tensor(x, device=DEVICE) for x in (scale, found)]
        steps = torch.tensor([float(self.steps)], device=DEVICE)
        row = coefficients(lr, steps, rule)[0]
        grads = [self.grad.clone(), self.grad.clone()]
        ours, theirs = (
            AdamTensors(w, g, *m, offset=0) for w, g, m in zip(self.weights, grads, self.moments, strict=True)
        )
        out = self.kept[0].out()
        launch_adam_codes(rule, ours, out, row, self.keys, *optional)
        if theirs.exp_avg.dtype == torch.bfloat16:
            launch_adam(rule, theirs, row, self.keys, *optional)
        else:
            lists = [[theirs.parameter], [theirs.grad], [theirs.exp_avg], [theirs.exp_avg_sq], [], [steps[0]]]
            options |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}
            reference(decoupled)(*lists, grad_scale=optional[0], found_inf=optional[1], **options)
        roll(self.histories)
        history = self.histories[0]
        history.pending.copy_(torch.maximum(history.pending, out.amax))
        history.saturated.add_(out.past[0])
        weight_codes._cast_into(self.weights[1], self.kept[1].buffers, self.kept[1].rows, self.kept[1].columns)
        same(*grads)

    def check(self) -> None:
        same(*self.weights)
        for mine, other in zip(*self.moments, strict=True):
            same(mine, other)
        for mine, other in zip(*(kept.buffers for kept in self.kept), strict=True):
            same(mine, other)
        same(self.kept[0].buffers[2].float(), self.kept[0].buffers[0].t().float().contiguous())
        out = self.kept[0].out()
        assert not out.workspace.any()
        assert out.past[1] == 0


@kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_scale_history_and_weight_are_those_of_a_step_and_a_cast(shape, dtype):
    both = Both(shape, dtype)
    both.held(2.0, 3.0, 1.0, pending=2.5)
    for _ in range(4):  # 3.0 drops out of the history
        both.step()
        both.check()
    assert both.histories[0].history[0] == both.histories[1].history[0] > 0


@kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1024, 64), (600, 200)])  # of sixteen tiles a program, all whole and not
def test_programs_of_a_large_weight_take_many_tiles_each(shape, dtype, monkeypatch):
    from narrowgate.precision.kernels import adam_codes

    monkeypatch.setattr(adam_codes, "_PROGRAMS", 1)
    both = Both(shape, dtype)
    both.held(1.0, 0.5, 0.25)
    for _ in range(2):
        both.step()
        both.check()
    assert both.histories[0].saturated > 0


@kernel_test
@pytest.mark.parametrize(
    ("entries", "pending"),
    [((3.0, 0.5, 1.0), -1.0), ((0.5, 1.0, 3.0), 2.0), ((0.5, 1.0, 3.0), 0.0), ((0.0, 0.0, 0.0), 1.5)],
)
def test_the_scale_comes_from_the_history_as_it_is_after_the_step(entries, pending):
    both = Both((40, 48), torch.bfloat16)
    both.held(*entries, pending=pending)
    both.step()
    both.check()
    rolled = [pending, *entries[:2]] if pending >= 0 else entries
    assert both.kept[0].buffers[1].item() == pytest.approx(max(rolled) / 448)


@kernel_test
@pytest.mark.parametrize("shape", [(33, 24), (3, 1032), (70, 64)])
@pytest.mark.parametrize(("pending", "size"), [(-1.0, 1.0), (0.0, 1e4)])
def test_without_any_entry_the_scale_is_that_of_the_weight_itself(shape, pending, size):
    both = Both(shape, torch.bfloat16)
    for weight in both.weights:
        weight.mul_(size)
    both.held(0.0, 0.0, 0.0, pending=pending)
    both.step()
    both.check()
    assert both.kept[0].buffers[1].item() == pytest.approx(both.weights[0].abs().max().item() / 448)
    assert both.kept[0].buffers[0].float().abs().max() == 448
    both.step()
    both.check()


@kernel_test
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("held", [2.0, 0.0])
def test_a_weight_that_is_not_finite_makes_its_scale_nan_and_enters_no_history(value, held):
    both = Both((40, 72), torch.bfloat16)
    both.held(held, 0.0, 0.0)
    both.grad[3, 5] = torch.nan if value != value else 0.0
    for weight in both.weights:
        weight[3, 5] = value
    both.step()
    both.check()
    assert both.kept[0].buffers[1].isnan()
    assert both.kept[0].out().amax == -1


@kernel_test
def test_what_saturates_is_counted_once():
    both = Both((70, 136), torch.bfloat16)
    both.held(1.0, 0.5, 0.25)
    both.step()
    both.check()
    count = both.histories[0].saturated.item()
    assert count == (both.weights[0].abs() / (1.0 / 448) > 464).sum().item() > 0
    both.step()
    both.check()


@kernel_test
@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_skipped_step_casts_the_weight_as_it_is(scale, found, dtype):
    both = Both((40, 72), dtype)
    before = both.weights[0].clone()
    both.held(2.0, 3.0, 1.0, pending=2.5)
    both.grad[0, 0] = torch.inf if found else 1.0
    both.step(scale=scale, found=found)
    both.check()
    assert torch.equal(both.weights[0], before) == bool(found)
    assert both.kept[0].out().amax == both.weights[0].abs().max()


@kernel_test
@pytest.mark.parametrize("spec", ["fp8_e5m2+delayed(3)", "fp8_e4m3+pow2+delayed(3)"])
@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled": False},
                                     {"maximize": True}, {"lr": 0.0}])  # fmt: skip
def test_so_it_does_in_other_formats_and_with_other_numbers(spec, options):
    both = Both((34, 40), torch.bfloat16, spec, sr=False)
    both.held(2.0, 0.0, 0.0)
    both.step(**options)
    both.check()
