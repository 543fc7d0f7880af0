"""Kernels with everything decided but their pointers, so that launching them again costs little."""

# Triton comes with CUDA builds of PyTorch only.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import triton

from .operands import Operand
from .partials import SUMS_TILE, quantized_sums_kernel, scale_kernel

_INTERPRETED = triton.knobs.runtime.interpret


class Launch:
    """One kernel with everything decided but its pointers; compiled at the first call."""

    def __init__(self, kernel: Any, grid: tuple[int, int], warps: int, constants: dict[str, Any]) -> None:
        self.kernel, self.grid, self.warps, self.constants = kernel, grid, warps, constants
        self.compiled: Any = None
        names = kernel.arg_names
        self.tail = tuple(constants[name] for name in names[len(names) - len(constants) :])

    def first(self, keep: bool, *arguments: Any) -> None:
        """Launch through Triton, which compiles what it has not seen; ``keep`` the result for :meth:`again`."""
        compiled = self.kernel[self.grid](*arguments, **self.constants, num_warps=self.warps)
        if keep and not _INTERPRETED:
            self.compiled = compiled.run, compiled.function, compiled.packed_metadata

    def again(self, stream: int, *arguments: Any) -> None:
        """Launch what was compiled on ``stream``; addresses, not tensors.

        For each tensor the launcher would ask the driver whose memory it is.
        """
        run, function, metadata = self.compiled
        run(*self.grid, 1, stream, function, metadata, None, None, None, *arguments, *self.tail)


def scale_launch(operand: Operand | None, size: int, parts: int) -> tuple[Launch, int, int]:
    """Return what makes ``size`` scales of an operand of ``parts`` partial maxima each, and its two counts."""
    assert operand is not None
    element = operand.spec.fmt.element
    constants = {"MAX": element.max, "POW2": operand.spec.pow2, "CLIP": operand.clip[0],
                 "RMS": operand.clip[1], "PARTS": 32, "BLOCK": 128}  # fmt: skip
    return Launch(scale_kernel, (triton.cdiv(size, 128), 1), 4, constants), parts, size


def sums_launch(parts: int, size: int) -> tuple[Launch, int, int]:
    """Return what adds ``parts`` partial sums of ``size`` columns, and its two counts."""
    rows, columns = SUMS_TILE
    constants = {"PARTS": rows, "BLOCK": columns}
    return Launch(quantized_sums_kernel, (triton.cdiv(size, columns), 1), 4, constants), parts, size
