"""Gates: train baseline and candidate as pairs, decide by stated statistics, report what was measured."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..models.prediction import Prediction
    from .decision import Decision, Gate, Reason, decide
    from .measurements import Measurements
    from .policy import Policy, load_policy
    from .report import Report
    from .task import Task, load_task

__all__ = [
    "Decision",
    "Gate",
    "Measurements",
    "Policy",
    "Prediction",
    "Reason",
    "Report",
    "Task",
    "decide",
    "load_policy",
    "load_task",
]

_HOME = {
    "Decision": ".decision",
    "Gate": ".decision",
    "Measurements": ".measurements",
    "Policy": ".policy",
    "Prediction": "..models.prediction",
    "Reason": ".decision",
    "Report": ".report",
    "Task": ".task",
    "decide": ".decision",
    "load_policy": ".policy",
    "load_task": ".task",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = value
    return value
