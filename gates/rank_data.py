"""Which batches a rank trains on and predicts, and how all ranks' predictions become those of one process.

A task that can be split (``for_rank(rank, ranks)``) gives every rank its rows of each batch, so ranks together train on
the batches of one process. Any other task's batches are dealt out in turn: as many batches as there are ranks make up
one step, and a seed has fewer steps. Either way both arms see the same, and predictions come back in the task's order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..precision.errors import NarrowgateError
from .checked_task import CheckedTask
from .task import Task, check_task

T = TypeVar("T")


@dataclass(frozen=True)
class RankTask:
    """One rank's view of a task."""

    #: Whose model, loss and, where it was split, batches are the rank's.
    task: Task
    rank: int
    ranks: int
    #: Whether every batch is the rank's own part of one.
    split: bool

    @classmethod
    def of(cls, task: Task, rank: int, ranks: int) -> RankTask:
        """Return the view of ``rank``.

        Raises:
            NarrowgateError: the task cannot be split among so many ranks, or gave back no task.
        """
        method = getattr(task, "for_rank", None)
        if method is None:
            return cls(task, rank, ranks, split=False)
        own = CheckedTask(check_task(method(rank, ranks), f"for_rank({rank}, {ranks})"))
        return cls(own, rank, ranks, split=True)

    def train_batches(self, seed: int) -> Iterable[Any]:
        """Return the rank's batches of a seed, as many as every rank has."""
        source = self.task.train_batches(seed)
        return source if self.split else dealt(source, self.rank, self.ranks)

    def steps(self, batches: int | None) -> int | None:
        """Return the steps that so many batches of the task make."""
        return batches if self.split or batches is None else batches // self.ranks

    def eval_batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield the rank's held-out batches, as many as every rank has, and whether each counts.

        A sharded model runs on all ranks or on none, so a rank that is out of batches repeats one.

        Raises:
            NarrowgateError: there are none.
        """
        source = iter(self.task.eval_batches())
        if self.split:
            yield from ((batch, True) for batch in source)
            return
        spare: Any = None
        while group := list(itertools.islice(source, self.ranks)):
            spare = group[0]
            own = self.rank < len(group)
            yield (group[self.rank] if own else spare), own
        if spare is None:
            raise NarrowgateError("eval_batches() yielded no batch")


def dealt(batches: Iterable[T], rank: int, ranks: int) -> Iterator[T]:
    """Yield every ``ranks``-th batch from ``rank`` on, without a last round that is not whole.

    Raises:
        NarrowgateError: there are fewer batches than ranks, so that nobody would train.
    """
    source, rounds = iter(batches), 0
    while len(group := list(itertools.islice(source, ranks))) == ranks:
        rounds += 1
        yield group[rank]
    if group and not rounds:
        raise NarrowgateError(
            f"train_batches() yielded {len(group)} batch{'es' * (len(group) > 1)}, expected at least one for each of "
            f"{ranks} ranks (or a task with for_rank, which splits every batch)"
        )


def in_order(parts: Sequence[Sequence[T | None]]) -> list[T]:
    """Return what all ranks have, round by round and by rank within a round; what is None does not count.

    Args:
        parts: by rank, as many each.
    """
    return [part for round_ in zip(*parts, strict=True) for part in round_ if part is not None]
