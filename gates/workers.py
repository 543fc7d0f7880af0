"""Seeds as parallel single-thread processes on a CPU.

Each worker owns one pipe, so a worker that dies, however suddenly, holds no lock that others need: its pipe closes,
the run ends with one clear error, and nothing waits for it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from ..precision.errors import NarrowgateError
from .exits import failure_text
from .progress import Progress, Step

if TYPE_CHECKING:
    from .pairs import Pair
    from .seeds import Job

#: Seconds between two progress messages of a worker.
_TELL_EVERY = 0.2


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    seed: int | None = None


def train_seeds(job: Job, seeds: Sequence[int], progress: Progress) -> dict[int, list[Pair]]:
    """Train every seed and return its pairs, one a recipe, by seed.

    Raises:
        RunError: a worker died or its training failed.
        NarrowgateError: a worker met bad input.
    """
    context: Any = multiprocessing.get_context("spawn")
    waiting, results = list(seeds), {}
    workers: list[_Worker] = []
    try:
        with _single_threaded(), _uninterruptible():
            for _ in range(min(usable_cores(), len(seeds))):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, job), daemon=True, name="narrowgate-seed")
                process.start()
                theirs.close()
                workers.append(_Worker(process, ours))
        for worker in workers:
            _hand_out(worker, waiting)
        while len(results) < len(seeds):
            for pipe in wait([w.pipe for w in workers if w.seed is not None]):
                worker = next(w for w in workers if w.pipe is pipe)
                kind, value = _receive(worker)
                if kind == "step":
                    progress.step(value)
                elif kind == "trained":
                    progress.trained(*value)
                elif kind == "pairs":
                    results[worker.seed] = value
                    _hand_out(worker, waiting)
                else:
                    _raise(kind, value)
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
    return results


def usable_cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def _hand_out(worker: _Worker, waiting: list[int]) -> None:
    worker.seed = waiting.pop(0) if waiting else None
    # A worker that is dead already is noticed when its end of the pipe is read.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        worker.pipe.send(worker.seed)


def _receive(worker: _Worker) -> tuple[str, Any]:
    from .train import RunError

    try:
        return worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join(5)
        code = worker.process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += ", as when memory runs out"
        raise RunError(f"the worker of seed {worker.seed} died ({how})") from None


def _raise(kind: str, value: tuple[str, str]) -> None:
    from .train import RunError

    message, trace = value
    error = NarrowgateError(message) if kind == "input" else RunError(message)
    error.__cause__ = WorkerTrace(trace)
    raise error


class WorkerTrace(Exception):
    """Carries a worker's traceback as text, for ``--debug``."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Give child processes one thread each: libraries read these when they load."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _uninterruptible() -> Iterator[None]:
    """Hold SIGINT back until the block ends, so that Ctrl-C while child processes start is late and never lost.

    The children inherit it held back, and print no traceback of theirs while they start.
    """
    if not hasattr(signal, "pthread_sigmask"):  # not on Windows
        yield
        return
    # It starts with the first child, and then lets SIGINT through again.
    resource_tracker.ensure_running()
    usual, caught = signal.getsignal(signal.SIGINT), False

    def catch(*_: object) -> None:
        nonlocal caught
        caught = True

    # What this thread holds back another one takes, and has the main one handle it all the same.
    replaced = usual is not None and threading.current_thread() is threading.main_thread()
    if replaced:
        signal.signal(signal.SIGINT, catch)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if replaced:
            signal.signal(signal.SIGINT, usual)
            if caught:
                signal.raise_signal(signal.SIGINT)


def _work(pipe: Connection, job: Job) -> None:
    """Run in the child: take seeds from the pipe until there are none."""
    # An interrupt from the keyboard reaches the whole group: the parent ends the children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr  # what a task prints is no part of the report
    seed: int | None = None
    try:
        import torch

        from .pairs import Pairing
        from .seeds import train_seed

        torch.set_num_threads(1)
        task = job.source.open()
        arms, pairing = job.arms(task, torch.device("cpu")), Pairing(task, job.limits)
        tell = _teller(pipe)
        while (seed := pipe.recv()) is not None:
            pairs = train_seed(job, pairing, arms, seed, tell, lambda *done: pipe.send(("trained", done)))
            pipe.send(("pairs", pairs))
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except BaseException as error:
        from .train import RunError

        text = failure_text(error)
        known = isinstance(error, RunError | NarrowgateError)
        message = str(error) if known else text if seed is None else f"seed {seed}: {text}"
        with contextlib.suppress(OSError):
            kind = "input" if isinstance(error, NarrowgateError) else "run"
            pipe.send((kind, (message, traceback.format_exc())))


def _teller(pipe: Connection) -> Callable[[Step], None]:
    last = 0.0

    def tell(step: Step) -> None:
        nonlocal last
        if time.monotonic() - last >= _TELL_EVERY:
            last = time.monotonic()
            pipe.send(("step", step))

    return tell
