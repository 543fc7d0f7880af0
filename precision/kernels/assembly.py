"""Assembly inside kernels, as text: what Triton has no expression for, or a longer one."""

from __future__ import annotations

import struct

from ..formats import ElementFormat

#: One product holds both halves.
_ROUND = (
    "add.u32 k, k, 0x9E3779B9; add.u32 l, l, 0xBB67AE85; mul.wide.u32 a, x, 0xD2511F53; mul.wide.u32 b, z, 0xCD9E8D57;"
    "mov.b64 {p, h}, a; mov.b64 {q, g}, b; lop3.b32 x, g, y, k, 0x96; lop3.b32 z, h, w, l, 0x96; mov.b32 y, q;"
    "mov.b32 w, p;"
)


def philox_words(rounds: int) -> str:
    """Philox4x32 (Salmon et al., SC 2011): words $0 to $3 of a counter's words $4, $5 and a key's $6, $7, low first."""
    # Of words x, y, z, w the first round knows z and w to be zero.
    return (
        "{.reg .b64 a, b; .reg .b32 x, y, z, w, k, l, p, q, g, h; mov.b32 k, $6; mov.b32 l, $7;"
        "mul.wide.u32 a, $4, 0xD2511F53; mov.b64 {w, h}, a; xor.b32 x, $5, k; xor.b32 z, h, l; mov.b32 y, 0;"
        + (rounds - 1) * _ROUND
        + "mov.b32 $0, x; mov.b32 $1, y; mov.b32 $2, z; mov.b32 $3, w;}"
    )


def _bits(x: float) -> int:
    """The bits of ``x`` in FP32."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def stochastic_codes(element: ElementFormat, *, clamped: bool, turned: bool) -> str:
    """Assembly of one word of codes $0 from values $1 to $4 and the words $5 and $6 of random bits.

    A word has the bits of two neighbours in a row, the first one's in its low half. The values are four neighbours in
    a row, or, ``turned``, two in a column, then those beside them: each word is of one of the two rows.
    """
    unit = 2.0 ** (element.bias - 127)
    largest, moved = _bits(element.max * unit), 1 << (element.mantissa_bits + 1)
    halves = ((5, 0), (6, 0), (5, 1), (6, 1)) if turned else ((5, 0), (5, 1), (6, 0), (6, 1))
    lines = []
    for i, (register, (word, half)) in enumerate(zip("abcd", halves, strict=True), 1):
        if clamped:
            lines.append(f"abs.f32 {register}, ${i};")
        # Towards zero, so that no bit below the FP32 subnormals' last rounds the fraction up.
        lines.append(f"mul.rz.f32 {register}, {register if clamped else f'${i}'}, 0f{_bits(unit):08X};")
        if clamped:
            lines.append(f"min.u32 {register}, {register}, {largest};")
        # The 16 bits, and half of the last one's worth: what is below a byte.
        lines.append(f"prmt.b32 p, ${word}, 0x80, {'0x5324' if half else '0x5104'};")
        lines.append(f"mad.lo.u32 {register}, {register}, {moved}, p;")
    lines.append("prmt.b32 p, a, b, 0x0073; prmt.b32 q, c, d, 0x7300; prmt.b32 a, p, q, 0x7610;")
    lines.append("prmt.b32 p, $1, $2, 0x0073; prmt.b32 q, $3, $4, 0x7300; prmt.b32 b, p, q, 0x7610;")
    # The sign from the value, all else from the code.
    lines.append("lop3.b32 $0, b, a, 0x80808080, 0xE4;")
    return "{.reg .b32 a, b, c, d, p, q; " + " ".join(lines) + "}"
