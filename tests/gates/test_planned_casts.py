"""Casts are planned as the planned device trains, wherever the plan is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from narrowgate.gates.rows import trace_casts
from narrowgate.gates.task import load_task
from narrowgate.precision.capability import NAMED_DEVICES
from narrowgate.recipes import load_recipe, resolve


@pytest.mark.parametrize("meta", [False, True], ids=["in memory", "meta"])
def test_a_gpus_casts_are_traced_under_bf16_autocast(room: Path, monkeypatch: pytest.MonkeyPatch, meta: bool) -> None:
    task = load_task("ranker:good")
    with torch.device("meta" if meta else "cpu"):
        model = task.build_model()
    seen: list[bool] = []
    original = task.loss

    def loss(traced: Any, batch: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16)
        return original(traced, batch)

    monkeypatch.setattr(task, "loss", loss, raising=False)
    plan = resolve(load_recipe("all-fp8.yaml"), model, device=NAMED_DEVICES["h200"])
    casts = trace_casts(task, model, plan)
    assert seen == [True]
    assert {cast.layer for cast in casts} == {layer.name for layer in plan.lowered}
