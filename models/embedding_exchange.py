"""Embedding tables on several ranks: each table whole on one, rows quantized before they travel.

A rank has the ids of its own rows and asks, in one all-to-all, the owner of each table for what they stand for. The
owner looks up the rows of all ranks at once, quantizes them (``fp8_e4m3/row``: one scale an embedding), and a second
all-to-all brings codes and scales to who asked, one byte an element and four bytes a row instead of four bytes an
element. Backward, gradients go the other way: in BF16, or in FP8 rounded stochastically, so that what is small
survives on average. Bags are summed by the owner, so one row travels and not its parts.

**The same bits as one process.** Scales belong to rows, random bits to a lookup's row in the batch of all ranks, and an
owner adds gradients up in the order of the ranks: a process that holds all tables and the batches of all ranks, one
behind the other, computes the same outputs and gradients with the same formats.

What a rank's loss averages over its own rows counts 1/ranks, as the gradients that DDP averages. Codes travel as
uint8: Gloo knows no FP8. The ranks tell each other how many rows they ask for, which waits for the device once a
lookup; a compiled model breaks its graph there. Tables that torchrec shards travel in the same formats by
:mod:`narrowgate.models.torchrec_codecs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..precision.errors import NarrowgateError
from ..precision.exchanged_rows import Exchanged, Request, place_tables
from ..precision.spec import Spec
from ..precision.stochastic import Shard, call_key, stream_key
from .embedding import LOOKUPS, SparseArch
from .row_wire import RowWire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_KINDS = ("tables", "bags")
#: Its own type hides that it takes methods.
_uncompiled: Any = torch.compiler.disable


@dataclass(frozen=True)
class _Lookup:
    """One exchange: who owns what was asked for, and how many rows of it each rank asked for."""

    #: Owner of each request.
    owners: tuple[int, ...]
    #: [ranks][requests].
    counts: tuple[tuple[int, ...], ...]
    #: Keys of each request's random bits: of its rows, and of their gradients.
    keys: tuple[tuple[int | Tensor, int | Tensor], ...]

    def of(self, rank: int) -> list[int]:
        """Requests that ``rank`` owns."""
        return [i for i, owner in enumerate(self.owners) if owner == rank]

    def rows(self, asked_by: int, owned_by: int) -> int:
        """Rows that travel between two ranks."""
        return sum(self.counts[asked_by][i] for i in self.of(owned_by))

    def total(self, request: int) -> int:
        """Rows of a request, of all ranks."""
        return sum(counts[request] for counts in self.counts)


class EmbeddingExchange:
    """Collectives between the ranks that ask for embeddings and those that own their tables.

    Args:
        owners: rank of each table, by name; the same on every rank.
        width: of every embedding.
        forward: format of rows on their way.
        backward: format of their gradients.
        group: the ranks; None for the default group, or for this process alone where there is none.
        seed: of stochastic rounding, the same on every rank.

    Raises:
        NarrowgateError: a format that cannot travel.
    """

    def __init__(
        self,
        owners: Mapping[str, int],
        width: int,
        *,
        forward: Spec | str = "fp8_e4m3/row",
        backward: Spec | str = "bf16",
        group: ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        self.owners, self.width = dict(owners), width
        self.forward, self.backward = RowWire(forward, "forward"), RowWire(backward, "backward")
        self.group, self.seed = group, seed
        there = dist.is_available() and dist.is_initialized()
        self.ranks = dist.get_world_size(group) if there else 1
        self.rank = dist.get_rank(group) if there else 0
        #: Lookups with gradients so far, by what they are for: random bits follow from it.
        self.draws: dict[str, int] = {}
        #: What the last lookup of each kind asked for, on all ranks.
        self.asked: dict[str, tuple[Request, ...]] = {}
        #: For timing: as if every rank asked for as much as this one, which answers all with what is its own. Nothing
        #: is sent, and nobody waits; what comes back is worth nothing.
        self.local = False

    @_uncompiled
    def look_up(
        self, what: str, asked: Sequence[tuple[str, Tensor]], tables: Mapping[str, nn.Module], anchor: Tensor
    ) -> list[Tensor]:
        """Return the rows [n, d] of each request, FP32; differentiable in the tables, on the ranks that own them.

        Every rank calls it in the same order with the same tables; numbers of rows may differ, and be zero.

        Args:
            what: tells the calls of one step apart.
            asked: a table's name and ids, [n] or of a bag [n, width].
            tables: those that this rank owns.
            anchor: [0], requires grad: without a table, a rank would not know that gradients must be sent.
        """
        lookup = self._plan(what, asked)
        mine = lookup.of(self.rank)
        ids = self._share_ids(asked, lookup)
        rows = [tables[asked[i][0]](ids[i]) for i in mine]
        found: Any = _Exchange.apply(self, lookup, asked[0][1].device, anchor, *rows)
        return list(found)

    def _plan(self, what: str, asked: Sequence[tuple[str, Tensor]]) -> _Lookup:
        own = [len(ids) for _, ids in asked]
        counts = [own] * self.ranks
        if self.ranks > 1 and not self.local:
            told = torch.tensor(own, device=asked[0][1].device)
            heard = told.new_empty(self.ranks * len(own))
            # PyTorch 2.13 renamed it.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(heard, told, group=self.group)
            counts = heard.view(self.ranks, -1).tolist()
        step = self.draws.get(what, 0)
        self.draws[what] = step + torch.is_grad_enabled()
        if not self.local:
            self.asked[what] = tuple(
                Request(name, tuple(row[i] for row in counts), ids.shape[1:].numel())
                for i, (name, ids) in enumerate(asked)
            )
        return _Lookup(
            tuple(self.owners[name] for name, _ in asked),
            tuple(map(tuple, counts)),
            tuple((self._key(what, i, name, "rows", step), self._key(what, i, name, "grad", step))
                  for i, (name, _) in enumerate(asked)),
        )  # fmt: skip

    def _key(self, what: str, request: int, table: str, operand: str, step: int) -> int | Tensor:
        return call_key(stream_key(self.seed, f"{what}.{request}.{table}", "exchange", operand), step)

    def _share_ids(self, asked: Sequence[tuple[str, Tensor]], lookup: _Lookup) -> dict[int, Tensor]:
        """Return the ids of all ranks, in their order, of each request that this rank owns."""
        per_row = [ids.shape[1:].numel() for _, ids in asked]
        none = asked[0][1].new_empty(0)
        send = [torch.cat([none, *(asked[i][1].reshape(-1) for i in lookup.of(r))]) for r in self._every()]
        mine = lookup.of(self.rank)
        sizes = [[lookup.counts[r][i] * per_row[i] for i in mine] for r in self._every()]
        received = self._all_to_all(torch.cat(send), [len(part) for part in send], [sum(row) for row in sizes])
        parts = received.split([size for row in sizes for size in row])
        found = {}
        for place, i in enumerate(mine):
            own = torch.cat([parts[r * len(mine) + place] for r in self._every()])
            found[i] = own.view(-1, *asked[i][1].shape[1:])
        return found

    def _to_askers(self, payloads: Sequence[Tensor], lookup: _Lookup, none: Tensor) -> list[Tensor]:
        """Bytes of all ranks' rows of each owned request -> bytes of this rank's rows of every request."""
        mine = lookup.of(self.rank)
        parts = [p.split([lookup.counts[r][i] for r in self._every()]) for i, p in zip(mine, payloads, strict=True)]
        send = [part[r] for r in self._every() for part in parts]
        received = self._all_to_all(
            torch.cat([none, *send]),
            [lookup.rows(r, self.rank) for r in self._every()],
            [lookup.rows(self.rank, r) for r in self._every()],
            self.forward.sent_as,
        )
        order = [i for r in self._every() for i in lookup.of(r)]
        found = dict(zip(order, received.split([lookup.counts[self.rank][i] for i in order]), strict=True))
        return [found[i] for i in range(len(order))]

    def _to_owners(self, payloads: Sequence[Tensor], lookup: _Lookup) -> list[Tensor]:
        """Bytes of this rank's rows of every request -> bytes of all ranks' rows of each owned request."""
        order = [i for r in self._every() for i in lookup.of(r)]
        received = self._all_to_all(
            torch.cat([payloads[i] for i in order]),
            [lookup.rows(self.rank, r) for r in self._every()],
            [lookup.rows(r, self.rank) for r in self._every()],
            self.backward.sent_as,
        )
        mine = lookup.of(self.rank)
        parts = received.split([lookup.counts[r][i] for r in self._every() for i in mine])
        return [torch.cat([parts[r * len(mine) + place] for r in self._every()]) for place in range(len(mine))]

    def _all_to_all(
        self, send: Tensor, splits: list[int], receives: list[int], sent_as: torch.dtype | None = None
    ) -> Tensor:
        """Send rows of ``send`` to each rank; in its own dtype, or as ``sent_as``, which its bytes are of."""
        if self.ranks == 1:
            return send
        received = send.new_empty(sum(receives), *send.shape[1:])
        send = send.contiguous()
        if self.local:
            self._answer(received, send.split(splits)[self.rank], receives)
            return received
        given, taken = (send, received) if sent_as is None else (send.view(sent_as), received.view(sent_as))
        dist.all_to_all_single(taken, given, receives, splits, group=self.group)
        return received

    def _answer(self, received: Tensor, own: Tensor, receives: list[int]) -> None:
        """Write what this rank sends itself in the place of what each would send, over and over where it is less."""
        for part in received.split(receives):
            for piece in part.split(max(len(own), 1)):
                piece.copy_(own[: len(piece)]) if len(own) else piece.zero_()

    def _every(self) -> range:
        return range(self.ranks)


class _Exchange(torch.autograd.Function):
    """Rows of all ranks at their owners -> rows of this rank, of every request; gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, exchange: EmbeddingExchange, lookup: _Lookup, device: torch.device, anchor: Tensor, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.lookup = exchange, lookup
        wire, width = exchange.forward, exchange.width
        sent = [wire.pack(x, lookup.keys[i][0]) for i, x in zip(lookup.of(exchange.rank), rows, strict=True)]
        none = torch.empty(0, wire.row_bytes(width), dtype=torch.uint8, device=device)
        return tuple(wire.unpack(payload, width) for payload in exchange._to_askers(sent, lookup, none))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        exchange, lookup, wire, width = ctx.exchange, ctx.lookup, ctx.exchange.backward, ctx.exchange.width
        payloads = []
        for i, grad in enumerate(grads):
            counts = [counts[i] for counts in lookup.counts]
            first = list(accumulate(counts, initial=0))[exchange.rank]
            shard = Shard((lookup.total(i), width), (first, 0))
            payloads.append(wire.pack(grad / exchange.ranks, lookup.keys[i][1], shard))
        received = exchange._to_owners(payloads, lookup)
        return None, None, None, None, *(wire.unpack(payload, width) for payload in received)


