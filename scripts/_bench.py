"""What the benchmark scripts share: turns, timing, and the document that a result is committed as."""

from __future__ import annotations

import datetime
import platform
import shlex
import statistics
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "torchao", "transformer-engine", "narrowgate")


def in_turns(arms: dict[str, Callable[[], Any]], rounds: int, repeat: int) -> dict[str, list[float]]:
    """Milliseconds of one call of every arm, an entry a round.

    Arms take turns, in an order that turns round each time, so that drift of clocks and temperature falls on all alike.
    """
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    order = list(arms)
    for turn in range(rounds):
        for arm in order if turn % 2 == 0 else reversed(order):
            times[arm].append(milliseconds(arms[arm], repeat))
        if turn % 2:
            order = order[1:] + order[:1]
    return times


def milliseconds(work: Callable[[], Any], repeat: int = 1) -> float:
    """Device time of one call, from events around ``repeat`` of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeat):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat


def copy_bandwidth(size: int = 1 << 30) -> float:
    """TB/s, read and written, of a copy well past the cache."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / statistics.median(milliseconds(lambda: target.copy_(source)) for _ in range(10)) / 1e9


def document(name: str, rows: list[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """A benchmark result as it is committed."""
    return {
        "name": name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join([f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{package: _version(package) for package in PACKAGES},
        },
        **facts,
        "rows": rows,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
