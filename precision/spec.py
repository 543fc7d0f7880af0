"""Format expressions: ``FORMAT[/GRANULARITY][+MODIFIER...]``, parsed into a frozen :class:`Spec`.

The grammar is the recipe language's (see docs/recipes.md); it lives here because
:func:`narrowgate.precision.quantize` takes the same expressions.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .errors import SpecError, did_you_mean
from .formats import ALIASES, Format, get_format

#: Granularities of formats that carry no scales of their own.
PLAIN_GRANULARITIES = ("tensor", "row", "1x128", "128x128", "1x32", "1x16")
_MODIFIERS = ("sr", "pow2", "delayed(n)", "clip(p=..)", "clip(rms=..)", "hadamard(n)", "floor", "rceil")
_HADAMARD_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """How one operand of one GEMM is stored.

    The modifiers act in one order however they are spelled: hadamard, clip, scale, round.

    Raises:
        SpecError: the fields contradict each other (for example ``delayed`` with a row scale).
    """

    #: Canonical name of a format of :data:`narrowgate.precision.formats.FORMATS`.
    format: str
    #: What one scale reaches; None for formats that are stored unscaled.
    granularity: str | None = None
    #: Stochastic instead of nearest-even rounding.
    sr: bool = False
    #: FP32 scales restricted to powers of two.
    pow2: bool = False
    #: Steps of amax history that a delayed scale looks back on; None for a dynamic scale.
    delayed: int | None = None
    #: Percentile of |x| to clip at, in percent.
    clip_p: float | None = None
    #: Multiple of the root mean square to clip at.
    clip_rms: float | None = None
    #: Size of the Hadamard blocks along the contraction.
    hadamard: int | None = None
    #: How an MX block scale is derived from its amax; None outside MX.
    mx_scale: str | None = None

    def __post_init__(self) -> None:
        """Fill in the format's defaults and check the fields against each other."""
        fmt = get_format(self.format)
        object.__setattr__(self, "format", fmt.name)
        if self.granularity is None and not fmt.high_precision:
            object.__setattr__(self, "granularity", f"1x{fmt.block}" if fmt.block_scaled else "tensor")
        if self.mx_scale is None and _is_mx(fmt):
            object.__setattr__(self, "mx_scale", "floor")
        _check(self, fmt)

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Parse a format expression such as ``fp8_e5m2/row+sr``.

        Raises:
            SpecError: with the offset at which the expression stops making sense.
        """
        return _parse(text)

    @property
    def fmt(self) -> Format:
        """The format's table entry."""
        return get_format(self.format)

    @property
    def high_precision(self) -> bool:
        """True where the operand stays BF16 or FP32."""
        return self.fmt.high_precision

    @property
    def block(self) -> tuple[int, int] | None:
        """(rows, elements along the contraction) that share one scale; None for tensor, row and unscaled."""
        if self.granularity is None or "x" not in self.granularity:
            return None
        rows, columns = self.granularity.split("x")
        return int(rows), int(columns)

    def replace(self, **changes: Any) -> Spec:
        """Return a copy with some fields changed, checked anew."""
        return replace(self, **changes)

    def __str__(self) -> str:
        """Return the canonical expression: ``Spec.parse(str(spec)) == spec``."""
        fmt = self.fmt
        text = self.format
        if self.granularity is not None and self.granularity != f"1x{fmt.block}":
            text += f"/{self.granularity}"
        if self.hadamard is not None:
            text += f"+hadamard({self.hadamard})"
        if self.clip_p is not None:
            text += f"+clip(p={_shortest(self.clip_p)})"
        if self.clip_rms is not None:
            text += f"+clip(rms={_shortest(self.clip_rms)})"
        if self.delayed is not None:
            text += f"+delayed({self.delayed})"
        if self.pow2:
            text += "+pow2"
        if self.mx_scale == "rceil":
            text += "+rceil"
        if self.sr:
            text += "+sr"
        return text


def as_spec(value: Spec | str) -> Spec:
    """Return ``value`` as a :class:`Spec`, parsing it where it is text."""
    return value if isinstance(value, Spec) else Spec.parse(value)


def _shortest(value: float) -> str:
    """The shortest decimal that parses to the same number."""
    return repr(float(value)).removesuffix(".0")


def _is_mx(fmt: Format) -> bool:
    return fmt.scale is not None and fmt.scale.name == "e8m0"


def _granularities(fmt: Format) -> tuple[str, ...]:
    if fmt.high_precision:
        return ()
    if fmt.block_scaled:
        return (f"1x{fmt.block}", f"{fmt.block}x{fmt.block}")
    return PLAIN_GRANULARITIES


