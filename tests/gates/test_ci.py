"""The CI files: the action with its script, run against stand-ins for gh and narrowgate, and the examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from narrowgate.gates.gates_file import load_gates
from narrowgate.recipes.document import parse_document

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "github_gate"
EXAMPLES = ROOT / "docs" / "ci"

#: Stands for gh: keeps what it was asked, and answers from files of its folder.
GH = """\
#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$GH_FOLDER/asked"
[ ! -e "$GH_FOLDER/fails" ] || exit 1
case "$*" in
  *pulls/7/files*) cat "$GH_FOLDER/files" ;;
  *issues/7/comments*--jq*) cat "$GH_FOLDER/comments" ;;
  *) for last; do :; done; cp "${last#body=@}" "$GH_FOLDER/body" ;;
esac
"""

#: Stands for the interpreter: keeps its arguments, then acts as the test says.
PYTHON = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" >"$GH_FOLDER/arguments"
source "$GH_FOLDER/act"
"""


class Runner:
    """A runner's folders and variables; runs the script's steps."""

    def __init__(self, room: Path) -> None:
        self.room, self.folder = room, room / "stand-ins"
        for name, text in (("gh", GH), ("python", PYTHON)):
            path = self.folder / "bin" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        (room / "temp").mkdir()
        self.answer(files="", comments="", act="")

    def answer(self, **texts: str) -> None:
        for name, text in texts.items():
            (self.folder / name).write_text(text)

    def step(self, name: str, **variables: str) -> subprocess.CompletedProcess[str]:
        for file in ("output", "summary"):
            (self.room / file).write_text("")
        environment = {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "GH_FOLDER": str(self.folder),
            "RUNNER_TEMP": str(self.room / "temp"),
            "GITHUB_OUTPUT": str(self.room / "output"),
            "GITHUB_STEP_SUMMARY": str(self.room / "summary"),
            "GITHUB_REPOSITORY": "owner/rankers",
            "GITHUB_SERVER_URL": "https://github.example",
            "GITHUB_RUN_ID": "42",
            "GITHUB_ACTION_PATH": str(ROOT),
        }
        command = [str(SCRIPT), name]
        return subprocess.run(
            command, cwd=self.room, env=environment | variables, capture_output=True, text=True, timeout=60, check=False
        )

    def find(self, **variables: str) -> subprocess.CompletedProcess[str]:
        unset = {"NARROWGATE_RECIPES": "", "NARROWGATE_CONFIG": "", "NARROWGATE_PATHS": "*.yaml"}
        return self.step("find", **(unset | variables))

    def gate(self, **variables: str) -> subprocess.CompletedProcess[str]:
        names = ("RECIPES", "CONFIG", "MODEL", "DATA", "TASK", "POLICY", "SEEDS", "STEPS")
        unset = {f"NARROWGATE_{name}": "" for name in names}
        fixed = {"NARROWGATE_DEVICE": "auto", "NARROWGATE_OUT": "out", "NARROWGATE_PYTHON": "python"}
        return self.step("gate", **(unset | fixed | variables))

    def comment(self) -> subprocess.CompletedProcess[str]:
        return self.step("comment", NARROWGATE_KEY="gate", PULL_REQUEST="7")

    @property
    def outputs(self) -> dict[str, str]:
        found, lines = {}, iter((self.room / "output").read_text().splitlines())
        for line in lines:
            name, _, end = line.partition("<<")
            if end:
                found[name] = "\n".join(iter(lambda end=end: next(lines), end))
            else:
                name, _, found[name.partition("=")[0]] = line.partition("=")
        return found

    @property
    def summary(self) -> str:
        return (self.room / "summary").read_text()


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def yaml_of(path: Path) -> Any:
    root, faults = parse_document(path.read_text(), str(path))
    assert faults == []
    return root.plain()


def test_the_action_passes_every_input_on_through_the_environment() -> None:
    action = yaml_of(ROOT / "action.yml")
    steps = action["runs"]["steps"]
    used = set(re.findall(r"inputs\.([a-z-]+)", (ROOT / "action.yml").read_text()))
    assert used == set(action["inputs"])
    for entry in action["inputs"].values():
        assert entry["description"]
        assert "default" in entry
    read = set(re.findall(r"\$\{?#?(NARROWGATE_[A-Z]+|PULL_REQUEST)", SCRIPT.read_text()))
    read |= {f"NARROWGATE_{name.upper()}" for name in ("model", "data", "task", "policy", "seeds", "steps")}
    given: set[str] = set()
    for step in steps:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "an expression in a script is read as code"
        given |= step["env"].keys() - {"GH_TOKEN"}
    assert given == read


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("github-actions", ROOT / "action.yml"),
        ("github-workflows", EXAMPLES / "github.yml"),
        ("gitlab-ci", EXAMPLES / "gitlab.yml"),
    ],
)
def test_ci_files_fit_the_schemas_of_their_systems(schema: str, file: Path) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_examples_say_what_the_action_and_the_command_take() -> None:
    workflow, action = yaml_of(EXAMPLES / "github.yml"), yaml_of(ROOT / "action.yml")
    (step,) = [step for step in workflow["jobs"]["gate"]["steps"] if step.get("uses") == "./"]
    assert step["with"].keys() <= action["inputs"].keys()
    (line,) = [line for line in yaml_of(EXAMPLES / "gitlab.yml")["gate"]["script"] if "gate --config" in line]
    assert line.startswith("narrowgate gate --config gates.yaml --out ")
    assert len(load_gates(EXAMPLES / "gates.yaml", "cpu")) == 2


