from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from junitparser import JUnitXml
from narrowgate.gates.decision import decide
from narrowgate.gates.evidence import evidence_of, statistics_of
from narrowgate.gates.files import check_writable, write_together
from narrowgate.gates.junit import junit_failed_run, junit_report
from narrowgate.gates.measurements import Measurements, StepTime
from narrowgate.gates.policy import BUILTIN_POLICIES
from narrowgate.gates.render import render_report, render_summary, terminal_text
from narrowgate.gates.report import SCHEMA_FILE, RecipeFacts, Report, decided, load_report, report_schema
from narrowgate.precision.errors import NarrowgateError

jsonschema = pytest.importorskip("jsonschema")

STANDARD = BUILTIN_POLICIES["standard"]


def make_report(m: Measurements) -> Report:
    decision = decide(m, STANDARD)
    return Report(
        schema_version=1,
        verdict=decision.verdict,
        reasons=decision.reasons,
        recipe=RecipeFacts(
            name="r1", description="d | d", hash="0" * 64, backend="native", resolved={"recipe": "r1"},
            plan={"groups": [{"layers": 2, "fprop": "fp8_e4m3", "dgrad": "bf16", "wgrad": "bf16", "example": "a.b"}]},
        ),
        model={"name": "gem-tiny", "config": {"d": 32}},
        data={"name": "synthetic", "bayes_ne": {"click": 0.7}},
        environment={"torch": "2.13", "gpu": None},
        gates=decision.gates,
        statistics=statistics_of(m, decision),
        evidence=evidence_of(m, STANDARD.alpha, "BF16 autocast, under torch.compile"),
        policy=STANDARD,
        wall_seconds={"all": 1.5},
        measurements=m,
    )  # fmt: skip


@pytest.fixture
def accepted(measurements) -> Report:
    return make_report(measurements([1e-5 * x for x in (-1, 1, -1, 1, -1, 1, -1, 1)]))


@pytest.fixture
def rejected(measurements) -> Report:
    return make_report(measurements([1e-2 + 1e-5 * x for x in range(8)], speed=StepTime(status="no_gpu")))


def test_the_shipped_schema_is_current() -> None:
    """UPDATE_GOLDEN=1 writes it anew."""
    text = json.dumps(report_schema(), indent=1) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        SCHEMA_FILE.write_text(text)
    assert SCHEMA_FILE.read_text() == text


def test_reports_validate_against_the_schema(accepted: Report, rejected: Report) -> None:
    schema = report_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for report in (accepted, rejected):
        jsonschema.validate(json.loads(report.files()["report.json"]), schema)


def test_the_report_has_every_field_of_the_contract(rejected: Report) -> None:
    data = json.loads(rejected.files()["report.json"])
    assert data["schema_version"] == 1
    assert data["verdict"] == "reject"
    for field in ("reasons", "recipe", "model", "data", "environment", "gates", "statistics", "evidence"):
        assert data[field], field
    gate = {"name", "status", "task", "slice", "metric", "measured", "ci_low", "ci_high", "threshold", "direction"}
    for entry in data["gates"]:
        assert gate <= entry.keys()
    assert {"method", "alpha", "n", "looks", "family"} <= data["statistics"].keys()
    assert set(data["evidence"]) == {"kernel", "module", "step", "distributed", "quality"}
    for level in data["evidence"].values():
        assert level["baseline"]
        assert level["scope"]
        assert level["status"] == "measured" or level["why"]


def test_a_stored_report_decides_the_same_and_by_another_policy_anew(tmp_path: Path, rejected: Report) -> None:
    write_together(tmp_path, rejected.files())
    loaded = load_report(tmp_path / "report.json")
    assert loaded == rejected
    lenient = STANDARD.model_copy(update={"max_ne_increase": 0.5})
    again = decided(loaded, decide(loaded.measurements, lenient), lenient)
    assert again.verdict == "inconclusive"
    assert again.policy == lenient
    assert again.measurements == rejected.measurements


def test_markdown_says_the_verdict_first_and_fits_a_step_summary(accepted: Report, rejected: Report) -> None:
    text = render_report(rejected)
    assert text.startswith("## REJECT: `r1`\n")
    assert text.splitlines()[2].startswith("- NE on task click is worse by")
    assert "| ne click | FAIL | relative NE increase | [" in text
    assert "| stability | pass |" in text
    assert "not measured: this run had no GPU" in text
    assert "0.70000 Bayes-optimal" in text
    assert "fp8_e4m3 | bf16 | bf16 | `a.b` |" in text
    assert "speedup [low estimate high]" in render_report(accepted)
    assert len(text.encode()) < 2**20


