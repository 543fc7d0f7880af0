"""Clip limits: the percentile against its definition, its error as stated, the RMS, and what is never clipped."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from narrowgate.precision import clipping, measure, quantize
from narrowgate.precision.clipping import SAMPLE, clip, clip_limit, percentile, root_mean_square
from narrowgate.precision.spec import Spec


@pytest.mark.parametrize("p", [0.001, 50, 90, 99, 99.9, 99.99, 100])
@pytest.mark.parametrize("n", [1, 2, 10, 1000, 10_000, 65_537])
def test_small_tensors_have_their_exact_percentile(n, p):
    x = torch.randn(n)
    # The inverted empirical distribution, with the rank computed exactly.
    rank = math.ceil(Fraction(str(p)) / 100 * n)
    assert float(percentile(x, p)) == float(x.abs().sort().values[rank - 1])


@pytest.mark.parametrize("p", [99.0, 99.9, 99.99])
def test_large_tensors_are_estimated_within_the_stated_error(p):
    # Five stated standard deviations; the share above is counted over the whole tensor of 2**22 elements.
    q = 1 - p / 100
    x = torch.randn(2048, 2048) * torch.exp(torch.randn(2048) / 2)  # columns of different size
    share = float((x.abs() > percentile(x, p)).double().mean())
    assert abs(share - q) < 5 * math.sqrt(q * (1 - q) / SAMPLE)
    assert share != q


@pytest.mark.parametrize("period", [8, 16, 1000, 1024])
def test_a_sample_does_not_line_up_with_columns(period):
    # Every period-th column is an outlier. A plain stride of 2**22 / SAMPLE = 16 would see none of them, or only them.
    x = torch.ones(1 << 22)
    x[::period] = 100.0
    assert float(percentile(x, 100 - 100 / period - 0.05)) == 1.0
    assert float(percentile(x, 100 - 100 / period + 2 / period)) == 100.0


def test_the_estimate_is_the_same_each_time():
    x = torch.randn(1 << 20)
    assert float(percentile(x, 99.99)) == float(percentile(x.clone(), 99.99))


def test_rms_clip_is_a_multiple_of_the_root_mean_square():
    x = torch.randn(1000)
    assert float(root_mean_square(x)) == pytest.approx(float(x.double().square().mean().sqrt()), rel=1e-6)
    limit = clip_limit(x, Spec.parse("fp8_e4m3+clip(rms=2)"))
    assert limit is not None
    y = quantize(x, "fp8_e4m3+clip(rms=2)").dequantize()
    assert float(y.abs().max()) == pytest.approx(float(limit), rel=1e-6)


@pytest.mark.parametrize("spec", ["fp8_e4m3+clip(p=99)", "fp8_e4m3+clip(rms=3)"])
def test_nonfinite_elements_do_not_move_the_limit_and_are_not_hidden(spec):
    x = torch.randn(1000)
    poisoned = torch.cat([x, torch.tensor([torch.nan, torch.inf, -torch.inf])])
    limit, clean = clip_limit(poisoned, Spec.parse(spec)), clip_limit(x, Spec.parse(spec))
    assert limit is not None
    assert clean is not None
    assert float(limit) == pytest.approx(float(clean), rel=0.02)
    clipped = clip(poisoned, limit)
    assert torch.isnan(clipped[1000])
    assert clipped[1001] == torch.inf
    assert clipped[1002] == -torch.inf


@pytest.mark.parametrize("spec", ["fp8_e4m3+clip(p=99)", "fp8_e4m3+clip(rms=3)"])
def test_a_limit_of_zero_clips_nothing(spec):
    sparse = torch.zeros(10_000)
    assert torch.equal(quantize(sparse, spec).dequantize(), sparse)
    sparse[:20] = 3.0  # 99.8 percent zeros: the 99th percentile is 0
    if "p=" in spec:
        assert torch.equal(quantize(sparse, spec).dequantize(), sparse)


def test_squares_that_overflow_clip_nothing():
    x = torch.full((100,), 1e30)
    assert float(quantize(x, "fp8_e5m2+clip(rms=1)").dequantize()[0]) == pytest.approx(1e30, rel=0.07)


def test_clipped_is_counted_apart_from_saturated():
    x = torch.randn(100_000)
    clipped = measure(x, "fp8_e4m3+clip(p=99)")
    assert clipped.clipped == pytest.approx(0.01, abs=1e-4)
    assert clipped.saturated == 0.0
    block = torch.full((1, 32), 500.0)  # MX floor: a scale of 1, and 500 is past E4M3's 464
    assert measure(block, "mxfp8").saturated == 1.0
    assert measure(block, "mxfp8+rceil").saturated == 0.0
    assert measure(block, "mxfp8").clipped == 0.0


def test_the_sample_is_a_power_of_two_that_the_docs_state():
    assert clipping.SAMPLE == 1 << 18
