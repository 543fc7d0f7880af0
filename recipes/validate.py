"""Checking a recipe without a model: what the command line's ``validate`` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

from ..precision.backends import get_backend
from ..precision.capability import Device, named_device
from ..precision.config import OPERANDS, GemmConfig
from ..precision.errors import NarrowgateError
from .errors import Diagnostic, RecipeError
from .load import load_recipe
from .recipe import Recipe, Rule, at_rule
from .runnable import doubts_in_parts, not_built_in_recipe, rule_config


@dataclass(frozen=True)
class Validation:
    """Everything that can be said of a recipe file by itself."""

    #: None where the file has errors.
    recipe: Recipe | None
    #: Errors, or else notes on what this version does not run yet.
    diagnostics: tuple[Diagnostic, ...]

    @property
    def ok(self) -> bool:
        """True where there is no error; notes do not count."""
        return not any(d.severity == "error" for d in self.diagnostics)

    @property
    def summary(self) -> str:
        """One line: ``valid``, ``valid; not yet runnable: ...`` or how many errors there are."""
        errors = [d for d in self.diagnostics if d.severity == "error"]
        if errors:
            return f"{len(errors)} error{'s' if len(errors) > 1 else ''}"
        notes = [f"{d.field}: {d.message}" for d in self.diagnostics if d.severity == "note"]
        return f"valid; not yet runnable: {'; '.join(notes)}" if notes else "valid"

    def github(self) -> list[str]:
        """Return GitHub workflow commands, one a finding."""
        return [d.github() for d in self.diagnostics]


def validate_file(recipe: str | FilePath, *, require_native: str | None = None) -> Validation:
    """Check a recipe file (or a built-in's name) without a model. Never raises for what the file says.

    Args:
        recipe: path or built-in name.
        require_native: name of a device (``h100``, ``h200``, ``b200``, ``auto``): a GEMM that one rule sets whole and
            that this device would emulate is then an error.

    Raises:
        NarrowgateError: ``require_native`` names no device.
    """
    device = None if require_native is None else named_device(require_native)
    try:
        loaded = load_recipe(recipe)
        flat = loaded.flatten()
    except RecipeError as error:
        return Validation(None, error.diagnostics)
    except NarrowgateError as error:
        return Validation(None, (Diagnostic(file=str(recipe), message=str(error)),))
    findings: list[Diagnostic] = [replace(d, severity="note") for d in not_built_in_recipe(loaded)]
    findings += [*_inside_rules(flat), *doubts_in_parts(loaded)]
    if device is not None:
        findings += _emulated(flat, device)
    errors = [d for d in findings if d.severity == "error"]
    return Validation(None if errors else loaded, tuple(findings))


def _whole_paths(rule: Rule) -> Iterator[tuple[str, GemmConfig]]:
    """Yield the paths on which one rule sets both operands."""
    settings = rule.settings()
    for path, gemm in rule_config(rule).gemms():
        if all(f"{path}.{operand}" in settings for operand in OPERANDS[path]):
            yield path, gemm


def _inside_rules(flat: Recipe) -> Iterator[Diagnostic]:
    """Contradictions that only a later rule could mend; with a model they are errors where they remain."""
    for index, rule in enumerate(flat.rules):
        for path, gemm in _whole_paths(rule):
            pair = f"{gemm.first} and {gemm.second}"
            if gemm.first.high_precision != gemm.second.high_precision:
                message = f"found {pair}, expected both operands in low precision or neither"
            elif gemm.first.hadamard != gemm.second.hadamard:
                message = f"found {pair}, expected the same hadamard(n) on both operands"
            else:
                continue
            yield at_rule(flat, index, path, message, severity="warning")


def _emulated(flat: Recipe, device: Device) -> Iterator[Diagnostic]:
    backend = get_backend(flat.backend or "native")
    for index, rule in enumerate(flat.rules):
        for path, gemm in _whole_paths(rule):
            support = backend.support(gemm, device)
            if not support.native:
                yield at_rule(flat, index, path, f"emulated on {device.name}: {support.reason}; expected a native pair")
