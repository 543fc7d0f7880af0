"""Methods of a user's task that return what they must not, or end the process."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates.checked_task import CheckedTask
from narrowgate.gates.predictions import predict
from narrowgate.gates.task import Prediction, base_rates, check_task, describe, load_task, make_optimizer, task_names
from narrowgate.precision.errors import NarrowgateError

ONE = torch.ones(4, 1)


class Whole:
    """A task that does everything right."""

    task_names = ("click",)

    def build_model(self) -> Any:
        return torch.nn.Linear(3, 1)

    def train_batches(self, seed: int) -> Any:
        return [torch.ones(4, 3)]

    def eval_batches(self) -> Any:
        return [torch.ones(4, 3)]

    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch).mean()

    def predict(self, model: Any, batch: Any) -> Any:
        return Prediction(model(batch), ONE)

    def optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def base_rates(self) -> Any:
        return torch.tensor([0.5])

    def describe(self) -> Any:
        return {"model": "mine"}


MODEL, BATCH = torch.nn.Linear(3, 1), torch.ones(4, 3)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "build_model": (), "train_batches": (0,), "eval_batches": (), "loss": (MODEL, BATCH), "predict": (MODEL, BATCH),
    "optimizer": (MODEL,), "base_rates": (), "describe": (),
}  # fmt: skip
WRONG = [
    ("build_model", 3, "build_model() returned a int, expected a torch.nn.Module"),
    ("build_model", None, "build_model() returned None"),
    ("train_batches", None, "train_batches(0) returned None, expected batches"),
    ("eval_batches", 5, "eval_batches() returned a int, expected batches"),
    ("loss", 1.0, "loss() returned a float, expected a scalar tensor"),
    ("loss", None, "loss() returned None"),
    ("loss", ONE, "loss() returned a tensor of shape [4, 1], expected a scalar"),
    ("loss", torch.tensor(3), "loss() returned a int64 that no parameter has a gradient of"),
    ("loss", torch.tensor(3.0), "loss() returned a float32 that no parameter has a gradient of"),
    ("predict", ONE, "predict() returned a Tensor, expected a Prediction"),
    ("predict", Prediction([0.5], ONE), "predict() as logits returned a list, expected a tensor"),  # type: ignore[arg-type]
    ("predict", Prediction(ONE, None), "predict() as labels returned None, expected a tensor"),  # type: ignore[arg-type]
    ("predict", Prediction(ONE, ONE, groups=[1]), "predict() as groups returned a list"),  # type: ignore[arg-type]
    ("optimizer", None, "optimizer() returned None, expected a torch optimizer"),
    ("base_rates", None, "base_rates() returned None, expected a rate for each task"),
    ("describe", 3, "describe() returned a int, expected a dictionary"),
]


@pytest.mark.parametrize(("method", "value", "message"), WRONG)
def test_what_a_method_must_not_return_is_named(method: str, value: Any, message: str) -> None:
    task = Whole()
    setattr(task, method, lambda *_: value)
    with pytest.raises(NarrowgateError) as caught:
        getattr(CheckedTask(task), method)(*ARGUMENTS[method])
    assert message in str(caught.value)


@pytest.mark.parametrize("names", ["click", {"click"}, 3])
def test_names_that_are_no_list_are_named(names: Any) -> None:
    task = Whole()
    task.task_names = names
    with pytest.raises(NarrowgateError, match=r"task_names is .*, expected a list of names"):
        task_names(CheckedTask(task), 1)


@pytest.mark.parametrize("method", ARGUMENTS)
def test_a_method_that_ends_the_process_is_an_error_with_its_name(method: str) -> None:
    task = Whole()
    setattr(task, method, lambda *_: sys.exit(0))
    with pytest.raises(NarrowgateError, match=rf"{method}\(.*\) ended the process by sys.exit\(0\)"):
        getattr(CheckedTask(task), method)(*ARGUMENTS[method])


@pytest.mark.parametrize("method", ARGUMENTS)
def test_what_is_right_is_passed_on_as_it_is(method: str) -> None:
    task = Whole()
    value = getattr(task, method)(*ARGUMENTS[method])
    setattr(task, method, lambda *_: value)
    assert getattr(copy.copy(CheckedTask(task)), method)(*ARGUMENTS[method]) is value


def test_what_a_task_lacks_stays_lacking_and_a_loss_needs_no_graph_where_none_is_recorded() -> None:
    class Bare(Whole):
        optimizer = base_rates = describe = task_names = None  # type: ignore[assignment]

    task = CheckedTask(Bare())
    assert isinstance(make_optimizer(task, MODEL), torch.optim.Adam)
    assert task_names(task, 2) == ("task0", "task1")
    assert not hasattr(task, "for_rank")
    with torch.no_grad():
        assert task.loss(MODEL, BATCH).numel() == 1


MODULE = """
import sys
from ranker import Task

def at_once(device="cpu"):
    sys.exit(0)

class Building(Task):
    def build_model(self):
        sys.exit(0)

