"""Judge of ``stability``: what was watched in every step of training, and of tensors in some."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from . import stability
from .judgement import Gate, Judgement, Reason
from .measurements import LossSummary, Measurements, SeedRun
from .policy import Policy

_KINDS = ("saturation", "underflow")
#: Fewer seeds say nothing of how far a baseline's ends lie apart.
_SEEDS_TO_SPREAD = 3
#: Of a normal distribution, the standard deviation over the median absolute one.
_MAD_TO_SD = 1.4826


def judge_stability(m: Measurements, policy: Policy) -> Judgement:
    """Judge training's stability: seeds in which the candidate was unstable, of which none is allowed."""
    usual = _usual_end(m.seeds)
    events = {seed.seed: _events(seed, usual, policy) for seed in m.seeds}
    lost = {kind: _past_limit(m.seeds, kind, policy) for kind in _KINDS}
    unstable = {seed for seed, why in events.items() if why} | {seed for past in lost.values() for seed in past}
    gate = Gate(
        name="stability",
        status="fail" if unstable else "pass" if m.seeds else "undecided",
        metric="unstable seeds",
        measured=float(len(unstable)),
        ci_low=None,
        ci_high=None,
        threshold=0.0,
        direction="below",
    )
    # An event is told for each seed, the most telling only; what tensors lose is alike in all seeds and told once.
    told = [(why[0][0], f"In seed {seed} {why[0][1]}.") for seed, why in events.items() if why]
    told += [(kind, _sentence(m.seeds, kind, past, policy)) for kind, past in lost.items() if past]
    if not m.seeds:
        told = [("too_few_seeds", "No seed was trained; run at least one.")]
    reasons = tuple(Reason(code=code, text=text, gate="stability") for code, text in told)
    return Judgement(gate, reasons, 0.0 if gate.status == "pass" else None)


def _events(seed: SeedRun, usual: float | None, policy: Policy) -> list[tuple[str, str]]:
    """Return (code, clause) for what happened to the candidate, the most telling first."""
    limits, own, base = policy.stability, seed.candidate.stability, seed.baseline.stability
    found = []
    if own.first_non_finite is not None:
        what = "loss" if own.non_finite_losses else "gradient"
        found.append(("non_finite", f"the candidate's {what} was not finite at step {own.first_non_finite}"))
    lost = stability.lost_gradients(base, own)
    if lost:
        more = f" and {len(lost) - 1} more parameters" if len(lost) > 1 else ""
        text = f"the candidate's {lost[0]}{more} had no gradient in any observed step where the baseline's had"
        found.append(("no_gradient", text))
    end, last = seed.baseline.losses.last, seed.candidate.losses.last
    if end is not None and last is not None and last > _farthest(seed.baseline.losses, usual, limits.divergence_ratio):
        text = f"the candidate ended at a training loss of {last:.5f} where the baseline has {end:.5f}"
        if usual is not None:
            text += f" (and its seeds no more than {usual:.5f}, but for outliers)"
        found.append(("diverged", text))
    if own.spikes - base.spikes > limits.max_spikes:
        text = (
            f"the candidate's loss spiked at {own.spikes} step{'s' * (own.spikes != 1)}"
            f" (the baseline's at {base.spikes}), first at step {own.first_spike}"
        )
        found.append(("loss_spike", text))
    return found


def _usual_end(seeds: Sequence[SeedRun]) -> float | None:
    """Return the largest end loss that a baseline's own seeds make likely: median and three deviations.

    The deviation is estimated from the median absolute one, which a seed that diverges itself does not move. None with
    fewer than three seeds.
    """
    ends = [seed.baseline.losses.last for seed in seeds if seed.baseline.losses.last is not None]
    if len(ends) < _SEEDS_TO_SPREAD:
        return None
    median = statistics.median(ends)
    return median + 3 * _MAD_TO_SD * statistics.median(abs(end - median) for end in ends)


def _farthest(baseline: LossSummary, usual: float | None, ratio: float) -> float:
    """Return the end loss past which a candidate diverged: beyond a multiple of its baseline's, and beyond ``usual``.

    Losses that are not positive have no multiples: there what the baseline gained stands for them.
    """
    end = baseline.last
    assert end is not None
    gained = 0.0 if baseline.first is None else baseline.first - end
    allowed = end + (ratio - 1) * (end if end > 0 else max(abs(end), gained))
    return allowed if usual is None else max(allowed, usual)


def _limit(kind: str, policy: Policy) -> float:
    return policy.stability.max_saturation if kind == "saturation" else policy.stability.max_underflow


def _past_limit(seeds: Sequence[SeedRun], kind: str, policy: Policy) -> dict[int, float]:
    """Return, by seed, the largest share of any tensor where it is past the limit."""
    shares = {seed.seed: getattr(seed.candidate.stability, kind) for seed in seeds}
    return {seed: share for seed, share in shares.items() if share is not None and share > _limit(kind, policy)}


def _sentence(seeds: Sequence[SeedRun], kind: str, past: dict[int, float], policy: Policy) -> str:
    worst_seed = max(past, key=lambda seed: past[seed])
    own = next(seed.candidate.stability for seed in seeds if seed.seed == worst_seed)
    field = "worst_saturated" if kind == "saturation" else "worst_underflowed"
    # The operand of the largest share is always among those that are listed.
    operands = sorted(own.worst, key=lambda operand: -getattr(operand, field))
    where = "a tensor"
    if operands:
        where = f"the {stability.name(operands[0])} at step {getattr(operands[0], f'{field}_step')}"
    others = len(past) - 1
    told = f"In seed {worst_seed}" + (f" (and {others} other seed{'s' * (others > 1)})" if others else "")
    share, limit = past[worst_seed], _limit(kind, policy)
    return f"{told} {kind} reached {100 * share:.2f} % of {where}; the policy allows {100 * limit:g} %."
