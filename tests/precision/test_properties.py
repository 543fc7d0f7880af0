"""What holds for every tensor: properties that hypothesis tries to break."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra import numpy as hnp
from narrowgate.precision import quantize
from narrowgate.precision.formats import E2M1, E2M3, E3M2, E4M3, E5M2
from narrowgate.precision.rounding import round_nearest, round_stochastic

ELEMENTS = st.sampled_from([E4M3, E5M2, E2M3, E3M2, E2M1])
NUMBERS = st.floats(-1e5, 1e5, width=32)
VECTORS = hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=1, max_side=40), elements=NUMBERS)
MATRICES = hnp.arrays(np.float32, st.tuples(st.integers(1, 40), st.integers(1, 70)), elements=NUMBERS)
GROUPED = st.sampled_from([
    "fp8_e4m3", "fp8_e4m3/row", "fp8_e5m2/1x32", "fp6_e3m2/1x16", "fp4_e2m1/row", "fp8_e4m3/row+pow2",
    "mxfp8", "mxfp8+rceil", "mxfp6_e2m3", "mxfp4/32x32", "nvfp4",
])  # fmt: skip


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy())


@given(VECTORS, ELEMENTS)
def test_rounding_is_monotone(x, element):
    y = round_nearest(_tensor(x).sort().values, element)
    assert (y[1:] >= y[:-1]).all()


@given(VECTORS, ELEMENTS, st.integers(0, 0xFFFF))
def test_stochastic_rounding_with_common_bits_is_monotone(x, element, bits):
    ordered = _tensor(x).abs().sort().values
    y = round_stochastic(ordered, element, torch.full(ordered.shape, bits))
    assert (y[1:] >= y[:-1]).all()


@given(VECTORS, ELEMENTS)
def test_rounding_is_idempotent_and_odd(x, element):
    y = round_nearest(_tensor(x), element)
    assert torch.equal(round_nearest(y, element), y)
    assert torch.equal(round_nearest(-_tensor(x), element), -y)


@given(VECTORS, ELEMENTS, st.integers(0, 0xFFFF))
def test_stochastic_rounding_moves_to_a_neighbour(x, element, bits):
    # Both neighbours bracket the value, and nearest rounding is one of them.
    x = _tensor(x).clamp(-element.max, element.max)
    y = round_stochastic(x, element, torch.full(x.shape, bits))
    down = round_stochastic(x, element, torch.zeros(x.shape, dtype=torch.int32))
    up = round_stochastic(x, element, torch.full(x.shape, 0xFFFF))
    assert ((y == down) | (y == up)).all()
    assert (down.abs() <= x.abs() + element.min_subnormal).all()
    assert (up.abs() >= x.abs() * (1 - 2.0**-16) - element.min_subnormal * 2.0**-16).all()


@given(MATRICES, GROUPED)
def test_dequantized_values_quantize_to_themselves(x, spec):
    # Power-of-two scales make it exact; an FP32 scale may move by one ulp of the product, no more.
    y = quantize(_tensor(x), spec).dequantize()
    again = quantize(y, spec).dequantize()
    assert torch.allclose(again, y, rtol=1e-6, atol=0)


@given(MATRICES, GROUPED, st.integers(-20, 20))
def test_scaling_the_tensor_by_a_power_of_two_scales_the_result(x, spec, exponent):
    # Codes do not change: the scale takes it all. Numbers are kept clear of FP32's and E8M0's ends.
    x = _tensor(x)
    x = torch.where(x.abs() < 1e-3, 0.0, x)
    factor = 2.0**exponent
    a, b = quantize(x, spec), quantize(x * factor, spec)
    assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    assert torch.equal(a.dequantize() * factor, b.dequantize())


@given(MATRICES, st.sampled_from(["fp8_e4m3/128x128", "mxfp8/32x32", "mxfp4/32x32", "nvfp4/16x16"]))
def test_square_blocks_of_the_transpose_are_the_transpose(x, spec):
    x = _tensor(x)
    for dim in (0, 1):
        assert torch.equal(quantize(x, spec, dim=dim).dequantize(), quantize(x.T, spec, dim=dim).dequantize().T)
    assert torch.equal(quantize(x, spec, dim=0).dequantize(), quantize(x, spec, dim=1).dequantize())


@given(MATRICES, GROUPED)
def test_the_error_is_at_most_half_a_step_of_the_group(x, spec):
    # No value is further from its result than half of the largest step of its group, unless MX floor saturated it.
    x = _tensor(x)
    q = quantize(x, spec)
    element = q.spec.fmt.element
    amax = float(x.abs().max())
    room = 2.0 if q.spec.mx_scale == "floor" else 1.0 + 2.0**-3 * bool(q.tensor_scale is not None)
    step = 2.0 ** (element.max_exponent - element.mantissa_bits) / element.max
    limit = amax * step * room * (2.0 if q.spec.pow2 or q.spec.mx_scale == "rceil" else 1.0)
    assert ((q.dequantize() - x).abs() <= limit + 1e-30).all()


@pytest.mark.parametrize("spec", ["fp8_e4m3/row", "mxfp8", "nvfp4"])
@given(x=MATRICES)
def test_signs_survive(spec, x):
    x = _tensor(x)
    y = quantize(x, spec).dequantize()
    assert torch.equal(torch.signbit(y), torch.signbit(x))
