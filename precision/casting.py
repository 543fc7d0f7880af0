"""Casts of a matrix to FP8 for both of its contractions at once: fused kernels where they exist, else the reference.

A tensor of a linear layer is multiplied twice: ``input`` contracts over its columns in fprop and over its rows in
wgrad, ``grad`` likewise in dgrad and wgrad, ``weight`` in fprop and dgrad. Matrix units want each operand contiguous
along its contraction, so the second use needs a transposed copy. :func:`quantize_both` makes both operands in one
kernel that reads the tensor once (twice where a dynamic scale must be known first), the same codes and scales as
:func:`narrowgate.precision.quantize` bit for bit.

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
    same = rows is not None and columns is not None and same_codes(rows.spec, columns.spec)
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
    x: Tensor, rows: Request | None, columns: Request | None, *, same: bool = False
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    x = x.detach()
    limits = [None if request is None else limit_of(x, request.spec) for request in (rows, columns)]
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
    return first, second


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
