"""Starting workers: an interrupt in between is kept for later."""

from __future__ import annotations

import os
import signal

import pytest
from narrowgate.gates import workers


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be held back here")
def test_an_interrupt_while_workers_start_comes_after_and_is_not_lost() -> None:
    reached = []

    def start() -> None:
        with workers._uninterruptible():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert reached
    with workers._uninterruptible():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
