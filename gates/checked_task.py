"""A user's task, with what its methods return looked at where they return it.

A method that gives something else would fail far from its fault, as an ``AttributeError`` of code that the user never
saw. One that ends the process (a script without ``if __name__ == "__main__"``, a parser of arguments) would end the
gate with a code that reads as a verdict: ``sys.exit(0)`` is an acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..models.prediction import Prediction
from ..precision.errors import NarrowgateError

if TYPE_CHECKING:
    from torch import Tensor, nn


class CheckedTask:
    """Passes everything on to ``inner``; raises ``NarrowgateError`` where a method returns what it must not."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def build_model(self) -> nn.Module:
        """Return the task's model."""
        from torch import nn

        model = _called("build_model()", self.inner.build_model)
        return _expect("build_model()", model, isinstance(model, nn.Module), "a torch.nn.Module")

    def train_batches(self, seed: int) -> Iterable[Any]:
        """Return the training batches of ``seed``."""
        return _iterable(f"train_batches({seed})", _called("train_batches()", self.inner.train_batches, seed))

    def eval_batches(self) -> Iterable[Any]:
        """Return the held-out batches."""
        return _iterable("eval_batches()", _called("eval_batches()", self.inner.eval_batches))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss: one floating-point number, with a graph where one is recorded."""
        import torch

        loss = _called("loss()", self.inner.loss, model, batch)
        _expect("loss()", loss, isinstance(loss, torch.Tensor), "a scalar tensor")
        if loss.numel() != 1:
            raise NarrowgateError(f"loss() returned a tensor of shape {list(loss.shape)}, expected a scalar")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise NarrowgateError(
                f"loss() returned a {str(loss.dtype).removeprefix('torch.')} that no parameter has a gradient of, "
                "expected a scalar computed from the model, neither detached nor under no_grad"
            )
        return loss

    def predict(self, model: nn.Module, batch: Any) -> Prediction:
        """Return the prediction: tensors, or None where it may be left out."""
        import torch

        prediction = _called("predict()", self.inner.predict, model, batch)
        _expect("predict()", prediction, isinstance(prediction, Prediction), "a Prediction")
        for name in ("logits", "labels", "weights", "groups"):
            value = getattr(prediction, name)
            optional = name in ("weights", "groups") and value is None
            _expect(f"predict() as {name}", value, optional or isinstance(value, torch.Tensor), "a tensor")
        return prediction

    def __getattr__(self, name: str) -> Any:
        """Return what only some tasks have; an ``AttributeError`` where this one has not."""
        if name == "inner" or name.startswith("__"):  # a copy asks before there is anything to pass on to
            raise AttributeError(name)
        found = getattr(self.inner, name)
        if name == "task_names" and found is not None:
            names = hasattr(found, "__iter__") and not isinstance(found, (str, set, frozenset))
            return _expect(name, found, names, "a list of names")
        if name not in _OPTIONAL or not callable(found):
            return found
        fits, expected = _OPTIONAL[name]

        def method(*arguments: Any) -> Any:
            value = _called(f"{name}()", found, *arguments)
            return _expect(f"{name}()", value, fits(value), expected)

        return method


def ended(what: str, error: SystemExit) -> NarrowgateError:
    """Return that ``what``, code of the user's, ended the process by ``error``."""
    said = "" if error.code is None else repr(error.code)
    return NarrowgateError(f"{what} ended the process by sys.exit({said}), expected it to return")


def _called(what: str, method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except SystemExit as error:
        raise ended(what, error) from error


def _expect(what: str, value: Any, fits: bool, expected: str) -> Any:
    if not fits:
        verb = "returned" if what.endswith(")") or " as " in what else "is"
        found = "None" if value is None else f"{value!r}" if isinstance(value, str) else f"a {type(value).__name__}"
        raise NarrowgateError(f"{what} {verb} {found}, expected {expected}")
    return value


def _iterable(what: str, batches: Any) -> Iterable[Any]:
    # Not `Iterable`: what has only __getitem__ and __len__, as many datasets, is iterated over as well.
    return _expect(what, batches, hasattr(batches, "__iter__") or hasattr(batches, "__getitem__"), "batches")


#: What an optional method returns: whether a value is that, and how to call it.
_OPTIONAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimizer": (
        lambda value: all(callable(getattr(value, name, None)) for name in ("step", "zero_grad")),
        "a torch optimizer",
    ),
    "base_rates": (lambda value: hasattr(value, "__iter__"), "a rate for each task"),
    "describe": (lambda value: isinstance(value, Mapping), "a dictionary"),
}
