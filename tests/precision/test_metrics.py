"""Error metrics against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from narrowgate.precision import mean_relative_error, measure, quantize, sqnr_db
from narrowgate.precision.metrics import saturated, underflowed


def test_sqnr_is_ten_log_of_power_over_error_power():
    x = torch.tensor([3.0, 4.0])
    assert sqnr_db(x, torch.tensor([3.0, 4.5])) == pytest.approx(10 * math.log10(25 / 0.25))
    assert sqnr_db(x, x) == math.inf
    assert math.isnan(sqnr_db(torch.zeros(2), x))
    assert math.isnan(sqnr_db(x, torch.tensor([torch.nan, 1.0])))


def test_sqnr_of_a_uniform_step_is_the_textbook_value():
    # Noise of a step d is d^2 / 12: BF16's on one binade, [1, 2), where the step is 2^-7.
    x = 1 + torch.rand(1 << 18)
    expected = 10 * math.log10(float(x.double().square().mean()) / (2.0**-14 / 12))
    assert sqnr_db(x, quantize(x, "bf16").dequantize()) == pytest.approx(expected, abs=0.05)


def test_mean_relative_error_averages_over_elements():
    reference = torch.tensor([1.0, -2.0, 0.0, 100.0])
    assert mean_relative_error(reference, torch.tensor([1.1, -2.0, 5.0, 90.0])) == pytest.approx((0.1 + 0 + 0.1) / 3)
    assert math.isnan(mean_relative_error(torch.zeros(2), torch.ones(2)))


def test_what_the_format_loses_is_counted():
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([500.0, 400.0, 2.0**-11, -(2.0**-9)])
    q = quantize(x, "mxfp8")  # scale 1: 500 > 464 saturates, 2^-11 is half of the smallest subnormal's half
    assert saturated(x, q)[0, :4].tolist() == [True, False, False, False]
    assert underflowed(x, q)[0, :4].tolist() == [False, False, True, False]
    m = measure(x, "mxfp8")
    assert (m.saturated, m.underflowed, m.clipped, m.nonfinite) == (1 / 32, 1 / 32, 0.0, 0.0)
    assert m.amax == 500.0


def test_a_block_scale_of_zero_is_underflow_not_saturation():
    x = torch.full((1, 32), 1e-9)
    x[0, :16] = 1.0
    m = measure(x, "nvfp4")
    assert (m.underflowed, m.saturated) == (0.5, 0.0)


def test_nonfinite_groups_are_counted_and_left_out_of_the_error():
    x = torch.randn(4, 32)
    clean = measure(x[:3], "mxfp8")
    x[3, 0] = torch.nan
    m = measure(x, "mxfp8")
    assert m.nonfinite == 0.25
    assert m.sqnr_db == pytest.approx(clean.sqnr_db)
    assert m.mean_relative_error == pytest.approx(clean.mean_relative_error)


@pytest.mark.parametrize("spec", ["fp8_e4m3", "nvfp4+hadamard(16)", "bf16", "fp8_e5m2/row+clip(p=99)"])
def test_an_empty_tensor_loses_nothing(spec):
    m = measure(torch.empty(0, 16), spec)
    assert (m.amax, m.saturated, m.underflowed, m.clipped, m.nonfinite) == (0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("better", "worse"), [
    ("fp8_e4m3", "fp8_e5m2"), ("fp8_e4m3", "fp4_e2m1"), ("nvfp4", "mxfp4"), ("fp4_e2m1/1x16", "fp4_e2m1/1x32"),
    ("fp4_e2m1/1x32", "fp4_e2m1"), ("mxfp8+rceil", "mxfp4"), ("fp8_e4m3", "fp8_e4m3+sr"),
])  # fmt: skip
def test_formats_rank_as_their_bits_and_blocks_suggest_on_normal_data(better, worse):
    x = torch.randn(256, 1024)
    assert measure(x, better, seed=0).sqnr_db > measure(x, worse, seed=0).sqnr_db
