"""The distributed run that the tests here read: once a session, in processes of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_SCRIPT = Path(__file__).with_name("training.py")
#: Seconds for all stages. A collective that lacks a rank gives up after 20 (see the script), and all end with it.
_LIMIT = 300


@pytest.fixture(scope="session")
def training() -> ModuleType:
    """The script as a module, for the same cases in this process."""
    spec = importlib.util.spec_from_file_location("narrowgate_distributed_training", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What rank 0 of 2, 4 and 1 ranks found, by the number of ranks."""
    import torch

    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    folder = tmp_path_factory.mktemp("ranks")
    _run(folder, _LIMIT)
    return {ranks: torch.load(folder / f"ranks{ranks}.pt") for ranks in (1, 2, 4)}


@pytest.fixture(scope="session")
def found_on_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of two GPUs found."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    folder = tmp_path_factory.mktemp("gpus")
    _run(folder, 2 * _LIMIT, "cuda")
    return torch.load(folder / "ranks2.pt", map_location="cuda")


def _run(folder: Path, limit: float, *arguments: str) -> None:
    # The host's name may resolve to nowhere; the loopback is there.
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "darwin":
        environment["GLOO_SOCKET_IFNAME"] = "lo0"
    ran = subprocess.run(
        [sys.executable, str(_SCRIPT), str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
