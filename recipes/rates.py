"""Measured rates of a device: GEMM throughput by formats and shape, copy and cast bandwidth.

A file of rates is what ``scripts/bench_gemm_rates`` writes. The files of ``recipes/devices`` ship with the package; a
device without one has no prices.

Between measured shapes throughput is **predicted**. With ``t = mn / 128²`` a shape (m, k, n) is the point
``(2 log2 min(t, 132), log2(mkn) / 2, log2(min(m, k, n)) / 2, log2(k) / 2, log2(max(m, n)) / 10)``: tiles of the result,
as far as they find an H200's multiprocessors idle, count most, because a contraction is seldom split over several
(weight gradients of narrow layers are long and have few tiles); volume and sides tell the rest apart. BF16 throughput
is the mean of the measured logarithms, weighted by distance to the power of -4; every other variant is another one's
throughput times its measured ratio to it, weighted the same way, so a variant measured at few shapes still follows the
machine. Both are exact at measured shapes. Below the smallest measured shape a rate flatters: there the bytes of the
operands, at copy bandwidth, bound the time from below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..precision.capability import Device
from ..precision.config import GemmConfig
from ..precision.errors import NarrowgateError

BF16 = "bf16"
#: Variants that a file of rates may hold: the scales of the two operands, and how the product accumulates.
VARIANTS = (
    BF16,
    "fp8_tensor/fast",
    "fp8_tensor/accurate",
    "fp8_row/fast",
    "fp8_row/accurate",
    "fp8_block/accurate",
    "fp8_1x128/accurate",
)
#: What a variant's throughput is a measured ratio of, where that was measured at its shapes; BF16 for the others.
_RELATIVE = {"fp8_1x128/accurate": "fp8_block/accurate"}
#: Distance counts to this power: the nearest measured shapes decide.
_FALLOFF = 4
#: Side of a usual tile of a result, and how many the device computes at once.
_TILE, _MULTIPROCESSORS = 128, 132

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, Field(gt=0)]


class _Row(BaseModel):
    # What else a benchmark measured may stand beside it.
    model_config = ConfigDict(extra="allow", strict=True)

    case: str
    arm: str
    ms: Positive | None = None


class GemmRow(_Row):
    """One GEMM: [m, k] by [k, n], BF16 output."""

    variant: Literal[
        "bf16",
        "fp8_tensor/fast",
        "fp8_tensor/accurate",
        "fp8_row/fast",
        "fp8_row/accurate",
        "fp8_block/accurate",
        "fp8_1x128/accurate",
    ]
    m: Size
    k: Size
    n: Size
    tflops: Positive = Field(description="2 m k n floating-point operations over the time, in 1e12 a second.")


class BandwidthRow(_Row):
    """Bytes read and written over the time: of a plain copy, and of a fused cast to FP8."""

    variant: Literal["copy", "cast"]
    tb_per_s: Positive = Field(description="1e12 bytes a second, read and written together.")


class RatesFile(BaseModel):
    """Measured rates of one device, as ``scripts/bench_gemm_rates`` writes them."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: Literal["gemm_rates"]
    date: str
    command: str
    machine: str = Field(description="The device's name as CUDA reports it, for example NVIDIA H200.")
    versions: dict[str, str]
    rows: list[Annotated[GemmRow | BandwidthRow, Field(union_mode="smart")]]


# Compared by identity, so that prices can be cached by it.
@dataclass(frozen=True, eq=False)
class Rates:
    """What one device was measured to do."""

    #: The device's name as CUDA reports it.
    device: str
    date: str
    #: By variant, by (m, k, n): TFLOP/s.
    gemms: Mapping[str, Mapping[tuple[int, int, int], float]]
    #: Bytes read and written, 1e12 a second.
    copy_tb_s: float
    #: The same for a fused cast kernel.
    cast_tb_s: float
    #: Which file the rates came from, for messages.
    source: str

    def tflops(self, variant: str, m: int, k: int, n: int) -> float | None:
        """Predict the throughput of [m, k] by [k, n], all sizes positive; None where ``variant`` was never measured."""
        measured = self.gemms.get(variant)
        if not measured:
            return None
        point = _point(m, k, n)
        if variant == BF16:
            return math.exp(_interpolated(point, ((shape, math.log(rate)) for shape, rate in measured.items())))
        relative = _RELATIVE.get(variant, BF16)
        if not measured.keys() <= self.gemms.get(relative, {}).keys():
            relative = BF16
        base, reference = self.tflops(relative, m, k, n), self.gemms[relative]
        assert base is not None
        ratios = ((shape, math.log(rate / reference[shape])) for shape, rate in measured.items())
        return base * math.exp(_interpolated(point, ratios))

    def to_dict(self) -> dict[str, Any]:
        """Return where the rates come from, as JSON-ready data."""
        return {
            "device": self.device,
            "date": self.date,
            "source": self.source,
            "copy_tb_s": self.copy_tb_s,
            "cast_tb_s": self.cast_tb_s,
        }

    def within(self, m: int, k: int, n: int) -> bool:
        """Whether volume and smallest side lie within the measured ones, so that the prediction is no extrapolation."""
        volumes = [math.prod(shape) for shape in self.gemms[BF16]]
        sides = [min(shape) for shape in self.gemms[BF16]]
        return min(volumes) <= m * k * n <= max(volumes) and min(sides) <= min(m, k, n) <= max(sides)


