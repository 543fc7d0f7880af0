"""The commands that only read recipes: ``recipes``, ``show``, ``validate``, ``schema``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from ..precision.errors import NarrowgateError, did_you_mean
from ..recipes import Diagnostic, RecipeError, builtin_names, builtin_text, github_annotations, load_recipe
from ..recipes.recipe import Recipe
from ..recipes.validate import validate_file
from . import exits

_FORMATS = ("text", "github", "json")


def recipes_command(as_json: bool) -> None:
    """Print the built-in recipes, each with the first sentence of its description."""
    found = [load_recipe(name) for name in builtin_names()]
    if as_json:
        facts = [{"name": r.name, "description": r.description, "hash": r.hash()} for r in found]
        print(json.dumps(facts, indent=1))
        return
    width = max((len(r.name) for r in found), default=0)
    for recipe in found:
        first, _, _ = " ".join(recipe.description.split()).partition(". ")
        print(f"{recipe.name.ljust(width)}  {first.removesuffix('.')}".rstrip())


def show_command(name: str, as_json: bool) -> None:
    """Print a recipe's text, or its resolved data."""
    if as_json:
        print(json.dumps(load_recipe(name).resolved_dict(), indent=1))
    else:
        sys.stdout.write(builtin_text(name))


def _recipe_schema() -> dict[str, Any]:
    from ..recipes import recipe_schema

    return recipe_schema()


def _rates_schema() -> dict[str, Any]:
    from ..recipes import rates_schema

    return rates_schema()


def _topology_schema() -> dict[str, Any]:
    from ..recipes import topology_schema

    return topology_schema()


def _policy_schema() -> dict[str, Any]:
    from .policy import Policy

    return {"$schema": _DIALECT, **Policy.model_json_schema()}


def _gates_schema() -> dict[str, Any]:
    from .gates_file import gates_schema

    return gates_schema()


def _report_schema() -> dict[str, Any]:
    from .report import report_schema

    return report_schema()


def _search_schema() -> dict[str, Any]:
    from .search_record import search_schema

    return search_schema()


_DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: The kinds of files that have a JSON Schema.
SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "recipe": _recipe_schema,
    "policy": _policy_schema,
    "gates": _gates_schema,
    "report": _report_schema,
    "search": _search_schema,
    "rates": _rates_schema,
    "topology": _topology_schema,
}


def schema_command(name: str) -> None:
    """Print the JSON Schema of one kind of file."""
    if name not in SCHEMAS:
        raise NarrowgateError(f"schema: found '{name}', expected {', '.join(SCHEMAS)}{did_you_mean(name, SCHEMAS)}")
    print(json.dumps(SCHEMAS[name](), indent=2, ensure_ascii=False))


def validate_command(file: str, output_format: str, require_native: str | None, model: str | None) -> int:
    """Print what can be said of a recipe and return the exit code: 2 where that holds an error, else 0."""
    if output_format not in _FORMATS:
        hint = did_you_mean(output_format, _FORMATS)
        raise NarrowgateError(f"--output-format: found '{output_format}', expected {', '.join(_FORMATS)}{hint}")
    found = validate_file(file, require_native=require_native)
    findings = list(found.diagnostics)
    if model is not None and found.recipe is not None:
        findings += _against_model(found.recipe, model, require_native)
    broken = any(finding.severity == "error" for finding in findings)
    if output_format == "json":
        print(json.dumps({"valid": not broken, "diagnostics": [finding.to_dict() for finding in findings]}, indent=1))
    elif output_format == "github":
        for line in github_annotations(findings):
            print(line)
    else:
        for finding in findings:
            print(finding, file=sys.stderr)
        if not broken:
            print(f"{file}: {found.summary}")
    return exits.USAGE if broken else exits.ACCEPT


def _against_model(recipe: Recipe, model: str, require_native: str | None) -> list[Diagnostic]:
    """Resolve a recipe against a built-in model: what only a model's layers can show."""
    from ..precision.capability import named_device
    from ..recipes import resolve
    from .task import TaskSource

    device = named_device(require_native or "cpu")
    try:
        plan = resolve(recipe, TaskSource(model=model, device="meta").open().build_model(), device=device)
    except RecipeError as error:
        return list(error.diagnostics)
    file = recipe.source.file if recipe.source else "<python>"
    emulated = plan.emulated_reasons() if require_native is not None else []
    return [*plan.warnings, *(Diagnostic(message=f"not native: {reason}", file=file) for reason in emulated)]
