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
#: Fields that shape a scale, and how an expression spells them.
_SCALED_FIELDS = {
    "pow2": "pow2", "delayed": "delayed(n)", "clip_p": "clip", "clip_rms": "clip", "hadamard": "hadamard(n)",
}  # fmt: skip
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


class _FieldError(SpecError):
    """A fault of one field; the parser turns the field into a place in the expression."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def _check(spec: Spec, fmt: Format) -> None:
    allowed = _granularities(fmt)
    if spec.granularity is not None and spec.granularity not in allowed:
        found = spec.granularity
        if not allowed:
            raise _FieldError(
                "granularity", f"{fmt.name} is stored unscaled and takes no granularity, found '/{found}'"
            )
        raise _FieldError(
            "granularity",
            f"unknown granularity '{found}' for {fmt.name}{did_you_mean(found, allowed)}"
            f" (expected one of {', '.join(allowed)})",
        )
    if fmt.high_precision:
        for field, name in _SCALED_FIELDS.items():
            if getattr(spec, field) not in (None, False):
                raise _FieldError(field, f"{fmt.name} is stored unscaled and takes no {name}")
    if spec.sr and fmt.name == "fp32":
        raise _FieldError("sr", "fp32 is not rounded and takes no sr")
    if fmt.block_scaled and spec.pow2:
        raise _FieldError("pow2", f"{fmt.name} carries its own block scales and takes no pow2")
    if spec.mx_scale is not None and not _is_mx(fmt):
        raise _FieldError("mx_scale", f"{spec.mx_scale} belongs to MX formats, found on {fmt.name}")
    if spec.mx_scale not in (None, "floor", "rceil"):
        raise _FieldError("mx_scale", f"mx_scale is floor or rceil, found '{spec.mx_scale}'")
    if spec.delayed is not None:
        if spec.delayed < 1:
            raise _FieldError("delayed", f"delayed(n) needs n >= 1, found {spec.delayed}")
        if spec.granularity != "tensor":
            raise _FieldError(
                "delayed", f"delayed({spec.delayed}) needs granularity tensor, found '{spec.granularity}'"
            )
    if spec.clip_p is not None and not 0 < spec.clip_p <= 100:
        raise _FieldError("clip_p", f"clip(p=..) is a percentile in (0, 100], found {spec.clip_p:g}")
    if spec.clip_rms is not None and not 0 < spec.clip_rms < math.inf:
        raise _FieldError("clip_rms", f"clip(rms=..) needs a positive, finite multiple, found {spec.clip_rms:g}")
    if spec.clip_p is not None and spec.clip_rms is not None:
        raise _FieldError("clip_rms", "clip stands twice: by percentile and by RMS")
    if spec.hadamard is not None and spec.hadamard not in _HADAMARD_SIZES:
        sizes = ", ".join(map(str, _HADAMARD_SIZES))
        raise _FieldError("hadamard", f"hadamard(n) takes n of {sizes}, found {spec.hadamard}")


_TOKEN = re.compile(r"(?P<name>[a-z0-9_]+)(?:\((?P<args>[^()]*)\))?")


@lru_cache(maxsize=1024)
def _parse(text: str) -> Spec:
    head, *modifiers = text.split("+")
    name, slash, granularity = head.partition("/")
    if not name.strip():
        raise SpecError(f"expected a format expression FORMAT[/GRANULARITY][+MODIFIER...], found '{text}'")
    offsets: dict[str, int] = {}
    fields: dict[str, object] = {"format": ALIASES.get(name.strip(), name.strip())}
    get_format(name.strip())
    if slash:
        if not granularity.strip():
            raise SpecError(f"expected a granularity after '/' in '{text}'", len(name) + 1)
        fields["granularity"], offsets["granularity"] = granularity.strip(), len(name) + 1
    offset = len(head) + 1
    for modifier in modifiers:
        key, value = _modifier(modifier.strip(), offset)
        if key in fields or (key.startswith("clip") and {"clip_p", "clip_rms"} & fields.keys()):
            raise SpecError(f"modifier '{modifier.strip()}' repeats one before it in '{text}'", offset)
        fields[key], offsets[key] = value, offset
        offset += len(modifier) + 1
    try:
        return Spec(**fields)  # type: ignore[arg-type]
    except _FieldError as fault:
        raise SpecError(str(fault), offsets.get(fault.field, 0)) from None


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
