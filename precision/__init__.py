"""Number formats, scales, rounding and the low-precision linear layer.

Names load on first use, so importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capability import NAMED_DEVICES, Device, Support, current_device, gemm_support, named_device
    from .config import OPERANDS, PATHS, GemmConfig, LinearConfig
    from .delayed import AmaxHistory, roll
    from .errors import NarrowgateError, NotBuiltError, SpecError
    from .formats import FORMATS, ElementFormat, Format, get_format
    from .grouped import GroupedLinear
    from .joint_amaxes import reduce_amaxes
    from .kernels.tuning import autotune
    from .layer import end_step, share_amaxes
    from .linear import LowPrecisionLinear, lower_linear, restore_linear
    from .matmul import MatMul
    from .metrics import TensorMetrics, mean_relative_error, measure, sqnr_db
    from .optimizer_state import lower_state, state_bytes
    from .quantization import QuantizedTensor, quantize
    from .reduction import install_reduction, reduction_errors
    from .spec import Spec, as_spec
    from .stochastic import Shard, call_key, stream_key
    from .wire import WireCount

#: Public name -> the module that defines it.
_HOMES = {
    "NAMED_DEVICES": "capability", "Device": "capability", "Support": "capability",
    "current_device": "capability", "gemm_support": "capability", "named_device": "capability",
    "FORMATS": "formats", "ElementFormat": "formats", "Format": "formats", "get_format": "formats",
    "AmaxHistory": "delayed", "roll": "delayed",
    "GemmConfig": "config", "LinearConfig": "config", "OPERANDS": "config", "PATHS": "config",
    "NarrowgateError": "errors", "NotBuiltError": "errors", "SpecError": "errors",
    "GroupedLinear": "grouped", "MatMul": "matmul", "end_step": "layer",
    "share_amaxes": "layer",
    "LowPrecisionLinear": "linear", "lower_linear": "linear", "restore_linear": "linear",
    "TensorMetrics": "metrics", "mean_relative_error": "metrics", "measure": "metrics", "sqnr_db": "metrics",
    "lower_state": "optimizer_state", "state_bytes": "optimizer_state",
    "QuantizedTensor": "quantization", "quantize": "quantization",
    "Shard": "stochastic", "call_key": "stochastic", "stream_key": "stochastic",
    "Spec": "spec", "as_spec": "spec",
    "autotune": "kernels.tuning", "WireCount": "wire", "reduce_amaxes": "joint_amaxes",
    "install_reduction": "reduction", "reduction_errors": "reduction",
}  # fmt: skip

__all__ = [
    "FORMATS",
    "NAMED_DEVICES",
    "OPERANDS",
    "PATHS",
    "AmaxHistory",
    "Device",
    "ElementFormat",
    "Format",
    "GemmConfig",
    "GroupedLinear",
    "LinearConfig",
    "LowPrecisionLinear",
    "MatMul",
    "NarrowgateError",
    "NotBuiltError",
    "QuantizedTensor",
    "Shard",
    "Spec",
    "SpecError",
    "Support",
    "TensorMetrics",
    "WireCount",
    "as_spec",
    "autotune",
    "call_key",
    "current_device",
    "end_step",
    "gemm_support",
    "get_format",
    "install_reduction",
    "lower_linear",
    "lower_state",
    "mean_relative_error",
    "measure",
    "named_device",
    "quantize",
    "reduce_amaxes",
    "reduction_errors",
    "restore_linear",
    "roll",
    "share_amaxes",
    "sqnr_db",
    "state_bytes",
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
