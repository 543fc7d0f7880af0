from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from narrowgate.gates import gate_set, run
from narrowgate.gates.gates_file import gates_schema, load_gates
from narrowgate.gates.outputs import Outcome, forget_summary, summary_of, write_outcome, write_report, write_summary
from narrowgate.gates.progress import Progress
from narrowgate.gates.render import render_summary
from narrowgate.gates.report import FILES, Report
from narrowgate.gates.run import Run
from narrowgate.gates.train import RunError
from narrowgate.precision.errors import NarrowgateError
from narrowgate.recipes.document import parse_document

jsonschema = pytest.importorskip("jsonschema")

GATES = """\
defaults: {model: gem-small, data: "ml-100k:data/ml"}
gates:
  - recipe: all-fp8.yaml
    policy: strict
    seeds: 5
  - recipe: gem-fp8
    name: tiny
    model: gem-tiny
    data: synthetic
    steps: 3
    backend: torchao
  - recipe: bf16
    task: ranker:good
"""


@pytest.fixture
def write(room: Path) -> Callable[[str], Path]:
    """Write ``ci/gates.yaml`` beside a recipe of the same folder and return its path."""
    (room / "ci").mkdir()
    (room / "ci" / "all-fp8.yaml").write_text((room / "all-fp8.yaml").read_text())

    def written(text: str) -> Path:
        path = Path("ci") / "gates.yaml"
        path.write_text(text)
        return path

    return written


def test_gates_are_read_with_their_defaults_and_paths_from_the_files_folder(write) -> None:
    first, second, third = load_gates(write(GATES), "cpu")
    assert (first.name, first.recipe.name, first.policy.policy, first.seeds) == ("all-fp8", "all-fp8", "strict", 5)
    assert (first.source.model, first.source.data) == ("gem-small", "ml-100k:ci/data/ml")
    assert (second.name, second.recipe.name, second.policy.policy) == ("tiny", "gem-fp8", "standard")
    assert (second.source.model, second.source.data, second.source.steps) == ("gem-tiny", "synthetic", 3)
    assert second.backend == "torchao"
    assert third.source.task == "ranker:good", "a gate's own task stands for the defaults' model and data"
    assert third.place == "ci/gates.yaml:12:5: gates[2]"


