"""Looks at the data that are declared ahead, and the share of the error that each may spend.

Deciding after every few seeds and stopping once it passes accepts a loss at the margin far more often than stated. A
group-sequential plan looks at stated numbers of seeds and spends the level over them; here by the O'Brien-Fleming-like
spending function of Lan and DeMets (1983), which keeps nearly all of it for the last look:

    spent(t) = 2 (1 - Phi(z / sqrt(t))),  z = Phi^-1(1 - alpha / 2),  t = seeds so far / seeds in all.

The boundaries are those of Student's t itself: the normal ones, at the nominal levels of which one commonly takes t
bounds, would spend 5.5 % for 5 % at the few degrees of freedom of seeds. They come from a million simulated runs of a
fixed generator, each a few sums: which of the runs that no earlier look stopped would a bound at this look stop? A
tail's sampling error is then 0.02 % of all runs (``tests/gates/test_looks.py`` measures the outcome with other draws).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

_DRAWS = 1_000_000


def spent(alpha: float, share: float) -> float:
    """Return the error spent once ``share`` of the seeds is in, 0 < share <= 1."""
    return float(2 * special.ndtr(special.ndtri(alpha / 2) / np.sqrt(share)))


@lru_cache(maxsize=256)
def look_levels(looks: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    """Return the nominal one-sided level of a t bound at each look.

    Args:
        looks: numbers of seeds, increasing.
        alpha: level over all looks together.
    """
    assert list(looks) == sorted(set(looks)), looks
    if len(looks) == 1:
        return (alpha,)
    before, running, levels = 0.0, None, []
    for statistic, look in zip(_t_statistics(looks), looks, strict=True):
        total = spent(alpha, look / looks[-1])
        alive = statistic if running is None else statistic[running]
        # The bound that so many of the runs still going reach as is to be spent here.
        count = max(round((total - before) * _DRAWS), 1)
        bound = float(np.partition(alive, -count)[-count])
        levels.append(total if running is None else float(special.stdtr(look - 1, -bound)))
        stopped = statistic >= bound
        running = ~stopped if running is None else running & ~stopped
        before = total
    return tuple(levels)


@lru_cache(maxsize=4)
def _t_statistics(looks: tuple[int, ...]) -> tuple[NDArray[np.float64], ...]:
    """Return the t statistics [draws] of simulated runs at each look, from standard normal differences."""
    rng = np.random.default_rng(0)
    total, squares, before, found = np.zeros(_DRAWS), np.zeros(_DRAWS), 0, []
    for look in looks:
        more = look - before
        # Of new seeds only their sum and their sum of squares matter: a normal, and a chi-square about its mean.
        sums = rng.standard_normal(_DRAWS) * np.sqrt(more)
        squares += sums**2 / more
        if more > 1:
            squares += rng.chisquare(more - 1, _DRAWS)
        total += sums
        variance = (squares - total**2 / look) / (look - 1)
        found.append(total / np.sqrt(look * variance))
        before = look
    return tuple(found)


def level_at(looks: Sequence[int], seeds: int, alpha: float) -> float:
    """Return the nominal level of the look after ``seeds`` seeds; ``alpha`` itself where no looks were declared."""
    if not looks:
        return alpha
    return look_levels(tuple(looks), alpha)[list(looks).index(seeds)]


def overall_p(looks: Sequence[int], seeds: int, p: float) -> float:
    """Return the p value over all looks of a claim whose nominal p value at the look after ``seeds`` seeds is ``p``.

    It is the smallest ``alpha`` at which that look's level reaches ``p``.
    """
    if not looks or not 0 < p < 0.5:
        return p
    index, low, high = list(looks).index(seeds), 1e-12, 0.499

    def excess(log_alpha: float) -> float:
        return look_levels(tuple(looks), float(np.exp(log_alpha)))[index] - p

    if excess(np.log(high)) <= 0:
        return 1.0
    if excess(np.log(low)) >= 0:
        return low
    return float(np.exp(_root(excess, np.log(low), np.log(high))))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    found: Any = optimize.brentq(function, low, high, xtol=1e-6)
    return float(found)


def planned(looks: Sequence[int], seeds: int) -> tuple[int, ...]:
    """Return the looks of a run of ``seeds`` seeds: the declared ones below, and the last; () where there is one."""
    below = tuple(look for look in looks if look < seeds)
    return (*below, seeds) if below else ()
