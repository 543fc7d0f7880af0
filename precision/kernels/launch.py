"""Launching the cast kernels: tensors in, tensors out, and the tile sizes for a shape."""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ..casting import empty_operand, granularity_code, matrix, overflow
from ..spec import Spec
from ..stochastic import random_bits
from .cast import amax_kernel, cast_kernel
from .program import Program, tile_function

#: Triton's interpreter converts to FP8 by truncation: there every rounding is done by steps.
_INTERPRETED = triton.knobs.runtime.interpret
_NO_SR, _PHILOX, _GIVEN = 0, 1, 2
#: Rows and columns of a tile, tiles a program (amax only), and warps.
AMAX_TILE = (32, 128, 8, 4)
CAST_TILE = (64, 128, 4)
#: Blocks of 128 need tiles of 128.
BLOCK_TILE = (128, 128, 8)


@dataclass(frozen=True, eq=False)
class Operand:
    """What one operand is cast to, and with what."""

    spec: Spec
    key: Tensor | None = None
    bits: Tensor | None = None
    limit: Tensor | None = None


@dataclass(frozen=True)
class _Values:
    """The inputs of a program as kernels take them."""

    leaves: tuple[Tensor, ...]
    strides: tuple[int, ...]
    aligned: bool
    rows: int
    #: Of one result.
    columns: int
    program: Program

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns * self.program.pieces


def launch_cast(
    leaves: Sequence[Tensor], program: Program, rows: Operand | None, columns: Operand | None, *, same: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``narrowgate::cast_fp8``."""
    values = _values(leaves, program)
    like, shape = values.leaves[0], values.shape
    codes, scale = empty_operand(like, rows and rows.spec, shape, 1)
    second = rows if same else columns
    turned, second_scale = empty_operand(like, second and second.spec, shape, 0, scaled=not same)
    if like.numel() == 0 or shape[0] * shape[1] == 0:
        # Nothing to find a maximum of: the scales of empty groups are 1.
        return codes, scale.fill_(1.0), turned, second_scale.fill_(1.0)
    tensor_amax, row_amax, column_amax = _partial_amaxes(values, rows, columns)
    r_amax = row_amax if rows is not None and rows.spec.granularity == "row" else tensor_amax
    c_amax = column_amax if columns is not None and columns.spec.granularity == "row" else tensor_amax
    _cast(
        values,
        (rows, codes, scale, r_amax),
        (columns, turned, second_scale, c_amax),
        same=same,
    )
    return codes, scale, turned, second_scale


def launch_delayed_cast(
    leaves: Sequence[Tensor],
    program: Program,
    operand: Operand,
    rows: bool,
    columns: bool,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    recording: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``narrowgate::cast_fp8_delayed``."""
    values = _values(leaves, program)
    like, shape = values.leaves[0], values.shape
    codes, scale = empty_operand(like, operand.spec if rows else None, shape, 1)
    turned, _ = empty_operand(like, operand.spec if columns else None, shape, 0, scaled=False)
    scale = scale if rows else like.new_empty((), dtype=torch.float32)
    if shape[0] * shape[1] == 0:
        return codes, turned, scale.fill_(1.0)
    amax, _, _ = _partial_amaxes(values, operand, None, history=state[0])
    _cast(
        values,
        (operand if rows else None, codes, scale, amax),
        (operand if columns and not rows else None, turned, scale, amax),
        same=rows and columns,
        state=state,
        recording=recording,
    )
    return codes, turned, scale


def _values(leaves: Sequence[Tensor], program: Program) -> _Values:
    rows, columns = matrix(leaves, program)
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in leaves))
    flat, strides = [], []
    aligned = True
    for leaf, kind in zip(leaves, program.leaves, strict=True):
        if kind == "mn":
            leaf = leaf.expand(shape).reshape(rows, columns)
            if leaf.stride(1) != 1 and columns > 1:
                leaf = leaf.contiguous()
            stride = leaf.stride(0) if rows > 1 else columns
            aligned = aligned and stride % 8 == 0
        elif kind == "m":
            leaf = leaf.expand(*shape[:-1], 1).reshape(rows)
            stride = leaf.stride(0)
        else:
            leaf, stride = leaf.reshape(-1).contiguous(), 0
        flat.append(leaf)
        strides.append(stride)
    return _Values(tuple(flat), tuple(strides), aligned, rows, columns, program)


