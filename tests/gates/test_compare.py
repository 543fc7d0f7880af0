from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from narrowgate.gates.compare import compare, differences
from narrowgate.gates.outputs import write_report
from narrowgate.gates.report import Report, load_report


def layer(name: str, **operands: str) -> dict[str, Any]:
    paths = {"fprop": {"input": "bf16", "weight": "bf16", "accumulate": "accurate", "native": True, **operands}}
    return {"name": name, "type": "Linear", "in_features": 8, "out_features": 8, "paths": paths}


@pytest.fixture
def pair(accepted: Report, rejected: Report) -> tuple[Report, Report]:
    """An accepted and a rejected report whose recipes, plans and environments differ."""

    def changed(report: Report, recipe: dict[str, Any], layers: list[dict[str, Any]], torch: str) -> Report:
        facts = report.recipe.model_copy(update={"plan": {"layers": layers}, **recipe})
        return report.model_copy(
            update={"recipe": facts, "environment": {"torch": torch, "gpu": None, "date": "2026-01-01" + torch}}
        )

    first = {"hash": "1" * 64, "resolved": {"recipe": "r1", "rules": [{"layers": "**", "fprop": "fp8_e4m3"}]}}
    second = {"hash": "2" * 64, "resolved": {"recipe": "r2", "rules": [{"layers": "**", "fprop": "fp8_e4m3/row"}]}}
    a = changed(accepted, first, [layer("a"), layer("b"), layer("c")], "2.11")
    low = {"input": "fp8_e4m3", "weight": "fp8_e4m3"}
    return a, changed(rejected, second, [layer("a", **low), layer("b", **low), layer("d")], "2.13")


def test_gates_stand_side_by_side_with_how_their_intervals_lie(pair) -> None:
    found = compare(*pair)
    assert found.verdicts == ("accept", "reject")
    gates = {gate.name: gate for gate in found.gates}
    assert list(gates) == ["step_time", "ne", "auc", "stability", "memory"]
    assert (gates["ne"].a.status, gates["ne"].b.status) == ("pass", "fail")
    assert gates["ne"].intervals == "apart"
    assert gates["auc"].intervals == "overlap"
    assert gates["stability"].intervals is None, "a count has no interval"
    assert gates["step_time"].intervals is None, "one of the runs had no GPU"


def test_a_gate_that_one_report_lacks_is_shown_all_the_same(accepted: Report) -> None:
    fewer = accepted.model_copy(update={"gates": accepted.gates[1:]})
    found = compare(fewer, accepted)
    assert len(found.gates) == len(accepted.gates)
    missing = next(gate for gate in found.gates if gate.name == "step_time")
    assert missing.a is None
    assert missing.b is accepted.gates[0]
    assert missing.intervals is None


def test_intervals_that_touch_overlap(accepted: Report) -> None:
    gate = accepted.gates[0]

    def with_bounds(low: float, high: float) -> Report:
        return accepted.model_copy(update={"gates": (gate.model_copy(update={"ci_low": low, "ci_high": high}),)})

    for (low, high), expected in (((1.2, 1.3), "overlap"), ((1.21, 1.3), "apart"), ((1.0, 1.05), "apart")):
        assert compare(with_bounds(1.1, 1.2), with_bounds(low, high)).gates[0].intervals == expected


def test_a_report_equals_itself(accepted: Report) -> None:
    found = compare(accepted, accepted)
    assert found.same_recipe
    assert found.recipe == found.plan == found.policy == found.task == found.environment == found.warnings == ()
    assert {gate.intervals for gate in found.gates} == {"overlap", None}


def test_recipes_plans_and_environments_are_told_apart(pair) -> None:
    found = compare(*pair)
    assert not found.same_recipe
    assert [(d.field, d.a, d.b) for d in found.recipe] == [("rules[0].fprop", "fp8_e4m3", "fp8_e4m3/row")]
    changes = {(c.operand, c.a, c.b): c.layers for c in found.plan}
    assert changes["fprop.input", "bf16", "fp8_e4m3"] == ("a", "b")
    assert changes["fprop.input", "bf16", None] == ("c",)
    assert changes["fprop.input", None, "bf16"] == ("d",)
    assert [(d.field, d.a, d.b) for d in found.environment] == [("torch", "2.11", "2.13")]


