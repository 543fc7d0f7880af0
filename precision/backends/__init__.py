"""Where a resolved recipe runs: our own layers, torchao's, or Transformer Engine's.

Names load on first use, so importing the package brings in neither torch nor a backend's library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Backend, LayerFacts
    from .registry import BACKENDS, backend_of, get_backend, original_type

_HOMES = {
    "BACKENDS": "registry",
    "Backend": "base",
    "LayerFacts": "base",
    "backend_of": "registry",
    "get_backend": "registry",
    "original_type": "registry",
}

__all__ = ["BACKENDS", "Backend", "LayerFacts", "backend_of", "get_backend", "original_type"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
