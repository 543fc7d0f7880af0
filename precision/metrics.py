"""How far a quantized tensor or product is from the exact one, and what the format lost on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .grouping import group
from .quantization import QuantizedTensor, prepare, quantize
from .rounding import overflow_threshold
from .scaling import scale_values
from .spec import Spec, as_spec


def sqnr_db(reference: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise in decibels: 10 log10(sum reference^2 / sum error^2).

    Infinite where both are equal, NaN where either holds a NaN or the reference is all zero with an error.
    """
    signal = reference.double().square().sum()
    noise = (reference.double() - approximation.double()).square().sum()
    if noise == 0:
        return math.inf
    return float(10.0 * torch.log10(signal / noise)) if signal > 0 else math.nan


def mean_relative_error(reference: Tensor, approximation: Tensor) -> float:
    """Mean over elements of \\|approximation - reference\\| / \\|reference\\|: LoKA's MERE (arXiv:2605.10886).

    The reference is a product in higher precision than the one judged. Elements with a zero reference have no
    relative error and are left out; NaN if none is left.
    """
    reference = reference.double()
    relative = (approximation.double() - reference).abs() / reference.abs()
    return float(relative[reference != 0].mean())


def saturated(x: Tensor, q: QuantizedTensor) -> Tensor:
    """Which elements of ``x`` lie past the largest value by more than rounding: bool, ``x``'s shape.

    ``x`` is what ``q`` was scaled from: the tensor after :func:`~narrowgate.precision.quantization.prepare`.
    """
    factor = _factors(q)
    return (x.abs() > factor * overflow_threshold(q.spec.fmt.element)) & (factor > 0)


def underflowed(x: Tensor, q: QuantizedTensor) -> Tensor:
    """Which non-zero elements of ``x`` (as in :func:`saturated`) are stored as zero: bool, ``x``'s shape."""
    return (x != 0) & (q.dequantize(rotated=True) == 0)


def _factors(q: QuantizedTensor) -> Tensor:
    """Dequantization factor of every element, in the input's shape; 1 for formats that are stored unscaled."""
    ones = torch.ones(q.shape, device=q.data.device)
    if q.scale is None:
        return ones
    groups = group(q.shape, q.spec.granularity or "tensor", q.spec.block, q.dim)
    return groups.join(groups.split(ones) * groups.expand(scale_values(q.scale, q.tensor_scale)))


@dataclass(frozen=True, kw_only=True)
class TensorMetrics:
    """What quantizing one tensor did to it; fractions are of all elements."""

    #: Largest magnitude of the tensor itself.
    amax: float
    #: Signal to quantization noise, dB, over the elements whose stored value is finite.
    sqnr_db: float
    #: Mean relative error of the same elements.
    mean_relative_error: float
    #: Beyond the clip limit.
    clipped: float
    #: Beyond the format's range under the scale in force, after the clip.
    saturated: float
    #: Not zero, but stored as zero.
    underflowed: float
    #: Stored as NaN or infinity.
    nonfinite: float


def measure(x: Tensor, spec: Spec | str, *, dim: int = -1, seed: int | Tensor | None = None) -> TensorMetrics:
    """Quantize ``x`` as ``spec`` says and measure the loss; arguments as in :func:`narrowgate.precision.quantize`."""
    spec = as_spec(spec)
    x = x.detach().float()
    q = quantize(x, spec, dim=dim, seed=seed)
    rotated = prepare(x, spec.replace(clip_p=None, clip_rms=None), q.dim)
    prepared = prepare(x, spec, q.dim)
    restored = q.dequantize()
    finite = torch.isfinite(restored) & torch.isfinite(x)

    def share(mask: Tensor) -> float:
        return float(mask.double().mean()) if mask.numel() else 0.0

    return TensorMetrics(
        amax=float(x.abs().amax()) if x.numel() else 0.0,
        sqnr_db=sqnr_db(x[finite], restored[finite]),
        mean_relative_error=mean_relative_error(x[finite], restored[finite]),
        clipped=share((prepared != rotated) & torch.isfinite(rotated)),
        saturated=share(saturated(prepared, q)),
        underflowed=share(underflowed(prepared, q)),
        nonfinite=share(~torch.isfinite(restored)),
    )
