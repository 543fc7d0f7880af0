"""Casts of a matrix to FP8 for both of its contractions at once: fused kernels where they exist, else the reference.

A tensor of a linear layer is multiplied twice: ``input`` contracts over its columns in fprop and over its rows in
wgrad, ``grad`` likewise in dgrad and wgrad, ``weight`` in fprop and dgrad. Matrix units want each operand contiguous
along its contraction, so the second use needs a transposed copy. :func:`quantize_both` makes both operands in one
kernel that reads the tensor once (twice where a dynamic scale must be known first), the same codes and scales as
:func:`narrowgate.precision.quantize` bit for bit.

A gradient's cast also sums the gradient's columns where a layer has a bias (:func:`quantize_summed`), so that nothing
else reads it for that.

In eager mode the kernels cast the tensor that they are given; under ``torch.compile`` they also compute it, from what
it was made of (see :mod:`narrowgate.precision.fusion`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .capability import has_cast_kernel, same_codes
from .cast_operators import SAME, kernels_on_cpu
from .clipping import clip_limit
from .delayed import AmaxHistory
from .kernels.program import IDENTITY
from .quantization import QuantizedTensor, quantize
from .spec import Spec

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
        columns: the operand contracted over rows (``dim`` 0). Where both ask for the same codes (see
            :func:`narrowgate.precision.capability.same_codes`)
            they are made once, and only the history of ``rows`` is used.

    Returns:
        The two operands, None where none was asked for. The second's codes lie transposed in memory.
    """
    return _quantize(x, rows, columns, summed=False)[:2]


def quantize_summed(
    x: Tensor, rows: Request | None, columns: Request | None
) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor]:
    """:func:`quantize_both`, and the sums of the columns of ``x``, FP32 [N] (FP64 of an FP64 ``x``).

    They are those of the values before clipping, rotation and rounding, added in FP32: in the pass that casts where
    there is a kernel, else by PyTorch.
    """
    first, second, sums = _quantize(x, rows, columns, summed=True)
    return first, second, column_sums(x) if sums is None else sums


def column_sums(x: Tensor) -> Tensor:
    """Sums of the columns of ``x`` [M, N], at least in FP32: [N]."""
    return x.detach().sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def _quantize(
    x: Tensor, rows: Request | None, columns: Request | None, *, summed: bool
) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor | None]:
    """Both operands, and the sums of the columns where they are wanted and a kernel casts."""
    same = rows is not None and columns is not None and same_codes(rows.spec, columns.spec)
    if not has_kernel(x, *(request.spec for request in (rows, columns) if request is not None)):
        first = None if rows is None else _reference(x, rows, 1)
        if same:
            assert first is not None
            second = QuantizedTensor(first.data, first.scale, first.tensor_scale, first.spec, 0, first.shape)
            return first, second, None
        return first, None if columns is None else _reference(x, columns, 0), None
    if same:
        assert rows is not None
        return _launch(x, rows, columns, same=True, summed=summed)
    if any(request is not None and request.spec.delayed is not None for request in (rows, columns)):
        # A history belongs to one set of codes, so two that differ are two launches.
        first = second = sums = None
        if rows is not None:
            first, _, sums = _launch(x, rows, None, summed=summed)
        if columns is not None:
            _, second, later = _launch(x, None, columns, summed=summed and rows is None)
            sums = later if sums is None else sums
        return first, second, sums
    return _launch(x, rows, columns, summed=summed)


@contextmanager
def kernels_assumed() -> Iterator[None]:
    """Within this block graphs are traced as on a GPU, wherever the tensors lie; such a graph cannot run here."""
    global _assumed
    before, _assumed = _assumed, True
    try:
        yield
    finally:
        _assumed = before


_assumed = False


def has_kernel(x: Tensor, *specs: Spec) -> bool:
    """True where the fused kernels cast ``x`` to all of ``specs``."""
    on_device = x.is_cuda or kernels_on_cpu() or _assumed
    # Not bool(specs): Dynamo of PyTorch 2.11 does not trace it.
    known = len(specs) > 0 and all(has_cast_kernel(spec) for spec in specs)
    return on_device and known and x.dim() == 2 and x.dtype in _DTYPES


def _reference(x: Tensor, request: Request, dim: int) -> QuantizedTensor:
    return quantize(x, request.spec, dim=dim, seed=request.seed, history=request.history)


def _launch(
    x: Tensor, rows: Request | None, columns: Request | None, *, same: bool = False, summed: bool
) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor | None]:
    x = x.detach()
    limits = [None if request is None else limit_of(x, request.spec) for request in (rows, columns)]
    leader = rows if rows is not None else columns
    assert leader is not None
    if leader.spec.delayed is not None and leader.history is not None:
        history = leader.history
        cast = torch.ops.narrowgate.cast_fp8_delayed_summed if summed else torch.ops.narrowgate.cast_fp8_delayed
        codes, turned, scale, *sums = cast(
            [x], IDENTITY, str(leader.spec), rows is not None, columns is not None, leader.seed,
            limits[0] if rows is not None else limits[1], history.history, history.pending, history.saturated,
            history.workspace, history.recording,
        )  # fmt: skip
        scales = (scale, scale)
    else:
        cast = torch.ops.narrowgate.cast_fp8_summed if summed else torch.ops.narrowgate.cast_fp8
        codes, first_scale, turned, second_scale, *sums = cast(
            [x], IDENTITY, "" if rows is None else str(rows.spec),
            SAME if same else "" if columns is None else str(columns.spec),
            None if rows is None else rows.seed, None, limits[0],
            None if columns is None or same else columns.seed, None, limits[1],
        )  # fmt: skip
        scales = (first_scale, first_scale if same else second_scale)
    shape = tuple(x.shape)
    first = second = None
    if rows is not None:
        first = QuantizedTensor(codes, as_stored(scales[0], rows.spec, 1), None, rows.spec, 1, shape)
    if columns is not None:
        second = QuantizedTensor(turned.t(), as_stored(scales[1], columns.spec, 0), None, columns.spec, 0, shape)
    return first, second, sums[0] if summed else None


def limit_of(x: Tensor, spec: Spec) -> Tensor | None:
    """The magnitude at which the kernels are told to clip ``x``, FP32 []; None where they need not be told.

    They find a multiple of the RMS themselves, so that nothing but the cast reads ``x``.
    """
    return None if spec.clip_p is None else clip_limit(x.to(torch.float32), spec)


def as_stored(scale: Tensor, spec: Spec, dim: int) -> Tensor:
    """A kernel's scales as :class:`QuantizedTensor` has them, without a copy."""
    if spec.granularity == "row":
        return scale.unsqueeze(dim)
    return scale.t() if spec.granularity == "1x128" and dim == 1 else scale
