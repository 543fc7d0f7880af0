"""How a run's own time was spent, by what it did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .measurements import ArmRun, Measurements


@dataclass(frozen=True)
class Marks:
    """Seconds on one clock at which the parts of a run ended, in their order."""

    started: float
    opened: float
    trained: float
    #: Equal to ``trained`` where quality was not attributed.
    attributed: float
    timed: float


def wall_seconds(marks: Marks, recipes: Sequence[Measurements], compiled: bool) -> dict[str, float]:
    """Return the seconds of each part of a run, ``all`` last; parts that did not happen are left out.

    Trainings that run side by side, as on a CPU, share the time that passed in proportion to their own.

    Args:
        marks: when the parts ended.
        recipes: what each recipe's gate measured; the baselines are the same ones.
        compiled: whether an arm's first step compiles it.
    """
    baselines = [seed.baseline for seed in recipes[0].seeds] if recipes else []
    runs = [*baselines, *(seed.candidate for m in recipes for seed in m.seeds)]
    profiled = math.fsum(m.step_time.profile_seconds or 0.0 for m in recipes)
    alone, beside, together = (
        math.fsum(part.seconds or 0.0 for m in recipes if (part := getattr(m, name)) is not None)
        for name in ("module_time", "fused_time", "distributed")
    )
    parts = {
        "setup": marks.opened - marks.started,
        **_training(runs, marks.trained - marks.opened, compiled),
        "quality attribution": marks.attributed - marks.trained,
        "step timing": marks.timed - marks.attributed - profiled - alone - beside - together,
        "kernel attribution": profiled,
        "fused BF16 timing": beside,
        "module timing": alone,
        "distributed timing": together,
    }
    return {part: s for part, s in parts.items() if s > 0} | {"all": marks.timed - marks.started}


def _training(runs: Sequence[ArmRun], seconds: float, compiled: bool) -> dict[str, float]:
    """Split the time in which arms were trained; ``pairing`` is what no training took."""
    own = [run for run in runs if not run.reused]
    compilation = math.fsum(run.first_step_seconds for run in own) if compiled else 0.0
    evaluation = math.fsum(run.evaluation_seconds or 0.0 for run in own)
    training = math.fsum(run.seconds for run in own) - compilation - evaluation
    spent = compilation + evaluation + training
    side_by_side = max(1.0, spent / seconds) if seconds > 0 else 1.0
    found = {"compilation": compilation, "training": training, "evaluation": evaluation}
    found = {part: s / side_by_side for part, s in found.items()}
    return found | {"pairing": seconds - math.fsum(found.values())}
