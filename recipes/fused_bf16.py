"""A recipe's layers in BF16 on the fused cast kernels: the arm between the baseline and the recipe.

What this arm gains over BF16 comes from where values are written, what the recipe gains over this arm from the formats.
"""

from __future__ import annotations

from pathlib import Path as FilePath

from torch import nn

from ..precision.backends import get_backend
from ..precision.fused_bf16 import lower_fused_bf16
from .apply import mark, refuse_second
from .load import load_recipe
from .recipe import Recipe
from .resolution import resolve
from .targets import find_targets, unwrap


def apply_fused_bf16(model: nn.Module, recipe: str | FilePath | Recipe) -> list[str]:
    """Make the linear layers that ``recipe`` would quantize multiply in BF16 on the fused kernels, in place.

    :func:`narrowgate.recipes.remove_recipe` takes it off again. Targets that are no plain ``nn.Linear`` (batched
    products, attention's packed projections, grouped experts) stay as they are.

    Args:
        model: any module.
        recipe: a built-in name, a path, or a :class:`Recipe`.

    Returns:
        The names of the layers that were lowered.

    Raises:
        RecipeError: the recipe does not parse or does not fit the model.
        NarrowgateError: a recipe is applied to the model already.
    """
    loaded = load_recipe(recipe)
    refuse_second(model, loaded)
    plan = resolve(loaded, model, backend="native")
    names: list[str] = []
    for target, layer in zip(find_targets(model)[0], plan.layers, strict=True):
        module = target.module
        if not layer.config.high_precision and isinstance(module, nn.Linear):
            lower_fused_bf16(module, name=layer.name)
            names.append(layer.name)
    get_backend("native").attach(unwrap(model), [])
    mark(model, loaded, 0, "native")
    return names
