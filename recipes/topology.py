"""Links between GPUs, read from a file, and how long a collective takes over them.

A cluster has three tiers, after those that GEM trains on (Meta's network: "RDMA over Ethernet for Distributed AI
Training at Meta Scale", SIGCOMM 2024): a **domain** of GPUs that NVLink joins, a **zone** of domains that a network
without oversubscription joins, and what lies **across** zones. Each is two numbers for one GPU: how fast it sends in
one direction while all others do too, and how long a message of no bytes takes.

Times are those of textbook algorithms with a cost of ``latency + bytes / bandwidth`` a message (Thakur, Rabenseifner,
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005). For n ranks in D domains and Z zones, m
ranks to a domain, S bytes in all, latencies a and bandwidths b of (domain, zone, across):

- ``ring``, as NCCL predicts its own rings (``src/graph/tuning.cc``): every rank hands on one n-th at a time, n - 1
  times, and each boundary is crossed by all m rails of a domain at once.
  all-gather = reduce-scatter = (n - D) a0 + (D - Z) a1 + (Z - 1) a2 + (n - 1) / n S / min(b0, m b1, m b2), without the
  tiers that the ranks do not span.
- ``hierarchical``, one ring a tier, from the outermost in (Cho et al., "BlueConnect", MLSys 2019):
  all-gather = (Z - 1)(a2 + S / (n b2)) + (D / Z - 1)(a1 + Z S / (n b1)) + (m - 1)(a0 + D S / (n b0)).
- all-reduce: a reduce-scatter and an all-gather of these, or a tree where that is faster, as it is for few bytes:
  2 [(m - 1) a0 + log2(D / Z) a1 + log2(Z) a2] + 2 S / min(b0, m b1, m b2) (``tuning.cc`` again).
- all-to-all: a message to each other rank in turn, the sum of a + (S / n) / b over all of them (pairwise exchange).

Every collective also takes ``launch_us`` once. None of this knows of contention: GEMMs that overlap with a collective
run slower, and it runs slower beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..precision.errors import NarrowgateError, did_you_mean
from .document import Node, parse_document
from .errors import Diagnostic, RecipeError, found

#: The file that ships: round figures of a public cluster, to be replaced by those of your own.
EXAMPLE = "topology.example.yaml"

Positive = Annotated[float, Field(gt=0)]
Microseconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Link(_Section):
    """What one GPU has of a tier."""

    gb_per_s: Positive = Field(description="1e9 bytes a second that one GPU sends in one direction, all at once.")
    latency_us: Microseconds = Field(description="Microseconds of a message of no bytes.")
    source: str = Field(default="", description="Where the two figures come from.")


class Tier(Link):
    """A link within groups of GPUs."""

    gpus: Count = Field(description="GPUs that it joins.")


class Topology(_Section):
    """Links of a cluster, innermost first."""

    topology: str = Field(min_length=1, description="Its name.")
    description: str = ""
    measured: bool = Field(description="True where the figures were measured on the cluster, false for an example.")
    algorithm: Literal["ring", "hierarchical"] = "ring"
    launch_us: Microseconds = Field(default=0.0, description="Microseconds that every collective takes to begin.")
    domain: Tier = Field(description="GPUs joined by NVLink.")
    zone: Tier | None = Field(default=None, description="Domains joined by a network without oversubscription.")
    across: Link | None = Field(default=None, description="Between zones.")

    def group(self, ranks: int, *, stride: int = 1, gpus: int | None = None) -> Group:
        """Return how ``ranks`` GPUs, each ``stride`` from the next, lie in the cluster.

        Args:
            ranks: of one process group.
            stride: 1 for neighbours; the size of a shard group for the replicas of one shard.
            gpus: of the whole job, which lies in as few zones as hold it, evenly; ``ranks * stride`` where None.

        Raises:
            NarrowgateError: GPUs that would fill a domain partly, or more than the tiers of the file reach.
        """
        gpus = ranks * stride if gpus is None else gpus
        domain = self.domain.gpus
        for size, what in ((stride, "a shard group"), (ranks * stride, "a group"), (gpus, "a job")):
            if size % domain and domain % size:
                raise NarrowgateError(
                    f"topology '{self.topology}': found {what} of {size} GPUs, expected a divisor or a multiple of "
                    f"domain.gpus, {domain}"
                )
        members = max(1, min(ranks, domain // stride))
        domains = ranks // members
        if domains > 1 and self.zone is None:
            raise NarrowgateError(
                f"topology '{self.topology}': found a group of {ranks} GPUs and no zone, expected one beyond "
                f"domain.gpus, {domain}"
            )
        zones = 1
        if self.zone is not None and ranks * stride > self.zone.gpus:
            if self.across is None:
                raise NarrowgateError(
                    f"topology '{self.topology}': found a group of {ranks} GPUs over {ranks * stride} and no across, "
                    f"expected one beyond zone.gpus, {self.zone.gpus}"
                )
            zones = min(domains, -(-gpus // self.zone.gpus))
        return Group(ranks, members, domains, zones)

    def all_gather_us(self, group: Group, size: float) -> float:
        """Microseconds until every rank of ``group`` has all of ``size`` bytes, of which each had an equal part."""
        if group.ranks == 1:
            return 0.0
        if self.algorithm == "hierarchical":
            return self.launch_us + self._stages_us(group, size)
        return self.launch_us + self._ring_us(group, size)

    def reduce_scatter_us(self, group: Group, size: float) -> float:
        """Microseconds until every rank has the sum of an equal part of ``size`` bytes, of which each had all."""
        return self.all_gather_us(group, size)

    def all_reduce_us(self, group: Group, size: float) -> float:
        """Microseconds until every rank has the sum of all of ``size`` bytes."""
        if group.ranks == 1:
            return 0.0
        both_ways = self._stages_us(group, size) if self.algorithm == "hierarchical" else self._ring_us(group, size)
        depths = (group.members - 1, math.log2(group.domains / group.zones), math.log2(group.zones))
        tree = sum(depth * link.latency_us for depth, link in zip(depths, self._links(), strict=True))
        return self.launch_us + 2 * min(both_ways, tree + size / self._narrowest(group))

    def all_to_all_us(self, group: Group, size: float) -> float:
        """Microseconds until every rank has sent an equal part of its ``size`` bytes to each, one of them itself."""
        if group.ranks == 1:
            return 0.0
        within = (group.members, group.ranks / group.zones, group.ranks)
        total, reached = self.launch_us, 1.0
        for link, until in zip(self._links(), within, strict=True):
            total += (until - reached) * (link.latency_us + size / group.ranks / _bytes_a_us(link))
            reached = until
        return total

    def _links(self) -> tuple[Link, Link, Link]:
        """Domain, zone, across; where the file has none, the one within stands in for what no group reaches."""
        zone = self.zone or self.domain
        return self.domain, zone, self.across or zone

    def _ring_us(self, group: Group, size: float) -> float:
        hops = (group.ranks - group.domains, group.domains - group.zones, group.zones - 1)
        latency = sum(count * link.latency_us for count, link in zip(hops, self._links(), strict=True))
        return latency + (group.ranks - 1) / group.ranks * size / self._narrowest(group)

    def _stages_us(self, group: Group, size: float) -> float:
        fans = (group.zones, group.domains / group.zones, group.members)
        part, total = size / group.ranks, 0.0
        for fan, link in zip(fans, reversed(self._links()), strict=True):
            total += (fan - 1) * (link.latency_us + part / _bytes_a_us(link))
            part *= fan
        return total

    def _narrowest(self, group: Group) -> float:
        """Bytes a microsecond that a rank can hand on, at the narrowest boundary that the group spans."""
        domain, zone, across = map(_bytes_a_us, self._links())
        rates = [domain] if group.members > 1 else []
        rates += [group.members * zone] if group.domains > group.zones else []
        rates += [group.members * across] if group.zones > 1 else []
        return min(rates)


@dataclass(frozen=True)
class Group:
    """Where the ranks of one process group lie."""

    ranks: int
    #: Of them in one domain, the domains, and the zones.
    members: int
    domains: int
    zones: int


def load_topology(path: str | FilePath) -> Topology:
    """Read a file of links.

    Raises:
        RecipeError: the file holds no topology; one line for each fault, with file, line, column and field.
        NarrowgateError: the file cannot be read.
    """
    try:
        text = FilePath(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8 text"
        raise NarrowgateError(f"{path}: {why}; expected a file of links between GPUs") from None
    return _parse(text, str(path))


def example_topology() -> Topology:
    """Return the topology that ships: an example, measured nowhere."""
    assert __package__ is not None
    return _parse((resources.files(__package__) / EXAMPLE).read_text(encoding="utf-8"), f"<shipped>/{EXAMPLE}")


def topology_schema() -> dict[str, Any]:
    """Return the JSON Schema of files of links."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Topology.model_json_schema()}


