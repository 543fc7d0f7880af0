"""NVIDIA Transformer Engine as a backend: one recipe object a layer, built-in where the layer maps onto one.

``te.Linear`` quantizes three tensors, each in two directions: *row-wise* data feeds the product that contracts the last
dimension, *column-wise* data the one that contracts the rows.

==========  ===============  ===============
tensor      row-wise         column-wise
==========  ===============  ===============
input       fprop.input      wgrad.input
weight      fprop.weight     dgrad.weight
grad        dgrad.grad       wgrad.grad
==========  ===============  ===============

A quantizer for both directions serves where the two specs are equal; a ``HybridQuantizer`` of two where they differ; an
``IdentityQuantizer`` where a direction is BF16. ``accumulate`` is ``use_split_accumulator`` of each product.

Where Transformer Engine differs in what it *does*: weight gradients come out of the product in the activation's dtype,
not in the weight's, and a scale is the rounded quotient max / amax rather than amax / max.

Sources: Transformer Engine 2.20.2, ``transformer_engine/common/recipe/__init__.py``,
``transformer_engine/pytorch/{quantization.py,module/linear.py,tensor/hybrid_tensor.py}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..capability import Device, Support, gemm_support
from ..config import GemmConfig, LinearConfig
from ..errors import NarrowgateError
from ..spec import Spec
from .base import ALIGNMENT, Backend, LayerFacts, not_linear, operands, unaligned

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Tensor -> the (path, operand) of its row-wise and of its column-wise data.
DIRECTIONS = {
    "input": ("fprop.input", "wgrad.input"),
    "weight": ("fprop.weight", "dgrad.weight"),
    "grad": ("dgrad.grad", "wgrad.grad"),
}
_MX_FORMATS = ("mxfp8", "mxfp8_e5m2")
_FP8_FORMATS = ("fp8_e4m3", "fp8_e5m2")


class TransformerEngineBackend(Backend):
    """``te.Linear`` under a recipe of its own, inside the user's ``nn.Linear``."""

    name = "transformer_engine"
    distribution = "transformer-engine"

    def available(self) -> tuple[bool, str]:
        """It needs the library and a GPU with FP8 matrix units; it emulates nothing."""
        version = self.version()
        if version is None or find_spec("transformer_engine") is None:
            return False, "transformer-engine is not installed; pip install 'narrowgate[te]' (needs CUDA)"
        import torch

        if not torch.cuda.is_available():
            return False, f"transformer-engine {version} runs on CUDA only, and this machine has no GPU"
        try:
            import transformer_engine.pytorch  # noqa: F401  # type: ignore[import-not-found]
        except (ImportError, OSError, RuntimeError) as error:
            return False, f"transformer-engine {version} does not load: {' '.join(str(error).split())}"
        return True, f"transformer-engine {version}"

    def inexpressible(self, config: LinearConfig, layer: LayerFacts | None, device: Device | None) -> dict[str, str]:
        """See :class:`Backend`."""
        reasons: dict[str, str] = {}
        for path, operand, spec, gemm in operands(config):
            reason = _operand(spec, device)
            if reason is not None:
                reasons[f"{path}.{operand}"] = reason
            elif spec.granularity in ("1x128", "128x128") and gemm.accumulate == "fast":
                reasons[f"{path}.accumulate"] = "block scales have no fast accumulation; say accurate"
        if not reasons:
            reasons = {**_directions(config), **_pairs(config)}
        reasons |= not_linear(layer, "Transformer Engine")
        odd = unaligned(config, layer, row_multiple(config))
        if odd is not None:
            reasons.setdefault("layers", odd)
        return reasons

    def support(self, gemm: GemmConfig, device: Device) -> Support:
        """Native, but for 128-blocks on Blackwell; what it cannot multiply natively is inexpressible."""
        if gemm.high_precision:
            return Support(native=True)
        if device.kind != "cuda" or device.capability is None:
            return Support(native=False, reason=f"Transformer Engine runs on CUDA only, not on {device.name}")
        block_scaled = gemm.first.fmt.block_scaled and gemm.second.fmt.block_scaled
        return Support(native=True) if block_scaled and device.capability[0] >= 10 else gemm_support(gemm, device)

    def owns(self, module: nn.Module) -> bool:
        """True for a layer that :meth:`lower` swapped."""
        from .te_linear import TransformerEngineLinear

        return isinstance(module, TransformerEngineLinear)

    def lower(
        self,
        module: nn.Module,
        config: LinearConfig,
        *,
        name: str = "",
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Swap the module's class; ``seed`` is not used, as nothing that is expressible is random."""
        there, reason = self.available()
        if not there:
            raise NarrowgateError(f"backend transformer_engine: {reason}")
        from .te_linear import lower

        lower(module, config, name)

    def restore(self, module: nn.Module) -> None:
        """Swap the class back; the ``te.Linear`` behind it goes."""
        from .swap import restore

        restore(module)

    def whole_model(self, configs: Sequence[LinearConfig]) -> str | None:
        """Delayed scales are updated for all layers at once, so all delayed layers follow one recipe."""
        delayed = {config for config in configs if delayed_steps(config) is not None}
        if len(delayed) > 1:
            return (
                "Transformer Engine updates the delayed scales of a model by one recipe, "
                f"found {len(delayed)} different ones among its layers"
            )
        return None

    def attach(self, model: nn.Module, configs: Sequence[LinearConfig]) -> None:
        """Delayed scaling advances once a forward of the whole model: open its region around that forward."""
        config = next((config for config in configs if delayed_steps(config) is not None), None)
        if config is not None:
            from .te_region import attach

            attach(model, config)

    def detach(self, model: nn.Module) -> None:
        """Close the region of delayed scaling for good."""
        from .te_region import detach

        detach(model)


def spec_at(config: LinearConfig, place: str) -> Spec:
    """Return the spec at ``path.operand``."""
    return next(spec for path, operand, spec, _ in operands(config) if f"{path}.{operand}" == place)


def delayed_steps(config: LinearConfig) -> int | None:
    """Return n where the layer's scales are ``delayed(n)``, else None."""
    return next((spec.delayed for _, _, spec, _ in operands(config) if spec.delayed is not None), None)


def row_multiple(config: LinearConfig) -> int:
    """Return what every size of a layer must be a multiple of: wgrad contracts rows, dgrad columns."""
    blocks = [spec.fmt.block or 0 for _, _, spec, _ in operands(config) if spec.fmt.block_scaled]
    return max(ALIGNMENT, *blocks, 0)


def _operand(spec: Spec, device: Device | None) -> str | None:
    """Say what of one operand Transformer Engine has no quantizer for."""
    if spec.sr:
        return (
            "Transformer Engine rounds stochastically from its own generator, in NVFP4 only: "
            "a recipe's sr is keyed and repeatable"
        )
    if spec.clip_p is not None or spec.clip_rms is not None:
        return "Transformer Engine clips nothing"
    if spec.hadamard is not None:
        return "Transformer Engine's Hadamard transform has random signs of its own, in NVFP4 only"
    if spec.high_precision:
        return None
    capability = None if device is None else device.capability
    if spec.fmt.block_scaled:
        if capability is not None and capability[0] < 10:
            assert device is not None
            return (
                f"Transformer Engine multiplies {spec.format} on Blackwell only, and emulates nothing on {device.name}"
            )
        if spec.format == "nvfp4":
            return None
        if spec.format not in _MX_FORMATS:
            return f"Transformer Engine's MX formats are {' and '.join(_MX_FORMATS)}, found {spec.format}"
        return None if spec.mx_scale == "rceil" else "Transformer Engine rounds MX scales up: say rceil, found floor"
    if spec.format not in _FP8_FORMATS:
        return f"Transformer Engine's scaled formats are {' and '.join(_FP8_FORMATS)}, found {spec.format}"
    if spec.granularity not in ("tensor", "1x128", "128x128"):
        return f"Transformer Engine's FP8 granularities are tensor, 1x128 and 128x128, found {spec.granularity}"
    return None


def _pairs(config: LinearConfig) -> dict[str, str]:
    """Products of two quantizable operands that no kernel of Transformer Engine multiplies."""
    reasons: dict[str, str] = {}
    for path, gemm in config.gemms():
        field = f"{path}.{'input' if path == 'wgrad' else 'weight'}"
        first, second = gemm.first, gemm.second
        if gemm.high_precision and first != second:
            reasons[field] = f"Transformer Engine multiplies two operands of one dtype, found {first} and {second}"
        elif _family(first) != _family(second):
            reasons[field] = f"Transformer Engine multiplies two operands of one scaling, found {first} and {second}"
        elif first.granularity == second.granularity == "128x128":
            reasons[field] = "no kernel multiplies 128x128 by 128x128 blocks"
        elif first.format.endswith("e5m2") and second.format.endswith("e5m2"):
            reasons[field] = "no matrix unit multiplies E5M2 by E5M2, and Transformer Engine emulates nothing"
    return reasons


def _directions(config: LinearConfig) -> dict[str, str]:
    """Tensors whose two directions no quantizer can make together."""
    reasons: dict[str, str] = {}
    steps = {(spec.delayed, spec.pow2) for _, _, spec, _ in operands(config) if spec.delayed is not None}
    for row_place, column_place in DIRECTIONS.values():
        row, column = spec_at(config, row_place), spec_at(config, column_place)
        if row == column:
            continue
        if row.delayed is not None or column.delayed is not None:
            reasons[column_place] = (
                f"Transformer Engine makes a delayed tensor once for both its products, "
                f"found {row} on {row_place} and {column} here"
            )
        elif not column.high_precision and column.granularity == "tensor":
            reasons[column_place] = (
                f"Transformer Engine makes tensor-scaled column-wise data only along with row-wise data of the same "
                f"format, found {row} on {row_place} and {column} here"
            )
    if steps:
        specs = {place: spec_at(config, place) for place, _ in DIRECTIONS.values()}
        for place, spec in specs.items():
            if spec.delayed is None:
                reasons.setdefault(
                    place, f"Transformer Engine's delayed recipe holds for a whole layer, found {spec} here"
                )
            elif spec.pow2:
                reasons.setdefault(place, "Transformer Engine's delayed scales are not powers of two")
            elif spec.format != "fp8_e4m3" and not place.endswith("grad"):
                reasons.setdefault(
                    place, f"Transformer Engine's delayed recipe is fp8_e4m3 forward, found {spec.format}"
                )
            elif spec.delayed != next(iter(specs.values())).delayed:
                reasons.setdefault(place, "Transformer Engine keeps one length of amax history a model")
    return reasons


def _family(spec: Spec) -> str:
    if spec.high_precision:
        return "dense"
    if spec.fmt.block_scaled:
        return "nvfp4" if spec.format == "nvfp4" else "mx"
    return "tensor" if spec.granularity == "tensor" else "block"
