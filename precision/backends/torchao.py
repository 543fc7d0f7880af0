"""torchao's FP8 and MXFP8 training as a backend: ``Float8LinearConfig`` and the products of its MXFP8 training.

What torchao calls a configuration has six operand casts, three GEMM settings and one switch for powers of two; a
:class:`~narrowgate.precision.config.LinearConfig` maps onto it field by field, layer by layer. Where torchao differs in
what it *does*, it is said here and in docs/backends.md:

- Activations are saved for backward unquantized and quantized again there; the codes are the same.
- ``row`` scales with ``accumulate: accurate`` run as an unscaled tensor-wise product that is scaled afterwards in the
  output's dtype, because PyTorch's row-wise kernel is slow without fast accumulation.
- An unquantized operand keeps the dtype it comes in, so the layer computes in BF16 where a path is ``bf16``.
- A scale is at least max / 1e-12, so an amax below 1e-12 counts as 1e-12.

Sources: torchao 0.18, ``torchao/float8/{config,float8_linear,float8_ops}.py`` and
``torchao/prototype/moe_training/mxfp8_linear.py``.
"""

from __future__ import annotations

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

#: Elements that share an MX scale; torchao wants every size a multiple of it.
MX_BLOCK = 32
_FORMATS = ("fp8_e4m3", "fp8_e5m2")
#: The two paths of each tensor.
_TENSORS = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad": ("dgrad", "wgrad")}


