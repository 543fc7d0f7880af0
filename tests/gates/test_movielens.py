"""The main job on real data: a sound recipe gets an interval, a known bad one is rejected."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from narrowgate.gates.cli import main


@pytest.fixture
def source() -> str:
    root = Path(__file__).parents[2]
    folders = [root / "data", root.parent / "shared" / "data"]
    if "NARROWGATE_DATA" in os.environ:
        folders.insert(0, Path(os.environ["NARROWGATE_DATA"]))
    for folder in folders:
        if (folder / "ml-100k").is_dir():
            return f"ml-100k:{folder / 'ml-100k'}"
    pytest.skip("MovieLens-100K is not here: scripts/get_data ml-100k brings it")


def gate(tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as ended:
        main(["gate", *arguments, "--device", "cpu", "--seeds", "5", "--out", str(tmp_path), "--quiet"])
    return int(ended.value.code or 0), json.loads((tmp_path / "report.json").read_text())


@pytest.mark.timeout(900)
def test_a_sound_recipe_gets_a_paired_interval_and_no_speed_without_a_gpu(source: str, tmp_path: Path) -> None:
    code, report = gate(tmp_path, "gem-fp8", "--data", source, "--steps", "20")
    assert code == 3
    assert report["verdict"] == "inconclusive"
    changes = [g for g in report["gates"] if g["name"] == "ne"]
    assert [g["task"] for g in changes] == ["rating>=4", "rating==5"]
    for change in changes:
        assert change["ci_low"] < change["measured"] < change["ci_high"]
        assert abs(change["measured"]) < 0.01
    speed = next(g for g in report["gates"] if g["name"] == "step_time")
    assert speed["status"] == "undecided"
    assert any("no GPU" in reason["text"] for reason in report["reasons"])


@pytest.mark.timeout(900)
def test_fp4_rounded_to_nearest_everywhere_is_rejected_on_quality(source: str, tmp_path: Path) -> None:
    code, report = gate(tmp_path, "fp4-naive", "--data", source, "--steps", "40")
    assert code == 1
    assert report["verdict"] == "reject"
    failed = {g["name"] for g in report["gates"] if g["status"] == "fail"}
    assert "ne" in failed
