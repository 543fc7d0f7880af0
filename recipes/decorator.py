"""``@low_precision``: a recipe on a model's class or on the function that builds it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeVar

from torch import nn

from ..precision.errors import NarrowgateError
from .apply import apply_recipe, check_backend, is_disabled
from .errors import found
from .load import load_recipe
from .recipe import Recipe

_Target = TypeVar("_Target", bound=Callable[..., Any])

#: On a decorated class and, by inheritance, on its subclasses; the most derived decoration counts.
_ORDER = "__narrowgate_order__"
#: On a wrapped ``__init__``, naming itself: a copy of its attributes onto another function does not count.
_SELF = "__narrowgate_init__"
#: How many wrapped ``__init__`` of an instance are running.
_DEPTH = "_narrowgate_init_depth"


@dataclass(frozen=True)
class _Order:
    recipe: Recipe
    backend: str | None
    seed: int

    def apply(self, model: nn.Module) -> None:
        if not is_disabled():
            apply_recipe(model, self.recipe, backend=self.backend, seed=self.seed)


def low_precision(
    recipe: str | FilePath | Recipe, backend: str | None = None, *, seed: int = 0
) -> Callable[[_Target], _Target]:
    """Return a decorator that applies ``recipe`` to every model that its target builds.

    On an ``nn.Module`` class it returns the same class, whose instances get the recipe once, when the outermost
    ``__init__`` is done; a subclass inherits that, and may be decorated with another recipe. On a function, or
    anything else that is called and returns a module (``functools.partial``), it returns a function that does the
    same with the result. The recipe is read when the decorator is made, so a fault shows where it stands.

    Args:
        recipe: a built-in name, a path, or a :class:`Recipe`.
        backend: overrides the recipe's backend.
        seed: seed of the stochastic rounding.

    Raises:
        RecipeError: the recipe does not parse.
        NarrowgateError: the target is neither an ``nn.Module`` class nor callable.
    """
    if isinstance(recipe, type) or not isinstance(recipe, str | FilePath | Recipe):
        raise NarrowgateError(f"found {found(recipe)} for a recipe, expected @low_precision('NAME') with one")
    check_backend(backend)
    order = _Order(load_recipe(recipe), backend, seed)

    def decorate(target: _Target) -> _Target:
        if isinstance(target, type):
            return _decorate_class(target, order)  # type: ignore[return-value]
        if isinstance(target, nn.Module):
            raise NarrowgateError(
                f"low_precision: found a {type(target).__name__} that is built already, expected its class or what "
                "builds it; apply_recipe(model, recipe) takes a model"
            )
        if not callable(target):
            raise NarrowgateError(f"low_precision: found {found(target)}, expected a class or a function")
        return _decorate_function(target, order)  # type: ignore[return-value]

    return decorate


def _decorate_function(build: Callable[..., Any], order: _Order) -> Callable[..., nn.Module]:
    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> nn.Module:
        model = build(*args, **kwargs)
        if not isinstance(model, nn.Module):
            name = getattr(build, "__qualname__", None) or repr(build)
            raise NarrowgateError(f"low_precision: {name} returned {found(model)}, expected a torch.nn.Module")
        order.apply(model)
        return model

    return built


def _decorate_class(cls: type, order: _Order) -> type:
    if not issubclass(cls, nn.Module):
        raise NarrowgateError(f"low_precision: found class {cls.__name__}, expected a subclass of torch.nn.Module")
    inherited = hasattr(cls, _ORDER)
    setattr(cls, _ORDER, order)
    _wrap_init(cls)
    if not inherited:
        _follow_subclasses(cls)
    return cls


def _follow_subclasses(cls: type) -> None:
    """Wrap the ``__init__`` of every later subclass, so that it is the outermost one that applies."""
    own = cls.__dict__.get("__init_subclass__")

    def __init_subclass__(sub: type, **kwargs: Any) -> None:
        if own is not None:
            own.__get__(None, sub)(**kwargs)
        else:
            super(cls, sub).__init_subclass__(**kwargs)  # type: ignore[misc]
        _wrap_init(sub)

    cls.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]


def _wrap_init(cls: type) -> None:
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    if getattr(init, _SELF, None) is init:
        return

    @functools.wraps(init)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        depth = self.__dict__.get(_DEPTH, 0)
        self.__dict__[_DEPTH] = depth + 1
        try:
            init(self, *args, **kwargs)
        finally:
            if depth:
                self.__dict__[_DEPTH] = depth
            else:
                self.__dict__.pop(_DEPTH, None)
        if not depth:
            getattr(type(self), _ORDER).apply(self)

    setattr(__init__, _SELF, __init__)
    cls.__init__ = __init__  # type: ignore[misc]
