"""Cast kernels: time, bandwidth against a copy of the same run, and whether the codes are right.

Arms of one producer and dtype take turns with a copy. An arm replays a CUDA graph of several launches over inputs that
rotate, so that none is in cache when its turn comes again; what one eager launch costs the host stands beside it. The
bytes are those that the cast must move (:meth:`CastCase.bytes`); a row above what the memory can move at all has read
from the cache, and is a fault of the benchmark. A copy writes as much as it reads, and memory reads faster than it
turns from one to the other: a cast that reads four bytes for each that it writes may pass the copy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...precision.cast_operators import kernels_on_cpu
from ...precision.kernels.program import IDENTITY, Program
from ...precision.kernels.reference import values
from ..nvml import ClockReader
from .agreement import agreement
from .cast_cases import DTYPES, QUICK_SHAPE, SHAPE, Cast, CastCase, Producer, case_name, cast_cases, groups, size_of
from .cast_peers import cast_peers
from .timing import COPY_BYTES, Say, Work, copier, host_microseconds, in_turns, rotating, terabytes_per_second

#: Launches in a graph; over all sets of inputs, this many times the cache is read before a set comes again.
_LAUNCHES, _CACHES = 20, 6
_QUICK_COPY_BYTES = 1 << 20
_COPY = "copy"


@dataclass
class Arm:
    """What takes turns: one launch for each set of inputs, and the row that it becomes."""

    works: list[Work]
    row: dict[str, Any]


def measure_casts(
    *,
    device: torch.device,
    rounds: int,
    say: Say,
    quick: bool = False,
    peers: bool = True,
    wanted: Callable[[str], bool] = lambda name: True,
) -> list[dict[str, Any]]:
    """Measure every cast, and return a row for each.

    Args:
        device: a GPU; on a CPU the operators are their reference: rows are ``emulated`` and claim no share.
        rounds: how often every arm takes its turn.
        say: takes lines of progress.
        quick: on a GPU BF16 rounded to nearest only, on a CPU everything at a tiny size.
        peers: also torchao's and Transformer Engine's casts, where they are installed.
        wanted: which cases, by name.

    Returns:
        Rows with ``case``, ``arm``, ``variant``, ``ms`` and ``us`` of one launch, ``host_us``, ``bytes``, ``passes``,
        ``tb_per_s``, ``copy_tb_per_s`` and ``copy_share`` of the same turns, ``memory_tb_per_s`` that the memory can
        move at most, ``correct`` with the shares behind it, and ``emulated``. What is unknown is null.
    """
    gpu = device.type == "cuda"
    shape = SHAPE if gpu else QUICK_SHAPE
    cases = [case for case in cast_cases(shape=shape, full=not (quick and gpu)) if wanted(case.name)]
    rows: list[dict[str, Any]] = []
    for producer, dtype, members in groups(cases):
        sets = _inputs(producer, shape, dtype, device)
        arms = [_own(case, sets) for case in members]
        if gpu:
            arms += _bf16(producer, shape, dtype, sets)
            if peers and producer.program == IDENTITY and dtype == "bf16":
                arms += _peers(members, sets, say)
        rows += _timed(arms, device, rounds, say)
        del arms, sets
        if gpu:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    return rows


def cast_faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say what is wrong with rows: codes that are not the reference's, or more bandwidth than there is."""
    found = []
    for row in rows:
        what = f"{row['case']}, {row['arm']} {row['variant']}"
        if row["correct"] is False:
            scales = "some are not finite" if row["scale_error"] is None else f"they differ by {row['scale_error']:.2g}"
            found.append(
                f"{what}: found codes of which {row['codes_differ']:.2g} are not the reference's; scales: {scales}"
            )
        if row["memory_tb_per_s"] is not None and row["tb_per_s"] > row["memory_tb_per_s"]:
            found.append(
                f"{what}: {row['tb_per_s']:.2f} TB/s of a memory that moves {row['memory_tb_per_s']:.2f}: "
                "its inputs came from the cache"
            )
    return found


def _inputs(producer: Producer, shape: tuple[int, int], dtype: str, device: torch.device) -> list[list[Tensor]]:
    """As many sets of inputs as make sure that the first is out of cache when it comes again."""
    made = [producer.make(shape, DTYPES[dtype], device) for _ in range(2)]
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        while len(made) * sum(map(size_of, made[0])) < _CACHES * cache:
            made.append(producer.make(shape, DTYPES[dtype], device))
    return made


def _own(case: CastCase, sets: Sequence[list[Tensor]]) -> Arm:
    cast = Cast(case, sets[0])
    on_cpu = not sets[0][0].is_cuda
    expected = cast.expected(sets[0])
    # The allocator hands these blocks to the results: what a kernel leaves unwritten is NaN.
    poison = [torch.full((size_of(result),), 0xFF, dtype=torch.uint8, device=result.device) for result in expected]
    del poison
    found = cast.launch(sets[0])
    near = agreement(found, expected)
    bytes_moved = case.bytes(sets[0], found)
    row = {
        "case": case.name,
        "arm": "narrowgate",
        "variant": case.variant,
        "program": case.producer.program,
        "operands": "rows" if case.columns == "" else "both",
        "passes": case.passes,
        "bytes": bytes_moved,
        # The reference agrees with itself, which says nothing.
        "correct": None
        if on_cpu and not kernels_on_cpu()
        else (near.exact if case.producer.program == IDENTITY else near.close),
        "codes_differ": near.codes,
        "scale_error": near.scale if math.isfinite(near.scale) else None,
        "emulated": on_cpu,
        "tiles": None if on_cpu else _tiles(),
    }
    return Arm([lambda leaves=leaves: cast.launch(leaves) for leaves in sets], row)


