"""Casts of a matrix to FP8 for both of its contractions at once: fused kernels where they exist, else the reference.

A tensor of a linear layer is multiplied twice: ``input`` contracts over its columns in fprop and over its rows in
wgrad, ``grad`` likewise in dgrad and wgrad, ``weight`` in fprop and dgrad. Matrix units want each operand contiguous
along its contraction, so the second use needs a transposed copy. :func:`quantize_both` makes both operands in one
kernel that reads the tensor once (twice where a dynamic scale must be known first), the same codes and scales as
:func:`narrowgate.precision.quantize` bit for bit.

The kernels are reached through two operators, ``narrowgate::cast_fp8`` and ``narrowgate::cast_fp8_delayed``, which
take a pointwise :class:`~narrowgate.precision.kernels.program.Program` over their inputs: in eager mode the identity,
under ``torch.compile`` whatever produced the tensor (see :mod:`narrowgate.precision.fusion`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .clipping import clip_limit
from .delayed import AmaxHistory
from .kernels.program import IDENTITY, Program
from .quantization import QuantizedTensor, quantize
from .rounding import overflow_threshold, torch_dtype
from .spec import Spec

#: What a kernel knows how to cast to: one scale for these, or blocks of 128.
_GRANULARITIES = {"tensor": 1, "row": 2, "1x128": 3, "128x128": 4}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: As the ``columns`` argument of ``cast_fp8``: the codes of ``rows``, transposed.
_SAME = "="
_LARGEST_SIDE = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Request:
    """One operand that is wanted of a tensor."""

    spec: Spec
    #: int64 []: 64-bit key of ``+sr``.
    seed: Tensor | None = None
    #: Of ``+delayed(n)``.
    history: AmaxHistory | None = None


def quantize_both(
    x: Tensor, rows: Request | None, columns: Request | None
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Quantize ``x`` [M, N] for a contraction over its columns and for one over its rows.

    Args:
        x: BF16, FP16 or FP32.
        rows: the operand contracted over columns (``dim`` 1: a scale for each *row* where the granularity is ``row``).
        columns: the operand contracted over rows (``dim`` 0). Where both ask for the same codes (see :func:`shared`)
            they are made once, and only the history of ``rows`` is used.

    Returns:
        The two operands, None where none was asked for. The second's codes lie transposed in memory.
    """
    same = rows is not None and columns is not None and shared(rows.spec, columns.spec)
    if not has_kernel(x, *(request.spec for request in (rows, columns) if request is not None)):
        first = None if rows is None else _reference(x, rows, 1)
        if same:
            assert first is not None
            return first, QuantizedTensor(first.data, first.scale, first.tensor_scale, first.spec, 0, first.shape)
        return first, None if columns is None else _reference(x, columns, 0)
    if same:
        assert rows is not None
        return _launch(x, rows, columns, same=True)
    if any(request is not None and request.spec.delayed is not None for request in (rows, columns)):
        # A history belongs to one set of codes, so two that differ are two launches.
        first = None if rows is None else _launch(x, rows, None)[0]
        second = None if columns is None else _launch(x, None, columns)[1]
        return first, second
    return _launch(x, rows, columns)


def shared(spec: Spec, other: Spec) -> bool:
    """True where a contraction over the other axis takes the very same codes: a transpose changes nothing.

    FP4 codes are packed along the contraction, and would have to be unpacked to turn.
    """
    if spec != other or spec.sr or spec.hadamard is not None or spec.high_precision:
        return False
    square = spec.block is not None and spec.block[0] == spec.block[1]
    return (spec.granularity == "tensor" or square) and spec.fmt.element.bits != 4


def has_kernel(x: Tensor, *specs: Spec) -> bool:
    """True where the fused kernels cast ``x`` to all of ``specs``."""
    on_device = x.is_cuda or kernels_on_cpu()
    # Not bool(specs): Dynamo of PyTorch 2.11 does not trace it.
    known = len(specs) > 0 and all(_kernel_spec(spec) for spec in specs)
    return on_device and known and x.dim() == 2 and x.dtype in _DTYPES


def _kernel_spec(spec: Spec) -> bool:
    fmt = spec.fmt
    plain = fmt.element.bits == 8 and not fmt.block_scaled and spec.granularity in _GRANULARITIES
    return plain and spec.hadamard is None


