"""Products of quantized operands: natively on matrix units, or emulated with the same codes and scales.

A GEMM here is out [R, S] = first · secondᵀ: ``first`` holds R rows and ``second`` S rows, both contracted over the axis
that they were quantized along. The hardware wants both operands contiguous along the contraction ("TN") and multiples
of 16; operands that come otherwise are transposed and padded as codes, one byte an element.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import GemmConfig
from .quantization import QuantizedTensor

#: Both sides of an FP8 GEMM and its contraction are multiples of this many elements.
_ALIGNMENT = 16


def scaled_gemm(
    first: QuantizedTensor, second: QuantizedTensor, gemm: GemmConfig, *, native: bool, out_dtype: torch.dtype
) -> Tensor:
    """Multiply two quantized matrices over their contraction axes.

    Args:
        first: 2-D, R rows across its contraction axis.
        second: 2-D, S rows across its contraction axis, of the same contracted length.
        gemm: the configuration that the operands were quantized by.
        native: use the device's matrix units (see :func:`narrowgate.precision.capability.gemm_support`).
        out_dtype: float32 or bfloat16.

    Returns:
        [R, S] of ``out_dtype``.
    """
    rows, columns = first.shape[1 - first.dim], second.shape[1 - second.dim]
    if rows == 0 or columns == 0 or first.shape[first.dim] == 0:
        return torch.zeros((rows, columns), dtype=out_dtype, device=first.data.device)
    if native:
        return _native(first, second, rows, columns, gemm.accumulate == "fast", out_dtype)
    return _emulated(first, second, out_dtype)


def dense_gemm(first: Tensor, second: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Multiply two unquantized matrices, [R, C] by [S, C] over C, accumulating in FP32: [R, S] of ``out_dtype``."""
    dtype = torch.promote_types(first.dtype, second.dtype)
    if dtype == torch.bfloat16:
        return _mm_accumulating_in_fp32(first, second, out_dtype)
    return as_dtype(torch.mm(first.to(dtype), second.to(dtype).t()), out_dtype)


def _native(
    first: QuantizedTensor, second: QuantizedTensor, rows: int, columns: int, fast: bool, out_dtype: torch.dtype
) -> Tensor:
    a, b = _codes(first), _codes(second)
    granularities = {first.spec.granularity, second.spec.granularity}
    if granularities <= {"tensor", "row"}:
        scale_a, scale_b = _scale(first), _scale(second)
        if granularities != {"tensor"}:
            scale_a = _row_scales(scale_a, a.shape[0]).unsqueeze(1)
            scale_b = _row_scales(scale_b, b.shape[0]).unsqueeze(0)
        # The functional scaled_mm does the same, but Dynamo traces it only from PyTorch 2.12 on.
        product = torch.ops.aten._scaled_mm.default(a, b.t(), scale_a, scale_b, None, None, out_dtype, fast)
    else:
        rows_a, rows_b = (q.spec.granularity == "1x128" for q in (first, second))
        product = torch.ops.narrowgate.block_scaled_mm(
            a, b, _block_scales(first, a.shape[0]), _block_scales(second, b.shape[0]), rows_a, rows_b, out_dtype
        )
    return product if product.shape == (rows, columns) else product[:rows, :columns]


@torch.library.custom_op("narrowgate::block_scaled_mm", mutates_args=())
def _block_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, rows_a: bool, rows_b: bool, out_dtype: torch.dtype
) -> Tensor:
    """a [R, C] · b [S, C]ᵀ with scales of 1x128 (``rows_*``) or 128x128 blocks; an op of its own to be traceable."""
    recipe_a, recipe_b = (
        F.ScalingType.BlockWise1x128 if rows else F.ScalingType.BlockWise128x128 for rows in (rows_a, rows_b)
    )
    return F.scaled_mm(a, b.t(), scale_a.t(), recipe_a, scale_b.t(), recipe_b, output_dtype=out_dtype)


