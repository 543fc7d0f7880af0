"""Optimizer steps: time, bandwidth against a copy of the same run, and whether the results are right.

Arms of a case take turns with a copy. A turn begins with a wait on the device, during which the host launches all of
it, so ``ms`` is the device's time; what launching takes is ``host_ms``. Bytes are those that a step must move
(:mod:`narrowgate.gates.bench.optimizer_arms`), so a row above what the memory can move has read from the cache.

First all arms take the same three steps from the same parameters, with gradients that shrink. One pass over BF16
moments must leave the bits of PyTorch's step between two roundings; codes written in the pass, those of a cast after
it; every update must be PyTorch's on FP32 moments within the rounding of BF16 ones, and a table's in one launch that of
plain operations.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...models.gem import GemModel
from ...models.optimizers import table_parameters
from ...models.task import GemTask
from ...precision.cast_operators import kernels_on_cpu
from ..nvml import ClockReader
from .optimizer_arms import (
    ApartArm,
    Arm,
    CastArm,
    CodesArm,
    LoweredArm,
    Problem,
    TablesArm,
    TorchaoArm,
    adam_arms,
    first_line,
    same_bits,
    table_arms,
)
from .timing import COPY_BYTES, Say, Work, copier, host_microseconds, milliseconds, terabytes_per_second

#: Norm of the difference between two updates over the norm of one. Stochastic rounding moves a BF16 moment by up to
#: 2^-7 of it, and a step by one such moment and half of another. One launch adds up a row's squares in another order.
UPDATE_TOLERANCE, TABLE_TOLERANCE = 2**-6, 1e-5
SHAPES = ((16384, 8192), (8192, 8192), (32768, 512), (512, 45056))
QUICK_SHAPES = ((48, 80), (32, 128))
#: A peer compiles its step for each shape, and what it takes an element depends on none: the large ones do.
PEER_ELEMENTS = 1 << 26
#: Steps that are compared, and by how much gradients shrink after each: a moment that changed its sign could cancel.
_CHECKED, _SHRINK = 3, 0.7
#: Rows of a table that have a gradient: so many, or a quarter.
_TOUCHED = 2048
#: Elements that a turn updates at least, and steps that it takes at most.
_TURN, _MOST_CALLS = 1 << 27, 8
_QUICK_COPY_BYTES = 1 << 20
_COPY = "copy"
#: No GPU's clock is faster.
_CYCLES_PER_MS = 2_200_000


@dataclass(frozen=True)
class OptimizerCase:
    """Which parameters are updated."""

    name: str
    #: Asked for when the case runs.
    shapes: Callable[[], list[tuple[int, ...]]]
    tables: bool = False
    peers: bool = False


def optimizer_cases(*, gpu: bool = True, quick: bool = False) -> list[OptimizerCase]:
    """Return every case; with ``quick`` one weight and the tables, on a CPU all at tiny sizes."""
    shapes = (SHAPES[1:2] if quick else SHAPES) if gpu else QUICK_SHAPES
    model = "gem-base" if gpu else "gem-tiny"
    cases = [
        OptimizerCase(f"{n}x{k}", lambda n=n, k=k: [(n, k)], peers=n * k >= PEER_ELEMENTS and not quick)
        for n, k in shapes
    ]
    if not (gpu and quick):
        cases.append(OptimizerCase(f"{model} dense", lambda: model_shapes(model, tables=False)))
    cases.append(OptimizerCase(f"{model} tables", lambda: model_shapes(model, tables=True), tables=True))
    return cases


def model_shapes(name: str, *, tables: bool) -> list[tuple[int, ...]]:
    """Return the shapes of a preset's embedding tables, or of all its other parameters."""
    task = GemTask.open(name, "synthetic")
    with torch.device("meta"):
        model = GemModel(task.preset.model, task.data.features)
    inside = {id(p) for p in table_parameters(model)}
    return [tuple(p.shape) for p in model.parameters() if (id(p) in inside) == tables]


