"""The leaves of a program as kernels read them: matrices whose rows lie one stride apart, rows, columns, scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .program import Program


class LeafLayout:
    """How leaves become what a kernel reads: decided on the first ones, applied to others of their shapes and strides.

    Attributes:
        strides: of each leaf, elements from what it holds for one row to what it holds for the next; 0 where rows
            share it.
        aligned: whether the rows of all matrices are multiples of 8 elements apart.
    """

    def __init__(self, leaves: Sequence[Tensor], program: Program) -> None:
        found = [_flatten(leaf, kind, leaves) for leaf, kind in zip(leaves, program.leaves, strict=True)]
        self._apply = [apply for apply, _ in found]
        self._as_they_are = all(apply(leaf) is leaf for leaf, apply in zip(leaves, self._apply, strict=True))
        self.strides = tuple(stride for _, stride in found)
        self.aligned = all(s % 8 == 0 for s, kind in zip(self.strides, program.leaves, strict=True) if kind == "mn")

    def flat(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return leaves as a kernel reads them: themselves where they lie as they should, else views or copies."""
        if self._as_they_are:
            return tuple(leaves)
        return tuple([apply(leaf) for leaf, apply in zip(leaves, self._apply, strict=True)])


def _flatten(leaf: Tensor, kind: str, leaves: Sequence[Tensor]) -> tuple[Callable[[Tensor], Tensor], int]:
    """How a leaf becomes what a kernel reads: (a function of it, its row stride in elements)."""
    shape = torch.broadcast_shapes(*(other.shape for other in leaves))
    rows = shape[:-1].numel()

    def as_it_is(leaf: Tensor) -> Tensor:
        return leaf

    if kind == "mn":
        flat = leaf.expand(shape).reshape(rows, shape[-1])
        contiguous = flat.stride(1) == 1 or shape[-1] == 1
        stride = flat.stride(0) if contiguous and rows > 1 else shape[-1]
        if contiguous and flat.data_ptr() == leaf.data_ptr():
            return as_it_is, stride
        return lambda leaf: leaf.expand(shape).reshape(rows, shape[-1]).contiguous(), shape[-1]
    if kind == "m":
        flat = leaf.expand(*shape[:-1], 1).reshape(rows)
        if flat.data_ptr() == leaf.data_ptr():
            return as_it_is, flat.stride(0)
        return lambda leaf: leaf.expand(*shape[:-1], 1).reshape(rows).contiguous(), 1
    if leaf.is_contiguous():
        return as_it_is, 0
    return lambda leaf: leaf.contiguous(), 0
