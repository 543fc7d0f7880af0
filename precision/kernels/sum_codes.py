"""Sums over ranks of gradients that arrived as codes and scales: decoded, scaled, added and rounded in one pass.

With single operations the decoded values, the scaled ones and the sums each go through memory in FP32. Here a code is
read once and a sum is written once: ranks + 2 bytes an element for a BF16 sum of FP8 codes.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .device import current_for

_INTERPRETED = triton.knobs.runtime.interpret
#: What one scale reaches.
_UNSCALED, _TENSOR, _ROW, _BLOCK = (tl.constexpr(i) for i in range(4))
#: What becomes of a sum.
_KEPT, _DIVIDED, _MULTIPLIED = (tl.constexpr(i) for i in range(3))
_ENDS = {"": 0, "divide": 1, "multiply": 2}
_ROWS, _COLUMNS, _WARPS = 16, 256, 4


@triton.jit
def sum_kernel(
    codes, scales, out, ranks, codes_line, scales_line, M, N, first, across, factor,
    SCALED: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, END: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Add up [M, N] elements of each rank in the order of ranks, in FP32, no product fused with a sum.

    Args:
        codes: the first rank's, row-major; the next rank's lie ``codes_line`` elements further.
        scales: FP32, the first rank's; the next rank's lie ``scales_line`` elements further.
        out: [M, N].
        ranks: how many.
        codes_line: see there.
        scales_line: see there.
        M: rows that this rank keeps.
        N: columns.
        first: index of the first of them in the whole matrix, whose blocks begin at its own first row.
        across: blocks in a row.
        factor: what a sum is divided or multiplied by.
        SCALED: what a scale reaches; for blocks, HEIGHT by WIDTH elements.
        HEIGHT: see there.
        WIDTH: see there.
        END: what becomes of a sum.
        BM: rows of a tile.
        BN: columns of a tile.
    """
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None] * N + n[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for rank in range(ranks):
        place = tl.cast(rank, tl.int64)
        value = tl.load(codes + place * codes_line + at, mask=inside, other=0.0).to(tl.float32)
        if SCALED != _UNSCALED:
            own = scales + place * scales_line
            if SCALED == _TENSOR:
                scale = tl.full([1, 1], tl.load(own), tl.float32)
            elif SCALED == _ROW:
                scale = tl.load(own + m, mask=m < M, other=0.0)[:, None]
            else:
                down = (m + first) // HEIGHT - first // HEIGHT
                scale = tl.load(own + down[:, None] * across + (n // WIDTH)[None, :], mask=inside, other=0.0)
            value = value * scale
        total += value
    if END == _DIVIDED:
        total = tl.div_rn(total, tl.full([1, 1], factor, tl.float32))
    elif END == _MULTIPLIED:
        total = total * factor
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def launch_sum(
    codes: Tensor,
    scales: Tensor | None,
    out: Tensor,
    *,
    columns: int,
    block: tuple[int, int] | None,
    tensor: bool,
    first: int,
    end: tuple[str, float],
) -> None:
    """Write the sums of decoded ``codes`` to ``out``.

    Args:
        codes: [ranks, rows * columns] of FP8 or BF16; a rank's are contiguous.
        scales: FP32 [ranks, n], a rank's contiguous; None where there are none.
        out: [rows * columns], contiguous, of a floating dtype; sums are FP32 before they are rounded to it.
        columns: of a row.
        block: rows and columns that share a scale; None for a row of any length.
        tensor: whether there is one scale for all of a rank's elements.
        first: index of the first row in the matrix of all ranks, which blocks are counted from.
        end: "" or "divide" or "multiply", and by what.
    """
    rows = out.numel() // columns
    height, width = block or (1, columns)
    kind = _UNSCALED if scales is None else _TENSOR if tensor else _BLOCK if block is not None else _ROW
    blocks = (height, width) if block is not None else (1, 1)  # a row's length is no constant of a kernel
    options: dict[str, Any] = {"num_warps": _WARPS}
    if not _INTERPRETED:
        options["enable_fp_fusion"] = False
    grid = triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS)
    with current_for(codes):
        sum_kernel[grid](
            codes, codes if scales is None else scales, out, len(codes), codes.stride(0),
            0 if scales is None else scales.stride(0), rows, columns, first, triton.cdiv(columns, width), end[1],
            SCALED=kind, HEIGHT=blocks[0], WIDTH=blocks[1], END=_ENDS[end[0]], BM=_ROWS, BN=_COLUMNS, **options,
        )  # fmt: skip