def _tiles() -> dict[str, list[int]]:
    """Rows, columns, tiles a program and warps of the kernels that were launched last."""
    from ...precision.kernels.launch import last_tiles

    return {kernel: list(tile) for kernel, tile in last_tiles().items()}


def _bf16(producer: Producer, shape: tuple[int, int], dtype: str, sets: Sequence[list[Tensor]]) -> list[Arm]:
    """The same values written in BF16 by Inductor's kernel: what a producer costs that nothing is cast in."""
    if producer.program == IDENTITY and dtype == "bf16":
        return []
    program = Program.parse(producer.program)
    compiled = torch.compile(lambda leaves: values(leaves, program).to(torch.bfloat16), dynamic=False)
    result = compiled(sets[0])
    row = _peer_row(case_name(producer, shape, dtype), "bf16", "bf16", sum(map(size_of, sets[0])) + size_of(result), 1)
    return [Arm([lambda leaves=leaves: compiled(leaves) for leaves in sets], row)]


def _peers(cases: Sequence[CastCase], sets: Sequence[list[Tensor]], say: Say) -> list[Arm]:
    """What peers make of the same matrix, counted by the bytes of our case with the same scale."""
    arms = []
    nearest = {case.scale: case for case in cases if not case.stochastic}
    for peer, scale, make in cast_peers(say):
        if scale not in nearest:
            continue
        case = nearest[scale]
        try:
            cast = make()
            for (x,) in sets:
                cast(x)
            torch.cuda.synchronize()
        except Exception as error:  # whatever a peer of another version does
            say(f"skipped: {peer} {scale}: {_first_line(error)}")
            continue
        like = Cast(case, sets[0]).launch(sets[0])
        row = _peer_row(case.name, peer, scale, case.bytes(sets[0], like), case.passes)
        arms.append(Arm([lambda x=x, cast=cast: cast(x) for (x,) in sets], row))
    return arms


def _peer_row(case: str, arm: str, variant: str, size: int, passes: int) -> dict[str, Any]:
    return {
        "case": case, "arm": arm, "variant": variant, "program": None, "operands": "both" if arm != "bf16" else "rows",
        "passes": passes, "bytes": size, "correct": None, "codes_differ": None, "scale_error": None, "emulated": False,
        "tiles": None,
    }  # fmt: skip


def _timed(arms: Sequence[Arm], device: torch.device, rounds: int, say: Say) -> list[dict[str, Any]]:
    gpu = device.type == "cuda"
    size, calls = (COPY_BYTES, _LAUNCHES) if gpu else (_QUICK_COPY_BYTES, 1)
    turns: dict[str, Work] = {_COPY: copier(device, size)}
    measured: dict[str, Arm] = {}
    host: dict[str, float] = {}
    for arm in arms:
        name = f"{arm.row['arm']} {arm.row['variant']}"
        try:
            host[name] = host_microseconds(arm.works[0], device, 20 if gpu else 1)
            turns[name] = rotating(arm.works, calls, device)
        except Exception as error:
            if arm.row["arm"] == "narrowgate":
                raise
            say(f"skipped: {name}, {arm.row['case']}: {_first_line(error)}")
            if gpu:
                torch.cuda.synchronize()
            continue
        measured[name] = arm
    for turn in turns.values():
        turn()
    times = in_turns(turns, rounds, 1, device)
    copied = terabytes_per_second(2 * size, statistics.median(times[_COPY]))
    most = ClockReader().memory_tb_per_s() if gpu else None
    rows = []
    for name, arm in measured.items():
        ms = statistics.median(times[name]) / calls
        rate = terabytes_per_second(arm.row["bytes"], ms)
        row = {
            **{key: arm.row[key] for key in ("case", "arm", "variant")},
            "ms": round(ms, 6),
            "us": round(ms * 1e3, 2),
            "host_us": round(host[name], 1),
            "tb_per_s": round(rate, 4) if gpu else None,
            "copy_tb_per_s": round(copied, 4) if gpu else None,
            "copy_share": round(rate / copied, 4) if gpu else None,
            "memory_tb_per_s": most,
            **{key: value for key, value in arm.row.items() if key not in ("case", "arm", "variant")},
        }
        rows.append(row)
        share = f"  {rate:6.2f} TB/s  {row['copy_share']:6.1%} of a copy" if gpu else "  emulated"
        wrong = "" if row["correct"] is not False else "  WRONG"
        say(f"{row['case']:28} {name:28} {row['us']:9.1f} us  host {row['host_us']:7.1f} us{share}{wrong}")
    return rows


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
