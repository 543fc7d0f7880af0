"""A model as FSDP2 takes it: units, one a call of ``fully_shard``, and what of their parameters travels how."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from ..precision.errors import NarrowgateError, did_you_mean
from ..precision.spec import Spec
from .errors import RecipeError
from .globs import Names, parse_pattern
from .plan import Plan
from .runnable import inexpressible_in_plan, not_built_in_parts
from .shards import check_shards
from .targets import find_targets, named_modules, unwrap

#: What holds blocks in a row, and what ``fully_shard`` refuses because nobody calls it.
_LISTS = (nn.ModuleList, nn.Sequential)
_NO_FORWARD = (nn.ModuleList, nn.ModuleDict)
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
#: Bytes of a value, by what it travels as.
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Sharding:
    """How a model is handed to ``fully_shard``."""

    #: Patterns of the modules that are units of their own; None: :func:`default_units`.
    units: Sequence[str] | None = None
    #: Patterns of modules whose parameters FSDP2 leaves alone (``ignored_params``), such as tables sharded otherwise.
    ignored: Sequence[str] = ()
    #: ``MixedPrecisionPolicy``: what weights without codes travel as (None: as they are stored), and gradients (None:
    #: as ``param_dtype``). One of ``fp32``, ``bf16``, ``fp16``.
    param_dtype: str | None = "bf16"
    reduce_dtype: str | None = None
    #: ``reshard_after_forward`` of the units; the root never is.
    reshard: bool = True
    #: Whether :func:`narrowgate.precision.reduce_amaxes` runs once a step.
    joint_amaxes: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in SIZES:
                hint = did_you_mean(dtype, SIZES)
                raise NarrowgateError(f"{name}: found '{dtype}', expected {', '.join(SIZES)}{hint}")
        if not isinstance(self.reshard, bool):
            raise NarrowgateError(
                f"reshard: found {self.reshard!r}, expected True or False: FSDP2 refuses a number of ranks"
                " (reshard_after_forward) for weights that are gathered as codes, and no plan prices it for others"
            )


@dataclass(frozen=True)
class Parameter:
    """One parameter."""

    shape: tuple[int, ...]
    #: Of the master, ``fp32`` or ``bf16``.
    dtype: str
    trains: bool
    #: How it is gathered; None: its values in the policy's dtype.
    spec: Spec | None

    @property
    def rows(self) -> int:
        """What FSDP2 divides among the ranks."""
        return self.shape[0]

    @property
    def width(self) -> int:
        """Elements of a row, whatever lies behind the first dimension."""
        return prod(self.shape[1:])


@dataclass(frozen=True)
class Unit:
    """What one call of ``fully_shard`` takes; the root's name is empty."""

    name: str
    parameters: tuple[Parameter, ...]


def default_units(model: nn.Module) -> list[str]:
    """Return the blocks that models are commonly sharded by: the entries of the outermost lists and ``Sequential``.

    Lists within lists count by their entries; what has no parameters is none.
    """
    units: list[str] = []
    for name, module, parent in named_modules(unwrap(model)):
        entry = isinstance(parent, _LISTS) and not isinstance(module, _NO_FORWARD)
        if entry and not any(_within(name, unit) for unit in units) and next(module.parameters(), None) is not None:
            units.append(name)
    return units


def units_of(model: nn.Module, plan: Plan, sharding: Sharding) -> list[Unit]:
    """Return the units with parameters, the root last.

    Args:
        model: what ``plan`` was resolved for.
        plan: says which weights are gathered as codes.
        sharding: how the model is handed to FSDP2.

    Raises: as :func:`narrowgate.recipes.wire_plan.predict_wire`.
    """
    model = unwrap(model)
    refused = [*not_built_in_parts(plan.recipe, plan.backend), *inexpressible_in_plan(plan)]
    if refused := [finding for finding in refused if finding.field.startswith("shards")]:
        raise RecipeError(refused)
    targets, _ = find_targets(model)
    check_shards(model, targets, plan)
    gathered = {layer.name for layer in plan.gathered}
    coded = {id(target.module._parameters.get("weight")) for target in targets if target.name in gathered}
    modules = {name: module for name, module, _ in named_modules(model)}
    units = default_units(model) if sharding.units is None else _matched("units", modules, sharding.units)
    ignored = _matched("ignored", modules, sharding.ignored)
    owners: dict[int, str] = {}
    parameters: dict[int, tuple[str, nn.Parameter]] = {}
    left = {id(p) for name in ignored for p in modules[name].parameters()}
    for name, module in modules.items():
        # The innermost unit, for fully_shard is called on it first.
        owner = max((unit for unit in units if _within(name, unit)), key=len, default="")
        for entry, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in left:
                owners[id(parameter)] = owners.get(id(parameter)) or owner
                parameters.setdefault(id(parameter), (f"{name}.{entry}" if name else entry, parameter))
    found: dict[str, list[Parameter]] = {}
    for key, (name, parameter) in parameters.items():
        spec = plan.gather if key in coded else None
        found.setdefault(owners[key], []).append(_parameter(name, parameter, spec))
    return [Unit(name, tuple(found[name])) for name in dict.fromkeys([*units, ""]) if name in found]


def _within(name: str, unit: str) -> bool:
    return not unit or name == unit or name.startswith(f"{unit}.")


def _matched(what: str, modules: Iterable[str], patterns: Sequence[str]) -> list[str]:
    names = list(modules)
    prepared = Names(names)
    matched: dict[str, None] = {}
    for pattern in patterns:
        hits = [name for name, hit in zip(names, parse_pattern(pattern).among(prepared), strict=True) if hit]
        if not hits:
            hint = did_you_mean(pattern, names)
            raise NarrowgateError(f"{what}: found '{pattern}', which matches no module of the model{hint}")
        matched.update(dict.fromkeys(hits))
    return list(matched)


def _parameter(name: str, parameter: nn.Parameter, spec: Spec | None) -> Parameter:
    if not parameter.dim():
        raise NarrowgateError(f"'{name}': found a scalar parameter, which fully_shard refuses; expected a dimension")
    dtype = _NAMES.get(parameter.dtype)
    if dtype is None:
        raise NarrowgateError(f"'{name}': found a parameter of {parameter.dtype}, expected one of {', '.join(SIZES)}")
    return Parameter(tuple(parameter.shape), dtype, parameter.requires_grad, spec)
