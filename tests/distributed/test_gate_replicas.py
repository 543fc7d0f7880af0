"""The gate on replicas of shards (HSDP), four ranks over Gloo."""

from __future__ import annotations

import pytest
import torch
from narrowgate.gates.report import load_report
from torch import nn

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")


def test_a_gate_of_replicas_counts_what_travels_within_and_between_them(
    tmp_path, gate_ranks, forks, monkeypatch
) -> None:
    """Two replicas of two shards; the plan beside them is of the same layout, from shapes alone."""
    ranks = gate_ranks.Ranks(tmp_path, forks)
    arguments = ("gather.yaml", "--task", "ranked:good", "--seeds", "2", "--steps", "8", "--replicas", "2")
    try:
        ranks.start(*arguments, count=4)
        ended = ranks.end()
    finally:
        ranks.kill()
    assert [code for code, _, _ in ended] == [3] * 4, ended[0][2]
    report = load_report(tmp_path / "reports" / "report.json")
    run, results = report.measurements.distributed, report.evidence.distributed.results
    assert (run.ranks, run.replicas, results["replicas"]) == (4, 2, 2)
    bf16, recipe = gate_ranks.planned(tmp_path, "gather", monkeypatch, replicas=2)
    assert (run.baseline.wire.counted_bytes(), run.candidate.wire.counted_bytes()) == (bf16, recipe)
    assert bf16["all_reduce"] == bf16["reduce_scatter"] // 2
    assert recipe["all_gather"] < bf16["all_gather"]
    assert not [reason for reason in report.reasons if reason.code == "wire_ignored"]
    # Nothing stands in for an all-reduce.
    assert results["candidate"]["local_ms"] is results["baseline"]["exposed_ms"] is None
    assert "2 replicas of 2 shards" in (tmp_path / "reports" / "report.md").read_text()
    # The norm of the mean gradient of 4 batches in one process, which BF16 on the way moves a little.
    monkeypatch.syspath_prepend(str(tmp_path))
    task = __import__("ranked").good()
    torch.manual_seed(0)
    model = task.build_model()
    optimizer, batches, norms = task.optimizer(model), task.train_batches(0), []
    for step in range(8):
        optimizer.zero_grad()
        for batch in batches[4 * step : 4 * step + 4]:
            (task.loss(model, batch) / 4).backward()
        norms.append(float(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)))
        optimizer.step()
    assert report.measurements.seeds[0].baseline.stability.max_gradient_norm == pytest.approx(max(norms), rel=0.02)
