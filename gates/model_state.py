"""A model between two trainings and within a step: its initial state in place, its gradient norm, its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..precision.errors import NarrowgateError
from ..precision.surroundings import WRAPPER_PARTS

#: What both arms' optimizers must agree on, as far as they have it.
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad")


class RunError(RuntimeError):
    """The run failed for a reason that is no bad input: the command ends with exit code 4."""


def gradient_norm(model: nn.Module) -> Tensor:
    """Return the total gradient norm, FP32 scalar on the model's device; not finite where any gradient is not."""
    grads: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads:
        raise NarrowgateError("no parameter has a gradient after loss().backward()")
    grads = [g._values() if g.is_sparse else g for g in grads]
    return torch.nn.utils.get_total_norm(grads).float()


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Return what an optimizer trains each of its parameter groups with; empty where it does not say."""
    groups = getattr(optimizer, "param_groups", [])
    return [{name: _plain(group[name]) for name in _HYPERPARAMETERS if name in group} for group in groups]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return float(value) if isinstance(value, Tensor) else value


def plain_name(name: str) -> str:
    """Return a parameter's or buffer's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def copy_state(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters and buffers, also those that are not persistent, in place."""
    fresh = dict([*source.named_parameters(), *source.named_buffers()])
    with torch.no_grad():
        for name, value in [*target.named_parameters(), *target.named_buffers()]:
            if name not in fresh or fresh[name].shape != value.shape:
                raise RunError(f"build_model() built '{name}' in another shape for another seed")
            value.copy_(fresh[name])
            if isinstance(value, nn.Parameter):
                value.grad = None
