"""The gate on two ranks over Gloo: what is reported, of bytes on the wire, times and training itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from narrowgate.gates.report import Report, load_report, report_schema
from torch import nn

jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.fixture(scope="module")
def gated(
    tmp_path_factory: pytest.TempPathFactory, gate_ranks: ModuleType, forks: Any
) -> Iterator[tuple[Path, list[tuple[int, str, str]]]]:
    """A whole gate of two recipes: codes on the wire, and the same products with BF16 payload."""
    ranks = gate_ranks.Ranks(tmp_path_factory.mktemp("gate"), forks)
    ranks.start("codes.yaml", "plain.yaml", "--task", "ranked:good", "--seeds", "2", "--steps", "30")
    try:
        yield ranks.room, ranks.end()
    finally:
        ranks.kill()


def test_a_gate_on_two_ranks_ends_alike_and_speaks_once(gated) -> None:
    room, ((code, out, _), (other, silent, err)) = gated
    assert (code, other) == (3, 3)
    assert out.count("INCONCLUSIVE: codes") == out.count("INCONCLUSIVE: plain") == 1
    assert (silent, err) == ("", "")
    for name in ("codes", "plain"):
        assert {path.name for path in (room / "reports" / name).iterdir()} == {
            "report.json", "report.md", "report.html", "junit.xml"
        }  # fmt: skip


@pytest.fixture
def reports(gated) -> dict[str, Report]:
    return {name: load_report(gated[0] / "reports" / name / "report.json") for name in ("codes", "plain")}


@pytest.mark.parametrize("name", ["codes", "plain"])
def test_the_report_has_the_bytes_that_were_planned(gated, gate_ranks, reports, name, monkeypatch) -> None:
    results = reports[name].evidence.distributed.results
    counted = {
        arm: {collective: sum(found.values()) for collective, found in results[arm]["bytes"].items()}
        for arm in ("baseline", "candidate")
    }
    bf16, recipe = gate_ranks.planned(gated[0], name, monkeypatch)
    assert counted == {"baseline": bf16, "candidate": recipe}
    assert (recipe == bf16) == (name == "plain")
    assert set(results["baseline"]["bytes"]["all_gather"]) == {"bfloat16"}
    assert ("uint8" in results["candidate"]["bytes"]["all_gather"]) == (name == "codes")
    assert results["payload_ratio"]["all_gather"] == recipe["all_gather"] / bf16["all_gather"]


def test_times_on_a_cpu_are_there_and_judge_nothing(reports) -> None:
    report = reports["plain"]
    level = report.evidence.distributed
    assert level.status == "measured"
    assert level.results["times"].startswith("emulated over Gloo on a CPU, not judged")
    for arm in ("baseline", "candidate"):
        found = level.results[arm]
        assert found["exposed_ms"] == found["step_ms"] - found["local_ms"]
        assert found["scaling_ratio"] == found["alone_ms"] / found["step_ms"]
    # Nothing stands in for a reduction that the recipe does itself.
    assert reports["codes"].evidence.distributed.results["candidate"]["local_ms"] is None
    gates = {gate.name: gate for gate in report.gates}
    assert gates["step_time"].status == "undecided"
    assert gates["step_time"].measured is None
    assert report.environment["ranks"] == 2


def test_reports_of_ranks_show_the_wire_and_fit_the_schema(gated, reports) -> None:
    for name in ("codes", "plain"):
        folder = gated[0] / "reports" / name
        jsonschema.validate(json.loads((folder / "report.json").read_text()), report_schema())
        assert "| distributed | measured | the same step in BF16" in (folder / "report.md").read_text()
        assert "2 ranks over gloo" in (folder / "report.html").read_text()
    text = (gated[0] / "reports" / "codes" / "report.md").read_text()
    assert "| candidate | fp8_e4m3/tensor | fp8_e5m2/row+sr |" in text
    assert "FSDP2 on 2 ranks with BF16 payload" in text


def test_ranks_train_on_the_batches_of_one_step_and_predict_all_rows(gated, reports, monkeypatch) -> None:
    """Against one process that takes two batches a step, with weights and gradients rounded to BF16."""
    monkeypatch.syspath_prepend(str(gated[0]))
    task = __import__("ranked").good()
    torch.manual_seed(0)
    master = task.build_model()
    optimizer = task.optimizer(master)
    batches, losses = task.train_batches(0), []
    for step in range(30):
        both: list[list[Any]] = []
        total = 0.0
        for batch in batches[2 * step : 2 * step + 2]:
            worker = __import__("copy").deepcopy(master).to(torch.bfloat16)
            with torch.autocast("cpu", torch.bfloat16):
                loss = task.loss(worker, batch)
            loss.backward()
            both.append([p.grad for p in worker.parameters()])
            total += float(loss.detach()) / 2
        losses.append(total)
        for parameter, *gradients in zip(master.parameters(), *both, strict=True):
            parameter.grad = torch.stack(gradients).mean(0).float()
        optimizer.step()
    run = reports["plain"].measurements.seeds[0].baseline
    found = [loss for _, loss in run.losses.curve]
    assert found[0] == pytest.approx(losses[0], rel=1e-6)
    assert found == pytest.approx(losses, rel=2e-3)
    rows = reports["plain"].measurements.rows
    assert (rows.rows, rows.clusters) == (500, 125)  # five batches, dealt to two ranks
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        bits = [nn.functional.binary_cross_entropy_with_logits(master(x).float().squeeze(-1), y, reduction="sum")
                for x, y, _ in task.eval_batches()]  # fmt: skip
    assert run.quality["click"].log_loss == pytest.approx(float(sum(bits)) / 500, rel=5e-3)


def test_a_setting_that_something_ignored_is_named_and_nothing_is_concluded(start) -> None:
    ranks = start("gather.yaml", "--task", "ranked:ignoring", "--seeds", "1", "--steps", "4")
    (code, out, _), _ = ranks.end()
    assert code == 3
    report = load_report(ranks.room / "reports" / "report.json")
    (reason,) = (reason for reason in report.reasons if reason.code == "wire_ignored")
    assert "The recipe asks for shards.all_gather fp8_e4m3/tensor, and the wire does not show it" in reason.text
    assert "as much as BF16" in reason.text
    assert reason.text in out


def test_torchrun_starts_the_same(tmp_path: Path, gate_ranks: ModuleType, environment: dict[str, str]) -> None:
    gate = ["gather.yaml", "--task", "ranked:good", "--seeds", "1", "--steps", "4", "--device", "cpu", "-q"]
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "narrowgate.gates", "gate", *gate],
        cwd=gate_ranks.furnished(tmp_path), env=environment, capture_output=True, text=True, check=False,
        timeout=gate_ranks.WHOLE,
    )  # fmt: skip
    assert ran.stdout.count("INCONCLUSIVE: gather") == 1
    assert load_report(tmp_path / "reports" / "report.json").measurements.distributed.ranks == 2
