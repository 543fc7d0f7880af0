"""Whether an optimizer's state can be stored in few bits: found out by a trial, whatever class it is.

It can where the optimizer keeps what it knows of an element in ``exp_avg`` and ``exp_avg_sq``, and updates parameters
independently of each other, so that a step may be taken by a few of them at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .errors import NarrowgateError
from .moments import MOMENTS, scale_name
from .spec import Spec

_SCALES = tuple(map(scale_name, MOMENTS))


def own_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """The class's step without its hooks."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def check_state(optimizer: Optimizer, parameter: Tensor, spec: Spec) -> None:
    """Refuse state of ``parameter`` that cannot be stored as ``spec``.

    Raises:
        NarrowgateError: it has a tensor as large as the parameter under a name that is not known, or, where random bits
            are drawn, no ``step`` to draw them by.
    """
    state, kind = optimizer.state[parameter], type(optimizer).__name__.removeprefix("LowPrecision")
    for name, value in state.items():
        whole = isinstance(value, Tensor) and value.dim() > 0 and value.numel() >= parameter.numel()
        if whole and name not in MOMENTS and name not in _SCALES:
            raise NarrowgateError(
                f"{kind} keeps '{name}' for every element, expected {' and '.join(MOMENTS)} only: how {spec} would "
                "change it is not known"
            )
    if spec.sr and "step" not in state and any(name in state for name in MOMENTS):
        raise NarrowgateError(f"{kind} keeps no 'step' beside its moments, which {spec} draws its random bits by")


def try_out(optimizer: Optimizer, group: Mapping[str, Any], leader: Tensor, spec: Spec) -> None:
    """Raise unless the optimizer's step may be taken by a few parameters at a time: two small ones are tried.

    They have the leader's axes and device. Their gradients are large, so that a limit on a norm over both would show.

    Raises:
        NarrowgateError: the optimizer holds another, the step fails, keeps state that is not known, updates the two
            otherwise together than alone, or runs the hooks of another optimizer's step.
    """
    kind = type(optimizer)
    # Which would step its own parameters, all of them, however few are asked for: in the trial already.
    for name, value in optimizer.__dict__.items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        inner = next((x for x in held if isinstance(x, Optimizer)), None)
        if inner is not None:
            raise NarrowgateError(
                f"{kind.__name__} cannot keep its state in {spec}: it holds another optimizer ('{name}', "
                f"{type(inner).__name__}), expected that one itself"
            )
    device = leader.device if leader.device.type != "meta" else torch.device("cpu")
    hooks: list[str] = []
    found: list[list[Tensor]] = []
    for together in (True, False):
        twin = object.__new__(kind)
        twin.__dict__.update(optimizer.__dict__)
        twin._optimizer_step_pre_hooks = {0: lambda *_: hooks.append("")}
        pair = [torch.full((2,) * leader.dim(), value, device=device, requires_grad=True) for value in (1.0, -2.0)]
        alone = {**group, "params": pair}
        twin.param_groups, twin.state = [alone], defaultdict(dict)
        try:
            for scale in (1e3, -2e3):
                for parameter, factor in zip(pair, (1.0, 3.0), strict=True):
                    parameter.grad = torch.full_like(parameter, scale * factor)
                for few in [pair] if together else [[parameter] for parameter in pair]:
                    alone["params"] = few
                    own_step(kind)(twin)
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise NarrowgateError(
                f"{kind.__name__} cannot keep its state in {spec}: a step on dense parameters of a few elements "
                f"failed: {why}"
            ) from error
        for parameter in pair:
            check_state(twin, parameter, spec)
        found.append([x.detach() for p in pair for x in (p, *twin.state[p].values()) if isinstance(x, Tensor)])
    if hooks:
        raise NarrowgateError(
            f"{kind.__name__} cannot keep its state in {spec}: its step calls that of another optimizer, whose hooks "
            "would run several times a step"
        )
    if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
        raise NarrowgateError(
            f"{kind.__name__} cannot keep its state in {spec}: its step depends on which parameters it updates together"
        )
