"""What every benchmark shares: arms in turns, CUDA graphs, copy bandwidth, and the document of a result.

Everything takes the device. On a GPU times are those of device events; on a CPU, where benchmarks run for the sake of
being run, they are the host clock's.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import itertools
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...precision.errors import NarrowgateError
from ..environment import package_version

#: Where lines of progress go.
Say = Callable[[str], None]
Work = Callable[[], Any]

#: What a peer's layers come from, by the arm's name in results.
_LIBRARIES = {"torchao": "torchao.float8", "transformer_engine": "transformer_engine.pytorch"}
PACKAGES = ("torch", "triton", "torchao", "transformer-engine", "narrowgate")
_COPIES = 10
#: Well past the cache of any GPU, and long enough to be launched by Python.
COPY_BYTES = 1 << 30
_REPEATS = 15


def in_turns(
    arms: Mapping[str, Work], rounds: int, repeat: int, device: torch.device | str = "cuda"
) -> dict[str, list[float]]:
    """Milliseconds of one call of every arm, an entry a round.

    Arms take turns, in an order that turns round each time, so that drift of clocks and temperature falls on all alike.
    """
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    order = list(arms)
    for turn in range(rounds):
        for arm in order if turn % 2 == 0 else reversed(order):
            times[arm].append(milliseconds(arms[arm], repeat, device))
        if turn % 2:
            order = order[1:] + order[:1]
    return times


def load_libraries(arms: Iterable[str]) -> None:
    """Import what ``arms`` need before anything is compiled: what an import changes, it has then changed for all.

    A library that is missing or broken stays so: its arm says that in its turn.
    """
    for library in {_LIBRARIES[arm]: None for arm in arms if arm in _LIBRARIES}:
        with contextlib.suppress(Exception):
            importlib.import_module(library)


@contextlib.contextmanager
def compiled_already() -> Iterator[None]:
    """Within, what runs was compiled before, and stays what it was.

    Compiled code depends on more than its model: the number of threads, how products accumulate. A library that one arm
    brings may change that; PyTorch then silently compiles the arms before it again, from what it has learned of all
    arms' sizes since, and their times are those of another graph.

    Raises:
        NarrowgateError: something was compiled.
    """
    before = graphs_compiled()
    yield
    again = graphs_compiled() - before
    if again:
        raise NarrowgateError(
            f"{again} graphs were compiled again after every arm was ready: what one arm imports or sets changed what "
            "the others' compiled code depends on; measure it in a run of its own"
        )


def graphs_compiled() -> int:
    """How many graphs this process has compiled so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def milliseconds(work: Work, repeat: int = 1, device: torch.device | str = "cuda") -> float:
    """Time of one call: from device events around ``repeat`` of them, or from the clock of a CPU."""
    if torch.device(device).type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeat):
            work()
        return (time.perf_counter() - begin) * 1e3 / repeat
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeat):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat


def host_microseconds(work: Work, device: torch.device | str, calls: int = 20) -> float:
    """What one eager call costs the host, in us: the median of five rows of ``calls`` that nobody waits for.

    The rows are short, so that the queue of launches never fills up and makes the host wait for the device.
    """
    found = []
    for _ in range(5):
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        found.append((time.perf_counter() - begin) * 1e6 / calls)
    _synchronize(device)
    return statistics.median(found)


def warmed(works: Sequence[Work]) -> None:
    """Call each of ``works`` on a stream of its own, as capturing asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for work in works:
            work()
    torch.cuda.current_stream().wait_stream(stream)


def graph_of(works: Sequence[Work]) -> torch.cuda.CUDAGraph:
    """Capture ``works``, one after the other, as one CUDA graph; whatever cannot be captured raises."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    return graph


def rotating(works: Sequence[Work], calls: int, device: torch.device | str) -> Work:
    """Return what runs ``calls`` of ``works`` in rotation: a CUDA graph's replay, or a loop on a CPU."""
    order = list(itertools.islice(itertools.cycle(works), calls))
    if torch.device(device).type == "cuda":
        warmed(works)
        return graph_of(order).replay

    def loop() -> None:
        for work in order:
            work()

    return loop


def replayed_milliseconds(work: Work, device: torch.device | str) -> float:
    """Median time of one call, replayed from a CUDA graph: launching is the host's time, not the device's."""
    if torch.device(device).type != "cuda":
        work()
        return statistics.median(milliseconds(work, 1, device) for _ in range(3))
    warmed([work] * 3)
    calls = max(1, min(50, int(1.0 / max(milliseconds(graph_of([work]).replay), 1e-3))))
    several = graph_of([work] * calls)
    several.replay()
    return statistics.median(milliseconds(several.replay) for _ in range(_REPEATS)) / calls


def copier(device: torch.device | str, size: int = COPY_BYTES) -> Work:
    """Return a copy of ``size`` bytes to be launched: a CUDA graph would make another, slower kind of copy of it."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    return lambda: target.copy_(source)


def copy_milliseconds(device: torch.device | str = "cuda", size: int = COPY_BYTES) -> float:
    """Median time of a copy of ``size`` bytes."""
    copy = copier(device, size)
    return statistics.median(milliseconds(copy, 1, device) for _ in range(_COPIES))


def copy_bandwidth(device: torch.device | str = "cuda", size: int = COPY_BYTES) -> float:
    """TB/s, read and written, of a copy well past the cache."""
    return terabytes_per_second(2 * size, copy_milliseconds(device, size))


def terabytes_per_second(size: float, ms: float) -> float:
    """Bytes over milliseconds, in 1e12 bytes a second."""
    return size / ms / 1e9


def script_command() -> str:
    """Return how the script that is running was called, as a result states it."""
    return shlex.join([f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def document(
    name: str, rows: Sequence[Mapping[str, Any]], *, command: str, device: torch.device | str = "cuda", **facts: Any
) -> dict[str, Any]:
    """Return a benchmark's result as it is committed, ``benchmarks/NAME.json``.

    Args:
        name: the benchmark's name.
        rows: one arm of one case each: ``case``, ``arm``, ``variant``, ``ms``, and what else was measured.
        command: what was run.
        device: what it ran on.
        **facts: what else holds for the whole run.
    """
    return {
        "name": name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command,
        "machine": machine(device),
        "versions": {
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{package: package_version(package) for package in PACKAGES},
        },
        **facts,
        "rows": list(rows),
    }


def machine(device: torch.device | str) -> str:
    """Return the GPU's name as CUDA reports it, or the CPU's architecture."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else platform.machine()


def _synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
