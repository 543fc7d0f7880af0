"""Evaluation never multiplies kept codes, so an average of the weights may be swapped in past every check.

Whoever keeps an exponential moving average (EMA) writes it over the weights for an evaluation and takes it off again,
often through ``weight.data``, which no version counter sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from narrowgate.precision import weight_codes
from narrowgate.precision.layer import layer_state
from torch import Tensor, nn

from .test_adam_kernel import DEVICE, kernel_test
from .test_kept_codes import Run, assert_alike, casts, kept_of, model, plain_fp32_step
from .test_weight_codes import batches, keep
from .test_weight_codes import model as plain_model

__all__ = ["casts", "keep"]


class Average:
    """An exponential moving average of a model's weights."""

    def __init__(self, layers: nn.Module) -> None:
        self.layers = layers
        self.values = [p.detach().clone() for p in layers.parameters()]

    def update(self) -> None:
        for value, p in zip(self.values, self.layers.parameters(), strict=True):
            value.lerp_(p.detach(), 0.3)

    @contextmanager
    def by_copies(self) -> Iterator[None]:
        """The average in the weights' place, written over them and back past the version counter."""
        weights = [p.detach().clone() for p in self.layers.parameters()]
        for values in (self.values, weights):
            for p, value in zip(self.layers.parameters(), values, strict=True):
                p.data.copy_(value)
            if values is self.values:
                yield

    @contextmanager
    def by_storage(self) -> Iterator[None]:
        """The average's memory in place of the weights', and theirs again."""
        weights = [p.data for p in self.layers.parameters()]
        for values in (self.values, weights):
            for p, value in zip(self.layers.parameters(), values, strict=True):
                p.data = value
            if values is self.values:
                yield


def without_gradients(layers: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [layers.eval()(x)]


def in_inference_mode(layers: Any, x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return [layers.eval()(x).clone()]


def with_gradients(layers: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layers.eval()(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x])]


def training_without_gradients(layers: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [layers.train()(x)]


def each_use(state: str) -> Run:
    """The same training with weights that are quantized at each use."""
    run = Run(state, in_pass=False)
    for i in (0, 2):
        layer_state(run.layers[i]).kept = None
    return run


@kernel_test
@pytest.mark.parametrize("used", [False, True], ids=["after the step", "after a forward"])
@pytest.mark.parametrize(("state", "evaluate", "swap"), [
    ("bf16+sr", without_gradients, Average.by_copies),
    ("bf16+sr", in_inference_mode, Average.by_copies),
    ("bf16+sr", with_gradients, Average.by_copies),
    ("bf16+sr", training_without_gradients, Average.by_copies),
    ("bf16+sr", with_gradients, Average.by_storage),
    ("fp32", without_gradients, Average.by_copies),
])  # fmt: skip
def test_an_average_swapped_in_is_evaluated_and_training_goes_on(
    state: str, evaluate: Any, swap: Any, used: bool, casts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_fp32_step(monkeypatch)
    ours, theirs = Run(state), each_use(state)
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    for run in (ours, theirs):
        average = Average(run.layers)
        for _ in range(3):
            run.micro_batch()
            if not used:
                run.step(monkeypatch)
            average.update()
            with swap(average):
                run.found += evaluate(run.layers, x)
            run.layers.train()
            if used:
                run.step(monkeypatch)
        run.micro_batch()
        run.step(monkeypatch)
    # Each step's codes served the training forward behind it, whatever was evaluated in between.
    assert [kept.passes for kept in kept_of(ours.layers)] == [3, 3]
    assert len(casts) == 2 * 2
    assert_alike(ours, theirs)


def _call(layers: nn.Module, call: Callable[[Tensor], Tensor], training: bool, x: Tensor) -> Tensor:
    layers.train(training)
    with torch.set_grad_enabled(training):
        return call(x.detach())


@pytest.mark.parametrize("variant", ["row", "delayed"])
def test_compiled_both_modes_have_a_graph_and_only_one_reads_what_is_kept(
    variant: str, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, kept = plain_model(variant), plain_model(variant)
    assert keep(kept) == {}
    cast: list[Tensor] = []
    original = weight_codes._cast_into
    monkeypatch.setattr(
        weight_codes, "_cast_into", lambda weight, *rest: (cast.append(weight), original(weight, *rest))
    )
    call: Any = torch.compile(kept, fullgraph=True)
    (x,) = batches(1)
    averages = [Average(plain), Average(kept)]
    for average in averages:
        for value in average.values:
            value.mul_(3.0)
    for _ in range(2):
        expected = [_call(plain, plain, True, x)]
        found = [_call(kept, call, True, x)]
        with averages[0].by_copies(), averages[1].by_copies():
            expected.append(_call(plain, plain, False, x))
            found.append(_call(kept, call, False, x))
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b)
        assert not torch.allclose(found[0], found[1], rtol=0.1)
    assert len(cast) == 2
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["bf16+sr", "fp32"])
def test_compiled_on_a_gpu_an_average_is_evaluated_and_training_goes_on(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Run(state), Run(state, in_pass=False)
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(9)).cuda()
    plain = model()
    compiled: Any = torch.compile(plain, fullgraph=True)
    for run in (ours, theirs):
        run.call, average = torch.compile(run.layers, fullgraph=True), Average(run.layers)
        for _ in range(4):
            run.micro_batch()
            run.step(monkeypatch)
            average.update()
            with average.by_copies():
                run.found.append(_call(run.layers, run.call, False, x))
                plain.load_state_dict(run.layers.state_dict())
                for i in (0, 2):
                    layer_state(plain[i]).load_state_dict(layer_state(run.layers[i]).state_dict())
                torch.testing.assert_close(run.found[-1], _call(plain, compiled, False, x))
            run.layers.train()
        run.micro_batch()
        run.step(monkeypatch)
    assert [kept.passes for kept in kept_of(ours.layers)] == [4, 4]
    assert_alike(ours, theirs)
    torch._dynamo.reset()


@pytest.mark.gpu
def test_a_captured_evaluation_replays_with_the_average_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Run("bf16"), each_use("bf16")
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(9)).cuda()
    averages = [Average(run.layers) for run in (ours, theirs)]
    for run in (ours, theirs):
        for _ in range(2):
            run.micro_batch()
            run.step(monkeypatch)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _call(ours.layers, ours.layers, False, x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = _call(ours.layers, ours.layers, False, x)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(2):
        for average in averages:
            average.update()
        with averages[0].by_copies(), averages[1].by_copies():
            graph.replay()
            ours.found.append(y.clone())
            theirs.found.append(_call(theirs.layers, theirs.layers, False, x))
        for run in (ours, theirs):
            run.layers.train()
            run.micro_batch()
            run.step(monkeypatch)
    assert [kept.passes for kept in kept_of(ours.layers)] == [3, 3]
    assert_alike(ours, theirs)
