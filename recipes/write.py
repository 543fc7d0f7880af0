"""A :class:`Recipe` back to data, to YAML, and to the hash that names it."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

from ruamel.yaml import YAML

from ..precision.config import OPERANDS
from ..precision.spec import Spec
from .recipe import Activations, OptimizerState, Path, Recipe, Rule, Shards

#: Raised when the canonical form changes: hashes of different forms are not comparable.
_CANONICAL_VERSION = 1


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return ``recipe`` as data shaped like the file; what is not set is left out."""
    data: dict[str, Any] = {"recipe": recipe.name}
    if recipe.description:
        data["description"] = recipe.description
    if recipe.extends is not None:
        data["extends"] = recipe.extends
    if recipe.defaults is not None:
        data["defaults"] = str(recipe.defaults)
    if recipe.rules:
        data["rules"] = [_rule_dict(rule) for rule in recipe.rules]
    if recipe.shards is not None:
        data["shards"] = _shards_dict(recipe.shards)
    if recipe.activations is not None:
        data["activations"] = {"save": str(recipe.activations.save)}
    if recipe.optimizer is not None:
        data["optimizer"] = _optimizer_dict(recipe.optimizer)
    if recipe.backend is not None:
        data["backend"] = recipe.backend
    return data


def to_yaml(recipe: Recipe) -> str:
    """Return the text of a recipe file that reads back equal to ``recipe``."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # keep the documented key order
    yaml.allow_unicode = True
    yaml.width = 110
    out = io.StringIO()
    yaml.dump(to_dict(recipe), out)
    return out.getvalue()


def recipe_hash(recipe: Recipe) -> str:
    """Return the SHA-256 of canonical JSON: what the recipe does, whatever its spelling.

    ``extends`` is followed, operands are spelled out, expressions take their canonical form and defaults are
    filled in; name, description and backend are left out.
    """
    flat = recipe.flatten()
    canonical = {
        "version": _CANONICAL_VERSION,
        "defaults": str(flat.defaults or Spec(format="bf16")),
        "rules": [_canonical_rule(rule) for rule in flat.rules],
        "shards": _canonical_shards(flat.shards or Shards()),
        "activations": str((flat.activations or Activations()).save),
        "optimizer": _canonical_optimizer(flat.optimizer or OptimizerState()),
    }
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical_rule(rule: Rule) -> dict[str, Any]:
    where = rule.condition()
    return {
        "layers": list(rule.layers),
        "where": None if where is None else where.canonical,
        "optional": rule.optional,
        "set": {field: str(value) for field, value in rule.settings().items()},
    }


def _rule_dict(rule: Rule) -> dict[str, Any]:
    data: dict[str, Any] = {"layers": rule.layers[0] if len(rule.layers) == 1 else list(rule.layers)}
    if rule.where is not None:
        data["where"] = rule.where
    if rule.optional:
        data["optional"] = True
    if rule.all is not None:
        data["all"] = str(rule.all)
    for path, operands in OPERANDS.items():
        own: Path | None = getattr(rule, path)
        if own is not None:
            data[path] = _path_value(own, operands)
    if rule.when is not None:
        data["when"] = rule.when
    return data


def _path_value(path: Path, operands: tuple[str, str]) -> str | dict[str, str]:
    values = dict(path.items())
    first, second = (values.get(operand) for operand in operands)
    if first is not None and first == second and path.accumulate is None:
        return str(first)
    return {name: str(values[name]) for name in (*operands, "accumulate") if name in values}


def _shards_dict(shards: Shards) -> dict[str, Any]:
    data: dict[str, Any] = {"all_gather": str(shards.all_gather)}
    if shards.reduce_scatter is not None:
        data["reduce_scatter"] = str(shards.reduce_scatter)
    if shards.requantize:
        data["requantize"] = True
    if shards.tables is not None:
        data["tables"] = shards.tables.to_dict()
    return data


def _optimizer_dict(optimizer: OptimizerState) -> dict[str, Any]:
    """Return the ``optimizer`` part as the file has it."""
    data: dict[str, Any] = {"state": str(optimizer.state)}
    return {**data, "keep_weights": True} if optimizer.keep_weights else data


def _canonical_optimizer(optimizer: OptimizerState) -> str | dict[str, Any]:
    # A text where there is but the state, as before there was more: so the hash of such a recipe is what it was.
    return _optimizer_dict(optimizer) if optimizer.keep_weights else str(optimizer.state)


def _canonical_shards(shards: Shards) -> dict[str, Any]:
    # "bf16" stands for FSDP2's own reduction, as it did before gradients could travel in a format of the recipe's: so
    # the hash of a recipe that leaves them alone is what it was.
    reduce = shards.reduce_scatter
    own = "bf16" if reduce is None else f"{reduce} summed in fp32"
    return {**_shards_dict(shards), "reduce_scatter": own}