@lru_cache(maxsize=1)
def kernels_on_cpu() -> bool:
    """Triton's interpreter runs kernels on CPU tensors; without it the operators there are their reference."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _reference(x: Tensor, request: Request, dim: int) -> QuantizedTensor:
    return quantize(x, request.spec, dim=dim, seed=request.seed, history=request.history)


def _launch(
    x: Tensor, rows: Request | None, columns: Request | None, *, same: bool = False
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    x = x.detach()
    limits = [_limit(x, request) for request in (rows, columns)]
    leader = rows if rows is not None else columns
    assert leader is not None
    if leader.spec.delayed is not None and leader.history is not None:
        history = leader.history
        codes, turned, scale = torch.ops.narrowgate.cast_fp8_delayed(
            [x], IDENTITY, str(leader.spec), rows is not None, columns is not None, leader.seed,
            limits[0] if rows is not None else limits[1], history.history, history.pending, history.saturated,
            history.workspace, history.recording,
        )  # fmt: skip
        scales = (scale, scale)
    else:
        codes, first_scale, turned, second_scale = torch.ops.narrowgate.cast_fp8(
            [x], IDENTITY, "" if rows is None else str(rows.spec),
            _SAME if same else "" if columns is None else str(columns.spec),
            None if rows is None else rows.seed, None, limits[0],
            None if columns is None or same else columns.seed, None, limits[1],
        )  # fmt: skip
        scales = (first_scale, first_scale if same else second_scale)
    shape = tuple(x.shape)
    first = second = None
    if rows is not None:
        first = QuantizedTensor(codes, _as_stored(scales[0], rows.spec, 1), None, rows.spec, 1, shape)
    if columns is not None:
        second = QuantizedTensor(turned.t(), _as_stored(scales[1], columns.spec, 0), None, columns.spec, 0, shape)
    return first, second


def _limit(x: Tensor, request: Request | None) -> Tensor | None:
    if request is None or (request.spec.clip_p is None and request.spec.clip_rms is None):
        return None
    return clip_limit(x.to(torch.float32), request.spec)


def _as_stored(scale: Tensor, spec: Spec, dim: int) -> Tensor:
    """A kernel's scales as :class:`QuantizedTensor` has them, without a copy."""
    if spec.granularity == "row":
        return scale.unsqueeze(dim)
    return scale.t() if spec.granularity == "1x128" and dim == 1 else scale


def matrix(leaves: Sequence[Tensor], program: Program) -> tuple[int, int]:
    """Return (M, N) of one result of ``program`` over N-D ``leaves``: their common shape, leading axes flattened."""
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in leaves))
    return math.prod(shape[:-1]), shape[-1]


