"""What runs of the same thing differ by: how it is computed, and that a policy's default is what was measured."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from narrowgate.gates.policy import RunToRun

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "run_to_run.py"
REPORTS = ROOT / "benchmarks" / "reports"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def bench(path: Path, ratio: float, width: float) -> Path:
    """A result of scripts/bench_gem; its one-sided 95 % bounds lie ``width`` standard errors' worth from the ratio."""
    row = {
        "variant": "gem-fp8",
        "ratio": ratio,
        "rounds": 21,
        "ci": [ratio * math.exp(-width), ratio * math.exp(width)],
    }
    versions = {"torch": "2.11.0"}
    path.write_text(json.dumps({"date": "2026-01-02", "machine": "M", "versions": versions, "rows": [row]}))
    return path


def test_the_default_is_what_was_measured_rounded_up() -> None:
    found = json.loads((ROOT / "benchmarks" / "run_to_run.json").read_text())
    default = RunToRun()
    assert found["df"] == default.df == sum(row["run"] > 1 for row in found["rows"])
    assert default.sd - 0.001 < found["sd"] <= default.sd


def test_variances_of_things_are_pooled_without_what_runs_say_of_themselves(monkeypatch, tmp_path: Path) -> None:
    a = [bench(tmp_path / f"a{i}.json", ratio, 0.0) for i, ratio in enumerate((1.0, 1.02, 1.04))]
    # Further apart by no more than they say of themselves: t on 20 degrees of freedom is 1.7247.
    error = abs(math.log(2.0 / 2.1)) / math.sqrt(2)
    b = [bench(tmp_path / f"b{i}.json", ratio, 1.7247 * error * 1.01) for i, ratio in enumerate((2.0, 2.1))]
    out = tmp_path / "out.json"
    run(
        monkeypatch, *(f"{name}={','.join(map(str, files))}" for name, files in (("a", a), ("b", b))), "--out", str(out)
    )
    found = json.loads(out.read_text())
    logs = [0.0, math.log(1.02), math.log(1.04)]
    mean = sum(logs) / 3
    assert found["df"] == 3
    assert found["sd"] == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in logs) / 3), rel=1e-6)
    assert found["rows"][3]["error"] == pytest.approx(error * 1.01, rel=1e-3)
    assert [row["sd"] for row in found["rows"][3:]] == [0, 0]


def test_reports_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = [REPORTS / f"gem-fp8_gem-small_ml-1m{end}" / "report.json" for end in ("", "_again")]
    run(monkeypatch, f"g={files[0]},{files[1]}", "--out", str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["machine"] == "NVIDIA H200"
    speedups = [json.loads(file.read_text())["evidence"]["module"]["results"]["total"]["speedup"] for file in files]
    assert [row["speedup"] for row in found["rows"]] == pytest.approx(speedups)
    assert found["sd"] == pytest.approx(abs(math.log(speedups[0] / speedups[1])) / math.sqrt(2), rel=0.01)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("a={one}", "a: found one run, expected two or more"),
        ("a={one},{none}", "none.json: cannot read it as JSON: "),
        ("a={one},{text}", "text.json: cannot read it as JSON: "),
        ("a={one},{other}", "other.json: found no row of gem-fp8 with a ratio"),
        ("a={one},{list}", "list.json: found no schema_version"),
        ("a={one},{elsewhere}", "found runs of ['M', 'N'], expected one machine"),
    ],
)
def test_what_is_no_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argument: str, message: str) -> None:
    files: dict[str, Any] = {name: tmp_path / f"{name}.json" for name in ("none", "text", "other", "list", "elsewhere")}
    files["one"] = bench(tmp_path / "one.json", 1.0, 0.01)
    files["text"].write_text("{")
    files["other"].write_text('{"rows": [{"variant": "bf16"}]}')
    files["list"].write_text("[]")
    files["elsewhere"].write_text(bench(files["elsewhere"], 1.0, 0.01).read_text().replace('"M"', '"N"'))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, argument.format(**files), "--out", str(tmp_path / "out.json"))
    assert message in str(ended.value)
    assert not (tmp_path / "out.json").exists()
