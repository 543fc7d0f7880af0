from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from junitparser import JUnitXml
from narrowgate.gates.cli_compare import comparison_text
from narrowgate.gates.compare import compare
from narrowgate.gates.decision import decide
from narrowgate.gates.files import check_writable, write_together
from narrowgate.gates.judgement import Reason
from narrowgate.gates.junit import junit_failed_run, junit_report
from narrowgate.gates.outputs import Outcome
from narrowgate.gates.policy import BUILTIN_POLICIES
from narrowgate.gates.render import fit, render_report, render_summary, terminal_text
from narrowgate.gates.report import FILES, SCHEMA_FILE, SCHEMA_MINOR, Report, decided, load_report, report_schema
from narrowgate.precision.errors import NarrowgateError

jsonschema = pytest.importorskip("jsonschema")

STANDARD = BUILTIN_POLICIES["standard"]


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


def test_markdown_that_is_too_long_is_cut_after_a_line_and_says_so(measurements, make_report) -> None:
    m = measurements(np.full(300, 1e-5))
    tasks = tuple(f"task_{i}" for i in range(60))
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
    report = make_report(m).model_copy(update={"measurements": m.model_copy(update={"tasks": tasks, "seeds": seeds})})
    text = render_report(report)
    assert 0.99 * 2**20 < len(text.encode()) <= 2**20
    assert text.startswith("## ")
    before, _, notice = text.rpartition("\n\n")
    assert before.splitlines()[-1].endswith("|"), "cut inside a line"
    assert notice.startswith("**Cut here**: ")
    assert "`report.json` has everything" in notice


@pytest.mark.parametrize("limit", [300, 333, 360])
def test_a_cut_closes_what_it_opened_and_never_splits_a_character(limit: int) -> None:
    text = "first\n<details><summary>more</summary>\n" + "äöü €\n" * 100 + "\n</details>\n"
    cut = fit(text, "all.json", limit)
    assert len(cut.encode()) <= limit
    assert cut.count("<details>") == cut.count("</details>") == 1
    left = len(text.encode()) - len(cut.partition("\n\n</details>")[0].encode()) - 1
    assert f"{left} of {len(text.encode())} bytes" in cut
    assert fit(text, "all.json") == text


def test_texts_of_others_cannot_break_a_table(accepted: Report) -> None:
    sly = accepted.model_copy(update={"data": {"name": "a | b\n<script>"}})
    assert "a \\| b &lt;script>" in render_report(sly)


def test_texts_of_others_start_no_heading_no_tag_and_no_image(accepted: Report) -> None:
    odd = "st`and\n\n# <img src=x> </details> ![x](http://example.com/x.png) @everyone"
    named = accepted.model_copy(
        update={
            "recipe": accepted.recipe.model_copy(update={"name": odd}),
            "policy": accepted.policy.model_copy(update={"policy": odd, "description": odd}),
            "reasons": [Reason(code="x", text=odd, gate="ne")],
            "data": {"name": odd},
        }
    )
    text = render_report(named)
    assert not any(line.startswith("# ") for line in text.splitlines())
    outside = re.sub(r"`[^`\n]*`", "", text)  # within a code span nothing is a tag or an image
    for part in ("<img", "</details> !", "![x]("):
        assert part not in outside


def test_the_terminal_shows_verdict_reasons_and_aligned_gates(rejected: Report) -> None:
    lines = terminal_text(rejected).splitlines()
    assert lines[0] == "REJECT: r1"
    header = next(line for line in lines if line.startswith("  gate"))
    ne = next(line for line in lines if line.startswith("  ne click"))
    assert header.index("status") == ne.index("FAIL")


def test_the_largest_gradient_norms_of_both_arms_are_told(rejected: Report) -> None:
    def with_norms(*norms: float | None) -> Report:
        seeds = list(rejected.measurements.seeds)
        for i, norm in enumerate(norms):
            run = seeds[i].candidate
            stability = run.stability.model_copy(update={"max_gradient_norm": norm})
            seeds[i] = seeds[i].model_copy(update={"candidate": run.model_copy(update={"stability": stability})})
        measured = rejected.measurements.model_copy(update={"seeds": tuple(seeds)})
        return rejected.model_copy(update={"measurements": measured})

    line = "largest gradient norm of any step: 1.000 baseline, 12.50 candidate"
    for text in (terminal_text(with_norms(0.5, 12.5, None)), render_report(with_norms(12.5))):
        assert line in text
    assert "gradient norm" not in terminal_text(with_norms(*[None] * 8))


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


def test_gates_of_slices_have_names_of_their_own(accepted: Report) -> None:
    gates = tuple(g.model_copy(update={"slice": s}) for g in accepted.gates if g.task for s in (None, "new users"))
    sliced = accepted.model_copy(update={"gates": gates})
    names = [case.name for suite in JUnitXml.fromstring(junit_report(sliced).encode()) for case in suite]
    assert names == ["ne[click]", "ne[click/new users]", "auc[click]", "auc[click/new users]"]
    assert "| ne click new users | pass |" in render_report(sliced)


