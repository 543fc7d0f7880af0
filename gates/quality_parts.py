"""Where quality is lost: the recipe on one part of the model alone, and on all but that part.

Parts are groups of layers (by the first components of their names) and the three GEMM paths. Each is trained *only* on
itself, where everything else is BF16, and *without* itself, where only it is BF16, as pairs with the same baselines.
The two answer different questions: what a part costs by itself, and what leaving it out of the recipe would give back.
They need not add up: errors interact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..precision.config import PATHS
from ..recipes.recipe import Rule
from .measurements import PartEffect, PartQuality

if TYPE_CHECKING:
    from ..recipes.plan import Plan
    from ..recipes.recipe import Recipe
    from .pairs import Pair

#: Groups of layers at most.
MOST_GROUPS = 8


@dataclass(frozen=True)
class Part:
    """A part of a recipe's plan, with the recipe on it alone and on all but it."""

    kind: Literal["layers", "path"]
    name: str
    layers: int
    only: Recipe
    without: Recipe


def parts_of(plan: Plan) -> list[Part]:
    """Split what a plan quantizes into groups of layers and into paths; a kind with one part only is left out."""
    names = [layer.name for layer in plan.layers if not layer.config.high_precision]
    recipe, found = plan.recipe.flatten(), []
    groups = layer_groups(names)
    for group, own in groups.items() if len(groups) > 1 else ():
        rest = [name for name in names if name not in own]
        found.append(
            Part("layers", group, len(own), _dense(recipe, rest, f"only-{group}"), _dense(recipe, own, f"no-{group}"))
        )
    low = {
        path: [layer.name for layer in plan.layers if not getattr(layer.config, path).high_precision] for path in PATHS
    }
    paths = [path for path in PATHS if low[path]]
    for path in paths if len(paths) > 1 else ():
        others = [other for other in paths if other != path]
        found.append(
            Part(
                "path",
                path,
                len(low[path]),
                _dense_paths(recipe, {other: low[other] for other in others}, f"only-{path}"),
                _dense_paths(recipe, {path: low[path]}, f"no-{path}"),
            )
        )
    return found


def layer_groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Group layers by as many first components of their names as leave 2 to :data:`MOST_GROUPS` groups.

    Where no number of components does (a long list of blocks, many towers), groups are runs of neighbours instead.

    Args:
        names: layers, in registration order.
    """
    deepest = max((name.count(".") + 1 for name in names), default=0)
    chosen: dict[str, list[str]] = {}
    for depth in range(1, deepest + 1):
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
        if len(chosen) > 1 and len(groups) > MOST_GROUPS:
            break
        chosen = groups
        if len(groups) > MOST_GROUPS:
            break
    keys = list(chosen)
    runs = min(MOST_GROUPS, len(keys))
    found: dict[str, list[str]] = {}
    for i in range(runs):
        own = keys[i * len(keys) // runs : (i + 1) * len(keys) // runs]
        name = own[0] if len(own) == 1 else f"{own[0]} to {own[-1]}"
        found[name] = [layer for key in own for layer in chosen[key]]
    return found


def part_quality(part: Part, only: Sequence[Pair], without: Sequence[Pair]) -> PartQuality:
    """Return what a part's pairs showed, by task and seed."""
    return PartQuality(
        kind=part.kind, name=part.name, layers=part.layers, only=effects_of(only), without=effects_of(without)
    )


def effects_of(pairs: Sequence[Pair]) -> dict[str, PartEffect]:
    """Return the paired differences of one recipe's pairs by task; a seed without a value has none."""
    found: dict[str, PartEffect] = {}
    for task in pairs[0].tasks if pairs else ():
        ne, auc = [], []
        for pair in pairs:
            own, other = pair.run.candidate.quality[task], pair.run.baseline.quality[task]
            if own.ne is not None and other.ne is not None:
                ne.append(own.ne / other.ne - 1)
            if own.auc is not None and other.auc is not None:
                auc.append(other.auc - own.auc)
        found[task] = PartEffect(seeds=len(pairs), ne_increase=tuple(ne), auc_loss=tuple(auc))
    return found


def _dense(recipe: Recipe, layers: Sequence[str], name: str) -> Recipe:
    """Return ``recipe`` with ``layers`` in BF16."""
    rule = Rule(layers=tuple(layers), all="bf16")
    return replace(recipe, name=_name(name), rules=(*recipe.rules, rule))


def _dense_paths(recipe: Recipe, paths: dict[str, list[str]], name: str) -> Recipe:
    """Return ``recipe`` with some paths of some layers in BF16."""
    rules: list[Rule] = []
    for path, layers in paths.items():
        fields: dict[str, Any] = {"layers": tuple(layers), path: "bf16"}
        rules.append(Rule(**fields))
    return replace(recipe, name=_name(name), rules=(*recipe.rules, *rules))


def _name(text: str) -> str:
    """Return what a recipe may be called; names only tell progress which arm trains."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:64]
