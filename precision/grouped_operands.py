"""Operands of grouped products: quantized group by group, without knowing on the host how long a group is.

Codes and scales are those that each expert's own linear layer would have, bit for bit: a scale reaches over one group,
stochastic rounding draws from a key of each group and the element's place within it, and a delayed scale's history
takes in the largest amax of all of them. What :func:`narrowgate.precision.capability.grouped_obstacle` lets through is
quantized here: BF16, and FP8 with tensor or row scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import observer
from .capability import same_codes
from .casting import Request, quantize_both
from .config import OPERANDS
from .delayed import AmaxHistory, count_saturated
from .grouped_rows import Groups, group_bits
from .layer import LayerState
from .operands import Use
from .quantization import QuantizedTensor
from .rounding import encode, round_stochastic
from .scaling import scales_from_amax
from .spec import Spec


@dataclass(frozen=True, eq=False)
class GroupedOperand:
    """One operand of all experts, in one of three layouts; C is the contraction.

    - ``rows`` [T, C]: of a product over columns; ``scale`` [T] for ``row``, [E] for ``tensor``.
    - ``matrices`` [E, S, C]: one matrix for each expert; ``scale`` [E, S] or [E].
    - ``columns`` [S, C], C the padded rows: of a product over rows; ``scale`` [E, S] or [E].
    """

    layout: str
    #: FP8 codes; without a scale, BF16 values: ``matrices`` as above, both others as rows [T, ..], not padded.
    data: Tensor
    scale: Tensor | None
    spec: Spec

    def expert(self, index: int, begin: int, padded_begin: int, size: int) -> QuantizedTensor:
        """Expert ``index``'s own operand, as :func:`narrowgate.precision.quantize` makes it of the expert's tensor.

        Args:
            index: which expert.
            begin: its first row.
            padded_begin: its first padded row.
            size: its rows.
        """
        assert self.scale is not None
        row = self.spec.granularity == "row"
        if self.layout == "rows":
            codes, dim = self.data[begin : begin + size], 1
            scale = self.scale[begin : begin + size].unsqueeze(1) if row else self.scale[index]
        elif self.layout == "columns":
            codes, dim = self.data[:, padded_begin : padded_begin + size].t(), 0
            scale = self.scale[index].unsqueeze(0) if row else self.scale[index]
        else:
            codes, dim = self.data[index], 1
            scale = self.scale[index].unsqueeze(1) if row else self.scale[index]
        return QuantizedTensor(codes, scale, None, self.spec, dim, tuple(codes.shape))


@dataclass(frozen=True, eq=False)
class Forward:
    """What the operands of one forward and its backward have in common."""

    state: LayerState
    groups: Groups
    #: The forward's number; None where nothing is rounded stochastically.
    draw: Tensor | None
    #: Whether delayed scales' histories take in these amaxes.
    recording: bool

    def spec(self, use: Use) -> Spec:
        """How ``use`` is stored."""
        gemm = getattr(self.state.config, use[0])
        return gemm.second if use[1] else gemm.first

    def history(self, use: Use) -> AmaxHistory | None:
        """The amax history of ``use``."""
        return self.state.history(use[0], OPERANDS[use[0]][use[1]], self.recording)

    def keys(self, use: Use) -> Tensor:
        """Key of each expert's random bits, int64 [E]: the expert takes the micro-batch's place in the draw."""
        assert self.draw is not None
        experts = torch.arange(self.groups.count, device=self.draw.device)
        return self.state.seed(use[0], OPERANDS[use[0]][use[1]], self.draw + (experts << 16))


def prepare_rows(
    x: Tensor, rows: Use | None, columns: Use | None, forward: Forward
) -> tuple[GroupedOperand | None, GroupedOperand | None]:
    """Bring ``x`` [T, C] into the formats of a use that contracts its columns and of one that contracts its rows."""
    first = None if rows is None else _watched(_rows(x, rows, forward), x, rows, forward)
    if columns is None:
        return first, None
    spec, groups = forward.spec(columns), forward.groups
    if first is not None and same_codes(first.spec, spec):
        # The history belongs to one set of codes, which the first use has entered.
        codes = groups.pad(first.data.view(torch.uint8)).view(first.data.dtype)
        second = GroupedOperand("columns", codes.t().contiguous(), first.scale, spec)
    elif first is not None and first.spec == spec and spec.high_precision and not spec.sr:
        second = replace(first, layout="columns")
    else:
        second = _columns(x, columns, forward)
    return first, _watched(second, x, columns, forward)


def prepare_matrices(
    weight: Tensor, over_last: Use | None, over_rows: Use | None, forward: Forward
) -> tuple[GroupedOperand | None, GroupedOperand | None]:
    """Bring ``weight`` [E, N, K] into the formats of a use that contracts K and of one that contracts N."""
    first = None if over_last is None else _matrices(weight, 2, over_last, forward)
    if over_last is not None and first is not None:
        _watched(first, weight, over_last, forward)
    if over_rows is None:
        return first, None
    spec = forward.spec(over_rows)
    if first is not None and (
        same_codes(first.spec, spec) or (first.spec == spec and spec.high_precision and not spec.sr)
    ):
        second = replace(first, data=first.data.mT)
    else:
        second = _matrices(weight, 1, over_rows, forward)
    return first, _watched(second, weight.mT, over_rows, forward)


def _rows(x: Tensor, use: Use, forward: Forward) -> GroupedOperand:
    spec, groups = forward.spec(use), forward.groups
    if spec.high_precision:
        return GroupedOperand("rows", _dense(x, use, forward), None, spec)
    if spec.granularity == "row" and not spec.sr:
        # A row's scale and codes do not depend on its group, so the fused kernels take them all.
        found, _ = quantize_both(x, Request(spec), None)
        assert found is not None
        assert found.scale is not None
        return GroupedOperand("rows", found.data, found.scale.squeeze(1), spec)
    x = x.detach().to(torch.float32)
    magnitudes = x.abs().amax(1, keepdim=True)
    bits = _bits(use, groups.group, groups.place, x.shape[1], forward)
    if spec.granularity == "row":
        codes, scale = _quantize(x, magnitudes, lambda per: per, spec, bits, None)
    else:
        own = groups.largest(magnitudes)
        codes, scale = _quantize(x, own, lambda per: per[groups.group], spec, bits, forward.history(use))
    return GroupedOperand("rows", codes, scale.squeeze(1), spec)


def _columns(x: Tensor, use: Use, forward: Forward) -> GroupedOperand:
    spec, groups = forward.spec(use), forward.groups
    if spec.high_precision:
        return GroupedOperand("columns", _dense(x, use, forward), None, spec)
    padded = groups.pad(x.detach()).to(torch.float32)
    bits = _bits(use, groups.padded_group, groups.padded_place, x.shape[1], forward)
    magnitudes = padded.abs()
    if spec.granularity == "tensor":
        magnitudes = magnitudes.amax(1, keepdim=True)
    own = groups.padded_largest(magnitudes)
    codes, scale = _quantize(padded, own, lambda per: per[groups.padded_group], spec, bits, forward.history(use))
    scale = scale.squeeze(1) if spec.granularity == "tensor" else scale
    return GroupedOperand("columns", codes.t().contiguous(), scale, spec)


def _matrices(weight: Tensor, dim: int, use: Use, forward: Forward) -> GroupedOperand:
    spec, (experts, rows, columns) = forward.spec(use), weight.shape
    if spec.high_precision:
        data = weight.detach().to(torch.bfloat16)
        if spec.sr:
            values = weight.detach().to(torch.float32)
            data = encode(
                round_stochastic(values, spec.fmt.element, _matrix_bits(weight, use, forward)), spec.fmt.element
            )
        return GroupedOperand("matrices", data if dim == 2 else data.mT, None, spec)
    if spec.granularity == "row" and dim == 2 and not spec.sr:
        found, _ = quantize_both(weight.reshape(experts * rows, columns), Request(spec), None)
        assert found is not None
        assert found.scale is not None
        return GroupedOperand("matrices", found.data.view(weight.shape), found.scale.view(experts, rows), spec)
    values = weight.detach().to(torch.float32)
    own = values.abs().amax(dim if spec.granularity == "row" else (1, 2), keepdim=True)
    bits = _matrix_bits(weight, use, forward) if spec.sr else None
    codes, scale = _quantize(values, own, lambda per: per, spec, bits, forward.history(use))
    scale = scale.flatten(1) if spec.granularity == "row" else scale.view(experts)
    return GroupedOperand("matrices", codes if dim == 2 else codes.mT, scale, spec)


def _dense(x: Tensor, use: Use, forward: Forward) -> Tensor:
    """Rows in BF16, [T, C]."""
    spec, groups = forward.spec(use), forward.groups
    if not spec.sr:
        return x.detach().to(torch.bfloat16)
    bits = _bits(use, groups.group, groups.place, x.shape[1], forward)
    assert bits is not None
    return encode(round_stochastic(x.detach().to(torch.float32), spec.fmt.element, bits), spec.fmt.element)


def _bits(use: Use, group: Tensor, place: Tensor, width: int, forward: Forward) -> Tensor | None:
    return group_bits(forward.keys(use), group, place, width) if forward.spec(use).sr else None


def _matrix_bits(weight: Tensor, use: Use, forward: Forward) -> Tensor:
    experts, rows, columns = weight.shape
    group = torch.arange(experts, device=weight.device)
    # One long row for each expert: the same elements in the same order.
    return group_bits(forward.keys(use), group, torch.zeros_like(group), rows * columns).view(weight.shape)


def _quantize(
    x: Tensor,
    own: Tensor,
    spread: Callable[[Tensor], Tensor],
    spec: Spec,
    bits: Tensor | None,
    history: AmaxHistory | None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of FP32 ``x`` as :func:`narrowgate.precision.quantize` computes them, group by group.

    Args:
        x: the values.
        own: each group's amax.
        spread: makes what is one number a group broadcast against ``x``.
        spec: the format; no clip, no Hadamard rotation.
        bits: of stochastic rounding, in the shape of ``x``.
        history: of a delayed scale.

    Returns:
        Codes in the shape of ``x``, scales in that of ``own``.
    """
    element, amax = spec.fmt.element, own
    recording = history is not None and history.recording
    if history is not None:
        amax = torch.where(own < torch.inf, history.amax(own), torch.nan)
        if recording:
            history.record(torch.where(own < torch.inf, own, -1.0).amax())
            known = scales_from_amax(history.amax(own), spec)
            count_saturated(history, x * spread(known.multiplier), element)
    scales = scales_from_amax(amax, spec)
    x = x * spread(scales.multiplier)
    if bits is not None:
        return encode(round_stochastic(x, element, bits), element), scales.scale
    return encode(x.clamp(-element.max, element.max), element), scales.scale


def _watched(operand: GroupedOperand, x: Tensor, use: Use, forward: Forward) -> GroupedOperand:
    """Tell an observer of each expert's operand: only then does the host ask how long the groups are."""
    if torch.compiler.is_compiling() or operand.scale is None or not observer.watching():
        return operand
    begin = padded_begin = 0
    ends = forward.groups.padded_ends.tolist()
    for index, size in enumerate(forward.groups.sizes()):
        values = x[index] if operand.layout == "matrices" else x[begin : begin + size]
        quantized = operand.expert(index, begin, padded_begin, size)
        observer.quantized(forward.state.name, use[0], OPERANDS[use[0]][use[1]], values, quantized)
        begin, padded_begin = begin + size, ends[index]
    return operand
