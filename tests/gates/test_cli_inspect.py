"""The command ``inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_every_tensor_of_every_step_is_shown(room: Path, narrowgate) -> None:
    arguments = ("inspect", "all-fp8.yaml", "--task", "ranker:good", "--steps", "3", "--device", "cpu")
    code, out, err = narrowgate(*arguments, "--json")
    found = json.loads(out)
    assert code == 0
    assert "training 3 steps under all-fp8 on cpu, uncompiled" in err
    assert (found["recipe"], found["steps"]) == ("all-fp8", 3)
    assert {operand["layer"] for operand in found["operands"]} == {"body", "head"}
    assert {operand["path"] for operand in found["operands"]} == {"fprop", "dgrad", "wgrad"}
    for operand in found["operands"]:
        assert operand["steps"] == 3
        assert operand["amax"] > 0
        assert operand["saturated"] == 0  # dynamic scales cover their own tensor
        assert 10 < operand["sqnr_db"] < 60
    code, out, _ = narrowgate(*arguments, "-q")
    assert code == 0
    lines = out.splitlines()
    assert lines[1].split() == [
        "layer", "path", "operand", "format", "amax", "saturated", "underflowed", "clipped", "SQNR",
    ]  # fmt: skip
    assert len(lines) == 3 + len(found["operands"])


def test_a_format_without_range_shows_where_it_underflows(room: Path, narrowgate) -> None:
    text = (room / "all-fp8.yaml").read_text().replace("grad: fp8_e5m2", "grad: fp4_e2m1")
    (room / "narrow.yaml").write_text(
        text.replace("weight: fp8_e4m3", "weight: fp4_e2m1").replace("input: fp8_e4m3", "input: fp4_e2m1")
    )
    _, out, _ = narrowgate("inspect", "narrow.yaml", "--task", "ranker:good", "--steps", "2", "--json", "-q")
    operands = {(o["layer"], o["path"], o["operand"]): o for o in json.loads(out)["operands"]}
    narrow, wide = operands["head", "wgrad", "input"], operands["head", "fprop", "input"]
    assert (narrow["format"], wide["format"]) == ("fp4_e2m1/tensor", "fp8_e4m3/tensor")
    assert narrow["worst_underflowed"] > 0.05 > wide["worst_underflowed"]
    assert narrow["sqnr_db"] < wide["sqnr_db"] - 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bf16", "--task", "ranker:good", "--steps", "1"], "recipe 'bf16' quantizes nothing in this model"),
        (["gem-fp9"], "did you mean 'gem-fp8'"),
        (["bf16", "--task", "ranker:good", "--model", "gem-tiny"], "leave out --model and --data"),
        (["bf16", "--device", "gpu"], "--device: found 'gpu'"),
        (["bf16", "--steps", "0"], "--steps"),
    ],
)
def test_bad_input_is_one_line_and_code_2(room: Path, narrowgate, arguments: list[str], message: str) -> None:
    code, out, err = narrowgate("inspect", *arguments, "-q")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