def test_each_gate_of_a_slice_tells_its_own_reason(rejected: Report) -> None:
    gate = next(g for g in rejected.gates if g.name == "ne")
    parts = ("new", "old", None)
    told = [Reason(code="ne_loss", text=f"worse on {part}", gate="ne", task=gate.task, slice=part) for part in parts]
    gates = tuple(gate.model_copy(update={"status": "fail", "slice": part}) for part in parts)
    sliced = rejected.model_copy(update={"gates": gates, "reasons": tuple(told)})
    found = [case for suite in JUnitXml.fromstring(junit_report(sliced).encode()) for case in suite]
    assert [case.result[0].message for case in found] == [f"worse on {part}" for part in parts]


def test_junit_of_an_insane_baseline_shows_no_clean_sheet(measurements, arm, make_report) -> None:
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
    text = render_summary([Outcome("r1", "r1", accepted), Outcome("other", "r1", rejected)])
    assert "| `r1` | gem-tiny, synthetic | ACCEPT | none | All 5 gates pass. |" in text
    assert "| `other` | gem-tiny, synthetic | REJECT | step_time (undecided), ne click (FAIL) |" in text
    assert "(and 1 more)" in text


#: A real run's report (two of its layers, every sixth point of its curves) by the version before minor versions.
OLD = Path(__file__).with_name("reports") / "minor-0.json"


def test_a_report_of_an_older_minor_version_is_read_and_gains_what_is_new(tmp_path: Path) -> None:
    data = json.loads(OLD.read_text())
    assert "schema_minor" not in data
    jsonschema.validate(data, report_schema())
    report = load_report(OLD)
    assert report.verdict == data["verdict"]
    write_together(tmp_path, report.files())
    again = json.loads((tmp_path / "report.json").read_text())
    assert again["schema_minor"] == SCHEMA_MINOR
    assert again["gates"] == [
        {**gate, **{k: None for k in again["gates"][0] if k not in gate}} for gate in data["gates"]
    ]
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_intervals_of_a_report_from_before_runs_were_compared_stay_those_of_its_quartets(
    accepted: Report, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    data = json.loads(accepted.files()["report.json"])
    assert data["policy"]["speed"].pop("run_to_run") == {"sd": 0.01, "df": 3}
    path.write_text(json.dumps(data | {"schema_minor": 6}))
    old = load_report(path)
    assert old.policy.speed.run_to_run.sd == 0
    before = next(gate for gate in decide(old.measurements, old.policy).gates if gate.name == "step_time")
    # Decided under a policy of today, gates and evidence hold what runs differ by, and the report is one of today.
    again = decided(old, decide(old.measurements, accepted.policy), accepted.policy)
    after = next(gate for gate in again.gates if gate.name == "step_time")
    shown = again.evidence.step.results["device_events"]
    assert (after.ci_low, after.ci_high) == (shown["ci_low"], shown["ci_high"])
    assert after.ci_low < before.ci_low < before.ci_high < after.ci_high
    assert again.schema_minor == SCHEMA_MINOR


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 0}, "schema_version: found 0, this version of narrowgate reads 1; measure again"),
        (
            {"schema_version": 2, "environment": {"narrowgate": "3.1"}},
            "schema_version: found 2, this version of narrowgate reads 1; read it with narrowgate 3.1 or later",
        ),
        ({"schema_version": 2, "environment": None}, "reads 1; read it with a later narrowgate"),
        (
            {"schema_minor": SCHEMA_MINOR + 1, "environment": {"narrowgate": "0.9"}, "new_field": 1},
            f"schema_minor: found {SCHEMA_MINOR + 1}, this version of narrowgate reads up to {SCHEMA_MINOR} of"
            " schema_version 1; read it with narrowgate 0.9 or later",
        ),
        ({"schema_minor": "1"}, "schema_minor: found '1'"),
        ({"schema_version": None}, "found no schema_version"),
    ],
)
def test_other_versions_are_refused_with_one_clear_line(
    tmp_path: Path, accepted: Report, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**json.loads(accepted.files()["report.json"]), **changes}))
    with pytest.raises(NarrowgateError) as refused:
        load_report(path)
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("looks", [[8, 5], [8, 8], [5]])
def test_looks_that_no_run_can_have_had_are_refused_in_one_line(
    tmp_path: Path, accepted: Report, looks: list[int]
) -> None:
    data = json.loads(accepted.files()["report.json"])
    data["measurements"]["looks"] = looks
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(NarrowgateError, match="looks") as refused:
        load_report(tmp_path / "report.json")
    assert len(str(refused.value).splitlines()) == 1


def test_a_report_of_no_task_is_refused_and_never_accepted(tmp_path: Path, accepted: Report) -> None:
    data = json.loads(accepted.files()["report.json"])
    data["measurements"]["tasks"] = []
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(NarrowgateError, match="tasks") as refused:
        load_report(tmp_path / "report.json")
    assert len(str(refused.value).splitlines()) == 1


def test_half_a_character_of_a_task_loses_no_report() -> None:
    assert fit("a\udcff", "report.md") == "a\udcff"
    assert fit("a\udcff\n" * 400, "report.md", 600).startswith("a?\n")


