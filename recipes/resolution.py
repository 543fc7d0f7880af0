"""Rules against a model: which layer gets what, and every contradiction found before training starts.

Whole columns are worked on at once (one entry a layer): 200 rules over 5,000 layers take a fraction of a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from torch import nn

from ..precision.backends import Backend, get_backend
from ..precision.capability import Device, Support, current_device, grouped_obstacle
from ..precision.config import OPERANDS, GemmConfig, LinearConfig
from ..precision.errors import did_you_mean
from ..precision.gathered import serves
from ..precision.grouped import GroupedLinear
from ..precision.matmul import matmul_support
from ..precision.spec import Spec
from .errors import Diagnostic, RecipeError, found
from .globs import Names, Pattern
from .load import load_recipe
from .plan import LayerPlan, Origin, Plan
from .profit import price_plan
from .rates import Rates
from .recipe import FIELDS, Recipe, Rule, Shards, at_rule
from .runnable import doubts_in_parts, doubts_in_saved
from .targets import Target, find_targets

_DEFAULTS = -1


def resolve(
    recipe: str | FilePath | Recipe,
    model: nn.Module,
    *,
    device: Device | None = None,
    backend: str | None = None,
    rows: Mapping[str, int] | int | None = None,
    rates: Rates | str | FilePath | None = None,
) -> Plan:
    """Work out what ``recipe`` means for ``model``, without touching it; a model on the meta device will do.

    Args:
        recipe: a built-in name, a path, or a :class:`Recipe`.
        model: the model whose layers the rules select.
        device: the device to plan for; None is where the model is, or the machine's own for a meta model.
        backend: overrides the recipe's backend.
        rows: M, the rows that each layer multiplies in one step, by name (:func:`narrowgate.recipes.measure_rows`), or
            one number for all; without them the plan has no prices.
        rates: a file of measured rates; None is what ships for the device.

    Raises:
        NarrowgateError: ``rows`` or ``rates`` do not fit or do not read.
        RecipeError: with every fault found: a rule that matches nothing, a GEMM of one low-precision and one
            high-precision operand, Hadamard on one operand only, tied weights in two formats.
    """
    loaded = load_recipe(recipe)
    resolution = _Resolution(loaded.flatten(), model)
    plan = resolution.plan(device or _device_of(model), backend)
    plan = replace(plan, warnings=(*plan.warnings, *doubts_in_parts(loaded), *doubts_in_saved(loaded, plan)))
    return price_plan(plan, resolution.weights(), rows, rates)


@dataclass(frozen=True)
class _Combination:
    """What all layers share whose fields come from the same rules."""

    config: LinearConfig
    when: str
    origin: Mapping[str, Origin]


class _Resolution:
    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        self.recipe = recipe
        self.targets, self.unreachable = find_targets(model)
        self.names = [target.name for target in self.targets]
        self.prepared_names = Names(self.names)
        self.matched: dict[str, np.ndarray[Any, Any]] = {}
        #: Layers by (rule, field, what is wrong before and after the layers are named): one error for all of them.
        self.conflicts: dict[tuple[int, str, str, str], list[int]] = defaultdict(list)
        self.errors: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []
        self.static = _static_columns(self.targets)
        self.settings = [rule.settings() for rule in recipe.rules]

    def plan(self, device: Device, backend: str | None) -> Plan:
        owners = self.owners()
        combinations: dict[tuple[int, ...], _Combination] = {}
        members: dict[tuple[int, ...], list[int]] = defaultdict(list)
        keys = [tuple(row) for row in owners.tolist()]
        for index, key in enumerate(keys):
            members[key].append(index)
        for key, layers in members.items():
            combinations[key] = self.combine(key)
            self.check(combinations[key], key, layers)
        self.report_conflicts()
        self.check_tied([combinations[key] for key in keys])
        self.warn_shadowed(owners)
        if self.errors:
            raise RecipeError(self.errors)
        runs_on = get_backend(backend or self.recipe.backend or "native")
        support = {key: _support(combination.config, device, runs_on) for key, combination in combinations.items()}
        layers = tuple(
            LayerPlan(
                name=target.name,
                type=target.type,
                in_features=target.in_features,
                out_features=target.out_features,
                params=target.params,
                config=combinations[key].config,
                when=combinations[key].when,
                origin=combinations[key].origin,
                support=_product_support(combinations[key].config) if target.kind == "product" else support[key],
                kind=target.kind,
                in_turns=_in_turns(target, combinations[key].config, device),
            )
            for target, key in zip(self.targets, keys, strict=True)
        )
        return Plan(
            recipe=self.recipe,
            layers=layers,
            device=device,
            backend=runs_on.name,
            warnings=tuple(self.warnings),
            unreachable=tuple(self.unreachable),
        )

    def weights(self) -> list[object]:
        """Return what each target's weight is known by: the same for tied ones."""
        # A parametrized weight is made anew at each access, so nobody else holds it.
        found_weights = [target.module._parameters.get("weight") for target in self.targets]
        return [("own", i) if weight is None else id(weight) for i, weight in enumerate(found_weights)]

    # Which rule owns which field.

    def owners(self) -> np.ndarray[Any, Any]:
        """Return [layers, fields]: the index of the rule that had the last word, or -1 for the defaults."""
        owners = np.full((len(self.targets), len(FIELDS)), _DEFAULTS, dtype=np.int64)
        for index, rule in enumerate(self.recipe.rules):
            selected = self.select(index, rule)
            for column, name in enumerate(FIELDS):
                if name in self.settings[index]:
                    owners[selected, column] = index
        return owners

    def select(self, index: int, rule: Rule) -> np.ndarray[Any, Any]:
        """Return a boolean entry a layer: what ``layers`` and then ``where`` leave."""
        selected = np.zeros(len(self.targets), dtype=bool)
        for pattern in rule.patterns():
            hits = self.match(pattern)
            if not hits.any() and len(rule.layers) > 1 and not rule.optional:
                message = f"pattern {found(pattern.text)} matches no layer{self._near(pattern)}"
                self.warnings.append(self.at(index, "layers", message, severity="warning"))
            selected |= hits
        if not selected.any():
            if not rule.optional:
                self.errors.append(self.at(index, "layers", self._nothing(rule)))
            return selected
        condition = rule.condition()
        if condition is None:
            return selected
        count = int(selected.sum())
        position = np.zeros(len(self.targets))
        position[selected] = np.arange(count)
        columns = {**self.static, "index": position, "depth": position / max(count - 1, 1)}
        left = selected & np.broadcast_to(condition(columns), selected.shape)
        if not left.any() and not rule.optional:
            message = f"where {found(condition.text)} leaves none of the {count} layers that 'layers' matches"
            self.errors.append(self.at(index, "where", f"{message}; say optional: true if that is meant"))
        return left

    def match(self, pattern: Pattern) -> np.ndarray[Any, Any]:
        hits = self.matched.get(pattern.text)
        if hits is None:
            hits = np.array(pattern.among(self.prepared_names), dtype=bool)
            self.matched[pattern.text] = hits
        return hits

    # What the owners add up to.

    def combine(self, key: tuple[int, ...]) -> _Combination:
        defaults = self.recipe.defaults or Spec(format="bf16")
        values: dict[str, Any] = {}
        for name, owner in zip(FIELDS, key, strict=True):
            if owner != _DEFAULTS:
                values[name] = self.settings[owner][name]
            else:
                values[name] = {"when": "always", "accumulate": "accurate"}.get(name.rpartition(".")[2], defaults)
        gemms = {
            path: GemmConfig(values[f"{path}.{first}"], values[f"{path}.{second}"], values[f"{path}.accumulate"])
            for path, (first, second) in OPERANDS.items()
        }
        origin = {name: self.origin(owner, name) for name, owner in zip(FIELDS, key, strict=True)}
        return _Combination(LinearConfig(**gemms), values["when"], origin)

    def origin(self, owner: int, name: str) -> Origin:
        if owner == _DEFAULTS:
            source = self.recipe.source
            line = source.fields.get("defaults", (None, None))[0] if source is not None else None
            return Origin(None, source.file if source is not None else "<python>", line)
        source = self.recipe.rules[owner].source
        if source is None:
            return Origin(owner, "<python>", None)
        return Origin(owner, source.file, source.locate(name)[0])

    # Contradictions.

    def check(self, combination: _Combination, key: tuple[int, ...], layers: list[int]) -> None:
        """Collect what the three GEMMs of one combination contradict."""
        owner = dict(zip(FIELDS, key, strict=True))
        for path, gemm in combination.config.gemms():
            names = [f"{path}.{operand}" for operand in OPERANDS[path]]
            told = " and ".join(
                f"{self.who(owner[name], name)} sets {name.rpartition('.')[2]} to {spec}"
                for name, spec in zip(names, (gemm.first, gemm.second), strict=True)
            )
            last = max(names, key=lambda name: owner[name])
            place = (owner[last], last)
            if gemm.first.high_precision != gemm.second.high_precision:
                before, after = "one low-precision and one high-precision operand", "expected both or neither"
                self.conflicts[(*place, before, f"{told}; {after}")] += layers
            elif gemm.first.hadamard != gemm.second.hadamard:
                before, after = "different Hadamard transforms", "expected the same hadamard(n) on both"
                self.conflicts[(*place, before, f"{told}; {after}")] += layers
        self.check_gather(combination, owner, layers)

    def check_gather(self, combination: _Combination, owner: Mapping[str, int], layers: list[int]) -> None:
        """The gathered codes are the weight operand of fprop and dgrad, or the recipe says ``requantize``."""
        shards = self.recipe.shards or Shards()
        config = combination.config
        if shards.all_gather.high_precision or shards.requantize:
            return
        if config.fprop.high_precision or config.dgrad.high_precision:
            return
        gather = shards.all_gather
        layers = [index for index in layers if self.targets[index].kind != "product"]  # two tensors, no weight
        if not layers:
            return
        for path, dim in (("fprop", 1), ("dgrad", 0)):
            name = f"{path}.weight"
            weight = getattr(config, path).second
            if serves(gather, weight, dim):
                continue
            told = f"{self.who(owner[name], name)} sets weight to {weight}"
            after = "expected the same, or shards.requantize: true"
            if dim == 0 and serves(gather, weight, 1):
                told = f"scales along fprop's rows, over which dgrad contracts, and {told}"
                after = "expected granularity tensor or a square block on both, or shards.requantize: true"
            self.conflicts[owner[name], name, f"shards.all_gather {gather}", f"{told}; {after}"] += layers

    def report_conflicts(self) -> None:
        for (owner, name, before, after), layers in self.conflicts.items():
            layers.sort()
            self.errors.append(self.at(owner, name, f"found {before} on {self.some(layers)}: {after}"))

    def check_tied(self, combinations: list[_Combination]) -> None:
        """One Parameter under two modules must have one form on each path."""
        first: dict[int, int] = {}
        for index, target in enumerate(self.targets):
            weight = target.module._parameters.get("weight")
            if weight is None:  # parametrized: made anew at each access, so nobody else holds it
                continue
            other = first.setdefault(id(weight), index)
            for path in ("fprop", "dgrad"):
                a, b = (getattr(combinations[i].config, path).second for i in (other, index))
                if a != b:
                    name = f"{path}.weight"
                    message = (
                        f"found one weight in two formats: '{self.names[other]}' and '{self.names[index]}' are tied, "
                        f"and their {name} is {a} ({combinations[other].origin[name]}) and {b} "
                        f"({combinations[index].origin[name]}); expected the same"
                    )
                    rule = combinations[index].origin[name].rule
                    self.errors.append(self.at(_DEFAULTS if rule is None else rule, name, message))

    def warn_shadowed(self, owners: np.ndarray[Any, Any]) -> None:
        alive = set(np.unique(owners).tolist())
        failed = {d.field.partition("]")[0] for d in self.errors}
        for index, rule in enumerate(self.recipe.rules):
            if index in alive or rule.optional or f"rules[{index}" in failed:
                continue
            message = "shadowed: later rules override every field it sets, on every layer it matches"
            self.warnings.append(self.at(index, "layers", message, severity="warning"))

    # Words.

    def at(self, index: int, name: str, message: str, severity: str = "error") -> Diagnostic:
        """Return a finding at field ``name`` of rule ``index``."""
        return at_rule(self.recipe, None if index == _DEFAULTS else index, name, message, severity=severity)

    def who(self, owner: int, name: str) -> str:
        origin = self.origin(owner, name)
        if owner == _DEFAULTS:
            return "the default"
        return f"rules[{owner}]" + ("" if origin.line is None else f" ({origin.file}:{origin.line})")

    def some(self, layers: list[int]) -> str:
        first = f"layer '{self.names[layers[0]]}'"
        return first if len(layers) == 1 else f"{len(layers)} layers (first '{self.names[layers[0]]}')"

    def _nothing(self, rule: Rule) -> str:
        patterns = ", ".join(found(text) for text in rule.layers)
        hit = [e for e in self.unreachable if any(p.matches(e.name) for p in rule.patterns())]
        if hit:
            why = f"only modules that cannot be lowered, first '{hit[0].name}' ({hit[0].type}: {hit[0].reason})"
            return f"{patterns} matches {why}"
        count = len(self.targets)
        if not count:
            return f"{patterns} matches nothing: the model has no layer that can be lowered"
        near = next((hint for hint in map(self._near, rule.patterns()) if hint), "")
        if not near:
            near = f" (for example '{self.names[0]}')"
        return f"{patterns} matches none of the model's {count} layers{near}; say optional: true if that is meant"

    def _near(self, pattern: Pattern) -> str:
        """Return a did-you-mean for the first level of a glob that no layer's name has."""
        levels = {level for name in self.names[:2000] for level in name.split(".")}
        for level in pattern.text.split("."):
            if "*" not in level and level not in levels:
                return did_you_mean(level, sorted(levels))
        return ""


def _static_columns(targets: list[Target]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        # 0 stands for unknown, and a comparison with something unknown is false.
        name: np.array([getattr(target, name) or np.nan for target in targets], dtype=np.float64)
        for name in ("in_features", "out_features", "params")
    }
    for name in ("type", "name"):
        columns[name] = np.array([getattr(target, name) for target in targets] + [None], dtype=object)[:-1]
    return columns


def _support(config: LinearConfig, device: Device, backend: Backend) -> Mapping[str, Support]:
    return {path: backend.support(gemm, device) for path, gemm in config.gemms()}


def _product_support(config: LinearConfig) -> Mapping[str, Support]:
    return {path: matmul_support(gemm) for path, gemm in config.gemms()}


def _in_turns(target: Target, config: LinearConfig, device: Device) -> str | None:
    if not isinstance(target.module, GroupedLinear) or config.high_precision:
        return None
    return grouped_obstacle(config, device, target.module.experts)


def _device_of(model: nn.Module) -> Device:
    parameter = next(iter(model.parameters()), None)
    return current_device() if parameter is None or parameter.is_meta else current_device(parameter.device)
