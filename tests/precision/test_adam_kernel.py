"""The kernel of Adam on BF16 moments against a fused step between two roundings, bit for bit.

It runs on a GPU, where PyTorch's own kernel is the oracle, or through Triton's interpreter (TRITON_INTERPRET=1), which
has no fused multiply-add: there it is the same formula, each operation rounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from narrowgate.precision import Shard, Spec
from narrowgate.precision.fused_adam import StoredMoment
from narrowgate.precision.moments import MOMENTS, Place, restore, store
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

#: Local shape and first row in the unsharded parameter: one element, full programs and ragged ones, and offsets that
#: are a multiple of eight elements and that are not.
PLACES = [
    ((1,), 0),
    ((7,), 0),
    ((1024,), 0),
    ((33, 50), 0),
    ((16, 128), 16),
    ((20, 13), 3),
    ((2049,), 1),
    ((3, 5, 7), 2),
]
NAMES = ("sr", "nearest")


def kernel_test(test: Any) -> Any:
    """A test of the kernel itself: wherever that runs."""
    return test if INTERPRETED else pytest.mark.gpu(test)


def reference(decoupled: bool) -> Callable[..., None]:
    """``torch._fused_adam_`` or ``torch._fused_adamw_``; on CPUs their GPU kernels' formula, each operation rounded."""
    original: Any = vars(torch)["_fused_adamw_" if decoupled else "_fused_adam_"]

    def step(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, **options: Any) -> None:
        lists = (params, grads, exp_avgs, exp_avg_sqs)
        if not INTERPRETED or any(isinstance(x, StoredMoment) for x in exp_avgs):
            original(*lists, max_exp_avg_sqs, state_steps, **options)
            return
        found = options["found_inf"]
        if found is not None and found.item() == 1:
            return
        beta1, beta2, lr, eps, decay = (
            torch.tensor(float(options[name])) for name in ("beta1", "beta2", "lr", "eps", "weight_decay")
        )
        steps = torch.stack(list(state_steps))
        sizes = lr / (1 - torch.pow(options["beta1"], steps))
        roots = (1 - torch.pow(options["beta2"], steps)).sqrt()
        for p, g, m, v, size, root in zip(*(map(plain, x) for x in lists), sizes, roots, strict=True):
            if options["grad_scale"] is not None:
                g.div_(options["grad_scale"])
            grad = -g if options["maximize"] else g
            if decay != 0 and not decoupled:
                grad = p * decay + grad
            if decay != 0 and decoupled:
                p.copy_(-(lr * decay) * p + p)
            square = grad * grad
            m.copy_(m * beta1 + (grad * -beta1 + grad))
            v.copy_(v * beta2 + (square * -beta2 + square))
            # PyTorch's square root of FP32 is not always the nearest number on CPUs; a kernel's is.
            p.sub_(m * size / (v.double().sqrt().float() / root + eps))

    return step


def plain(x: Tensor) -> Tensor:
    return getattr(x, "_local_tensor", x).detach()


