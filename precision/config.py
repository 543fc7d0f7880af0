"""What one linear layer does on each of its three GEMMs: the value that a resolved recipe hands to a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .spec import Spec

#: The GEMM paths of y = x W^T and the two operands of each, in the order (first, second) of the product.
OPERANDS: dict[str, tuple[str, str]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad", "weight"),
    "wgrad": ("grad", "input"),
}
PATHS = tuple(OPERANDS)
ACCUMULATES = ("fast", "accurate")

_BF16 = Spec(format="bf16")


@dataclass(frozen=True)
class GemmConfig:
    """One GEMM: its two operands in the order of :data:`OPERANDS`, and how it accumulates."""

    first: Spec = _BF16
    second: Spec = _BF16
    #: ``fast`` keeps partial sums in the tensor core's narrow accumulator, ``accurate`` promotes them to FP32.
    accumulate: str = "accurate"

    @property
    def high_precision(self) -> bool:
        """True where neither operand is quantized."""
        return self.first.high_precision and self.second.high_precision


@dataclass(frozen=True)
class LinearConfig:
    """The three GEMMs of a linear layer y [M,N] = x [M,K] W^T, W [N,K]."""

    fprop: GemmConfig = field(default_factory=GemmConfig)
    dgrad: GemmConfig = field(default_factory=GemmConfig)
    wgrad: GemmConfig = field(default_factory=GemmConfig)

    def gemms(self) -> Iterator[tuple[str, GemmConfig]]:
        """Yield (path, its configuration) in the order fprop, dgrad, wgrad."""
        for path in PATHS:
            yield path, getattr(self, path)

    @property
    def high_precision(self) -> bool:
        """True where the layer is left exactly as it was."""
        return all(gemm.high_precision for _, gemm in self.gemms())