def test_the_schema_knows_what_the_parser_takes(write) -> None:
    schema = gates_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(parse_document(GATES, "x")[0].plain(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"gates": []}, schema)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("# none yet\n", ["ci/gates.yaml: found an empty file, expected a list of gates"]),
        ("gates: []\n---\ngates: []\n", ["ci/gates.yaml:2:1: found a second document, expected one list of gates a"]),
        ("- bf16\n", ["ci/gates.yaml:1:1: found a list ['bf16'], expected a mapping of fields"]),
        ("gates: [\n", ["ci/gates.yaml:2:1: not YAML"]),
        ("gates: []\n", ["ci/gates.yaml:1:1: gates: found an empty list, expected at least one gate"]),
        ("gates: [{recipe: bf16}]\ngates: []\n", ["ci/gates.yaml:2:1: found key 'gates' twice, first on line 1"]),
        ("gates:\n  - recipee: bf16\n", [
            "ci/gates.yaml:2:5: gates[0].recipe: the field is missing",
            "ci/gates.yaml:2:5: gates[0].recipee: unknown field; did you mean 'recipe'? (known: model",
        ]),
        ("gate: []\n", ["ci/gates.yaml:1:1: gate: unknown field; did you mean 'gates'? (known: defaults, gates)"]),
        ("defaults: {recipe: bf16}\ngates: [{recipe: bf16}]\n", ["ci/gates.yaml:1:12: defaults.recipe: unknown field"]),
        ("gates:\n  - {recipe: bf16, seeds: 0}\n", ["ci/gates.yaml:2:20: gates[0].seeds: found 0, expected greater"]),
        ("gates:\n  - {recipe: bf16, seeds: many}\n", ["gates[0].seeds: found 'many', expected a valid integer"]),
        ("gates:\n  - {recipe: bf16, backend: nativ}\n", ["gates[0].backend: found 'nativ', expected 'native'"]),
        ("gates:\n  - {recipe: bf16, name: ../up}\n", ["gates[0].name: found '../up', expected letters, digits"]),
        ("gates:\n  - {recipe: gem-fp9}\n", ["ci/gates.yaml:2:14: gates[0].recipe: ", "did you mean 'gem-fp8'"]),
        ("gates:\n  - {recipe: none.yaml}\n", ["ci/gates.yaml:2:14: gates[0].recipe: ci/none.yaml: no such file"]),
        ("defaults: {policy: stricter}\ngates: [{recipe: bf16}]\n", [
            "ci/gates.yaml:1:20: defaults.policy: unknown policy 'stricter'; did you mean 'strict'?"
        ]),
        ("gates:\n  - {recipe: bf16, policy: my.yaml}\n", ["gates[0].policy: ci/my.yaml: cannot read the policy"]),
        ("gates:\n  - {recipe: bad.yaml}\n", ["ci/bad.yaml:2:1: ruls: "]),
        ("gates:\n  - {recipe: bf16, task: a:b, model: gem-tiny}\n", [
            "ci/gates.yaml:2:26: gates[0].task: brings its own model and data; leave out model"
        ]),
        ("gates:\n  - recipe: bf16\n  - recipe: BF16.yaml\n", [
            "ci/gates.yaml:3:5: gates[1]: found the name 'BF16' twice, first in gates[0]; give one of them a `name`"
        ]),
        ("gates: {recipe: bf16}\n", ["ci/gates.yaml:1:1: gates: found a mapping", "expected a list of gates"]),
        ("gates:\n  - {recipe: bf16, seeds: true}\n", ["gates[0].seeds: found true, expected a number"]),
        ("gates:\n  - {recipe: bf16, name: Report.json}\n", [
            "ci/gates.yaml:2:26: gates[0].name: found 'Report.json', which a run writes beside its gates' folders"
        ]),
        ("gates:\n  - {recipe: bf16, seedz: 3}\n  - {recipe: gem-fp9, policy: bad.yaml}\n", [
            "gates[0].seedz: unknown field", "gates[1].recipe: gem-fp9: neither a built-in", "ci/bad.yaml:2:1: ruls: ",
        ]),
        ("gates:\n  - recipe: gem-fp9\n    policy: strictt\n  - recipe: gem-fp7\n", [
            "ci/gates.yaml:2:13: gates[0].recipe", "ci/gates.yaml:3:13: gates[0].policy",
            "ci/gates.yaml:4:13: gates[1].recipe",
        ]),
    ],
)  # fmt: skip
def test_faults_name_file_line_column_and_field(write, narrowgate, text: str, messages: list[str]) -> None:
    path = write(text)
    Path("ci/bad.yaml").write_text("recipe: bad\nruls: []\n")
    Path("ci/BF16.yaml").write_text("recipe: BF16\nrules: []\n")
    code, out, err = narrowgate("gate", "--config", str(path))
    assert (code, out) == (2, "")
    for message in messages:
        assert message in err, err
    assert "Traceback" not in err
    assert "validation" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["bf16"],
        ["--model", "gem-tiny"],
        ["--policy", "strict"],
        ["--seeds", "3"],
        ["--from", "report.json"],
    ],
)
def test_what_the_file_says_is_not_said_again_on_the_command_line(write, narrowgate, arguments: list[str]) -> None:
    code, _, err = narrowgate("gate", "--config", str(write(GATES)), *arguments)
    assert code == 2
    assert f"takes no {arguments[0] if arguments[0].startswith('--') else 'recipes'}" in err.replace(
        "--config", arguments[0]
    )
    assert len(err.splitlines()) == 1


def test_a_task_that_does_not_open_is_found_before_any_training(write, narrowgate, monkeypatch) -> None:
    monkeypatch.setattr(gate_set, "run_gate", lambda *_: pytest.fail("nothing may run"))
    text = "gates:\n  - {recipe: bf16, task: 'ranker:good'}\n  - {recipe: gem-fp8, task: 'ranker:goood'}\n"
    code, _, err = narrowgate("gate", "--config", str(write(text)))
    assert code == 2
    assert "ci/gates.yaml:3:5: gates[1]: --task ranker:goood: ranker has no 'goood'; did you mean 'good'" in err


