"""Kernels with everything decided but their pointers, so that launching them again costs little."""

# Triton comes with CUDA builds of PyTorch only.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
import triton

from .operands import Operand
from .partials import SUMS_TILE, quantized_sums_kernel, scale_kernel

_INTERPRETED = triton.knobs.runtime.interpret
#: Whether launchers are those that are known here: they have no published interface.
_KNOWN = triton.__version__.startswith("3.6.") and torch.version.hip is None


class Launch:
    """One kernel with everything decided but its pointers; compiled at the first call."""

    def __init__(
        self, kernel: Any, grid: tuple[int, int], warps: int, constants: dict[str, Any], registers: int | None = None
    ) -> None:
        """Decide on a kernel, its grid, a program's warps, compile-time constants and most ``registers`` a thread."""
        self.kernel, self.grid, self.warps, self.constants = kernel, grid, warps, constants
        #: What Triton compiles with, beside constants; its interpreter takes no limit, and has no registers.
        self.options = {"num_warps": warps}
        if registers is not None and not _INTERPRETED:
            self.options["maxnreg"] = registers
        self.compiled: Any = None
        names = kernel.arg_names
        self.tail = tuple(constants[name] for name in names[len(names) - len(constants) :])

    def first(self, keep: bool, *arguments: Any) -> None:
        """Launch through Triton, which compiles what it has not seen; ``keep`` the result for :meth:`again`."""
        compiled = self.kernel[self.grid](*arguments, **self.constants, **self.options)
        if keep and not _INTERPRETED:
            run, fixed = _launcher(compiled.run)
            self.compiled = run, (compiled.function, *fixed, compiled.packed_metadata, None, None, None)

    def again(self, stream: int, *arguments: Any) -> None:
        """Launch what was compiled on ``stream``; addresses, not tensors. Triton's launch hooks do not see it.

        For each tensor the launcher would ask the driver whose memory it is.
        """
        run, fixed = self.compiled
        run(*self.grid, 1, stream, *fixed, *arguments, *self.tail)


def _launcher(run: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what launches, and what it takes between the function and its metadata.

    That is the C function itself where all that Triton's wrapper does is to find that no scratch memory is asked for.
    """
    known = _KNOWN and not run.global_scratch_size and not run.profile_scratch_size
    return (run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)) if known else (run, ())


def most_registers(warps: int, *, blocked: bool, tensor: bool) -> int | None:
    """Return the registers a thread at which programs of a stochastic cast share a multiprocessor.

    Some draw and compute then, while others wait for memory. The limits are of Hopper's and
    Blackwell's 65,536 registers, given out by eights. They are for what spills little within them; None for others.

    Args:
        warps: of a program.
        blocked: by blocks of 128, without sums of columns: two programs of eight warps.
        tensor: with scales of tensors that are found before, by their amax alone: five programs of four warps.
    """
    if blocked and warps == 8:
        return 128
    return 96 if tensor and warps == 4 else None


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