class ShardedSparseArch(SparseArch):
    """A :class:`SparseArch` whose tables lie on several ranks; this one's are in ``tables`` and ``bags``."""

    exchange: EmbeddingExchange
    anchor: Tensor

    @classmethod
    def of(cls, sparse: SparseArch, exchange: EmbeddingExchange) -> ShardedSparseArch:
        """Take over ``sparse``, letting go of the tables that other ranks own."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.features, made.numeric = sparse.features, sparse.numeric
        made.exchange = exchange
        # No parameter: nothing to train, save or send.
        made.anchor = torch.zeros(0, requires_grad=True)
        for kind in _KINDS:
            every: Any = getattr(sparse, kind)
            own = {name: table for name, table in every.items() if exchange.owners[f"{kind}.{name}"] == exchange.rank}
            setattr(made, kind, nn.ModuleDict(own))
        return made

    def exchange_state(self) -> dict[str, int]:
        """What random bits follow from, for :func:`narrowgate.recipes.recipe_state`: lookups so far.

        All of them, also those that were none yet: ``torch.distributed.checkpoint`` loads only what a model has.
        """
        return {what: self.exchange.draws.get(what, 0) for what in LOOKUPS}

    def load_exchange_state(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`exchange_state` returned."""
        self.exchange.draws = {what: int(count) for what, count in state.items()}

    def look_up(self, what: str, asked: Sequence[tuple[str, str, Tensor]]) -> list[Tensor]:
        """As :meth:`SparseArch.look_up`, from whichever ranks own the tables."""
        owned = {f"{kind}.{name}": table for kind in _KINDS for name, table in getattr(self, kind).items()}
        named = [(f"{kind}.{name}", ids) for kind, name, ids in asked]
        found: Any = self.exchange.look_up(what, named, owned, self.anchor)
        return found


