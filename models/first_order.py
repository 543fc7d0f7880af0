"""What a row's log odds have of each of its ids and numbers by itself: a logistic regression beside the network.

The wide part of Wide & Deep (arXiv:1606.07792), DeepFM's first-order term (arXiv:1703.04247): that one user likes most
things and another few is one weight an id, learned at a rate of its own and shrunk.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batch import Batch
from .features import FeatureSpec


class FirstOrder(nn.Module):
    """Log odds that are linear in ids, in values of bags, in numbers, and in the mean of the history's event fields.

    All weights start at zero. They are FP32, lie in one table, and no recipe lowers them. Terms are FP32 also where
    FSDP2 hands out weights and numbers in BF16.
    """

    def __init__(self, features: FeatureSpec) -> None:
        super().__init__()
        fields = (*features.categorical, *features.bags, *features.events)
        first = [0, *itertools.accumulate(field.rows for field in fields)]
        tasks = len(features.tasks)
        #: [rows of all fields, tasks].
        self.weight = nn.Parameter(torch.zeros(first[-1], tasks))
        #: [numbers, tasks]; None where there are none: FSDP2 shards no empty parameter.
        self.numeric = nn.Parameter(torch.zeros(len(features.numeric), tasks)) if features.numeric else None
        counts = (len(features.categorical), len(features.bags), len(features.events))
        #: Where each field's rows begin: of ids, of bags, of event fields.
        self._ids, self._bags, self._events = (
            first[end - count : end] for end, count in zip(itertools.accumulate(counts), counts, strict=True)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return [B, tasks], FP32; a row without events has no part of a history."""
        rows, weight = batch.dense.shape[0], self.weight.float()
        found = torch.zeros(rows, weight.shape[1], dtype=torch.float32, device=batch.dense.device)
        if self.numeric is not None:
            # Not a matrix product, which autocast would round.
            found = (batch.dense.float().unsqueeze(-1) * self.numeric.float()).sum(1)
        for column, first in enumerate(self._ids):
            found = found + F.embedding(batch.sparse[:, column] + first, weight)
        for ids, first in zip(batch.bags, self._bags, strict=True):
            found = found + (F.embedding(ids + first, weight) * (ids != 0).unsqueeze(-1)).sum(1)
        for i, first in enumerate(self._events):
            # Sums in order: the same bits each time. What lies behind the last row is a bag of its own, dead tokens.
            found = found + F.embedding_bag(batch.events[:, i] + first, weight, batch.offsets, mode="mean")[:rows]
        return found


def first_order_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a model's first-order part, if it has one."""
    return [p for module in model.modules() if isinstance(module, FirstOrder) for p in module.parameters()]
