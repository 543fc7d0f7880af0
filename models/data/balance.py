"""Base Batch Shuffling: batches of nearly equal token counts out of rows of very different lengths.

As Meta describes it for GEM ("GEM Training", engineering.fb.com, 2026-08-03): readers cut shuffled rows into small
sub-batches, sort those by their total sequence length and put heavy ones beside light ones, so that every large batch
carries about the same. Rows stay with their sub-batch, no rank talks to another, and every row is still shown once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...precision.errors import NarrowgateError

if TYPE_CHECKING:
    from .rows import Ints


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How training rows are dealt into batches.

    Raises:
        NarrowgateError: a value out of range.
    """

    #: Rows that stay together.
    sub_batch: int = 128
    #: Batches that are dealt from one pool.
    pool: int = 8

    def __post_init__(self) -> None:
        for name in ("sub_batch", "pool"):
            if getattr(self, name) < 1:
                raise NarrowgateError(f"balance field '{name}' must be at least 1, found {getattr(self, name)}")

    def check(self, batch_size: int) -> None:
        """Raise unless batches of ``batch_size`` rows are made of whole sub-batches.

        Raises:
            NarrowgateError: they are not.
        """
        if batch_size % self.sub_batch:
            raise NarrowgateError(
                f"balance field 'sub_batch' must divide the batch of {batch_size} rows, found {self.sub_batch}"
            )


def deal(rows: Ints, lengths: Ints, batch_size: int, sub_batch: int) -> Ints:
    """Reorder a pool of rows so that its consecutive batches have nearly equal token counts, and their halves too.

    A batch that several ranks share by consecutive rows is then even for 2, 4, 8 ... of them as well.

    Args:
        rows: [n], shuffled; n is a multiple of ``batch_size``, and that of ``sub_batch``.
        lengths: [n] tokens of each.
        batch_size: rows of a batch.
        sub_batch: rows that stay together.

    Returns:
        [n], the same rows.
    """
    batches = len(rows) // batch_size
    assert len(rows) == batches * batch_size, "a pool is made of whole batches"
    parts, weights = rows.reshape(-1, sub_batch), lengths.reshape(-1, sub_batch).sum(1)
    room = len(parts) // batches
    # Heaviest first, each to the batch that carries least among those with room: light ones end up beside heavy ones.
    load, taken = [0] * batches, [[] for _ in range(batches)]
    for part in weights.argsort(kind="stable")[::-1].tolist():
        to = min((b for b in range(batches) if len(taken[b]) < room), key=load.__getitem__)
        taken[to].append(part)
        load[to] += int(weights[part])
    return parts[[_even_halves(each) for each in taken]].reshape(-1)


def _even_halves(heaviest_first: list[int]) -> list[int]:
    """Reorder parts so that both halves weigh alike, and halves of those, and so on: A B B A B A A B, by Thue-Morse."""
    if len(heaviest_first) < 2:
        return heaviest_first
    halves: tuple[list[int], list[int]] = [], []
    for place, part in enumerate(heaviest_first):
        halves[place.bit_count() % 2].append(part)
    return _even_halves(halves[0]) + _even_halves(halves[1])
