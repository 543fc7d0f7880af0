"""What travels when gradients are reduced in low precision: codes and scales, packed by the rank that they go to.

FSDP2 gives a reduction one buffer, [ranks, S]: row r holds, one parameter after another, the rows of each gradient
that rank r keeps, padded with zeros to ceil(N / ranks). A :class:`Piece` says where in it a parameter lies. A gradient
[..., N, K] is a matrix whose rows are all but its last dimension; it is quantized whole, contracted over K, so its
codes and scales are those of :func:`narrowgate.precision.quantize` on any number of ranks. What goes to a rank is one
line of bytes: the scales that its rows need (of a block that two ranks share, both get it), gradients that travel as
they are, then codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .cast_operators import launches_on
from .casting import Request, quantize_both
from .quantization import QuantizedTensor
from .rounding import decode, torch_dtype
from .spec import Spec

_FP32 = torch.float32
#: Bytes of a line are a multiple of this, so that every part of it can be viewed in its dtype.
_ALIGNMENT = 16
#: Ranks whose rows are joined by name: for more, naming them costs the host more than the copy.
_JOINED = 16


@dataclass(frozen=True)
class Piece:
    """One parameter's part of a reduction."""

    #: The parameter's, for errors.
    name: str
    #: Of the random bits that this rank's gradient is rounded with.
    key: int
    #: Rows that each rank keeps, padded; of a matrix of ``ranks * rows`` rows.
    rows: int
    #: K.
    columns: int
    #: Where the part begins in a rank's row of the buffer, in elements.
    start: int
    #: False for what travels in the dtype of the reduction: vectors, which are few and share no scale well.
    coded: bool

    @property
    def numel(self) -> int:
        """Elements that each rank keeps."""
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        """Where the part ends in a rank's row of the buffer."""
        return self.start + self.numel