@torch.library.custom_op("narrowgate::cast_fp8", mutates_args=())
def cast_fp8(
    leaves: Sequence[Tensor],
    program: str,
    rows: str,
    columns: str,
    rows_key: Tensor | None,
    rows_bits: Tensor | None,
    rows_limit: Tensor | None,
    columns_key: Tensor | None,
    columns_bits: Tensor | None,
    columns_limit: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize the [M, N] matrix that ``program`` makes of ``leaves``; see :func:`quantize_both`.

    Args:
        leaves: tensors that broadcast to one shape [..., N], a program's inputs.
        program: text of a :class:`Program`.
        rows: format expression of the operand contracted over columns, or "".
        columns: of the operand contracted over rows, "" or "=" for the codes of ``rows``.
        rows_key: int64 [], key of the random bits; with ``rows_bits`` int16 [M, N] instead of drawn ones.
        rows_bits: see ``rows_key``.
        rows_limit: FP32 [], magnitude at which values are clipped.
        columns_key: as for rows.
        columns_bits: as for rows.
        columns_limit: as for rows.

    Returns:
        Codes [M, N] and their scales, codes [N, M] and their scales; empty where not asked for. Scales are FP32: [],
        [M] or [N] for rows, [N / 128, M] and [M / 128, N] for blocks of 1x128, [M / 128, N / 128] for 128x128.
    """
    if not (leaves[0].is_cuda or kernels_on_cpu()):
        from .kernels.reference import reference_cast

        return reference_cast(
            leaves, Program.parse(program), rows, columns, (rows_key, rows_bits), (columns_key, columns_bits)
        )
    from .kernels.launch import Operand, launch_cast

    first = None if not rows else Operand(Spec.parse(rows), rows_key, rows_bits, rows_limit)
    second = None
    if columns and columns != _SAME:
        second = Operand(Spec.parse(columns), columns_key, columns_bits, columns_limit)
    return launch_cast(leaves, Program.parse(program), first, second, same=columns == _SAME)


@cast_fp8.register_fake
def _(
    leaves: Sequence[Tensor],
    program: str,
    rows: str,
    columns: str,
    rows_key: Tensor | None,
    rows_bits: Tensor | None,
    rows_limit: Tensor | None,
    columns_key: Tensor | None,
    columns_bits: Tensor | None,
    columns_limit: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parsed = Program.parse(program)
    count, width = matrix(leaves, parsed)
    width *= parsed.pieces
    first = Spec.parse(rows) if rows else None
    second = first if columns == _SAME else Spec.parse(columns) if columns else None
    return (
        *empty_operand(leaves[0], first, (count, width), 1),
        *empty_operand(leaves[0], second, (count, width), 0, scaled=columns != _SAME),
    )


@torch.library.custom_op("narrowgate::cast_fp8_delayed", mutates_args=("pending", "saturated", "workspace"))
def cast_fp8_delayed(
    leaves: Sequence[Tensor],
    program: str,
    spec: str,
    rows: bool,
    columns: bool,
    key: Tensor | None,
    limit: Tensor | None,
    history: Tensor,
    pending: Tensor,
    saturated: Tensor,
    workspace: Tensor,
    recording: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with one scale from an amax history, in one pass, and record this tensor's amax.

    Args:
        leaves: as for ``cast_fp8``.
        program: as for ``cast_fp8``.
        spec: format expression with ``delayed(n)``.
        rows: whether the codes for a contraction over columns are wanted.
        columns: whether the codes for a contraction over rows are wanted.
        key: int64 [], key of the random bits of ``+sr``.
        limit: FP32 [], magnitude at which values are clipped.
        history: the state of :class:`AmaxHistory`, as are ``pending``, ``saturated`` and ``workspace``.
        pending: see there.
        saturated: see there.
        workspace: see there.
        recording: enter the amax into ``pending`` and count what saturates.

    Returns:
        Codes [M, N] and [N, M], empty where not wanted, and their scale, FP32 [].
    """
    state = (history, pending, saturated, workspace)
    if not (leaves[0].is_cuda or kernels_on_cpu()):
        from .kernels.reference import reference_delayed_cast

        return reference_delayed_cast(
            leaves, Program.parse(program), Spec.parse(spec), rows, columns, key, state, recording
        )
    from .kernels.launch import Operand, launch_delayed_cast

    operand = Operand(Spec.parse(spec), key, None, limit)
    return launch_delayed_cast(leaves, Program.parse(program), operand, rows, columns, state, recording)


@cast_fp8_delayed.register_fake
def _(
    leaves: Sequence[Tensor],
    program: str,
    spec: str,
    rows: bool,
    columns: bool,
    key: Tensor | None,
    limit: Tensor | None,
    history: Tensor,
    pending: Tensor,
    saturated: Tensor,
    workspace: Tensor,
    recording: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    parsed = Program.parse(program)
    count, width = matrix(leaves, parsed)
    shape, found = (count, width * parsed.pieces), Spec.parse(spec)
    codes, scale = empty_operand(leaves[0], found, shape, 1)
    turned, _ = empty_operand(leaves[0], found, shape, 0)
    nothing = codes.new_empty(0)
    return (codes if rows else nothing, turned if columns else nothing, scale)


def empty_operand(
    like: Tensor, spec: Spec | None, shape: tuple[Any, Any], dim: int, *, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    """Return uninitialized codes and scales of one operand, contracted over ``dim`` of a matrix of ``shape``."""
    count, width = shape
    if spec is None:
        return like.new_empty(0, dtype=torch.float8_e4m3fn), like.new_empty(0, dtype=torch.float32)
    dtype = torch_dtype(spec.fmt.element)
    codes = like.new_empty((count, width) if dim == 1 else (width, count), dtype=dtype)
    blocks = [(n + 127) // 128 for n in shape]
    sizes: dict[str | None, tuple[Any, ...]] = {
        "tensor": (),
        "row": (count if dim == 1 else width,),
        "1x128": (blocks[1], count) if dim == 1 else (blocks[0], width),
        "128x128": (blocks[0], blocks[1]),
    }
    scale = like.new_empty(sizes[spec.granularity] if scaled else 0, dtype=torch.float32)
    return codes, scale


def granularity_code(spec: Spec | None) -> int:
    """The number by which kernels know a granularity; 0 for none."""
    return 0 if spec is None else _GRANULARITIES[spec.granularity or ""]


def overflow(spec: Spec) -> float:
    """Magnitude of a scaled value past which it saturates."""
    return overflow_threshold(spec.fmt.element)
