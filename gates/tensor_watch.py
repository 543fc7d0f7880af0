"""Watching tensors in some steps of a training: what the formats do to operands, and which gradients arrive.

**Which steps.** Losses and gradient norms are watched in every step, tensors in the first and in every n-th, the
policy's ``stability.observe_every``. The steps just after the first are left out on purpose: weights that start small
grow by large factors there, a delayed scale lags behind by construction, and it says nothing of the training that
follows. Counting reads every operand a few times over, about the price of another step, so at the default of 25 it adds
a few percent to training and nothing to what is timed.

**How, under torch.compile.** An eager arm counts within the training step itself. A compiled arm runs the batch once
more, uncompiled, before the step: hooks inside the graph would break its fusions, and then what is trained would no
longer be what is timed. The extra pass sees the weights, scales and random numbers of the step that follows and
leaves no trace: random generators, recipe state, buffers and gradients are put back, and the memory peak excludes it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..precision.observer import Observer, observe
from .model_state import plain_name
from .stability import Observed


@dataclass
class TensorWatch:
    """Watches tensors in some steps of one training.

    Attributes:
        every: see the module's text; None watches none.
        counts: whether products run where they can be counted.
        why_not: the reason, where they do not.
    """

    every: int | None
    counts: bool
    why_not: str | None = None
    _observer: Observer = field(default_factory=Observer)
    _names: list[str] = field(default_factory=list)
    _alive: Tensor | None = None
    _steps: int = 0

    def due(self, step: int) -> bool:
        """Return whether ``step`` (from 1) is watched."""
        return self.every is not None and (step == 1 or step % self.every == 0)

    @contextlib.contextmanager
    def within(self, step: int) -> Iterator[None]:
        """Within, operands of eager products count for ``step``, where it is due."""
        if not (self.counts and self.due(step)):
            yield
            return
        self._observer.step = step
        with observe(self._observer):
            yield

    def probe(self, step: int, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        """Run forward and backward of an uncompiled ``loss`` to count its operands; leaves no trace in ``model``."""
        from ..recipes import load_recipe_state, recipe_state

        if not (self.counts and self.due(step)):
            return
        devices = sorted({p.device for p in model.parameters() if p.is_cuda}, key=str)
        recipe = recipe_state(model)
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        drawn = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices), self.within(step):
                loss().backward()
        except torch.OutOfMemoryError:
            self.counts, self.why_not = False, "the GPU's memory ran out in an uncompiled pass that counts tensors"
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, held in buffers:
                buffer.copy_(held)
        load_recipe_state(model, recipe)

    def gradients(self, step: int, model: nn.Module) -> None:
        """Note which parameters have a gradient, where ``step`` is due. Does not wait for the device."""
        if not self.due(step):
            return
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        alive = torch.stack([_moves(p) for _, p in named])
        self._names = [plain_name(name) for name, _ in named]
        self._alive = alive if self._alive is None else self._alive | alive
        self._steps += 1

    def result(self) -> Observed:
        """Return what was seen."""
        alive = [] if self._alive is None else self._alive.cpu().tolist()
        still = tuple(name for name, lives in zip(self._names, alive, strict=True) if not lives)
        operands = tuple(self._observer.result()) if self.counts else ()
        return Observed(self._steps, operands, None if self.counts else self.why_not, still)


def _moves(parameter: Tensor) -> Tensor:
    """Bool []: whether there is a gradient that is not zero everywhere."""
    grad: Any = parameter.grad
    if grad is None:
        return torch.zeros((), dtype=torch.bool, device=parameter.device)
    if hasattr(grad, "to_local"):  # this rank's rows
        grad = grad.to_local()
    return (grad._values() if grad.is_sparse else grad).count_nonzero() > 0