def test_recipes_that_a_pull_request_changes_are_found_among_its_files(runner: Runner) -> None:
    for name, text in (
        ("recipes/a.yaml", "recipe: a\n"),
        ("recipes/with space.yaml", "# a comment\nrecipe: b\n"),
        ("recipes/not-one.yaml", "policy: strict\n# a recipe: none\n"),
        ("recipes/gates.yaml", "gates:\n  - name: a\n    recipe: x.yaml\n  - recipe: y.yaml\n"),
        ("recipes/quoted.yaml", '"recipe": d\n'),
        ("recipes/flow.yaml", "{recipe: e, rules: []}\n"),
        ("recipes/marked.yaml", "\ufeffrecipe: f\n"),
        ("other/c.yaml", "recipe: c\n"),
    ):
        (runner.room / name).parent.mkdir(exist_ok=True)
        (runner.room / name).write_text(text)
    other = ["recipes/quoted.yaml", "recipes/flow.yaml", "recipes/marked.yaml"]
    listed = ["recipes/a.yaml", "recipes/with space.yaml", "recipes/not-one.yaml", "other/c.yaml", "recipes/gone.yaml"]
    runner.answer(files="\n".join([*listed, "recipes/gates.yaml", *other, "README.md", ""]))
    assert runner.find(PULL_REQUEST="7", NARROWGATE_PATHS="recipes/*.yaml").returncode == 0
    found = ["recipes/a.yaml", "recipes/with space.yaml", *other]
    assert runner.outputs == {"found": "true", "recipes": "\n".join(f"./{name}" for name in found)}


def test_a_pull_request_without_recipes_has_nothing_to_gate(runner: Runner) -> None:
    runner.answer(files="README.md\n")
    assert runner.find(PULL_REQUEST="7").returncode == 0
    assert runner.outputs == {"found": "false", "recipes": ""}
    assert "nothing to gate" in runner.summary


def test_recipes_or_a_config_that_are_given_need_no_pull_request(runner: Runner) -> None:
    assert runner.find(NARROWGATE_RECIPES=" gem-fp8\n mine.yaml ").returncode == 0
    assert runner.outputs == {"found": "true", "recipes": "gem-fp8\nmine.yaml"}
    assert runner.find(NARROWGATE_CONFIG="gates.yaml").returncode == 0
    assert runner.outputs == {"found": "true", "recipes": ""}
    assert not (runner.folder / "asked").exists()
    both = runner.find(NARROWGATE_RECIPES="gem-fp8", NARROWGATE_CONFIG="gates.yaml")
    assert both.returncode == 1
    assert "::error::the inputs 'config' and 'recipes' were both given" in both.stdout
    done = runner.find()
    assert done.returncode == 1
    assert "::error::nothing to gate" in done.stdout


def test_files_that_cannot_be_listed_fail_the_job_instead_of_passing_it(runner: Runner) -> None:
    runner.answer(fails="")
    done = runner.find(PULL_REQUEST="7")
    assert done.returncode == 1
    assert "::error::" in done.stdout


def test_the_gate_gets_its_options_and_its_result_becomes_the_summary(runner: Runner) -> None:
    runner.answer(act="mkdir -p out; echo '## REJECT' >out/report.md; echo seen; echo progress >&2; exit 1")
    done = runner.gate(
        NARROWGATE_RECIPES="gem-fp8\n./with space.yaml", NARROWGATE_POLICY="strict", NARROWGATE_SEEDS="5"
    )
    assert done.returncode == 0, "the comment comes before the verdict"
    assert "seen" in done.stdout
    assert done.stderr == "progress\n"
    assert (runner.folder / "arguments").read_text().splitlines() == [
        "-m", "narrowgate.gates", "gate", "--out", "out", "--device", "auto", "--policy", "strict", "--seeds", "5",
        "gem-fp8", "./with space.yaml",
    ]  # fmt: skip
    assert runner.outputs == {"exit-code": "1"}
    assert runner.summary == "## REJECT\n"


