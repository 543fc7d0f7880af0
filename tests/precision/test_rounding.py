"""Nearest-even rounding against ml_dtypes, gfloat and torchao, bit for bit."""

from __future__ import annotations

import gfloat.formats
import numpy as np
import pytest
import torch
from narrowgate.precision.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP32
from narrowgate.precision.packing import pack_fp4, unpack_fp4
from narrowgate.precision.rounding import decode, encode, round_nearest
from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked

NARROW = (E4M3, E5M2, E2M3, E3M2, E2M1)


def _oracle(x: torch.Tensor, dtype: type, largest: float) -> torch.Tensor:
    # ml_dtypes overflows to NaN (E4M3) or infinity (E5M2) where we saturate, and has no NaN in FP6 and FP4: its
    # inputs are kept in range, where it only rounds.
    clamped = np.clip(x.numpy(), -largest, largest)
    return torch.from_numpy(clamped.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("element", NARROW, ids=lambda e: e.name)
def test_all_bf16_numbers_round_as_in_ml_dtypes(element, every_bf16, ml_dtype, same_bits):
    rounded = round_nearest(every_bf16, element)
    nan = torch.isnan(every_bf16)
    same_bits(rounded[~nan], _oracle(every_bf16[~nan], ml_dtype[element.name], element.max))
    assert torch.isnan(rounded[nan]).all()


@pytest.mark.parametrize("element", NARROW, ids=lambda e: e.name)
def test_fp32_numbers_round_as_in_ml_dtypes(element, fp32_sweep, ml_dtype, same_bits):
    same_bits(round_nearest(fp32_sweep, element), _oracle(fp32_sweep, ml_dtype[element.name], element.max))


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_the_cast_after_a_clamp_equals_the_reference(element, every_bf16, fp32_sweep, same_bits):
    # quantize() takes this shortcut for FP8; it must not depend on what a PyTorch version does out of range.
    x = torch.cat([every_bf16, fp32_sweep])
    same_bits(encode(x.clamp(-element.max, element.max), element).to(torch.float32), round_nearest(x, element))


def test_fp32_rounds_to_bf16_as_in_ml_dtypes(fp32_sweep, ml_dtype, same_bits):
    expected = torch.from_numpy(fp32_sweep.numpy().astype(ml_dtype["bf16"]).astype(np.float32))
    same_bits(round_nearest(fp32_sweep, BF16), expected)
    assert round_nearest(fp32_sweep, FP32) is fp32_sweep


@pytest.mark.parametrize(
    ("element", "info"),
    [(E4M3, "e4m3"), (E5M2, "e5m2"), (E2M3, "e2m3"), (E3M2, "e3m2"), (E2M1, "e2m1")],
    ids=lambda v: getattr(v, "name", ""),
)
def test_rounding_and_saturation_equal_gfloat(element, info, fp32_sweep, same_bits):
    x = torch.cat([fp32_sweep[::7], torch.tensor([1e30, -1e30, torch.inf, -torch.inf, 0.0, -0.0])])
    fi = getattr(gfloat.formats, f"format_info_ocp_{info}")
    expected = gfloat.round_ndarray(fi, x.numpy().astype(np.float64), gfloat.RoundMode.TiesToEven, sat=True)
    same_bits(round_nearest(x, element), torch.from_numpy(expected.astype(np.float32)))


def test_fp4_codes_equal_torchao(every_bf16, fp32_sweep):
    x = torch.cat([every_bf16[torch.isfinite(every_bf16)], fp32_sweep])
    assert torch.equal(encode(round_nearest(x, E2M1), E2M1), f32_to_f4_unpacked(x))


CASES = [
    # (why, format, input, expected)
    ("a tie goes to the even mantissa, down", E4M3, 17.0, 16.0),
    ("a tie goes to the even mantissa, up", E4M3, 19.0, 20.0),
    ("past a tie by one ulp", E4M3, 17.000002, 18.0),
    ("a tie between zero and the smallest subnormal", E4M3, 2.0**-10, 0.0),
    ("one ulp more is the smallest subnormal", E4M3, 2.0**-10 * (1 + 2**-23), 2.0**-9),
    ("subnormals keep their step", E4M3, 3 * 2.0**-9, 3 * 2.0**-9),
    ("the largest subnormal rounds up into the normals", E4M3, 7.5 * 2.0**-9, 8 * 2.0**-9),
    ("a tie at the edge stays, as 448 is even", E4M3, 464.0, 448.0),
    ("past the edge saturates where others overflow to NaN", E4M3, 464.1, 448.0),
    ("the top code is 448: OCP's E4M3 uses the exponent that IEEE reserves", E4M3, 449.0, 448.0),
    ("a tie at the edge of E5M2 would go away from the odd 57344", E5M2, 61440.0, 57344.0),
    ("an overflow that E5M2 has an infinity for saturates all the same", E5M2, 1e9, 57344.0),
    ("infinity saturates in rounding; a scale tells of it", E5M2, float("inf"), 57344.0),
    ("zero keeps its sign", E2M1, -0.0, -0.0),
    ("an underflow keeps its sign", E2M1, -0.1, -0.0),
    ("0.75 ties to 1, not toward zero as in DeepGEMM's helper", E2M1, 0.75, 1.0),
    ("0.25 ties to 0", E2M1, 0.25, 0.0),
    ("2.5 ties to 2", E2M1, 2.5, 2.0),
    ("5 ties to 4", E2M1, 5.0, 4.0),
    ("an FP32 subnormal", E5M2, 1e-42, 0.0),
    ("one rounding, not two: through BF16 this would be 1.0", E4M3, 1.0634766, 1.125),
    ("the smallest FP6 value and a half ties to even", E2M3, 0.1875, 0.25),
    ("the largest value of E3M2", E3M2, 100.0, 28.0),
]


@pytest.mark.parametrize(("element", "x", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_named_cases(element, x, expected, same_bits):
    same_bits(round_nearest(torch.tensor([x]), element), torch.tensor([expected]))
    same_bits(round_nearest(torch.tensor([-x]), element), torch.tensor([-expected]))


@pytest.mark.parametrize("element", NARROW, ids=lambda e: e.name)
def test_nan_stays_nan_and_takes_code_zero_where_the_format_has_none(element):
    x = torch.tensor([torch.nan, -torch.nan])
    assert torch.isnan(round_nearest(x, element)).all()
    values = decode(encode(round_nearest(x, element), element), element)
    if element.has_nan:
        assert torch.isnan(values).all()
    else:
        assert torch.equal(values, torch.zeros(2))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("length", [1, 4, 5])
def test_packing_keeps_every_code_along_either_axis(dim, length):
    shape = [3, 3]
    shape[dim] = length
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = pack_fp4(codes, dim)
    assert packed.shape[dim] == (length + 1) // 2
    assert torch.equal(unpack_fp4(packed, length, dim), codes)


def test_the_even_element_is_in_the_low_nibble():
    assert pack_fp4(torch.tensor([0x1, 0xF, 0x7], dtype=torch.uint8)).tolist() == [0xF1, 0x07]
