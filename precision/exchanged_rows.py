"""Embedding rows on their way between ranks: in which formats, how many bytes, and which rank has which table.

Needs no torch: plans are made of it too (:mod:`narrowgate.recipes.wire_tables`); what sends them is
:mod:`narrowgate.models.embedding_exchange`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .spec import Spec

SCALE_BYTES = 4
#: Of an id, and of a number of rows.
ID_BYTES = 8


def unsupported_rows(spec: Spec) -> str | None:
    """Return what is built instead of rows that travel as ``spec``; None where that is."""
    plain = spec.high_precision or (spec.fmt.element.bits == 8 and spec.granularity == "row")
    extra = spec.delayed or spec.hadamard or spec.clip_p or spec.clip_rms or spec.fmt.block_scaled
    return None if plain and not extra else "fp32, bf16, or fp8_e4m3 or fp8_e5m2 with /row"


def code_bytes(spec: Spec, width: int) -> int:
    """Bytes of the codes of one row of ``width`` elements."""
    return width * spec.fmt.element.bits // 8


def row_bytes(spec: Spec, width: int) -> int:
    """Bytes of one row of ``width`` elements, with its scale where the format has one."""
    return code_bytes(spec, width) + (0 if spec.high_precision else SCALE_BYTES)


def place_tables(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the rank of each table: the largest first, each to the rank that holds least so far.

    Args:
        sizes: elements of each table, by name.
        ranks: how many there are.
    """
    load, owners = [0] * ranks, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = min(range(ranks), key=load.__getitem__)
        load[owners[name]] += sizes[name]
    return owners


@dataclass(frozen=True)
class Request:
    """Rows of one table that a lookup asks for."""

    table: str
    #: Of each rank; of one entry, every rank asks for as many.
    rows: tuple[int, ...]
    #: Ids that stand for a row: 1, or more of a bag.
    ids: int = 1

    def by_rank(self, ranks: int) -> list[int]:
        """Rows that each of ``ranks`` ranks asks for."""
        return list(self.rows if len(self.rows) > 1 else self.rows * ranks)


@dataclass(frozen=True)
class Exchanged:
    """Embedding tables of a model, and what a step asks of them.

    Attributes:
        sizes: elements of each table, by name.
        width: elements of every row.
        modules: names of the tables' modules, which FSDP2 leaves alone.
        lookups: requests of each lookup of a step; every one goes forward and back once.
    """

    sizes: Mapping[str, int]
    width: int
    modules: tuple[str, ...] = ()
    lookups: tuple[Sequence[Request], ...] = ()