def variant_of(gemm: GemmConfig) -> str:
    """Return the variant whose rate a natively multiplied GEMM has; formats of one width share their rates."""
    if gemm.high_precision:
        return BF16
    granularities = {gemm.first.granularity, gemm.second.granularity}
    if granularities == {"tensor"}:
        family = "fp8_tensor"
    elif granularities <= {"tensor", "row"}:
        family = "fp8_row"
    else:
        family = "fp8_1x128" if granularities == {"1x128"} else "fp8_block"
    return f"{family}/{gemm.accumulate}"


def load_rates(path: str | FilePath) -> Rates:
    """Read a file of rates.

    Raises:
        NarrowgateError: the file cannot be read, is no JSON, or lacks what prices need; names file and field.
    """
    try:
        text = FilePath(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NarrowgateError(f"{path}: {reason}; expected a file of measured rates") from None
    return _parse(text, str(path))


def device_rates(device: Device) -> Rates | None:
    """Return the shipped rates measured on ``device`` (its exact name), or None: nothing is guessed from a relative."""
    return shipped_rates().get(device.name)


@lru_cache(maxsize=1)
def shipped_rates() -> Mapping[str, Rates]:
    """Return the shipped rates by device name."""
    assert __package__ is not None
    folder = resources.files(__package__) / "devices"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    tables = [_parse(entry.read_text(encoding="utf-8"), f"<devices>/{entry.name}") for entry in files]
    return {table.device: table for table in tables}


def rates_schema() -> dict[str, Any]:
    """Return the JSON Schema of files of rates."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RatesFile.model_json_schema()}


def _parse(text: str, file: str) -> Rates:
    try:
        content = RatesFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        # The union of row kinds puts the kind's name into the place; the reader knows rows by number.
        place = ".".join(str(part) for part in first["loc"] if part not in ("GemmRow", "BandwidthRow"))
        raise NarrowgateError(f"{file}: {f'{place}: ' if place else ''}{first['msg']}") from None
    gemms: dict[str, dict[tuple[int, int, int], float]] = {}
    bandwidths: dict[str, float] = {}
    for row in content.rows:
        if isinstance(row, GemmRow):
            gemms.setdefault(row.variant, {})[row.m, row.k, row.n] = row.tflops
        else:
            bandwidths[row.variant] = row.tb_per_s
    missing = [name for name in ("copy", "cast") if name not in bandwidths] + [BF16] * (BF16 not in gemms)
    if missing:
        raise NarrowgateError(f"{file}: rows: found none of variant {missing[0]}, expected one")
    for variant, shapes in gemms.items():
        for shape in shapes:
            if shape not in gemms[BF16]:
                told = "x".join(map(str, shape))
                raise NarrowgateError(f"{file}: rows: found {variant} at {told}, expected bf16 at that shape too")
    return Rates(content.machine, content.date, gemms, bandwidths["copy"], bandwidths["cast"], file)


def _point(m: int, k: int, n: int) -> tuple[float, ...]:
    volume, least = math.log2(m) + math.log2(k) + math.log2(n), math.log2(min(m, k, n))
    tiles = min(math.log2(m) + math.log2(n) - 2 * math.log2(_TILE), math.log2(_MULTIPROCESSORS))
    return 2 * tiles, 0.5 * volume, 0.5 * least, 0.5 * math.log2(k), 0.1 * math.log2(max(m, n))


def _interpolated(point: tuple[float, ...], measured: Iterable[tuple[tuple[int, int, int], float]]) -> float:
    total = weights = 0.0
    for shape, value in measured:
        squared = math.dist(point, _point(*shape)) ** 2
        if squared == 0.0:
            return value
        weight = squared ** (-_FALLOFF / 2)
        total += weight * value
        weights += weight
    return total / weights
