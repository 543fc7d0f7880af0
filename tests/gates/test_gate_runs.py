"""Whole runs through the command line, on a small task of a user's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from junitparser import JUnitXml
from narrowgate.gates.report import FILES, report_schema

jsonschema = pytest.importorskip("jsonschema")


def test_a_users_model_goes_from_recipe_to_reports_and_back(room: Path, narrowgate) -> None:
    code, out, err = narrowgate("gate", "all-fp8.yaml", "--task", "ranker:good", "--seeds", "5", "--out", "first")
    assert code == 3
    assert "INCONCLUSIVE: all-fp8" in out
    assert "no GPU" in out
    assert "seed 4 all-fp8 done" in err
    assert sorted(p.name for p in (room / "first").iterdir() if p.is_file()) == sorted(FILES)
    report = json.loads((room / "first" / "report.json").read_text())
    jsonschema.validate(report, report_schema())
    gates = {g["name"]: g["status"] for g in report["gates"]}
    assert gates["stability"] == "pass"
    assert gates["step_time"] == gates["module_time"] == gates["memory"] == "undecided"
    assert report["evidence"]["module"]["why"] == "this run had no GPU"
    assert report["measurements"]["rows"]["clusters"] == 500
    assert report["measurements"]["rows"]["rows"] == 2000
    for seed in report["measurements"]["seeds"]:
        assert seed["baseline"]["stability"]["steps"] == 60
        assert 0.5 < seed["baseline"]["quality"]["click"]["ne"] < 1
        assert seed["baseline"]["quality"]["click"] != seed["candidate"]["quality"]["click"]
    assert report["recipe"]["plan"]["groups"][0]["layers"] == 2
    assert "emulated" in report["recipe"]["plan"]["groups"][0]["fprop"]
    assert os.uname().nodename not in (room / "first" / "report.json").read_text()
    assert str(room) not in (room / "first" / "report.json").read_text()

    code, out, _ = narrowgate("gate", "--from", "first/report.json", "--json")
    again = json.loads(out)
    assert code == 3
    assert again == report
    code, out, _ = narrowgate("gate", "--from", "first/report.json", "--policy", "loose", "--out", "again")
    assert json.loads((room / "again" / "report.json").read_text())["policy"]["policy"] == "loose"
    assert "below 0.25 %" in out


def test_the_same_run_twice_measures_the_same(room: Path, narrowgate) -> None:
    reports = []
    for out in ("one", "two"):
        narrowgate("gate", "all-fp8.yaml", "--task", "ranker:good", "--seeds", "2", "--steps", "15", "--out", out, "-q")
        reports.append(json.loads((room / out / "report.json").read_text()))
    first, second = (
        [s[arm]["quality"] for s in r["measurements"]["seeds"] for arm in s if arm != "seed"] for r in reports
    )
    assert first == second


def test_a_nan_at_step_50_is_rejected_and_named(room: Path, narrowgate) -> None:
    code, out, err = narrowgate("gate", "all-fp8.yaml", "--task", "ranker:nan_at_step_50", "--seeds", "2", "-q")
    assert code == 1
    assert err == ""
    assert "REJECT" in out
    assert "In seed 0 the candidate's loss was not finite at step 50." in out
    cases = {case.name: case for suite in JUnitXml.fromfile("reports/junit.xml") for case in suite}
    assert cases["stability"].result[0].type == "reject"


def test_several_recipes_get_a_folder_each_and_a_summary(room: Path, narrowgate) -> None:
    text = (room / "all-fp8.yaml").read_text()
    (room / "bad.yaml").write_text(text.replace("recipe: all-fp8", "recipe: bad").replace("fp8_e4m3", "fp4_e2m1"))
    code, out, _ = narrowgate(
        "gate", "all-fp8.yaml", "bad.yaml", "bf16", "--task", "ranker:good", "--seeds", "5", "--json", "-q"
    )
    summary = json.loads((room / "reports" / "summary.json").read_text())
    assert json.loads(out) == summary
    assert code == summary["exit_code"] == 1
    assert {r["name"]: r["verdict"] for r in summary["recipes"]} == {
        "all-fp8": "inconclusive", "bad": "reject", "bf16": "inconclusive",
    }  # fmt: skip
    for name in ("all-fp8", "bad", "bf16"):
        report = json.loads((room / "reports" / name / "report.json").read_text())
        assert report["statistics"]["family"] == 3
    # The baseline against itself: no difference at all, and quality passes.
    same = {g["name"]: g for g in report["gates"]}
    assert same["ne"]["measured"] == 0
    assert same["ne"]["status"] == same["auc"]["status"] == "pass"
    (row,) = (
        line for line in (room / "reports" / "summary.md").read_text().splitlines() if line.startswith("| `bad` |")
    )
    assert "| REJECT |" in row


def test_a_crashed_worker_is_one_error_and_code_4(room: Path, narrowgate) -> None:
    (room / "reports").mkdir()
    (room / "reports" / "report.json").write_text("an accept of last week")
    code, out, err = narrowgate("gate", "all-fp8.yaml", "--task", "ranker:crashing", "--seeds", "3", "-q")
    assert code == 4
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "the run failed: the worker of seed" in err
    assert "exit code 9" in err
    # What a CI system picks up tells of this run, not of the last.
    assert [p.name for p in (room / "reports").iterdir() if p.is_file()] == ["junit.xml"]
    case = next(iter(next(iter(JUnitXml.fromfile("reports/junit.xml")))))
    assert case.result[0].type == "run failed"


def test_an_exception_in_training_names_the_seed_and_the_users_line(room: Path, narrowgate) -> None:
    code, _, err = narrowgate("gate", "all-fp8.yaml", "--task", "ranker:raising", "--seeds", "1", "-q")
    assert code == 4
    line = next(
        i for i, text in enumerate((room / "ranker.py").read_text().splitlines(), 1) if "matrix on fire" in text
    )
    at = f"(in fault() at ranker.py:{line})"
    assert f"seed 0: RuntimeError: matrix on fire {at} (--debug shows the traceback)" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("ranker:unpaired", "build_model() made other weights for the candidate"),
        ("ranker:shuffled", "train_batches(0) began with another batch for the candidate"),
        ("ranker:shuffled_arrays", "train_batches(0) began with another batch for the candidate"),
    ],
)
def test_arms_that_are_no_pair_are_refused(room: Path, narrowgate, task: str, message: str) -> None:
    code, _, err = narrowgate("gate", "all-fp8.yaml", "--task", task, "--seeds", "1", "--steps", "2", "-q")
    assert code == 4
    assert message in err


def test_labels_that_are_no_numbers_are_named_and_not_taken_for_other_rows(room: Path, narrowgate) -> None:
    code, _, err = narrowgate(
        "gate", "all-fp8.yaml", "--task", "ranker:unlabelled", "--seeds", "1", "--steps", "2", "-q"
    )
    said = "predict() returned a label nan of task click in held-out row 3, expected 0 or 1 for all tasks in every row"
    assert (code, err) == (2, f"narrowgate: {said}\n")


def test_a_slice_of_no_weight_is_not_measured_and_the_rest_is(room: Path, narrowgate) -> None:
    code, _, err = narrowgate(
        "gate", "all-fp8.yaml", "--task", "ranker:weightless", "--seeds", "2", "--steps", "4", "-q"
    )
    assert (code, err) == (3, "")
    report = json.loads((room / "reports" / "report.json").read_text())
    slices = report["measurements"]["seeds"][0]["candidate"]["quality"]["click"]["slices"]
    assert slices["cold"]["ne"] is None
    assert slices["cold"]["note"] == "the sample weights sum to zero"
    assert slices["one class"]["auc"] is None
    assert report["measurements"]["rows"]["ne"]["click"]
    assert (
        "cold" not in report["measurements"]["rows"]["slices"]
        or not report["measurements"]["rows"]["slices"]["cold"]["ne"]
    )


def test_rows_that_all_weigh_nothing_are_said_so(room: Path, narrowgate) -> None:
    code, _, err = narrowgate(
        "gate", "all-fp8.yaml", "--task", "ranker:unweighted", "--seeds", "1", "--steps", "2", "-q"
    )
    said = "predict() returned sample weights that sum to zero over all held-out rows"
    assert (code, err) == (2, f"narrowgate: {said}\n")


def test_an_optimizer_of_another_model_is_refused(room: Path, narrowgate) -> None:
    code, _, err = narrowgate(
        "gate", "all-fp8.yaml", "--task", "ranker:elsewhere", "--seeds", "1", "--steps", "2", "-q"
    )
    assert code == 2
    assert "optimizer() returned one that holds none of the model's parameters, and its first step moved none" in err


def test_an_optimizer_of_copies_that_it_writes_back_is_one(room: Path, narrowgate) -> None:
    code, _, err = narrowgate("gate", "all-fp8.yaml", "--task", "ranker:mastered", "--seeds", "1", "--steps", "2", "-q")
    assert (code, err) == (3, "")


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_interrupt_ends_workers_and_leaves_no_report(room: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "narrowgate.gates",
        "gate",
        "all-fp8.yaml",
        "--task",
        "ranker:slow",
        "--seeds",
        "2",
    ]
    process = subprocess.Popen(
        command, cwd=room, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("training"):
            break
    time.sleep(4)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C: parent and workers
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted; no report was written" in err
    assert "Traceback" not in err
    assert out == ""
    assert [p for p in (room / "reports").iterdir() if p.is_file()] == []
    until = time.monotonic() + 60
    while _group_lives(process.pid):
        assert time.monotonic() < until, "a worker outlived the run"
        time.sleep(0.1)


def test_seeds_that_repeat_one_training_end_the_run_before_anything_is_timed(
    room: Path, narrowgate, monkeypatch: pytest.MonkeyPatch
) -> None:
    (room / "fixed.py").write_text(
        "import ranker, torch\n"
        "class Fixed(ranker.Task):\n"
        "    def build_model(self):\n"
        "        torch.manual_seed(0)\n"
        "        model = super().build_model()\n"
        "        model.dropout.p = 0.0  # else masks would tell seeds apart\n"
        "        return model\n"
        "    def train_batches(self, seed):\n"
        "        return super().train_batches(0)\n"
    )
    timed: list[object] = []
    monkeypatch.setattr("narrowgate.gates.run.time_recipes", lambda *_: timed.append(_))
    code, out, err = narrowgate("gate", "all-fp8.yaml", "--task", "fixed:Fixed", "--seeds", "2", "--steps", "2", "-q")
    assert (code, out, timed) == (4, "", [])
    assert "seeds 0 and 1 trained the same baseline to the bit" in err


def test_what_a_task_prints_is_no_part_of_the_json(room: Path, narrowgate) -> None:
    (room / "loud.py").write_text(
        "import ranker\nprint('read 3 files')\n"
        "class Loud(ranker.Task):\n"
        "    def loss(self, model, batch):\n"
        "        print('a step')\n"
        "        return super().loss(model, batch)\n"
    )
    arguments = ("all-fp8.yaml", "--task", "loud:Loud", "--json")
    for command in (("plan", "--trace"), ("inspect", "--steps", "2")):
        _, out, err = narrowgate(command[0], *arguments, *command[1:])
        assert json.loads(out)
        assert "a step" in err
    gate = ["-m", "narrowgate.gates", "gate", *arguments, "--seeds", "1", "--steps", "2", "-q"]  # trains in a worker
    run = subprocess.run([sys.executable, *gate], capture_output=True, text=True, cwd=room, check=False)
    assert json.loads(run.stdout)["recipe"]
    assert "a step" in run.stderr
    assert "read 3 files" in run.stderr
