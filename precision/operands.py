"""Operands of a low-precision product: quantized by path, shared between paths, kept for backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import observer
from .capability import same_codes
from .casting import Request, column_sums, quantize_both, quantize_summed
from .config import OPERANDS
from .gathered import CodedWeight, codes_of, operand_of
from .layer import LayerState
from .quantization import QuantizedTensor, quantize
from .rounding import torch_dtype
from .saved_marks import marked
from .spec import Spec

#: An operand ready to multiply: quantized, or dense with its contraction last.
Operand = Tensor | QuantizedTensor


def prepare(
    x: Tensor,
    dim: int,
    path: str,
    position: int,
    state: LayerState,
    draw: Tensor | None,
    recording: bool,
    after: Tensor | None = None,
) -> Operand:
    """Bring ``x``, contracted over ``dim`` (one of its last two axes), into the format of one operand of one path.

    Args:
        x: the operand in high precision, 2-D or batched.
        dim: its contraction axis, not negative.
        path: the GEMM path.
        position: 0 or 1, which operand of the path.
        state: the layer's.
        draw: the forward's number; needed where the operand is rounded stochastically.
        recording: whether a delayed scale's history takes this amax in.
        after: of a weight that was gathered as codes, see :func:`narrowgate.precision.gathered.operand_of`.
    """
    return _prepare(x, dim, path, position, state, draw, recording, summed=False, after=after)[0]


def _prepare(
    x: Tensor,
    dim: int,
    path: str,
    position: int,
    state: LayerState,
    draw: Tensor | None,
    recording: bool,
    *,
    summed: bool,
    after: Tensor | None = None,
) -> tuple[Operand, Tensor | None]:
    """:func:`prepare`, and with ``summed`` the sums of the columns of ``x``, where a cast gives them."""
    use = (path, position)
    sums: Tensor | None = None
    spec = _spec(state, use)
    source: Tensor | None = x
    if isinstance(x, CodedWeight):
        source, held = None if torch.compiler.is_compiling() else x.source(), operand_of(x, spec, dim, after)
        if held is not None:
            if not torch.compiler.is_compiling():
                _tell(state, use, source, held)
            return held, None
        x = codes_of(x, after).dequantize()
    if spec.high_precision and not spec.sr:
        dense = x.to(torch_dtype(spec.fmt.element))
    else:
        request = _request(state, use, draw, recording)
        if x.dim() == 2 and not spec.high_precision:
            requests = (request, None) if dim == 1 else (None, request)
            if summed:
                *found, sums = quantize_summed(x, *requests)
            else:
                found = quantize_both(x, *requests)
            quantized = found[1 - dim]
            assert quantized is not None
        else:
            quantized = quantize(x, spec, dim=dim, seed=request.seed, history=request.history)
        if not spec.high_precision:
            # Constant within a compiler, so that no graph depends on whether somebody watches.
            if not torch.compiler.is_compiling():
                _tell(state, use, source, quantized)
            return quantized, sums
        dense = quantized.data
    return dense if dim == x.dim() - 1 else dense.mT, None


def _spec(state: LayerState, use: Use) -> Spec:
    gemm = getattr(state.config, use[0])
    return gemm.second if use[1] else gemm.first


def _request(state: LayerState, use: Use, draw: Tensor | None, recording: bool) -> Request:
    spec, (path, operand) = _spec(state, use), (use[0], OPERANDS[use[0]][use[1]])
    seed = None
    if spec.sr:
        assert draw is not None
        seed = state.seed(path, operand, draw)
    return Request(spec, seed, state.history(path, operand, recording))


def _tell(state: LayerState, use: Use, x: Tensor | None, quantized: QuantizedTensor | None) -> None:
    if quantized is not None and x is not None:
        observer.quantized(state.name, use[0], OPERANDS[use[0]][use[1]], x, quantized)


#: One use of a tensor: the GEMM path, and which operand of it (0 or 1).
Use = tuple[str, int]


def prepare_both(
    x: Tensor, rows: Use | None, columns: Use | None, state: LayerState, draw: Tensor | None, recording: bool
) -> tuple[Operand | None, Operand | None]:
    """Bring ``x`` [M, N] into the formats of a use that contracts its columns and of one that contracts its rows.

    Args:
        x: the tensor in high precision.
        rows: the use that contracts over columns; None where there is none.
        columns: the use that contracts over rows; None where there is none.
        state: the layer's.
        draw: as for :func:`prepare`.
        recording: as for :func:`prepare`.
    """
    return _prepare_both(x, rows, columns, state, draw, recording, summed=False)[:2]


def prepare_summed(
    x: Tensor, rows: Use | None, columns: Use | None, state: LayerState, draw: Tensor | None, recording: bool
) -> tuple[Operand | None, Operand | None, Tensor]:
    """:func:`prepare_both`, and the sums of the columns of ``x``, FP32 [N]: from a cast's own pass where there is one.

    They are those of the values before clipping, rotation and rounding.
    """
    first, second, sums = _prepare_both(x, rows, columns, state, draw, recording, summed=True)
    return first, second, column_sums(x) if sums is None else sums


def _prepare_both(
    x: Tensor,
    rows: Use | None,
    columns: Use | None,
    state: LayerState,
    draw: Tensor | None,
    recording: bool,
    *,
    summed: bool,
) -> tuple[Operand | None, Operand | None, Tensor | None]:
    sums: Tensor | None = None
    if rows is not None and columns is not None and not (_spec(state, rows).high_precision or
                                                         _spec(state, columns).high_precision):  # fmt: skip
        requests = _request(state, rows, draw, recording), _request(state, columns, draw, recording)
        if summed:
            *found, sums = quantize_summed(x, *requests)
        else:
            found = quantize_both(x, *requests)
        if not torch.compiler.is_compiling():
            for use, quantized in zip((rows, columns), found, strict=True):
                _tell(state, use, x, quantized)
        return found[0], found[1], sums
    first = second = None
    if rows is not None:
        first, sums = _prepare(x, 1, *rows, state, draw, recording, summed=summed)
    if columns is not None:
        if first is not None and rows is not None:
            second = shared(first, _spec(state, rows), _spec(state, columns))
        if second is None:
            second, later = _prepare(x, 0, *columns, state, draw, recording, summed=summed and sums is None)
            sums = later if sums is None else sums
    return first, second, sums


def shared(operand: Operand, spec: Spec, wanted: Spec) -> Operand | None:
    """The same codes seen from the other contraction axis, or None where ``wanted`` asks for others."""
    if isinstance(operand, Tensor):
        return operand.mT if spec == wanted and not spec.sr else None
    return replace(operand, dim=2 * len(operand.shape) - 3 - operand.dim) if same_codes(spec, wanted) else None


#: How one saved operand is put together again from saved tensors: None, a plain tensor, or a quantized one.
Layout = list[str | tuple[Spec, int, tuple[int, ...], bool] | None]


def save(ctx: Any, operands: list[Operand | None]) -> Layout:
    """Save ``operands`` for backward and return how :func:`restore` puts them together."""
    tensors: list[Tensor] = []
    layout: Layout = []
    for operand in operands:
        if operand is None:
            layout.append(None)
        elif isinstance(operand, Tensor):
            tensors.append(operand)
            layout.append("dense")
        else:
            assert operand.scale is not None
            tensors += [marked(operand.data), marked(operand.scale)]
            if operand.tensor_scale is not None:
                tensors.append(marked(operand.tensor_scale))
            layout.append((operand.spec, operand.dim, operand.shape, operand.tensor_scale is not None))
    ctx.save_for_backward(*tensors)
    return layout


def restore(layout: Layout, tensors: tuple[Tensor, ...]) -> list[Any]:
    """Return the operands that :func:`save` saved."""
    remaining = list(tensors)
    operands: list[Any] = []
    for entry in layout:
        if entry is None:
            operands.append(None)
        elif isinstance(entry, str):
            operands.append(remaining.pop(0))
        else:
            spec, dim, shape, has_tensor_scale = entry
            data, scale = remaining.pop(0), remaining.pop(0)
            tensor_scale = remaining.pop(0) if has_tensor_scale else None
            operands.append(QuantizedTensor(data, scale, tensor_scale, spec, dim, shape))
    return operands
