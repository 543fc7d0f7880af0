from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

BAD_INPUT = [
    (["gate"], "expected a recipe"),
    (["gate", "absent.yaml"], "absent.yaml: no such file"),
    (["gate", "gem-fp9"], "did you mean 'gem-fp8'"),
    (["gate", "wrong.yaml"], "wrong.yaml:2:"),
    (["gate", "unknown-format.yaml"], "unknown-format.yaml:5:12: rules[0].fprop: unknown format"),
    (["gate", "no-layer.yaml", "--task", "ranker:good"], "'tower.**' matches none of the model's"),
    (["gate", "all-fp8.yaml", "--seeds", "0"], "--seeds"),
    (["gate", "all-fp8.yaml", "--seeds", "many"], "--seeds"),
    (["gate", "all-fp8.yaml", "--steps", "0"], "--steps"),
    (["gate", "all-fp8.yaml", "--nonsense"], "--nonsense"),
    (["gate", "all-fp8.yaml", "--model", "gem-huge"], "gem-huge"),
    (["gate", "all-fp8.yaml", "--data", "criteria"], "criteria"),
    (["gate", "all-fp8.yaml", "--data", "ml-100k:nowhere"], "nowhere"),
    (["gate", "all-fp8.yaml", "--data", "ml-100k:empty"], "empty"),
    (["gate", "all-fp8.yaml", "--policy", "strictest"], "did you mean 'strict'"),
    (["gate", "all-fp8.yaml", "--policy", "absent.yaml"], "absent.yaml: cannot read the policy"),
    (["gate", "all-fp8.yaml", "--device", "gpu"], "--device: found 'gpu', expected auto, cpu, cuda"),
    (["gate", "all-fp8.yaml", "--backend", "nativ"], "did you mean 'native'"),
    (["gate", "all-fp8.yaml", "--out", "a-file"], "a-file: cannot write reports there"),
    (["gate", "all-fp8.yaml", "all-fp8.yaml", "--task", "ranker:good"], "is given twice"),
    (["gate", "all-fp8.yaml", "--task", "ranker"], "expected package.module:factory"),
    (["gate", "all-fp8.yaml", "--task", "./ranker.py:good"], "; ranker.py is ranker:good"),
    (["gate", "all-fp8.yaml", "--task", "ranker.py:good"], "; ranker.py is ranker:good"),
    (["gate", "all-fp8.yaml", "--task", "a..b:good"], "expected package.module:factory"),
    (["gate", "all-fp8.yaml", "--task", "my-task:good"], "module 'my-task' was not found"),
    (["gate", "all-fp8.yaml", "--fresh", "--out", "x" * 300], "cannot write reports there: File name too long"),
    (["gate", "all-fp8.yaml", "--task", "towers/rank.py:good"], "; towers/rank.py is towers.rank:good"),
    (["gate", "all-fp8.yaml", "--task", "rankers:good"], "module 'rankers' was not found"),
    (["gate", "all-fp8.yaml", "--task", "needs_absent:good"], "needs 'absent_library', which was not found"),
    (["gate", "all-fp8.yaml", "--task", "syntax:good"], "importing syntax failed: SyntaxError"),
    (["gate", "all-fp8.yaml", "--task", "ranker:goood"], "has no 'goood'; did you mean 'good'"),
    (["gate", "all-fp8.yaml", "--task", "ranker:not_callable"], "is a int, expected a function or class"),
    (["gate", "all-fp8.yaml", "--task", "ranker:broken_factory"], "broken_factory() raised KeyError"),
    (["gate", "all-fp8.yaml", "--task", "ranker:NoPredict"], "lacks predict()"),
    (["gate", "all-fp8.yaml", "--task", "ranker:good", "--model", "gem-tiny"], "leave out --model and --data"),
    (["gate", "all-fp8.yaml", "--from", "report.json"], "takes no recipes"),
    (["gate", "--from", "absent.json"], "absent.json: cannot read the report"),
    (["gate", "--from", "broken.json"], "broken.json:1:2: not JSON"),
    (["gate", "--from", "older.json"], "schema_version: found 0, this version of narrowgate reads 1"),
    (["gate", "--from", "other.json"], "found no schema_version"),
    (["gate", "--from", "partial.json"], "partial.json: verdict: the field is missing"),
    (["plan", "absent"], "absent"),
    (["plan", "bf16", "--device", "h300"], "unknown device 'h300'"),
    (["plan", "bf16", "--model", "gem-huge"], "gem-huge"),
    (["show", "gem-fp9"], "unknown built-in recipe"),
    (["validate", "wrong.yaml"], "wrong.yaml:2:"),
    (["validate", "all-fp8.yaml", "--require-native", "cpu"], "cpu has no low-precision matrix units"),
    (["validate", "all-fp8.yaml", "--require-native", "h300"], "unknown device 'h300'"),
    (["validate", "all-fp8.yaml", "--output-format", "xml"], "found 'xml', expected text, github, json"),
    (["gate", "all-fp8.yaml", "--collective-timeout", "inf"], "--collective-timeout"),
    (["gate", "all-fp8.yaml", "--replicas", "2"], "gate --replicas divides the ranks of a job: start it with torchrun"),
    (["search", "--minutes", "inf"], "--minutes"),
    (["search", "--minutes", "nan"], "--minutes"),
    (["nonsense"], "nonsense"),
]  # fmt: skip


