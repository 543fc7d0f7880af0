"""The FSDP2 benchmark at toy size over Gloo: two ranks, the whole script. No time means anything here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowgate.gates.bench import fsdp2
from narrowgate.gates.bench.fsdp2_arms import VARIANTS, ShardedArm, pick_groups, recipe, tower
from narrowgate.gates.bench.fsdp2_gather import fit_links
from narrowgate.gates.bench.gem import GemSettings
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.spec import Spec
from narrowgate.recipes import resolve

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_fsdp2"
CPU = torch.device("cpu")
DRY = ("--device", "cpu", "--tiny", "--case", "tower-1b", "--variants", "fp8_128x128", "--arms", "narrowgate")


#: Runs the script on two ranks, forked from one process that has imported what they need.
FORK = """
import os, runpy, sys
from importlib import import_module
import_module("narrowgate.gates.bench.fsdp2")
import_module("torch._dynamo")
ranks = []
for rank in range(2):
    child = os.fork()
    if not child:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    ranks.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks))
"""


def run(*arguments: str, job: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with ``arguments``, as a rank of ``job`` or of none."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if sys.platform == "darwin":
        environment["GLOO_SOCKET_IFNAME"] = "lo0"
    environment.pop("WORLD_SIZE", None)
    return subprocess.run(
        [sys.executable, *arguments], env=environment | (job or {}), capture_output=True, text=True, timeout=150,
        check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document that two ranks wrote."""
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    out = tmp_path_factory.mktemp("bench") / "dry.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = run("-c", FORK, str(SCRIPT), *DRY, "--rounds", "1", "--out", str(out), job=job)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("written: ") == 1  # one rank tells
    assert "dry run" in done.stdout
    return json.loads(out.read_text())


def test_a_dry_run_has_the_rows_of_a_benchmark_and_claims_nothing(dry: dict[str, Any]) -> None:
    assert (dry["name"], dry["dry_run"], dry["gpus"], len(dry["runs"])) == ("fsdp2", True, 2, 1)
    assert dry["runs"][0]["faults"] == dry["runs"][0]["skipped"] == []
    assert dry["command"].startswith("torchrun --standalone --nproc-per-node 2 scripts/bench_fsdp2 --device cpu --tiny")
    steps = [row for row in dry["rows"] if not row["case"].startswith("gather")]
    assert [(row["arm"], row["variant"]) for row in steps] == [
        ("bf16", "bf16"),
        ("narrowgate", "fp8_128x128"),
        ("narrowgate", "fp8_128x128, bf16 payload"),
    ]
    for row in dry["rows"]:
        assert row["dry_run"]
        assert row["ms"] > 0
    for row in steps:
        assert row["ratio"] is row["ci"] is None
        assert row["exposed_ms"] == pytest.approx(row["ms"] - row["local_ms"], abs=1e-3)


def test_counted_bytes_are_the_planned_ones_and_codes_halve_the_gathers(dry: dict[str, Any]) -> None:
    steps = {row["variant"]: row for row in dry["rows"] if row["arm"] in ("bf16", "narrowgate")}
    assert all(row["bytes"] == row["planned_bytes"] for row in steps.values())
    coded, plain = steps["fp8_128x128"]["bytes"], steps["fp8_128x128, bf16 payload"]["bytes"]
    assert plain == steps["bf16"]["bytes"]
    assert coded["reduce_scatter"] == plain["reduce_scatter"]
    assert 0.5 < coded["all_gather"] / plain["all_gather"] < 0.51  # the norms stay BF16


def test_the_same_products_see_the_same_weights_whatever_travelled(dry: dict[str, Any]) -> None:
    """128x128 codes of the FP32 master and of its BF16 rounding differ a little, and their losses with them."""
    losses = {row["variant"]: row["loss"] for row in dry["rows"] if "loss" in row}
    assert losses["fp8_128x128"] == pytest.approx(losses["fp8_128x128, bf16 payload"], rel=0.05)
    assert losses["fp8_128x128"] != losses["bf16"]


def test_gathers_alone_say_what_they_carry(dry: dict[str, Any]) -> None:
    gathers = {row["variant"]: row for row in dry["rows"] if row["case"].startswith("gather")}
    assert gathers["bf16"]["bytes"] == 2 * gathers["fp8"]["bytes"] == 4096
    assert all(row["gemm_slowdown"] > 0 for row in gathers.values())


