"""Predicting the held-out rows of a task, checked and gathered on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..precision.errors import NarrowgateError
from .arithmetic import Arithmetic
from .batches import Checksum, to_device
from .task import Prediction, Task

#: A mark with more values than this names rows rather than slices of them.
_MOST_SLICES = 100


@dataclass(frozen=True)
class Predicted:
    """All held-out rows; None where there is nothing."""

    #: [rows, tasks] float64 each.
    logits: NDArray[np.float64] | None = None
    labels: NDArray[np.float64] | None = None
    #: [rows].
    weights: NDArray[np.float64] | None = None
    groups: NDArray[np.int64] | None = None
    #: By the slice's name, [rows] bool.
    slices: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    #: Checksum of the batches that were predicted.
    seen: str = ""


def predict(task: Task, model: nn.Module, device: torch.device) -> Predicted:
    """Return what ``model`` says of the held-out rows; leaves it in training mode.

    Raises:
        NarrowgateError: there are no rows, or predictions that do not fit together.
    """
    checksum = Checksum()
    parts = predict_parts(task, model, checksum.over(task.eval_batches()), device, Arithmetic.of(device))
    return replace(joined(parts), seen=checksum.result())


def predict_parts(
    task: Task, model: nn.Module, batches: Iterable[Any], device: torch.device, arithmetic: Arithmetic
) -> list[Prediction]:
    """Return what ``model`` says of each of ``batches``; leaves it in training mode.

    Raises:
        NarrowgateError: predictions that do not fit together.
    """
    model.eval()
    with torch.no_grad(), arithmetic.context():
        parts = [_checked(task.predict(model, to_device(batch, device))) for batch in batches]
    model.train()
    return parts


def joined(parts: Sequence[Prediction]) -> Predicted:
    """Put the predictions of all held-out batches together.

    Raises:
        NarrowgateError: there are none, or they do not fit together.
    """
    if not parts:
        raise NarrowgateError("eval_batches() yielded no batch")

    def join(name: str, dtype: torch.dtype) -> Any:
        values = [getattr(part, name) for part in parts]
        if all(value is None for value in values):
            return None
        if any(value is None for value in values):
            raise NarrowgateError(f"predict() returned {name} for some batches only")
        return torch.cat(values).to("cpu", dtype).numpy()

    return Predicted(
        logits=join("logits", torch.float64),
        labels=join("labels", torch.float64),
        weights=join("weights", torch.float64),
        groups=join("groups", torch.int64),
        slices=slice_masks([part.slices or {} for part in parts]),
    )


def slice_masks(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, NDArray[np.bool_]]:
    """Return the rows of each slice, [rows] bool by its name, from the batches' marks.

    Raises:
        NarrowgateError: batches mark different slices, or a mark has too many values to be one.
    """
    names = list(parts[0])
    if any(list(part) != names for part in parts):
        raise NarrowgateError("predict() marked different slices in different batches")
    found: dict[str, NDArray[np.bool_]] = {}
    for name in names:
        marks = torch.cat([part[name] for part in parts]).cpu().numpy()
        if marks.dtype == np.bool_:
            found[name] = marks
            continue
        values = np.unique(marks)
        if len(values) > _MOST_SLICES:
            raise NarrowgateError(f"slice '{name}' has {len(values)} values, expected at most {_MOST_SLICES}")
        found |= {f"{name}={value}": marks == value for value in values.tolist()}
    return found


def _checked(prediction: Any) -> Prediction:
    if not isinstance(prediction, Prediction):
        raise NarrowgateError(f"predict() returned a {type(prediction).__name__}, expected a Prediction")
    logits, labels = prediction.logits, prediction.labels
    if logits.ndim != 2 or labels.shape != logits.shape:
        raise NarrowgateError(
            f"predict() returned logits {list(logits.shape)} and labels {list(labels.shape)}, expected [n, tasks] both"
        )
    if not logits.is_floating_point():
        raise NarrowgateError(f"predict() returned logits as {logits.dtype}, expected floating-point numbers")
    for name in ("weights", "groups"):
        value = getattr(prediction, name)
        if value is not None and value.shape != logits.shape[:1]:
            raise NarrowgateError(f"predict() returned {name} {list(value.shape)}, expected [{logits.shape[0]}]")
    if prediction.groups is not None and (prediction.groups.is_floating_point() or prediction.groups.is_complex()):
        raise NarrowgateError(f"predict() returned groups as {prediction.groups.dtype}, expected integers")
    slices = prediction.slices or {}
    if not isinstance(slices, Mapping):
        raise NarrowgateError(f"predict() returned a {type(slices).__name__} as slices, expected marks by name")
    for name, value in slices.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise NarrowgateError(
                f"predict() returned a {type(value).__name__} as slice {name!r}, expected a tensor under a text"
            )
        if value.shape != logits.shape[:1] or value.is_floating_point():
            raise NarrowgateError(
                f"predict() returned slice '{name}' as {value.dtype} {list(value.shape)}, expected booleans or"
                f" integers [{logits.shape[0]}]"
            )
    return prediction