def shard_tables(
    model: nn.Module,
    *,
    forward: Spec | str = "fp8_e4m3/row",
    backward: Spec | str = "bf16",
    group: ProcessGroup | None = None,
    seed: int = 0,
) -> EmbeddingExchange:
    """Leave each embedding table of ``model`` on one rank only, and exchange rows in low precision; in place.

    Call it on every rank, on equal models, before ``fully_shard`` and before the optimizer is built. Parameters keep
    their names: a rank's ``state_dict()`` holds its own tables, and all ranks' together what the model held before. DDP
    leaves tables alone afterwards; FSDP2 does where they are its ``ignored_params`` (:func:`own_tables`). Events'
    positions stay on every rank.

    Args:
        model: with one :class:`SparseArch`, built under the same seed on every rank, or to be loaded alike.
        forward: format of rows on their way: ``fp32``, ``bf16``, or FP8 with ``/row``.
        backward: of their gradients; ``fp8_e5m2/row+sr`` rounds stochastically.
        group: the ranks; None for the default group, or for this process alone, which then computes what ranks would.
        seed: of stochastic rounding, the same on every rank.

    Returns:
        What exchanges; its ``owners`` say which rank has which table.

    Raises:
        NarrowgateError: a format that cannot travel, a model without tables, or with tables that are sharded already.
    """
    where, sparse = _sparse_of(model)
    if isinstance(sparse, ShardedSparseArch):
        raise NarrowgateError("this model's embedding tables are sharded already, expected whole ones")
    tables = exchanged_tables(model)
    ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    exchange = EmbeddingExchange(
        place_tables(tables.sizes, ranks), tables.width, forward=forward, backward=backward, group=group, seed=seed
    )
    parent, _, last = where.rpartition(".")
    setattr(model.get_submodule(parent), last, ShardedSparseArch.of(sparse, exchange))
    own = [f"{where}.{name}.weight" for name, owner in exchange.owners.items() if owner == exchange.rank]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return exchange


