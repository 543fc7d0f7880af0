"""Gates on ranks over Gloo: processes without torchrun's agent, so that what ends them is a test's own doing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from narrowgate.recipes import load_recipe, resolve
from narrowgate.recipes.topology import example_topology
from narrowgate.recipes.wire_plan import Layout, predict_wire
from narrowgate.recipes.wire_units import Sharding

#: Seconds that a rank may wait for another, and that a whole run may take.
LIMIT, WHOLE = 20.0, 120.0
RULE = """
  - layers: "tower.**"
    fprop: {input: fp8_e4m3/row, weight: fp8_e4m3}
    dgrad: {grad: fp8_e5m2/row, weight: fp8_e4m3}
    wgrad: {grad: fp8_e5m2/row, input: fp8_e4m3/row}
"""
RECIPES = {
    "codes": f"recipe: codes\nrules:{RULE}shards: {{all_gather: fp8_e4m3, reduce_scatter: fp8_e5m2/row+sr}}\n",
    "plain": f"recipe: plain\nrules:{RULE}",
    "gather": f"recipe: gather\nrules:{RULE}shards: {{all_gather: fp8_e4m3}}\n",
}


class Forks:
    """The process that ranks are forks of; see ``forks.py``."""

    def __init__(self, environment: dict[str, str]) -> None:
        script = Path(__file__).with_name("forks.py")
        self.server = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, **what: Any) -> int:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(what) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())


class Ranks:
    """The ranks of a gate, two unless said, each a process of its own, in a folder with the task and the recipes."""

    def __init__(self, room: Path, forks: Forks) -> None:
        self.room, self.forks = furnished(room), forks
        self.numbers: list[int] = []
        self.codes: dict[int, int] = {}

    def start(self, *arguments: str, limit: float = LIMIT, count: int = 2) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["gate", *arguments, "--device", "cpu", "-q", "--collective-timeout", str(limit)]
        for rank in range(count):
            place = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            out, err = (str(self.room / f"{stream}{rank}") for stream in ("out", "err"))
            self.numbers.append(self.forks.ask(cwd=str(self.room), env=place, arguments=command, out=out, err=err))

    def end(self, *ranks: int) -> list[tuple[int, str, str]]:
        """(exit code, standard output, standard error) of some ranks, of all without any."""
        found = []
        for rank in ranks or range(len(self.numbers)):
            if rank not in self.codes:
                self.codes[rank] = self.forks.ask(wait=self.numbers[rank])
            out, err = ((self.room / f"{stream}{rank}").read_text() for stream in ("out", "err"))
            found.append((self.codes[rank], out, err))
        return found

    def wait_for(self, pattern: str, count: int) -> None:
        """Wait until ``count`` files of the store match."""
        until = time.monotonic() + WHOLE
        while len(list((self.room / "reports" / ".seeds").glob(pattern))) < count:
            assert time.monotonic() < until, (self.room / "err0").read_text()
            time.sleep(0.02)

    def signal(self, rank: int, number: int) -> float:
        """Send a signal to a rank; return when."""
        os.kill(self.numbers[rank], number)
        return time.monotonic()

    def kill(self) -> None:
        for rank, number in enumerate(self.numbers):
            if rank not in self.codes:
                os.kill(number, signal.SIGKILL)
                self.end(rank)


def furnished(room: Path) -> Path:
    """Put the task ``ranked`` and the recipes into a folder; return it."""
    shutil.copy(Path(__file__).with_name("ranked.py"), room)
    for name, text in RECIPES.items():
        (room / f"{name}.yaml").write_text(text)
    return room


def spoken(err: str) -> list[str]:
    """What the program itself said."""
    return [line for line in err.splitlines() if line.startswith("narrowgate")]


def planned(
    room: Path, name: str, monkeypatch: pytest.MonkeyPatch, replicas: int = 1
) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes by collective of BF16 and of the recipe, from shapes alone."""
    monkeypatch.syspath_prepend(str(room))
    model = __import__("ranked").Ranker()
    sharding = Sharding(units=("tower.0", "tower.2"), joint_amaxes=True)
    plan = resolve(load_recipe(room / f"{name}.yaml"), model)
    wire = predict_wire(model, plan, Layout(2 * replicas, 2), example_topology(), sharding)
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    plain, recipe = ({n: p.given(n) for n in names if p.given(n)} for p in (wire.plain, wire.recipe))
    return plain, recipe
