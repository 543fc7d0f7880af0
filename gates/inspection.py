"""Numerics of every quantized tensor over a few real training steps, without a gate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..precision.errors import NarrowgateError
from .train import Arm, Watch

if TYPE_CHECKING:
    from ..precision.observer import OperandNumerics
    from ..recipes.recipe import Recipe
    from .task import TaskSource


@dataclass(frozen=True)
class Inspection:
    """What a few steps of training showed."""

    recipe: str
    recipe_hash: str
    device: str
    seed: int
    #: Steps that ran: fewer than asked for where batches end or a loss is not finite.
    steps: int
    #: Training loss of the first and of the last step; None where not finite.
    losses: tuple[float | None, float | None]
    #: In the order in which a step first quantizes them.
    operands: tuple[OperandNumerics, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {**asdict(self), "operands": [asdict(operand) for operand in self.operands]}


def inspect_recipe(source: TaskSource, recipe: Recipe, seed: int, watch: Watch) -> Inspection:
    """Train ``source.steps`` steps under ``recipe``, eagerly, and count every operand of every step.

    The native backend runs whatever the recipe names, since only it can be watched; the formats are the recipe's.

    Raises:
        NarrowgateError: bad input, or a recipe that quantizes nothing in this model.
    """
    device = torch.device(source.device)
    arm = Arm(source.open(), device, recipe, "native", source.steps, compiled=False, observe_every=1)
    losses, observed = arm.observe(seed, watch)
    if not observed.operands:
        raise NarrowgateError(f"recipe '{recipe.name}' quantizes nothing in this model, so there is nothing to inspect")
    ends = [float(loss) if np.isfinite(loss) else None for loss in (losses[0], losses[-1])]
    return Inspection(
        recipe=recipe.name,
        recipe_hash=recipe.hash(),
        device=source.device,
        seed=seed,
        steps=len(losses),
        losses=(ends[0], ends[1]),
        operands=observed.operands,
    )