def test_a_file_of_gates_runs_from_end_to_end(write, room: Path, narrowgate) -> None:
    text = """\
defaults: {task: "ranker:good", steps: 3, seeds: 1}
gates:
  - recipe: all-fp8.yaml
  - {recipe: bf16, name: control}
  - {recipe: bf16, name: broken, task: "ranker:raising"}
"""
    out = room / "out"
    out.mkdir()
    for name in ("summary.json", "report.json"):
        (out / name).write_text("of last week")
    code, printed, err = narrowgate("gate", "--config", str(write(text)), "--out", "out", "-q")
    assert code == 4, "a failed run counts most"
    failed = r"seed 0: RuntimeError: matrix on fire \(in fault\(\) at ranker\.py:\d+\)"
    assert re.fullmatch(f"narrowgate: broken: the run failed: {failed}\n", err)
    assert "FAILED: broken" in printed
    assert not (out / "report.json").exists()
    for name in ("all-fp8", "control"):
        assert sorted(path.name for path in (out / name).iterdir()) == sorted(FILES)
        assert json.loads((out / name / "report.json").read_text())["statistics"]["family"] == 2
    assert [path.name for path in (out / "broken").iterdir()] == ["junit.xml"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["exit_code"] == 4
    assert [(entry["name"], entry["recipe"], entry["verdict"]) for entry in summary["recipes"]] == [
        ("all-fp8", "all-fp8", "inconclusive"),
        ("control", "bf16", "inconclusive"),
        ("broken", "bf16", "failed"),
    ]
    text = (out / "summary.md").read_text()
    assert re.search(rf"\| `broken` \| - \| FAILED \| - \| {failed} \|", text)
    assert "<summary>control: INCONCLUSIVE" in text


@pytest.fixture
def fake_runs(monkeypatch: pytest.MonkeyPatch, measurements, make_report) -> list[Run]:
    """Let runs take no time: each recipe's report is an accept; recipes named ``fails`` crash their run."""
    runs: list[Run] = []

    def run_gate(asked: Run, _: Progress) -> list[Report]:
        runs.append(asked)
        if any(recipe.name == "fails" for recipe in asked.recipes):
            raise RunError("a worker died")
        if any(recipe.name == "misfit" for recipe in asked.recipes):
            raise NarrowgateError("rules[0].layers matches nothing")
        m = measurements([1e-5 * x for x in (-1, 1, -1, 1, -1, 1, -1, 1)])
        report = make_report(m, policy=asked.policy)
        return [
            report.model_copy(update={"recipe": report.recipe.model_copy(update={"name": recipe.name})})
            for recipe in asked.recipes
        ]

    monkeypatch.setattr(gate_set, "run_gate", run_gate)
    return runs


def outcomes_of(path: Path) -> list[Outcome]:
    done: list[Outcome] = []
    outcomes = gate_set.run_gates(load_gates(path, "cpu"), Progress(), done.append)
    assert {o.name for o in done} == {o.name for o in outcomes}
    return outcomes


def recipe_file(name: str) -> None:
    Path(f"ci/{name}.yaml").write_text(f"recipe: {name}\nrules: []\n")


def test_gates_that_share_everything_share_one_run_and_those_of_one_task_are_one_family(write, fake_runs) -> None:
    text = """\
defaults: {task: "ranker:good"}
gates:
  - recipe: bf16
  - {recipe: gem-fp8, policy: strict}
  - {recipe: bf16, name: apart, task: "ranker:slow"}
  - recipe: all-fp8.yaml
  - {recipe: bf16, name: again}
"""
    outcomes = outcomes_of(write(text))
    assert [[r.name for r in asked.recipes] for asked in fake_runs] == [
        ["bf16", "all-fp8"],
        ["bf16"],
        ["gem-fp8"],
        ["bf16"],
    ]
    assert [o.name for o in outcomes] == ["bf16", "gem-fp8", "apart", "all-fp8", "again"], "in the file's order"
    assert [o.report.statistics.family for o in outcomes] == [4, 4, 1, 4, 4]
    assert [o.report.policy.policy for o in outcomes] == ["standard", "strict", "standard", "standard", "standard"]
    family = [o.report.statistics for o in outcomes if o.name != "apart"]
    assert min(s.accept_alpha for s in family) == pytest.approx(0.05 / 4), "Holm: the smallest p value bears them all"
    assert max(s.accept_alpha for s in family) <= 0.05
    assert outcomes[2].report.statistics.accept_alpha == 0.05


def test_a_failed_run_keeps_no_other_from_running_and_still_counts_in_its_family(write, fake_runs) -> None:
    path = write("defaults: {task: 'ranker:good'}\ngates:\n  - recipe: fails.yaml\n    seeds: 5\n  - recipe: bf16\n")
    recipe_file("fails")
    failed, good = outcomes_of(path)
    assert (failed.verdict, failed.failure, failed.report) == ("failed", "a worker died", None)
    assert good.report.statistics.family == 2
    assert good.report.statistics.accept_alpha == pytest.approx(0.025)
    assert summary_of([failed, good])["exit_code"] == 4


def test_input_that_only_a_run_can_refuse_is_named_by_its_gate_and_earlier_reports_stay(
    write, room: Path, narrowgate, fake_runs
) -> None:
    text = "gates:\n  - {recipe: bf16, task: 'ranker:good'}\n  - {recipe: misfit.yaml, task: 'ranker:slow'}\n"
    path = write(text)
    recipe_file("misfit")
    code, _, err = narrowgate("gate", "--config", str(path), "-q")
    assert code == 2
    assert "ci/gates.yaml:3:5: gates[1]: rules[0].layers matches nothing" in err
    assert (room / "reports" / "bf16" / "report.json").exists()
    assert not (room / "reports" / "summary.json").exists()


def test_a_run_of_several_recipes_that_fails_leaves_no_old_summary(
    room: Path, narrowgate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RunError("a worker died")

    monkeypatch.setattr(run, "run_gate", fail)
    (room / "reports" / "bf16").mkdir(parents=True)
    for name in ("summary.json", "summary.md", "bf16/report.json", "bf16/report.html"):
        (room / "reports" / name).write_text("of last week")
    code, _, _ = narrowgate("gate", "all-fp8.yaml", "bf16", "--task", "ranker:good", "-q")
    assert code == 4
    summary = json.loads((room / "reports" / "summary.json").read_text())
    assert summary["exit_code"] == 4
    assert [entry["verdict"] for entry in summary["recipes"]] == ["failed", "failed"]
    assert [path.name for path in (room / "reports" / "bf16").iterdir()] == ["junit.xml"]
    assert JUnitXml.fromfile(str(room / "reports" / "all-fp8" / "junit.xml")).errors == 1


def test_one_report_and_a_summary_never_stand_in_one_folder(tmp_path: Path, accepted: Report) -> None:
    outcome = Outcome("r1", "r1", accepted)
    write_outcome(outcome, tmp_path)
    write_summary([outcome], tmp_path)
    write_report(accepted, tmp_path)
    assert not (tmp_path / "summary.json").exists()
    forget_summary(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["r1"]


def test_the_summary_has_every_gate_and_stays_within_a_step_summary(accepted: Report, rejected: Report) -> None:
    outcomes = [Outcome("one", "r1", accepted), Outcome("two", "r1", rejected), Outcome("three", "r1", None, "a | b")]
    text = render_summary(outcomes)
    assert text.startswith("## narrowgate: 3 recipes\n")
    assert "| `three` | - | FAILED | - | a \\| b |" in text
    assert text.count("<details>") == text.count("</details>") == 2
    assert "| ne click | FAIL | relative NE increase |" in text
    assert "Holm" not in text, "each was decided alone"
    many = [Outcome(f"n{i}", "r1", rejected) for i in range(1500)]
    assert 2**19 < len(render_summary(many).encode()) <= 2**20


@pytest.mark.parametrize(("verdicts", "code"), [(["accept", "failed"], 4), (["failed", "reject"], 4), (["accept"], 0)])
def test_a_failed_run_counts_most(verdicts: list[str], code: int, accepted: Report) -> None:
    outcomes: list[Any] = [
        Outcome(str(i), "r", None, "x")
        if v == "failed"
        else Outcome(str(i), "r", accepted.model_copy(update={"verdict": v}))
        for i, v in enumerate(verdicts)
    ]
    assert summary_of(outcomes)["exit_code"] == code
