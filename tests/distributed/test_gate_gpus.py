"""The gate on two GPUs over NCCL: what is measured, and that a rank's death ends the other although NCCL waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from narrowgate.gates.report import load_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(600),  # every unit of both arms is compiled, on every rank
]
RECIPE = """
recipe: codes
rules:
  - layers: "**"
    where: in_features % 16 == 0 and out_features % 16 == 0
    fprop: {input: fp8_e4m3, weight: fp8_e4m3}
    dgrad: {grad: fp8_e5m2, weight: fp8_e4m3}
    wgrad: {grad: fp8_e5m2, input: fp8_e4m3}
shards: {all_gather: fp8_e4m3}
"""
POLICY = """
policy: quick
extends: loose
speed: {min_quartets: 3, max_quartets: 4, steps_per_block: 3, budget_seconds: 10, bf16_fused_seconds: 0,
        module_budget_seconds: 5}
"""
GATE = ("gate", "codes.yaml", "--model", "gem-tiny", "--policy", "quick.yaml", "--device", "cuda", "-q")


TABLES = """
recipe: tables
rules:
  - layers: "**"
    where: in_features % 16 == 0 and out_features % 16 == 0
    fprop: {input: fp8_e4m3, weight: fp8_e4m3}
shards: {tables: {forward: fp8_e4m3/row, backward: fp8_e5m2/row+sr}}
"""


@pytest.fixture
def room(tmp_path: Path) -> Path:
    (tmp_path / "codes.yaml").write_text(RECIPE)
    (tmp_path / "tables.yaml").write_text(TABLES)
    (tmp_path / "quick.yaml").write_text(POLICY)
    return tmp_path


def test_ranks_measure_steps_exposed_communication_and_scaling(room: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "narrowgate.gates", *GATE, "--seeds", "1", "--steps", "30"],
        cwd=room, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    report_file = room / "reports" / "report.json"
    assert report_file.exists(), ran.stderr[-4000:]
    report = load_report(report_file)
    run = report.measurements.distributed
    assert run.transport == "nccl"
    assert run.step.status == "measured"
    assert len(run.step.quartets) >= 3
    for arm in (run.baseline, run.candidate):
        assert arm.wire.counted_bytes() == arm.wire.planned_bytes()
        assert min(arm.time.ms, arm.time.local_ms, arm.time.alone_ms) > 0
    gather = [arm.wire.counted_bytes()["all_gather"] for arm in (run.baseline, run.candidate)]
    assert gather[1] < gather[0]
    (gate,) = (gate for gate in report.gates if gate.name == "step_time")
    assert gate.measured is not None
    assert all(seed.candidate.peak_memory for seed in report.measurements.seeds)


def test_ranks_exchange_rows_of_tables_in_a_gate(room: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "narrowgate.gates", "gate", "tables.yaml", *GATE[2:], "--seeds", "2", "--steps", "20"],
        cwd=room, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    report_file = room / "reports" / "report.json"
    assert report_file.exists(), ran.stderr[-4000:]
    report = load_report(report_file)
    run = report.measurements.distributed
    assert not [reason for reason in report.reasons if reason.code == "wire_ignored"]
    for arm, dtype in ((run.baseline, "bfloat16"), (run.candidate, "uint8")):
        assert arm.wire.counted_bytes() == arm.wire.planned_bytes()
        sent = {entry.dtype for entry in arm.wire.counted if entry.collective == "all_to_all" and entry.bytes}
        assert sent == {dtype, "int64"}
        assert min(arm.time.ms, arm.time.local_ms, arm.time.alone_ms) > 0
    # Seed after seed in one compiled model: each begins anew, and both arms alike.
    for seed in report.measurements.seeds:
        first = [arm.losses.curve[0][1] for arm in (seed.baseline, seed.candidate)]
        assert first[1] == pytest.approx(first[0], rel=2e-2)
        assert seed.candidate.stability.non_finite_losses == 0


def test_a_rank_that_is_killed_while_nccl_waits_ends_the_other(room: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "narrowgate.gates", *GATE, "--seeds", "8", "--collective-timeout", "200"],
            cwd=room, env={**os.environ, **job, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        until = time.monotonic() + 300
        while not list((room / "reports" / ".seeds").glob("baseline-*.npz")):
            assert time.monotonic() < until
            assert ranks[0].poll() is None, ranks[0].communicate()
            time.sleep(0.1)
        ranks[1].send_signal(signal.SIGKILL)
        _, err = ranks[0].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[0].returncode == 4
    assert sum(line.startswith("narrowgate: the run failed: rank 1 died") for line in err.splitlines()) == 1
