"""What a gate's judge returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .measurements import Record

Status = Literal["pass", "fail", "undecided"]


class Gate(Record):
    """One gate of the report; ``gauc`` is there only where the policy asks for it.

    ``ci_low`` and ``ci_high`` are one-sided bounds; None where there is no interval.
    """

    name: Literal["step_time", "module_time", "ne", "auc", "gauc", "stability", "memory"]
    status: Status
    task: str | None = None
    slice: str | None = None
    metric: str
    measured: float | None
    ci_low: float | None
    ci_high: float | None
    threshold: float
    #: On which side of the threshold the gate passes.
    direction: Literal["below", "above"]
    #: Exact sign-flip p value beside the t interval, for gates over paired seeds.
    sign_flip_p: float | None = None


class Reason(Record):
    """Why a verdict is what it is: a stable code and one sentence; an undecided one says what would decide it."""

    code: str
    text: str
    gate: str | None = None
    task: str | None = None
    #: Since minor 6.
    slice: str | None = None


@dataclass(frozen=True)
class Levels:
    """Levels of the one-sided bounds: that which rejects, and that which accepts (lower within a family)."""

    reject: float
    accept: float


@dataclass(frozen=True)
class Judgement:
    """A gate with the reasons for its status, and the p value of the claim that it passes.

    ``accept_p`` is 0 for a gate without sampling error that passes, None where nothing supports the claim.
    """

    gate: Gate
    reasons: tuple[Reason, ...]
    accept_p: float | None


def percent(value: float, digits: int = 4) -> str:
    """Format a share as a signed percentage for a sentence."""
    return f"{100 * value:+.{digits}f} %"
