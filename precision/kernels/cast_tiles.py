"""Which part of a matrix a program of a cast takes, where nobody has measured what is best (see ``tuning``)."""

from __future__ import annotations

from collections.abc import Sequence

from .operands import NO_LIMIT, RMS_LIMIT, Operand
from .program import Program
from .tuning import Tile

#: Rows and columns of a tile, the most tiles a program takes, and warps.
AMAX_TILE = (64, 128, 64, 4)
CAST_TILE = (32, 128, 1, 4)
#: Where instructions are what limits a cast, finding a tensor's scale is worth sharing.
STOCHASTIC_TILE = (32, 128, 2, 4)
#: With a history each program ends in a fence, so there are fewer of them.
HISTORY_TILE = (32, 128, 4, 4)
#: An RMS is found by each program anew, in FP64, from partial sums: by fewer of them still.
RMS_TILE = (32, 128, 8, 4)
#: Blocks of 128 need tiles of 128: by eight warps, of which two programs should fit a multiprocessor.
BLOCK_TILE = (128, 128, 1, 8)
#: Of a program with one of two operands by blocks of 1x128, for the one contracted over columns; the other's is turned.
APART_TILE = (32, 128, 1, 4)
#: Programs that keep every multiprocessor of a large GPU busy several times over: where there are more tiles than that,
#: a program takes several.
AMAX_PROGRAMS, CAST_PROGRAMS = 512, 2048


def usual_tile(operands: Sequence[Operand | None], *, history: bool) -> Tile:
    """Return the tile of a cast's kernel; ``history`` where a delayed scale comes from one."""
    asked = [operand for operand in operands if operand is not None]
    stochastic = any(operand.spec.sr for operand in asked)
    limited = any(operand.clip[0] == RMS_LIMIT for operand in asked)
    if any(operand.spec.block is not None for operand in asked):
        bm, bn, loop, warps = BLOCK_TILE
        return bm, bn, 4 if limited else loop, warps
    if limited:
        return RMS_TILE
    if history:
        return HISTORY_TILE
    shared = stochastic and any(operand.spec.granularity == "tensor" for operand in asked)
    return STOCHASTIC_TILE if shared else CAST_TILE


def fitted(tile: Tile, count: int, width: int, programs: int) -> Tile:
    """Return ``tile`` with as many tiles a program as leave about ``programs`` of them of a [count, width] matrix."""
    bm, bn, most, warps = tile
    tiles = -(-count // bm) * -(-width // bn)
    return bm, bn, max(1, min(most, tiles // programs)), warps


def operands_apart(program: Program, operands: Sequence[Operand | None]) -> bool:
    """Whether each operand has programs of its own: 1x128 both ways, of values that need not be computed."""
    both = [o for o in operands if o is not None and o.spec.granularity == "1x128" and o.clip[0] == NO_LIMIT]
    return not program.instructions and program.pieces == 1 and len(both) == 2
