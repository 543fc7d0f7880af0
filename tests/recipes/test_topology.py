"""Links between GPUs: what a file may hold, where groups lie, and times against sums over single messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from narrowgate.precision.errors import NarrowgateError
from narrowgate.recipes.topology import Group, Link, Tier, Topology, example_topology, load_topology, topology_schema

SMALL = Topology(
    topology="small",
    measured=False,
    domain=Tier(gpus=4, gb_per_s=100, latency_us=2),
    zone=Tier(gpus=16, gb_per_s=10, latency_us=5),
    across=Link(gb_per_s=1, latency_us=11),
)
STAGED = SMALL.model_copy(update={"algorithm": "hierarchical"})
FILE = """\
topology: mine
measured: true
domain: {gpus: 8, gb_per_s: 300, latency_us: 3}
zone: {gpus: 64, gb_per_s: 40, latency_us: 9}
across: {gb_per_s: 8, latency_us: 20}
"""


def link_between(a: int, b: int) -> Link:
    """Of two GPUs of SMALL by their numbers."""
    if a // 4 == b // 4:
        return SMALL.domain
    assert SMALL.zone is not None
    assert SMALL.across is not None
    return SMALL.zone if a // 16 == b // 16 else SMALL.across


@pytest.mark.parametrize(("gpus", "expected"), [
    (2, Group(2, 2, 1, 1)), (4, Group(4, 4, 1, 1)), (16, Group(16, 4, 4, 1)), (32, Group(32, 4, 8, 2)),
    (24, Group(24, 4, 6, 2)),
])  # fmt: skip
def test_neighbours_fill_domains_then_zones(gpus: int, expected: Group) -> None:
    assert SMALL.group(gpus) == expected


@pytest.mark.parametrize(("ranks", "stride", "expected"), [
    (8, 4, Group(8, 1, 8, 2)), (2, 16, Group(2, 1, 2, 2)), (16, 2, Group(16, 2, 8, 2)), (2, 2, Group(2, 2, 1, 1)),
])  # fmt: skip
def test_replicas_lie_a_shard_group_apart(ranks: int, stride: int, expected: Group) -> None:
    assert SMALL.group(ranks, stride=stride) == expected


@pytest.mark.parametrize("gpus", [4, 16, 32])
def test_a_ring_takes_as_long_as_its_hops_and_its_narrowest_boundary(gpus: int) -> None:
    size = 3.2e6
    latency = sum(link_between(rank, rank + 1).latency_us for rank in range(gpus - 1))
    # One ring through each GPU of a domain, all at once: a boundary is crossed by four of them.
    boundaries = {4: 100, 16: 4 * 10, 32: 4 * 1}
    expected = latency + (gpus - 1) / gpus * size / (boundaries[gpus] * 1e3)
    assert SMALL.all_gather_us(SMALL.group(gpus), size) == pytest.approx(expected)


@pytest.mark.parametrize("gpus", [4, 16, 32])
def test_stages_send_what_each_tier_lacks(gpus: int) -> None:
    """Played through for GPU 0: what it has after each stage, and what it was sent on which link."""
    size, held, total = 3.2e6, 1, 0.0
    for peers in (range(16, gpus, 16), range(4, min(gpus, 16), 4), range(1, 4)):
        for peer in peers:
            link = link_between(0, peer)
            total += link.latency_us + held * size / gpus / (link.gb_per_s * 1e3)
        held *= len(peers) + 1
    assert held == gpus
    assert STAGED.all_gather_us(STAGED.group(gpus), size) == pytest.approx(total)


def test_an_all_to_all_is_a_message_to_each_other_rank() -> None:
    size = 6.4e6
    expected = sum(
        link_between(0, peer).latency_us + size / 32 / (link_between(0, peer).gb_per_s * 1e3) for peer in range(1, 32)
    )
    assert SMALL.all_to_all_us(SMALL.group(32), size) == pytest.approx(expected)


def test_an_all_reduce_of_much_is_a_ring_both_ways_and_one_of_little_a_tree() -> None:
    group = SMALL.group(32)
    much = 1e9
    assert SMALL.all_reduce_us(group, much) == pytest.approx(2 * SMALL.all_gather_us(group, much))
    # Three hops in the domain, then halving four domains of a zone twice and two zones once.
    assert SMALL.all_reduce_us(group, 4) == pytest.approx(2 * (3 * 2 + 2 * 5 + 1 * 11 + 4 / 4e3))


def test_a_single_rank_sends_nothing() -> None:
    alone = SMALL.group(1)
    assert [work(alone, 1e9) for work in (SMALL.all_gather_us, SMALL.all_reduce_us, SMALL.all_to_all_us)] == [0, 0, 0]


def test_every_collective_takes_its_launch_once() -> None:
    late = SMALL.model_copy(update={"launch_us": 7.0})
    for group in (SMALL.group(4), SMALL.group(32)):
        for name in ("all_gather_us", "reduce_scatter_us", "all_reduce_us", "all_to_all_us"):
            assert getattr(late, name)(group, 1e6) == pytest.approx(7 + getattr(SMALL, name)(group, 1e6))


def test_groups_that_the_tiers_do_not_hold_are_refused() -> None:
    with pytest.raises(NarrowgateError, match="found a group of 6 GPUs, expected a divisor or a multiple of"):
        SMALL.group(6)
    host = Topology(topology="host", measured=False, domain=SMALL.domain)
    with pytest.raises(NarrowgateError, match=r"found a group of 8 GPUs and no zone, expected one beyond domain\.gpus"):
        host.group(8)
    zone = Topology(topology="zone", measured=False, domain=SMALL.domain, zone=SMALL.zone)
    with pytest.raises(NarrowgateError, match=r"found a group of 32 GPUs over 32 and no across"):
        zone.group(32)


def test_the_shipped_file_is_an_example_that_names_its_sources() -> None:
    example = example_topology()
    assert not example.measured
    assert example.zone is not None
    assert example.across is not None
    assert all(link.source for link in (example.domain, example.zone, example.across))
    assert example.group(4096).zones > 1


def test_a_file_is_read_as_written(tmp_path: Path) -> None:
    file = tmp_path / "links.yaml"
    file.write_text(FILE)
    read = load_topology(file)
    assert (read.measured, read.domain.gb_per_s, read.zone and read.zone.gpus) == (True, 300, 64)


@pytest.mark.parametrize(("written", "instead", "message"), [
    ("gb_per_s: 300", "gb_per_s: 0", "links.yaml:3:19: domain.gb_per_s: found 0, expected greater than 0"),
    ("gb_per_s: 300", "gb_per_s: fast", "links.yaml:3:19: domain.gb_per_s: found 'fast', expected a valid number"),
    ("latency_us: 3}", "latncy_us: 3}", "domain.latncy_us: unknown field; did you mean 'latency_us'?"),
    ("measured: true", "measured: maybe", "links.yaml:2:1: measured: found 'maybe', expected a valid boolean"),
    ("measured: true\n", "", "links.yaml:1:1: measured: found nothing, expected the field"),
    ("zone: {gpus: 64", "zone: {gpus: 60", ":4:8: zone.gpus: found 60, expected a multiple of domain.gpus, 8"),
    ("zone: {gpus: 64, gb_per_s: 40, latency_us: 9}\n", "", ":4:1: across: found it without a zone, expected"),
    ("topology: mine", "topology: mine\nalgorithm: tree", ":2:1: algorithm: found 'tree', expected 'ring' or"),
    (FILE, "", "links.yaml: found an empty file, expected links between GPUs"),
    (FILE, "- 1", "links.yaml:1:1: found a list [1], expected a mapping of fields"),
])  # fmt: skip
def test_a_fault_of_a_file_is_one_line_with_its_place(tmp_path: Path, written: str, instead: str, message: str) -> None:
    file = tmp_path / "links.yaml"
    file.write_text(FILE.replace(written, instead))
    with pytest.raises(NarrowgateError) as caught:
        load_topology(file)
    told = str(caught.value).replace(str(tmp_path) + "/", "")
    assert message in told
    assert [line for line in told.splitlines() if message in line]


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NarrowgateError, match="No such file or directory; expected a file of links between GPUs"):
        load_topology(tmp_path / "absent.yaml")


def test_the_schema_takes_the_shipped_file() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(example_topology().model_dump(), topology_schema())
