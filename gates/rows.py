"""Rows of each layer in one step of a task: what ``when: profitable`` is decided by, alike in every arm and seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..precision.errors import NarrowgateError
from ..recipes import measure_rows, trace_gemms
from .arithmetic import Arithmetic
from .batches import to_device

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..precision.exchanged_rows import Exchanged
    from ..recipes import CastPlan, GemmTrace, Plan, SavedModule
    from ..recipes.recipe import Recipe
    from .task import Task


def trace_rows(task: Task, model: nn.Module) -> dict[str, int]:
    """Return the rows that every linear layer of ``model`` multiplies in one training batch, by layer name.

    The batch is the first of seed 0, whatever the seed of the run: a decision by rows does not depend on the shuffle.

    Args:
        task: whose batches and loss; it is asked for nothing else.
        model: as ``task.build_model()`` returned it, on the device of its batches.

    Raises:
        NarrowgateError: the task has no batch, or its loss reaches no layer of the model.
    """
    return measure_rows(model, _step(task, model))


def trace_lookups(task: Task, model: nn.Module) -> Exchanged:
    """Return the embedding tables of ``model`` and what one training batch asks of them, as every rank's would.

    Args:
        task: whose batches and loss.
        model: as for :func:`trace_rows`.

    Raises:
        NarrowgateError: the task has no batch, or the model no tables that ranks could exchange rows of.
    """
    from ..models.embedding_exchange import exchanged_tables

    return exchanged_tables(model, _step(task, model))


def trace_step(task: Task, model: nn.Module) -> GemmTrace:
    """Return every matrix product of one training batch's forward, of the same batch as :func:`trace_rows`.

    Raises:
        NarrowgateError: the task has no batch, or its loss multiplies nothing in the model.
    """
    return trace_gemms(model, _step(task, model))


def trace_casts(task: Task, model: nn.Module, plan: Plan) -> tuple[CastPlan, ...]:
    """Return the casts of one compiled training step by ``plan``, of the same batch as :func:`trace_rows`.

    Raises:
        NarrowgateError: the plan's backend casts on its own, the task has no batch, or its step cannot be traced.
    """
    from ..recipes import plan_casts

    if plan.backend != "native":
        raise NarrowgateError(f"backend {plan.backend} casts on its own, expected native to plan casts")
    # Traced, not run: as on the planned device, whatever this one can do.
    run = lambda traced: _step(task, traced, bf16=plan.device.kind == "cuda")()  # noqa: E731
    # Autocast, which decides what lies in memory as BF16, knows no meta tensors.
    return plan_casts(
        model, plan.recipe, run, device=plan.device, rows=plan.rows, rates=plan.rates, instead_of_meta="cpu"
    )


def trace_saved(task: Task, model: nn.Module, plan: Plan) -> tuple[SavedModule, ...]:
    """Return what modules save for backward in one eager step by ``plan``, of the same batch as :func:`trace_rows`.

    Raises:
        NarrowgateError: the task has no batch, or its loss runs nothing of the model.
    """
    from ..recipes import plan_saved

    run = lambda counted: _step(task, counted)()  # noqa: E731
    return plan_saved(model, plan.recipe, run, device=plan.device, rows=plan.rows, rates=plan.rates)


def _step(task: Task, model: nn.Module, *, bf16: bool = False) -> Callable[[], Tensor]:
    batch = next(iter(task.train_batches(0)), None)
    if batch is None:
        raise NarrowgateError("train_batches(0) yielded no batch, expected one to trace")
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    batch = to_device(batch, device)
    arithmetic = Arithmetic(device, bf16=True) if bf16 else Arithmetic.of(device)

    def loss() -> Tensor:
        with arithmetic.context():
            return task.loss(model, batch)

    return loss


def rows_for(recipe: Recipe, task: Task, model: nn.Module) -> dict[str, int] | None:
    """Return :func:`trace_rows` where ``recipe`` decides by it, else None."""
    profitable = any(rule.when == "profitable" for rule in recipe.flatten().rules)
    return trace_rows(task, model) if profitable else None