@pytest.fixture
def inputs(room: Path) -> Path:
    text = (room / "all-fp8.yaml").read_text()
    (room / "wrong.yaml").write_text("recipe: wrong\nruls: []\n")
    (room / "unknown-format.yaml").write_text(text.replace("fprop: fp8_e4m3", "fprop: fp9").replace("description", "#"))
    (room / "no-layer.yaml").write_text(text.replace('"**"', '"tower.**"'))
    (room / "empty").mkdir()
    (room / "a-file").write_text("")
    (room / "needs_absent.py").write_text("import absent_library\n")
    (room / "syntax.py").write_text("def (:\n")
    (room / "broken.json").write_text("{")
    (room / "older.json").write_text('{"schema_version": 0}')
    (room / "other.json").write_text("[1]")
    (room / "partial.json").write_text('{"schema_version": 1}')
    return room


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[" ".join(a) for a, _ in BAD_INPUT])
def test_bad_input_is_one_clear_line_and_code_2(inputs: Path, narrowgate, arguments: list[str], message: str) -> None:
    code, out, err = narrowgate(*arguments)
    errors = [line for line in err.splitlines() if not line.startswith("opening ")]
    assert code == 2, err
    assert out == ""
    assert message in err
    if "validate" not in arguments:
        assert len(errors) == 1, err
    assert "Traceback" not in err
    assert not (inputs / "reports" / "report.json").exists()


def test_a_corrupt_line_of_data_is_named(room: Path, narrowgate) -> None:
    (room / "ml").mkdir()
    (room / "ml" / "u.data").write_text("1\t2\t3\t4\n1\tx\t3\t5\n")
    (room / "ml" / "u.user").write_text("1|24|M|technician|85711\n")
    (room / "ml" / "u.item").write_text("1|Film (1995)|01-Jan-1995||" + "|0" * 19 + "\n")
    code, _, err = narrowgate("gate", "bf16", "--data", "ml-100k:ml", "-q")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "u.data:2" in err


def test_the_folder_is_checked_before_anything_is_trained(room: Path, narrowgate) -> None:
    (room / "a-file").write_text("")
    started = time.monotonic()
    code, _, _ = narrowgate("gate", "all-fp8.yaml", "--task", "ranker:slow", "--out", "a-file/deep")
    assert code == 2
    assert time.monotonic() - started < 20  # training would take minutes


def test_the_version_is_told_and_nothing_asked_is_answered_with_help(narrowgate) -> None:
    from importlib.metadata import version

    assert narrowgate("--version") == (0, version("narrowgate") + "\n", "")
    code, out, _ = narrowgate()
    assert code == 0
    assert out.startswith("Usage: narrowgate")


def test_show_prints_a_text_that_validates(room: Path, narrowgate) -> None:
    code, out, _ = narrowgate("show", "gem-fp8")
    assert code == 0
    (room / "mine.yaml").write_text(out)
    code, out, err = narrowgate("validate", "mine.yaml")
    assert (code, err) == (0, "")
    assert out == "mine.yaml: valid\n"


def test_recipes_lists_every_built_in_with_one_line(narrowgate) -> None:
    _, text, _ = narrowgate("recipes")
    code, data, _ = narrowgate("recipes", "--json")
    assert code == 0
    names = [entry["name"] for entry in json.loads(data)]
    assert {"gem-fp8", "fp4-naive", "bf16"} <= set(names)
    assert [line.split()[0] for line in text.splitlines()] == names