def same(a: Tensor, b: Tensor) -> None:
    """The same bits, NaNs counted as one."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if a.dtype.itemsize == 1:  # one conversion's NaN has a sign and another's has none
        a, b = a.float(), b.float()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    unequal = a.detach().view(integer) != b.detach().view(integer)
    if a.dtype.is_floating_point:
        unequal &= ~(a.isnan() & b.isnan())
    assert not unequal.any(), f"{int(unequal.sum())} of {a.numel()} differ: {unequal.nonzero()[:3].tolist()}"


def inputs(shape: Sequence[int]) -> list[Tensor]:
    """Parameter, gradient and moments over many magnitudes; some of each are zero, some gradients are not finite."""
    generator = torch.Generator().manual_seed(len(shape) + shape[0])

    def normal(spread: float) -> Tensor:
        x = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
        return x.masked_fill_(torch.rand(shape, generator=generator) < 0.05, 0.0)

    p, g, m, v = normal(1), normal(4), normal(3).bfloat16(), normal(5).square().bfloat16()
    flat = g.view(-1)
    if flat.numel() > 100:
        flat[-4:] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38])
        # A finite moment beyond the largest number that BF16 has.
        m.view(-1)[-6:-4], flat[-6:-4] = torch.tensor([3.3895e38, -3.3895e38]), torch.tensor([3.4e38, -3.4e38])
        v.view(-1)[:9] = m.view(-1)[:9] = flat[:9] = 0.0
    return [x.to(DEVICE) for x in (p, g, m, v)]


def compare(
    shape: tuple[int, ...],
    start: int,
    rounding: str = "sr",
    *,
    decoupled: bool = False,
    scale: float | None = None,
    found: float | None = None,
    step: int = 3,
    **options: Any,
) -> list[Tensor]:
    """Update by the kernel and by a fused step between two roundings; return what the kernel read, before and after."""
    from narrowgate.precision.kernels.adam import AdamRule, AdamTensors, coefficients, launch_adam

    rule = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "maximize": False, **options}
    spec = Spec.parse("bf16+sr" if rounding == "sr" else "bf16")
    whole = (shape[0] + start + 5, *shape[1:])
    place = Place(shape, Shard(whole, (start, *[0] * (len(shape) - 1))) if start else None)
    keys = torch.tensor([123456789, -987654321], device=DEVICE) if rounding == "sr" else None
    steps, scalars = torch.tensor([float(step)], device=DEVICE), [
        None if x is None else torch.tensor(x, device=DEVICE) for x in (scale, found)
    ]  # fmt: skip
    ours, theirs = inputs(shape), inputs(shape)
    width = ours[0].numel() // shape[0]
    numbers = AdamRule(
        rule["beta1"], rule["beta2"], rule["eps"], rule["weight_decay"], decoupled, rule["maximize"], keys is not None
    )
    tensors = AdamTensors(*ours, offset=start * width)
    launch_adam(numbers, tensors, coefficients(rule["lr"], steps, numbers)[0], keys, *scalars)

    p, g, *stored = theirs
    moments = [restore(name, {name: x}, spec, place) for name, x in zip(MOMENTS, stored, strict=True)]
    rule |= {"grad_scale": scalars[0], "found_inf": scalars[1], "amsgrad": False}
    reference(decoupled)([p], [g], [moments[0]], [moments[1]], [], [steps[0]], **rule)
    for index, name in enumerate(MOMENTS):
        key = None if keys is None else keys[index]
        stored[index] = store(name, moments[index], spec, place, key)[name]
    if INTERPRETED or decoupled or not rule["weight_decay"]:
        for mine, other in zip(ours, (p, g, *stored), strict=True):
            same(mine, other)
    else:
        # PyTorch's kernel adds decay to some gradients with one rounding, to others with two.
        torch.testing.assert_close(ours[0], p, rtol=1e-4, atol=1e-6, equal_nan=True)
        for mine, other in zip(ours[2:], stored, strict=True):
            torch.testing.assert_close(mine, other, rtol=2**-6, atol=1e-30, equal_nan=True)
    return [*inputs(shape), *ours]


@kernel_test
@pytest.mark.parametrize("rounding", NAMES)
@pytest.mark.parametrize(("shape", "start"), PLACES)
def test_one_pass_stores_what_a_step_between_two_roundings_stores(shape, start, rounding):
    compare(shape, start, rounding)


@kernel_test
@pytest.mark.parametrize("rounding", NAMES)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.1, False), (0.1, True), (0.0, True)])
def test_so_it_does_with_decay_of_either_kind_and_upward(weight_decay, decoupled, maximize, rounding):
    compare((40, 33), 0, rounding, weight_decay=weight_decay, decoupled=decoupled, maximize=maximize, step=1)


@kernel_test
@pytest.mark.parametrize(
    "options", [{"lr": 0.0}, {"lr": 1.0}, {"beta1": 0.0}, {"eps": 1e-3, "beta2": 0.95}, {"step": 9000}]
)
def test_so_it_does_with_other_numbers(options):
    compare((1500,), 0, **options)


@kernel_test
def test_a_scaled_gradient_is_brought_back_and_left_so():
    _, before, *_, after, _, _ = compare((1100,), 0, scale=1024.0, found=0.0)
    same(after, before / 1024.0)


@kernel_test
@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_step_on_gradients_that_are_not_finite_leaves_everything(scale):
    tensors = compare((1100,), 0, scale=scale, found=1.0)
    for before, after in zip(tensors[:4], tensors[4:], strict=True):
        same(after, before)


@kernel_test
def test_a_weight_without_a_gradient_stays_where_it_is():
    from narrowgate.precision.kernels.adam import AdamRule, AdamTensors, coefficients, launch_adam

    rule = AdamRule(0.9, 0.999, 1e-8, 0.0, False, False, True)
    p = torch.linspace(-1, 1, 100, device=DEVICE)
    g, m, v = torch.zeros_like(p), *(torch.zeros(100, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    steps = torch.ones(1, device=DEVICE)
    keys = torch.tensor([1, 2], device=DEVICE)
    launch_adam(rule, AdamTensors(p, g, m, v, 0), coefficients(0.1, steps, rule)[0], keys, None, None)
    assert torch.equal(p, torch.linspace(-1, 1, 100, device=DEVICE))
    assert not m.any()
    assert not v.any()


@kernel_test
@pytest.mark.parametrize("step", [1, 2, 1000, 100_000])
def test_bias_corrections_are_those_of_the_paper(step):
    from narrowgate.precision.kernels.adam import AdamRule, coefficients

    rule = AdamRule(0.9, 0.999, 1e-8, 0.1, True, False, True)
    row = coefficients(0.02, torch.tensor([float(step)], device=DEVICE), rule)[0].double().tolist()
    assert row[:3] == pytest.approx([0.002, 0.02 / (1 - 0.9**step), (1 - 0.999**step) ** 0.5], rel=1e-4)
    assert coefficients(torch.tensor(0.02), torch.tensor([float(step)], device=DEVICE), rule)[0].tolist() == row


# Through an optimizer's own step.
