"""What was watched in a training, summed up: losses, gradients, and what the formats did to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from .measurements import Operand, Stability
from .policy import StabilityLimits

if TYPE_CHECKING:
    from ..precision.observer import OperandNumerics

Floats = NDArray[np.float64]

#: Operands that a report lists for each seed: those that saturate most, underflow most, and are noisiest.
_LISTED = (5, 5, 3)
#: Fewer observed steps do not tell a path that is cut from one that is idle.
_STEPS_TO_TELL = 3


@dataclass(frozen=True)
class Observed:
    """What was seen of tensors in the observed steps of one training."""

    steps: int = 0
    operands: tuple[OperandNumerics, ...] = ()
    #: Why operands were not counted, where they were not.
    not_counted: str | None = None
    #: Parameters whose gradient was absent or zero in every observed step.
    without_gradient: tuple[str, ...] = ()


NOT_OBSERVED = Observed(not_counted="nobody watched")


def stability(losses: Floats, norms: Floats, limits: StabilityLimits, observed: Observed = NOT_OBSERVED) -> Stability:
    """Count what went wrong in a training, from the loss and gradient norm of every step [steps].

    A step spikes where its loss exceeds ``spike_factor`` times the median of the ``spike_window`` steps before it;
    steps with a median that is not positive cannot.
    """
    bad_loss, bad_norm = ~np.isfinite(losses), ~np.isfinite(norms)
    bad = np.flatnonzero(bad_loss | bad_norm)
    window = limits.spike_window
    spikes = np.zeros(0, dtype=int)
    if len(losses) > window:
        before = np.median(sliding_window_view(losses, window)[:-1], axis=1)
        with np.errstate(invalid="ignore"):
            spikes = window + np.flatnonzero((before > 0) & (losses[window:] > limits.spike_factor * before))
    finite = norms[~bad_norm]
    return Stability(
        steps=len(losses),
        non_finite_losses=int(bad_loss.sum()),
        non_finite_gradients=int(bad_norm.sum()),
        first_non_finite=int(bad[0]) + 1 if bad.size else None,
        spikes=len(spikes),
        first_spike=int(spikes[0]) + 1 if spikes.size else None,
        max_gradient_norm=float(finite.max()) if finite.size else None,
        **_tensors(observed),
    )


def lost_gradients(baseline: Stability, candidate: Stability) -> list[str]:
    """Return the parameters that the baseline trains and the candidate does not."""
    if min(baseline.observed_steps, candidate.observed_steps) < _STEPS_TO_TELL:
        return []
    return sorted(set(candidate.without_gradient) - set(baseline.without_gradient))


def name(operand: Operand | OperandNumerics) -> str:
    """Return how a sentence calls an operand."""
    return f"{operand.operand} of {operand.layer or 'the layer'} in {operand.path} ({operand.format})"


def numerics_lines(runs: Sequence[Stability], limit: int = 5) -> list[str]:
    """Return lines of text on what tensors lost in the trainings ``runs`` of a candidate: the worst operands."""
    if all(run.saturation is None for run in runs):
        why = sorted({run.not_observed for run in runs if run.not_observed})
        told = f" ({'; '.join(why)})" if why else ""
        return [f"saturation and underflow: not counted{told}, so the stability gate does not judge them"]
    operands = _worst([operand for run in runs for operand in run.worst])
    steps = max(run.observed_steps for run in runs)
    counted = f"{steps} step{'s' * (steps != 1)} a seed"
    if not operands:
        return [f"saturation and underflow: watched for in {counted}, in which no operand was quantized"]
    lines = [f"saturation and underflow: counted in {counted}; the worst operands, each at its worst step:"]
    return lines + [_line(operand) for operand in operands[:limit]]


def _line(o: Operand) -> str:
    noise = "no loss" if o.sqnr_db is None else f"SQNR {o.sqnr_db:.1f} dB"
    shares = (("saturated", o.worst_saturated), ("underflowed", o.worst_underflowed), ("clipped", o.worst_clipped))
    return f"{name(o)}: {', '.join(f'{100 * share:.2f} % {what}' for what, share in shares)}, {noise}"


def _tensors(observed: Observed) -> dict[str, Any]:
    found: dict[str, Any] = {
        "observed_steps": observed.steps,
        "not_observed": observed.not_counted,
        "without_gradient": observed.without_gradient,
    }
    if observed.not_counted is None and observed.steps:
        ranked = [Operand(**asdict(operand)) for operand in observed.operands]
        found |= {
            "saturation": max((o.worst_saturated for o in ranked), default=0.0),
            "underflow": max((o.worst_underflowed for o in ranked), default=0.0),
            "clipped": max((o.worst_clipped for o in ranked), default=0.0),
            "worst": _worst(ranked),
        }
    return found


def _worst(operands: list[Operand]) -> tuple[Operand, ...]:
    noise = [float("inf") if o.sqnr_db is None else o.sqnr_db for o in operands]
    orders = (
        sorted((o for o in operands if o.worst_saturated > 0), key=lambda o: -o.worst_saturated),
        sorted((o for o in operands if o.worst_underflowed > 0), key=lambda o: -o.worst_underflowed),
        [operands[i] for i in sorted(range(len(operands)), key=lambda i: noise[i])],
    )
    picked: dict[tuple[str, str, str], Operand] = {}
    for order, count in zip(orders, _LISTED, strict=True):
        for operand in order[:count]:
            picked.setdefault((operand.layer, operand.path, operand.operand), operand)
    return tuple(sorted(picked.values(), key=lambda o: -max(o.worst_saturated, o.worst_underflowed)))
