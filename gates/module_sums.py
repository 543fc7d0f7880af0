"""Sums over modules: what a step's calls of all of them take together, and which of them own a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .measurements import ModuleRegion, ModuleRun, Quartet

#: A module is named where it holds at least this share of what is lost, and at most so many are.
_OWNS, _MOST_NAMED = 0.25, 2


def total_log_ratios(modules: Sequence[ModuleRun]) -> NDArray[np.float64]:
    """Return the log speedup of a step's calls of all modules, [quartets]: quartet i of all modules together."""
    count = min(len(module.quartets) for module in modules)
    sums = [
        np.sum([module.calls * block_means(module.quartets[:count], arm) for module in modules], axis=0)
        for arm in ("baseline_ms", "candidate_ms")
    ]
    return np.log(sums[0]) - np.log(sums[1])


def block_means(quartets: Sequence[Quartet], arm: str) -> NDArray[np.float64]:
    """Return the geometric mean of an arm's two blocks, [quartets] milliseconds."""
    return np.exp(np.log([getattr(quartet, arm) for quartet in quartets]).mean(axis=1))


def owners_of_loss(modules: Sequence[ModuleRun], threshold: float) -> str | None:
    """Name the modules that own most of what lacks to ``threshold``, as a sentence's end; None where none does."""
    lacks: dict[int, float] = {}
    times: list[tuple[float, float]] = []
    for i, module in enumerate(modules):
        before, after = (float(block_means(module.quartets, arm).mean()) for arm in ("baseline_ms", "candidate_ms"))
        times.append((before, after))
        lacks[i] = module.calls * max(0.0, after - before / threshold)
    whole = math.fsum(lacks.values())
    owners = sorted((i for i in lacks if whole and lacks[i] >= _OWNS * whole), key=lambda i: -lacks[i])
    if not owners:
        return None
    return " and ".join(_told(modules[i], *times[i]) for i in owners[:_MOST_NAMED])


def _told(module: ModuleRun, before: float, after: float) -> str:
    shapes = shapes_of(module)
    calls = f", {module.calls} calls" if module.calls > 1 else ""
    return f"{module.name} ({before:.3f} to {after:.3f} ms at {shapes}{calls})"


def shapes_of(module: ModuleRegion) -> str:
    """Return M, K and N of each of its layers as text."""
    return ", ".join(f"{p.m}x{p.k}x{p.n}" for p in module.products)
