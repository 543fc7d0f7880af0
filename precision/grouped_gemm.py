"""Products of all experts in one launch: PyTorch's grouped GEMM, for BF16 and for FP8 with row scales.

Two shapes, by what the offsets divide:

- :func:`rows_product`: [T, C] · [E, S, C]ᵀ, rows of a group by its expert's matrix: fprop and dgrad;
- :func:`columns_product`: [S1, T] · [T, S2] of each group, contracted over its rows: wgrad, [E, S1, S2].

What the kernels demand (GroupedBlas.cpp, GroupMMCommon.cuh, ScaledGroupMM.cu of PyTorch 2.11): E4M3 codes contiguous
along the contraction, every fixed size a multiple of 16, FP32 scales for each row of each group; in a product over rows
every group a positive multiple of 16 long (:mod:`narrowgate.precision.grouped_rows`). BF16 operands lie as they come,
with rows of 16 bytes' multiple. Codes and values are padded with zeros to meet that.

They accumulate in FP32 and write BF16, nothing else: a result that is wanted in FP32 (a weight gradient of FP32
weights) is that BF16 number. Autocast rounds the same results in the same way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .gemm import as_dtype
from .grouped_operands import GroupedOperand
from .grouped_rows import Groups

# PyTorch's operators through our own, since layouts decide what the kernels take: Inductor lowers theirs by itself, and
# where an operand is still to be computed it picks another layout than the one that was asked for (torch 2.11, 2.13).
_LIBRARY = torch.library.Library("narrowgate", "FRAGMENT")
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
_LIBRARY.define("grouped_mm(Tensor a, Tensor b, Tensor ends) -> Tensor", tags=_TAGS)
_LIBRARY.define(
    "scaled_grouped_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor ends, bool fast) -> Tensor",
    tags=_TAGS,
)


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.aten._grouped_mm.default(a, b, ends, None, None)


def _scaled_grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, fast: bool) -> Tensor:
    # Not the functional scaled_grouped_mm, which PyTorch 2.11 has no shapes for.
    return torch.ops.aten._scaled_grouped_mm.default(
        a, b, scale_a, scale_b, ends, None, None, torch.bfloat16, fast
    )  # fmt: skip


for _name, _product in (("grouped_mm", _grouped_mm), ("scaled_grouped_mm", _scaled_grouped_mm)):
    _LIBRARY.impl(_name, _product, "CompositeExplicitAutograd")
    torch.library.register_fake(f"narrowgate::{_name}", _product, lib=_LIBRARY)

#: Operators that multiply the groups: ``(a, b, ends)`` in BF16, ``(a, b, scale_a, scale_b, ends, fast)`` in E4M3.
OPERATORS = (torch.ops.narrowgate.grouped_mm.default, torch.ops.narrowgate.scaled_grouped_mm.default)

#: Fixed sizes of FP8 operands, and of BF16 operands: 16 bytes.
_CODES, _VALUES = 16, 8


def rows_product(
    first: GroupedOperand, second: GroupedOperand, groups: Groups, *, fast: bool, out_dtype: torch.dtype
) -> Tensor:
    """Multiply the rows of each group by its expert's matrix.

    Args:
        first: ``rows`` [T, C].
        second: ``matrices`` [E, S, C].
        groups: which rows are whose.
        fast: keep partial sums in the tensor core's narrow accumulator; FP8 only.
        out_dtype: of the result.

    Returns:
        [T, S], rounded to BF16 whatever ``out_dtype`` is.
    """
    columns = second.data.shape[1]
    if groups.rows == 0:
        return first.data.new_zeros((0, columns), dtype=out_dtype)
    if first.scale is None or second.scale is None:
        a = _padded(first.data, 1, _VALUES).contiguous()
        b = _padded(_padded(second.data, 1, _VALUES), 2, _VALUES)
        product = torch.ops.narrowgate.grouped_mm.default(a, b.mT, groups.ends)
    else:
        a = _padded(first.data, 1, _CODES).contiguous()
        b = _padded(_padded(second.data, 1, _CODES), 2, _CODES).contiguous()
        scale_a = first.scale[groups.group] if first.spec.granularity == "tensor" else first.scale.contiguous()
        scale_b = _matrix_scales(second, b.shape[1])
        product = torch.ops.narrowgate.scaled_grouped_mm.default(a, b.mT, scale_a, scale_b, groups.ends, fast)
    return as_dtype(product if product.shape[1] == columns else product[:, :columns], out_dtype)


def columns_product(
    first: GroupedOperand, second: GroupedOperand, groups: Groups, *, fast: bool, out_dtype: torch.dtype
) -> Tensor:
    """Multiply two operands over the rows of each group.

    Args:
        first: ``columns`` [S1, C].
        second: ``columns`` [S2, C].
        groups: which rows are whose.
        fast: as for :func:`rows_product`.
        out_dtype: of the result.

    Returns:
        [E, S1, S2], rounded to BF16 whatever ``out_dtype`` is; zeros for a group without rows.
    """
    if first.scale is None or second.scale is None:
        return as_dtype(dense_columns_product(first.data, second.data, groups), out_dtype)
    rows, columns = first.data.shape[0], second.data.shape[0]
    a, b = _padded(first.data, 0, _CODES), _padded(second.data, 0, _CODES)
    scale_a, scale_b = (_matrix_scales(q, x.shape[0]).flatten() for q, x in ((first, a), (second, b)))
    product = torch.ops.narrowgate.scaled_grouped_mm.default(a, b.t(), scale_a, scale_b, groups.padded_ends, fast)
    return as_dtype(product[:, :rows, :columns], out_dtype)


def dense_columns_product(first: Tensor, second: Tensor, groups: Groups) -> Tensor:
    """firstᵀ · second of each group's rows, BF16 [T, S1] and [T, S2]: BF16 [E, S1, S2]."""
    rows, columns = first.shape[1], second.shape[1]
    if groups.rows == 0:
        return first.new_zeros((groups.count, rows, columns))
    a, b = (_padded(x, 1, _VALUES).contiguous() for x in (first, second))
    product = torch.ops.narrowgate.grouped_mm.default(a.t(), b, groups.ends)
    # A contraction over nothing leaves what was in the accumulator on Blackwell (pytorch/pytorch#172439).
    empty = (groups.ends == groups.starts).view(-1, 1, 1)
    return torch.where(empty, 0, product[:, :rows, :columns])


def _matrix_scales(operand: GroupedOperand, padded: int) -> Tensor:
    """One scale for each line of each expert, FP32 [E, padded], contiguous; those of padded lines multiply zeros."""
    assert operand.scale is not None
    if operand.spec.granularity == "tensor":
        return operand.scale.unsqueeze(1).expand(-1, padded).contiguous()
    return F.pad(operand.scale, (0, padded - operand.scale.shape[1])).contiguous()


def _padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    """``x`` with zeros behind its end along ``dim``, up to a multiple."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    padding = [0, 0] * (x.dim() - 1 - dim) + [0, missing]
    # F.pad knows no FP8 dtype; a zero byte is +0 there.
    return F.pad(x.view(torch.uint8), padding).view(x.dtype) if x.element_size() == 1 else F.pad(x, padding)