def test_brackets_past_all_bounds_are_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"a":' * 200_000)
    with pytest.raises(NarrowgateError, match=r"report\.json.*: not"):
        load_report(tmp_path / "report.json")


def test_what_is_no_report_of_one_gate_is_told_what_it_is(tmp_path: Path, accepted: Report) -> None:
    data = json.loads(accepted.files()["report.json"])
    del data["verdict"]
    summary = {
        "schema_version": 1,
        "recipes": [{"report": "a/report.json"}, {"report": None}, {"report": "b/report.json"}],
    }
    for name, content, message in (
        ("report.json", data, "verdict: the field is missing"),
        (
            "summary.json",
            summary,
            "found a summary of several gates, expected the report of one: a/report.json, b/report.json",
        ),
    ):
        path = tmp_path / name
        path.write_text(json.dumps(content))
        with pytest.raises(NarrowgateError) as refused:
            load_report(path)
        assert str(refused.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("statistics", "accept_alpha"), 0, "should be greater than 0"),
        (("statistics", "alpha"), 2, "should be less than 0.5"),
        (("measurements", "step_time", "quartets", 0, "baseline_ms", 0), 0.0, "should be greater than 0"),
        (("statistics", "family"), 0, "should be greater than or equal to 1"),
    ],
)
def test_a_report_of_impossible_numbers_is_refused_with_its_place(
    tmp_path: Path, accepted: Report, place: tuple[str | int, ...], value: float, message: str
) -> None:
    data = json.loads(accepted.files()["report.json"])
    at: Any = data
    for part in place[:-1]:
        at = at[part]
    at[place[-1]] = value
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    with pytest.raises(NarrowgateError) as refused:
        load_report(path)
    assert f"report.json: {'.'.join(map(str, place))}: Input {message}" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_committed_reports_are_read_validate_and_decide_as_they_did(stored: Path) -> None:
    data = json.loads(stored.read_text())
    jsonschema.validate(data, report_schema())
    report = load_report(stored)
    level, family = report.statistics.accept_alpha, report.statistics.family
    again = decided(
        report, decide(report.measurements, report.policy, accept_alpha=level, family=family), report.policy
    )
    assert again.verdict == data["verdict"]
    assert [gate.status for gate in again.gates] == [gate["status"] for gate in data["gates"]]


class Killed(BaseException):
    """Stands for a kill: nothing may rely on catching it."""


@pytest.mark.parametrize("survives", range(len(FILES) + 1))
def test_a_kill_between_files_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: int) -> None:
    write_together(tmp_path, dict.fromkeys(FILES, "old"))
    replace, count = Path.replace, iter(range(10))

    def dying(self: Path, target: Path) -> Path:
        if next(count) == survives:
            raise Killed
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", dying)
    if survives < len(FILES):
        with pytest.raises(Killed):
            write_together(tmp_path, dict.fromkeys(FILES, "new"))
    else:
        write_together(tmp_path, dict.fromkeys(FILES, "new"))
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(left) <= set(FILES)
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


def test_a_reason_that_names_control_characters_is_one_line_on_a_terminal(rejected: Report) -> None:
    named = rejected.model_copy(
        update={"reasons": [rejected.reasons[0].model_copy(update={"text": "layer a\nb\x1b[31m lost"})]}
    )
    assert "  - layer a\\nb\\x1b[31m lost" in terminal_text(named).splitlines()
    odd = named.model_copy(update={"recipe": named.recipe.model_copy(update={"name": "r1\n\x1b[32mACCEPT"})})
    assert terminal_text(odd).splitlines()[0] == "REJECT: r1\\n\\x1b[32mACCEPT"
    assert "\x1b" not in comparison_text(compare(odd, odd), "a", "b")


def test_junit_stays_xml_whatever_a_name_or_a_message_holds(rejected: Report) -> None:
    odd = "a\x1b[31m\x00b\n" + os.fsdecode(b"\xff")
    (error,) = next(iter(next(iter(JUnitXml.fromstring(junit_failed_run("r1", odd).encode()))))).result
    assert error.message == r"a\x1b[31m\x00b\n?"
    gates = [gate.model_copy(update={"task": odd if gate.task else None}) for gate in rejected.gates]
    reasons = [reason.model_copy(update={"text": odd}) for reason in rejected.reasons]
    suites = JUnitXml.fromstring(
        junit_report(rejected.model_copy(update={"gates": gates, "reasons": reasons})).encode()
    )
    assert r"ne[a\x1b[31m\x00b\n?]" in {case.name for suite in suites for case in suite}


def test_a_name_that_is_no_utf8_does_not_keep_files_from_being_written(tmp_path: Path) -> None:
    name = os.fsdecode(b"r\xff.yaml")
    write_together(tmp_path, {"a": f'["{name}"]'})
    assert json.loads((tmp_path / "a").read_text(encoding="utf-8")) == ["r?.yaml"]


def test_a_full_disk_is_said_before_the_work(tmp_path: Path) -> None:
    """A file may still be made on a full disk: a limit on the size of files is met in the same way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        (tmp_path / "empty").touch()
        with pytest.raises(NarrowgateError, match="cannot write reports there: File too large"):
            check_writable(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
