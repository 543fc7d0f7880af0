"""Launching the cast kernels: tensors in, tensors out.

Deciding what to launch costs Python ten times what a small kernel costs the device, so it is done once for each
combination of program, formats, shapes and layouts and kept (:class:`_Cast`). What is left for each call is to
allocate the results and to pass pointers to kernels that are compiled already.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..cast_operators import granularity_code, matrix, overflow
from ..stochastic import random_bits
from . import tuning
from .cast import amax_kernel, cast_kernel
from .cast_apart import cast_apart_kernel
from .cast_tiles import (
    AMAX_PROGRAMS,
    AMAX_TILE,
    APART_TILE,
    CAST_PROGRAMS,
    fitted,
    operands_apart,
    usual_tile,
)
from .compiled import Launch, most_registers, scale_launch, sums_launch
from .device import current_for
from .leaves import LeafLayout
from .operands import NO_LIMIT, RMS_LIMIT, Operand, allocate, allocate_codes, empty, sizes
from .partials import SUMMED_PIECES, partial_rows
from .program import Program, along_function, tile_function

#: Triton's interpreter converts to FP8 by truncation: there every rounding is done by steps.
_INTERPRETED = triton.knobs.runtime.interpret
_NEAREST, _PHILOX, _GIVEN = 0, 1, 2
CACHED = 4096
#: Addresses of what a kernel does not read.
_NO_INPUTS, _NO_STATE = (0,) * 6, (0,) * 4


class _Cast:
    """All launches of one cast: of a program over leaves of one layout to one or two operands."""

    def __init__(
        self,
        program: Program,
        leaves: Sequence[Tensor],
        rows: Operand | None,
        columns: Operand | None,
        same: bool,
        history: int | None,
        recording: bool,
        tiles: Mapping[str, tuning.Tile] | None = None,
        summed: bool = False,
    ) -> None:
        self.program, self.rows, self.columns, self.same, self.summed = program, rows, columns, same, summed
        self.count, self.width = matrix(leaves, program)
        self.shape = (self.count, self.width * program.pieces)
        self.layout = LeafLayout(leaves, program)
        self.strides = self.layout.strides
        second = rows if same else columns
        self.codes = sizes(rows, self.shape, 1)
        self.turned = sizes(second, self.shape, 0)
        self.empty = self.shape[0] * self.shape[1] == 0
        #: Whether no kernel reads a limit, a key or random bits.
        self.plain = not any(o is not None and (o.spec.sr or o.given_limit or o.given_bits) for o in (rows, columns))
        #: Tiles by kernel where they are not the usual ones; and each kernel's question, with its usual tile.
        self.tiles, self.questions = tiles or {}, []
        if not self.empty:
            self._decide(leaves, history, recording)

    def _decide(self, leaves: Sequence[Tensor], history: int | None, recording: bool) -> None:
        operands = (self.rows, self.columns)
        specs = [operand.spec for operand in operands if operand is not None]
        granularities = [operand and operand.spec.granularity for operand in operands]
        text = str(self.program)
        common = {"TILE": tile_function(text), "ALONG": along_function(text), "PIECES": self.program.pieces}
        padded = 0 if history is None else triton.next_power_of_2(history)
        self.history_length = history or 0

        bm, bn, loop, warps = fitted(self.tiles.get("amax", AMAX_TILE), self.count, self.width, AMAX_PROGRAMS)
        grid = (triton.cdiv(self.count, bm * loop), triton.cdiv(self.width, bn))
        even = self.count % (bm * loop) == 0 and self.width % bn == 0
        by_tensor, by_row, by_column = "tensor" in granularities, granularities[0] == "row", granularities[1] == "row"
        squares = any(operand is not None and operand.clip[0] == RMS_LIMIT for operand in operands)
        # Where a dynamic scale is found, many tiles share a row of partial sums.
        summed_first = self.summed and history is None and (by_tensor or by_row or by_column or squares)
        #: Partial maxima lie one after the other in one buffer: of the tensor, by row, by column; then sums of squares.
        self.parts = (grid[0] * grid[1], grid[1] * self.program.pieces, grid[0])
        lengths = (
            self.parts[0] if by_tensor else 0,
            self.parts[1] * self.count if by_row else 0,
            self.parts[2] * self.shape[1] if by_column else 0,
            2 * self.parts[0] if squares else 0,
        )
        # Each begins on a multiple of 16 bytes, as compiled kernels rely on, and none is empty.
        *self.offsets, self.scratch = itertools.accumulate((size + 7) // 4 * 4 for size in lengths)
        self.amax, sum_parts = None, 0
        if by_tensor or by_row or by_column or squares:
            constants = {**common, "BY_TENSOR": by_tensor, "BY_ROW": by_row, "BY_COLUMN": by_column,
                         "SQUARES": squares, "SUMS": partial_rows(bm, bn, warps) if summed_first else 0,
                         "HISTORY": padded, "ALIGNED": self.layout.aligned, "EVEN": even, "BM": bm, "BN": bn,
                         "LOOP": loop}  # fmt: skip
            self.amax = Launch(amax_kernel, grid, warps, constants)
            sum_parts = grid[0] * (1 if by_column or self.program.pieces <= SUMMED_PIECES else loop)
            # With a scale from a history the kernel returns at once, whatever its tile.
            if history is None or squares:
                self.questions.append((self._question("amax", leaves, history, recording), AMAX_TILE))
        self.row_scales = [
            None if not wanted else scale_launch(operand, size, part)
            for wanted, operand, size, part in zip(
                (by_row, by_column), operands, self.shape, self.parts[1:], strict=True
            )
        ]

        blocked = any(spec.block is not None for spec in specs)
        if self.program.pieces > 1 and blocked:
            assert self.width % 128 == 0, "blocks do not reach over two results"
        usual = usual_tile(operands, history=history is not None)
        bm, bn, loop, warps = fitted(self.tiles.get("cast", usual), self.count, self.width, CAST_PROGRAMS)
        even = self.count % (bm * loop) == 0 and self.width % bn == 0
        self.modes = [self._random_mode(operand) for operand in operands]
        by_operand = history is None and not self.summed and operands_apart(self.program, operands)
        if by_operand:
            bm, bn, loop, warps = APART_TILE
            even = self.count % 128 == self.width % 128 == 0
        else:
            self.questions.append((self._question("cast", leaves, history, recording), usual))
        stochastic = any(mode != _NEAREST for mode in self.modes)
        alone = blocked and self.program.pieces > 1 and not self.summed and history is None and not squares
        constants = dict(common)
        for prefix, operand, mode in zip("RC", operands, self.modes, strict=True):
            spec = None if operand is None else operand.spec
            element = (spec or specs[0]).fmt.element
            constants |= {
                prefix: granularity_code(spec),
                f"{prefix}_SR": mode,
                f"{prefix}_MAX": element.max,
                f"{prefix}_MANTISSA": element.mantissa_bits,
                f"{prefix}_BIAS": element.bias,
                f"{prefix}_POW2": bool(spec and spec.pow2),
                f"{prefix}_CLIP": operand.clip[0] if operand is not None else NO_LIMIT,
                f"{prefix}_RMS": operand.clip[1] if operand is not None else 0.0,
            }
        constants |= {
            "SAME": self.same, "SUMS": partial_rows(bm, bn, warps) if self.summed and not summed_first else 0,
            "HISTORY": padded, "RECORD": recording, "OVERFLOW": overflow(specs[0]), "STEPWISE": _INTERPRETED,
            "APART": self._apart(leaves), "WORDS": stochastic and self.width % 4 == 0,
            "PAIRS": stochastic and self.count % 2 == 0, "ALONE": alone, "ALIGNED": self.layout.aligned,
            "EVEN": even, "BM": bm, "BN": bn, "LOOP": loop,
        }  # fmt: skip
        grid = (triton.cdiv(self.count, bm * loop) * (self.program.pieces if alone else 1), triton.cdiv(self.width, bn))
        registers, kernel = None, cast_kernel
        if by_operand:
            kernel = cast_apart_kernel
            grid = (triton.cdiv(self.count, 128) * 2 * (128 // bm), triton.cdiv(self.width, 128))
        elif _PHILOX in self.modes and (self.program.pieces == 1 or alone):
            found = history is None and not squares and set(granularities) <= {"tensor", None}
            registers = most_registers(warps, blocked=blocked and not self.summed, tensor=found)
        self.cast = Launch(kernel, grid, warps, constants, registers)
        if not summed_first:
            sum_parts = grid[0] * (1 if self.program.pieces <= SUMMED_PIECES else loop)
        if self.amax is None:
            self.scratch = 0
        #: Partial sums of columns lie behind the partial maxima.
        self.sums_at = self.scratch
        self.sums = sums_launch(sum_parts, self.shape[1]) if self.summed else None
        if self.summed:
            self.scratch += sum_parts * self.shape[1]

    def _question(self, kernel: str, leaves: Sequence[Tensor], history: int | None, recording: bool) -> tuning.Question:
        second = self.rows if self.same else self.columns
        return tuning.Question(
            kernel=kernel,
            program=str(self.program),
            rows=str(self.rows or ""),
            columns="=" if self.same else str(self.columns or ""),
            leaves=" ".join(str(leaf.dtype).removeprefix("torch.") for leaf in leaves),
            history="" if history is None else f"{history}{' recording' * recording}",
            layout=f"{'aligned' * self.layout.aligned} {'even' * (self.count % 128 == self.width % 128 == 0)}"
            f"{' summed' * self.summed}",
            shape=(triton.next_power_of_2(self.count), self.width),
            blocks=tuple(
                any(o is not None and o.blocked(dim, of) for of, o in ((1, self.rows), (0, second))) for dim in (1, 0)
            ),
        )

    def launched_tiles(self) -> dict[str, tuning.Tile]:
        """Return rows, columns, tiles a program and warps of each kernel over the values."""
        kernels = {"amax": self.amax, "cast": self.cast} if not self.empty else {}
        return {
            name: (k.constants["BM"], k.constants["BN"], k.constants["LOOP"], k.warps)
            for name, k in kernels.items()
            if k is not None
        }

    def _apart(self, leaves: Sequence[Tensor]) -> bool:
        if _INTERPRETED:
            return False
        return bool(self.program.instructions) or any(leaf.dtype is torch.float32 for leaf in leaves)

    def _random_mode(self, operand: Operand | None) -> int:
        if operand is None or not operand.spec.sr:
            return _NEAREST
        # A tile draws eight neighbours with one counter, which needs them in one row.
        return _GIVEN if operand.given_bits or self.width % 8 else _PHILOX

    def run(
        self,
        leaves: Sequence[Tensor],
        limits: Sequence[Tensor | None],
        keys: Sequence[Tensor | None],
        bits: Sequence[Tensor | None],
        state: Sequence[Tensor] | None = None,
        into: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Launch; return codes and scales of both operands (empty tensors for what there is not), and sums if asked."""
        like = leaves[0]
        device = like.device
        codes, scale, turned, second_scale = self._results(device, state is not None) if into is None else into
        if self.empty:
            # Nothing to find a maximum of: the scales of empty groups are 1.
            found = codes, scale.fill_(1.0), turned, second_scale.fill_(1.0)
            return (*found, scale.new_zeros(self.shape[1], dtype=torch.float32)) if self.summed else found
        flat = self.layout.flat(leaves)
        if _GIVEN in self.modes:
            bits = [
                random_bits(key, self.shape, key.device)
                if mode == _GIVEN and given is None and key is not None
                else given
                for mode, key, given in zip(self.modes, keys, bits, strict=True)
            ]
        if state is not None and into is not None:
            # One scale, wherever the codes go.
            scale = second_scale = scale if self.rows is not None else second_scale
        scratch = empty((self.scratch,), torch.int32, device) if self.scratch else like
        sums = empty((self.shape[1],), torch.float32, device) if self.summed else None
        tensors = (codes, scale, turned, second_scale, scratch)
        if not (like.is_cuda and self._again(flat, tensors, limits, keys, bits, state, sums)):
            self._first(flat, tensors, limits, keys, bits, state, sums)
        return (codes, scale, turned, second_scale) if sums is None else (codes, scale, turned, second_scale, sums)

    def _results(self, device: torch.device, one_scale: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Allocate codes and scales, and no more than that: an allocation costs the host nearly what a launch does.

        With ``one_scale`` it is a tensor's, of both operands.
        """
        nothing = None
        if self.codes is None or self.turned is None:
            nothing = empty((0,), torch.float8_e4m3fn, device)
        if one_scale:
            scale = empty((), torch.float32, device)
            codes, turned = [allocate_codes(device, wanted, nothing) for wanted in (self.codes, self.turned)]
            return codes, scale, turned, scale
        return *allocate(device, self.codes, nothing), *allocate(device, self.turned, nothing, scaled=not self.same)

    def _again(
        self, flat: Any, tensors: Any, limits: Any, keys: Any, bits: Any, state: Any, sums: Tensor | None
    ) -> bool:
        """Launch what is compiled already; False where it is not, or relies on aligned addresses that are not."""
        if self.cast.compiled is None:
            return False
        leaves = tuple([leaf.data_ptr() for leaf in flat])
        inputs = _NO_INPUTS if self.plain else [0 if t is None else t.data_ptr() for t in (*limits, *keys, *bits)]
        history, pending, saturated, workspace = _NO_STATE if state is None else [t.data_ptr() for t in state]
        misaligned = history | pending | saturated | workspace
        for address in leaves:
            misaligned |= address
        for address in inputs:
            misaligned |= address
        if misaligned % 16:
            return False
        # The current stream of the tensors' device, as PyTorch's own launches take it.
        stream = torch._C._cuda_getCurrentRawStream(flat[0].device.index)
        codes, scale, turned, second_scale, scratch = [t.data_ptr() for t in tensors]
        r_limit, c_limit, r_key, c_key, r_bits, c_bits = inputs
        size, length, squares = (self.count, self.width), self.history_length, 0
        own_sums = 0 if sums is None else scratch + 4 * self.sums_at
        if self.amax is not None:
            by_row, by_column, squares = [scratch + 4 * offset for offset in self.offsets]
            self.amax.again(
                stream, leaves, self.strides, *size, scratch, by_row, by_column, squares, own_sums, history, length
            )
            clipping = (squares, self.parts[0], self.shape[0] * self.shape[1])
            if self.row_scales[0] is not None:
                kernel, parts, count = self.row_scales[0]
                kernel.again(stream, by_row, scale, r_limit, parts, count, *clipping)
            if self.row_scales[1] is not None:
                kernel, parts, count = self.row_scales[1]
                kernel.again(stream, by_column, second_scale, c_limit, parts, count, *clipping)
        self.cast.again(
            stream, leaves, self.strides, *size, codes, scale, r_limit, r_key, r_bits, turned, second_scale, c_limit,
            c_key, c_bits, scratch, self.parts[0], squares, own_sums, history, length, pending, saturated, workspace,
        )  # fmt: skip
        if sums is not None and self.sums is not None:
            kernel, parts, count = self.sums
            kernel.again(stream, own_sums, sums.data_ptr(), parts, count)
        return True

    def _first(
        self, flat: Any, tensors: Any, limits: Any, keys: Any, bits: Any, state: Any, sums: Tensor | None
    ) -> None:
        """The same launches through Triton, with tensors; an argument that a kernel ignores is any tensor."""
        like = flat[0]
        codes, scale, turned, second_scale, scratch = [t if t.numel() else like for t in tensors]
        (r_limit, c_limit), (r_key, c_key), (r_bits, c_bits) = [
            [like if t is None else t for t in pair] for pair in (limits, keys, bits)
        ]
        history, pending, saturated, workspace = state or (like, like, like, like)
        keep = all(t is None or t.data_ptr() % 16 == 0 for t in (*flat, *limits, *keys, *bits, *(state or ())))
        size, length, squares = (self.count, self.width), self.history_length, like
        own_sums = like if sums is None else scratch[self.sums_at :].view(torch.float32)
        if self.amax is not None:
            by_row, by_column, squares = (scratch[offset:] for offset in self.offsets)
            squares = squares[: len(squares) // 2 * 2].view(torch.float64)
            self.amax.first(
                keep, flat, self.strides, *size, scratch, by_row, by_column, squares, own_sums, history, length
            )
            clipping = (squares, self.parts[0], self.shape[0] * self.shape[1])
            for found, partials, target, limit in zip(
                self.row_scales, (by_row, by_column), (scale, second_scale), (r_limit, c_limit), strict=True
            ):
                if found is not None:
                    kernel, parts, count = found
                    kernel.first(keep, partials, target, limit, parts, count, *clipping)
        self.cast.first(
            keep, flat, self.strides, *size, codes, scale, r_limit, r_key, r_bits, turned, second_scale, c_limit,
            c_key, c_bits, scratch, self.parts[0], squares, own_sums, history, length, pending, saturated, workspace,
        )  # fmt: skip
        if sums is not None and self.sums is not None:
            kernel, parts, count = self.sums
            kernel.first(keep, own_sums, sums, parts, count)


_casts: dict[Any, _Cast] = {}
_last: list[_Cast] = []


def launch_cast(
    leaves: Sequence[Tensor],
    program: str,
    rows: Operand | None,
    columns: Operand | None,
    *,
    same: bool,
    limits: Sequence[Tensor | None],
    keys: Sequence[Tensor | None],
    bits: Sequence[Tensor | None],
    state: Sequence[Tensor] | None = None,
    recording: bool = False,
    into: Sequence[Tensor] | None = None,
    summed: bool = False,
) -> tuple[Tensor, ...]:
    """Cast as the operators of :mod:`narrowgate.precision.casting` say.

    Args:
        leaves: the program's inputs.
        program: its text.
        rows: operand contracted over columns.
        columns: operand contracted over rows; None where it is absent or ``same``.
        same: the second operand is the first, transposed.
        limits: clip limits of the two, FP32 [], where an operand's ``given_limit`` says so.
        keys: keys of their random bits, int64 [].
        bits: their random bits, int16 [M, N].
        state: with ``delayed(n)``: history, pending, saturated and workspace of an amax history.
        recording: whether the amax enters the history.
        into: takes the results, as they would be returned.
        summed: also return the sums of the columns, FP32 [N].
    """
    layouts = tuple([(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves])
    length = None if state is None else state[0].numel()
    key = (program, layouts, rows, columns, same, length, recording, summed, tuning.autotune())
    found = _casts.get(key)
    if found is None:
        if len(_casts) >= CACHED:
            _casts.clear()

        def make(tiles: Mapping[str, tuning.Tile] | None = None) -> _Cast:
            return _Cast(Program.parse(program), leaves, rows, columns, same, length, recording, tiles, summed)

        with current_for(leaves[0]):
            found, final = _tuned(make, leaves, (limits, keys, bits), state)
        if final:
            _casts[key] = found
    _last[:] = [found]
    with current_for(leaves[0]):
        return found.run(leaves, limits, keys, bits, state, into)


def last_tiles() -> dict[str, tuning.Tile]:
    """Return rows, columns, tiles a program and warps of the kernels ``amax`` and ``cast`` of the last launch."""
    return _last[0].launched_tiles() if _last else {}


def _tuned(
    make: Callable[..., _Cast], leaves: Sequence[Tensor], inputs: tuple[Any, Any, Any], state: Sequence[Tensor] | None
) -> tuple[_Cast, bool]:
    """A cast with the tiles that are known or measured for it, and whether it stays so."""
    usual = make()
    if usual.empty or _INTERPRETED:
        return usual, True

    def prepare(tiles: Mapping[str, tuning.Tile]) -> Callable[[], Any]:
        cast = make(tiles)
        # Measuring writes to copies: no history learns of it.
        copies = None if state is None else [tensor.clone() for tensor in state]
        return lambda: cast.run(leaves, *inputs, copies)

    tiles, final = tuning.choose(leaves[0].device, usual.questions, prepare)
    return make(tiles) if tiles else usual, final
