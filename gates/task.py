"""What a user brings: a model, its batches and its loss. Built-in models come as tasks too."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from ..models.prediction import Prediction
from ..precision.errors import NarrowgateError, did_you_mean
from .checked_task import CheckedTask, ended

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["Prediction", "Task", "TaskSource", "base_rates", "describe", "load_task", "make_optimizer", "task_names"]


@runtime_checkable
class Task(Protocol):
    """A model with its data, for the gate to train as baseline and as candidate.

    Beyond these methods a task may have ``optimizer(model) -> Optimizer`` (fused Adam with a learning rate of 1e-3
    where it has none), ``task_names`` (a name for each column of the logits), ``base_rates() -> Sequence[float]`` (the
    training set's rate of positives for each task, for NE; the held-out rows' own where it has none),
    ``describe() -> dict`` (facts about model and data for the report) and ``for_rank(rank, ranks) -> Task`` (the same
    task with one rank's rows of every batch; without it several ranks are dealt whole batches in turn).
    """

    def build_model(self) -> nn.Module:
        """Return the BF16 baseline, freshly initialised from torch's generator as it stands."""
        ...

    def train_batches(self, seed: int) -> Iterable[Any]:
        """Yield the training batches of one run: the same for the same seed, however often they are asked for."""
        ...

    def eval_batches(self) -> Iterable[Any]:
        """Yield the held-out batches: the same every time."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the scalar loss of one batch."""
        ...

    def predict(self, model: nn.Module, batch: Any) -> Prediction:
        """Return the logits and labels of one held-out batch."""
        ...


_METHODS = ("build_model", "train_batches", "eval_batches", "loss", "predict")


@dataclass(frozen=True)
class TaskSource:
    """How to open a task, in any process: a built-in model with its data, or a user's factory."""

    #: ``package.module:factory``; the two below are then unused.
    task: str | None = None
    model: str = "gem-tiny"
    data: str = "synthetic"
    #: ``cpu`` or ``cuda``.
    device: str = "cpu"
    #: Training steps; the built-in model's own number (schedule included), or all of a user's batches, where None.
    steps: int | None = None

    def open(self) -> Task:
        """Import or build the task.

        Raises:
            NarrowgateError: there is no such task, model or data, or the data does not read.
        """
        if self.task is not None:
            return load_task(self.task, device=self.device)
        from ..models import GemTask

        return GemTask.open(model=self.model, data=self.data, device=self.device, steps=self.steps)


def load_task(text: str, *, device: str = "cpu") -> Task:
    """Import ``package.module:factory`` and call the factory (with ``device=`` where it takes that).

    The working directory is importable, as under ``python -m``. This runs the module's code. What the task's methods
    return later is checked where they return it (:mod:`narrowgate.gates.checked_task`).

    Raises:
        NarrowgateError: what is missing, in one line; the cause stays attached.
    """
    module_name, colon, attribute = text.partition(":")
    if not (colon and module_name and attribute):
        raise NarrowgateError(f"--task: found '{text}', expected package.module:factory")
    if "/" in module_name or "\\" in module_name or module_name.endswith(".py"):
        path = PurePath(module_name.removesuffix(".py"))
        hint = "" if path.is_absolute() or ".." in path.parts else f"; {path}.py is {'.'.join(path.parts)}:{attribute}"
        raise NarrowgateError(f"--task: found '{text}', expected package.module:factory{hint}")
    if not all(module_name.split(".")):
        raise NarrowgateError(f"--task: found '{text}', expected package.module:factory")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except SystemExit as error:
        raise ended(f"--task {text}: importing {module_name}", error) from error
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise NarrowgateError(f"--task {text}: module '{error.name}' was not found") from error
        raise NarrowgateError(
            f"--task {text}: importing {module_name} needs '{error.name}', which was not found"
        ) from error
    except Exception as error:
        raise NarrowgateError(f"--task {text}: importing {module_name} failed: {_what(error)}") from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise NarrowgateError(f"--task {text}: {module_name} has no '{attribute}'{did_you_mean(attribute, public)}")
    factory = getattr(module, attribute)
    if not callable(factory):
        raise NarrowgateError(
            f"--task {text}: '{attribute}' is a {type(factory).__name__}, expected a function or class"
        )
    try:
        task = factory(device=device) if _takes_device(factory) else factory()
    except SystemExit as error:
        raise ended(f"--task {text}: {attribute}()", error) from error
    except Exception as error:
        raise NarrowgateError(f"--task {text}: {attribute}() raised {_what(error)}") from error
    return CheckedTask(check_task(task, f"--task {text}"))


def check_task(task: object, origin: str) -> Task:
    """Return ``task`` as one, or say which of its methods is missing.

    Raises:
        NarrowgateError: a method is missing or is no method.
    """
    if isinstance(task, type):
        raise NarrowgateError(f"{origin}: found the class {task.__name__} for a task, expected an instance of it")
    missing = [name for name in _METHODS if not callable(getattr(task, name, None))]
    if missing or not isinstance(task, Task):
        lacks = f"lacks {', '.join(f'{name}()' for name in missing)}"
        raise NarrowgateError(f"{origin}: the task is a {type(task).__name__} and {lacks}")
    return task


def task_names(task: Task, columns: int) -> tuple[str, ...]:
    """Return a name for each column of the logits.

    Raises:
        NarrowgateError: the task names another number of columns, or one twice.
    """
    names = getattr(task, "task_names", None)
    if names is None:
        return tuple(f"task{i}" for i in range(columns)) if columns > 1 else ("task",)
    names = tuple(str(name) for name in names)
    if len(names) != columns or len(set(names)) != columns:
        raise NarrowgateError(
            f"task_names: found {list(names)}, expected {columns} different names, one a logit column"
        )
    return names


def base_rates(task: Task, columns: int) -> Sequence[float | None]:
    """Return the training set's rate of positives of each task; None where the task does not say.

    Raises:
        NarrowgateError: another number of rates than tasks, or one that is no rate.
    """
    method = getattr(task, "base_rates", None)
    if method is None:
        return [None] * columns
    found = list(method())
    try:
        rates = [float(rate) for rate in found]
    except (TypeError, ValueError):
        raise NarrowgateError(f"base_rates(): found {found}, expected {columns} rates between 0 and 1") from None
    if len(rates) != columns or not all(0 < rate < 1 for rate in rates):
        raise NarrowgateError(f"base_rates(): found {rates}, expected {columns} rates between 0 and 1")
    return rates


def describe(task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the task says of its model (with its training) and of its data, for the report.

    Raises:
        NarrowgateError: something in it that a report, which is JSON, cannot hold; names it.
    """
    method = getattr(task, "describe", None)
    facts = _as_json(dict(method()) if method is not None else {}, "describe()")
    model, data = facts.pop("model", None), facts.pop("data", None)
    model = dict(model) if isinstance(model, dict) else {"name": model or type(getattr(task, "inner", task)).__name__}
    data = dict(data) if isinstance(data, dict) else {"name": data or "of the task"}
    return model | facts, data


def make_optimizer(task: Task, model: nn.Module) -> Optimizer:
    """Return the task's optimizer, Adam where it has none."""
    method = getattr(task, "optimizer", None)
    if method is not None:
        return method(model)
    from torch.optim import Adam

    # Fused, as compiled training has it, and as BF16 state is updated in one pass.
    return Adam(model.parameters(), lr=1e-3, fused=True)


def holds_some(optimizer: Any, model: nn.Module) -> bool:
    """Whether ``optimizer`` holds a parameter of ``model`` that is trained, or does not say what it holds."""
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    groups = getattr(optimizer, "param_groups", None)
    if groups is None or not own:
        return True
    return any(id(parameter) in own for group in groups for parameter in group.get("params", ()))


def _as_json(value: Any, place: str) -> Any:
    """``value`` as a report holds it: arrays and tensors as numbers; paths, dates and integer keys as texts."""
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for key, entry in value.items():
            if not isinstance(key, (str, int)):
                raise NarrowgateError(f"{place}: found the key {key!r}, expected a text or an integer")
            inner = f"{place}: {key}" if place.endswith("()") else f"{place}.{key}"
            plain[str(key)] = _as_json(entry, inner)
        return plain
    if isinstance(value, (list, tuple)):
        return [_as_json(entry, place) for entry in value]
    if isinstance(value, (PurePath, date)):
        return str(value)
    if isinstance(value, (np.generic, np.ndarray)) or type(value).__module__.partition(".")[0] == "torch":
        value = value.tolist() if hasattr(value, "tolist") else str(value)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise NarrowgateError(f"{place}: found a {type(value).__name__}, expected texts, numbers, lists and mappings")
    return value


def _takes_device(factory: Any) -> bool:
    try:
        return "device" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


def _what(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