class Batches(Task):
    def train_batches(self, seed):
        sys.exit(0)
        yield
"""


@pytest.mark.parametrize(
    ("command", "factory", "code"),
    [
        ("gate", "leaves:at_once", 2),
        ("gate", "leaves:Building", 2),
        ("gate", "leaves:Batches", 4),
        ("plan", "leaves:at_once", 2),
        ("inspect", "leaves:Building", 2),
        ("gate", "at_import:make", 2),
        ("plan", "at_import:make", 2),
    ],
)
def test_a_task_that_ends_the_process_is_no_acceptance(
    room: Path, narrowgate: Callable[..., tuple[int, str, str]], command: str, factory: str, code: int
) -> None:
    (room / "leaves.py").write_text(MODULE)
    (room / "at_import.py").write_text("import sys\nsys.exit(0)\n")
    ended, out, err = narrowgate(command, "all-fp8.yaml", "--task", factory)
    assert ended == code, err
    assert out == ""
    assert "ended the process by sys.exit(0)" in err
    assert "Traceback" not in err


def test_a_loaded_task_is_checked(room: Path) -> None:
    assert isinstance(load_task("ranker:good"), CheckedTask)


LOGITS = torch.zeros(4, 1)


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        (Prediction(LOGITS.long(), ONE), "logits as torch.int64, expected floating-point numbers"),
        # Identifiers as float32 merge from 2**24 on, and fractions are cut off.
        (Prediction(LOGITS, ONE, groups=torch.rand(4)), "groups as torch.float32, expected integers"),
        (Prediction(LOGITS, ONE, slices=[1]), "a list as slices, expected marks by name"),  # type: ignore[arg-type]
        (Prediction(LOGITS, ONE, slices={"new": "yes"}), "a str as slice 'new', expected a tensor"),  # type: ignore
        (Prediction(LOGITS, ONE, slices={3: ONE}), "a Tensor as slice 3, expected a tensor under a text"),  # type: ignore
    ],
)
def test_predictions_that_would_be_misread_are_refused(prediction: Prediction, message: str) -> None:
    task = Whole()
    task.predict = lambda *_: prediction  # type: ignore[method-assign]
    with pytest.raises(NarrowgateError) as caught:
        predict(CheckedTask(task), torch.nn.Linear(3, 1), torch.device("cpu"))
    assert str(caught.value).startswith(f"predict() returned {message}")


def test_logits_and_labels_of_other_dtypes_are_read() -> None:
    task, model = Whole(), torch.nn.Linear(3, 1)
    task.predict = lambda *_: Prediction(  # type: ignore[method-assign]
        LOGITS.bfloat16(), ONE.bool(), groups=torch.tensor([1, 1, 2, 2], dtype=torch.int32)
    )
    found = predict(CheckedTask(task), model, torch.device("cpu"))
    assert found.labels is not None
    assert found.groups is not None
    assert (found.labels.tolist(), found.groups.tolist()) == ([[1.0]] * 4, [1, 1, 2, 2])


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"rows": object()}, "describe(): rows: found a object, expected texts, numbers, lists and mappings"),
        ({"data": {"days": [1, {2}]}}, "describe(): data.days: found a set, expected texts"),
        ({"data": {(1, 2): "a"}}, "describe(): data: found the key (1, 2), expected a text or an integer"),
    ],
)
def test_facts_that_no_report_can_hold_are_refused_before_anything_trains(facts: Any, message: str) -> None:
    task = Whole()
    task.describe = lambda: facts  # type: ignore[method-assign]
    with pytest.raises(NarrowgateError) as caught:
        describe(CheckedTask(task))
    assert str(caught.value).startswith(message)


def test_facts_that_have_a_plain_form_are_put_into_it() -> None:
    task = Whole()
    task.describe = lambda: {  # type: ignore[method-assign]
        "rows": torch.tensor(3), "dtype": torch.bfloat16, "mean": np.float32(0.5), "sizes": np.arange(2),
        "data": {2026: date(2026, 1, 2), "file": Path("a") / "b", "shape": torch.Size([2, 3])},
    }  # fmt: skip
    model, data = describe(CheckedTask(task))
    expected = {"rows": 3, "dtype": "torch.bfloat16", "mean": 0.5, "sizes": [0, 1]}
    assert json.loads(json.dumps(model | {"name": None})) == expected | {"name": None}
    assert data == {"2026": "2026-01-02", "file": str(Path("a") / "b"), "shape": [2, 3]}


def test_rates_that_are_no_numbers_are_named() -> None:
    task = Whole()
    task.base_rates = lambda: ["often"]  # type: ignore[method-assign]
    with pytest.raises(NarrowgateError, match=r"base_rates\(\): found \['often'\], expected 1 rates between 0 and 1"):
        base_rates(CheckedTask(task), 1)


def test_a_class_for_a_task_is_told_from_an_instance() -> None:
    with pytest.raises(NarrowgateError, match="--task x: found the class Whole for a task, expected an instance of it"):
        check_task(Whole, "--task x")
