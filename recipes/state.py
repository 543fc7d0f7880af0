"""What a recipe remembers between steps, for checkpoints: beside ``model.state_dict()``, never in it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ..precision.errors import NarrowgateError, did_you_mean
from ..precision.layer import LowPrecisionLayer, layer_state
from ..precision.reduction import GradientReduction, reduction_of
from .apply import applied_recipes
from .errors import found
from .targets import named_modules

_VERSION = 1


def recipe_state(model: nn.Module) -> dict[str, Any]:
    """Return the state of the recipes on ``model``: tensors and plain values only.

    Keys: ``version``; ``recipes`` and ``names``, the hash and the name of each applied recipe by the name of its
    module; ``layers``, the tensors of each low-precision layer by its name; ``reductions``, by the name of each
    recipe's module whose gradients are reduced in low precision; ``exchanges``, of modules that exchange rows of
    embedding tables, by their names.

    Raises:
        NarrowgateError: no recipe is applied.
    """
    applied = applied_recipes(model)
    if not applied:
        raise NarrowgateError(f"found no recipe on this {type(model).__name__}, expected one to take the state of")
    return {
        "version": _VERSION,
        "recipes": {name: recipe.hash for name, recipe in applied.items()},
        "names": {name: recipe.name for name, recipe in applied.items()},
        "layers": {name: layer_state(module).state_dict() for name, module in _layers(model).items()},
        "reductions": {name: reduction.state_dict() for name, reduction in _reductions(model).items()},
        "exchanges": {name: module.exchange_state() for name, module in _exchanges(model).items()},
    }


def load_recipe_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Restore what :func:`recipe_state` returned into a model that carries the same recipe.

    Another recipe's hash warns once, naming both, and goes on as long as the layers are the same.

    Raises:
        NarrowgateError: not such a state, or its low-precision layers are not those of ``model``; nothing is restored.
    """
    if not isinstance(state, dict) or not {"version", "recipes", "layers"} <= state.keys():
        raise NarrowgateError(f"found {found(state)}, expected what recipe_state returned")
    if state["version"] != _VERSION:
        raise NarrowgateError(f"found recipe state of version {state['version']}, expected {_VERSION}")
    layers, saved = _layers(model), state["layers"]
    for name in saved:
        if name not in layers:
            hint = did_you_mean(name, layers)
            raise NarrowgateError(f"found state of layer '{name}', which is not low-precision in this model{hint}")
    for name in layers:
        if name not in saved:
            raise NarrowgateError(f"found no state of low-precision layer '{name}', expected it")
    # Of modules that exchange nothing here, or did not there: tables may be whole on one of the sides.
    exchanges = _checked_exchanges(state.get("exchanges", {}))
    here = applied_recipes(model)
    if {name: recipe.hash for name, recipe in here.items()} != state["recipes"]:
        there = _told({name: (hash_, state.get("names", {}).get(name)) for name, hash_ in state["recipes"].items()})
        ours = _told({name: (recipe.hash, recipe.name) for name, recipe in here.items()})
        warnings.warn(f"recipe state was saved under recipe {there}, this model carries {ours}", stacklevel=2)
    for name, module in layers.items():
        layer_state(module).load_state_dict(saved[name])
    reductions = state.get("reductions", {})
    for name, reduction in _reductions(model).items():
        if name in reductions:  # another recipe's state may have none, which the hashes told
            reduction.load_state_dict(reductions[name])
    for name, module in _exchanges(model).items():
        if name in exchanges:
            module.load_exchange_state(exchanges[name])


class RecipeState:
    """A model's recipe state as a ``Stateful`` of ``torch.distributed.checkpoint``, on any number of ranks.

    Its tensors are no shards, so a checkpoint holds one rank's: amax histories that are each rank's own come back as
    that one's. :func:`narrowgate.precision.share_amaxes` makes them alike on all ranks, and resuming exact.
    """

    def __init__(self, model: nn.Module) -> None:
        """Stand for the recipe state of ``model``, which carries a recipe."""
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return :func:`recipe_state` of the model."""
        return recipe_state(self._model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore with :func:`load_recipe_state`."""
        load_recipe_state(self._model, state_dict)


def _layers(model: nn.Module) -> dict[str, LowPrecisionLayer]:
    return {name: module for name, module, _ in named_modules(model) if isinstance(module, LowPrecisionLayer)}


def _reductions(model: nn.Module) -> dict[str, GradientReduction]:
    found = ((name, reduction_of(module)) for name, module, _ in named_modules(model))
    return {name: reduction for name, reduction in found if reduction is not None}


def _exchanges(model: nn.Module) -> dict[str, Any]:
    """Modules that say by their methods that they exchange rows; what they are is defined above this package."""
    found = ((name, module) for name, module, _ in named_modules(model))
    return {name: module for name, module in found if callable(getattr(type(module), "load_exchange_state", None))}


def _checked_exchanges(exchanges: Any) -> dict[str, dict[str, int]]:
    """What ``exchanges`` of a state must be: counts by module and lookup."""
    if not isinstance(exchanges, dict):
        raise NarrowgateError(f"exchanges of a recipe state: found {found(exchanges)}, expected counts by module")
    for name, counts in exchanges.items():
        if not isinstance(counts, dict) or not all(type(n) is int and n >= 0 for n in counts.values()):
            raise NarrowgateError(f"exchanges of '{name}' in a recipe state: found {counts}, expected counts by lookup")
    return exchanges


def _told(recipes: dict[str, tuple[str, str | None]]) -> str:
    """Recipes as text, by the name of their module: name and hash."""
    return ", ".join(
        (f"'{own}' ({hash_[:12]})" if own else hash_[:12]) + (f" on '{name}'" if name else "")
        for name, (hash_, own) in recipes.items()
    ) or "none"  # fmt: skip