def _check(spec: Spec, fmt: Format) -> None:
    allowed = _granularities(fmt)
    if spec.granularity is not None and spec.granularity not in allowed:
        if not allowed:
            raise SpecError(f"{fmt.name} is stored unscaled and takes no granularity, found '/{spec.granularity}'")
        raise SpecError(
            f"unknown granularity '{spec.granularity}' for {fmt.name}{did_you_mean(spec.granularity, allowed)}"
            f" (expected one of {', '.join(allowed)})"
        )
    scaled = {"pow2": spec.pow2, "delayed(n)": spec.delayed is not None, "clip": spec.clip_p or spec.clip_rms,
              "hadamard(n)": spec.hadamard is not None}  # fmt: skip
    if fmt.high_precision:
        for name, present in scaled.items():
            if present:
                raise SpecError(f"{fmt.name} is stored unscaled and takes no {name}")
    if spec.sr and fmt.name == "fp32":
        raise SpecError("fp32 is not rounded and takes no sr")
    if fmt.block_scaled and spec.pow2:
        raise SpecError(f"{fmt.name} carries its own block scales and takes no pow2")
    if spec.mx_scale is not None and not _is_mx(fmt):
        raise SpecError(f"{spec.mx_scale} belongs to MX formats, found on {fmt.name}")
    if spec.mx_scale not in (None, "floor", "rceil"):
        raise SpecError(f"mx_scale is floor or rceil, found '{spec.mx_scale}'")
    if spec.delayed is not None:
        if spec.delayed < 1:
            raise SpecError(f"delayed(n) needs n >= 1, found {spec.delayed}")
        if spec.granularity != "tensor":
            raise SpecError(f"delayed({spec.delayed}) needs granularity tensor, found '{spec.granularity}'")
    if spec.clip_p is not None and not 0 < spec.clip_p <= 100:
        raise SpecError(f"clip(p=..) is a percentile in (0, 100], found {spec.clip_p:g}")
    if spec.clip_rms is not None and not 0 < spec.clip_rms < math.inf:
        raise SpecError(f"clip(rms=..) needs a positive, finite multiple, found {spec.clip_rms:g}")
    if spec.clip_p is not None and spec.clip_rms is not None:
        raise SpecError("clip stands twice: by percentile and by RMS")
    if spec.hadamard is not None and spec.hadamard not in _HADAMARD_SIZES:
        raise SpecError(f"hadamard(n) takes n of {', '.join(map(str, _HADAMARD_SIZES))}, found {spec.hadamard}")


_TOKEN = re.compile(r"(?P<name>[a-z0-9_]+)(?:\((?P<args>[^()]*)\))?")


@lru_cache(maxsize=1024)
def _parse(text: str) -> Spec:
    head, *modifiers = text.split("+")
    name, slash, granularity = head.partition("/")
    if not name.strip():
        raise SpecError(f"expected a format expression FORMAT[/GRANULARITY][+MODIFIER...], found '{text}'")
    fields: dict[str, object] = {"format": ALIASES.get(name.strip(), name.strip())}
    get_format(name.strip())
    if slash:
        if not granularity.strip():
            raise SpecError(f"expected a granularity after '/' in '{text}'", len(name) + 1)
        fields["granularity"] = granularity.strip()
    offset = len(head) + 1
    for modifier in modifiers:
        key, value = _modifier(modifier.strip(), offset)
        if key in fields or (key.startswith("clip") and {"clip_p", "clip_rms"} & fields.keys()):
            raise SpecError(f"modifier '{modifier.strip()}' repeats one before it in '{text}'", offset)
        fields[key] = value
        offset += len(modifier) + 1
    return Spec(**fields)  # type: ignore[arg-type]


def _modifier(text: str, offset: int) -> tuple[str, object]:
    match = _TOKEN.fullmatch(text)
    if match is None:
        raise SpecError(f"expected a modifier ({', '.join(_MODIFIERS)}), found '{text}'", offset)
    name, args = match["name"], match["args"]
    if name in ("sr", "pow2", "floor", "rceil"):
        if args is not None:
            raise SpecError(f"modifier '{name}' takes no argument, found '({args})'", offset)
        return ("mx_scale", name) if name in ("floor", "rceil") else (name, True)
    if name in ("delayed", "hadamard"):
        return name, _number(int, args, f"{name}(n) with a whole number", text, offset)
    if name == "clip":
        key, equals, value = (args or "").partition("=")
        if not equals or key.strip() not in ("p", "rms"):
            raise SpecError(f"expected clip(p=..) or clip(rms=..), found '{text}'", offset)
        return f"clip_{key.strip()}", _number(float, value, "clip(p=..) or clip(rms=..) with a number", text, offset)
    names = [m.partition("(")[0] for m in _MODIFIERS]
    raise SpecError(f"unknown modifier '{name}'{did_you_mean(name, names)} (known: {', '.join(_MODIFIERS)})", offset)


def _number(kind: type[int] | type[float], text: str | None, expected: str, found: str, offset: int) -> float:
    try:
        return kind((text or "").strip())
    except ValueError:
        raise SpecError(f"expected {expected}, found '{found}'", offset) from None
