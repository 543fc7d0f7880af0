"""What Base Batch Shuffling does to a step: its time from batch to batch, and its memory."""

from __future__ import annotations

import statistics as plain
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...models.task import GemTask
from ..compilation import honest_compilation
from ..speed import BlockTime, CudaTimer, HostTimer, Timer, stage
from .gem import GemResult, GemSettings, Running, make_running, ratio, shape_facts, take_turns
from .gem_arms import ARMS
from .timing import compiled_already

Blocks = list[tuple[BlockTime, BlockTime]]


def measure_balance(tasks: Mapping[str, GemTask], batches: int, settings: GemSettings, case: str) -> GemResult:
    """Measure the compiled BF16 step on each of some batches, in turns, as the first task deals them and as others do.

    ``spread`` is how far the slowest batch lies above their mean: on several ranks, all wait for it. ``ratio`` is the
    first task's time over a task's, summed over the batches.

    Args:
        tasks: the same model and rows by a row's ``variant``, dealt into batches in different ways.
        batches: how many of each are measured.
        settings: how.
        case: what the rows call it.
    """
    began = time.perf_counter()
    result = GemResult(f"{case} balance")
    running: dict[str, Running] = {}
    shapes: dict[str, dict[str, Any]] = {}
    with honest_compilation():
        for name, task in tasks.items():
            staged = stage(task.train_batches(0), settings.device, batches)
            live = [int(batch.offsets[-1]) for batch in staged]
            shapes[name] = {"tokens": shape_facts(task, staged)["tokens"], "live_tokens": live}
            running[name] = make_running(ARMS["bf16"], task, staged, settings)
        timer: Timer = CudaTimer(settings.device) if settings.gpu else HostTimer()
        steps = {
            f"{name} {b}": partial(_again, one, b) for b in range(batches) for name, one in running.items()
        }  # the same batch of all tasks side by side
        with compiled_already():
            found, stopped = take_turns(steps, timer, settings, deadline=began + settings.seconds)
    result.facts |= {"stopped": stopped, "steps_per_block": settings.steps, "batches": batches}
    by_task = {name: [found[f"{name} {b}"] for b in range(batches)] for name in tasks}
    first = next(iter(tasks))
    for name, of_batches in by_task.items():
        each = [plain.median(block.device_ms for pair in blocks for block in pair) for blocks in of_batches]
        mean = plain.fmean(each)
        row: dict[str, Any] = {
            "case": result.case,
            "arm": "bf16",
            "variant": name,
            "ms": round(mean, 4),
            "rounds": len(of_batches[0]),
            "batch_ms": [round(ms, 4) for ms in each],
            "spread": round(max(each) / mean - 1, 5),
            "peak_bytes": running[name].peak_bytes,
            **shapes[name],
        }
        if settings.gpu:
            share, (low, high) = ratio(_summed(by_task[first]), _summed(of_batches))
            row |= {"ratio": round(share, 4), "ci": [round(low, 4), round(high, 4)]}
        else:
            row |= {"spread": None, "dry_run": True}
        told = "dry run" if row["spread"] is None else f"spread {row['spread']:.2%}"
        settings.say(f"  {name}: {row['ms']:.2f} ms, {told}, {max(shapes[name]['live_tokens'])} tokens at most")
        result.rows.append(row)
    return result


def _again(one: Running, batch: int, i: int) -> None:
    one.step(batch)


def _summed(of_batches: Sequence[Blocks]) -> Blocks:
    """Return both blocks of each round, added up over batches."""
    return [
        tuple(  # type: ignore[misc]
            BlockTime(sum(pair[at].device_ms for pair in of_round), sum(pair[at].host_ms for pair in of_round))
            for at in (0, 1)
        )
        for of_round in zip(*of_batches, strict=True)
    ]
