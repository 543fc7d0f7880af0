"""The layer that torchao's products run in: a swapped ``nn.Linear`` around torchao's autograd functions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..capability import current_device
from ..config import LinearConfig
from ..spec import Spec
from .swap import SwappedLinear, SwappedState, compute_dtype, swap
from .torchao import MX_BLOCK, is_mx

_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class TorchaoState(SwappedState):
    """A layer's configuration in torchao's terms, for the device that it lies on."""

    def __init__(self, config: LinearConfig, name: str, original: type[nn.Module]) -> None:
        super().__init__(config, name, original)
        self.mx = is_mx(config)
        self.row_multiple = MX_BLOCK if self.mx else self.row_multiple
        #: A path is BF16: then the layer computes in BF16, as torchao's unquantized operands are used as they come.
        self.dense = any(gemm.high_precision for _, gemm in config.gemms())
        #: A product uses the weight as it is, next to an operand in the compute dtype.
        self.dense_weight = config.fprop.high_precision or config.dgrad.high_precision
        #: Products are emulated where no FP8 matrix units are; None until the layer lies on a device.
        self.emulate: bool | None = None
        self.settings: tuple[Any, ...] | None = None

    def place(self, device: torch.device) -> None:
        """Follow the layer's weight: whether torchao must emulate depends on the device."""
        if device.type == "meta":
            return
        capability = current_device(device).capability
        self.emulate = capability is None or capability < ((10, 0) if self.mx else (8, 9))
        self.settings = (
            mx_settings(self.config, self.emulate) if self.mx else float8_settings(self.config, self.emulate)
        )


class TorchaoLinear(SwappedLinear):
    """An ``nn.Linear`` whose products are torchao's."""

    def multiply(self, flat: Tensor, state: TorchaoState) -> Tensor:
        """See :meth:`SwappedLinear.multiply`."""
        if state.settings is None:  # a meta module that was given its weights by assignment
            state.place(self.weight.device)
        settings = state.settings
        assert settings is not None, "an input was multiplied, so the weight is on a device"
        dtype = compute_dtype(flat)
        inner = torch.bfloat16 if state.dense and dtype == torch.float32 else dtype
        x = _as(flat, inner)
        weight = _as(self.weight, inner) if state.dense_weight or state.mx else self.weight
        with torch.autocast(flat.device.type, enabled=False):
            out = (_multiply_mx if state.mx else _multiply_float8)(x, weight, settings)
            if self.bias is not None:
                out = out + _as(self.bias, out.dtype)
        return _as(out, dtype)


def lower(module: nn.Module, config: LinearConfig, name: str) -> None:
    """Make ``module`` run ``config`` through torchao, in place."""
    swap(module, TorchaoLinear, TorchaoState(config, name, type(module)))


@lru_cache(maxsize=256)
def float8_settings(config: LinearConfig, emulate: bool) -> tuple[Any, Any]:
    """Return ``config`` as torchao's ``Float8LinearConfig``, and the ``LinearMMConfig`` that its layer makes of it."""
    from torchao.float8.config import CastConfig, Float8GemmConfig, Float8LinearConfig, ScalingGranularity, ScalingType
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    def cast(spec: Spec, other: Spec, default: str) -> CastConfig:
        # A new object each: torchao fills in target types by writing into the ones it was given.
        name = next((s.format for s in (spec, other) if not s.high_precision), default)
        if spec.high_precision:
            return CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=_DTYPES[name])
        row = spec.granularity == "row"
        granularity = ScalingGranularity.AXISWISE if row else ScalingGranularity.TENSORWISE
        return CastConfig(scaling_granularity=granularity, target_dtype=_DTYPES[name])

    fprop, dgrad, wgrad = config.fprop, config.dgrad, config.wgrad
    fast = {path: gemm.accumulate == "fast" for path, gemm in config.gemms()}
    specs = [spec for gemm in (fprop, dgrad, wgrad) for spec in (gemm.first, gemm.second)]
    settings = Float8LinearConfig(
        cast_config_input=cast(fprop.first, wgrad.second, "fp8_e4m3"),
        cast_config_input_for_grad_weight=cast(wgrad.second, fprop.first, "fp8_e4m3"),
        cast_config_weight=cast(fprop.second, dgrad.second, "fp8_e4m3"),
        cast_config_weight_for_grad_input=cast(dgrad.second, fprop.second, "fp8_e4m3"),
        cast_config_grad_output=cast(dgrad.first, wgrad.first, "fp8_e5m2"),
        cast_config_grad_output_for_grad_weight=cast(wgrad.first, dgrad.first, "fp8_e5m2"),
        gemm_config_output=Float8GemmConfig(use_fast_accum=fast["fprop"]),
        gemm_config_grad_input=Float8GemmConfig(use_fast_accum=fast["dgrad"]),
        gemm_config_grad_weight=Float8GemmConfig(use_fast_accum=fast["wgrad"]),
        round_scales_to_power_of_2=any(spec.pow2 for spec in specs),
        emulate=emulate,
    )
    products = (ScaledMMConfig(emulate, fast[path], False, False) for path in ("fprop", "dgrad", "wgrad"))
    return settings, LinearMMConfig(*products)


@lru_cache(maxsize=64)
def mx_settings(config: LinearConfig, emulate: bool) -> tuple[Any, ...]:
    """Return the arguments of torchao's MXFP8 product after the input and the weight."""
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    e4m3 = torch.float8_e4m3fn
    return (
        e4m3,
        e4m3,
        e4m3,
        MX_BLOCK,
        KernelPreference.EMULATED if emulate else KernelPreference.AUTO,
        MXFP8Dim0CastKernelChoice.TORCH if emulate else MXFP8Dim0CastKernelChoice.TRITON,
        MXFP8Dim1CastKernelChoice.TORCH if emulate else MXFP8Dim1CastKernelChoice.CUDA,
        ScaleCalculationMode.RCEIL if config.fprop.first.mx_scale == "rceil" else ScaleCalculationMode.FLOOR,
        config.wgrad.high_precision,
    )


def _multiply_float8(x: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> Tensor:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    config, products = settings
    return matmul_with_hp_or_float8_args.apply(x, weight.t(), products, config)


def _multiply_mx(x: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> Tensor:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm

    return mx_mm.apply(x, weight, *settings)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)