@pytest.mark.parametrize(
    ("job", "arguments", "message"),
    [
        (None, DRY, "found no job, expected torchrun --standalone --nproc-per-node 2 scripts/bench_fsdp2"),
        ({"WORLD_SIZE": "2"}, ("--device", "cpu"), "a CPU measures nothing: expected --tiny"),
        ({"WORLD_SIZE": "2"}, (*DRY, "--rounds", "0"), "--rounds: found 0, expected at least 1"),
    ],
)
def test_what_cannot_run_is_one_line(job: dict[str, str] | None, arguments: tuple[str, ...], message: str) -> None:
    done = run(str(SCRIPT), *arguments, "--out", "x", job=job)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_every_fp8_payload_has_its_twin_and_torchao_one() -> None:
    groups = pick_groups(list(VARIANTS), ["narrowgate", "torchao"])
    assert [tuple(arm.name for arm in group) for group in groups] == [
        ("narrowgate fp8_tensor", "narrowgate fp8_tensor, bf16 payload"),
        ("narrowgate fp8_row", "narrowgate fp8_row, bf16 payload"),
        ("narrowgate fp8_128x128", "narrowgate fp8_128x128, bf16 payload"),
        ("torchao fp8_tensor", "torchao fp8_tensor, bf16 payload"),
    ]
    with pytest.raises(NarrowgateError, match="--variants: found 'fp8_rows'; did you mean 'fp8_row'"):
        pick_groups(["fp8_rows"], ["narrowgate"])
    ((_, _, reduced),) = pick_groups(["fp8_row"], ["narrowgate"], "fp8_e5m2+sr")
    assert reduced.told == "fp8_row, fp8_e5m2/tensor+sr gradients"
    assert reduced.recipe("in_features > 0").shards.reduce_scatter == Spec.parse("fp8_e5m2+sr")
    with pytest.raises(NarrowgateError, match="unknown format 'fp9'"):
        pick_groups(["fp8_row"], ["narrowgate"], "fp9")


def test_links_are_fitted_to_gathers_and_say_how_far_off_they_are() -> None:
    def gathers(*times: float) -> list[dict[str, Any]]:
        sizes = (8e6, 32e6, 128e6)
        return [{"arm": "nccl", "bytes": int(size), "ms": ms} for size, ms in zip(sizes, times, strict=True)]

    # 40 us, then 250 GB/s to each of three others.
    exact = [0.04 + 3 * size / 250e6 for size in (8e6, 32e6, 128e6)]
    assert fit_links(gathers(*exact), 4) == {"nccl": {"gb_per_s": 250.0, "begin_us": 40.0, "worst_error": 0.0}}
    bent = fit_links(gathers(exact[0], exact[1] * 1.2, exact[2]), 4)["nccl"]
    assert 0.05 < bent["worst_error"] < 0.2
    assert fit_links(gathers(*exact)[:2], 4) == {}
    assert fit_links(gathers(3.0, 2.0, 1.0), 4) == {}


@pytest.mark.parametrize("variant", VARIANTS)
def test_twins_multiply_alike_and_only_one_gathers_codes(variant: str) -> None:
    case = tower("t", (8, 64, 128, 1), CPU, 0)
    plans = [resolve(recipe(variant, case.where, coded=coded), case.shape()) for coded in (True, False)]
    assert [layer.config for layer in plans[0].layers] == [layer.config for layer in plans[1].layers]
    assert [len(plan.gathered) for plan in plans] == [2, 0]
    assert ShardedArm("narrowgate", variant, coded=True).prepare(case.build(), case.where, CPU) is not None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_measure_what_a_payload_saves(tmp_path: Path) -> None:
    """The commands of the script's head with a small tower: rows with times, ratios and bounds."""
    out = tmp_path / "fsdp2.json"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT),
         "--tower", "512", "1024", "2048", "2", "--variants", "fp8_tensor", "--rounds", "3", "--steps", "3",
         "--gather", str(1 << 20), "--out", str(out)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [row for row in json.loads(out.read_text())["rows"] if not row["case"].startswith("gather")]
    assert all(row["ratio"] > 0 and row["ci"][0] <= row["ratio"] <= row["ci"][1] for row in steps)
    assert any(row.get("ratio_to_bf16_payload") for row in steps)


def test_compiling_bf16_takes_nothing_from_the_time_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shares = [0.0], list[float]()

    class Timer:
        def __init__(self, *_: Any) -> None: ...

        def now(self) -> float:
            return clock[0]

        def clocks(self) -> None: ...

    def make(*_: Any) -> None:
        clock[0] += 1000.0

    def measure(*arguments: Any) -> None:
        shares.append(arguments[-1])
        clock[0] += 40.0

    monkeypatch.setattr(fsdp2, "RankTimer", Timer)
    monkeypatch.setattr(fsdp2, "_make", make)
    monkeypatch.setattr(fsdp2, "_measure_group", measure)
    case = tower("tower", (4, 16, 16, 1), CPU, 0)
    settings = GemSettings(CPU, lambda line: None, seconds=60.0)
    groups = pick_groups(["fp8_tensor", "fp8_row", "fp8_128x128"], ["narrowgate"])
    mesh: Any = None
    found = fsdp2.measure_sharded(case, groups, mesh, settings)
    assert shares == [20.0, 10.0], "what is left is shared evenly"
    assert [entry["reason"] for entry in found.skipped] == ["the time allowed was over"] * 2
