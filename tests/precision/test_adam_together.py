"""Adam on many parameters in one launch: each as in a launch of its own, to the bit, and which parameters those are.

The kernels run on a GPU, or through Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from narrowgate.precision import lower_state
from torch import Tensor, nn
from torch.optim import AdamW

from .test_adam_kernel import DEVICE, PLACES, inputs, kernel_test, same

#: Beside those: more than a program takes, and elements that are a multiple of 16 and fill tiles or do not.
SIZES = [((40, 512), 0), ((4, 4096), 8), ((64, 1000), 0), ((16, 16), 5)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table is known from another test."""
    pytest.importorskip("triton")
    from narrowgate.precision.kernels import adam_together

    monkeypatch.setattr(adam_together, "_tables", {})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was launched: the shape of one parameter, or the shapes of several."""
    from narrowgate.precision.kernels import adam, adam_together

    seen: list[Any] = []
    alone, together = adam.launch_adam, adam_together.launch_adam_together

    def one(rule: Any, tensors: Any, *others: Any) -> None:
        seen.append(tuple(tensors.parameter.shape))
        alone(rule, tensors, *others)

    def several(rule: Any, members: Any, *others: Any) -> None:
        seen.append([tuple(tensors.parameter.shape) for _, tensors in members])
        together(rule, members, *others)

    monkeypatch.setattr(adam, "launch_adam", one)
    monkeypatch.setattr(adam_together, "launch_adam_together", several)
    return seen


def made() -> list[Any]:
    """Parameters with their gradients and moments, and where each lies in the unsharded one; the same in every call."""
    from narrowgate.precision.kernels.adam import AdamTensors

    found = []
    for shape, start in [*PLACES, *SIZES]:
        tensors = inputs(shape)
        found.append(AdamTensors(*tensors, offset=start * (tensors[0].numel() // shape[0])))
    return found


def step(
    members: Sequence[Any], together: bool, scale: float | None = None, found: float | None = None, **options: Any
):
    """Update ``members``, of which each counts steps of its own and has keys of its own."""
    from narrowgate.precision.kernels.adam import AdamRule, coefficients, launch_adam
    from narrowgate.precision.kernels.adam_together import launch_adam_together

    rule = AdamRule(**{"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "decoupled": False,
                       "maximize": False, "stochastic": True, **options})  # fmt: skip
    rows = coefficients(0.01, torch.arange(1.0, len(members) + 1, device=DEVICE), rule)
    keys = None
    if rule.stochastic:
        generator = torch.Generator().manual_seed(1)
        keys = torch.randint(-(2**62), 2**62, (len(members), 2), generator=generator).to(DEVICE)
    optional = [None if x is None else torch.tensor(x, device=DEVICE) for x in (scale, found)]
    if together:
        # In another order than the rows'.
        launch_adam_together(rule, list(enumerate(members))[::-1], rows, keys, *optional)
        return
    for index, tensors in enumerate(members):
        launch_adam(rule, tensors, rows[index], None if keys is None else keys[index], *optional)


def assert_alike(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("parameter", "grad", "exp_avg", "exp_avg_sq"):
            same(getattr(mine, name), getattr(other, name))


@kernel_test
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stochastic": False, "eps": 1e-3},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "decoupled": True, "beta1": 0.0},
        {"scale": 256.0, "found": 0.0},
        {"scale": 8.0, "found": 1.0},
        {"found": 1.0},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_each_parameter_is_updated_as_in_a_launch_of_its_own(options):
    ours, theirs = made(), made()
    for _ in range(2):
        step(ours, True, **options)
        step(theirs, False, **options)
        assert_alike(ours, theirs)


@kernel_test
def test_tensors_that_moved_are_found_where_they_are():
    """Gradients are new every step; what is known of the ones before does not count, and what is used stays known."""
    from narrowgate.precision.kernels import adam_together

    ours, theirs = made(), made()
    kept, tables = [], []
    for turn in range(4):
        step(ours, True)
        step(theirs, False)
        assert_alike(ours, theirs)
        tables.append(len(adam_together._tables))
        kept.append(ours)  # so that nothing lies where something lay before
        if turn < 2:
            ours = [replace(x, grad=x.grad.clone(), exp_avg=x.exp_avg.clone()) for x in ours]
    assert tables[0] < tables[1] < tables[2] == tables[3]


@kernel_test
def test_tables_are_made_where_they_can_be_copied_from_whatever_the_default_device():
    ours, theirs = made(), made()
    with torch.device("meta"):
        step(ours, True, stochastic=False)
    step(theirs, False, stochastic=False)
    assert_alike(ours, theirs)


@kernel_test
def test_no_more_tables_are_kept_than_some_and_those_that_are_used(monkeypatch):
    from narrowgate.precision.kernels import adam_together

    monkeypatch.setattr(adam_together, "_CACHED", 5)
    steady, keep = made(), []
    step(steady, True)
    known = set(adam_together._tables)
    for _ in range(4):
        keep.append(made()[:1])
        step(keep[-1], True)
        step(steady, True)
        assert len(adam_together._tables) <= 5
    assert known <= set(adam_together._tables)


@kernel_test
def test_nothing_but_empty_parameters_is_no_launch():
    from narrowgate.precision.kernels.adam import AdamTensors

    empty = [torch.empty(0, device=DEVICE, dtype=dtype) for dtype in [torch.float32] * 2 + [torch.bfloat16] * 2]
    step([AdamTensors(*empty, offset=0)], True)


def optimizer_of(shapes: Sequence[tuple[int, ...]]) -> tuple[AdamW, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
    return AdamW(parameters, lr=0.1, fused=True), parameters


def give_gradients(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


@kernel_test
def test_small_parameters_are_launched_together_and_large_ones_alone(monkeypatch, launches):
    from narrowgate.precision.kernels import adam, adam_together

    monkeypatch.setattr(adam_together, "MOST", 500)
    monkeypatch.setattr(adam, "is_ready", lambda *of: True)
    shapes = [(20, 24), (20, 25), (20, 26), (3,)]
    optimizer, parameters = optimizer_of(shapes)
    lower_state(optimizer, "bf16+sr")
    for _ in range(2):
        give_gradients(parameters)
        optimizer.step()
    assert launches == [[(20, 24), (20, 25), (3,)], (20, 26)]


@kernel_test
def test_at_first_each_is_launched_alone_for_captures_to_come(monkeypatch, launches):
    """A capture records launches of single parameters, and compiles nothing: their kernels are there by then."""
    from narrowgate.precision.kernels import adam

    monkeypatch.setattr(adam, "_launched", set())
    monkeypatch.setattr(adam, "INTERPRETED", DEVICE == "cpu")
    monkeypatch.setattr(
        adam, "is_ready", lambda rule, tensors, *of: adam._variant(rule, tensors, *of) in adam._launched
    )
    optimizer, parameters = optimizer_of([(16, 16), (32, 16)])
    lower_state(optimizer, "bf16+sr")
    for _ in range(3):
        give_gradients(parameters)
        optimizer.step()
    assert launches == [(16, 16), (32, 16), [(16, 16), (32, 16)]]


@pytest.mark.gpu
def test_a_model_of_many_small_parameters_takes_few_kernels():
    from torch.profiler import ProfilerActivity, profile

    even, odd = [(64, 64 + index) for index in range(50)], [(63, 65 + 2 * index) for index in range(50)]
    optimizer, parameters = optimizer_of([*even, *odd])
    lower_state(optimizer, "bf16+sr")
    for _ in range(4):
        give_gradients(parameters)
        optimizer.step()
    give_gradients(parameters)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        optimizer.step()
        torch.cuda.synchronize()
    names = Counter(event.name for event in seen.events() or () if event.device_type.name == "CUDA")
    assert sum(count for name, count in names.items() if "adam" in name) == 2, names
    assert names.total() < 60, names
