"""Number formats as data: a new format is one entry in a table, never a branch.

Sources: OCP 8-bit Floating Point Specification (OFP8) rev. 1.0 for E4M3 and E5M2; OCP Microscaling
Formats (MX) Specification v1.0 for FP6, FP4, E8M0 and the MX blocks; arXiv:2509.25149 for NVFP4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import SpecError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """One floating-point encoding: sign, exponent and mantissa bits, and what its top codes mean."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    #: Largest finite value.
    max: float
    has_inf: bool
    has_nan: bool
    #: E8M0 has no sign and no zero; every other format is signed.
    signed: bool = True
    #: Name of the torch dtype that stores one element a byte (or wider), where torch has one.
    torch_dtype: str | None = None

    @property
    def bits(self) -> int:
        """Storage bits of one element."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value: the spacing of the subnormals."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two that is finite (``emax`` of the MX specification)."""
        return math.frexp(self.max)[1] - 1


FP32 = ElementFormat(name="fp32", exponent_bits=8, mantissa_bits=23, bias=127, max=3.4028234663852886e38,
                     has_inf=True, has_nan=True, torch_dtype="float32")  # fmt: skip
BF16 = ElementFormat(name="bf16", exponent_bits=8, mantissa_bits=7, bias=127, max=3.3895313892515355e38,
                     has_inf=True, has_nan=True, torch_dtype="bfloat16")  # fmt: skip
E4M3 = ElementFormat(name="fp8_e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0,
                     has_inf=False, has_nan=True, torch_dtype="float8_e4m3fn")  # fmt: skip
E5M2 = ElementFormat(name="fp8_e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0,
                     has_inf=True, has_nan=True, torch_dtype="float8_e5m2")  # fmt: skip
E2M3 = ElementFormat(name="fp6_e2m3", exponent_bits=2, mantissa_bits=3, bias=1, max=7.5,
                     has_inf=False, has_nan=False)  # fmt: skip
E3M2 = ElementFormat(name="fp6_e3m2", exponent_bits=3, mantissa_bits=2, bias=3, max=28.0,
                     has_inf=False, has_nan=False)  # fmt: skip
E2M1 = ElementFormat(name="fp4_e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0,
                     has_inf=False, has_nan=False)  # fmt: skip
E8M0 = ElementFormat(name="e8m0", exponent_bits=8, mantissa_bits=0, bias=127, max=math.ldexp(1.0, 127),
                     has_inf=False, has_nan=True, signed=False, torch_dtype="float8_e8m0fnu")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Format:
    """What a recipe calls a format: an element encoding and, for block-scaled formats, how blocks are scaled."""

    name: str
    element: ElementFormat
    #: Encoding of the block scales that belong to the format; None for formats scaled by a granularity.
    scale: ElementFormat | None = None
    #: Elements along the contraction that share one block scale.
    block: int | None = None
    #: NVFP4's second level: one FP32 scale a tensor over the block scales.
    tensor_scale: bool = False

    @property
    def high_precision(self) -> bool:
        """True for formats that are stored unscaled (BF16, FP32)."""
        return self.element.bits >= 16

    @property
    def block_scaled(self) -> bool:
        """True for formats that carry their own block scales (MX, NVFP4)."""
        return self.block is not None


def _table(*formats: Format) -> dict[str, Format]:
    return {f.name: f for f in formats}


#: Every format a recipe can name, by its canonical name.
FORMATS: dict[str, Format] = _table(
    Format(name="fp32", element=FP32),
    Format(name="bf16", element=BF16),
    Format(name="fp8_e4m3", element=E4M3),
    Format(name="fp8_e5m2", element=E5M2),
    Format(name="fp6_e2m3", element=E2M3),
    Format(name="fp6_e3m2", element=E3M2),
    Format(name="fp4_e2m1", element=E2M1),
    Format(name="mxfp8", element=E4M3, scale=E8M0, block=32),
    Format(name="mxfp8_e5m2", element=E5M2, scale=E8M0, block=32),
    Format(name="mxfp6_e2m3", element=E2M3, scale=E8M0, block=32),
    Format(name="mxfp6_e3m2", element=E3M2, scale=E8M0, block=32),
    Format(name="mxfp4", element=E2M1, scale=E8M0, block=32),
    Format(name="nvfp4", element=E2M1, scale=E4M3, block=16, tensor_scale=True),
)

#: Second spellings, each with the canonical name it stands for.
ALIASES = {"mxfp8_e4m3": "mxfp8"}


def get_format(name: str) -> Format:
    """Return the format called ``name`` (canonical or alias).

    Raises:
        SpecError: no such format; the text lists what exists.
    """
    found = FORMATS.get(ALIASES.get(name, name))
    if found is None:
        known = [*FORMATS, *ALIASES]
        raise SpecError(f"unknown format '{name}'{did_you_mean(name, known)} (known: {', '.join(known)})")
    return found
