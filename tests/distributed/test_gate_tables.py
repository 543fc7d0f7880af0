"""The gate on two ranks whose embedding tables lie on one rank each: what travels, and that it trains as it should."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from narrowgate.gates.gate_wire import wire_faults
from narrowgate.gates.measurements_distributed import DistributedArm, DistributedRun, Planned, RankTime, Traffic, Wire
from narrowgate.gates.measurements_speed import StepTime
from narrowgate.gates.report import Report, load_report, report_schema
from narrowgate.gates.rows import trace_lookups
from narrowgate.models import GemTask
from narrowgate.recipes import Layout, Recipe, Sharding, predict_wire, resolve
from narrowgate.recipes.topology import example_topology

pytest.importorskip("junitparser", reason="gates write junit.xml")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
RULES = """
rules:
  - {layers: "layers.**", fprop: fp8_e4m3/row}
"""
RECIPES = {
    "rows": f"recipe: rows{RULES}shards: {{tables: {{forward: fp8_e4m3/row, backward: fp8_e5m2/row+sr}}}}\n",
    "whole": f"recipe: whole{RULES}",
}
MODEL = ("--model", "gem-tiny")


def furnish(room: Path) -> None:
    for name, text in RECIPES.items():
        (room / f"{name}.yaml").write_text(text)


@pytest.fixture(scope="module")
def gated(
    tmp_path_factory: pytest.TempPathFactory, gate_ranks: ModuleType, forks: Any
) -> Iterator[tuple[list[tuple[int, str, str]], Report]]:
    """What ranks said and reported."""
    ranks = gate_ranks.Ranks(tmp_path_factory.mktemp("rows"), forks)
    furnish(ranks.room)
    ranks.start("rows.yaml", *MODEL, "--steps", "3", "--seeds", "1")
    try:
        yield ranks.end(), load_report(ranks.room / "reports" / "report.json")
    finally:
        ranks.kill()


def test_a_gate_with_exchanged_tables_ends_alike_on_all_ranks(gated) -> None:
    ((code, out, _), (other, silent, err)), report = gated
    assert (code, other, silent, err) == (3, 3, "", "")
    assert out.count("INCONCLUSIVE: rows") == 1
    assert "exchanged as fp8_e4m3/row, gradients as fp8_e5m2/row+sr, by the baseline as bf16, gradients as bf16" in out
    assert not [reason for reason in report.reasons if reason.code == "wire_ignored"]
    assert report.recipe.plan["tables"] == {"forward": "fp8_e4m3/row", "backward": "fp8_e5m2/row+sr"}
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(report.model_dump_json()), report_schema())


def test_rows_travel_as_codes_in_the_candidate_and_as_bf16_in_the_baseline(gated) -> None:
    results = gated[1].evidence.distributed.results
    baseline, candidate = (results[arm]["bytes"]["all_to_all"] for arm in ("baseline", "candidate"))
    assert (baseline.keys(), candidate.keys()) == ({"bfloat16", "int64"}, {"uint8", "int64"})
    assert baseline["int64"] == candidate["int64"]
    # 32 codes and a scale in the place of 32 values.
    assert candidate["uint8"] * 64 == baseline["bfloat16"] * 36
    assert results["payload_ratio"]["tables"] == 36 / 64
    assert results["candidate"]["exposed_ms"] == results["candidate"]["step_ms"] - results["candidate"]["local_ms"]


def test_the_bytes_counted_are_those_of_a_plan_made_of_shapes_and_ids(gated) -> None:
    run, task = gated[1].measurements.distributed, GemTask.open("gem-tiny", "synthetic", steps=3)
    model = task.build_model()
    plan = resolve(Recipe.from_yaml(RECIPES["rows"]), model)
    ranks = [trace_lookups(task.for_rank(rank, 2), model) for rank in (0, 1)]
    lookups = tuple(
        tuple(replace(a, rows=(*a.rows, *b.rows)) for a, b in zip(*both, strict=True))
        for both in zip(*(own.lookups for own in ranks), strict=True)
    )
    exchanged, sharding = replace(ranks[0], lookups=lookups), Sharding(joint_amaxes=True)
    wire = predict_wire(model, plan, Layout(2, 2), example_topology(), sharding, exchanged)
    for arm, payload in ((run.baseline, wire.plain), (run.candidate, wire.recipe)):
        counted = arm.wire.counted_bytes()
        assert counted.keys() == {"all_gather", "all_to_all", "reduce_scatter"}
        assert counted == {name: payload.given(name) for name in counted} == arm.wire.planned_bytes()
        assert arm.wire.calls["all_to_all"] == 6


def test_a_rank_that_is_killed_ends_the_other_and_what_was_finished_is_reused(gate_ranks, start, tmp_path) -> None:
    furnish(tmp_path)
    shutil.copy(Path(__file__).with_name("arms.py"), tmp_path)
    gate = ("rows.yaml", "--task", "arms:small", "--seeds", "1")
    ranks = start(*gate)
    ranks.wait_for("baseline-*.npz", 1)
    killed = ranks.signal(1, signal.SIGKILL)
    ((code, _, err),) = ranks.end(0)
    assert time.monotonic() - killed < gate_ranks.LIMIT / 2
    assert code == 4
    (line,) = gate_ranks.spoken(err)
    assert line.startswith("narrowgate: the run failed: rank 1 died")
    (code, _, err), (other, _, _) = start(*gate).end()
    assert (code, other) == (3, 3), err
    assert load_report(tmp_path / "reports" / "report.json").reuse.baseline == 1


def test_rows_that_did_not_travel_as_asked_are_named_and_nothing_is_concluded(start, tmp_path) -> None:
    furnish(tmp_path)
    shutil.copy(Path(__file__).with_name("arms.py"), tmp_path)
    (code, out, _), _ = start("rows.yaml", "--task", "arms:ignoring", "--seeds", "1", "--steps", "3").end()
    assert code == 3
    report = load_report(tmp_path / "reports" / "report.json")
    (reason,) = (reason for reason in report.reasons if reason.code == "wire_ignored")
    assert (
        "asks for shards.tables fp8_e4m3/row, gradients as fp8_e5m2/row+sr, and the wire does not show" in reason.text
    )
    assert "as much as BF16" in reason.text
    assert reason.text in out


@pytest.mark.parametrize(("sent", "ignored"), [(120, False), (200, True)])
def test_a_step_that_looks_rows_up_twice_is_held_to_less_than_its_baseline(sent, ignored) -> None:
    def arm(counted: int, planned: int, tables: str) -> DistributedArm:
        wire = Wire(
            tables=tables,
            planned=(Planned(what="rows", collective="all_to_all", calls=1, given={"x": planned}),),
            counted=(Traffic(collective="all_to_all", dtype="uint8", bytes=counted),),
            calls={"all_to_all": 1},
        )
        return DistributedArm(wire=wire, time=RankTime(ms=1, local_ms=1, alone_ms=1, rounds=1))

    arms = arm(200, 100, "bf16, gradients as bf16"), arm(sent, 60, "fp8_e4m3/row, gradients as fp8_e4m3/row")
    run = DistributedRun(ranks=2, transport="gloo", baseline=arms[0], candidate=arms[1], step=StepTime(status="no_gpu"))
    measured: Any = SimpleNamespace(distributed=run)
    assert [reason.code for reason in wire_faults(measured)] == ["wire_ignored"] * ignored


def test_a_plan_of_the_wire_shows_the_exchange(tmp_path, monkeypatch, capsys) -> None:
    from narrowgate.gates.cli import main

    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "rows.yaml", *MODEL, "--shards", "--gpus", "8"])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    rows = [re.split(r"\s{2,}", line)[1:] for line in lines if line.startswith("fsdp 8 ")]
    ratios = {cells[0]: cells[4] for cells in rows}
    assert ratios["all-to-all of ids"] == "1.00"
    assert ratios["all-to-all of rows"] == ratios["all-to-all of rows' gradients"] == "0.56"
    (told,) = (line for line in lines if line.startswith("Rows of embedding tables travel as fp8_e4m3/row, gradients"))
    assert "of the GPU that hands over most" in told


def test_recipes_of_two_minds_about_tables_are_refused_once(gate_ranks, start, tmp_path) -> None:
    furnish(tmp_path)
    (code, _, err), (other, _, silent) = start("rows.yaml", "whole.yaml", *MODEL).end()
    assert (code, other, silent) == (2, 2, "")
    (line,) = gate_ranks.spoken(err)
    assert "recipe 'rows' has shards.tables and 'whole' has not: expected all or none in one run" in line


def test_a_model_without_tables_is_refused_before_it_trains(gate_ranks, start, tmp_path) -> None:
    (tmp_path / "rows.yaml").write_text("recipe: rows\nshards: {tables: {forward: fp8_e4m3/row}}\n")
    (code, _, err), (other, _, silent) = start("rows.yaml", "--task", "ranked:good").end()
    assert (code, other, silent) == (2, 2, "")
    (line,) = gate_ranks.spoken(err)
    assert "found no SparseArch in this Ranker, expected a model with one" in line


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> list[dict[str, Any]]:
    """What each of two ranks found of arms by themselves."""
    folder = tmp_path_factory.mktemp("arms")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_script("arms", folder, str(port), limit=120)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize(("exchanged", "replicated"), [("plain", "whole"), ("rowwise", "rowwise whole")])
def test_rows_in_bf16_train_as_tables_that_all_ranks_gather(arms, exchanged, replicated) -> None:
    for found in arms:
        here, there = found[exchanged], found[replicated]
        assert here["losses"] == pytest.approx(there["losses"], rel=1e-3)
        assert here["norms"] == pytest.approx(there["norms"], rel=5e-3)
        assert here["idle"] == there["idle"]
        torch.testing.assert_close(here["logits"], there["logits"], rtol=0, atol=2e-2)
    first, second = (found[exchanged]["weights"] for found in arms)
    tables = first.keys() ^ second.keys()
    assert tables
    assert all(name.startswith(("sparse.tables.", "sparse.bags.")) for name in tables)
    assert (first | second).keys() == arms[0][replicated]["weights"].keys()
    # What both have is the same on both.
    assert all(torch.equal(first[name], second[name]) for name in first.keys() & second.keys())
    assert arms[0][exchanged]["losses"] == arms[1][exchanged]["losses"]


def test_replicas_of_shards_exchange_among_all_ranks(arms) -> None:
    for found in arms:
        assert found["replicas"]["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-3)
        assert found["replicas"]["norms"] == pytest.approx(found["plain"]["norms"], rel=5e-3)
        assert found["replicas"]["weights"].keys() == found["plain"]["weights"].keys()
    first, second = (found["replicas"]["weights"] for found in arms)
    assert all(torch.equal(first[name], second[name]) for name in first.keys() & second.keys())


def test_random_bits_of_rows_follow_from_the_seed_alone(arms) -> None:
    first, other, again = arms[0]["coded"]
    assert first["losses"] == again["losses"]
    assert all(torch.equal(value, again["weights"][name]) for name, value in first["weights"].items())
    assert first["losses"] != other["losses"]
    assert first["losses"] != arms[0]["plain"]["losses"]
    # One lookup of features and one of events a step, none of the predictions.
    assert first["draws"] == again["draws"] == {"features": 3, "events": 3}


def test_passes_that_only_count_draw_nothing(arms) -> None:
    before, within, after = arms[0]["stepped"]["draws"]
    assert within == {what: count + 1 for what, count in before.items()}
    assert after == before


def test_a_step_without_a_wire_sends_no_rows_and_none_lack_afterwards(arms) -> None:
    for found in arms:
        sent = found["stepped"]["sent"]
        assert sent["first"] == sent["again"]
        assert {"all_to_all torch.uint8", "all_to_all torch.int64"} <= sent["first"].keys()
        assert sent["local"] == {}


def test_a_step_without_a_wire_finds_no_scales_with_others(arms) -> None:
    for sent in (sent for found in arms for sent in found["gathered"]):
        assert sent["first"] == sent["again"]
        assert sent["first"]["all_reduce"] == 1  # whether the arm or, of weights that are kept, the optimizer asks
        assert sent["local"] == {}


def test_rowwise_adagrad_runs_where_a_table_is(arms) -> None:
    for rank, found in enumerate(arms):
        owners = found["stepped"]["owners"]
        own = {f"sparse.{name}.weight" for name, owner in owners.items() if owner == rank}
        assert own
        assert set(found["stepped"]["rowwise"]) - own == {"encoder.position.weight"}
        assert own <= set(found["stepped"]["rowwise"])
        assert all(len(kinds) == 1 for kinds in found["stepped"]["kinds"])
