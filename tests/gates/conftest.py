from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from narrowgate.gates.measurements import (
    ArmRun,
    LossSummary,
    Measurements,
    Quartet,
    RowEstimate,
    RowIntervals,
    SeedRun,
    Stability,
    StepTime,
    TaskQuality,
)


def _arm(ne: float | None, auc: float | None, note: str | None = None, **changes: Any) -> ArmRun:
    stability = {
        "steps": 100,
        "non_finite_losses": 0,
        "non_finite_gradients": 0,
        "first_non_finite": None,
        "spikes": 0,
        "first_spike": None,
        "max_gradient_norm": 1.0,
    }
    stability.update({k: changes.pop(k) for k in list(changes) if k in Stability.model_fields})
    losses = {"first": 0.69, "last": 0.5, "curve": ((100, 0.5),)}
    losses.update({k: changes.pop(k) for k in list(changes) if k in LossSummary.model_fields})
    return ArmRun(
        quality={
            "click": TaskQuality(
                log_loss=None if ne is None else 0.6 * ne, ne=ne, auc=auc, calibration=ne and 1.0, note=note
            )
        },
        losses=LossSummary(**losses),
        stability=Stability(**stability),
        peak_memory=changes.pop("peak_memory", 10**9),
        seconds=1.0,
        first_step_seconds=0.1,
        **changes,
    )


@pytest.fixture(scope="session")
def arm() -> Callable[..., ArmRun]:
    """Build one arm's run; keywords change its stability, losses or peak memory."""
    return _arm


def _step_time(log_speedups: Sequence[float], host: Sequence[float] | None = None, **changes: Any) -> StepTime:
    host = log_speedups if host is None else host

    def times(log_speedup: float) -> tuple[float, float]:
        return (10 * np.exp(log_speedup), 10 * np.exp(log_speedup))

    quartets = tuple(
        Quartet(
            order="ABBA",
            baseline_ms=times(device),
            candidate_ms=(10.0, 10.0),
            baseline_host_ms=times(clock),
            candidate_host_ms=(10.0, 10.0),
        )
        for device, clock in zip(log_speedups, host, strict=True)
    )
    return StepTime(status="measured", quartets=quartets, **changes)


@pytest.fixture(scope="session")
def step_time() -> Callable[..., StepTime]:
    """Build a step-time experiment from one log speedup a quartet (and one by the host's clock)."""
    return _step_time


def _measurements(
    ne_increase: Sequence[float],
    auc_loss: Sequence[float] | None = None,
    speed: StepTime | None = None,
    row: RowEstimate | None = None,
    **changes: Any,
) -> Measurements:
    auc_loss = [0.0] * len(ne_increase) if auc_loss is None else auc_loss
    tight = RowEstimate(mean=0.0, error=1e-6, df=1000) if row is None else row
    if speed is None:
        speed = _step_time(np.log(1.2) + 0.001 * np.resize([1, -1], 20))
    fields = {
        "tasks": ("click",),
        "seeds": tuple(
            SeedRun(
                seed=i,
                baseline=_arm(0.8 + 0.01 * i, 0.75 + 0.01 * i),
                candidate=_arm((0.8 + 0.01 * i) * (1 + d), 0.75 + 0.01 * i - a),
            )
            for i, (d, a) in enumerate(zip(ne_increase, auc_loss, strict=True))
        ),
        "rows": RowIntervals(
            rows=1001,
            clusters=1001,
            ne={"click": tight},
            auc={"click": RowEstimate(mean=0.0, error=1e-6, df=1000)},
        ),
        "step_time": speed,
        "device": "a GPU",
    }
    return Measurements(**(fields | changes))


@pytest.fixture(scope="session")
def measurements() -> Callable[..., Measurements]:
    """Build the measurements of a healthy run of one task, from each seed's relative NE increase and AUC loss."""
    return _measurements
