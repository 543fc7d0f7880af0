"""What embedding tables that ranks exchange rows of put on the wire in a step: exact bytes of one rank.

Ids go to the rank that has a table and rows come back; gradients of rows go the other way
(:mod:`narrowgate.models.embedding_exchange`). Unlike everything that FSDP2 sends, this differs by rank: a rank hands
over the rows of its own tables, whoever asks, and ids and gradients of what it asks for. So a plan is that of one rank,
the one that hands over most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..precision.errors import NarrowgateError
from ..precision.exchanged_rows import ID_BYTES, SCALE_BYTES, Exchanged, Request, code_bytes, place_tables
from ..precision.spec import Spec
from .recipe import Tables

COUNTS, IDS = "all-gather of rows' counts", "all-to-all of ids"
ROWS, ROW_GRADIENTS = "all-to-all of rows", "all-to-all of rows' gradients"
#: As they come in a step.
TABLE_ORDER = (COUNTS, IDS, ROWS, ROW_GRADIENTS)


@dataclass(frozen=True)
class TableCall:
    """One collective of one lookup, as one rank takes part in it."""

    what: str
    #: As :class:`narrowgate.precision.WireCount` calls it.
    collective: str
    #: Bytes that the rank hands over, by what they are.
    given: Mapping[str, int]
    #: Of them, those that leave the rank.
    sent: int


def checked(tables: Tables, exchanged: Exchanged | None) -> Exchanged:
    """Return the tables of a model whose recipe wants rows to be exchanged.

    Raises:
        NarrowgateError: nobody said which tables the model has.
    """
    if exchanged is None:
        raise NarrowgateError(
            f"shards.tables {tables}: found no `exchanged`, expected the model's tables and what a step asks of them"
            " (narrowgate.models.embedding_exchange.exchanged_tables)"
        )
    return exchanged


def busiest(exchanged: Exchanged, ranks: int) -> int:
    """Return the rank that hands over most elements of rows and gradients in a step, the first of several."""
    owners = place_tables(exchanged.sizes, ranks)
    rows = [0] * ranks
    for request in _requests(exchanged):
        asked = request.by_rank(ranks)
        rows[owners[request.table]] += sum(asked)
        for rank in range(ranks):
            rows[rank] += asked[rank]
    return max(range(ranks), key=rows.__getitem__)


def table_calls(exchanged: Exchanged, tables: Tables, ranks: int, rank: int) -> Iterator[TableCall]:
    """Yield what a step gives to each collective.

    Args:
        exchanged: the tables, and what is asked of them.
        tables: formats of rows and of gradients.
        ranks: of the job; one sends nothing.
        rank: which of them.
    """
    if ranks == 1:
        return
    owners = place_tables(exchanged.sizes, ranks)
    for requests in exchanged.lookups:
        counts = ID_BYTES * len(requests)
        yield TableCall(COUNTS, "all_gather", {"int64": counts}, (ranks - 1) * counts)
        own = [request.by_rank(ranks)[rank] for request in requests]
        away = [asked * (owners[r.table] != rank) for asked, r in zip(own, requests, strict=True)]
        ids = [sum(n * r.ids for n, r in zip(rows, requests, strict=True)) for rows in (own, away)]
        yield TableCall(IDS, "all_to_all", {"int64": ID_BYTES * ids[0]}, ID_BYTES * ids[1])
        mine = [request.by_rank(ranks) for request in requests if owners[request.table] == rank]
        answered = sum(map(sum, mine))
        others = answered - sum(asked[rank] for asked in mine)
        yield _rows(ROWS, tables.forward, exchanged.width, answered, others)
        yield _rows(ROW_GRADIENTS, tables.backward, exchanged.width, sum(own), sum(away))


def _requests(exchanged: Exchanged) -> Iterator[Request]:
    return (request for requests in exchanged.lookups for request in requests)


def _rows(what: str, spec: Spec, width: int, rows: int, away: int) -> TableCall:
    given = Counter({spec.format: rows * code_bytes(spec, width)})
    if not spec.high_precision:
        given["fp32 scales"] = rows * SCALE_BYTES
    sent = given.total() // rows * away if rows else 0
    return TableCall(what, "all_to_all", {name: count for name, count in given.items() if count}, sent)
