"""A non-finite element makes its scale NaN: its whole group is NaN, and no other group knows of it."""

from __future__ import annotations

import pytest
import torch
from narrowgate.precision import AmaxHistory, quantize

GROUPS = {
    # spec: the group of element (40, 70) in a [64, 160] tensor contracted over its last axis
    "fp8_e4m3": (slice(None), slice(None)),
    "fp8_e5m2/row": (slice(40, 41), slice(None)),
    "fp8_e4m3/row+pow2": (slice(40, 41), slice(None)),
    "fp8_e4m3/1x128": (slice(40, 41), slice(0, 128)),
    "fp8_e4m3/128x128": (slice(0, 64), slice(0, 128)),
    "fp6_e3m2/1x32": (slice(40, 41), slice(64, 96)),
    "fp4_e2m1/1x16": (slice(40, 41), slice(64, 80)),
    "mxfp8": (slice(40, 41), slice(64, 96)),
    "mxfp8_e5m2+rceil": (slice(40, 41), slice(64, 96)),
    "mxfp6_e2m3": (slice(40, 41), slice(64, 96)),
    "mxfp4/32x32": (slice(32, 64), slice(64, 96)),
    "nvfp4": (slice(40, 41), slice(64, 80)),
    "nvfp4/16x16": (slice(32, 48), slice(64, 80)),
}
BAD = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("suffix", ["", "+sr", "+hadamard(16)", "+clip(p=99)", "+clip(rms=2)"])
@pytest.mark.parametrize("spec", GROUPS)
def test_the_group_is_lost_and_nothing_else(spec, suffix, bad):
    x = torch.randn(64, 160)
    lost = torch.zeros(64, 160, dtype=torch.bool)
    lost[GROUPS[spec]] = True
    poisoned = x.clone()
    poisoned[40, 70] = bad
    q = quantize(poisoned, spec + suffix, seed=1)
    assert torch.equal(torch.isnan(q.dequantize(rotated=True)), lost)
    assert q.scale is not None
    if not lost.all() and not suffix.startswith("+clip"):  # a clip limit looks at the whole tensor
        # The rest is what it would be with zeros in that group: a zero scale would have wiped it.
        zeroed = torch.where(lost, 0.0, x)
        expected = quantize(zeroed, spec + suffix, seed=1).dequantize(rotated=True)
        assert torch.equal(q.dequantize(rotated=True)[~lost], expected[~lost])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("spec", ["fp8_e4m3+delayed(4)", "fp8_e5m2+delayed(4)+sr"])
def test_a_delayed_scale_is_nan_for_this_tensor_and_stays_out_of_the_history(spec, bad):
    history = AmaxHistory(4)
    quantize(torch.tensor([3.0, 1.0]), spec, history=history, seed=1)
    q = quantize(torch.tensor([1.0, bad]), spec, history=history, seed=1)
    assert torch.isnan(q.dequantize()).all()
    assert float(history.pending) == 3.0


@pytest.mark.parametrize("bad", BAD)
def test_bf16_and_fp32_have_no_scale_and_keep_the_element(bad):
    x = torch.tensor([1.0, bad])
    for spec in ("bf16", "bf16+sr", "fp32"):
        y = quantize(x, spec, seed=1).dequantize()
        assert float(y[0]) == 1.0
        assert torch.isnan(y[1]) if torch.isnan(x[1]) else y[1] == x[1]


@pytest.mark.parametrize("spec", GROUPS)
def test_huge_numbers_stay_finite(spec):
    # Up to the last binade of FP32; there a value rounded up is past FP32 itself.
    x = torch.full((2, 32), -(2.0**127))
    assert torch.isfinite(quantize(x, spec).dequantize()).all()
