"""The models and data that recipes are gated on: a GEM-like recommender, its input and its training task.

Importing this package does not import torch; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import Batch
    from .config import GemConfig
    from .data.loader import Dataset
    from .data.source import open_data
    from .features import FeatureSpec, Field
    from .gem import GemModel
    from .prediction import Prediction
    from .presets import Preset, TrainingConfig, get_preset, preset, preset_names
    from .task import GemTask
    from .training import LoopOptions, Trainer

_HOMES = {
    "Batch": "batch",
    "Dataset": "data.loader",
    "FeatureSpec": "features",
    "Field": "features",
    "GemConfig": "config",
    "GemModel": "gem",
    "GemTask": "task",
    "LoopOptions": "training",
    "Prediction": "prediction",
    "Preset": "presets",
    "Trainer": "training",
    "TrainingConfig": "presets",
    "get_preset": "presets",
    "open_data": "data.source",
    "preset": "presets",
    "preset_names": "presets",
}

__all__ = [
    "Batch",
    "Dataset",
    "FeatureSpec",
    "Field",
    "GemConfig",
    "GemModel",
    "GemTask",
    "LoopOptions",
    "Prediction",
    "Preset",
    "Trainer",
    "TrainingConfig",
    "get_preset",
    "open_data",
    "preset",
    "preset_names",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
