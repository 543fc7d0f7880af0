"""The commands that only read recipes: ``plan``, ``recipes``, ``show``, ``validate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from ..precision.errors import NarrowgateError, did_you_mean
from ..recipes import Diagnostic, RecipeError, builtin_names, builtin_text, github_annotations, load_recipe
from ..recipes.recipe import Recipe, Rule
from . import exits

_FORMATS = ("text", "github", "json")


def plan_command(
    recipe: str, model: str, data: str, task: str | None, device: str, backend: str | None, as_json: bool
) -> None:
    """Print the resolved plan."""
    from ..precision.capability import named_device
    from ..recipes import resolve
    from .task import TaskSource

    loaded, target = load_recipe(recipe), named_device(device)
    built = TaskSource(task=task, model=model, data=data).open().build_model()
    plan = resolve(loaded, built, device=target, backend=backend)
    if as_json:
        sys.stdout.write(plan.to_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(plan.render())
    else:
        sys.stdout.write(plan.to_text())


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


def validate_command(file: str, output_format: str, require_native: str | None, model: str | None) -> int:
    """Print a recipe's faults and return the exit code: 0 without, 2 with."""
    if output_format not in _FORMATS:
        hint = did_you_mean(output_format, _FORMATS)
        raise NarrowgateError(f"--output-format: found '{output_format}', expected {', '.join(_FORMATS)}{hint}")
    try:
        faults = list(_check(file, require_native, model))
    except RecipeError as error:
        faults = list(error.diagnostics)
    broken = any(fault.severity == "error" for fault in faults)
    if output_format == "json":
        print(json.dumps({"valid": not broken, "diagnostics": [fault.to_dict() for fault in faults]}, indent=1))
    elif output_format == "github":
        for line in github_annotations(faults):
            print(line)
    else:
        for fault in faults:
            print(fault, file=sys.stderr)
        if not broken:
            print(f"{file}: valid")
    return exits.USAGE if broken else exits.ACCEPT


def _check(file: str, require_native: str | None, model: str | None) -> Iterator[Diagnostic]:
    recipe = load_recipe(file).flatten()
    if model is not None:
        from ..recipes import resolve
        from .task import TaskSource

        plan = resolve(recipe, TaskSource(model=model).open().build_model(), device=_device(require_native or "cpu"))
        yield from plan.warnings
        if require_native is not None:
            for reason in plan.emulated_reasons():
                yield Diagnostic(message=f"not native: {reason}", file=_file(recipe))
    elif require_native is not None:
        yield from _emulated(recipe, require_native)


def _emulated(recipe: Recipe, device_name: str) -> Iterator[Diagnostic]:
    """Judge rule by rule; pairs that two rules make together are known only with a model."""
    from ..precision.capability import gemm_support
    from ..precision.config import OPERANDS, GemmConfig
    from ..precision.spec import Spec

    device = _device(device_name)
    for index, rule in enumerate(recipe.rules):
        settings = rule.settings()
        for path, (first, second) in OPERANDS.items():
            pair = settings.get(f"{path}.{first}"), settings.get(f"{path}.{second}")
            if not isinstance(pair[0], Spec) or not isinstance(pair[1], Spec):
                continue
            accumulate = str(settings.get(f"{path}.accumulate", "accurate"))
            support = gemm_support(GemmConfig(pair[0], pair[1], accumulate), device)
            if not support.native:
                line, column = _place(rule, path, first)
                yield Diagnostic(
                    message=f"not native: {support.reason}",
                    file=rule.source.file if rule.source else _file(recipe),
                    line=line,
                    column=column,
                    field=f"rules[{index}].{path}",
                )


def _device(name: str) -> Any:
    from ..precision.capability import named_device

    return named_device(name)


def _place(rule: Rule, path: str, operand: str) -> tuple[int | None, int | None]:
    return rule.source.locate(path, f"{path}.{operand}", "all") if rule.source else (None, None)


def _file(recipe: Recipe) -> str:
    return recipe.source.file if recipe.source else "<python>"
