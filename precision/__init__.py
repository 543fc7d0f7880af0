"""Number formats, scales, rounding and the low-precision linear layer.

Names load on first use, so importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import OPERANDS, PATHS, GemmConfig, LinearConfig
    from .errors import NarrowgateError, NotBuiltError, SpecError
    from .formats import FORMATS, ElementFormat, Format, get_format
    from .quantize import QuantizedTensor, quantize
    from .spec import Spec, as_spec
    from .stochastic import Shard, call_key, stream_key

#: Public name -> the module that defines it.
_HOMES = {
    "FORMATS": "formats", "ElementFormat": "formats", "Format": "formats", "get_format": "formats",
    "GemmConfig": "config", "LinearConfig": "config", "OPERANDS": "config", "PATHS": "config",
    "NarrowgateError": "errors", "NotBuiltError": "errors", "SpecError": "errors",
    "QuantizedTensor": "quantize", "quantize": "quantize",
    "Shard": "stochastic", "call_key": "stochastic", "stream_key": "stochastic",
    "Spec": "spec", "as_spec": "spec",
}  # fmt: skip

__all__ = [
    "FORMATS",
    "OPERANDS",
    "PATHS",
    "ElementFormat",
    "Format",
    "GemmConfig",
    "LinearConfig",
    "NarrowgateError",
    "NotBuiltError",
    "QuantizedTensor",
    "Shard",
    "Spec",
    "SpecError",
    "as_spec",
    "call_key",
    "get_format",
    "quantize",
    "stream_key",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
