"""Gradients of embedding tables of few rows as one matrix product, where a scatter would add atomically.

Half a million tokens that look up a table of four rows add half a million gradients to four rows: atomic additions
wait for each other, in another order each time. The same sum is a product, ``marks [T, rows]ᵀ · gradient [T, d]``, with
a one wherever a token looks up a row. Tables looked up by the same tokens and added up receive the same gradient, so
one product with all their columns side by side serves them all, with the same bits every time.

**Precision.** Ones, and products with them, are exact in 16 bits; sums are FP32. A 16-bit gradient is multiplied as it
is. An FP32 gradient is never rounded: it is split into three BF16 parts that add up to it exactly, and multiplied three
times, where its magnitude is 0 or in [2^-110, 3.389e38] (below, off by at most 2^-134 an element). What is left is the
rounding of FP32 sums in a fixed order, at most about ``n · 2^-23 · Σ|g|`` for a row of ``n`` tokens (with matrix units
that truncate; typically far less, and the same order as a scatter's). A gradient element that is not finite makes its
column NaN in every row of every such table, not only in those its token looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Rows beyond which marks cost more than the additions that they spare.
MAX_ROWS = 512
#: Tokens below which a scatter is as fast.
MIN_TOKENS = 2**15
#: BF16 keeps 8 bits of a significand, FP32 has 24.
_PARTS = 3
#: Columns of marks are filled up to a multiple, which matrix units ask for: 16 bytes.
_ALIGN = 8
#: Tokens of one partial sum at least, and partial sums at most: few rows and columns alone would leave most of a GPU
#: idle.
_CHUNK, _CHUNKS = 4096, 32

# No FLOPs are registered: these products stand for additions, which nobody counts as the model's work.
_LIBRARY = torch.library.Library("narrowgate", "FRAGMENT")
_LIBRARY.define(
    "small_table_gradients(Tensor grad, Tensor[] ids, int[] rows) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def _gradients(grad: Tensor, ids: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Return the gradients of all tables, one below the other: FP32 [sum of rows, d].

    Args:
        grad: [T, d], FP32 or 16 bits wide.
        ids: [T] of each table.
        rows: of each table.
    """
    total, narrow = sum(rows), grad.dtype in (torch.bfloat16, torch.float16)
    marks = _marks(ids, rows, grad.dtype if narrow else torch.bfloat16)
    if narrow:
        return _product(marks, grad)[:total]
    rest, found = grad, None
    for _ in range(_PARTS):
        part = rest.to(marks.dtype)
        # Exact: what a rounding leaves has no bits that the rounded number had.
        rest = rest - part
        product = _product(marks, part)
        found = product if found is None else found + product
    assert found is not None
    return found[:total]


def _marks(ids: Sequence[Tensor], rows: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[T, sum of rows, aligned]: one where a token looks up a row, else zero."""
    columns, first = [], 0
    for column, count in zip(ids, rows, strict=True):
        columns.append(column + first)
        first += count
    marks = torch.zeros(len(ids[0]), -(-first // _ALIGN) * _ALIGN, dtype=dtype, device=ids[0].device)
    return marks.scatter_(1, torch.stack(columns, 1), 1.0)


def _product(marks: Tensor, grad: Tensor) -> Tensor:
    """[T, R]ᵀ · [T, d] of one 16-bit type: FP32 [R, d]."""
    tokens = len(grad)
    chunks = max(1, min(_CHUNKS, tokens // _CHUNK))
    even = tokens // chunks * chunks
    shape = (chunks, tokens // chunks)
    found = _bmm(marks[:even].unflatten(0, shape).mT, grad[:even].unflatten(0, shape)).sum(0)
    if even < tokens:
        found += _bmm(marks[even:].mT.unsqueeze(0), grad[even:].unsqueeze(0))[0]
    return found


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    with torch.autocast("cpu", enabled=False):
        return torch.bmm(a.float(), b.float())


def _fake(grad: Tensor, ids: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    return grad.new_empty(sum(rows), grad.shape[1], dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("small_table_gradients", _gradients, _key)
torch.library.register_fake("narrowgate::small_table_gradients", _fake, lib=_LIBRARY)


class _SumOfRows(torch.autograd.Function):
    """Adds up given rows and rows of small tables; the tables' gradients come from one product."""

    @staticmethod
    def forward(dtype: torch.dtype | None, given: int, small: int, *tensors: Tensor) -> Tensor:
        weights, ids = tensors[given : given + small], tensors[given + small :]
        total = _added(tensors[:given], weights, ids)
        # A cast to the type it has: torch.compile of PyTorch 2.11 drops the gradients of what comes out of it.
        return total if dtype in (None, total.dtype) else total.to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        given, small, tensors = inputs[1], inputs[2], inputs[3:]
        ctx.given = given
        ctx.rows = [len(weight) for weight in tensors[given : given + small]]
        ctx.save_for_backward(*tensors[given + small :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids, grad, given = ctx.saved_tensors, grads[0], ctx.given
        wide = grad if grad.dtype == torch.float32 else grad.float()
        found = torch.ops.narrowgate.small_table_gradients(grad, list(ids), ctx.rows).split(ctx.rows)
        return (None, None, None, *[wide] * given, *found, *[None] * len(ids))


def _added(given: Sequence[Tensor], weights: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
    rows = [*given, *(F.embedding(column, weight) for weight, column in zip(weights, ids, strict=True))]
    total = rows[0]
    for one in rows[1:]:
        total = total + one
    return total


def is_small(table: nn.Module) -> bool:
    """Whether a table's gradient can be a product: few rows, FP32, whole, and looked up without further rules."""
    return (
        isinstance(table, nn.Embedding)
        and table.num_embeddings <= MAX_ROWS
        and table.weight.dtype == torch.float32
        and type(table.weight) is nn.Parameter
        and table.padding_idx is None
        and table.max_norm is None
        and not table.scale_grad_by_freq
        and not table.sparse
    )


def products_pay(ids: Tensor) -> bool:
    """Whether products are faster than scatters for ``ids`` [T, ...]: many tokens on a GPU, and gradients asked for."""
    return ids.is_cuda and torch.is_grad_enabled() and ids.shape[0] >= MIN_TOKENS


def sum_of_rows(
    given: Sequence[Tensor], small: Sequence[tuple[nn.Embedding, Tensor]], dtype: torch.dtype | None = None
) -> Tensor:
    """Return the sum [T, d] of ``given`` and of what ``small`` tables hold, in this order, added up in FP32.

    Gradients of ``small`` are dense and FP32. With a 16-bit ``dtype`` they take one product, else three.

    Args:
        given: [T, d].
        small: tables that pass :func:`is_small`, and ids [T] of each; may be empty.
        dtype: of the result; None for that of the sum.
    """
    if not small:
        total = _added(given, (), ())
        return total if dtype is None else total.to(dtype)
    weights, ids = [table.weight for table, _ in small], [column for _, column in small]
    out = _SumOfRows.apply(dtype, len(given), len(small), *given, *weights, *ids)
    assert isinstance(out, Tensor)
    return out