@_block_scaled_mm.register_fake
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, rows_a: bool, rows_b: bool, out_dtype: torch.dtype
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


#: Products that are an operator of this project.
OPERATORS = (torch.ops.narrowgate.block_scaled_mm.default,)


def _scale(operand: QuantizedTensor) -> Tensor:
    assert operand.scale is not None, operand.spec
    return operand.scale


def _codes(operand: QuantizedTensor) -> Tensor:
    """The FP8 codes as [rows, contraction], contiguous along the contraction, padded with zeros to multiples of 16."""
    codes = operand.data if operand.dim == 1 else operand.data.t()
    missing = [-size % _ALIGNMENT for size in codes.shape]
    if any(missing):
        # F.pad knows no FP8 dtype; a zero byte is +0 in both.
        padded = F.pad(codes.view(torch.uint8), (0, missing[1], 0, missing[0]))
        codes = padded.view(operand.data.dtype)
    return codes.contiguous()


def _row_scales(scale: Tensor, padded_rows: int) -> Tensor:
    """One scale a row, contiguous; a tensor scale is expanded and padded rows get a scale of their own."""
    scale = scale.reshape(-1)
    if scale.numel() == 1:
        return scale.expand(padded_rows).contiguous()
    return F.pad(scale, (0, padded_rows - scale.numel())).contiguous()


def _block_scales(operand: QuantizedTensor, padded_rows: int) -> Tensor:
    """Scales of 1x128 or 128x128 blocks in the layout that the library reads, here as the transposed, contiguous view.

    1x128: [blocks, rows]. 128x128: [row blocks, blocks along the contraction], the latter padded to a multiple of 4
    (the layout rules of ``_scaled_mm_v2`` in PyTorch's ScaledBlas.cpp).
    """
    scale = _scale(operand) if operand.dim == 1 else _scale(operand).t()
    if operand.spec.granularity == "1x128":
        return F.pad(scale, (0, 0, 0, padded_rows - scale.shape[0]), value=1.0).t().contiguous()
    return F.pad(scale, (0, -scale.shape[1] % 4), value=1.0).contiguous()


def _emulated(first: QuantizedTensor, second: QuantizedTensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply in BF16 with FP32 accumulation.

    Scales that are constant along the contraction are applied to the product in FP32, as the hardware does; the codes
    themselves are exact in BF16. Scales that vary along the contraction are applied before, which rounds to BF16.
    """
    factored = {first.spec.granularity, second.spec.granularity} <= {"tensor", "row"}
    a, b = (_contraction_last(q, q.elements(torch.bfloat16) if factored else q.dequantize(torch.bfloat16, rotated=True))
            for q in (first, second))  # fmt: skip
    if not factored:
        return _mm_accumulating_in_fp32(a, b, out_dtype)
    product = _mm_accumulating_in_fp32(a, b, torch.float32)
    return as_dtype(product * _scale(first).reshape(-1, 1) * _scale(second).reshape(1, -1), out_dtype)


def _contraction_last(operand: QuantizedTensor, values: Tensor) -> Tensor:
    return values if operand.dim == 1 else values.t()


def _mm_accumulating_in_fp32(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a [R, C] · b [S, C]ᵀ for BF16 operands."""
    if a.is_cuda:
        return (
            torch.mm(a, b.t())
            if out_dtype == a.dtype
            else as_dtype(torch.mm(a, b.t(), out_dtype=torch.float32), out_dtype)
        )
    # Products of BF16 values are exact in FP32, so an FP32 GEMM of widened operands is the same arithmetic, and on
    # CPUs without BF16 instructions it is many times faster.
    return as_dtype(torch.mm(a.float(), b.float().t()), out_dtype)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``: itself where it is."""
    # Not .to() where the dtype is right already: on PyTorch 2.11 an autograd.Function whose output went through such a
    # no-op has gradients of zero once compiled.
    return x if x.dtype == dtype else x.to(dtype)
