"""The gate on two ranks one of which dies, hangs or fails: the other ends with it, and one of them says why."""

from __future__ import annotations

import re
import signal
import time

import pytest
import torch
from junitparser import JUnitXml
from narrowgate.gates.report import load_report

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")


def test_a_rank_that_is_killed_ends_the_other_and_what_was_finished_is_reused(gate_ranks, start) -> None:
    gate = ("gather.yaml", "--task", "ranked:paced", "--seeds", "2", "--steps", "40")
    ranks = start(*gate)
    ranks.wait_for("baseline-*.npz", 2)
    time.sleep(0.2)  # into the candidate's steps
    killed = ranks.signal(1, signal.SIGKILL)
    ((code, out, err),) = ranks.end(0)
    assert time.monotonic() - killed < gate_ranks.LIMIT / 2
    assert code == 4
    assert out == ""
    (line,) = gate_ranks.spoken(err)
    assert line.startswith("narrowgate: the run failed: rank 1 died")
    room = ranks.room / "reports"
    assert JUnitXml.fromfile(str(room / "junit.xml")).errors == 1
    assert not (room / "report.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in (room / ".seeds").glob("*.npz")}
    assert len(kept) >= 2

    (code, _, err), (other, _, _) = start(*gate).end()
    assert (code, other) == (3, 3), err
    report = load_report(room / "report.json")
    assert report.reuse.baseline == 2
    assert report.reuse.baseline + report.reuse.candidate == len(kept)
    for path in (room / ".seeds").glob("baseline-*.npz"):
        assert path.stat().st_mtime_ns == kept[path.name]


def test_rank_0_is_missed_by_the_others_too(gate_ranks, start) -> None:
    ranks = start("gather.yaml", "--task", "ranked:paced", "--seeds", "2", "--steps", "40")
    ranks.wait_for("baseline-*.npz", 1)
    ranks.signal(0, signal.SIGKILL)
    ((code, _, err),) = ranks.end(1)
    assert code == 4
    (line,) = gate_ranks.spoken(err)
    assert line.startswith("narrowgate: the run failed: rank 0 died")


def test_an_interrupt_ends_all_ranks_with_one_line(gate_ranks, start) -> None:
    ranks = start("gather.yaml", "--task", "ranked:paced", "--seeds", "2", "--steps", "40")
    ranks.wait_for("baseline-*.npz", 1)
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGINT)
    (code, _, err), (other, _, silent) = ranks.end()
    assert (code, other) == (130, 130)
    assert gate_ranks.spoken(err) == ["narrowgate: interrupted; no report was written of unfinished gates"]
    assert silent == ""


def test_an_error_in_one_rank_is_told_once_with_its_number(gate_ranks, start) -> None:
    (code, _, err), (other, _, silent) = start(
        "gather.yaml", "--task", "ranked:burning", "--seeds", "1", "--steps", "6"
    ).end()
    assert (code, other) == (4, 4)
    (line,) = gate_ranks.spoken(err)
    said = r"narrowgate: the run failed: rank 1: RuntimeError: matrix on fire \(in fault\(\) at ranked\.py:\d+\)"
    assert re.fullmatch(said, line)
    assert silent == ""


def test_a_rank_that_hangs_holds_the_others_for_the_time_limit_only(gate_ranks, start) -> None:
    ranks = start("gather.yaml", "--task", "ranked:paced", "--seeds", "2", "--steps", "40", limit=6)
    ranks.wait_for("baseline-*.npz", 1)
    stopped = ranks.signal(1, signal.SIGSTOP)
    ((code, _, err),) = ranks.end(0)
    assert 4 < time.monotonic() - stopped < 20
    assert code == 4
    (line,) = gate_ranks.spoken(err)
    assert "6 s, the time limit" in line
    assert "rank 1 did not come to one" in line or "rank 0: nothing happened" in line


def test_where_the_first_rank_stands_still_the_next_says_so(gate_ranks, start) -> None:
    ranks = start("gather.yaml", "--task", "ranked:paced", "--seeds", "2", "--steps", "40", limit=6)
    ranks.wait_for("baseline-*.npz", 1)
    stopped = ranks.signal(0, signal.SIGSTOP)
    ((code, _, err),) = ranks.end(1)
    assert 4 < time.monotonic() - stopped < 30
    assert code == 4
    (line,) = gate_ranks.spoken(err)
    assert line.startswith(
        "narrowgate: the run failed: rank 0: its process does not answer, as when it is stopped; rank 1: "
    )
