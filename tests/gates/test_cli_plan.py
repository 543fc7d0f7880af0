"""Commands about recipes: priced plans, schemas, completion; and profitable recipes in the gate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from narrowgate.gates.cli import main
from narrowgate.recipes import Recipe

PROFITABLE = "recipe: p\nrules:\n- {layers: '**', all: fp8_e4m3, when: profitable}\n"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(list(arguments))
    assert isinstance(exit.value.code, int)
    return exit.value.code


def test_a_plan_is_priced_at_given_rows(capsys: Any) -> None:
    assert run("plan", "fp8-tensor", "--model", "gem-tiny", "--device", "h200", "--rows", "4096", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["no_prices"] is None
    assert set(plan["rows"].values()) == {4096}
    assert 0 < plan["totals"]["bf16_us"] < plan["totals"]["us"]
    losing = [w for w in plan["warnings"] if "predicted to lose time" in w["message"]]
    lowered = [p for p in plan["layers"] if any(path["fprop"]["input"] != "bf16" for path in [p["paths"]])]
    assert len(losing) == len(lowered) > 0


def test_a_plan_is_priced_by_a_traced_batch(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(PROFITABLE)
    assert run("plan", str(file), "--model", "gem-tiny", "--device", "h200", "--trace") == 0
    text = capsys.readouterr().out
    assert "0 of " in text
    assert " us slower at M=512\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "5", "--trace"), "found --rows and --trace, expected one of them"),
        (("--rows", "5", "--data", "synthetic"), "found --rows and --data, which traces a batch, expected one of them"),
        (("--rows", "5", "--rates", "none.json"), "none.json: No such file or directory; expected a file of measured"),
    ],
)
def test_contradicting_options_are_one_line(capsys: Any, arguments: tuple[str, ...], message: str) -> None:
    assert run("plan", "bf16", "--device", "h200", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["recipe", "policy", "gates", "report", "rates"])
def test_schemas_are_printed(capsys: Any, name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert run("schema", name) == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(capsys.readouterr().out))


def test_an_unknown_schema_or_command_is_met_with_the_nearest(capsys: Any) -> None:
    assert run("schema", "recpie") == 2
    assert "did you mean 'recipe'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("narrowgate plan fp8-b", "fp8-block"),
        ("narrowgate plan bf16 --model gem-t", "gem-tiny"),
        ("narrowgate sch", "schema"),
    ],
)
def test_the_shell_completes_commands_and_names(words: str, expected: str) -> None:
    variables = {"_NARROWGATE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "from narrowgate.gates.cli import main; main([])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **variables}, check=False
    )
    assert done.stdout.split() == [expected]


def test_the_gate_decides_profitable_layers_alike_in_every_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from narrowgate.gates.rows import rows_for
    from narrowgate.gates.train import Arm
    from narrowgate.models import GemTask
    from narrowgate.recipes import RecipeError, profit
    from narrowgate.recipes.rates import shipped_rates

    recipe = Recipe.from_yaml(PROFITABLE)
    task = GemTask.open(model="gem-tiny", data="synthetic")
    arm = Arm(task, torch.device("cpu"), recipe, steps=1)
    with pytest.raises(RecipeError, match="profitable needs measured rates, and cpu has none"):
        arm.start(0)
    monkeypatch.setattr(profit, "device_rates", lambda device: shipped_rates()["NVIDIA H200"])
    plans = []
    for seed in (0, 1):
        bare = Arm(task, torch.device("cpu"), steps=1)
        arm = Arm(task, torch.device("cpu"), recipe, steps=1)
        assert arm.start(seed) == bare.start(seed)
        plans.append(arm._plan)
    assert plans[0].rows == plans[1].rows
    assert plans[0].rows["heads.0.out"] == 512
    assert [layer.kept for layer in plans[0].layers] == [layer.kept for layer in plans[1].layers]
    assert rows_for(Recipe(name="r"), task, task.build_model()) is None
