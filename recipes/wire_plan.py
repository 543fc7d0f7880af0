"""What FSDP2 puts on the wire in one training step of a planned model, and how long that takes over given links.

Bytes follow from shapes alone, as :mod:`narrowgate.precision.sharding` and FSDP2 send them, and equal what
:class:`narrowgate.precision.WireCount` counts. For a weight [N, K] over R ranks, each gives ceil(N / R) rows to an
all-gather, the last ones padded: the codes of the recipe's ``shards.all_gather`` and behind them its scales. Where a
scale spans ranks (``tensor``, NVFP4's level of the tensor, blocks that a shard splits) an all-reduce of FP32 amaxes
goes ahead. Everything else travels in ``param_dtype``. Gradients go to a reduce-scatter as a whole, each padded
likewise, or with ``shards.reduce_scatter`` as codes and scales to an all-to-all
(:mod:`narrowgate.precision.reduction_codec`); one R-th of them goes to an all-reduce between replicas (HSDP).

Embedding tables that ranks exchange rows of (``shards.tables``) are none of FSDP2's: :mod:`.wire_tables`.

A unit is what one call of ``fully_shard`` takes: one all-gather in forward, one more in backward unless it stays
gathered, one reduce-scatter. The root, which takes what no unit has, always stays gathered.

Times are those of :mod:`narrowgate.recipes.topology`, one collective after the other. Compute is what the plan's prices
say (:mod:`narrowgate.recipes.pricing`), of linear layers alone. A step lies between the longer of the two (all
communication hidden: "E2E latency = max(local compute, communication)", as Meta counts GEM's MFU) and their sum (none).
Casts, copies into and out of FSDP2's buffers, and GEMMs that an overlapping collective slows down are in neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..precision.errors import NarrowgateError
from ..precision.exchanged_rows import Exchanged
from ..precision.reduction_codec import line_bytes, pieces_of
from ..precision.shard_codes import block_rows, payload_bytes
from ..precision.spec import Spec
from .plan import Plan
from .recipe import Tables
from .topology import Group, Topology
from .wire_tables import TABLE_ORDER, busiest, checked, table_calls
from .wire_units import DTYPES, SIZES, Parameter, Sharding, Unit, units_of

FORWARD, BACKWARD = "all-gather, forward", "all-gather, backward"
AMAXES, GRADIENTS, REPLICAS = "all-reduce of amaxes", "reduce-scatter", "all-reduce of replicas"
CODED_GRADIENTS = "all-to-all of gradients"
#: As they come in a step.
ORDER = (*TABLE_ORDER, AMAXES, FORWARD, BACKWARD, GRADIENTS, CODED_GRADIENTS, REPLICAS)
#: How rows of tables travel beside which a recipe's are shown, as BF16 weights beside its codes.
PLAIN_TABLES = Tables()


@dataclass(frozen=True)
class Layout:
    """GPUs of a job: ``shard`` of them share each weight, the others hold replicas of the shards."""

    gpus: int
    shard: int

    def __post_init__(self) -> None:
        if self.shard < 1 or self.gpus < 1 or self.gpus % self.shard:
            raise NarrowgateError(
                f"layout: found {self.gpus} GPUs in shard groups of {self.shard}, expected a size that divides them"
            )

    @property
    def replicas(self) -> int:
        """GPUs that hold the same shard."""
        return self.gpus // self.shard

    def __str__(self) -> str:
        return f"fsdp {self.gpus}" if self.replicas == 1 else f"hsdp {self.replicas} x {self.shard}"


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind in a step, as one rank takes part in them."""

    #: For example ``all-gather, forward``.
    what: str
    #: As :class:`narrowgate.precision.WireCount` calls it.
    collective: str
    calls: int
    #: Bytes that a rank hands over, by what they are: ``fp8_e4m3``, ``fp32 scales``, ``bf16``.
    given: Mapping[str, int]
    #: Of them, averaged over ranks, those that only fill up the last shards.
    padding: float
    #: Bytes that leave the rank, in a ring or pairwise.
    sent: float
    us: float

    @property
    def total(self) -> int:
        """Bytes that a rank hands over."""
        return sum(self.given.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON-ready data."""
        return {
            "what": self.what, "collective": self.collective, "calls": self.calls, "given": dict(self.given),
            "given_bytes": self.total, "padding_bytes": self.padding, "sent_bytes": self.sent, "us": self.us,
        }  # fmt: skip


@dataclass(frozen=True)
class Payload:
    """A step's traffic in one layout, and the compute that may hide it."""

    traffic: tuple[Traffic, ...]
    #: Predicted microseconds of the linear layers; None where the plan has no prices.
    compute_us: float | None
    #: Whose traffic: of the ranks that exchange rows of tables the one that hands over most; else all are alike.
    rank: int = 0

    @property
    def us(self) -> float:
        """Microseconds of all collectives, one after the other."""
        return sum(entry.us for entry in self.traffic)

    @property
    def sent(self) -> float:
        """Bytes that leave a rank."""
        return sum(entry.sent for entry in self.traffic)

    @property
    def hidden_us(self) -> float | None:
        """Lower bound of compute and communication together: all overlap."""
        return None if self.compute_us is None else max(self.compute_us, self.us)

    @property
    def exposed_us(self) -> float | None:
        """Upper bound: nothing overlaps."""
        return None if self.compute_us is None else self.compute_us + self.us

    def given(self, collective: str) -> int:
        """Bytes that a rank hands to one collective, as WireCount counts them."""
        return sum(entry.total for entry in self.traffic if entry.collective == collective)

    def to_dict(self) -> dict[str, Any]:
        """Return the payload as JSON-ready data."""
        return {
            "traffic": [entry.to_dict() for entry in self.traffic],
            "rank": self.rank, "sent_bytes": self.sent, "communication_us": self.us, "compute_us": self.compute_us,
            "hidden_us": self.hidden_us, "exposed_us": self.exposed_us,
        }  # fmt: skip


@dataclass(frozen=True)
class Wire:
    """One layout: the recipe's payload beside that of the same model without ``shards``, all in ``param_dtype``.

    Where the recipe exchanges rows of tables, so does the other, in BF16.
    """

    layout: Layout
    plain: Payload
    recipe: Payload
    #: The units that have parameters; the root, last, is the empty name.
    units: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as JSON-ready data."""
        return {
            "layout": str(self.layout),
            "gpus": self.layout.gpus,
            "shard": self.layout.shard,
            "replicas": self.layout.replicas,
            "units": list(self.units),
            "plain": self.plain.to_dict(),
            "recipe": self.recipe.to_dict(),
        }


def predict_wire(
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    topology: Topology,
    sharding: Sharding | None = None,
    exchanged: Exchanged | None = None,
) -> Wire:
    """Predict bytes and time of every collective of one step.

    Args:
        model: what the plan was resolved for, before the recipe is applied; the meta device will do.
        plan: its recipe says how weights and gradients travel, and its prices how long the linear layers compute.
        layout: the GPUs.
        topology: the links between them.
        sharding: how the model is handed to FSDP2.
        exchanged: the model's embedding tables and what a step asks of them, where the recipe has ``shards.tables``;
            tables are then placed among all GPUs, and bytes are those of the rank that hands over most.

    Raises:
        NarrowgateError: a pattern that matches none of the model's modules, a scalar parameter, GPUs that
            ``topology`` does not hold, or no ``exchanged`` where the recipe has ``shards.tables``.
        RecipeError: the recipe's ``shards`` are not built, or its backend cannot express them.
        NotBuiltError: a weight that could not be gathered as the plan says.
    """
    sharding = sharding or Sharding()
    plain, recipe = _Tally(), _Tally()
    if plan.tables is not None:
        exchanged = checked(plan.tables, exchanged)
        sharding = replace(sharding, ignored=(*sharding.ignored, *exchanged.modules))
        plain.rank = recipe.rank = busiest(exchanged, layout.gpus)
        for tally, tables in ((plain, PLAIN_TABLES), (recipe, plan.tables)):
            _exchange(tally, exchanged, tables, layout, topology)
    units = units_of(model, plan, sharding)
    totals = plan.totals()
    return Wire(
        layout,
        _payload(plain, units, layout, topology, sharding, None, compute_us=totals and totals.bf16_us),
        _payload(recipe, units, layout, topology, sharding, plan, compute_us=totals and totals.us),
        tuple(unit.name for unit in units),
    )


def _exchange(tally: _Tally, exchanged: Exchanged, tables: Tables, layout: Layout, topology: Topology) -> None:
    """Add what ranks exchange of embedding tables."""
    group = topology.group(layout.gpus)
    for call in table_calls(exchanged, tables, layout.gpus, tally.rank):
        size = sum(call.given.values())
        if call.collective == "all_gather":
            us = topology.all_gather_us(group, layout.gpus * size)
        else:
            us = topology.all_to_all_us(group, size)
        tally.add(call.what, call.collective, call.given, 0, call.sent, us)


def _payload(
    tally: _Tally,
    units: Sequence[Unit],
    layout: Layout,
    topology: Topology,
    sharding: Sharding,
    plan: Plan | None,
    *,
    compute_us: float | None,
) -> Payload:
    """As ``plan``'s recipe says, or without ``shards``; ``tally`` has what FSDP2 does not send."""
    ranks = layout.shard
    group = topology.group(ranks, gpus=layout.gpus)
    replicas = topology.group(layout.replicas, stride=ranks, gpus=layout.gpus)
    amaxes: list[int] = []
    for unit in units:
        gathers = (FORWARD, BACKWARD) if unit.name and sharding.reshard else (FORWARD,)
        given: Counter[str] = Counter()
        padding = 0.0
        for parameter in unit.parameters:
            payload, waste, amax = _gathered(parameter, ranks, parameter.spec if plan else None, sharding.param_dtype)
            given.update(payload)
            padding += waste / ranks
            amaxes += [amax] * (1 if sharding.joint_amaxes else len(gathers)) if amax else []
        for what in gathers if ranks > 1 else ():
            us = topology.all_gather_us(group, ranks * given.total())
            tally.add(what, "all_gather", given, padding, (ranks - 1) * given.total(), us)
        _reduce(tally, unit, layout, topology, (group, replicas), sharding, plan.reduce if plan else None)
    for size in [sum(amaxes)] if sharding.joint_amaxes and amaxes else amaxes:
        sent = 2 * (ranks - 1) / ranks * size
        tally.add(AMAXES, "all_reduce", {"fp32": size}, 0, sent, topology.all_reduce_us(group, size))
    return Payload(tally.traffic(), compute_us, tally.rank)


def _gathered(
    parameter: Parameter, ranks: int, spec: Spec | None, param_dtype: str | None
) -> tuple[dict[str, int], int, int]:
    """(bytes a rank gives by what they are, bytes that only pad on all ranks, bytes of an all-reduce of amaxes)."""
    rows = -(-parameter.rows // ranks)
    idle = rows * ranks - parameter.rows
    if spec is None:
        dtype = param_dtype or parameter.dtype
        size = parameter.width * SIZES[dtype]
        return {dtype: rows * size}, idle * size, 0
    codes, scales, amaxes = payload_bytes(spec, (parameter.rows, parameter.width), ranks)
    if ranks == 1:
        return {}, 0, 0
    given, waste = {spec.format: codes}, idle * (codes // rows)
    if scales:
        height = block_rows(spec)
        row = scales // (rows // height)
        waste += ranks * scales - -(-parameter.rows // height) * row
        given[f"{spec.fmt.scale.name if spec.fmt.scale else 'fp32'} scales"] = scales
    return given, waste, amaxes


def _reduce(
    tally: _Tally,
    unit: Unit,
    layout: Layout,
    topology: Topology,
    groups: tuple[Group, Group],
    sharding: Sharding,
    spec: Spec | None,
) -> None:
    """Add the gradients of a unit: to its shards, as ``spec`` or in the policy's dtype, then between replicas."""
    ranks, (group, replicas) = layout.shard, groups
    given: Counter[str] = Counter()
    padding = 0
    for parameter in unit.parameters:
        if parameter.trains:
            dtype = sharding.reduce_dtype or sharding.param_dtype or parameter.dtype
            rows = -(-parameter.rows // ranks) * ranks
            given[dtype] += rows * parameter.width * SIZES[dtype]
            padding += (rows - parameter.rows) * parameter.width * SIZES[dtype]
    size = given.total()
    if not size:
        return
    if ranks > 1 and spec is not None:
        coded, waste = _coded_gradients(unit, ranks, sharding, spec)
        total = sum(coded.values())
        us = topology.all_to_all_us(group, total)
        tally.add(CODED_GRADIENTS, "all_to_all", coded, waste, (ranks - 1) / ranks * total, us)
    elif ranks > 1:
        us = topology.reduce_scatter_us(group, size)
        tally.add(GRADIENTS, "reduce_scatter", given, padding, (ranks - 1) / ranks * size, us)
    if layout.replicas > 1:
        part = {dtype: count // ranks for dtype, count in given.items()}
        us = topology.all_reduce_us(replicas, size / ranks)
        sent = 2 * (layout.replicas - 1) / layout.replicas * size / ranks
        tally.add(REPLICAS, "all_reduce", part, padding / ranks, sent, us)


def _coded_gradients(unit: Unit, ranks: int, sharding: Sharding, spec: Spec) -> tuple[dict[str, int], int]:
    """(bytes that a rank gives by what they are, those of them that only pad)."""
    trained = [parameter for parameter in unit.parameters if parameter.trains]
    dtype = sharding.reduce_dtype or sharding.param_dtype or trained[0].dtype
    pieces = pieces_of([("", 0, parameter.shape) for parameter in trained], ranks)
    line = line_bytes(pieces, spec, DTYPES[dtype])
    waste = ranks * line["padding"]
    for parameter, piece in zip(trained, pieces, strict=True):
        size = (2 if spec.high_precision else 1) if piece.coded else SIZES[dtype]
        waste += (ranks * piece.numel - parameter.rows * parameter.width) * size
    given = Counter({spec.format: line["codes"], "fp32 scales": line["scales"]})
    given.update({dtype: line["values"], "padding": line["padding"]})
    return {what: ranks * count for what, count in given.items() if count}, waste


class _Tally:
    """Traffic by kind, while it is added up."""

    def __init__(self) -> None:
        self.sums: dict[str, Traffic] = {}
        self.rank = 0

    def add(self, what: str, collective: str, given: Mapping[str, int], padding: float, sent: float, us: float) -> None:
        """Add one call."""
        before = self.sums.get(what)
        if before is None:
            self.sums[what] = Traffic(what, collective, 1, dict(given), padding, sent, us)
            return
        self.sums[what] = Traffic(
            what, collective, before.calls + 1, dict(Counter(before.given) + Counter(given)), before.padding + padding,
            before.sent + sent, before.us + us,
        )  # fmt: skip

    def traffic(self) -> tuple[Traffic, ...]:
        """All kinds, in the order of a step."""
        return tuple(self.sums[what] for what in ORDER if what in self.sums)
