"""What a backend is: a library that runs a layer's three GEMMs, and an honest account of what it cannot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from ..capability import Device, Support
from ..config import OPERANDS, GemmConfig, LinearConfig
from ..spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import nn

#: FP8 matrix units multiply sizes that are multiples of this many elements.
ALIGNMENT = 16


@dataclass(frozen=True)
class LayerFacts:
    """What a backend may need to know of a layer besides its configuration."""

    name: str
    in_features: int
    out_features: int
    #: An ``nn.Linear``: not a batched product, attention's projections or grouped experts.
    linear: bool = True


class Backend(ABC):
    """One library that recipes lower to. Every answer but :meth:`lower` is given without importing the library."""

    #: As recipes and flags spell it.
    name: str
    #: The distribution that brings it.
    distribution: str

    def version(self) -> str | None:
        """Return the installed version of the distribution, or None."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    @abstractmethod
    def available(self) -> tuple[bool, str]:
        """Return whether it can run here, with the version it is or the reason why not."""

    @abstractmethod
    def inexpressible(self, config: LinearConfig, layer: LayerFacts | None, device: Device | None) -> dict[str, str]:
        """Return what of ``config`` this backend cannot run, by ``path.operand``, ``path.accumulate`` or ``layers``.

        Args:
            config: the three GEMMs.
            layer: its shape; None where only a rule is known, and shapes are not judged.
            device: where it would run; None for any.
        """

    @abstractmethod
    def support(self, gemm: GemmConfig, device: Device) -> Support:
        """Say whether this backend multiplies an expressible ``gemm`` on ``device``'s matrix units."""

    @abstractmethod
    def owns(self, module: nn.Module) -> bool:
        """Return whether ``module`` was lowered by this backend."""

    @abstractmethod
    def lower(
        self,
        module: nn.Module,
        config: LinearConfig,
        *,
        name: str = "",
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Make ``module`` run ``config``, in place: Parameters, names, hooks and ``isinstance(m, nn.Linear)`` stay.

        Args:
            module: the layer.
            config: its three GEMMs.
            name: its name in its model, for its errors and random streams.
            seed: seed of the random streams.
            device: where a module without Parameters will run; the others run where their weight lies.

        Raises:
            NarrowgateError: the module is low-precision already, has a forward of its own, or the library is missing.
        """

    @abstractmethod
    def restore(self, module: nn.Module) -> None:
        """Undo :meth:`lower`: the module is what it was, with the Parameters it has now."""

    def whole_model(self, configs: Sequence[LinearConfig]) -> str | None:
        """Say why these layers cannot be in one model together; None where they can."""
        return None

    def attach(self, model: nn.Module, configs: Sequence[LinearConfig]) -> None:
        """Give the model what its layers need around them, after they are lowered; most need nothing."""
        return

    def detach(self, model: nn.Module) -> None:
        """Take off what :meth:`attach` gave."""
        return


def operands(config: LinearConfig) -> list[tuple[str, str, Spec, GemmConfig]]:
    """Return (path, operand, its format, its GEMM) of all six operands."""
    return [
        (path, operand, spec, gemm)
        for path, gemm in config.gemms()
        for operand, spec in zip(OPERANDS[path], (gemm.first, gemm.second), strict=True)
    ]


def not_linear(layer: LayerFacts | None, backend: str) -> dict[str, str]:
    """Return the one reason against a layer that is no ``nn.Linear``, where a backend lowers nothing else."""
    if layer is None or layer.linear:
        return {}
    return {"layers": f"{backend} lowers nn.Linear only"}


def unaligned(config: LinearConfig, layer: LayerFacts | None, alignment: int) -> str | None:
    """Say which dimension of a low-precision layer is no multiple of ``alignment``; None where both are."""
    if layer is None or config.high_precision:
        return None
    for what, size in (("in_features", layer.in_features), ("out_features", layer.out_features)):
        if size % alignment:
            return f"{what} {size} is no multiple of {alignment}, and it pads no weights"
    return None