def own_tables(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of the tables that this rank has of a model whose tables are sharded."""
    return [p for kind in _KINDS for p in getattr(_sparse_of(model)[1], kind).parameters()]


def absent_tables(model: nn.Module) -> list[str]:
    """Return the names of the parameters that other ranks have of a model whose tables are sharded."""
    where, sparse = _sparse_of(model)
    assert isinstance(sparse, ShardedSparseArch)
    owners = sparse.exchange.owners
    return [f"{where}.{name}.weight" for name, owner in owners.items() if owner != sparse.exchange.rank]


def exchanged_tables(model: nn.Module, run: Callable[[], Any] | None = None) -> Exchanged:
    """Return the tables that :func:`shard_tables` would shard, and what a step asks of them.

    Args:
        model: with one :class:`SparseArch`, whole, on any device.
        run: runs the model on a batch of one rank; every rank is then taken to ask for as much. None: no lookups.

    Raises:
        NarrowgateError: a model without tables that can be exchanged.
    """
    where, sparse = _sparse_of(model)
    tables: dict[str, Any] = {
        f"{kind}.{name}": table for kind in _KINDS for name, table in getattr(sparse, kind).items()
    }
    widths = {table.weight.shape[1] for table in tables.values()}
    if len(widths) != 1:
        raise NarrowgateError(
            f"found embedding tables of the widths {sorted(widths)} in this {type(model).__name__}, expected tables of"
            " one width to exchange rows of"
        )
    return Exchanged(
        sizes={name: table.weight.numel() for name, table in tables.items()},
        width=widths.pop(),
        modules=tuple(f"{where}.{name}" for name in tables),
        lookups=() if run is None else _lookups(sparse, run),
    )


def _sparse_of(model: nn.Module) -> tuple[str, SparseArch]:
    """(name, module) of the tables of ``model``."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, SparseArch)]
    if len(found) != 1 or not found[0][0]:
        raise NarrowgateError(
            f"found {len(found) or 'no'} SparseArch in this {type(model).__name__}, expected a model with one, such as"
            " the built-in ones, whose embedding tables ranks can exchange rows of"
        )
    return found[0]


def _lookups(sparse: SparseArch, run: Callable[[], Any]) -> tuple[tuple[Request, ...], ...]:
    """Return what ``run`` asks of whole tables, as it would of sharded ones."""
    noted: list[tuple[Request, ...]] = []
    look_up, whole = sparse.look_up, sparse.whole

    def note(what: str, asked: Sequence[tuple[str, str, Tensor]]) -> list[Tensor]:
        noted.append(tuple(Request(f"{k}.{name}", (len(ids),), ids.shape[1:].numel()) for k, name, ids in asked))
        return look_up(what, asked)

    sparse.whole, sparse.look_up = False, note  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            run()
    finally:
        sparse.whole = whole
        del sparse.look_up
    return tuple(noted)
