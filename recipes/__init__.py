"""narrowgate.recipes: which layers train in which number format, as a file, as objects, and applied to a model.

The names below are loaded on first use: importing this package brings in neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..precision.spec import Spec
    from .errors import Diagnostic, RecipeError, github_annotations
    from .load import builtin_names, builtin_text, load_recipe
    from .recipe import Activations, OptimizerState, Path, Recipe, Rule, Shards
    from .schema import recipe_schema, recipe_schema_text

_HOMES = {
    "Activations": ".recipe",
    "Diagnostic": ".errors",
    "OptimizerState": ".recipe",
    "Path": ".recipe",
    "Recipe": ".recipe",
    "RecipeError": ".errors",
    "Rule": ".recipe",
    "Shards": ".recipe",
    "Spec": "..precision.spec",
    "builtin_names": ".load",
    "builtin_text": ".load",
    "github_annotations": ".errors",
    "load_recipe": ".load",
    "recipe_schema": ".schema",
    "recipe_schema_text": ".schema",
}

__all__ = [
    "Activations",
    "Diagnostic",
    "OptimizerState",
    "Path",
    "Recipe",
    "RecipeError",
    "Rule",
    "Shards",
    "Spec",
    "builtin_names",
    "builtin_text",
    "github_annotations",
    "load_recipe",
    "recipe_schema",
    "recipe_schema_text",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __package__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
