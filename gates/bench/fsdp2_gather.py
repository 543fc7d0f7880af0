"""An all-gather alone and beside products: what the wire carries, and what it costs the GEMMs that would hide it.

For a payload of so many elements, in BF16 and in FP8, as NCCL gathers it and as the copy engines do through PyTorch's
symmetric memory (``symm_mem._low_contention_all_gather``; no multicast, no multiprocessors):

- ``ms``: the gather alone; ``gb_per_s``: the bytes that reach a rank over that, the "busbw" of nccl-tests.
- ``gemm_slowdown``: the time of products beside gathers that outlast them, over their time alone. 1 is the overlap of
  resources that do not interfere.
- ``overlap``: of some gathers and as much of products, the share of the shorter that is hidden: 1 all, 0 none.

Times are the slowest rank's, medians over rounds in which all take turns. :func:`fit_links` says which bandwidth and
time to begin predict them best (a file of links has both: :mod:`narrowgate.recipes.topology`), and how far off.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...recipes.topology import example_topology
from ..sharded import all_gather
from .gem import GemSettings

Row = dict[str, Any]
#: Launches a gather; what it returns waits for it.
Gather = Callable[[], Callable[[], Any]]
PAYLOADS = {"bf16": torch.bfloat16, "fp8": torch.uint8}
#: Sides of the product, and how long products beside gathers go on, in milliseconds.
_GEMM, _CPU_GEMM = 4096, 64
_WINDOW_MS = 5.0
#: Two numbers are fitted: fewer gathers would fit them exactly.
_LEAST_FITTED = 3
#: Gathers beside products last this much longer than those take alone.
_COVER = 2.0


@dataclass(frozen=True)
class _Times:
    """Milliseconds of one round, on this rank."""

    gather: float
    #: Of several gathers, of products for about as long, of these beside more gathers, and of both until both are over.
    gathers: float
    gemms: float
    gemms_beside: float
    together: float


def measure_gathers(elements: int, mesh: DeviceMesh, settings: GemSettings) -> tuple[list[Row], list[dict[str, Any]]]:
    """Measure gathers of ``elements`` in all, and return a row for each, and what could not run.

    Args:
        elements: of the gathered tensor; each rank gives an equal part.
        mesh: of all ranks, one dimension.
        settings: how many rounds.
    """
    device, ranks = settings.device, mesh.size()
    part = elements // ranks
    side = _GEMM if settings.gpu else _CPU_GEMM
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    gathers: dict[tuple[str, str], Gather] = {}
    skipped: list[dict[str, Any]] = []
    for payload, dtype in PAYLOADS.items():
        own = torch.ones(part, device=device, dtype=dtype)
        gathers["nccl" if settings.gpu else "gloo", payload] = _collective(own, ranks, mesh)
        if settings.gpu:
            try:
                gathers["copy_engine", payload] = _copy_engine(own, mesh)
            except (ImportError, AttributeError, RuntimeError, NotImplementedError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
                skipped.append({"name": f"gather by copy engine, {payload}", "reason": reason})
    clock = _Clock(device)
    work = lambda: torch.mm(a, b)  # noqa: E731
    for gather in gathers.values():  # connections, workspaces
        for _ in range(3):
            gather()()
            work()
    found: dict[tuple[str, str], list[list[float]]] = {key: [] for key in gathers}
    for turn in range(settings.rounds):
        for key in list(gathers) if turn % 2 == 0 else list(gathers)[::-1]:
            found[key].append(_slowest(_round(gathers[key], work, clock), device))
    rows = [_row(elements, part, key, found[key], ranks, settings) for key in gathers]
    for row in rows:
        settings.say(describe(row))
    return rows, skipped


def fit_links(rows: Sequence[Row], ranks: int) -> dict[str, dict[str, float]]:
    """Fit ``ms = begin + sent / bandwidth`` to the gathers of each arm, by least squares of relative errors.

    Args:
        rows: of :func:`measure_gathers`, of several sizes.
        ranks: of the gathers; each sends (ranks - 1) times what it gives.

    Returns:
        By arm with at least three gathers: ``gb_per_s``, ``begin_us`` (``launch_us`` and latencies together) and
        ``worst_error``, the largest relative error of what these two predict for the gathers they were fitted to.
    """
    fits: dict[str, dict[str, float]] = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        if len(own) < _LEAST_FITTED:
            continue
        us = np.array([row["ms"] * 1e3 for row in own])
        sent = np.array([(ranks - 1) * row["bytes"] for row in own], dtype=np.float64)
        design = np.stack([np.ones_like(us), sent], axis=1)
        (begin, slope), *_ = np.linalg.lstsq(design / us[:, None], np.ones_like(us), rcond=None)
        if slope <= 0:  # times that do not grow with bytes are no wire's
            continue
        errors = np.abs(design @ np.array([begin, slope]) / us - 1)
        fits[arm] = {
            "gb_per_s": round(float(1e-3 / slope), 2), "begin_us": round(float(begin), 2),
            "worst_error": round(float(errors.max()), 4),
        }  # fmt: skip
    return fits


def describe(row: Row) -> str:
    """Return a row as a line of progress."""
    what = f"  {row['case']:24} {row['arm']:12} {row['variant']:5} {row['ms']:8.3f} ms {row['gb_per_s']:7.1f} GB/s"
    beside = f"GEMMs beside it take {row['gemm_slowdown']:.3f}x, {row['overlap']:.0%} hidden"
    return f"{what}  {'dry run' if row.get('dry_run') else beside}"


def _row(
    elements: int, part: int, key: tuple[str, str], found: list[list[float]], ranks: int, settings: GemSettings
) -> Row:
    arm, payload = key
    given = part * PAYLOADS[payload].itemsize
    times = _Times(*(statistics.median(values) for values in zip(*found, strict=True)))
    links = example_topology()
    planned = links.all_gather_us(links.group(ranks), ranks * given) / 1e3
    hidden = (times.gathers + times.gemms - times.together) / min(times.gathers, times.gemms)
    return {
        "case": f"gather {elements}", "arm": arm, "variant": payload, "ms": round(times.gather, 4), "bytes": given,
        "gb_per_s": round((ranks - 1) * given / times.gather / 1e6, 2),
        "planned_ms": round(planned, 4), "planned_by": links.topology,
        "gathers_ms": round(times.gathers, 4), "gemms_ms": round(times.gemms, 4),
        "gemms_beside_ms": round(times.gemms_beside, 4), "together_ms": round(times.together, 4),
        "gemm_slowdown": round(times.gemms_beside / times.gemms, 4), "overlap": round(hidden, 4),
        "rounds": len(found), **({} if settings.gpu else {"dry_run": True}),
    }  # fmt: skip


def _round(gather: Gather, gemm: Callable[[], Any], clock: _Clock) -> _Times:
    """One round; each part begins with idle devices on all ranks."""

    def gathers(count: int) -> Callable[[], list[Callable[[], Any]]]:
        return lambda: [gather() for _ in range(count)]

    def waited(count: int) -> None:
        for wait in gathers(count)():
            wait()

    def gemms() -> None:
        for _ in range(products):
            gemm()

    def together() -> None:
        waits = gathers(repeats)()
        gemms()
        for wait in waits:
            wait()

    # A window of gathers, so that launches do not count, and products that take as long.
    single, product = clock.ms(lambda: waited(1)), clock.ms(gemm)
    repeats = _common(math.ceil(_WINDOW_MS / single) if clock.gpu else 1, clock.device)
    whole = clock.ms(lambda: waited(repeats))
    products = _common(max(1, round(whole / product)), clock.device)
    alone = clock.ms(gemms)
    cover = _common(math.ceil(_COVER * alone / whole * repeats), clock.device)
    return _Times(single, whole, alone, clock.ms(gemms, beside=gathers(cover)), clock.ms(together))


class _Clock:
    """Milliseconds on the device, from when all ranks are idle."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.gpu = device, device.type == "cuda"

    def ms(self, work: Callable[[], Any], beside: Callable[[], list[Callable[[], Any]]] | None = None) -> float:
        """Time ``work``; ``beside`` is launched before and waited for after, outside of the time."""
        self._idle()
        dist.barrier()
        self._idle()
        waits = beside() if beside is not None else []
        if self.gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            for wait in waits:
                wait()
            torch.cuda.synchronize(self.device)
            return start.elapsed_time(end)
        began = time.perf_counter()
        work()
        took = (time.perf_counter() - began) * 1e3
        for wait in waits:
            wait()
        return took

    def _idle(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)


def _collective(own: Tensor, ranks: int, mesh: DeviceMesh) -> Gather:
    group = mesh.get_group()
    out = own.new_empty(ranks * own.numel())

    def gather() -> Callable[[], Any]:
        work = all_gather(out, own, group=group, async_op=True)
        assert work is not None
        return work.wait

    return gather


def _copy_engine(own: Tensor, mesh: DeviceMesh) -> Gather:
    import torch.distributed._symmetric_memory as symmetric

    name = mesh.get_group().group_name
    shared = symmetric.empty(own.numel(), dtype=own.dtype, device=own.device)
    shared.copy_(own)
    symmetric.rendezvous(shared, name)

    def gather() -> Callable[[], Any]:
        out = torch.ops.symm_mem._low_contention_all_gather(shared, name)
        return lambda: torch.ops._c10d_functional.wait_tensor(out)

    return gather


def _slowest(times: _Times, device: torch.device) -> list[float]:
    told = torch.tensor(list(vars(times).values()), dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.tolist()


def _common(count: int, device: torch.device) -> int:
    """The first rank's number: all ranks must call as many collectives."""
    told = torch.tensor(count, device=device)
    dist.broadcast(told, 0)
    return int(told)
