"""The table of formats against ml_dtypes, code by code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from narrowgate.precision.errors import SpecError
from narrowgate.precision.formats import BF16, E8M0, FORMATS, ElementFormat, Format, get_format
from narrowgate.precision.rounding import decode, encode, overflow_threshold, round_nearest, torch_dtype
from narrowgate.precision.scaling import scale_values

NARROW = ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1")


def _codes(element: ElementFormat) -> torch.Tensor:
    codes = torch.arange(1 << element.bits, dtype=torch.int64).to(torch.uint8)
    dtype = torch_dtype(element)
    return codes if dtype is None else codes.view(dtype)


@pytest.mark.parametrize("name", NARROW)
def test_every_code_decodes_as_in_ml_dtypes(name, ml_dtype, same_bits):
    element = get_format(name).element
    expected = np.arange(1 << element.bits).astype(np.uint8).view(ml_dtype[name]).astype(np.float32)
    same_bits(decode(_codes(element), element), torch.from_numpy(expected))


@pytest.mark.parametrize("name", NARROW)
def test_every_value_encodes_to_its_own_code(name):
    element = get_format(name).element
    values = decode(_codes(element), element)
    codes = encode(values, element).view(torch.uint8)
    finite = ~torch.isnan(values)
    assert torch.equal(codes[finite], _codes(element).view(torch.uint8)[finite])
    assert torch.isnan(decode(encode(values[~finite], element), element)).all()


@pytest.mark.parametrize("name", [*NARROW, "bf16"])
def test_limits_are_those_of_ml_dtypes(name, ml_dtype):
    element, info = get_format(name).element, ml_dtypes.finfo(ml_dtype[name])
    assert element.max == float(info.max)
    assert element.min_normal == float(info.smallest_normal)
    assert element.min_subnormal == float(info.smallest_subnormal)
    assert element.bits == info.bits
    assert element.mantissa_bits == info.nmant


@pytest.mark.parametrize("name", NARROW)
def test_overflow_begins_half_a_step_past_the_largest_value(name):
    # With one more exponent the format would hold the next value, max + step; half way there rounding turns away.
    element = get_format(name).element
    wider = ElementFormat(
        name="wider", exponent_bits=element.exponent_bits + 1, mantissa_bits=element.mantissa_bits, bias=element.bias,
        max=element.max * 4, has_inf=False, has_nan=False,
    )  # fmt: skip
    threshold = torch.tensor([overflow_threshold(element)])
    assert round_nearest(torch.nextafter(threshold, torch.zeros(1)), wider) <= element.max
    assert round_nearest(torch.nextafter(threshold, torch.full((1,), torch.inf)), wider) > element.max


def test_every_e8m0_scale_decodes_as_in_ml_dtypes(same_bits):
    codes = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    expected = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    same_bits(scale_values(codes.view(torch.float8_e8m0fnu)), torch.from_numpy(expected))
    assert E8M0.bits == 8
    assert E8M0.min_normal == 2.0**-126  # one step above the smallest, 2**-127, whose code is 0


def test_a_new_format_is_one_entry():
    # IEEE E3M4 of ml_dtypes is not in the table; describing it is all that rounding to it takes.
    element = ElementFormat(
        name="fp8_e3m4", exponent_bits=3, mantissa_bits=4, bias=3, max=15.5, has_inf=True, has_nan=True
    )
    x = torch.linspace(-15.5, 15.5, 4001)
    expected = torch.from_numpy(x.numpy().astype(ml_dtypes.float8_e3m4).astype(np.float32))
    assert torch.equal(round_nearest(x, element), expected)
    assert Format(name="fp8_e3m4", element=element).block_scaled is False


def test_the_contract_names_these_formats():
    assert set(FORMATS) == {
        "fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1",
        "mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4",
    }  # fmt: skip
    assert get_format("mxfp8_e4m3") is get_format("mxfp8")
    assert get_format("bf16").element is BF16


def test_an_unknown_format_is_answered_with_the_nearest_one():
    with pytest.raises(SpecError, match="unknown format 'mxfp5'; did you mean 'mxfp"):
        get_format("mxfp5")
