"""Which tiles the cast kernels take: candidates, measured on the device, and kept beyond the process.

A tile decides how fast a cast is and never a bit of its codes and scales, so ranks and runs may differ in their
choices; only sums of columns, the gradient of a bias, are added in another order. A choice is looked up by all that its
speed depends on (:class:`Question`), in what the package ships (``choices/*.json``), then in the user's cache
(:mod:`narrowgate.precision.kernels.tile_cache`).
"""

# Triton comes with CUDA builds of PyTorch only.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..errors import NarrowgateError, did_you_mean
from .tile_cache import Choices, Tile, cache_dir, device_name

MODES = ("off", "cached", "on")
AMAX_CANDIDATES: tuple[Tile, ...] = (
    (64, 128, 64, 4), (32, 128, 64, 4), (16, 256, 64, 4), (32, 256, 64, 8), (64, 128, 64, 8), (64, 64, 64, 4),
    (64, 128, 8, 4), (8, 512, 64, 4),
)  # fmt: skip
CAST_CANDIDATES: tuple[Tile, ...] = (
    (32, 128, 1, 4), (64, 128, 1, 4), (64, 128, 1, 8), (64, 64, 1, 4), (32, 64, 1, 4), (128, 64, 1, 8),
    (128, 128, 1, 8), (32, 128, 2, 4), (32, 256, 1, 8),
)  # fmt: skip
HISTORY_CANDIDATES: tuple[Tile, ...] = (
    (32, 128, 4, 4), (32, 128, 1, 4), (32, 128, 16, 4), (64, 128, 2, 8), (64, 128, 4, 8), (64, 64, 4, 4),
    (128, 64, 2, 8), (128, 128, 2, 8),
)  # fmt: skip
#: A block that reaches along columns fixes a tile's columns at 128, one that reaches along rows its rows.
BLOCK_CANDIDATES: tuple[Tile, ...] = (
    (128, 128, 1, 4), (128, 128, 1, 8), (128, 128, 1, 16), (128, 128, 2, 4), (128, 128, 2, 8), (128, 128, 4, 8),
)  # fmt: skip
ROW_BLOCK_CANDIDATES: tuple[Tile, ...] = (
    (16, 128, 1, 4), (32, 128, 1, 4), (64, 128, 1, 4), (64, 128, 1, 8), (32, 128, 4, 4),
)  # fmt: skip
#: How often each candidate takes its turn.
_ROUNDS = 7

_mode: str | None = None


@dataclass(frozen=True)
class Question:
    """What a choice of a tile depends on, on one device; its text is the key under which the choice is kept."""

    #: ``amax`` or ``cast``.
    kernel: str
    program: str
    #: Format expressions of both operands, and how each rounds and is clipped.
    rows: str
    columns: str
    #: Dtypes of the leaves.
    leaves: str
    #: Length of the amax history, and whether it is written; empty without one.
    history: str
    #: Row strides are multiples of 8, and the matrix divides into tiles of 128 x 128.
    layout: str
    #: Rows rounded up to a power of two, so that counts of tokens do not each ask anew, and columns.
    shape: tuple[int, int]
    #: Whether scales are of 128 columns, and of 128 rows.
    blocks: tuple[bool, ...] = (False, False)

    @property
    def key(self) -> str:
        """The question as one line."""
        return " ; ".join(str(part) for part in astuple(self))

    def candidates(self, usual: Tile) -> tuple[Tile, ...]:
        """Return the tiles that may answer it, the ``usual`` one first."""
        if self.kernel == "amax":
            found = AMAX_CANDIDATES
        elif any(self.blocks):
            found = BLOCK_CANDIDATES if self.blocks[1] else BLOCK_CANDIDATES + ROW_BLOCK_CANDIDATES
        else:
            found = HISTORY_CANDIDATES if self.history else CAST_CANDIDATES
        return tuple(dict.fromkeys((usual, *found)))


def autotune(mode: str | None = None) -> str:
    """Say how tiles of cast kernels are chosen from now on, and return the mode before.

    Args:
        mode: ``off``: constants of the package; ``cached``: a choice that is shipped or kept in the user's cache, else
            the constants, and nothing is measured; ``on``: what is not kept is measured at its first launch, which
            takes seconds, and kept. None changes nothing. At first the mode is ``$NARROWGATE_AUTOTUNE``, else
            ``cached``.

    Raises:
        NarrowgateError: no such mode.
    """
    global _mode
    before = _mode
    if before is None:
        before = _checked(os.environ.get("NARROWGATE_AUTOTUNE") or "cached", "NARROWGATE_AUTOTUNE")
    _mode = before if mode is None else _checked(mode, "autotune")
    return before


def _checked(mode: str, where: str) -> str:
    if mode not in MODES:
        raise NarrowgateError(f"{where}: found '{mode}', expected {', '.join(MODES)}{did_you_mean(mode, MODES)}")
    return mode


@lru_cache(maxsize=16)
def _choices(device: str, folder: Path) -> Choices:
    return Choices(device, folder)


def choose(
    device: torch.device,
    questions: Sequence[tuple[Question, Tile]],
    prepare: Callable[[Mapping[str, Tile]], Callable[[], Any]],
) -> tuple[dict[str, Tile], bool]:
    """Answer the questions of one cast.

    Args:
        device: where it runs.
        questions: the kernels that it launches, in their order, each with the tile that it takes unasked.
        prepare: returns what launches the cast with tiles by kernel, into results that nobody reads.

    Returns:
        Tiles by kernel, of those that are known; and whether that is final: it is not where something would be measured
        but for a CUDA graph that is being captured.
    """
    mode = autotune()
    if mode == "off":
        return {}, True
    choices = _choices(device_name(device), cache_dir())
    tiles: dict[str, Tile] = {}
    final = True
    for question, usual in questions:
        candidates = question.candidates(usual)
        found = choices.find(question.key, candidates)
        if found is None and mode == "on":
            if torch.cuda.is_current_stream_capturing():
                final = False
                continue
            makers = {tile: prepare({**tiles, question.kernel: tile}) for tile in candidates}
            try:
                times = measured(makers, device)
            except torch.OutOfMemoryError:
                times = {}
            # Where not even the usual tile runs, the launch itself says why.
            if times:
                found = min(times, key=lambda tile: times[tile])
                choices.keep(question.key, found, times)
        if found is not None:
            tiles[question.kernel] = found
    return tiles, final


def measured(works: Mapping[Tile, Callable[[], Any]], device: torch.device) -> dict[Tile, float]:
    """Median microseconds of each work, in turns, each on a cold L2 cache; those that cannot run are left out."""
    from triton.errors import TritonError

    running = {}
    with torch.cuda.device(device):
        for tile, work in works.items():
            try:
                work()
                torch.cuda.synchronize()
            except (TritonError, RuntimeError):  # too many registers, too much shared memory, no memory for results
                continue
            running[tile] = work
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        flushed = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        events: dict[Tile, list[Any]] = {tile: [] for tile in running}
        for turn in range(_ROUNDS):
            order = list(running)
            for tile in order if turn % 2 == 0 else reversed(order):
                # So long that the host has launched what follows before the device is done.
                for _ in range(6):
                    flushed.zero_()
                pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                pair[0].record()
                running[tile]()
                pair[1].record()
                events[tile].append(pair)
        torch.cuda.synchronize()
    return {
        tile: statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3 for tile, pairs in events.items()
    }