def test_validate_annotates_for_github_and_answers_json(inputs: Path, narrowgate) -> None:
    code, out, _ = narrowgate("validate", "wrong.yaml", "--output-format", "github")
    assert code == 2
    assert out.startswith("::error file=wrong.yaml,line=2,")
    code, out, _ = narrowgate("validate", "wrong.yaml", "--json")
    assert code == 2
    assert json.loads(out)["valid"] is False


def test_plan_tells_devices_apart(room: Path, narrowgate) -> None:
    plans = {}
    for device in ("cpu", "h200"):
        code, out, _ = narrowgate("plan", "all-fp8.yaml", "--task", "ranker:good", "--device", device, "--json")
        assert code == 0
        plans[device] = json.loads(out)
    assert plans["h200"]["native"]
    assert not plans["cpu"]["native"]
    code, out, _ = narrowgate("plan", "all-fp8.yaml", "--task", "ranker:good")
    assert code == 0
    assert "body" in out


def test_doctor_says_what_is_native_and_why_not(narrowgate) -> None:
    code, out, _ = narrowgate("doctor", "--json")
    facts = json.loads(out)
    assert code == 0
    assert {entry["status"] for entry in facts["formats"]} <= {"native", "emulated"}
    assert all(entry["reason"] for entry in facts["formats"] if entry["status"] == "emulated")
    assert facts["environment"]["torch"]
    assert {entry["name"] for entry in facts["backends"]} == {"native", "torchao", "transformer_engine"}
    code, text, _ = narrowgate("doctor")
    assert code == 0
    assert "formats on" in text


@pytest.mark.parametrize(
    "command",
    [[], ["gate"], ["plan"], ["inspect"], ["recipes"], ["show"], ["validate"], ["doctor"], ["bench"], ["search"]],
)
def test_help_answers_without_loading_what_the_work_needs(command: list[str]) -> None:
    code = f"""
import sys
from narrowgate.gates.cli import main
try:
    main({[*command, "--help"]!r})
except SystemExit as stopped:
    assert stopped.code == 0, stopped.code
# typer itself brings in pydantic to read a command's options.
heavy = {{"torch", "numpy", "scipy", "rich", "ruamel.yaml", "jinja2", "sklearn"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: narrowgate" in done.stdout
    if command:
        assert "Example: narrowgate" in done.stdout


@pytest.mark.parametrize("command", [[], ["gate"], ["search"]])
def test_help_costs_no_more_than_twenty_starts_of_the_interpreter(command: list[str]) -> None:
    """About 0.3 s where Python starts in 15 ms. As a ratio of processor times, because a slow machine or one that
    other tests keep busy is no fault of the command."""

    def processor_seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Interleaved, and the quickest of each: what disturbs one disturbs the other.
    helped, bare = [], []
    for _ in range(8):
        helped.append(processor_seconds("-m", "narrowgate.gates", *command, "--help"))
        bare.append(processor_seconds("-c", "pass"))
    assert min(helped) < 20 * min(bare)


def test_an_unexpected_error_is_one_line_with_a_hint(narrowgate, monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgate.gates import cli_recipes

    def explode(as_json: bool) -> None:
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr(cli_recipes, "recipes_command", explode)
    code, _, err = narrowgate("recipes")
    assert code == 4
    at = f"(in explode() at test_cli.py:{explode.__code__.co_firstlineno + 1})"
    assert err == f"narrowgate: the run failed: ZeroDivisionError: oh no {at} (--debug shows the traceback)\n"


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["accept"], 0),
        (["accept", "inconclusive"], 3),
        (["inconclusive", "reject", "accept"], 1),
        (["reject"], 1),
    ],
)
def test_the_worst_recipe_sets_the_exit_code(verdicts: list[str], code: int) -> None:
    from narrowgate.gates.exits import exit_code

    assert exit_code(verdicts) == code


def test_names_that_the_terminal_cannot_show_cost_no_verdict(room: Path) -> None:
    (room / "größe.yaml").write_text((room / "all-fp8.yaml").read_text())
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "narrowgate.gates", "validate", "größe.yaml"]
    ran = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"gr\\xf6\\xdfe.yaml: valid\n", b"")


@pytest.mark.parametrize("with_errors", [False, True])
@pytest.mark.parametrize(("command", "code"), [(["recipes"], 4), (["gate", "absent.yaml"], 2)])
def test_output_that_nobody_reads_is_no_reject_and_blames_no_task(
    room: Path, command: list[str], code: int, with_errors: bool
) -> None:
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-m", "narrowgate.gates", *command],
        stdout=write,
        stderr=write if with_errors else subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert ran.returncode == code
    assert b"ended the process" not in (ran.stderr or b"")