def pieces_of(shapes: Sequence[tuple[str, int, tuple[int, ...]]], ranks: int) -> tuple[Piece, ...]:
    """Lay (name, key, unsharded shape) of each parameter out as FSDP2 does."""
    pieces: list[Piece] = []
    start = 0
    for name, key, shape in shapes:
        kept = (-(-shape[0] // ranks), *shape[1:])
        columns = kept[-1] if len(kept) > 1 else 1
        rows = math.prod(kept) // columns if columns else 0
        pieces.append(Piece(name, key, rows, columns, start, coded=len(kept) > 1 and rows > 0))
        start += math.prod(kept)
    return tuple(pieces)


def line_bytes(pieces: Sequence[Piece], spec: Spec, dtype: torch.dtype) -> dict[str, int]:
    """Bytes that a rank gives to each rank, itself included: of codes, scales, unquantized values and padding.

    ``dtype`` is the reduction's.
    """
    sizes: dict[str, int] = {"codes": 0, "scales": 0, "values": 0, "padding": 0}
    for part, _, first, last in _layout(pieces, spec, dtype)[0]:
        sizes[part] += last - first
    return sizes


def encode(buffer: Tensor, pieces: Sequence[Piece], spec: Spec, seed: Callable[[Piece], Tensor | None]) -> Tensor:
    """Quantize a rank's gradients.

    Args:
        buffer: what FSDP2 reduces, [ranks, S] in the dtype of the reduction.
        pieces: the parameters in it.
        spec: how matrices travel: BF16, or FP8 with FP32 scales.
        seed: the key, int64 [], of a parameter's random bits; None where rounding is to nearest.

    Returns:
        uint8 [ranks, L]: what goes to each rank.
    """
    ranks = len(buffer)
    quantized = {piece: _quantize(buffer, piece, spec, seed(piece)) for piece in pieces if piece.coded}
    parts: list[Tensor] = []
    for part, piece, first, last in _layout(pieces, spec, buffer.dtype)[0]:
        if part == "padding":
            parts.append(buffer.new_zeros((ranks, last - first), dtype=torch.uint8))
            continue
        assert piece is not None
        if part == "values":
            values = buffer[:, piece.start : piece.stop]
        elif part == "codes":
            values = quantized[piece].data.reshape(ranks, -1)
        else:
            values = _scales_by_rank(quantized[piece], piece, spec, ranks)
        parts.append(_bytes(values))
    return torch.cat(parts, 1)


def sum_decoded(
    lines: Tensor, pieces: Sequence[Piece], spec: Spec, dtype: torch.dtype, rank: int
) -> Iterator[tuple[Piece, Tensor]]:
    """Sum what all ranks sent to this one: (parameter, its rows' FP32 sums, flat), added in the order of ranks.

    Args:
        lines: uint8 [ranks, L], a line of :func:`encode` from each rank.
        pieces: the parameters in it.
        spec: how matrices travelled.
        dtype: the reduction's.
        rank: which rank's rows these are.
    """
    for part in _arrived(lines, pieces, spec, dtype):
        yield part.piece, _summed(part, spec, rank)


def sum_into(
    out: Tensor, lines: Tensor, pieces: Sequence[Piece], spec: Spec, rank: int, end: tuple[str, float]
) -> None:
    """Write the sums of :func:`sum_decoded`, ended as :func:`ended` says, to ``out``: on a GPU in one pass over codes.

    Args:
        out: [S], as FSDP2 wants it, in the dtype of the reduction.
        lines: as for :func:`sum_decoded`, and so on.
        pieces: see there.
        spec: see there.
        rank: see there.
        end: as for :func:`ended`.
    """
    for part in _arrived(lines, pieces, spec, out.dtype):
        piece, target = part.piece, out[part.piece.start : part.piece.stop]
        if piece.coded and launches_on(lines):
            _launcher()(
                part.values, part.scales, target, columns=piece.columns, block=spec.block,
                tensor=spec.granularity == "tensor", first=rank * piece.rows, end=end,
            )  # fmt: skip
        else:
            target.copy_(ended(_summed(part, spec, rank), end))


def ended(total: Tensor, end: tuple[str, float]) -> Tensor:
    """Do to FP32 sums what a reduction does beside summing: nothing, or ``divide`` or ``multiply`` by a number."""
    how, factor = end
    if how == "divide":
        # Not by a number, which is multiplying by its reciprocal on a GPU.
        return total / torch.full((), factor, dtype=total.dtype, device=total.device)
    return total * factor if how == "multiply" else total


@dataclass(frozen=True)
class _Arrived:
    """A parameter's part of what all ranks sent."""

    piece: Piece
    #: [ranks, elements]: codes, or values in the dtype of the reduction.
    values: Tensor
    #: FP32 [ranks, n], of codes that have some.
    scales: Tensor | None


def _arrived(lines: Tensor, pieces: Sequence[Piece], spec: Spec, dtype: torch.dtype) -> Iterator[_Arrived]:
    scales: dict[Piece, Tensor] = {}
    for part, piece, first, last in _layout(pieces, spec, dtype)[0]:
        if piece is None:
            continue
        line = lines[:, first:last]
        if part == "scales":
            scales[piece] = line.view(_FP32)
        elif part == "values":
            yield _Arrived(piece, line.view(dtype), None)
        else:
            stored = torch_dtype(spec.fmt.element)
            assert stored is not None
            yield _Arrived(piece, line.view(stored), scales.get(piece))


def _summed(part: _Arrived, spec: Spec, rank: int) -> Tensor:
    if not part.piece.coded:
        return part.values.to(torch.promote_types(part.values.dtype, _FP32)).sum(0)
    values = decode(part.values, spec.fmt.element)
    if part.scales is not None:
        values = _scaled(values, part.scales, part.piece, spec, rank).flatten(1)
    total = values[0].clone()
    for more in values[1:]:
        total += more
    return total


@cache
def _launcher() -> Any:
    from .kernels.sum_codes import launch_sum

    return launch_sum


def _layout(
    pieces: Sequence[Piece], spec: Spec, dtype: torch.dtype
) -> tuple[list[tuple[str, Piece | None, int, int]], int]:
    """([(what, parameter, first byte, byte after the last)], bytes of a line), wide elements first."""
    code = 2 if spec.high_precision else 1
    scales: list[tuple[str, Piece | None, int]] = []
    if not spec.high_precision:
        scales += [("scales", piece, 4 * _scale_count(piece, spec)) for piece in pieces if piece.coded]
    values = [("values", piece, dtype.itemsize * piece.numel) for piece in pieces if not piece.coded and piece.numel]
    wanted = [*values, *scales] if dtype.itemsize > 4 else [*scales, *values]
    wanted += [("codes", piece, code * piece.numel) for piece in pieces if piece.coded]
    total = sum(size for _, _, size in wanted)
    wanted.append(("padding", None, -total % _ALIGNMENT))
    parts: list[tuple[str, Piece | None, int, int]] = []
    first = 0
    for part, piece, size in wanted:
        parts.append((part, piece, first, first + size))
        first += size
    return parts, first


def _bytes(values: Tensor) -> Tensor:
    """[ranks, n] of any dtype as uint8 [ranks, n * bytes]."""
    values = values.contiguous()
    # Contiguous is a column of one element a row whatever its stride there, but bytes are viewed at a stride of 1 only.
    return values.as_strided(values.shape, (values.shape[1], 1)).view(torch.uint8)


def _quantize(buffer: Tensor, piece: Piece, spec: Spec, seed: Tensor | None) -> QuantizedTensor:
    parts = buffer[:, piece.start : piece.stop]
    if 1 < len(parts) <= _JOINED and parts.is_cuda and not parts.is_contiguous():
        parts = torch.cat(parts.unbind())  # a copy of wide loads, where one kernel of two strides has narrow ones
    whole = parts.reshape(-1, piece.columns)
    quantized, _ = quantize_both(whole, Request(spec, seed), None)
    assert quantized is not None
    return quantized


def _block(piece: Piece, spec: Spec) -> tuple[int, int]:
    """(rows, columns) that share a scale, where it is not the whole matrix."""
    return spec.block or (1, piece.columns)


def _blocks_down(rows: int, height: int) -> int:
    """How many blocks of ``height`` rows a rank's ``rows`` touch at most, wherever they begin."""
    return rows // height if rows % height == 0 else (rows + height - 2) // height + 1


def _scale_count(piece: Piece, spec: Spec) -> int:
    if spec.granularity == "tensor":
        return 1
    height, width = _block(piece, spec)
    return _blocks_down(piece.rows, height) * -(-piece.columns // width)


def _scales_by_rank(quantized: QuantizedTensor, piece: Piece, spec: Spec, ranks: int) -> Tensor:
    """The scales of each rank's rows, FP32 [ranks, n]."""
    scale = quantized.scale
    assert scale is not None
    if spec.granularity == "tensor":
        return scale.expand(ranks, 1)
    height, _ = _block(piece, spec)
    down = _blocks_down(piece.rows, height)
    if piece.rows % height == 0:
        return scale.reshape(ranks, -1)
    first = torch.arange(ranks, device=scale.device) * piece.rows // height
    blocks = first.unsqueeze(1) + torch.arange(down, device=scale.device)
    return scale[blocks.clamp(max=len(scale) - 1)].flatten(1)


def _scaled(values: Tensor, scale: Tensor, piece: Piece, spec: Spec, rank: int) -> Tensor:
    """Decoded elements [ranks, rows * K] times their scales, [ranks, n]."""
    if spec.granularity == "tensor":
        return values * scale
    height, width = _block(piece, spec)
    across = -(-piece.columns // width)
    scale = scale.view(len(scale), -1, across)
    if height > 1:
        row = torch.arange(piece.rows, device=scale.device)
        scale = scale[:, (row + rank * piece.rows) // height - rank * piece.rows // height]
    values = values.view(len(values), piece.rows, piece.columns)
    if piece.columns % width == 0:
        return values.unflatten(2, (across, width)) * scale.unsqueeze(3)
    return values * scale.repeat_interleave(width, 2)[..., : piece.columns]
