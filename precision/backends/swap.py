"""An ``nn.Linear`` that another library runs: its class is swapped, everything else of it stays.

The library's own module is never put in the model's place: names, Parameters (the same objects, so an optimizer stays
valid), hooks, ``state_dict()`` and ``isinstance(m, nn.Linear)`` are the user's. What the library needs besides lives in
a plain attribute that no ``state_dict()`` sees.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import LinearConfig
from ..errors import NarrowgateError
from .base import ALIGNMENT

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Where a swapped module keeps its :class:`SwappedState`.
_STATE = "_narrowgate_backend"


class SwappedState:
    """What a swapped layer carries besides its Parameters."""

    #: Rows of the flattened input are padded with zeros to a multiple of this: they contract in wgrad.
    row_multiple = ALIGNMENT

    def __init__(self, config: LinearConfig, name: str, original: type[nn.Module]) -> None:
        self.config = config
        self.name = name
        self.original = original

    def place(self, device: torch.device) -> None:
        """Follow the layer's weight to ``device``."""


class SwappedLinear(nn.Linear):
    """Base of the layers of other libraries; made by :func:`swap`, never constructed."""

    def forward(self, input: Tensor) -> Tensor:
        """Return x Wᵀ + bias: [..., N] for an input of [..., K] (or [K]), in the autocast dtype or the input's.

        Raises:
            NarrowgateError: the last dimension of ``input`` is not ``in_features``.
        """
        state = state_of(self)
        if input.shape[-1] != self.in_features:
            raise NarrowgateError(
                f"{state.name or 'linear'}: expected an input of [..., {self.in_features}], found {list(input.shape)}"
            )
        flat = input.reshape(-1, self.in_features)
        rows = flat.shape[0]
        if rows == 0:  # no library multiplies nothing; PyTorch gives the shapes and the zero gradients
            dtype = compute_dtype(input)
            bias = None if self.bias is None else self.bias.to(dtype)
            out = F.linear(flat.to(dtype), self.weight.to(dtype), bias)
        else:
            missing = -rows % state.row_multiple
            out = self.multiply(F.pad(flat, (0, 0, 0, missing)) if missing else flat, state)
            out = out[:rows] if missing else out
        return out.reshape(*input.shape[:-1], self.out_features)

    @abstractmethod
    def multiply(self, flat: Tensor, state: Any) -> Tensor:
        """Return ``flat`` Wᵀ + bias for ``flat`` [rows, K] with rows > 0 and a multiple of ``row_multiple``."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SwappedLinear:
        module = super()._apply(fn, recurse)  # type: ignore[call-arg]
        state_of(self).place(self.weight.device)
        return module  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """The shape and, per path, the two formats."""
        paths = (f"{path}={gemm.first}·{gemm.second}" for path, gemm in state_of(self).config.gemms())
        return ", ".join([super().extra_repr(), *paths])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class of a swapped subclass is made at run time; pickle cannot find it by name.
        swapped = next(cls for cls in type(self).__mro__ if SwappedLinear in cls.__bases__)
        return _rebuild, (swapped, state_of(self).original), self.__getstate__()


def swap(module: nn.Module, swapped: type[SwappedLinear], state: SwappedState) -> None:
    """Give ``module`` the class ``swapped``, in place.

    Raises:
        NarrowgateError: it is low-precision already, is no ``nn.Linear``, or has a forward of its own.
    """
    if _STATE in module.__dict__:
        raise NarrowgateError(f"layer '{state.name}' is low-precision already: remove_recipe first")
    if not isinstance(module, nn.Linear):
        raise NarrowgateError(f"layer '{state.name}': found a {type(module).__name__}, expected an nn.Linear")
    if type(module).forward is not nn.Linear.forward:
        raise NarrowgateError(
            f"layer '{state.name}': {type(module).__name__} has a forward of its own and cannot be swapped"
        )
    module.__dict__[_STATE] = state
    state.place(module.weight.device)
    object.__setattr__(module, "__class__", _swapped_class(swapped, state.original))


def restore(module: nn.Module) -> None:
    """Undo :func:`swap`."""
    original = state_of(module).original
    del module.__dict__[_STATE]
    object.__setattr__(module, "__class__", original)


def state_of(module: nn.Module) -> Any:
    """The :class:`SwappedState` of a swapped module."""
    return module.__dict__[_STATE]


def compute_dtype(input: Tensor) -> torch.dtype:
    """The dtype that a linear layer answers in: autocast's where it is on, else the input's."""
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


def outside_compile(function: _Function) -> _Function:
    """Return ``function`` as one that ``torch.compile`` does not trace: the graph breaks around it."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


@cache
def _swapped_class(swapped: type[SwappedLinear], original: type[nn.Module]) -> type[SwappedLinear]:
    if original is nn.Linear:
        return swapped
    name = f"{swapped.__name__.removesuffix('Linear')}{original.__name__}"
    return type(name, (swapped, original), {"__doc__": original.__doc__})


def _rebuild(swapped: type[SwappedLinear], original: type[nn.Module]) -> SwappedLinear:
    cls = _swapped_class(swapped, original)
    return cls.__new__(cls)
