"""What timing whole steps measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .record import Record

#: A speedup is a ratio of times.
Milliseconds = Annotated[float, Field(gt=0)]


class Clocks(Record):
    """The GPU's state at the end of a quartet, from NVML."""

    sm_mhz: int
    watts: float
    celsius: int
    #: Names of the reasons for which clocks were held down; empty at full clocks.
    throttle: tuple[str, ...]


class Quartet(Record):
    """Four blocks of whole steps, baseline and candidate in the order given; median milliseconds a step."""

    order: Literal["ABBA", "BAAB"]
    #: By device events, two blocks an arm.
    baseline_ms: tuple[Milliseconds, Milliseconds]
    candidate_ms: tuple[Milliseconds, Milliseconds]
    #: By the host's clock over each block.
    baseline_host_ms: tuple[Milliseconds, Milliseconds]
    candidate_host_ms: tuple[Milliseconds, Milliseconds]
    clocks: Clocks | None = None


class KernelClass(Record):
    """Milliseconds a step that each arm spends in one class of kernels."""

    name: str
    baseline_ms: float
    candidate_ms: float


#: How ``stopped`` begins where the interval was tight enough, and where the time was over.
HALF_WIDTH, BUDGET = "the interval's half-width reached", "the budget of"


class StepTime(Record):
    """The step-time experiment, or why there was none."""

    status: Literal["measured", "no_gpu", "emulated", "skipped"]
    quartets: tuple[Quartet, ...] = ()
    steps_per_block: int | None = None
    #: Compilation and warm-up before the first quartet, both arms.
    warmup_seconds: float | None = None
    #: Why measuring stopped: the interval was tight enough, or the time budget ended.
    stopped: str | None = None
    #: Why clocks are absent, where they are.
    clocks_note: str | None = None
    #: Where the time goes, the largest difference first; empty where nobody profiled. Since minor 1.
    kernels: tuple[KernelClass, ...] = ()
    #: Spent on profiling. Since minor 2.
    profile_seconds: float | None = None