def test_other_tasks_and_machines_are_warned_about(accepted: Report) -> None:
    other = accepted.model_copy(
        update={"data": {"name": "ml-1m"}, "environment": {**accepted.environment, "gpu": "NVIDIA H200"}}
    )
    found = compare(accepted, other)
    assert found.warnings == (
        "The reports differ in data: their gates answer different questions.",
        "The reports come from different machines (gpu none and NVIDIA H200): compare speedups, not milliseconds.",
    )


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": 1}, {"x": 1}, []),
        ({"x": {"y": 1}}, {"x": {"y": 2}}, [("x.y", 1, 2)]),
        ({"x": 1}, {}, [("x", 1, None)]),
        ({"x": [1, 2]}, {"x": (1, 2)}, []),
        ({"x": [1, 2]}, {"x": [1]}, [("x", [1, 2], [1])]),
        ({"x": [{"y": 1}]}, {"x": [{"y": 1}, {"y": 2}]}, [("x[1]", None, {"y": 2})]),
        ({"x": None}, {"x": {"y": 1}}, [("x", None, {"y": 1})]),
    ],
)
def test_nested_differences_are_named_by_their_path(a: Any, b: Any, expected: list[tuple[str, Any, Any]]) -> None:
    assert [(d.field, d.a, d.b) for d in differences(a, b)] == expected


def test_the_command_prints_a_table_or_json(tmp_path: Path, narrowgate, pair) -> None:
    a, b = (tmp_path / name for name in ("a", "b"))
    write_report(pair[0], a)
    write_report(pair[1], b)
    files = [str(a / "report.json"), str(b / "report.json")]
    code, out, err = narrowgate("compare", *files)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("A  ACCEPT: r1")
    assert lines[1].startswith("B  REJECT: r1")
    header = next(line for line in lines if line.startswith("  gate"))
    row = next(line for line in lines if line.startswith("  ne click"))
    assert row.index("FAIL") == header.index("B")
    assert row.endswith("apart")
    assert ["fprop.input", "bf16", "fp8_e4m3", "a,", "b"] in [line.split() for line in lines]
    assert "rules[0].fprop" in out
    code, out, _ = narrowgate("compare", *files, "--json")
    data = json.loads(out)
    assert code == 0
    assert data["verdicts"] == ["accept", "reject"]
    assert data["gates"][1]["a"]["status"] == "pass"
    assert data["gates"][1]["b"]["ci_low"] > data["gates"][1]["b"]["threshold"]
    assert data["plan"][0]["layers"] == ["a", "b"]


def test_real_reports_compare(narrowgate) -> None:
    reports = sorted((Path(__file__).parents[2] / "benchmarks" / "reports").glob("*/report.json"))
    code, out, _ = narrowgate("compare", str(reports[0]), str(reports[1]))
    assert code == 0
    assert "their gates answer different questions" in out
    assert max(map(len, out.splitlines())) < 250


def test_two_whole_runs_of_one_gate_agree() -> None:
    """As benchmarks/reports/README.md says; no interval over one run's quartets alone would."""
    folder = Path(__file__).parents[2] / "benchmarks" / "reports"
    name = "gem-fp8_gem-small_ml-1m"
    found = compare(*(load_report(folder / run / "report.json") for run in (name, f"{name}_again")))
    assert found.verdicts == ("reject", "reject")
    assert found.same_recipe
    assert (found.policy, found.task, found.warnings) == ((), (), ())
    assert all(pair.a and pair.b and pair.a.status == pair.b.status for pair in found.gates)
    assert not [pair.name for pair in found.gates if pair.intervals == "apart"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "b.json: cannot read the report: No such file or directory"),
        ("{", "b.json:1:2: not JSON"),
        ('{"schema_version": 7}', "b.json: schema_version: found 7, this version of narrowgate reads 1"),
        ('{"schema_version": 1}', "b.json: verdict: the field is missing"),
    ],
)
def test_a_report_that_cannot_be_read_is_one_line_and_code_2(
    tmp_path: Path, narrowgate, accepted: Report, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(accepted.files()["report.json"])
    if text is not None:
        (tmp_path / "b.json").write_text(text)
    for files in (("a.json", "b.json"), ("b.json", "a.json")):
        code, out, err = narrowgate("compare", *files)
        assert (code, out) == (2, "")
        assert message in err
        assert len(err.splitlines()) == 1
