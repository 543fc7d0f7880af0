"""Which elements share a scale: views of a tensor in which every group lies along its own axes.

A group reaches over the whole tensor, over one slice along the contraction axis (``row``), or over a block of
(rows, elements along the contraction). For blocks with more than one row, the rows run along the axis next to the
contraction: the last axis, or the one before it where the contraction is the last. Ragged edges are padded with
zeros, which change no amax and are cut off again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import NarrowgateError


@dataclass(frozen=True)
class Grouping:
    """How a tensor of one shape is split into groups; made by :func:`group`."""

    shape: tuple[int, ...]
    #: Contraction axis, not negative.
    dim: int
    #: (axis, block length) of every split axis, in ascending order of the axis.
    splits: tuple[tuple[int, int], ...]
    #: Axes of the split view over which one group reaches.
    axes: tuple[int, ...]
    #: ``row`` keeps its contraction axis with length 1, blocks drop their inner axes, ``tensor`` drops all.
    keep: bool = False

    def split(self, x: Tensor) -> Tensor:
        """View ``x`` (of this grouping's shape) so that each group lies along :attr:`axes`; pads ragged edges."""
        padding = [0] * (2 * len(self.shape))
        for axis, length in self.splits:
            padding[2 * (len(self.shape) - 1 - axis) + 1] = -self.shape[axis] % length
        if any(padding):
            x = F.pad(x, padding)
        for axis, length in reversed(self.splits):
            x = x.unflatten(axis, (x.shape[axis] // length, length))
        return x

    def join(self, x: Tensor) -> Tensor:
        """Undo :meth:`split`."""
        for axis, _ in self.splits:
            x = x.flatten(axis, axis + 1)
        if self.splits and x.shape != self.shape:
            if torch.compiler.is_compiling() and x.device.type == "cpu":
                # Inductor's C++ backend splits an axis that is divided by the block length, and leaves a ragged rest
                # uncomputed (try_loop_split, torch 2.13). as_strided makes it finish the padded tensor first.
                # Its strides are computed: a backward that asks a tensor for them is traced anew by Dynamo, which then
                # leaves autocast switched off.
                x = x.contiguous().as_strided(x.shape, [math.prod(x.shape[i + 1 :]) for i in range(x.dim())])
            for axis, _ in self.splits:
                x = x.narrow(axis, 0, self.shape[axis])
        return x

    def amax(self, split: Tensor) -> Tensor:
        """Largest magnitude of every group of a split view, FP32, axes kept: NaN where it holds one, 0 if empty."""
        if len(self.axes) == split.dim() and not self.splits:
            if split.numel() == 0:
                return split.new_zeros((1,) * split.dim())
            low, high = split.aminmax()
            return torch.maximum(low.abs(), high.abs()).view((1,) * split.dim())
        if split.numel() == 0:
            return split.new_zeros([1 if axis in self.axes else n for axis, n in enumerate(split.shape)])
        return split.abs().amax(self.axes, keepdim=True)

    def compact(self, scale: Tensor) -> Tensor:
        """Drop the kept axes of a per-group tensor: the shape in which scales are stored."""
        if self.keep:
            return scale
        for axis in reversed(self.axes):
            scale = scale.squeeze(axis)
        return scale

    def expand(self, scale: Tensor) -> Tensor:
        """Undo :meth:`compact`: give a stored scale the axes that broadcast against a split view."""
        if self.keep:
            return scale
        for axis in self.axes:
            scale = scale.unsqueeze(axis)
        return scale


def group(shape: tuple[int, ...], granularity: str, block: tuple[int, int] | None, dim: int) -> Grouping:
    """Return the grouping of a tensor of ``shape`` with contraction axis ``dim``.

    Raises:
        NarrowgateError: ``dim`` is no axis of the shape.
    """
    ndim = len(shape)
    if not -ndim <= dim < ndim and not (ndim == 0 and granularity == "tensor"):
        raise NarrowgateError(f"dim {dim} is no axis of a tensor of shape {tuple(shape)}")
    dim %= max(ndim, 1)
    if granularity == "tensor":
        return Grouping(shape, dim, (), tuple(range(ndim)))
    if granularity == "row":
        return Grouping(shape, dim, (), (dim,), keep=True)
    assert block is not None, granularity
    rows, length = block
    if rows == 1 or ndim == 1:
        return Grouping(shape, dim, ((dim, length),), (dim + 1,))
    other = ndim - 1 if dim != ndim - 1 else ndim - 2
    splits = sorted([(other, rows), (dim, length)])
    (first, _), (second, _) = splits
    return Grouping(shape, dim, tuple(splits), (first + 1, second + 2))
