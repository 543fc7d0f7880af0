"""The grammar of format expressions."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from narrowgate.precision import FORMATS, Spec, SpecError, as_spec
from narrowgate.precision.spec import PLAIN_GRANULARITIES

ACCEPTED = [
    # (expression, canonical form)
    ("fp8_e4m3", "fp8_e4m3/tensor"),
    ("fp8_e5m2/row+sr", "fp8_e5m2/row+sr"),
    ("mxfp8", "mxfp8"),
    ("mxfp8_e4m3", "mxfp8"),
    ("mxfp8/1x32+floor", "mxfp8"),
    ("mxfp4/32x32+rceil+sr", "mxfp4/32x32+rceil+sr"),
    ("nvfp4/16x16", "nvfp4/16x16"),
    ("bf16+sr", "bf16+sr"),
    ("fp8_e4m3+delayed(16)+pow2", "fp8_e4m3/tensor+delayed(16)+pow2"),
    ("fp8_e5m2+sr+clip(p=99.99)", "fp8_e5m2/tensor+clip(p=99.99)+sr"),
    ("fp4_e2m1/1x16+clip(rms=8)+hadamard(16)", "fp4_e2m1/1x16+hadamard(16)+clip(rms=8)"),
    ("fp8_e4m3+clip( p = 99.9999999 )", "fp8_e4m3/tensor+clip(p=99.9999999)"),
    (" fp8_e4m3 / row + sr ", "fp8_e4m3/row+sr"),
]


@pytest.mark.parametrize(("text", "canonical"), ACCEPTED, ids=[a[0] for a in ACCEPTED])
def test_expressions_have_one_canonical_form(text, canonical):
    spec = Spec.parse(text)
    assert str(spec) == canonical
    assert Spec.parse(canonical) == spec == as_spec(spec) == as_spec(text)


REJECTED = [
    # (expression, message, offset)
    ("", "expected a format expression", 0),
    ("fp8", "unknown format 'fp8'", 0),
    ("fp8_e4m3/", "expected a granularity after '/'", 9),
    ("fp8_e4m3/rows", "unknown granularity 'rows' for fp8_e4m3; did you mean 'row'", 9),
    ("fp8_e4m3/32x32", "unknown granularity '32x32' for fp8_e4m3", 9),
    ("mxfp8/row", "unknown granularity 'row' for mxfp8", 6),
    ("bf16/row", "bf16 is stored unscaled and takes no granularity", 5),
    ("bf16+hadamard(16)", "bf16 is stored unscaled and takes no hadamard", 5),
    ("fp32+sr", "fp32 is not rounded", 5),
    ("fp8_e4m3+rs", "unknown modifier 'rs'", 9),
    ("fp8_e4m3+sr+sr", "repeats one before it", 12),
    ("fp8_e4m3+clip(p=99)+clip(rms=3)", "repeats one before it", 20),
    ("mxfp8+floor+rceil", "repeats one before it", 12),
    ("fp8_e4m3+sr(3)", "takes no argument", 9),
    ("fp8_e4m3+clip(99)", r"expected clip\(p=..\) or clip\(rms=..\)", 9),
    ("fp8_e4m3+clip(p=x)", "with a number", 9),
    ("fp8_e4m3+clip(p=101)", "percentile in", 9),
    ("fp8_e4m3+clip(p=nan)", "percentile in", 9),
    ("fp8_e4m3+clip(rms=0)", "positive, finite multiple", 9),
    ("fp8_e4m3+clip(rms=inf)", "positive, finite multiple", 9),
    ("fp8_e4m3+delayed(0)", "n >= 1", 9),
    ("fp8_e4m3/row+delayed(4)", "needs granularity tensor", 13),
    ("mxfp8+delayed(4)", "needs granularity tensor", 6),
    ("fp8_e4m3+hadamard(24)", "takes n of 16, 32, 64, 128, 256", 9),
    ("nvfp4+pow2", "takes no pow2", 6),
    ("nvfp4+rceil", "belongs to MX formats", 6),
    ("fp8_e4m3+", "expected a modifier", 9),
    ("fp8_e4m3+delayed(4.5)", "whole number", 9),
]


@pytest.mark.parametrize(("text", "message", "offset"), REJECTED, ids=[r[0] for r in REJECTED])
def test_faults_say_what_and_where(text, message, offset):
    with pytest.raises(SpecError, match=message) as caught:
        Spec.parse(text)
    assert caught.value.offset == offset


_SCALED = {
    "sr": st.booleans(), "clip_p": st.none() | st.floats(1e-9, 100),
    "hadamard": st.none() | st.sampled_from([16, 32, 64, 128, 256]),
}  # fmt: skip
_PLAIN = st.fixed_dictionaries({
    "format": st.sampled_from(["fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1"]),
    "granularity": st.sampled_from([None, *PLAIN_GRANULARITIES]), "pow2": st.booleans(), **_SCALED,
})  # fmt: skip
_DELAYED = st.fixed_dictionaries({
    "format": st.sampled_from(["fp8_e4m3", "fp8_e5m2"]), "delayed": st.integers(1, 10_000),
    "clip_rms": st.none() | st.floats(1e-9, 1e9),
})  # fmt: skip
_MX = st.fixed_dictionaries({
    "format": st.sampled_from([f for f in FORMATS if f.startswith("mx")]),
    "granularity": st.sampled_from([None, "1x32", "32x32"]),
    "mx_scale": st.sampled_from([None, "floor", "rceil"]), **_SCALED,
})  # fmt: skip


@given(_PLAIN | _DELAYED | _MX)
def test_every_valid_spec_survives_its_text(fields):
    spec = Spec(**fields)
    assert Spec.parse(str(spec)) == spec
    assert str(Spec.parse(str(spec))) == str(spec)