class TorchaoBackend(Backend):
    """torchao's ``Float8Linear`` and ``MXFP8Linear``, without their modules."""

    name = "torchao"
    distribution = "torchao"

    def available(self) -> tuple[bool, str]:
        """It is there where torchao is; without FP8 matrix units it emulates."""
        version = self.version()
        if version is None or find_spec("torchao") is None:
            return False, "torchao is not installed; pip install 'narrowgate[torchao]'"
        return True, f"torchao {version}"

    def inexpressible(self, config: LinearConfig, layer: LayerFacts | None, device: Device | None) -> dict[str, str]:
        """See :class:`Backend`."""
        reasons: dict[str, str] = {}
        for path, operand, spec, _ in operands(config):
            reason = _operand(spec)
            if reason is not None:
                reasons[f"{path}.{operand}"] = reason
        if not reasons:
            reasons = _mx(config) if is_mx(config) else _float8(config)
        reasons |= not_linear(layer, "torchao")
        odd = unaligned(config, layer, MX_BLOCK if is_mx(config) else ALIGNMENT)
        if odd is not None:
            reasons.setdefault("layers", odd)
        return reasons

    def support(self, gemm: GemmConfig, device: Device) -> Support:
        """Native where FP8 matrix units are: torchao then emulates none of what it can express."""
        if gemm.first.fmt.block_scaled or gemm.second.fmt.block_scaled:
            if device.capability is not None and device.capability[0] >= 10:
                return Support(native=True)
            return Support(native=False, reason=f"torchao multiplies MXFP8 on Blackwell only, not on {device.name}")
        return gemm_support(gemm, device)

    def owns(self, module: nn.Module) -> bool:
        """True for a layer that :meth:`lower` swapped."""
        from .torchao_linear import TorchaoLinear

        return isinstance(module, TorchaoLinear)

    def lower(
        self,
        module: nn.Module,
        config: LinearConfig,
        *,
        name: str = "",
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Swap the module's class; ``seed`` is not used, as nothing that torchao can express is random."""
        there, reason = self.available()
        if not there:
            raise NarrowgateError(f"backend torchao: {reason}")
        from .torchao_linear import lower

        lower(module, config, name)

    def restore(self, module: nn.Module) -> None:
        """Swap the class back."""
        from .swap import restore

        restore(module)


def is_mx(config: LinearConfig) -> bool:
    """Return whether any operand is in an MX format: the layer then runs torchao's MXFP8 training."""
    return any(spec.mx_scale is not None for _, _, spec, _ in operands(config))


def _operand(spec: Spec) -> str | None:
    """Say what of one operand torchao has no setting for."""
    if spec.sr:
        return "stochastic rounding (sr) is not part of torchao's FP8 and MXFP8 training"
    if spec.clip_p is not None or spec.clip_rms is not None:
        return "torchao clips nothing"
    if spec.hadamard is not None:
        return "torchao's FP8 and MXFP8 training has no Hadamard transform"
    if spec.delayed is not None:
        return f"torchao deleted delayed scaling, found delayed({spec.delayed}); only dynamic scales"
    if spec.format == "fp32":
        return "an unquantized operand has the dtype that the layer computes in: fp32 cannot be asked for"
    if spec.high_precision:
        return None
    if spec.format == "nvfp4":
        return (
            "torchao's NVFP4 training always rounds stochastically from the global generator and draws its own "
            "Hadamard signs: neither is what a recipe means"
        )
    if spec.mx_scale is not None:
        if spec.format != "mxfp8":
            return f"torchao's MX training multiplies mxfp8 only, found {spec.format}"
        return None if spec.granularity == "1x32" else f"torchao has no square MX blocks, found /{spec.granularity}"
    if spec.format not in _FORMATS:
        return f"torchao's scaled formats are {' and '.join(_FORMATS)}, found {spec.format}"
    if spec.granularity not in ("tensor", "row"):
        return f"torchao's granularities are tensor and row, found {spec.granularity}"
    return None


def _float8(config: LinearConfig) -> dict[str, str]:
    """What ``Float8LinearConfig`` cannot hold of operands that each for itself it can."""
    reasons: dict[str, str] = {}
    for path, gemm in config.gemms():
        if gemm.first.format == gemm.second.format == "fp8_e5m2":
            second = "input" if path == "wgrad" else "weight"
            reasons[f"{path}.{second}"] = "no matrix unit multiplies E5M2 by E5M2, and torchao emulates on no GPU"
    for operand, paths in _TENSORS.items():
        specs = [s for p, o, s, _ in operands(config) if o == operand and p in paths and not s.high_precision]
        if len(specs) == 2 and specs[0].format != specs[1].format:
            reasons.setdefault(
                f"{paths[1]}.{operand}",
                f"torchao casts a tensor to one format for both its products, "
                f"found {specs[0].format} on {paths[0]} and {specs[1].format} here",
            )
    scaled = [(f"{p}.{o}", s) for p, o, s, _ in operands(config) if not s.high_precision]
    for field, spec in scaled[1:]:
        if spec.pow2 != scaled[0][1].pow2:
            reasons.setdefault(
                field,
                f"torchao rounds all scales of a layer to powers of two or none, "
                f"found pow2 {'here' if spec.pow2 else f'on {scaled[0][0]}'} only",
            )
    return reasons


def _mx(config: LinearConfig) -> dict[str, str]:
    """What torchao's MXFP8 training cannot hold: fprop and dgrad always, wgrad or not, one way to make scales."""
    reasons: dict[str, str] = {}
    wanted = config.fprop.first
    for path, operand, spec, gemm in operands(config):
        if path == "wgrad" and gemm.high_precision:
            continue
        if spec.mx_scale is None:
            reasons[f"{path}.{operand}"] = (
                f"torchao's MXFP8 training quantizes fprop and dgrad alike, found {spec} here"
            )
        elif wanted.mx_scale is not None and spec.mx_scale != wanted.mx_scale:
            reasons[f"{path}.{operand}"] = (
                f"torchao makes all MX scales of a layer one way, found {wanted.mx_scale} on fprop.input "
                f"and {spec.mx_scale} here"
            )
    reasons.update(
        (f"{path}.accumulate", "torchao's MXFP8 products have no fast accumulation")
        for path, gemm in config.gemms()
        if gemm.accumulate == "fast" and not gemm.high_precision
    )
    return reasons