def _parse(text: str, file: str) -> Topology:
    if not text.strip():
        raise NarrowgateError(f"{file}: found an empty file, expected links between GPUs")
    root, faults = parse_document(text, file, "topology")
    if faults:
        raise RecipeError(faults)
    data = root.plain()
    if not isinstance(data, dict):
        raise NarrowgateError(f"{file}:{root.line}:{root.column}: found {found(data)}, expected a mapping of fields")
    try:
        topology = Topology.model_validate(data)
    except ValidationError as error:
        raise RecipeError(_diagnostic(fault, root, file) for fault in error.errors()) from None
    _check_order(topology, root, file)
    return topology


def _check_order(topology: Topology, root: Node, file: str) -> None:
    """A zone holds whole domains, and what lies across zones needs them."""
    if topology.zone is not None and topology.zone.gpus % topology.domain.gpus:
        _refuse(
            root, file, ["zone", "gpus"],
            f"found {topology.zone.gpus}, expected a multiple of domain.gpus, {topology.domain.gpus}",
        )  # fmt: skip
    if topology.across is not None and topology.zone is None:
        _refuse(root, file, ["across"], "found it without a zone, expected the zones that it joins")


def _refuse(root: Node, file: str, place: list[str | int], message: str) -> None:
    node, _ = root.find(place)
    line, column = root.key(place) or (node.line, node.column)
    field = ".".join(map(str, place))
    raise RecipeError([Diagnostic(file=file, line=line, column=column, field=field, message=message)])


def _diagnostic(fault: Any, root: Node, file: str) -> Diagnostic:
    location = [part for part in fault["loc"] if isinstance(part, str | int)]
    node, _ = root.find(location)
    line, column = root.key(location) or (node.line, node.column)
    if fault["type"] == "extra_forbidden":
        kinds = {"domain": Tier, "zone": Tier, "across": Link}
        known = kinds[str(location[0])].model_fields if len(location) > 1 else Topology.model_fields
        message = f"unknown field{did_you_mean(str(location[-1]), known)} (known: {', '.join(known)})"
    elif fault["type"] == "missing":
        message = "found nothing, expected the field"
    else:
        expected = fault["msg"].removeprefix("Input should be ")
        message = f"found {found(fault['input'])}, expected {expected}"
    field = ".".join(map(str, location))
    return Diagnostic(file=file, line=line, column=column, field=field, message=message)


def _bytes_a_us(link: Link) -> float:
    return link.gb_per_s * 1e3
