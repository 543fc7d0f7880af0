"""Clipping outliers before the scale is taken: by percentile of the magnitudes, or by a multiple of their RMS.

Both limits look at the whole local tensor, ignore NaN and infinity, and never hide them: a non-finite element stays
non-finite. What lies beyond the limit is *clipped*, counted apart from what the format *saturates*.

**Percentile.** The limit is the smallest magnitude such that at most ``(1 - p/100) n`` elements lie above it (the
inverted empirical distribution). Up to :data:`SAMPLE` elements it is exact. A larger tensor is sampled: one element
from each of SAMPLE equal stretches, at an offset that a fixed hash of the stretch's number gives, so a stride cannot
line up with the tensor's columns and the estimate is the same each time. With q = 1 - p/100, the share of elements
above the limit is then estimated without bias and with a standard deviation of at most ``sqrt(q (1 - q) / SAMPLE)``:
at p = 99.99 the true share is (1.0 +- 0.2)e-4, at 99.9 (1.00 +- 0.06)e-3.

A limit of zero (more than p percent zeros, as in the gradients of rare rows) would wipe the tensor and clips nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .spec import Spec

#: Largest number of magnitudes that a percentile looks at.
SAMPLE = 1 << 18


def clip_limit(x: Tensor, spec: Spec) -> Tensor | None:
    """Return the magnitude (FP32, shape []) at which ``spec`` clips FP32 ``x``, or None where it does not clip."""
    if spec.clip_p is not None:
        limit = percentile(x, spec.clip_p)
    elif spec.clip_rms is not None:
        limit = root_mean_square(x) * spec.clip_rms
    else:
        return None
    return torch.where(limit > 0, limit, math.inf)


def clip(x: Tensor, limit: Tensor) -> Tensor:
    """Clip FP32 ``x`` to [-limit, limit]; NaN and infinity pass unchanged."""
    clipped = torch.minimum(torch.maximum(x, -limit), limit)
    return torch.where(x.abs() < math.inf, clipped, x)


def percentile(x: Tensor, p: float) -> Tensor:
    """Estimate the ``p``-th percentile (0 < p <= 100) of the finite magnitudes of ``x``; FP32, shape []; 0 if empty."""
    sample = x.reshape(-1)
    n = sample.shape[0]
    if n == 0:
        return sample.new_zeros(())
    if n > SAMPLE:
        stretch = n // SAMPLE
        number = torch.arange(SAMPLE, device=x.device)
        offset = _hash32(number).mul_(stretch) >> 32
        sample = sample.index_select(0, number.mul_(stretch).add_(offset))
        n = SAMPLE
    above = min(int(n * (100.0 - p) / 100.0 + 1e-6), n - 1)
    return _finite(sample.abs()).topk(above + 1).values[above]


def root_mean_square(x: Tensor) -> Tensor:
    """Root mean square of ``x`` with non-finite elements counted as zero; FP32, shape []; 0 if empty.

    Infinite (so that nothing is clipped) where the squares overflow FP32, past magnitudes of about 1e19.
    """
    if x.numel() == 0:
        return x.new_zeros(())
    finite = _finite(x)
    # Summed in FP64, so that the order of the sum (eager, compiled, GPU) does not show in the FP32 result.
    return ((finite * finite).sum(dtype=torch.float64) / x.numel()).sqrt().to(torch.float32)


def _hash32(number: Tensor) -> Tensor:
    """Mix the bits of an int64 tensor into [0, 2**32): the finalizer of MurmurHash3."""
    for shift, factor in ((16, 0x85EB_CA6B), (13, 0xC2B2_AE35)):
        number = (number ^ (number >> shift)) * factor & 0xFFFF_FFFF
    return number ^ (number >> 16)


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
