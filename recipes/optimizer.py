"""The ``optimizer`` part of a recipe: in force once an optimizer was wrapped, and missed aloud where none was."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..precision.errors import NarrowgateError
from ..precision.layer import LowPrecisionLayer
from .apply import applied_recipes
from .targets import named_parameters

#: Models whose recipe asks something of their optimizer, until one has stepped them.
_WAITING: WeakSet[nn.Module] = WeakSet()
#: Those of them that :func:`wrap_optimizer` was called for.
_WRAPPED: WeakSet[nn.Module] = WeakSet()


def wrap_optimizer(model: nn.Module, optimizer: Optimizer, *, keep_weights: bool | None = None) -> Optimizer:
    """Do what :meth:`narrowgate.recipes.Plan.wrap_optimizer` does, for a model whose plan is not at hand.

    Such as one of ``@low_precision``. Call it after ``fully_shard``, before ``torch.distributed.checkpoint`` asks for
    the state.

    Args:
        model: carries a recipe, or several in its parts that ask for the same optimizer state; weights are kept where
            any of them asks for it.
        optimizer: a ``torch.optim.Optimizer`` over the model's Parameters.
        keep_weights: quantize each weight that it steps once a step instead of at each use; in the step's own pass
            where it is a fused one on a GPU and the scale is a delayed one. None does as the recipe says.

    Returns:
        ``optimizer`` itself.

    Raises:
        NotBuiltError: the recipe wants a format that is not built for optimizer state.
        NarrowgateError: there is no recipe, or two that ask for different state; the optimizer's state is not known, or
            its parameters are not FP32.
    """
    applied = list(applied_recipes(model).values())
    if not applied:
        raise NarrowgateError(f"found no recipe on this {type(model).__name__}, expected one to wrap an optimizer for")
    first = applied[0]
    other = next((recipe for recipe in applied if recipe.state != first.state), None)
    if other is not None:
        raise NarrowgateError(
            f"recipe '{first.name}' asks for optimizer state in {first.state} and '{other.name}' for {other.state}, "
            "expected one format for an optimizer"
        )
    if first.state.format != "fp32":
        from ..precision.optimizer_state import lower_state

        names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters(model)}
        lower_state(optimizer, first.state, names=names, seed=first.seed)
    if keep_weights or (keep_weights is None and any(recipe.keep_weights for recipe in applied)):
        keep_weights_of(optimizer, everywhere=bool(keep_weights))
    _WRAPPED.update(module for module in model.modules() if module in _WAITING)
    return optimizer


def keep_weights_of(optimizer: Optimizer, *, everywhere: bool = True) -> None:
    """Quantize the weights that ``optimizer`` steps once a step; warn of layers where that is not possible, and why.

    A recipe is written for many machines: with ``everywhere`` off, weights that nothing would be saved on where they
    are now, those on a CPU and shards that travel in high precision, are passed over without a word.
    """
    from ..precision.kept_shards import keep_shard_codes
    from ..precision.kept_weights import keep_weights, worth_keeping
    from ..precision.optimizer_state import write_codes

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    layers: dict[str, list[str]] = {}
    sharded = keep_shard_codes(optimizer)
    for name, reason in keep_weights(p for p in parameters if everywhere or worth_keeping(p)).items():
        if name not in sharded:
            layers.setdefault(reason, []).append(name)
    write_codes(optimizer)
    for reason, names in layers.items():
        warnings.warn(
            f"keep_weights: quantized at each use all the same, {len(names)} weight(s), first '{names[0]}': {reason}",
            stacklevel=3,
        )


def expect_wrapped(model: nn.Module) -> None:
    """Warn at the first step of ``model`` if its optimizer does not do what its recipe asks of one."""
    _WAITING.add(model)
    _WRAPPED.discard(model)
    _install_hook()


@cache
def _install_hook() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))  # type: ignore[arg-type]


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _WAITING:
        return
    from ..precision.optimizer_state import state_spec

    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in list(_WAITING):
        # One for the tables alone, as SparseAdam, is not the optimizer that the recipe means.
        lowered = (p for layer in model.modules() if isinstance(layer, LowPrecisionLayer) for p in layer.parameters())
        awaited = [p for p in lowered if p.requires_grad] or model.parameters()
        if not any(id(parameter) in stepped for parameter in awaited):
            continue
        _WAITING.discard(model)
        applied = applied_recipes(model).get("")
        if applied is None:
            continue
        if applied.state.format != "fp32" and state_spec(optimizer).format == "fp32":
            missed = f"optimizer state in {applied.state}, this {type(optimizer).__name__} keeps its own"
        elif applied.keep_weights and applied.backend == "native" and model not in _WRAPPED:
            missed = f"weights quantized once a step, with this {type(optimizer).__name__} each use quantizes them"
        else:
            continue
        warnings.warn(
            f"recipe '{applied.name}' asks for {missed}: expected plan.wrap_optimizer(optimizer), or "
            "narrowgate.recipes.wrap_optimizer(model, optimizer)",
            stacklevel=2,
        )
