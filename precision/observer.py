"""Watching what quantization does to the operands of real steps: off by default, and then it costs one branch.

:func:`observe` switches counting on for the products that run *eagerly* within it. A compiled graph never sees it:
under a compiler the hook is a constant branch that the graph does not contain, so switching on and off recompiles
nothing, and a compiled product is not counted. Whoever trains compiled runs a sampled batch once more without
compilation. All sums stay on the device until :meth:`Observer.result` fetches them at once.

Codes that two paths share may be counted once only, under the path that they were made for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .metrics import saturated
from .quantization import QuantizedTensor
from .quantization import prepare as rotated_and_clipped

_ACTIVE: list[Observer] = []


@dataclass(frozen=True, kw_only=True)
class OperandNumerics:
    """What quantization did to one operand of one layer over the observed steps.

    Shares are of all elements, ``underflowed`` of those that are not zero. The worst step's values stand beside
    those of all steps together, since one bad step is what harms a training.
    """

    layer: str
    #: ``fprop``, ``dgrad`` or ``wgrad``, and ``input``, ``weight`` or ``grad``.
    path: str
    operand: str
    #: The format expression.
    format: str
    #: Steps in which the operand was quantized, and elements over all of them.
    steps: int
    elements: int
    #: Largest finite magnitude.
    amax: float
    #: Past the format's range under the scale in force, and not clipped on purpose.
    saturated: float
    worst_saturated: float
    worst_saturated_step: int
    #: Not zero, but stored as zero.
    underflowed: float
    worst_underflowed: float
    worst_underflowed_step: int
    #: Beyond the limit of ``clip(...)``.
    clipped: float
    worst_clipped: float
    #: Stored as NaN or infinity.
    nonfinite: float
    #: Signal to quantization noise over all finite elements, dB; None where nothing was lost or nothing is finite.
    sqnr_db: float | None


@dataclass
class Observer:
    """Collects counts of operands; give it to :func:`observe` and name each step.

    Attributes:
        step: number of the step that is running; counts of one step join.
    """

    step: int = 0
    #: By (layer, path, operand, format): the step and its counts as in :func:`_count`, on the device.
    _counts: dict[tuple[str, str, str, str], list[tuple[int, Tensor]]] = field(default_factory=dict)

    def add(self, layer: str, path: str, operand: str, x: Tensor, q: QuantizedTensor) -> None:
        """Count one operand: ``x`` before and ``q`` after quantization."""
        key = (layer, path, operand, str(q.spec))
        self._counts.setdefault(key, []).append((self.step, _count(x, q)))

    def result(self) -> list[OperandNumerics]:
        """Return what was counted, in the order in which operands were first seen. Waits for the device."""
        rows = [counts for found in self._counts.values() for _, counts in found]
        if not rows:
            return []
        values = iter(torch.stack(rows).cpu().tolist())
        return [_summarise(key, [(step, next(values)) for step, _ in found]) for key, found in self._counts.items()]


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Within, every operand that an eager product of the native backend quantizes is counted by ``observer``."""
    _ACTIVE.append(observer)
    try:
        yield observer
    finally:
        _ACTIVE.remove(observer)


def watching() -> bool:
    """Whether an observer is active."""
    return bool(_ACTIVE)


def quantized(layer: str, path: str, operand: str, x: Tensor, q: QuantizedTensor) -> None:
    """Tell the active observers, if any, of a quantized operand. Called outside of compilers only."""
    for observer in _ACTIVE:
        observer.add(layer, path, operand, x, q)


@torch.no_grad()
def _count(x: Tensor, q: QuantizedTensor) -> Tensor:
    """FP64 [9]: elements, non-zero, saturated, underflowed, clipped, non-finite, signal, noise, amax."""
    x = x.detach().float()
    unclipped = q.spec.clip_p is None and q.spec.clip_rms is None
    before = x if q.spec.hadamard is None else rotated_and_clipped(x, q.spec.replace(clip_p=None, clip_rms=None), q.dim)
    after = before if unclipped else rotated_and_clipped(x, q.spec, q.dim)
    stored = q.dequantize(rotated=True)
    # Against the values before the clip: what the clip takes away is lost as well. A non-finite element makes its
    # group's scale NaN, so what is stored tells of both, and 0 * NaN takes both out of the sums.
    signal = torch.nan_to_num(before + 0 * stored, nan=0, posinf=0, neginf=0)
    noise = torch.nan_to_num(before - stored, nan=0, posinf=0, neginf=0)
    magnitude = torch.nan_to_num(x.abs(), nan=0, posinf=0)
    counts = (
        after.count_nonzero(),
        saturated(after, q).count_nonzero(),
        ((stored == 0) & (after != 0)).count_nonzero(),
        stored.new_zeros(()) if unclipped else ((after != before) & (before.abs() < torch.inf)).count_nonzero(),
        (stored != stored).count_nonzero(),
        torch.linalg.vector_norm(signal, dtype=torch.float64).square(),
        torch.linalg.vector_norm(noise, dtype=torch.float64).square(),
        magnitude.amax() if x.numel() else magnitude.sum(),
    )
    elements = torch.full((), x.numel(), dtype=torch.float64, device=x.device)
    return torch.stack([elements, *(count.double() for count in counts)])


def _summarise(key: tuple[str, str, str, str], found: list[tuple[int, list[float]]]) -> OperandNumerics:
    by_step: dict[int, list[float]] = {}
    for step, counts in found:
        held = by_step.setdefault(step, [0.0] * len(counts))
        by_step[step] = [*(a + b for a, b in zip(held[:-1], counts[:-1], strict=True)), max(held[-1], counts[-1])]
    elements, nonzero, over, under, clipped, bad, signal, noise = (
        math.fsum(c[i] for c in by_step.values()) for i in range(8)
    )
    worst_over = max(by_step, key=lambda step: _share(by_step[step][2], by_step[step][0]))
    worst_under = max(by_step, key=lambda step: _share(by_step[step][3], by_step[step][1]))
    layer, path, operand, fmt = key
    return OperandNumerics(
        layer=layer,
        path=path,
        operand=operand,
        format=fmt,
        steps=len(by_step),
        elements=int(elements),
        amax=max(c[8] for c in by_step.values()),
        saturated=_share(over, elements),
        worst_saturated=_share(by_step[worst_over][2], by_step[worst_over][0]),
        worst_saturated_step=worst_over,
        underflowed=_share(under, nonzero),
        worst_underflowed=_share(by_step[worst_under][3], by_step[worst_under][1]),
        worst_underflowed_step=worst_under,
        clipped=_share(clipped, elements),
        worst_clipped=max(_share(c[4], c[0]) for c in by_step.values()),
        nonfinite=_share(bad, elements),
        sqnr_db=10 * math.log10(signal / noise) if noise > 0 and signal > 0 else None,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