def _partial_amaxes(
    values: _Values, rows: Operand | None, columns: Operand | None, history: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Partial maxima of the values, int32: of all [P], by row [T, M], by column [S, N]; None where no scale asks."""
    granularities = [operand and operand.spec.granularity for operand in (rows, columns)]
    by_tensor, by_row, by_column = "tensor" in granularities, granularities[0] == "row", granularities[1] == "row"
    if not (by_tensor or by_row or by_column):
        return None, None, None
    like = values.leaves[0]
    bm, bn, loop, warps = AMAX_TILE
    grid = (triton.cdiv(values.rows, bm * loop), triton.cdiv(values.columns, bn))
    pieces = values.program.pieces

    def room(wanted: bool, *size: int) -> Tensor | None:
        return like.new_empty(size, dtype=torch.int32) if wanted else None

    found = (
        room(by_tensor, grid[0] * grid[1]),
        room(by_row, grid[1] * pieces, values.rows),
        room(by_column, grid[0], values.shape[1]),
    )
    amax_kernel[grid](
        values.leaves, values.strides, values.rows, values.columns, *(_or(t, like) for t in found),
        _or(history, like), 0 if history is None else history.numel(),
        TILE=tile_function(str(values.program)), PIECES=pieces, BY_TENSOR=by_tensor, BY_ROW=by_row,
        BY_COLUMN=by_column, HISTORY=_padded(history), ALIGNED=values.aligned, BM=bm, BN=bn, LOOP=loop,
        num_warps=warps,
    )  # fmt: skip
    return found


def _cast(
    values: _Values,
    first: tuple[Operand | None, Tensor, Tensor, Tensor | None],
    second: tuple[Operand | None, Tensor, Tensor, Tensor | None],
    *,
    same: bool,
    state: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    recording: bool = False,
) -> None:
    like = values.leaves[0]
    specs = [operand.spec for operand, *_ in (first, second) if operand is not None]
    blocked = any(spec.block is not None for spec in specs)
    bm, bn, warps = BLOCK_TILE if blocked else CAST_TILE
    if values.program.pieces > 1 and blocked:
        assert values.columns % 128 == 0, "blocks do not reach over two results"
    grid = (triton.cdiv(values.rows, bm), triton.cdiv(values.columns, bn))
    history = None if state is None else state[0]
    arguments: dict[str, Any] = {}
    pointers: list[Any] = []
    for prefix, (operand, codes, scale, amax) in (("R", first), ("C", second)):
        spec = None if operand is None else operand.spec
        element = (spec or specs[0]).fmt.element
        mode, key, bits = _random(operand, values)
        pointers += [
            _or(codes if codes.numel() else None, like), _or(scale if scale.numel() else None, like), _or(amax, like),
            _parts(amax, spec), _or(operand and operand.limit, like), _or(key, like), _or(bits, like),
        ]  # fmt: skip
        arguments |= {
            prefix: granularity_code(spec),
            f"{prefix}_SR": mode,
            f"{prefix}_MAX": element.max,
            f"{prefix}_MANTISSA": element.mantissa_bits,
            f"{prefix}_BIAS": element.bias,
            f"{prefix}_POW2": bool(spec and spec.pow2),
            f"{prefix}_CLIP": operand is not None and operand.limit is not None,
        }
    pending, saturated, workspace = (like, like, like) if state is None else state[1:]
    cast_kernel[grid](
        values.leaves, values.strides, values.rows, values.columns, *pointers,
        _or(history, like), 0 if history is None else history.numel(), pending, saturated, workspace,
        TILE=tile_function(str(values.program)), PIECES=values.program.pieces, **arguments,
        SAME=same, HISTORY=_padded(history), RECORD=recording, OVERFLOW=overflow(specs[0]),
        STEPWISE=_INTERPRETED, ALIGNED=values.aligned, BM=bm, BN=bn, num_warps=warps,
    )  # fmt: skip


def _random(operand: Operand | None, values: _Values) -> tuple[int, Tensor | None, Tensor | None]:
    """How a kernel comes by an operand's random bits: (mode, key, bits)."""
    if operand is None or not operand.spec.sr:
        return _NO_SR, None, None
    if operand.bits is not None:
        return _GIVEN, None, operand.bits
    assert operand.key is not None, operand.spec
    # A tile draws eight neighbours with one counter, which needs them in one row.
    if values.columns % 8 == 0:
        return _PHILOX, operand.key, None
    return _GIVEN, None, random_bits(operand.key, values.shape, operand.key.device)


def _parts(amax: Tensor | None, spec: Spec | None) -> int:
    if amax is None:
        return 0
    return amax.shape[0] if spec is not None and spec.granularity == "row" else amax.numel()


def _padded(history: Tensor | None) -> int:
    return 0 if history is None else triton.next_power_of_2(history.numel())


def _or(tensor: Tensor | None, like: Tensor) -> Tensor:
    """A pointer for an argument that the kernel does not look at."""
    return like if tensor is None else tensor
