"""The script behind docs/numerics_tables.md, on tensors small enough for a test."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

_SCRIPT = Path(__file__).parents[2] / "scripts" / "numerics_tables.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("numerics_tables", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recorded_tensors_come_back_by_name(script, tmp_path):
    path = tmp_path / "recorded.npz"
    np.savez(path, **{"tower.0": np.ones((3, 4), np.float32), "tower.1": np.zeros((5000, 2), np.float16)})
    tensors = script.recorded(path)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {"tower.0": (3, 4), "tower.1": (4096, 2)}
    np.savez(path, bad=np.ones(3))
    with pytest.raises(SystemExit, match=r"'bad' has shape \(3,\)"):
        script.recorded(path)


def test_several_tensors_show_their_median_and_the_worst(script):
    tensors = {"a": torch.randn(32, 64), "b": torch.randn(32, 64), "c": torch.randn(32, 64) ** 5}
    assert script.sqnr_cell({"a": tensors["a"]}, "fp8_e4m3").replace(".", "").isdigit()
    median, worst = script.sqnr_cell(tensors, "fp4_e2m1").rstrip(")").split(" (")
    assert float(worst) < float(median)


def test_gradients_show_what_nearest_loses_and_stochastic_keeps(script):
    g = torch.full((64, 256), 448 * 2.0**-12)  # an eighth of E4M3's smallest value under a scale of 448
    g[0, 0] = 448.0 * 448
    lines = [line.split("|") for line in script.gradient_section({"g": g}).splitlines() if line.startswith("| `g`")]
    lost, kept = [[cell.strip() for cell in line[2:-1]] for line in lines]
    assert lost[0] == "100 %"  # all but one of 16,384 elements
    assert 85 < float(lost[1].split()[0]) < 90  # stochastic rounds one in eight up
    assert lost[3] == "0 %"  # E5M2 reaches further down
    assert kept[1] == "0.00"
    assert 0.9 < float(kept[2]) < 1.1
