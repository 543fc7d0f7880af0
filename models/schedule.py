"""Adam with a warm-up and a linear decay that need nothing but ``optimizer.step()``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Adam, Optimizer

from .presets import TrainingConfig

#: The decay ends here, as a share of the peak: a run with more steps than planned still trains.
_FLOOR = 0.01


def learning_rate(step: int, steps: int, training: TrainingConfig) -> float:
    """Return the rate of ``step`` (counted from 0) of a run of ``steps``."""
    rise = max(1, round(training.warmup * steps))
    if step < rise:
        return training.lr * (step + 1) / rise
    left = (steps - step) / max(1, steps - rise)
    return training.lr * max(_FLOOR, min(1.0, left))


class _Schedule:
    """Post-step hook; it counts in the parameter groups, so the count travels with the optimizer's state."""

    def __init__(self, steps: int, training: TrainingConfig) -> None:
        self.steps = steps
        self.training = training

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        for group in optimizer.param_groups:
            group["step_index"] += 1
            group["lr"] = learning_rate(group["step_index"], self.steps, self.training)


def scheduled_adam(model: nn.Module, steps: int, training: TrainingConfig) -> Adam:
    """Return Adam over all parameters, fused, whose learning rate follows its own steps.

    A hook after each ``step()`` sets the next rate: whoever drives the optimizer needs no scheduler.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    group = {"params": parameters, "step_index": 0}
    rate = learning_rate(0, steps, training)
    optimizer = Adam([group], lr=rate, betas=training.betas, eps=training.eps, fused=True)
    optimizer.register_step_post_hook(_Schedule(steps, training))
    return optimizer
