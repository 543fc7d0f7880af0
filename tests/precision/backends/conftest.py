"""Layer configurations, and a stand-in for the few classes of Transformer Engine that the backend uses."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from narrowgate.precision import GemmConfig, LinearConfig, Spec
from torch import Tensor, nn
from torch.nn import functional as F


@pytest.fixture(scope="session")
def layer_config() -> Callable[..., LinearConfig]:
    """Build a configuration from ``path=(first, second[, accumulate])``; paths left out are BF16."""

    def build(**paths: tuple[str, ...]) -> LinearConfig:
        gemms = {
            path: GemmConfig(Spec.parse(first), Spec.parse(second), *rest)
            for path, (first, second, *rest) in paths.items()
        }
        return LinearConfig(**gemms)

    return build


@pytest.fixture(scope="session")
def configs(layer_config) -> dict[str, LinearConfig]:
    """What backends are compared on, by name."""
    return {
        "tensor": layer_config(
            fprop=("fp8_e4m3", "fp8_e4m3", "fast"), dgrad=("fp8_e5m2", "fp8_e4m3"), wgrad=("fp8_e5m2", "fp8_e4m3")
        ),
        "tensor_pow2": layer_config(**dict.fromkeys(("fprop", "dgrad", "wgrad"), ("fp8_e4m3+pow2",) * 2)),
        "tensor_bf16_wgrad": layer_config(fprop=("fp8_e4m3", "fp8_e4m3"), dgrad=("fp8_e5m2", "fp8_e4m3")),
        "fprop_only": layer_config(fprop=("fp8_e4m3", "fp8_e4m3")),
        "row": layer_config(**dict.fromkeys(("fprop", "dgrad", "wgrad"), ("fp8_e4m3/row+pow2",) * 2)),
        "row_with_gw_hp": layer_config(
            fprop=("fp8_e4m3/row", "fp8_e4m3/row"), dgrad=("fp8_e4m3/row", "fp8_e4m3")
        ),
        "block": layer_config(
            fprop=("fp8_e4m3/1x128", "fp8_e4m3/128x128"),
            dgrad=("fp8_e4m3/1x128", "fp8_e4m3/128x128"),
            wgrad=("fp8_e4m3/1x128", "fp8_e4m3/1x128"),
        ),
        "mxfp8": layer_config(**dict.fromkeys(("fprop", "dgrad", "wgrad"), ("mxfp8+rceil",) * 2)),
        "mxfp8_bf16_wgrad": layer_config(**dict.fromkeys(("fprop", "dgrad"), ("mxfp8",) * 2)),
        "delayed": layer_config(
            fprop=("fp8_e4m3+delayed(8)",) * 2,
            dgrad=("fp8_e5m2+delayed(8)", "fp8_e4m3+delayed(8)"),
            wgrad=("fp8_e5m2+delayed(8)", "fp8_e4m3+delayed(8)"),
        ),
    }  # fmt: skip


@dataclass
class Run:
    """One forward and backward of a layer: output, and the gradients of input, weight and bias."""

    y: Tensor
    dx: Tensor
    dw: Tensor
    db: Tensor | None

    def tensors(self) -> list[tuple[str, Tensor]]:
        pairs = [("y", self.y), ("dx", self.dx), ("dw", self.dw), ("db", self.db)]
        return [(name, t) for name, t in pairs if t is not None]


@pytest.fixture(scope="session")
def run_layer() -> Callable[..., Run]:
    def run(layer: nn.Linear, rows: tuple[int, ...] = (3, 11), seed: int = 1, dtype: torch.dtype | None = None) -> Run:
        device, dtype = layer.weight.device, dtype or layer.weight.dtype
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(*rows, layer.in_features, generator=generator).to(device, dtype).requires_grad_()
        g = torch.randn(*rows, layer.out_features, generator=generator).to(device, dtype)
        layer.zero_grad()
        y = layer(x)
        y.backward(g.to(y.dtype))
        assert x.grad is not None
        assert layer.weight.grad is not None
        db = None if layer.bias is None else layer.bias.grad
        return Run(y.detach(), x.grad, layer.weight.grad, None if db is None else db.clone())

    return run


# A stand-in for Transformer Engine: the names, signatures and refusals of 2.20.2 that the backend meets, no arithmetic.


class _Recipe:
    backward_override = None

    def delayed(self) -> bool:
        return isinstance(self, _Delayed)

    def custom(self) -> bool:
        return isinstance(self, _Custom)


class _Format(enum.Enum):
    E4M3 = 1
    E5M2 = 2
    HYBRID = 3


@dataclass(frozen=True)
class _MMParams:
    use_split_accumulator: bool = True


@dataclass(frozen=True)
class _QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclass
class _Current(_Recipe):
    fp8_format: _Format = _Format.HYBRID


@dataclass
class _Block(_Recipe):
    fp8_format: _Format = _Format.E4M3


@dataclass
class _Delayed(_Recipe):
    margin: int = 0
    fp8_format: _Format = _Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


@dataclass
class _Custom(_Recipe):
    qfactory: Callable[..., Any]
    fp8_format: _Format = _Format.HYBRID


class _DType(enum.Enum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


@dataclass(frozen=True)
class _Role:
    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


class _Quantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        assert not args
        self.options = kwargs

    def __repr__(self) -> str:
        return f"{type(self).__name__.removeprefix('_')}({self.options})"


class _Identity(_Quantizer):
    pass


class _CurrentQuantizer(_Quantizer):
    pass


class _BlockQuantizer(_Quantizer):
    pass


class _MXQuantizer(_Quantizer):
    pass


class _NVFP4Quantizer(_Quantizer):
    pass


class _Hybrid(_Quantizer):
    def __init__(self, *, rowwise_quantizer: Any, columnwise_quantizer: Any) -> None:
        assert rowwise_quantizer is not columnwise_quantizer
        super().__init__(row=rowwise_quantizer, column=columnwise_quantizer)


class _Manager:
    active: ClassVar[list[_Recipe]] = []
    #: Outermost contexts that have ended: how often delayed scales were updated.
    updates: ClassVar[int] = 0

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return bool(cls.active)

    @classmethod
    def get_fp8_recipe(cls) -> _Recipe:
        return cls.active[-1]


class _Autocast:
    def __init__(self, *, enabled: bool, recipe: _Recipe) -> None:
        assert enabled
        self.recipe = recipe

    def __enter__(self) -> None:
        _Manager.active.append(self.recipe)

    def __exit__(self, *error: object) -> None:
        _Manager.active.pop()
        if not _Manager.active:
            _Manager.updates += 1


@dataclass
class _Call:
    name: str
    recipe: _Recipe
    rows: int
    quantizers: list[Any] = field(default_factory=list)


class _Linear(nn.Module):
    calls: ClassVar[list[_Call]] = []

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        params_dtype: torch.dtype,
        device: str,
        name: str | None,
    ) -> None:
        super().__init__()
        self.name, self.use_bias, self.activation_dtype = name, bias, None
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device))

    def get_extra_state(self) -> Tensor:
        return torch.zeros(3)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("nobody loads this")

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        if rows % 8 or columns % 16:
            raise ValueError("FP8 execution requires divisible dimensions")
        if x.dtype != self.activation_dtype and x.dtype != self.weight.dtype:
            raise TypeError("Data types for parameters must match when outside of autocasted region")
        recipe = _Manager.get_fp8_recipe()
        call = _Call(self.name or "", recipe, rows)
        if isinstance(recipe, _Custom):
            roles = [_Role("linear", t, self.name or "") for t in ("input", "weight", "grad_output")]
            call.quantizers = [recipe.qfactory(role) for role in (*roles, None)]
        _Linear.calls.append(call)
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype) if self.use_bias else None)


@pytest.fixture
def engine(monkeypatch) -> Any:
    """Put the stand-in where ``transformer_engine`` is imported from; returns what it recorded."""
    from narrowgate.precision.backends import get_backend, te_linear

    _Linear.calls.clear()
    _Manager.active.clear()
    _Manager.updates = 0
    recipe = types.ModuleType("transformer_engine.common.recipe")
    recipe.__dict__.update(
        Format=_Format, MMParams=_MMParams, QParams=_QParams, DelayedScaling=_Delayed,
        Float8CurrentScaling=_Current, Float8BlockScaling=_Block, CustomRecipe=_Custom,
    )  # fmt: skip
    common = types.ModuleType("transformer_engine.common")
    common.__dict__["recipe"] = recipe
    pytorch = types.ModuleType("transformer_engine.pytorch")
    pytorch.__dict__.update(
        Linear=_Linear, autocast=_Autocast, IdentityQuantizer=_Identity, HybridQuantizer=_Hybrid,
        Float8CurrentScalingQuantizer=_CurrentQuantizer, Float8BlockQuantizer=_BlockQuantizer,
        MXFP8Quantizer=_MXQuantizer, NVFP4Quantizer=_NVFP4Quantizer,
    )  # fmt: skip
    constants = types.ModuleType("transformer_engine.pytorch.constants")
    constants.__dict__["DType"] = _DType
    quantization = types.ModuleType("transformer_engine.pytorch.quantization")
    quantization.__dict__["FP8GlobalStateManager"] = _Manager
    root = types.ModuleType("transformer_engine")
    root.__dict__.update(common=common, pytorch=pytorch)
    for module in (root, common, recipe, pytorch, constants, quantization):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(te_linear, "_on_gpu", lambda x: True)
    backend = get_backend("transformer_engine")
    monkeypatch.setattr(type(backend), "available", lambda self: (True, "a stand-in"))
    return types.SimpleNamespace(calls=_Linear.calls, manager=_Manager, recipe=recipe, pytorch=pytorch, dtype=_DType)
