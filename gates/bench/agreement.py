"""Whether a cast kernel's codes and scales are its reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: What a program may differ by. Exponentials and fused multiply-adds of two compilers differ by a few units in the last
#: place of FP32, which moves a scale by as much, and a code by one step where the value lies that near to the middle
#: between two: about one of 30,000 for a relative difference of 1e-6.
SCALE_TOLERANCE = 1e-5
CODE_SHARE = 1e-3
CODE_STEPS = 1


@dataclass(frozen=True)
class Agreement:
    """How far results are from the reference's."""

    #: Share of codes that differ.
    codes: float
    #: The most steps of the format that one differs by; None where too many differ to ask.
    steps: int | None
    #: Largest relative difference of a scale.
    scale: float

    @property
    def exact(self) -> bool:
        """Bit for bit the same."""
        return self.codes == 0 and self.scale == 0

    @property
    def close(self) -> bool:
        """Within what two compilers may make of one program."""
        few = self.codes <= CODE_SHARE and self.steps is not None and self.steps <= CODE_STEPS
        return few and self.scale <= SCALE_TOLERANCE


def agreement(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Agreement:
    """Compare results of a cast operator: FP8 codes and FP32 scales, in any order.

    A scale that is NaN or infinite on either side differs infinitely.
    """
    differing = total = steps = 0
    scale = 0.0
    many = False
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
        assert ours.dtype == theirs.dtype, (ours.dtype, theirs.dtype)
        if not ours.numel():
            continue
        if ours.dtype is torch.float32:
            scale = max(scale, _relative(ours, theirs))
            continue
        a, b = ours.view(torch.uint8), theirs.view(torch.uint8)
        apart = a != b
        count = int(apart.sum())
        differing, total = differing + count, total + a.numel()
        if count > CODE_SHARE * a.numel():
            many = True
        elif count:
            steps = max(steps, int((_ordered(a[apart]) - _ordered(b[apart])).abs().max()))
    return Agreement(differing / max(total, 1), None if many else steps, scale)


def _relative(ours: Tensor, theirs: Tensor) -> float:
    if torch.equal(ours, theirs):
        return 0.0
    difference = float(((ours - theirs).abs() / theirs.abs()).max())
    return difference if difference < float("inf") else float("inf")


def _ordered(codes: Tensor) -> Tensor:
    """Bytes of sign and magnitude as integers in the order of their values; both zeros are 0."""
    magnitude = (codes & 0x7F).to(torch.int16)
    return torch.where(codes >= 0x80, -magnitude, magnitude)
