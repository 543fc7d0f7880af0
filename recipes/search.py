"""Candidates of a search: the recipes between one that is worth something on a model and BF16, as data.

A search begins with a recipe (:func:`open_start`): what of it is worth nothing, by predicted time or by FLOPs, goes to
BF16 before anything trains. Its other layers fall into units (:meth:`Start.units`), which are decided together, each on
a ladder of levels from the recipe's own formats to BF16. A setting says where each unit stands, and
:meth:`Start.candidate` makes an ordinary recipe of it: the start's file as ``extends``, and rules over it. Everything
here is a function of recipe, model and prices: nothing is measured and nothing is drawn.
:mod:`narrowgate.recipes.descent` chooses among settings by what was measured.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from ..precision.capability import Device
from ..precision.config import OPERANDS, GemmConfig, LinearConfig
from ..precision.errors import NarrowgateError
from ..precision.spec import Spec
from .errors import ExpressionError, RecipeError
from .globs import parse_pattern
from .plan import LayerPlan, Plan
from .pricing import LayerPrice
from .rates import Rates
from .recipe import Path, Recipe, Rule
from .resolution import resolve
from .targets import find_targets

#: What a search makes the most of: predicted microseconds of a step, or operations in low precision.
By = Literal["time", "flops"]
BY: tuple[By, ...] = ("time", "flops")
#: Where a unit may stand, from the recipe's own formats up: formats of fewer than eight bits widened to eight; BF16
#: weight gradients as well; BF16. A level that changes nothing is left out.
LEVELS = ("low", "wide", "wgrad", "bf16")
LOW, WIDE, WGRAD, DENSE = LEVELS
_CALLED = {WIDE: "eight bits", WGRAD: "BF16 weight gradients", DENSE: "BF16"}

#: One level a unit.
Setting = tuple[str, ...]

_EIGHT_BITS = 8
_NAME_CHARACTERS = 64
_HASH_CHARACTERS = 8


@dataclass(frozen=True)
class Unit:
    """Layers that a search decides together.

    Attributes:
        name: the group that they belong to, and which half of it where it was split.
        clusters: their names, tied layers together, in registration order.
        worth: by level, of each cluster: what that level is worth, microseconds or operations; the first level is
            ``low``, the last ``bf16``.
    """

    name: str
    clusters: tuple[tuple[str, ...], ...]
    worth: Mapping[str, tuple[float, ...]]

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all its layers."""
        return tuple(name for cluster in self.clusters for name in cluster)

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels that differ on this unit, in the order of :data:`LEVELS`."""
        return tuple(self.worth)

    def total(self, level: str) -> float:
        """What the unit is worth at ``level``."""
        return sum(self.worth[level])

    def halves(self) -> tuple[Unit, Unit]:
        """Split in two, the clusters that are worth most in the first; needs two clusters."""
        assert len(self.clusters) > 1, self.name
        order = sorted(range(len(self.clusters)), key=lambda i: -self.worth[LOW][i])
        middle = (len(order) + 1) // 2
        first, second = (
            Unit(
                f"{self.name}/{half}",
                tuple(self.clusters[i] for i in sorted(own)),
                {level: tuple(values[i] for i in sorted(own)) for level, values in self.worth.items()},
            )
            for half, own in ((1, order[:middle]), (2, order[middle:]))
        )
        return first, second


def total_worth(units: Sequence[Unit], setting: Setting) -> float:
    """What a setting is worth, over all units."""
    return sum(unit.total(level) for unit, level in zip(units, setting, strict=True))


@dataclass(frozen=True)
class Start:
    """A recipe on a model, with what is worth nothing in BF16.

    Attributes:
        base: the recipe, as it was given.
        extends: how a candidate's file names it: a built-in's name, or a file beside the candidate's.
        by: what it is worth is counted in.
        plan: of the recipe that the search begins with, on the device that it is planned for.
        plans: by level that changes anything, the plan with all of :attr:`lowered` there.
        clusters: layers that the search decides over, tied ones together, in registration order.
        dense: layers that the recipe lowers and that go to BF16 from the outset.
        wgrad: those of :attr:`clusters` whose weight gradients do, because they are worth as much so.
    """

    base: Recipe
    extends: str
    by: By
    plan: Plan
    plans: Mapping[str, Plan]
    clusters: tuple[tuple[str, ...], ...]
    dense: tuple[str, ...]
    wgrad: tuple[str, ...] = ()

    @property
    def lowered(self) -> tuple[str, ...]:
        """Names of all layers that the search decides over; empty where the recipe is worth nothing."""
        return tuple(name for cluster in self.clusters for name in cluster)

    @property
    def worth(self) -> float:
        """What the recipe that the search begins with is worth; every other candidate of it is worth less."""
        layers = {layer.name: layer for layer in self.plan.layers}
        return sum(_worth(layers[name], self.plan, self.by) for name in self.lowered)

    def units(self, groups: Mapping[str, Collection[str]]) -> tuple[Unit, ...]:
        """Return the units that groups of layers make, in registration order.

        A level is left out of a unit where it changes none of its layers, or where a later one, which is safer, is
        worth as much.

        Args:
            groups: names by group; together they hold :attr:`lowered`. Tied layers go with the first of them.
        """
        of = {name: group for group, names in groups.items() for name in names}
        missing = [name for name in self.lowered if name not in of]
        if missing:
            raise NarrowgateError(f"groups: found none for layer '{missing[0]}', expected one for every lowered layer")
        members: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        for cluster in self.clusters:
            members[of[cluster[0]]].append(cluster)
        return tuple(self._unit(group, tuple(clusters)) for group, clusters in members.items())

    def candidate(self, units: Sequence[Unit], setting: Setting) -> Recipe:
        """Return the recipe of a setting; its name holds the first characters of its hash."""
        at: dict[str, list[str]] = defaultdict(list)
        told: dict[str, list[str]] = defaultdict(list)
        for unit, level in zip(units, setting, strict=True):
            at[level] += unit.layers
            told[level].append(unit.name)
        changes = [f"; {_CALLED[level]}: {', '.join(told[level])}" for level in LEVELS[1:] if told[level]]
        if self.dense:
            changes.append(f"; BF16 from the outset, as worth nothing: {_count(self.dense)}")
        if self.wgrad:
            changes.append(f"; BF16 weight gradients from the outset, as worth as much: {_count(self.wgrad)}")
        recipe = Recipe(
            name=self.base.name,
            description=f"found by narrowgate search from {self.base.name}{''.join(changes)}",
            extends=self.extends,
            base=self.base,
            rules=tuple(_rules(self.plan, at, self.dense, self.wgrad, widen=WIDE in self.plans)),
        )
        tail = f"-{recipe.hash()[:_HASH_CHARACTERS]}"
        return replace(recipe, name=self.base.name[: _NAME_CHARACTERS - len(tail)] + tail)

    def _unit(self, group: str, clusters: tuple[tuple[str, ...], ...]) -> Unit:
        found: dict[str, tuple[float, ...]] = {}
        configs: list[LinearConfig] = []
        for level, plan in self.plans.items():
            layers = {layer.name: layer for layer in plan.layers}
            own = [layers[name].config for cluster in clusters for name in cluster]
            if own == configs and level != DENSE:
                continue
            if own == configs:  # what only its weight gradients lower is BF16 without them
                del found[next(reversed(found))]
            configs = own
            found[level] = tuple(sum(_worth(layers[name], plan, self.by) for name in cluster) for cluster in clusters)
        later = [sum(found[level]) for level in found]
        kept = {
            level: values
            for i, (level, values) in enumerate(found.items())
            if level in (LOW, DENSE) or sum(values) > max(later[i + 1 :])
        }
        return Unit(group, clusters, kept)


def open_start(
    base: Recipe,
    model: nn.Module,
    *,
    device: Device,
    rows: Mapping[str, int] | int | None = None,
    rates: Rates | None = None,
    backend: str | None = None,
    by: By = "time",
    extends: str | None = None,
) -> Start:
    """Work out where a search that begins with ``base`` can go on ``model``; meta devices will do.

    Args:
        base: the recipe to begin with.
        model: the model, untouched.
        device: what to plan for.
        rows: M by layer, or one number for all.
        rates: what the device was measured to do; None is what ships for it.
        backend: overrides the recipe's backend.
        by: ``time`` leaves to BF16 what is predicted to gain nothing, and what has no price; ``flops`` keeps all that
            the recipe lowers, and knows nothing of what casts cost, or of what the device only emulates.
        extends: how a candidate's file names ``base``; its own name where None, which fits a built-in.

    Raises:
        RecipeError: ``base`` does not resolve on the model.
        NarrowgateError: ``by`` is ``time`` and there are no prices; says why.
    """
    name = base.name if extends is None else extends
    plan = resolve(base, model, device=device, backend=backend, rows=rows, rates=rates)
    if by == "time" and plan.no_prices is not None:
        raise NarrowgateError(f"{base.name} has no predicted times: {plan.no_prices}")

    def at(level: str, names: Sequence[str], dense: Sequence[str], wgrad: Sequence[str], *, widen: bool) -> Plan:
        rules = tuple(_rules(plan, {level: names}, dense, wgrad, widen=widen))
        recipe = Recipe(name=base.name, extends=name, base=base, rules=rules)
        return resolve(recipe, model, device=device, backend=backend, rows=rows, rates=rates)

    tied = _tied(model, [layer.name for layer in plan.lowered])
    every = [layer for cluster in tied for layer in cluster]
    plain = plan if not every else at(WGRAD, every, (), (), widen=False)
    whole_worth, less_worth = ({e.name: _worth(e, own, by) for e in own.layers} for own in (plan, plain))
    has_wgrad = {e.name for e in plan.layers if not e.config.wgrad.high_precision}
    clusters, dense, wgrad = [], [], []
    for cluster in tied:
        whole, less = (sum(worth[layer] for layer in cluster) for worth in (whole_worth, less_worth))
        if max(whole, less) <= 0:
            dense += cluster
            continue
        clusters.append(cluster)
        if less >= whole:
            wgrad += [layer for layer in cluster if layer in has_wgrad]
    if not clusters:
        return Start(base, name, by, plan, {}, (), tuple(dense))
    lowered = [layer for cluster in clusters for layer in cluster]
    low = at(LOW, lowered, dense, wgrad, widen=False)
    try:
        wide = at(WIDE, lowered, dense, wgrad, widen=True)
    except RecipeError:  # codes that travel between ranks are not the wider weight
        wide = low
    widen = not _same(wide, low)
    plans = {LOW: low} | ({WIDE: wide} if widen else {})
    plans |= {level: at(level, lowered, dense, wgrad, widen=widen) for level in (WGRAD, DENSE)}
    return Start(base, name, by, low, plans, tuple(clusters), tuple(dense), tuple(wgrad))


def patterns_of(names: Sequence[str], among: Sequence[str], neutral: Collection[str] = ()) -> tuple[str, ...]:
    """Return globs that match ``names`` and of the rest of ``among`` at most ``neutral``, one a whole subtree.

    Args:
        names: layers to match, at least one.
        among: all layers of the model.
        neutral: layers that may be matched as well.
    """
    wanted, allowed = set(names), {*names, *neutral}
    found: list[str] = []

    def visit(prefix: tuple[str, ...], own: list[str]) -> None:
        hits = [name for name in own if name in wanted]
        if not hits:
            return
        if len(own) > 1 and all(name in allowed for name in own):
            found.append(".".join((*prefix, "**")))
            return
        below: dict[str, list[str]] = defaultdict(list)
        for name in own:
            parts = name.split(".")
            if len(parts) == len(prefix):
                found.extend([_exact(name)] if name in wanted else [])
            else:
                below[parts[len(prefix)]].append(name)
        for part, children in below.items():
            if len(children) == 1:
                found.extend([_exact(children[0])] if children[0] in wanted else [])
            else:
                visit((*prefix, part), children)

    visit((), [name for name in among if name])
    if "" in wanted:  # the model itself is the layer
        found.append(_exact(""))
    return tuple(found)


def _exact(name: str) -> str:
    """Return the pattern that matches one name."""
    try:
        plain = "*" not in name and parse_pattern(name).matches(name)
    except ExpressionError:
        plain = False
    return name if plain else f"re:{re.escape(name)}"


def _rules(
    plan: Plan, at: Mapping[str, Sequence[str]], dense: Sequence[str], wgrad: Sequence[str], *, widen: bool
) -> Iterable[Rule]:
    """Yield the rules that bring layers of ``plan`` to their levels, ``dense`` to BF16, and ``wgrad`` to BF16 there.

    ``widen`` says whether there is a level of wider formats, over which BF16 weight gradients then stand.
    """
    names = [layer.name for layer in plan.layers]
    already = {layer.name for layer in plan.layers if layer.config.high_precision}
    configs = {layer.name: layer.config for layer in plan.layers}
    wider: dict[LinearConfig, list[str]] = defaultdict(list)
    for own in (*at.get(WIDE, ()), *at.get(WGRAD, ())) if widen else ():
        wider[configs[own]].append(own)
    for config, layers in wider.items():
        paths = {path: _widened(path, gemm) for path, gemm in config.gemms()}
        fields: dict[str, Any] = {path: operands for path, operands in paths.items() if operands is not None}
        if fields:
            yield Rule(layers=patterns_of(layers, names), **fields)
    gone = {*at.get(DENSE, ()), *dense}
    plain = {*at.get(WGRAD, ()), *wgrad} - gone
    if plain:
        yield Rule(layers=patterns_of([name for name in names if name in plain], names, already), wgrad="bf16")
    if gone:
        yield Rule(layers=patterns_of([name for name in names if name in gone], names, already), all="bf16")


def _widened(path: str, gemm: GemmConfig) -> Path | None:
    """Return both operands of a path in eight bits; None where they have them."""
    wide = [_wide(spec) for spec in (gemm.first, gemm.second)]
    if wide == [gemm.first, gemm.second]:
        return None
    fields: dict[str, Any] = dict(zip(OPERANDS[path], wide, strict=True))
    return Path(**fields)


def _wide(spec: Spec) -> Spec:
    """Return ``spec`` in eight bits, scaled and rounded as it was; unchanged where it has as many."""
    if spec.fmt.element.bits >= _EIGHT_BITS:
        return spec
    if not spec.fmt.block_scaled:
        return spec.replace(format="fp8_e4m3")
    square = spec.block is not None and spec.block[0] > 1
    return spec.replace(format="mxfp8", granularity="32x32" if square else None)


def _worth(layer: LayerPlan, plan: Plan, by: By) -> float:
    """What a layer's low precision is worth: microseconds gained, or operations of a step weighted by bits saved.

    An operation in eight bits counts once and one in four bits three times.
    """
    if layer.config.high_precision:
        return 0.0
    if by == "time":
        return layer.price.gain_us if isinstance(layer.price, LayerPrice) else 0.0
    rows = 1 if plan.rows is None else plan.rows.get(layer.name, 0)
    found = 0.0
    for _, gemm in layer.config.gemms():
        if not gemm.high_precision:
            bits = max(gemm.first.fmt.element.bits, gemm.second.fmt.element.bits)
            found += layer.flops_per_row * rows * (16 / bits - 1)
    return found


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} layer{'s' * (len(names) > 1)}"


def _same(a: Plan, b: Plan) -> bool:
    return [layer.config for layer in a.layers] == [layer.config for layer in b.layers]


def _tied(model: nn.Module, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return ``names`` with layers of one Parameter together, in registration order of their first."""
    found: dict[object, list[str]] = defaultdict(list)
    wanted = set(names)
    for target in find_targets(model)[0]:
        if target.name in wanted:
            weight = target.module._parameters.get("weight")
            found[target.name if weight is None else id(weight)].append(target.name)
    return [tuple(members) for members in found.values()]
