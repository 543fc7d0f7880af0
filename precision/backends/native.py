"""The backend of our own layers, :mod:`narrowgate.precision.linear`: it expresses the whole language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..capability import Device, Support, gemm_support
from ..config import GemmConfig, LinearConfig
from .base import Backend, LayerFacts

if TYPE_CHECKING:
    import torch
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
        """True for a :class:`narrowgate.precision.layer.LowPrecisionLayer`."""
        from ..layer import LowPrecisionLayer

        return isinstance(module, LowPrecisionLayer)

    def lower(
        self,
        module: nn.Module,
        config: LinearConfig,
        *,
        name: str = "",
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Swap the module's class: linear layers, grouped experts, attention's projections, batched products."""
        from torch import nn

        from ..attention import lower_attention
        from ..grouped import GroupedLinear, lower_grouped
        from ..linear import lower_linear
        from ..matmul import MatMul, lower_matmul

        if isinstance(module, MatMul):
            lower_matmul(module, config, name=name, seed=seed, device=device or "cpu")
        elif isinstance(module, GroupedLinear):
            lower_grouped(module, config, name=name, seed=seed)
        elif isinstance(module, nn.MultiheadAttention):
            lower_attention(module, config, name=name, seed=seed)
        else:
            assert isinstance(module, nn.Linear), type(module)
            lower_linear(module, config, name=name, seed=seed)

    def restore(self, module: nn.Module) -> None:
        """Swap the class back: :func:`narrowgate.precision.layer.restore_layer`."""
        from ..layer import LowPrecisionLayer, restore_layer

        assert isinstance(module, LowPrecisionLayer)
        restore_layer(module)

    def attach(self, model: nn.Module, configs: Sequence[LinearConfig]) -> None:
        """See to what its layers cannot from inside: :func:`narrowgate.precision.surroundings.prepare_model`."""
        from ..surroundings import prepare_model

        prepare_model(model)

    def detach(self, model: nn.Module) -> None:
        """Undo :meth:`attach`."""
        from ..surroundings import release_model

        release_model(model)