def test_markdown_of_many_seeds_and_tasks_stays_below_the_limit(measurements) -> None:
    m = measurements(np.full(300, 1e-5))
    tasks = tuple(f"task_{i}" for i in range(5))
    seeds = tuple(
        s.model_copy(
            update={
                arm: getattr(s, arm).model_copy(
                    update={"quality": dict.fromkeys(tasks, getattr(s, arm).quality["click"])}
                )
                for arm in ("baseline", "candidate")
            }
        )
        for s in m.seeds
    )
    assert len(render_report(make_report(m.model_copy(update={"tasks": tasks, "seeds": seeds}))).encode()) < 2**20


def test_texts_of_others_cannot_break_a_table(accepted: Report) -> None:
    sly = accepted.model_copy(update={"data": {"name": "a | b\n<script>"}})
    assert "a \\| b &lt;script>" in render_report(sly)


def test_the_terminal_shows_verdict_reasons_and_aligned_gates(rejected: Report) -> None:
    lines = terminal_text(rejected).splitlines()
    assert lines[0] == "REJECT: r1"
    header = next(line for line in lines if line.startswith("  gate"))
    ne = next(line for line in lines if line.startswith("  ne click"))
    assert header.index("status") == ne.index("FAIL")


def test_junit_has_a_case_for_every_gate(accepted: Report, rejected: Report) -> None:
    def cases(report: Report) -> dict[str, Any]:
        return {case.name: case for suite in JUnitXml.fromstring(junit_report(report).encode()) for case in suite}

    found = cases(rejected)
    assert set(found) == {"step_time", "ne[click]", "auc[click]", "stability", "memory"}
    assert found["ne[click]"].result[0].type == "reject"
    assert "worse by" in found["ne[click]"].result[0].message
    assert type(found["step_time"].result[0]).__name__ == "Skipped"
    assert "no GPU" in found["step_time"].result[0].message
    assert found["stability"].result == []
    assert all(case.result == [] for case in cases(accepted).values())
    assert len({(case.classname, case.name) for case in found.values()}) == len(found)


def test_junit_of_an_insane_baseline_shows_no_clean_sheet(measurements, arm) -> None:
    m = measurements([0.0] * 8)
    seeds = tuple(s.model_copy(update={"baseline": arm(1.5, 0.7), "candidate": arm(1.5, 0.7)}) for s in m.seeds)
    report = make_report(m.model_copy(update={"seeds": seeds}))
    assert report.verdict == "inconclusive"
    suites = JUnitXml.fromstring(junit_report(report).encode())
    assert suites.skipped == 1
    assert suites.failures == 0


def test_junit_of_a_failed_run_is_an_error() -> None:
    suites = JUnitXml.fromstring(junit_failed_run("r1", "out of memory").encode())
    assert suites.errors == 1


def test_the_summary_lists_every_recipe(accepted: Report, rejected: Report) -> None:
    text = render_summary([accepted, rejected])
    assert "| `r1` | ACCEPT | none | All 5 gates pass. |" in text
    assert "| `r1` | REJECT | step_time (undecided), ne click (FAIL) |" in text
    assert "(and 1 more)" in text


class Killed(BaseException):
    """Stands for a kill: nothing may rely on catching it."""


@pytest.mark.parametrize("survives", range(4))
def test_a_kill_between_files_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: int) -> None:
    names = ("report.json", "report.md", "junit.xml")
    write_together(tmp_path, dict.fromkeys(names, "old"))
    replace, count = Path.replace, iter(range(10))

    def dying(self: Path, target: Path) -> Path:
        if next(count) == survives:
            raise Killed
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", dying)
    if survives < 3:
        with pytest.raises(Killed):
            write_together(tmp_path, dict.fromkeys(names, "new"))
    else:
        write_together(tmp_path, dict.fromkeys(names, "new"))
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(left) <= set(names)
    assert len(set(left.values())) == 1
    assert left["report.json"] == ("old" if survives == 0 else "new")


def test_a_full_disk_leaves_the_old_set_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_together(tmp_path, {"a": "old", "b": "old"})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_together(tmp_path, {"a": "new", "b": "new"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old", "b": "old"}


def test_an_unwritable_folder_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NarrowgateError, match="cannot write reports there"):
        check_writable(tmp_path / "file" / "deep")
    check_writable(tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
