"""The backend of our own layers, :mod:`narrowgate.precision.linear`: it expresses the whole language."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..capability import Device, Support, gemm_support
from ..config import GemmConfig, LinearConfig
from .base import Backend, LayerFacts

if TYPE_CHECKING:
    from torch import nn


class NativeBackend(Backend):
    """Our own layers: every format everywhere, natively where the device can, emulated where it cannot."""

    name = "native"
    distribution = "torch"

    def available(self) -> tuple[bool, str]:
        """It is always there: PyTorch is all it needs."""
        return True, f"torch {self.version()}"

    def inexpressible(self, config: LinearConfig, layer: LayerFacts | None, device: Device | None) -> dict[str, str]:
        """Nothing is: what the language says, these layers mean."""
        return {}

    def support(self, gemm: GemmConfig, device: Device) -> Support:
        """As :func:`narrowgate.precision.capability.gemm_support` says."""
        return gemm_support(gemm, device)

    def owns(self, module: nn.Module) -> bool:
        """True for a :class:`narrowgate.precision.linear.LowPrecisionLinear`."""
        from ..linear import LowPrecisionLinear

        return isinstance(module, LowPrecisionLinear)

    def lower(self, module: nn.Linear, config: LinearConfig, *, name: str = "", seed: int = 0) -> None:
        """Swap the module's class: :func:`narrowgate.precision.linear.lower_linear`."""
        from ..linear import lower_linear

        lower_linear(module, config, name=name, seed=seed)

    def restore(self, module: nn.Linear) -> None:
        """Swap the class back: :func:`narrowgate.precision.linear.restore_linear`."""
        from ..linear import LowPrecisionLinear, restore_linear

        assert isinstance(module, LowPrecisionLinear)
        restore_linear(module)
