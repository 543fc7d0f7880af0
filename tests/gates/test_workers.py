"""Starting workers: an interrupt in between is kept for later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from narrowgate.gates import workers


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be held back here")
@pytest.mark.parametrize("others", [0, 3], ids=["one thread", "threads that do not hold it back"])
def test_an_interrupt_while_workers_start_comes_after_and_is_not_lost(others: int) -> None:
    reached, over = [], threading.Event()

    def start() -> None:
        with workers._uninterruptible():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # for whichever thread takes it
            reached.append(True)

    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        over.set()
    assert reached
    with workers._uninterruptible():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be held back here")
def test_a_child_that_starts_has_it_held_back_too() -> None:
    code = """
import multiprocessing, signal
from narrowgate.gates import workers
with workers._uninterruptible():
    children = [multiprocessing.get_context("spawn").Process(target=signal.raise_signal, args=(signal.SIGINT,))
                for _ in range(2)]
    for child in children:
        child.start()
for child in children:
    child.join()
print([child.exitcode for child in children], signal.pthread_sigmask(signal.SIG_BLOCK, set()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[0, 0] set()\n", "")
