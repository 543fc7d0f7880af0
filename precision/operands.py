"""Operands of a low-precision product: quantized by path, shared between paths, kept for backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import observer
from .config import OPERANDS
from .layer import LayerState
from .quantization import QuantizedTensor, quantize
from .rounding import torch_dtype
from .spec import Spec

#: An operand ready to multiply: quantized, or dense with its contraction last.
Operand = Tensor | QuantizedTensor


def prepare(
    x: Tensor, dim: int, path: str, position: int, state: LayerState, draw: Tensor | None, recording: bool
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
    """
    gemm = getattr(state.config, path)
    spec: Spec = gemm.second if position else gemm.first
    if spec.high_precision and not spec.sr:
        dense = x.to(torch_dtype(spec.fmt.element))
    else:
        operand, seed = OPERANDS[path][position], None
        if spec.sr:
            assert draw is not None
            seed = state.seed(path, operand, draw)
        quantized = quantize(x, spec, dim=dim, seed=seed, history=state.history(path, operand, recording))
        if not spec.high_precision:
            # Constant within a compiler, so that no graph depends on whether somebody watches.
            if not torch.compiler.is_compiling():
                observer.quantized(state.name, path, operand, x, quantized)
            return quantized
        dense = quantized.data
    return dense if dim == x.dim() - 1 else dense.mT


def shared(operand: Operand, spec: Spec, wanted: Spec) -> Operand | None:
    """The same codes seen from the other contraction axis, or None where ``wanted`` asks for others."""
    if spec != wanted or spec.sr or spec.hadamard is not None:
        return None
    if isinstance(operand, Tensor):
        return operand.mT
    square = spec.block is not None and spec.block[0] == spec.block[1]
    if spec.granularity == "tensor" or square:
        # FP4 codes are packed along the contraction: they would have to be unpacked to turn.
        other = 2 * len(operand.shape) - 3 - operand.dim
        return None if spec.fmt.element.bits == 4 else replace(operand, dim=other)
    return None


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
            tensors += [operand.data, operand.scale]
            if operand.tensor_scale is not None:
                tensors.append(operand.tensor_scale)
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
