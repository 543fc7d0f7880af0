"""narrowgate.recipes: which layers train in which number format, as a file, as objects, and applied to a model.

The names below are loaded on first use: importing this package brings in neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..precision.spec import Spec
    from .apply import apply_recipe, disabled, remove_recipe
    from .decorator import low_precision
    from .errors import Diagnostic, RecipeError, github_annotations
    from .fused_bf16 import apply_fused_bf16
    from .fused_casts import CastPlan, plan_casts
    from .load import builtin_names, builtin_text, load_recipe
    from .optimizer import wrap_optimizer
    from .plan import LayerPlan, Origin, Plan
    from .rates import load_rates, rates_schema
    from .recipe import Activations, OptimizerState, Path, Recipe, Rule, Shards, Tables
    from .resolution import resolve
    from .rows import measure_rows
    from .saved_activations import SavedInput, SavedModule
    from .saved_trace import plan_saved
    from .schema import recipe_schema, recipe_schema_text
    from .state import RecipeState, load_recipe_state, recipe_state
    from .topology import Topology, load_topology, topology_schema
    from .tracing import GemmTrace, TracedGemm, trace_gemms
    from .validate import Validation, validate_file
    from .wire_plan import Layout, Wire, predict_wire
    from .wire_units import Sharding

_HOMES = {
    "Activations": ".recipe",
    "CastPlan": ".fused_casts",
    "Diagnostic": ".errors",
    "GemmTrace": ".tracing",
    "LayerPlan": ".plan",
    "Layout": ".wire_plan",
    "OptimizerState": ".recipe",
    "Origin": ".plan",
    "Path": ".recipe",
    "Plan": ".plan",
    "Recipe": ".recipe",
    "RecipeError": ".errors",
    "RecipeState": ".state",
    "Rule": ".recipe",
    "SavedInput": ".saved_activations",
    "SavedModule": ".saved_activations",
    "Sharding": ".wire_units",
    "Shards": ".recipe",
    "Spec": "..precision.spec",
    "Tables": ".recipe",
    "Topology": ".topology",
    "TracedGemm": ".tracing",
    "Validation": ".validate",
    "Wire": ".wire_plan",
    "apply_fused_bf16": ".fused_bf16",
    "apply_recipe": ".apply",
    "builtin_names": ".load",
    "builtin_text": ".load",
    "disabled": ".apply",
    "github_annotations": ".errors",
    "load_rates": ".rates",
    "load_recipe": ".load",
    "load_recipe_state": ".state",
    "load_topology": ".topology",
    "low_precision": ".decorator",
    "measure_rows": ".rows",
    "predict_wire": ".wire_plan",
    "rates_schema": ".rates",
    "plan_casts": ".fused_casts",
    "plan_saved": ".saved_trace",
    "recipe_schema": ".schema",
    "recipe_schema_text": ".schema",
    "recipe_state": ".state",
    "remove_recipe": ".apply",
    "resolve": ".resolution",
    "topology_schema": ".topology",
    "trace_gemms": ".tracing",
    "validate_file": ".validate",
    "wrap_optimizer": ".optimizer",
}

__all__ = [
    "Activations",
    "CastPlan",
    "Diagnostic",
    "GemmTrace",
    "LayerPlan",
    "Layout",
    "OptimizerState",
    "Origin",
    "Path",
    "Plan",
    "Recipe",
    "RecipeError",
    "RecipeState",
    "Rule",
    "SavedInput",
    "SavedModule",
    "Sharding",
    "Shards",
    "Spec",
    "Tables",
    "Topology",
    "TracedGemm",
    "Validation",
    "Wire",
    "apply_fused_bf16",
    "apply_recipe",
    "builtin_names",
    "builtin_text",
    "disabled",
    "github_annotations",
    "load_rates",
    "load_recipe",
    "load_recipe_state",
    "load_topology",
    "low_precision",
    "measure_rows",
    "plan_casts",
    "plan_saved",
    "predict_wire",
    "rates_schema",
    "recipe_schema",
    "recipe_schema_text",
    "recipe_state",
    "remove_recipe",
    "resolve",
    "topology_schema",
    "trace_gemms",
    "validate_file",
    "wrap_optimizer",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __package__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
