"""What Base Batch Shuffling does to a step: its time from batch to batch, and its memory."""

from __future__ import annotations

import math
import statistics as plain
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...models.task import GemTask
from .. import statistics
from ..compilation import honest_compilation
from ..speed import BlockTime, CudaTimer, HostTimer, Timer, stage
from .gem import GemResult, GemSettings, Running, make_running, ratio, release, shape_facts, take_turns
from .gem_arms import ARMS
from .timing import compiled_already

#: Of one batch or one task: both blocks of each round.
Blocks = Sequence[tuple[BlockTime, BlockTime]]
_ALPHA = 0.05


def measure_balance(tasks: Mapping[str, GemTask], pool: int, settings: GemSettings, case: str) -> GemResult:
    """Measure the compiled BF16 step on each batch of two pools, in turns, as the first task deals them and as others.

    ``spread`` is how far the slowest batch of a pool lies above the pool's mean, averaged over pools: what ranks wait
    for that a reader hands whole batches. It is taken in each round and averaged, with one-sided 95 % bounds over
    rounds. ``noise`` is the standard deviation of one batch's time in a round, as a share of it: of eight alike, the
    slowest lies 1.4 times as far above their mean. ``ratio`` is the first task's time over a task's, summed over the
    batches.

    Args:
        tasks: the same model and rows by a row's ``variant``, dealt into batches in different ways.
        pool: how many batches are dealt at once.
        settings: how.
        case: what the rows call it.
    """
    began = time.perf_counter()
    result = GemResult(f"{case} balance")
    running: dict[str, Running] = {}
    shapes: dict[str, dict[str, Any]] = {}
    # Each task has its own count of tokens: compiled after the other it would be taken for one that varies.
    with honest_compilation(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for name, task in tasks.items():
            staged = stage(task.train_batches(0), settings.device, 2 * pool)
            shapes[name] = {"tokens": shape_facts(task, staged)["tokens"], "live_tokens": _live(staged)}
            release(settings)
            before = torch.cuda.memory_allocated(settings.device) if settings.gpu else 0
            running[name] = make_running(ARMS["bf16"], task, staged, settings)
            release(settings)
            shapes[name]["peak_bytes"] = _peak(running[name], len(staged), settings, before)
        count = min(len(facts["live_tokens"]) for facts in shapes.values())
        timer: Timer = CudaTimer(settings.device) if settings.gpu else HostTimer()
        # The same batch of all tasks side by side.
        steps = {f"{name} {b}": partial(_step, one, b) for b in range(count) for name, one in running.items()}
        with compiled_already():
            found, stopped = take_turns(steps, timer, settings, deadline=began + settings.seconds)
        clocks = timer.clocks()
    result.facts |= {
        "alpha": _ALPHA, "stopped": stopped, "steps_per_block": settings.steps, "batches": count, "pool": pool,
        "clocks": None if clocks is None else clocks.model_dump(), "clocks_note": getattr(timer, "note", None),
    }  # fmt: skip
    by_task = {name: [found[f"{name} {b}"] for b in range(count)] for name in tasks}
    first = next(iter(tasks))
    for name, of_batches in by_task.items():
        each = [plain.median(block.device_ms for pair in blocks for block in pair) for blocks in of_batches]
        row: dict[str, Any] = {
            "case": result.case,
            "arm": "bf16",
            "variant": name,
            "ms": round(plain.fmean(each), 4),
            "rounds": len(of_batches[0]),
            "batch_ms": [round(ms, 4) for ms in each],
            **shapes[name],
        }
        if settings.gpu:
            share, bounds = ratio(_summed(by_task[first]), _summed(of_batches))
            row |= {"ratio": round(share, 4), "ci": [round(bound, 4) for bound in bounds]} | _spread(of_batches, pool)
            told = f"spread {row['spread']:.2%}"
        else:
            row |= {"dry_run": True}
            told = "dry run"
        settings.say(f"  {name}: {row['ms']:.2f} ms, {told}, {max(shapes[name]['live_tokens'])} tokens at most")
        result.rows.append(row)
    return result


def _step(one: Running, batch: int, i: int) -> None:
    one.step(batch)


def _live(staged: Sequence[Any]) -> list[int]:
    return [int(batch.offsets[-1]) for batch in staged]


def _peak(one: Running, batches: int, settings: GemSettings, before: int) -> int | None:
    """Bytes above ``before`` at the height of a step, the largest over the batches."""
    if not settings.gpu:
        return None
    torch.cuda.reset_peak_memory_stats(settings.device)
    for batch in range(batches):
        one.step(batch)
    torch.cuda.synchronize(settings.device)
    return torch.cuda.max_memory_allocated(settings.device) - before


def _spread(of_batches: Sequence[Blocks], pool: int) -> dict[str, Any]:
    """Return the spread of :func:`measure_balance`, its bounds, and the noise of one batch in one round."""
    logs = [[plain.fmean(math.log(block.device_ms) for block in pair) for pair in blocks] for blocks in of_batches]
    rounds = [[math.exp(log) for log in of_round] for of_round in zip(*logs, strict=True)]
    over = [plain.fmean(max(part) / plain.fmean(part) - 1 for part in _pools(times, pool)) for times in rounds]
    estimate = statistics.paired(over)
    noise = math.sqrt(plain.fmean(plain.variance(of_batch) for of_batch in logs))
    bounds = [round(estimate.lower(_ALPHA), 5), round(estimate.upper(_ALPHA), 5)]
    return {"spread": round(estimate.mean, 5), "spread_ci": bounds, "noise": round(noise, 5)}


def _pools(times: Sequence[float], pool: int) -> list[Sequence[float]]:
    return [times[start : start + pool] for start in range(0, len(times), pool)]


def _summed(of_batches: Sequence[Blocks]) -> Blocks:
    """Return both blocks of each round, added up over batches."""
    return [
        (_added(pair[0] for pair in of_round), _added(pair[1] for pair in of_round))
        for of_round in zip(*of_batches, strict=True)
    ]


def _added(blocks: Any) -> BlockTime:
    found = list(blocks)
    return BlockTime(sum(block.device_ms for block in found), sum(block.host_ms for block in found))
