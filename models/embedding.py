"""Sparse features and events as tokens. Embeddings stay in FP32: no recipe lowers them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .batch import Batch
from .config import GemConfig
from .features import FeatureSpec
from .functional import linear
from .small_tables import is_small, products_pay, sum_of_rows

#: The look-ups of a step, by what they are for.
LOOKUPS = ("features", "events")


def init_table(weight: Tensor) -> None:
    """Initialize an embedding table ``[rows, d]`` as DLRM does: the rarer its rows are read, the smaller they start."""
    bound = weight.shape[0] ** -0.5
    nn.init.uniform_(weight, -bound, bound)


class SparseArch(nn.Module):
    """Embedding tables, shared by name, and the feature tokens of a row."""

    #: Whether all tables lie here as a whole, so that :meth:`look_up` may be gone around; the constructor says so.
    whole: bool = False

    def __init__(self, config: GemConfig, features: FeatureSpec) -> None:
        super().__init__()
        d = config.d
        self.features = features
        tables = {name: nn.Embedding(rows, d) for name, rows in features.tables().items()}
        bags = {field.name: nn.EmbeddingBag(field.rows, d, mode="sum", padding_idx=0) for field in features.bags}
        for table in (*tables.values(), *bags.values()):
            init_table(table.weight)
        for bag in bags.values():
            nn.init.zeros_(bag.weight[0].detach())
        self.tables = nn.ModuleDict(tables)
        self.bags = nn.ModuleDict(bags)
        self.numeric = linear(len(features.numeric), d, config) if features.numeric else None
        self.whole = True

    def forward(self, batch: Batch) -> Tensor:
        """Return the feature tokens [B, n_tokens, d], FP32."""
        asked = [("tables", field.table, batch.sparse[:, i]) for i, field in enumerate(self.features.categorical)]
        asked += [("bags", field.name, ids) for field, ids in zip(self.features.bags, batch.bags, strict=True)]
        tokens = self.look_up(LOOKUPS[0], asked)
        if self.numeric is not None:
            tokens.append(self.numeric(batch.dense).float())
        return torch.stack(tokens, 1)

    def events(
        self,
        ids: Tensor,
        position: tuple[nn.Embedding, Tensor],
        dtype: torch.dtype | None = None,
        *,
        products: bool | None = None,
    ) -> Tensor:
        """Return the sum of an event's field embeddings and its position's: [T, d], added up in FP32.

        Args:
            ids: [T, event fields].
            position: the table of positions, and ids [T].
            dtype: of the result; None for the tables'.
            products: whether gradients of small tables are products (:mod:`narrowgate.models.small_tables`); None for
                wherever that is faster.
        """
        products = products_pay(ids) if products is None else products
        asked, small = [], []
        for i, field in enumerate(self.features.events):
            table = self.tables[field.table] if self.whole and products else None
            if isinstance(table, nn.Embedding) and is_small(table):
                small.append((table, ids[:, i]))
            else:
                asked.append(("tables", field.table, ids[:, i]))
        rows = self.look_up(LOOKUPS[1], asked)
        if products and is_small(position[0]):
            small.append(position)
        else:
            rows.append(position[0](position[1]))
        return sum_of_rows(rows, small, dtype)

    def look_up(self, what: str, asked: Sequence[tuple[str, str, Tensor]]) -> list[Tensor]:
        """Return the rows [n, d] of each of ``asked``, all at once.

        Args:
            what: tells the calls of one step apart.
            asked: ``tables`` or ``bags``, the name in there, and ids: [n], or of a bag [n, width].
        """
        return [(self.tables if kind == "tables" else self.bags)[name](ids) for kind, name, ids in asked]


class EventEncoder(nn.Module):
    """Events of a history as tokens: what, which action, how long ago (log2), and how many events back."""

    def __init__(self, config: GemConfig) -> None:
        super().__init__()
        self.position = nn.Embedding(config.max_events + 1, config.d)
        init_table(self.position.weight)

    def forward(
        self, batch: Batch, sparse: SparseArch, dtype: torch.dtype | None = None, *, products: bool | None = None
    ) -> Tensor:
        """Return [T, d]; dead tokens are arbitrary. Options are those of :meth:`SparseArch.events`."""
        # One more end for the row of dead tokens.
        ends = torch.cat([batch.offsets[1:], batch.offsets[-1:]])
        back = ends[batch.event_rows] - torch.arange(batch.event_rows.shape[0], device=ends.device)
        position = (self.position, back.clamp(0, self.position.num_embeddings - 1))
        return sparse.events(batch.events, position, dtype, products=products)
