"""Scripts that start ranks of their own, the distributed run that most tests here read, and ranks of gates."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

#: Seconds for all stages. A collective that lacks a rank gives up after 20 (see the script), and all end with it.
_LIMIT = 300


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As ranks have: a product that several threads share is summed in another order, and compared bits differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Import a script of this folder by its name, for the same cases in this process."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).with_name(f"{name}.py")
        spec = importlib.util.spec_from_file_location(f"narrowgate_distributed_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """What processes of ranks over Gloo find in their environment."""
    # The host's name may resolve to nowhere; the loopback is there.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": loopback, **os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def run_script(environment: dict[str, str]) -> Callable[..., None]:
    """Run a script of this folder, which starts its own ranks, with the folder that takes what they find."""

    def run(name: str, folder: Path, *arguments: str, limit: float) -> None:
        if not torch.distributed.is_available():
            pytest.skip("this PyTorch has no torch.distributed")
        ran = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(f"{name}.py")), str(folder), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-4000:]

    return run


@pytest.fixture(scope="session")
def training(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script that trains sharded, as a module."""
    return load_script("training")


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> dict[int, dict[str, Any]]:
    """What rank 0 of 2, 4 and 1 ranks found, by the number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    run_script("training", folder, limit=_LIMIT)
    return {ranks: torch.load(folder / f"ranks{ranks}.pt") for ranks in (1, 2, 4)}


@pytest.fixture(scope="session")
def found_on_gpus(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> dict[str, Any]:
    """What rank 0 of two GPUs found."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    folder = tmp_path_factory.mktemp("gpus")
    run_script("training", folder, "cuda", limit=2 * _LIMIT)
    return torch.load(folder / "ranks2.pt", map_location="cuda")


@pytest.fixture(scope="session")
def gate_ranks(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """What starts gates on ranks and ends them, as a module."""
    return load_script("gate_ranks")


@pytest.fixture(scope="session")
def forks(gate_ranks: ModuleType, environment: dict[str, str]) -> Iterator[Any]:
    """What ranks of gates are forked from."""
    made = gate_ranks.Forks(environment)
    yield made
    made.server.communicate("")


@pytest.fixture
def start(tmp_path: Path, gate_ranks: ModuleType, forks: Any) -> Iterator[Callable[..., Any]]:
    """Start a gate on two ranks in this test's folder; its ranks end with the test."""
    started: list[Any] = []

    def go(*arguments: str, limit: float = gate_ranks.LIMIT) -> Any:
        started.append(gate_ranks.Ranks(tmp_path, forks))
        started[-1].start(*arguments, limit=limit)
        return started[-1]

    yield go
    for ranks in started:
        ranks.kill()
