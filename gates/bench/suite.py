"""The benchmarks by name: each runs on a device and becomes a document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ...precision import autotune
from ...precision.errors import NarrowgateError
from .agreement import CODE_SHARE, CODE_STEPS, SCALE_TOLERANCE
from .casts import cast_faults, measure_casts
from .gemms import measure_gemms
from .mlp import measure_mlp
from .optimizer import TABLE_TOLERANCE, UPDATE_TOLERANCE, measure_optimizer, optimizer_faults
from .timing import Say, copy_bandwidth, document

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How benchmarks are to run."""

    device: torch.device
    say: Say
    quick: bool = False
    #: Globs of cases; none: all.
    cases: tuple[str, ...] = ()
    rounds: int | None = None
    #: Measure the tiles of cast kernels that no cache has, and keep them there.
    tune: bool = False

    def wanted(self, case: str) -> bool:
        """Whether a case was asked for."""
        return not self.cases or any(fnmatchcase(case, glob) for glob in self.cases)

    def turns(self, usual: int, quick: int) -> int:
        """How often every arm takes its turn."""
        if self.rounds is not None:
            return self.rounds
        return usual if not self.quick else quick if self.device.type == "cuda" else 1


@dataclass(frozen=True)
class Column:
    """One column of a table: its title, and how a row's cell reads."""

    title: str
    cell: Callable[[Row], str]


@dataclass(frozen=True)
class Found:
    """What a benchmark found."""

    document: dict[str, Any]
    #: What makes the result no result: one line each.
    faults: list[str]
    columns: tuple[Column, ...]


def run_benchmark(name: str, settings: Settings, command: str) -> Found:
    """Run ``casts``, ``gemms``, ``mlp`` or ``optimizer``.

    Raises:
        NarrowgateError: no case matches what was asked for.
    """
    before = autotune("on") if settings.tune else None
    try:
        return _run(name, settings, command)
    finally:
        autotune(before)


def _run(name: str, settings: Settings, command: str) -> Found:
    torch.manual_seed(0)
    device, facts, faults = settings.device, {}, []
    if name == "casts":
        rows = measure_casts(
            device=device,
            rounds=settings.turns(9, 5),
            say=settings.say,
            quick=settings.quick,
            wanted=settings.wanted,
        )
        faults = cast_faults(rows)
        facts = {"tolerance": {"codes": CODE_SHARE, "steps": CODE_STEPS, "scale": SCALE_TOLERANCE}}
    elif name == "gemms":
        rows = measure_gemms(device=device, say=settings.say, quick=settings.quick, wanted=settings.wanted)
    elif name == "optimizer":
        rows = measure_optimizer(
            device=device,
            rounds=settings.turns(9, 5),
            say=settings.say,
            quick=settings.quick,
            wanted=settings.wanted,
        )
        faults = optimizer_faults(rows)
        facts = {"tolerance": {"update": UPDATE_TOLERANCE, "table": TABLE_TOLERANCE}}
    else:
        rate = copy_bandwidth(device) if device.type == "cuda" else 0.0
        facts = {"copy_tbs": round(rate, 3) if rate else None}
        rows = measure_mlp(
            device=device,
            rounds=settings.turns(16, 4),
            say=settings.say,
            copy_rate=rate,
            quick=settings.quick,
            wanted=settings.wanted,
        )
    if not rows:
        raise NarrowgateError(f"bench {name}: no case matches {', '.join(settings.cases)}")
    made = document(_DOCUMENTS[name], rows, command=command, device=device, **facts)
    return Found(made, faults, COLUMNS[name])


def table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Return lines of a table: names to the left, figures to the right."""
    cells = [[column.title for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return [
        "  ".join(
            c.ljust(w) if i < _NAMES else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def _number(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(key) is None else format(row[key], form)


def _native(row: Row) -> str:
    return "emulated" if row.get("emulated") else ""


def _correct(row: Row) -> str:
    return {True: "yes", False: "NO", None: "-"}[row["correct"]]


def _of_floor(row: Row) -> str:
    return "-" if row["floor_ms"] is None else f"{row['floor_ms'] / row['ms']:.1%}"


#: case, arm, variant.
_NAMES = 3
_WHAT = (Column("case", _text("case")), Column("arm", _text("arm")), Column("variant", _text("variant")))
_NATIVE = Column("", _native)
COLUMNS = {
    "casts": (
        *_WHAT,
        Column("us", _number("us", ".1f")),
        Column("TB/s", _number("tb_per_s", ".2f")),
        Column("of copy", _number("copy_share", ".1%")),
        Column("host us", _number("host_us", ".1f")),
        Column("correct", _correct),
        _NATIVE,
    ),
    "gemms": (
        *_WHAT,
        Column("us", lambda row: f"{row['ms'] * 1e3:.1f}"),
        Column("TFLOP/s", _number("tflops", ".1f")),
        Column("of ceiling", _number("ceiling_share", ".1%")),
        _NATIVE,
    ),
    "mlp": (
        *_WHAT,
        Column("ms", _number("ms", ".3f")),
        Column("speedup", _number("speedup", ".2f")),
        Column("graph ms", _number("graph_ms", ".3f")),
        Column("speedup", _number("graph_speedup", ".2f")),
        Column("of floor", _of_floor),
        Column("MiB", _number("activation_mib", ".0f")),
        _NATIVE,
    ),
    "optimizer": (
        *_WHAT,
        Column("ms", _number("ms", ".3f")),
        Column("speedup", _number("speedup", ".2f")),
        Column("bytes", _number("bytes_per_element", ".2f")),
        Column("TB/s", _number("tb_per_s", ".2f")),
        Column("of copy", _number("copy_share", ".1%")),
        Column("host ms", _number("host_ms", ".3f")),
        Column("correct", _correct),
        _NATIVE,
    ),
}
#: What documents are called, as committed results are.
_DOCUMENTS = {"casts": "casts", "gemms": "gemms", "mlp": "mlp_blocks", "optimizer": "optimizer"}
