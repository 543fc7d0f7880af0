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
        (("--task", "ranker:make", "--model", "gem-tiny"), "plan: --task brings its own model; leave out --model"),
        (("--rows", "5", "--trace"), "found --rows and --trace, expected one of them"),
        (("--rows", "5", "--data", "synthetic"), "found --rows and --data, which traces a batch, expected one of them"),
        (("--rows", "5", "--rates", "none.json"), "none.json: No such file or directory; expected a file of measured"),
    ],
)
def test_contradicting_options_are_one_line(capsys: Any, arguments: tuple[str, ...], message: str) -> None:
    assert run("plan", "bf16", "--device", "h200", *arguments) == 2
    assert message in capsys.readouterr().err


GATHERED = """\
recipe: gathered
rules:
- {layers: "layers.**", where: in_features >= 32 and out_features >= 32, all: fp8_e4m3}
shards: {all_gather: fp8_e4m3}
"""


@pytest.fixture
def gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("gathered.yaml").write_text(GATHERED)
    Path("links.yaml").write_text("topology: mine\nmeasured: true\ndomain: {gpus: 4, gb_per_s: 300, latency_us: 3}\n")
    return tmp_path


def test_a_plan_of_the_wire_says_what_travels_and_by_which_links(gathered: Path, capsys: Any) -> None:
    assert run("plan", "gathered.yaml", "--shards", "--device", "h200", "--rows", "512") == 0
    text = capsys.readouterr().out
    assert "units layers.0, heads.0, heads.1, the root (4)" in text
    assert "links of 'example-h200-roce' (example figures, not measured)" in text
    rows = [line.split("  ")[0] for line in text.splitlines() if line.startswith(("fsdp", "hsdp"))]
    assert list(dict.fromkeys(rows)) == ["fsdp 8", "fsdp 64", "hsdp 8 x 8", "fsdp 4096", "hsdp 512 x 8"]
    assert "Bounds, no measurement: compute is the predicted time of the linear layers alone" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_it_reads_links_and_answers_json(gathered: Path, capsys: Any) -> None:
    links = ("--shards", "links.yaml", "--gpus", "4", "--gpus", "2", "--shard-group", "2", "--json")
    assert run("plan", "gathered.yaml", *links, "--unit", "layers.*", "--ignore", "sparse.**", "--joint-amaxes") == 0
    found = json.loads(capsys.readouterr().out)
    wire = found["wire"]
    assert found["gathered"]
    assert (wire["topology"]["topology"], wire["topology"]["measured"]) == ("mine", True)
    assert [entry["layout"] for entry in wire["layouts"]] == ["fsdp 4", "hsdp 2 x 2", "fsdp 2"]
    for entry in wire["layouts"]:
        assert entry["units"] == ["layers.0", ""]
        kinds = {traffic["what"]: traffic for traffic in entry["recipe"]["traffic"]}
        assert kinds["all-reduce of amaxes"]["calls"] == 1
        assert kinds["all-reduce of amaxes"]["given_bytes"] == 4 * len(found["gathered"])
        assert set(kinds["all-gather, backward"]["given"]) == {"bf16", "fp8_e4m3"}
        assert entry["recipe"]["sent_bytes"] < entry["plain"]["sent_bytes"]
        assert entry["recipe"]["compute_us"] is entry["recipe"]["hidden_us"] is None


def test_without_shards_the_recipe_s_wire_is_the_plain_one(gathered: Path, capsys: Any) -> None:
    assert run("plan", "gem-fp8", "--shards", "links.yaml", "--gpus", "4", "--keep-gathered") == 0
    text = capsys.readouterr().out
    assert "gathers no layer in low precision (shards.all_gather: bf16)" in text
    assert "all-gather, backward" not in text
    assert "No bounds of a step: no compute to hide it behind: no measured rates for cpu" in text
    assert {line.split()[-3] for line in text.splitlines() if line.startswith("fsdp 4  all")} == {"1.00"}


def test_gradients_that_travel_as_codes_stand_beside_those_that_do_not(gathered: Path, capsys: Any) -> None:
    Path("reduced.yaml").write_text(GATHERED.replace("{all_gather: ", "{reduce_scatter: fp8_e5m2, all_gather: "))
    assert run("plan", "reduced.yaml", "--shards", "links.yaml", "--gpus", "4") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fsdp 4")]
    # Sent as BF16 and as the recipe says, where no ratio stands behind: each kind belongs to one of the two.
    sent = {what: line.split()[-4:-2] for what in ("reduce-scatter", "all-to-all") for line in lines if what in line}
    assert sent["reduce-scatter"][1] == "-" != sent["reduce-scatter"][0]
    assert sent["all-to-all"][0] == "-" != sent["all-to-all"][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "8"), "found --gpus without --shards, expected both or neither"),
        (("--shards", "--casts"), "found --casts and --shards, which plans the wire instead, expected one of them"),
        (
            ("--shards", "--shard-group", "16", "--gpus", "8"),
            "--shard-group: found 16, expected at most 8, the GPUs planned for",
        ),
        (("links.yaml",), "found LINKS 'links.yaml' without --shards, expected both or neither"),
        (("--shards", "absent.yaml"), "absent.yaml: No such file or directory; expected a file of links between GPUs"),
        (("--shards", "gathered.yaml"), "gathered.yaml:1:1: recipe: unknown field"),
        (("--shards", "--gpus", "12"), "found 12 GPUs in shard groups of 8, expected a size that divides them"),
        (("--shards", "links.yaml"), "found a group of 8 GPUs and no zone, expected one beyond domain.gpus, 4"),
        (("--shards", "--gpus", "8", "--shard-group", "3"), "found 8 GPUs in shard groups of 3, expected a size that"),
        (("--shards", "--unit", "layer.*"), "units: found 'layer.*', which matches no module of the model"),
        (("--shards", "--param-dtype", "fp8"), "param_dtype: found 'fp8', expected fp32, bf16, fp16"),
    ],
)
def test_what_the_wire_cannot_be_planned_for_is_one_line(
    gathered: Path, capsys: Any, arguments: tuple[str, ...], message: str
) -> None:
    assert run("plan", "gathered.yaml", *arguments) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
    assert "Traceback" not in told.err


@pytest.mark.parametrize("name", ["recipe", "policy", "gates", "report", "search", "rates", "topology"])
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


def test_casts_of_another_backend_are_not_planned(capsys: Any) -> None:
    assert run("plan", "fp8-tensor", "--model", "gem-tiny", "--device", "h200", "--casts", "--backend", "torchao") == 2
    assert "backend torchao casts on its own, expected native to plan casts" in capsys.readouterr().err