def measure_optimizer(
    *,
    device: torch.device,
    rounds: int,
    say: Say,
    quick: bool = False,
    peers: bool = True,
    wanted: Callable[[str], bool] = lambda name: True,
) -> list[dict[str, Any]]:
    """Measure every case, one after the other, and return a row for each arm.

    Args:
        device: a GPU; on a CPU sizes are tiny, our arms take PyTorch's step between conversions, rows of those are
            ``emulated``, and none claims a share.
        rounds: how often every arm takes its turn.
        say: takes lines of progress.
        quick: fewer cases, without peers.
        peers: also torchao's optimizers of 8-bit state, where they are installed.
        wanted: which cases, by name.

    Returns:
        Rows with ``case``, ``arm``, ``variant``, ``ms`` and ``host_ms`` of a step, ``speedup`` over the case's first
        arm, ``elements``, ``bytes``, ``bytes_per_element``, ``tb_per_s``, ``copy_tb_per_s`` and ``copy_share`` of the
        same turns, ``memory_tb_per_s`` that the memory can move at most, ``update_error`` against the first arm,
        ``bits_differ`` where bits are promised, whether a step takes ``one_pass``, ``weights`` and of how many of them
        ``codes_written`` in the pass of every step, ``correct`` and ``emulated``. What is unknown is null.
    """
    rows: list[dict[str, Any]] = []
    gpu = device.type == "cuda"
    for case in optimizer_cases(gpu=gpu, quick=quick):
        if wanted(case.name):
            rows += _measured(case, device, rounds, peers and gpu, say)
            _release(device)
    return rows


def optimizer_faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say what is wrong with rows: other results, codes not written in the pass, more bandwidth than there is."""
    found = []
    for row in rows:
        what = f"{row['case']}, {row['arm']} {row['variant']}"
        if row["correct"] is False:
            error = "not finite" if row["update_error"] is None else f"off by {row['update_error']:.2g}"
            found.append(f"{what}: {row['bits_differ']} elements are not the bits expected; the update is {error}")
        if row["one_pass"] is False:
            found.append(f"{what}: found parameters that a step takes the long way, expected one pass over each")
        if row["codes_written"] is not None and row["codes_written"] != row["weights"]:
            found.append(
                f"{what}: the codes of {row['codes_written']} of {row['weights']} weights were written in the pass of "
                "every step, expected all"
            )
        if row["memory_tb_per_s"] is not None and row["tb_per_s"] > row["memory_tb_per_s"]:
            found.append(
                f"{what}: {row['tb_per_s']:.2f} TB/s of a memory that moves {row['memory_tb_per_s']:.2f}: "
                "its inputs came from the cache"
            )
    return found


def _measured(case: OptimizerCase, device: torch.device, rounds: int, peers: bool, say: Say) -> list[dict[str, Any]]:
    problem = _problem(case, device)
    found = table_arms(problem) if case.tables else adam_arms(problem, peers=peers and case.peers, say=say)
    arms = list(found)
    facts = _check(arms, problem, case.name, say)
    _release(device)
    return _timed(case, arms, facts, device, rounds, say)


def _problem(case: OptimizerCase, device: torch.device) -> Problem:
    shapes = case.shapes()
    start = [0.02 * torch.randn(shape, device=device) for shape in shapes]
    grads = [torch.randn(shape, device=device) for shape in shapes]
    touched = []
    for grad in grads if case.tables else ():
        rows = torch.zeros(grad.shape[0], dtype=torch.bool, device=device)
        rows[torch.randperm(grad.shape[0], device=device)[: min(_TOUCHED, -(-grad.shape[0] // 4))]] = True
        grad.mul_(rows[:, None])
        touched.append(rows)
    return Problem(start, grads, touched)


def _check(arms: list[Arm], problem: Problem, case: str, say: Say) -> dict[str, dict[str, Any]]:
    """Take the same steps with all ``arms``, compare, and return what each row says of it.

    A peer that fails is taken out.
    """
    judged = problem.device.type == "cuda" or kernels_on_cpu()
    apart = ApartArm(problem) if judged and not problem.touched else None
    for number in range(_CHECKED):
        for arm in [*arms, *([apart] if apart is not None else [])]:
            try:
                arm.step()
            except Exception as error:
                if not isinstance(arm, TorchaoArm):
                    raise
                # Whatever a peer of another version does.
                say(f"skipped: {arm.name}, {case}: {first_line(error)}")
                arms.remove(arm)
                continue
            if number == 0:
                arm.expect()
        torch._foreach_mul_(problem.grads, _SHRINK)  # type: ignore[attr-defined]
    first, cast = arms[0], next((arm for arm in arms if isinstance(arm, CastArm)), None)
    moved = _norm(first.parameters, problem.start)
    facts: dict[str, dict[str, Any]] = {}
    for arm in arms:
        error = _norm(arm.parameters, first.parameters) / moved if arm is not first else None
        differ, tolerance = None, UPDATE_TOLERANCE
        if isinstance(arm, LoweredArm) and apart is not None:
            differ = same_bits([*arm.parameters, *arm.moments()], [*apart.parameters, *apart.moments()])
            if isinstance(arm, CodesArm) and arm.kept and cast is not None:
                differ += same_bits(arm.codes(), cast.codes())
        elif isinstance(arm, TablesArm):
            differ, tolerance = _outside(arm, problem), TABLE_TOLERANCE
        finite = error is not None and math.isfinite(error)
        promised = judged and arm.own
        facts[arm.name] = {
            "update_error": error if finite else None,
            "bits_differ": differ,
            "correct": finite and error <= tolerance and not differ if promised and error is not None else None,
        }
    return facts


def _norm(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The norm of all differences."""
    parts = [torch.linalg.vector_norm(a.detach() - b.detach()) for a, b in zip(tensors, others, strict=True)]
    return float(torch.linalg.vector_norm(torch.stack(parts)))


