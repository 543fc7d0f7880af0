"""The cast kernels' programs written in BF16 instead: what is left of a fused cast when its format is taken away.

One arm of every comparison runs on it (``bf16_fused``), so that the gain of fewer passes over memory is told apart from
the gain of a smaller format.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cast_operators import matrix
from .cast_tiles import CAST_TILE
from .compiled import Launch
from .device import current_for
from .launch import CACHED
from .leaves import LeafLayout
from .operands import empty
from .program import Program, tile_function
from .tiles import inside_of


@triton.jit
def write_kernel(
    leaves, strides, M, N, out,
    TILE: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write the [M, N * PIECES] values of a program, rounded to nearest."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside_m, inside_n = inside_of(m, M, EVEN), inside_of(n, N, EVEN)
    values = TILE(leaves, strides, m, n, inside_m, inside_n, ALIGNED)
    for p in tl.static_range(PIECES):
        at = out + m[:, None] * (N * PIECES) + (p * N + n)[None, :]
        tl.store(at, values[p].to(out.dtype.element_ty), mask=inside_m[:, None] & inside_n[None, :])


class _Write:
    """One write with everything decided but its addresses."""

    def __init__(self, program: Program, leaves: Sequence[Tensor]) -> None:
        self.count, self.width = matrix(leaves, program)
        self.shape = (self.count, self.width * program.pieces)
        self.layout = LeafLayout(leaves, program)
        bm, bn, _, warps = CAST_TILE
        constants: dict[str, Any] = {
            "TILE": tile_function(str(program)), "PIECES": program.pieces,
            "ALIGNED": self.layout.aligned,
            "EVEN": self.count % bm == 0 and self.width % bn == 0, "BM": bm, "BN": bn,
        }  # fmt: skip
        grid = (triton.cdiv(self.count, bm), triton.cdiv(self.width, bn))
        self.launch = Launch(write_kernel, grid, warps, constants)

    def run(self, leaves: Sequence[Tensor]) -> Tensor:
        """Launch; return the matrix."""
        out = empty(self.shape, torch.bfloat16, leaves[0].device)
        if out.numel() == 0:
            return out
        flat = self.layout.flat(leaves)
        addresses = tuple([leaf.data_ptr() for leaf in flat])
        aligned = all(address % 16 == 0 for address in addresses)
        size = (self.count, self.width)
        if self.launch.compiled is not None and aligned:
            stream = torch._C._cuda_getCurrentRawStream(out.device.index)
            self.launch.again(stream, addresses, self.layout.strides, *size, out.data_ptr())
        else:
            self.launch.first(aligned, flat, self.layout.strides, *size, out)
        return out


_writes: dict[Any, _Write] = {}


def launch_write(leaves: Sequence[Tensor], program: str) -> Tensor:
    """Return the values of ``program`` over ``leaves`` as one contiguous BF16 matrix [M, N * pieces]."""
    key = (program, tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves))
    found = _writes.get(key)
    if found is None:
        if len(_writes) >= CACHED:
            _writes.clear()
        found = _writes[key] = _Write(Program.parse(program), leaves)
    with current_for(leaves[0]):
        return found.run(leaves)
