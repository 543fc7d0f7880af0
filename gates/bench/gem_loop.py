"""Around the step: what its loader exposes, what repeating its bits costs, and rows without end in bounded memory."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from ...models.data.source import open_data
from ...models.presets import Preset
from ...models.task import GemTask
from ...models.training import LoopOptions, Trainer
from ..arithmetic import Arithmetic
from ..compilation import compile_model, honest_compilation
from ..speed import CudaTimer, HostTimer, StepFunction, Timer, stage
from ..task import make_optimizer
from ..train import seed_generators
from .gem import GemResult, GemSettings, ratio, take_turns

#: Batches after which a stream's memory is taken for its own: what is made once has been made.
_SETTLED = 20


def measure_loader(task: GemTask, settings: GemSettings, case: str) -> GemResult:
    """Measure the same BF16 step on staged batches and on batches as the loader makes them, in turns.

    ``exposed`` is the share of the streamed step that the loader adds, whether the device waits for the host or draws
    the rows itself; with one-sided 95 % bounds over rounds.
    """
    device = settings.device
    seed_generators(0)
    model = task.build_model().to(device).train()
    optimizer, arithmetic = make_optimizer(task, model), Arithmetic.of(device)
    forward = compile_model(model) if settings.gpu else model
    staged = stage(task.train_batches(0), device, settings.batches)
    source = _endless(task)

    def step(batch: Any) -> None:
        with arithmetic.context():
            loss = task.loss(forward, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    steps: dict[str, StepFunction] = {
        "staged": lambda i: step(staged[i % len(staged)]),
        "streamed": lambda i: step(next(source)),
    }
    with honest_compilation():
        for function in steps.values():
            for i in range(2 * len(staged) if settings.gpu else 1):
                function(i)
        timer: Timer = CudaTimer(device) if settings.gpu else HostTimer()
        found, stopped = take_turns(steps, timer, settings, timer.now() + settings.seconds)
    result = GemResult(f"{case} loader", facts={"stopped": stopped})
    share, (low, high) = ratio(found["streamed"], found["staged"])
    for name, blocks in found.items():
        times = sorted(block.device_ms for pair in blocks for block in pair)
        row: dict[str, Any] = {
            "case": result.case,
            "arm": "bf16",
            "variant": name,
            "ms": round(times[len(times) // 2], 4),
            "rounds": len(blocks),
        }
        if not settings.gpu:
            row |= {"dry_run": True}
        elif name == "streamed":
            row |= {"exposed": round(1 - 1 / share, 5), "ci": [round(1 - 1 / b, 5) for b in (low, high)]}
            settings.say(f"  exposed: {row['exposed']:.2%} of the step [{row['ci'][0]:.2%}, {row['ci'][1]:.2%}]")
        result.rows.append(row)
    return result


def _endless(task: GemTask) -> Iterator[Any]:
    seed = 1
    while True:
        yield from task.train_batches(seed)
        seed += 1


def measure_repeats(
    task: GemTask, recipes: dict[str, str | None], settings: GemSettings, case: str, steps: int = 100
) -> GemResult:
    """Train twice under one seed with deterministic algorithms; say whether all losses are the same bits.

    Args:
        task: of at least ``steps`` steps.
        recipes: by arm; None for BF16.
        settings: where.
        case: what the rows call it.
        steps: optimizer steps of each training.
    """
    result = GemResult(f"{case} repeats")
    for arm, recipe in recipes.items():
        row: dict[str, Any] = {"case": result.case, "arm": arm, "variant": "deterministic", "steps": steps}
        try:
            runs, seconds = [], 0.0
            for _ in range(2):
                options = LoopOptions(compiled=settings.gpu, deterministic=True)
                trainer = Trainer(task, seed=0, options=options, recipe=recipe)
                trainer.fit(min(2, steps))  # compiles
                began = time.perf_counter()
                runs.append(trainer.fit(steps, every=steps))
                seconds = time.perf_counter() - began
                del trainer
                _forget(settings)
            row |= {
                "same_bits": runs[0] == runs[1],
                "first_difference": next((i for i, (a, b) in enumerate(zip(*runs, strict=True)) if a != b), None),
                "ms": round(1000 * seconds / max(1, steps - 2), 4),
                "last_loss": runs[0][-1],
            }
        except RuntimeError as error:  # an operation that has no deterministic form
            row |= {"ms": None, "same_bits": None, "error": str(error).strip().splitlines()[0][:300]}
            result.skipped.append({"name": f"{arm} deterministic", "reason": row["error"], "fault": True})
        settings.say(f"  {arm}: same bits over {steps} steps: {row['same_bits']}")
        result.rows.append(row if settings.gpu else row | {"dry_run": True})
    return result


def measure_stream(preset: Preset, data: str, rows: int, settings: GemSettings, case: str) -> GemResult:
    """Draw at least ``rows`` training rows batch by batch; say how fast, and how far memory grew on the way.

    Memory is the process's largest resident set (on a GPU the allocator's peak too), after some batches and at the end.
    """
    size = preset.training.batch_size
    count = -(-rows // size)
    source = open_data(data, preset, device=settings.device, steps=count)
    drawn = events = 0
    settled = (0, 0)
    began = said = time.perf_counter()
    for number, batch in enumerate(source.train_batches(0), 1):
        drawn += batch.rows
        events += int(batch.offsets[-1])
        if number == min(_SETTLED, count):
            settled = _memory(settings)
        if time.perf_counter() - said > 30:
            said = time.perf_counter()
            settings.say(f"  {drawn} rows, {drawn / (said - began):.0f} a second")
    seconds = time.perf_counter() - began
    last = _memory(settings)
    result = GemResult(f"{case} stream")
    row: dict[str, Any] = {
        "case": result.case,
        "arm": "loader",
        "variant": settings.device.type,
        "ms": round(1000 * seconds / count, 4),
        "rows": drawn,
        "events": events,
        "rows_per_second": round(drawn / seconds),
        "peak_bytes": last[0],
        "grown_bytes": last[0] - settled[0],
    }
    if settings.gpu:
        row |= {"device_peak_bytes": last[1], "device_grown_bytes": last[1] - settled[1]}
    settings.say(
        f"  {drawn} rows of {events} events in {seconds:.0f} s; peak {last[0] / 2**20:.0f} MiB,"
        f" {row['grown_bytes'] / 2**20:.0f} MiB of it since batch {min(_SETTLED, count)}"
    )
    result.rows.append(row)
    return result


def _forget(settings: GemSettings) -> None:
    """Let go of what was compiled of a model, and with it of the model."""
    if settings.gpu:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _memory(settings: GemSettings) -> tuple[int, int]:
    """(bytes of the largest resident set, the device allocator's peak)."""
    # Linux counts kibibytes, macOS bytes.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return resident, torch.cuda.max_memory_allocated(settings.device) if settings.gpu else 0