def _outside(arm: Arm, problem: Problem) -> int:
    """How many elements have changed in rows without a gradient."""
    changed = 0
    for table, start, touched in zip(arm.parameters, problem.start, problem.touched, strict=True):
        changed += int(((table.detach() != start) & ~touched[:, None]).sum())
    return changed


def _timed(
    case: OptimizerCase, arms: list[Arm], facts: dict[str, dict[str, Any]], device: torch.device, rounds: int, say: Say
) -> list[dict[str, Any]]:
    gpu = device.type == "cuda"
    judged = gpu or kernels_on_cpu()
    elements = arms[0].problem.elements
    calls = min(_MOST_CALLS, max(1, _TURN // elements)) if gpu else 1
    size = COPY_BYTES if gpu else _QUICK_COPY_BYTES
    works: dict[str, tuple[Work, int]] = {_COPY: (copier(device, size), 1)}
    works |= {arm.name: (arm.step, calls) for arm in arms}
    times = _in_turns(works, rounds, device)
    copied = terabytes_per_second(2 * size, statistics.median(times[_COPY]))
    most = ClockReader().memory_tb_per_s() if gpu else None
    baseline = statistics.median(times[arms[0].name])
    rows: list[dict[str, Any]] = []
    for arm in arms:
        ms, moved, written = statistics.median(times[arm.name]), arm.bytes(), arm.written()
        rate = terabytes_per_second(moved, ms)
        rows.append(
            {
                "case": case.name,
                "arm": arm.arm,
                "variant": arm.variant,
                "ms": round(ms, 5),
                "host_ms": None,
                "speedup": round(baseline / ms, 4) if gpu else None,
                "elements": elements,
                "parameters": len(arm.parameters),
                "bytes": round(moved),
                "bytes_per_element": round(moved / elements, 4),
                "tb_per_s": round(rate, 4) if gpu else None,
                "copy_tb_per_s": round(copied, 4) if gpu else None,
                "copy_share": round(rate / copied, 4) if gpu else None,
                "memory_tb_per_s": most,
                **facts[arm.name],
                "weights": None if written is None else written[1],
                "codes_written": None if written is None or not judged else written[0],
                "one_pass": arm.one_pass() if judged else None,
                "touched_rows": sum(int(x.sum()) for x in arm.problem.touched) if case.tables else None,
                "emulated": arm.own and not gpu,
            }
        )
    del works
    # The last first, and gone before the next: the step of every optimizer asks all lowered layers that are alive.
    for row in reversed(rows):
        arm = arms.pop()
        row["host_ms"] = round(host_microseconds(arm.step, device, 1 if len(arm.parameters) > 1 else 5) / 1e3, 4)
        del arm
        gc.collect()
    for row in rows:
        share = f"  {row['tb_per_s']:5.2f} TB/s  {row['copy_share']:6.1%} of a copy" if gpu else "  not measured"
        wrong = "" if row["correct"] is not False else "  WRONG"
        name = f"{row['arm']} {row['variant']}"
        say(f"{case.name:16} {name:38} {row['ms']:9.3f} ms  host {row['host_ms']:8.3f} ms{share}{wrong}")
    return rows


def _in_turns(works: dict[str, tuple[Work, int]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of one call of each of ``works``, (what runs, calls a turn), an entry a round.

    The order turns round, so that drift of clocks and temperature falls on all alike.
    """
    lead: dict[str, float] = {}
    for name, (work, calls) in works.items():
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        lead[name] = (time.perf_counter() - begin) * 1e3
    times: dict[str, list[float]] = {name: [] for name in works}
    order = list(works)
    for turn in range(rounds):
        for name in order if turn % 2 == 0 else reversed(order):
            times[name].append(_queued_milliseconds(*works[name], device, lead[name]))
        if turn % 2:
            order = order[1:] + order[:1]
    return times


def _queued_milliseconds(work: Work, calls: int, device: torch.device, lead: float) -> float:
    """Time of one call on the device, which has waited until the host, which takes ``lead`` ms, was done."""
    if device.type != "cuda":
        return milliseconds(work, calls, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int((1.5 * lead + 0.2) * _CYCLES_PER_MS))
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