def test_the_summary_over_several_recipes_goes_before_a_single_report(runner: Runner) -> None:
    runner.answer(act="mkdir -p out; echo all >out/summary.md; echo one >out/report.md")
    assert runner.gate(NARROWGATE_CONFIG="gates.yaml").returncode == 0
    assert runner.outputs == {"exit-code": "0"}
    assert runner.summary == "all\n"
    assert "--config" in (runner.folder / "arguments").read_text()


def test_a_run_without_a_result_shows_what_it_said_and_never_an_older_one(runner: Runner) -> None:
    (runner.room / "out").mkdir()
    (runner.room / "out" / "report.md").write_text("## ACCEPT of last week\n")
    os.utime(runner.room / "out" / "report.md", (1, 1))
    runner.answer(act="echo 'narrowgate: gates.yaml:3:5: no' >&2; exit 2")
    assert runner.gate(NARROWGATE_CONFIG="gates.yaml").returncode == 0
    assert runner.outputs == {"exit-code": "2"}
    assert "ACCEPT" not in runner.summary
    assert "exit code 2" in runner.summary
    assert "    narrowgate: gates.yaml:3:5: no" in runner.summary


def test_the_gate_of_the_script_is_the_real_command(runner: Runner) -> None:
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)
    runner.answer(act=f'PYTHONPATH="{path}" "{sys.executable}" "$@"')
    runner.gate(NARROWGATE_RECIPES="gem-fp9", NARROWGATE_MODEL="gem-tiny", NARROWGATE_DATA="synthetic",
                NARROWGATE_POLICY="strict", NARROWGATE_SEEDS="5", NARROWGATE_STEPS="3")  # fmt: skip
    assert runner.outputs == {"exit-code": "2"}
    assert "did you mean 'gem-fp8'" in runner.summary


@pytest.fixture
def result(runner: Runner) -> Callable[[str], None]:
    def write(text: str) -> None:
        (runner.room / "temp" / "narrowgate-result.md").write_text(text)

    return write


def test_the_first_run_comments_and_the_next_one_updates_it(runner: Runner, result) -> None:
    result("## ACCEPT\n")
    assert "Commented" in runner.comment().stdout
    body = (runner.folder / "body").read_text()
    assert body.startswith("<!-- narrowgate: gate -->\n## ACCEPT\n")
    assert "https://github.example/owner/rankers/actions/runs/42" in body
    listed, posted = (runner.folder / "asked").read_text().splitlines()
    assert 'startswith("<!-- narrowgate: gate -->")' in listed
    assert "--method POST repos/owner/rankers/issues/7/comments" in posted
    runner.answer(comments="1234\n5678\n", asked="")
    runner.comment()
    assert "--method PATCH repos/owner/rankers/issues/comments/1234" in (runner.folder / "asked").read_text()


def test_a_token_that_may_not_comment_is_a_warning(runner: Runner, result) -> None:
    result("## REJECT\n")
    runner.answer(fails="")
    done = runner.comment()
    assert done.returncode == 0
    assert "::warning::the comment could not be written" in done.stdout


def test_a_comment_that_is_too_long_is_cut_after_a_line_and_says_so(runner: Runner, result) -> None:
    result("## REJECT\n<details><summary>x</summary>\n" + "| é | row |\n" * 9000 + "</details>\n")
    runner.comment()
    body = (runner.folder / "body").read_text()
    assert 59_000 < len(body.encode()) < 65_536
    assert body.count("<details>") == body.count("</details>") == 1
    before, _, notice = body.partition("\n\n</details>")
    assert before.endswith("| é | row |")
    assert "**Cut here**" in notice


@pytest.mark.parametrize(
    ("code", "inconclusive", "status", "said"),
    [
        ("0", "pass", 0, "Accepted."),
        ("1", "pass", 1, "::error::a recipe was rejected"),
        ("2", "pass", 2, "::error::bad input"),
        ("3", "pass", 0, "::warning::inconclusive"),
        ("3", "fail", 3, "::error::inconclusive"),
        ("4", "pass", 4, "::error::the run failed"),
    ],
)
def test_the_verdict_ends_the_job(runner: Runner, code: str, inconclusive: str, status: int, said: str) -> None:
    done = runner.step("verdict", NARROWGATE_EXIT=code, NARROWGATE_INCONCLUSIVE=inconclusive)
    assert done.returncode == status
    assert said in done.stdout


def test_the_action_installs_itself_unless_told_otherwise(runner: Runner) -> None:
    for wanted, expected in (("", str(ROOT)), ("narrowgate==0.1.0", "narrowgate==0.1.0")):
        assert runner.step("install", NARROWGATE_PYTHON="python", NARROWGATE_INSTALL=wanted).returncode == 0
        assert (runner.folder / "arguments").read_text().splitlines()[-1] == expected
    (runner.folder / "arguments").unlink()
    runner.step("install", NARROWGATE_PYTHON="python", NARROWGATE_INSTALL="none")
    assert not (runner.folder / "arguments").exists()
