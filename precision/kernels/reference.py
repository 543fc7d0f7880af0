"""The cast operators in plain PyTorch: a program's own reference, then :func:`narrowgate.precision.quantize`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..delayed import AmaxHistory
from ..quantization import QuantizedTensor, quantize
from ..spec import Spec
from .program import Program

#: Key and bits of an operand's random numbers.
Random = tuple[Tensor | None, Tensor | None]


def reference_cast(
    leaves: Sequence[Tensor], program: Program, rows: str, columns: str, rows_random: Random, columns_random: Random
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``narrowgate::cast_fp8``; a clip limit is taken from the values anew."""
    x = values(leaves, program)
    nothing = x.new_empty(0, dtype=torch.float8_e4m3fn), x.new_empty(0)
    first = second = nothing
    if rows:
        q = quantize(x, rows, dim=1, seed=rows_random[0], random_bits=rows_random[1])
        first = q.data, _scale(q)
    if columns == "=":
        second = _turned(first[0]), nothing[1]
    elif columns:
        q = quantize(x, columns, dim=0, seed=columns_random[0], random_bits=columns_random[1])
        second = _turned(q.data), _scale(q)
    return (*first, *second)


def reference_delayed_cast(
    leaves: Sequence[Tensor],
    program: Program,
    spec: Spec,
    rows: bool,
    columns: bool,
    key: Tensor | None,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    recording: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``narrowgate::cast_fp8_delayed``."""
    x = values(leaves, program)
    history = AmaxHistory(state[0].numel())
    history.history, history.pending, history.saturated, history.workspace = state
    history.recording = recording
    q = quantize(x, spec, dim=1, seed=key, history=history)
    nothing = q.data.new_empty(0)
    return q.data if rows else nothing, _turned(q.data) if columns else nothing, _scale(q)


def values(leaves: Sequence[Tensor], program: Program) -> Tensor:
    """Return the FP32 [M, N] matrix that ``program`` makes of N-D ``leaves``."""
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in leaves))
    count = math.prod(shape[:-1])
    flat = [
        leaf.expand(*shape[:-1], leaf.shape[-1]).reshape(count, leaf.shape[-1])
        if kind in ("mn", "m")
        else leaf.reshape(1, -1)
        for leaf, kind in zip(leaves, program.leaves, strict=True)
    ]
    return program.reference(flat)


def _turned(codes: Tensor) -> Tensor:
    # A copy always: one row's transpose is contiguous as it is, and no two results of an operator may share memory.
    return codes.t().clone(memory_format=torch.contiguous_format)


def _scale(q: QuantizedTensor) -> Tensor:
    """A scale as the kernels store it."""
    assert q.scale is not None
    if q.spec.granularity == "row":
        return q.scale.reshape(-1)
    return q.scale.t().contiguous() if q.spec.granularity == "1x128" and q.dim == 1 else q.scale.clone()
