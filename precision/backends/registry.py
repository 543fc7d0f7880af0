"""The backends that exist, by the name that recipes and flags use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..errors import NarrowgateError, did_you_mean
from .base import Backend
from .native import NativeBackend
from .torchao import TorchaoBackend
from .transformer_engine import TransformerEngineBackend

if TYPE_CHECKING:
    from torch import nn

#: Every backend by name, in the order in which they are listed.
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {backend.name: backend for backend in (NativeBackend(), TorchaoBackend(), TransformerEngineBackend())}
)


def get_backend(name: str) -> Backend:
    """Return the backend called ``name``.

    Raises:
        NarrowgateError: there is none; lists the names that exist.
    """
    backend = BACKENDS.get(name)
    if backend is None:
        raise NarrowgateError(f"backend: found '{name}', expected {', '.join(BACKENDS)}{did_you_mean(name, BACKENDS)}")
    return backend


def backend_of(module: nn.Module) -> Backend | None:
    """Return the backend that lowered ``module``, or None for a module as its author wrote it."""
    return next((backend for backend in BACKENDS.values() if backend.owns(module)), None)


def original_type(module: nn.Module) -> type[nn.Module]:
    """Return the class that ``module`` had before any backend lowered it."""
    from ..layer import original_type as native_original
    from .swap import SwappedLinear, state_of

    return state_of(module).original if isinstance(module, SwappedLinear) else native_original(module)
