"""What every test shares: GPU tests skip without a GPU, property tests repeat and are bounded, Ctrl-C interrupts."""

from __future__ import annotations

import signal
import threading

import hypothesis
import pytest

# Derandomized: a run on the same code gives the same examples. No deadline: the machines are shared.
hypothesis.settings.register_profile("narrowgate", derandomize=True, deadline=None, max_examples=60, database=None)
hypothesis.settings.load_profile("narrowgate")

# A shell that starts the tests in its background has SIGINT ignored, by them and by every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)
