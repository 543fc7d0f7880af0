"""Two reports side by side: what was decided, what was measured, and what differs in how."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from .judgement import Gate
from .report import Report

#: How two intervals of one gate lie to each other.
OVERLAP, APART = "overlap", "apart"
#: Facts of the environment that are different in every run.
_ALWAYS_DIFFERENT = ("date",)


@dataclass(frozen=True)
class Difference:
    """A fact that the reports do not agree on; None where a report does not have it."""

    field: str
    a: Any
    b: Any


@dataclass(frozen=True)
class GatePair:
    """One gate in both reports; None where a report does not have it."""

    name: str
    task: str | None
    slice: str | None
    a: Gate | None
    b: Gate | None
    #: ``overlap``, ``apart``, or None where one of the intervals does not exist.
    intervals: str | None


@dataclass(frozen=True)
class ModulePair:
    """The speedup of one module alone in both reports; None where a report did not time it."""

    name: str
    a: float | None
    b: float | None


@dataclass(frozen=True)
class LayerChange:
    """Layers whose plans differ in the same way: what one operand of one path is given."""

    #: For example ``fprop.input``.
    operand: str
    a: str | None
    b: str | None
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """All that two reports agree and differ on."""

    verdicts: tuple[str, str]
    recipes: tuple[str, str]
    same_recipe: bool
    gates: tuple[GatePair, ...]
    recipe: tuple[Difference, ...]
    plan: tuple[LayerChange, ...]
    policy: tuple[Difference, ...]
    #: Model, data and number of seeds: where these differ, the gates answer different questions.
    task: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    #: Why the gates of the two are not to be compared number by number; empty where they are.
    warnings: tuple[str, ...] = field(default=())
    #: Modules that a report timed alone, the heaviest of the first report first.
    modules: tuple[ModulePair, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as data for JSON."""
        data = asdict(self)
        for row, pair in zip(data["gates"], self.gates, strict=True):
            row["a"] = pair.a.model_dump() if pair.a else None
            row["b"] = pair.b.model_dump() if pair.b else None
        return data


def compare(a: Report, b: Report) -> Comparison:
    """Compare two reports; neither is taken for the better one."""
    task = [
        *differences(a.model, b.model, "model"),
        *differences(a.data, b.data, "data"),
        *differences(a.statistics.n, b.statistics.n, "seeds"),
    ]
    policy = differences(a.policy.model_dump(), b.policy.model_dump())
    facts = [
        {key: value for key, value in r.environment.items() if key not in _ALWAYS_DIFFERENT and value is not None}
        for r in (a, b)
    ]
    environment = differences(facts[0], facts[1])
    return Comparison(
        verdicts=(a.verdict, b.verdict),
        recipes=(a.recipe.name, b.recipe.name),
        same_recipe=a.recipe.hash == b.recipe.hash,
        gates=tuple(_gates(a, b)),
        recipe=tuple(differences(_without_text(a.recipe.resolved), _without_text(b.recipe.resolved))),
        plan=tuple(_plan_changes(a.recipe.plan, b.recipe.plan)),
        policy=tuple(policy),
        task=tuple(task),
        environment=tuple(environment),
        warnings=tuple(_warnings(task, environment)),
        modules=tuple(_modules(a, b)),
    )


def differences(a: Any, b: Any, prefix: str = "") -> list[Difference]:
    """Return where two pieces of nested data differ, by dotted path; lists are compared place by place."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = list(dict.fromkeys([*a, *b]))
        paths = [f"{prefix}.{key}" if prefix else str(key) for key in keys]
        return [d for key, path in zip(keys, paths, strict=True) for d in differences(a.get(key), b.get(key), path)]
    both = [list(value) if isinstance(value, tuple) else value for value in (a, b)]
    if all(isinstance(value, list) and any(isinstance(item, dict) for item in value) for value in both):
        longest = max(len(value) for value in both)
        padded = [[*value, *[None] * (longest - len(value))] for value in both]
        return [d for i in range(longest) for d in differences(padded[0][i], padded[1][i], f"{prefix}[{i}]")]
    return [] if both[0] == both[1] else [Difference(prefix, *both)]


def _gates(a: Report, b: Report) -> list[GatePair]:
    found: dict[tuple[str, str | None, str | None], list[Gate | None]] = {}
    for side, report in enumerate((a, b)):
        for gate in report.gates:
            found.setdefault((gate.name, gate.task, gate.slice), [None, None])[side] = gate
    return [GatePair(*key, own, other, _intervals(own, other)) for key, (own, other) in found.items()]


def _modules(a: Report, b: Report) -> list[ModulePair]:
    own, other = (
        {module["name"]: module["speedup"] for module in report.evidence.module.results.get("modules", ())}
        for report in (a, b)
    )
    return [ModulePair(name, own.get(name), other.get(name)) for name in dict.fromkeys((*own, *other))]


def _intervals(a: Gate | None, b: Gate | None) -> str | None:
    if a is None or b is None:
        return None
    ends = [a.ci_low, a.ci_high, b.ci_low, b.ci_high]
    if any(end is None for end in ends):
        return None
    low_a, high_a, low_b, high_b = (float(end or 0) for end in ends)
    return OVERLAP if low_a <= high_b and low_b <= high_a else APART


def _without_text(resolved: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in resolved.items() if key not in ("recipe", "description")}


def _plan_changes(a: dict[str, Any], b: dict[str, Any]) -> list[LayerChange]:
    plans = [_operands(plan) for plan in (a, b)]
    changed: dict[tuple[str, str | None, str | None], list[str]] = defaultdict(list)
    for layer in dict.fromkeys([*plans[0], *plans[1]]):
        own, other = (plan.get(layer, {}) for plan in plans)
        for operand in dict.fromkeys([*own, *other]):
            if own.get(operand) != other.get(operand):
                changed[operand, own.get(operand), other.get(operand)].append(layer)
    return [LayerChange(operand, x, y, tuple(layers)) for (operand, x, y), layers in changed.items()]


def _operands(plan: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return for each layer what every operand of every path gets."""
    return {
        layer["name"]: {
            f"{name}.{operand}": str(path[operand])
            for name, path in layer.get("paths", {}).items()
            for operand in ("input", "weight", "grad", "accumulate")
            if operand in path
        }
        for layer in plan.get("layers", ())
    }


def _warnings(task: list[Difference], environment: list[Difference]) -> list[str]:
    found = []
    parts = list(dict.fromkeys(d.field.split(".")[0].split("[")[0] for d in task))
    asked = [part for part in parts if part != "seeds"]
    if asked:
        found.append(f"The reports differ in {' and '.join(asked)}: their gates answer different questions.")
    machines = [d for d in environment if d.field in ("gpu", "device")]
    if machines:
        shown = ", ".join(f"{d.field} {d.a or 'none'} and {d.b or 'none'}" for d in machines)
        found.append(f"The reports come from different machines ({shown}): compare speedups, not milliseconds.")
    return found
