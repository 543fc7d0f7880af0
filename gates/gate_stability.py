"""Judge of ``stability``: what was watched in every step of training, and of tensors in some."""

from __future__ import annotations

from collections.abc import Sequence

from . import stability
from .judgement import Gate, Judgement, Reason
from .measurements import Measurements, SeedRun
from .policy import Policy

_KINDS = ("saturation", "underflow")


def judge_stability(m: Measurements, policy: Policy) -> Judgement:
    """Judge training's stability: seeds in which the candidate was unstable, of which none is allowed."""
    events = {seed.seed: _events(seed, policy) for seed in m.seeds}
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


def _events(seed: SeedRun, policy: Policy) -> list[tuple[str, str]]:
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
    first, last = seed.baseline.losses.last, seed.candidate.losses.last
    if first is not None and last is not None and last > limits.divergence_ratio * first:
        text = f"the candidate ended at a training loss of {last:.5f} where the baseline has {first:.5f}"
        found.append(("diverged", text))
    if own.spikes - base.spikes > limits.max_spikes:
        text = (
            f"the candidate's loss spiked at {own.spikes} step{'s' * (own.spikes != 1)}"
            f" (the baseline's at {base.spikes}), first at step {own.first_spike}"
        )
        found.append(("loss_spike", text))
    return found


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
