"""What a run on several ranks measured beside quality: the wire, and the time of a step with it and without."""

from __future__ import annotations

from typing import Literal

from .measurements_speed import StepTime
from .record import Record


class Traffic(Record):
    """What one rank handed to one collective in a step, counted there."""

    #: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``.
    collective: str
    #: Of the tensor that was handed over. FSDP2 packs payloads of several dtypes as ``uint8``.
    dtype: str
    bytes: int


class Planned(Record):
    """What the plan of the wire has for one kind of collective in a step."""

    #: For example ``all-gather, forward``.
    what: str
    collective: str
    calls: int
    #: Bytes by what they are: ``fp8_e4m3``, ``fp32 scales``, ``bf16``; padding included.
    given: dict[str, int]


class Wire(Record):
    """One arm's payload: asked for, planned and counted."""

    #: How the recipe wants weights to be gathered and gradients to be reduced; None is as the baseline does, in BF16.
    all_gather: str | None = None
    reduce_scatter: str | None = None
    #: How rows of embedding tables are exchanged, in the baseline too; None: tables are weights. Since minor 5.
    tables: str | None = None
    #: Weights that the plan gathers in that format.
    gathered: int = 0
    planned: tuple[Planned, ...]
    counted: tuple[Traffic, ...]
    #: By collective.
    calls: dict[str, int]

    def counted_bytes(self) -> dict[str, int]:
        """Return the bytes counted, by collective."""
        found: dict[str, int] = {}
        for entry in self.counted:
            found[entry.collective] = found.get(entry.collective, 0) + entry.bytes
        return {name: count for name, count in found.items() if count}

    def planned_bytes(self) -> dict[str, int]:
        """Return the bytes planned, by collective."""
        found: dict[str, int] = {}
        for entry in self.planned:
            found[entry.collective] = found.get(entry.collective, 0) + sum(entry.given.values())
        return {name: count for name, count in found.items() if count}


class RankTime(Record):
    """Milliseconds of an arm's step, of the slowest rank; medians over rounds in which all arms take turns."""

    ms: float
    #: The same step with nothing on the wire; None where the recipe reduces gradients itself, or replicas do.
    local_ms: float | None
    #: A step of the whole model on one rank, on the rows of one rank; None where it does not fit.
    alone_ms: float | None
    rounds: int


class DistributedArm(Record):
    """One arm of a distributed run."""

    wire: Wire
    time: RankTime


class DistributedRun(Record):
    """All ranks of one job."""

    ranks: int
    #: Groups of ranks that hold a whole model each, in shards. Since minor 4.
    replicas: int = 1
    transport: Literal["nccl", "gloo"]
    baseline: DistributedArm
    candidate: DistributedArm
    #: Whole steps of all ranks, baseline and candidate in quartets; on a CPU, or emulated, there are none.
    step: StepTime
    #: Why a model was not timed on one rank alone, where it was not.
    why_not_alone: str | None = None
    seconds: float | None = None
