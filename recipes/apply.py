"""Recipes on models: apply in place, take off again, and switch the decorator off for a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any
from weakref import ref

from torch import nn

from ..precision.backends import backend_of, get_backend
from ..precision.capability import Device
from ..precision.errors import NarrowgateError, NotBuiltError, did_you_mean
from ..precision.saved import keep_saved, release_saved
from ..precision.sharding import release_weights
from ..precision.spec import Spec
from .errors import Diagnostic, RecipeError, found
from .load import load_recipe
from .plan import Plan
from .profit import undecided
from .rates import Rates
from .recipe import BACKENDS, OptimizerState, Recipe
from .resolution import resolve
from .rows import measure_rows
from .runnable import inexpressible_in_plan, not_built_in_parts
from .saved_activations import save_format
from .shards import check_shards, gather_low, own_reduction, reduce_low
from .targets import find_targets, named_modules, unwrap

#: Where a module that a recipe was applied to keeps its :class:`Applied`; a plain attribute, never in ``state_dict()``.
_MARK = "_narrowgate_recipe"
_DISABLED: ContextVar[bool] = ContextVar("narrowgate_disabled", default=False)


@dataclass(frozen=True)
class Applied:
    """What a module remembers of the recipe it carries."""

    name: str
    hash: str
    seed: int
    backend: str
    #: How an optimizer keeps its state.
    state: Spec
    #: Whether weights are quantized once an optimizer step.
    keep_weights: bool = False


def apply_recipe(
    model: nn.Module,
    recipe: str | FilePath | Recipe,
    *,
    backend: str | None = None,
    seed: int = 0,
    device: Device | None = None,
    rows: Mapping[str, int] | int | None = None,
    sample: Callable[[], Any] | None = None,
    rates: Rates | str | FilePath | None = None,
) -> Plan:
    """Make ``model`` train by ``recipe``, in place.

    Layers that the recipe leaves in BF16 are not touched. The others keep their Parameters, names, hooks and
    ``isinstance(m, nn.Linear)``; an optimizer built before stays valid. With a low-precision ``shards.all_gather``,
    weights become other Parameters of the same name and values: call it before ``fully_shard`` and build the optimizer
    after both. With ``shards.reduce_scatter``, the first forward after ``fully_shard`` takes FSDP2's reductions over.

    Args:
        model: any module; its ``nn.Linear`` layers are the targets.
        recipe: a built-in name, a path, or a :class:`Recipe`.
        backend: overrides the recipe's backend.
        seed: seed of the stochastic rounding, the same on every rank.
        device: what the returned plan calls native or emulated; None is the model's own device. What runs
            depends on where the tensors are, whatever this says.
        rows: M, the rows that each layer multiplies in one step, by name or one number for all: what
            ``when: profitable`` decides by.
        sample: runs the model on one batch, to see the rows instead: ``lambda: model(batch)``.
        rates: a file of measured rates, as ``scripts/bench_gemm_rates`` writes it; None is what ships for ``device``.

    Returns:
        The resolved plan.

    Raises:
        RecipeError: the recipe does not parse or does not fit the model, or the backend cannot express it (lists every
            layer, path and reason), or ``when: profitable`` lacks rows or rates (says which).
        NotBuiltError: it asks for something that this version cannot run; names it with rule and line.
        NarrowgateError: a recipe is applied already, in the model or in a part of it, or the backend is not there;
            ``rows`` and ``sample`` are both given; with a low-precision ``shards.all_gather``, the model is sharded
            already, or an optimizer has its weights.
    """
    if not isinstance(model, nn.Module):
        raise NarrowgateError(f"found {found(model)}, expected a torch.nn.Module to apply a recipe to")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise NarrowgateError(f"seed: found {found(seed)}, expected a whole number")
    check_backend(backend)
    loaded = load_recipe(recipe)
    refuse_second(model, loaded)
    if sample is not None:
        if rows is not None:
            raise NarrowgateError("found both rows and sample, expected one of them")
        rows = measure_rows(unwrap(model), sample)
    plan = resolve(loaded, model, device=device, backend=backend, rows=rows, rates=rates)
    missing = not_built_in_parts(loaded, backend)
    if missing:
        raise NotBuiltError("\n".join(str(finding) for finding in missing))
    unusable = inexpressible_in_plan(plan) or undecided(plan)
    if unusable:
        raise RecipeError(unusable)
    runs_on = get_backend(plan.backend)
    there, reason = runs_on.available()
    if plan.lowered and not there:
        raise NarrowgateError(f"backend {runs_on.name}: {reason}")
    targets, _ = find_targets(model)
    check_shards(unwrap(model), targets, plan)
    where = next((parameter.device for parameter in model.parameters()), None)
    done: list[nn.Module] = []
    try:
        for target, layer in zip(targets, plan.layers, strict=True):
            if not layer.config.high_precision:
                runs_on.lower(target.module, layer.config, name=layer.name, seed=seed, device=where)
                done.append(target.module)
        runs_on.attach(unwrap(model), [layer.config for layer in plan.lowered])
        gather_low(targets, plan)
        reduce_low(unwrap(model), plan, seed)
        saved_as = save_format(loaded)
        if saved_as is not None:
            keep_saved(unwrap(model), saved_as)
    except BaseException:  # never leave half a model behind
        release_weights(done)
        own_reduction(unwrap(model))
        release_saved(unwrap(model))
        for module in done:
            runs_on.restore(module)
        raise
    mark(model, loaded, seed, plan.backend)
    wanted = optimizer_of(loaded)
    if wanted.state.format != "fp32" or (wanted.keep_weights and plan.backend == "native"):
        from .optimizer import expect_wrapped

        expect_wrapped(unwrap(model))
    return replace(plan, model=ref(unwrap(model)))


def remove_recipe(model: nn.Module) -> None:
    """Undo :func:`apply_recipe`: every layer of ``model`` is what it was, with the Parameters it has now.

    Raises:
        NarrowgateError: no recipe is applied to the model or a part of it.
    """
    lowered = [(module, backend_of(module)) for _, module, _ in named_modules(model)]
    if not any(backend for _, backend in lowered) and not applied_recipes(model):
        raise NarrowgateError(f"found no recipe on this {type(model).__name__}, expected one to remove")
    release_weights([module for module, _ in lowered])
    for module, backend in lowered:
        if backend is not None:
            backend.restore(module)
    for _, module, _ in named_modules(model):
        applied = module.__dict__.pop(_MARK, None)
        if applied is not None:
            own_reduction(module)
            release_saved(module)
            get_backend(applied.backend).detach(module)


def applied_recipes(model: nn.Module) -> dict[str, Applied]:
    """Return what recipes ``model`` carries, by the name of the module each was applied to (``""`` is ``model``)."""
    return {name: module.__dict__[_MARK] for name, module, _ in named_modules(model) if _MARK in module.__dict__}


@contextmanager
def disabled() -> Iterator[None]:
    """Within this block models of a :func:`narrowgate.recipes.low_precision` decorator are built without recipe.

    An explicit :func:`apply_recipe` still applies. Holds for the current thread or async task.
    """
    token = _DISABLED.set(True)
    try:
        yield
    finally:
        _DISABLED.reset(token)


def is_disabled() -> bool:
    """Return whether :func:`disabled` is in force here."""
    return _DISABLED.get()


def check_backend(backend: str | None) -> None:
    """Refuse a backend that does not exist."""
    if backend is not None and backend not in BACKENDS:
        hint = did_you_mean(backend, BACKENDS) if isinstance(backend, str) else ""
        raise RecipeError(
            [Diagnostic(message=f"backend: found {found(backend)}, expected {', '.join(BACKENDS)}{hint}")]
        )


def mark(model: nn.Module, recipe: Recipe, seed: int, backend: str) -> None:
    """Have ``model`` remember the recipe that it carries now."""
    wanted = optimizer_of(recipe)
    unwrap(model).__dict__[_MARK] = Applied(
        recipe.name, recipe.hash(), seed, backend, wanted.state, wanted.keep_weights
    )


def optimizer_of(recipe: Recipe) -> OptimizerState:
    """Return what ``recipe`` asks of an optimizer."""
    return recipe.flatten().optimizer or OptimizerState()


def refuse_second(model: nn.Module, recipe: Recipe) -> None:
    """Raise NarrowgateError where ``model`` or a part of it carries a recipe already."""
    for name, applied in applied_recipes(model).items():
        where = f"'{name}' of this model" if name else "this model"
        raise NarrowgateError(
            f"{where} carries recipe '{applied.name}' already, found a second one, '{recipe.name}'; "
            "expected one (remove_recipe takes the first off)"
        )
    for name, module, _ in named_modules(model):
        if backend_of(module) is not None:
            raise NarrowgateError(
                f"layer '{name}' is low-precision already, found a second recipe, '{recipe.name}'; "
                "expected one (remove_recipe takes the first off)"
            )
