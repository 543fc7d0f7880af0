"""A step that takes moments as they are stored: whose it may be, and what stands in their place meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .fused_adam import FusedStep, StoredMoment, can_take, take
from .moment_storage import call_keys, storage_of
from .moments import MOMENTS, local
from .step_codes import StepCodes


def in_one_pass(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, codes: StepCodes) -> bool:
    """Whether the parameter is updated as its moments are stored, if the step is the fused one that ``group`` asks for.

    Not the first time: the optimizer makes its state then.
    """
    storage, state = storage_of(optimizer), optimizer.state.get(parameter)
    if not group.get("fused") or not state or parameter in storage.apart or not storage.spec.high_precision:
        return False
    dtype = torch.bfloat16
    if storage.spec.format == "fp32":
        # PyTorch's own kernel takes all that has no codes that count.
        kept, dtype = codes.of(parameter), torch.float32
        if kept is None or not kept.trusted or (parameter.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
    stored = [state.get(name) for name in MOMENTS]
    return isinstance(state.get("step"), Tensor) and can_take(parameter, stored, storage.place(parameter), dtype)


@contextmanager
def standing_in(
    optimizer: Optimizer, parameters: Sequence[Tensor], codes: StepCodes
) -> Iterator[dict[Tensor, dict[str, Tensor]]]:
    """Within, stand-ins are in the place of stored moments; a fused step also writes ``codes``.

    Yields:
        What was stored, filled in afterwards: of parameters whose moments are FP32 now, for :func:`_put_back`.
    """
    storage = storage_of(optimizer)

    def keys(parameters: Sequence[Tensor], steps: Sequence[Tensor]) -> Tensor:
        return call_keys(storage, parameters, steps)

    def taken(step: FusedStep) -> bool:
        return take(step, keys if storage.spec.sr else None, codes)

    stood: dict[Tensor, dict[str, tuple[Tensor, StoredMoment]]] = {}
    for parameter in parameters:
        state, place = optimizer.state[parameter], storage.place(parameter)
        stood[parameter] = {
            name: (state[name], StoredMoment(parameter, name, local(state[name]), place, taken)) for name in MOMENTS
        }
        for name, (_, moment) in stood[parameter].items():
            state[name] = moment
    opened: dict[Tensor, dict[str, Tensor]] = {}
    try:
        yield opened
    finally:
        for parameter, moments in stood.items():
            state = optimizer.state[parameter]
            untouched = all(
                state.get(name) is moment and moment.opened is None for name, (_, moment) in moments.items()
            )
            if not untouched:
                opened[parameter] = {name: stored for name, (stored, _) in moments.items()}
            for name, (stored, _) in moments.items():
                left = state.get(name)
                if isinstance(left, StoredMoment):
                    state[name] = stored if untouched else left.open()
        # In a capture a step is taken apart where its kernel is not compiled yet, which it may be later.
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            storage.apart.update(opened)
