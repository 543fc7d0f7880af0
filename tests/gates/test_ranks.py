"""What ranks decide without each other: places, causes, batches, and what the wire says of a recipe."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates import exits
from narrowgate.gates.decision import decide
from narrowgate.gates.distributed_time import planned_wire
from narrowgate.gates.measurements import Measurements, StepTime
from narrowgate.gates.measurements_distributed import DistributedArm, DistributedRun, Planned, RankTime, Traffic, Wire
from narrowgate.gates.policy import BUILTIN_POLICIES
from narrowgate.gates.rank_arm import merged
from narrowgate.gates.rank_data import RankTask, dealt, in_order
from narrowgate.gates.rank_watch import Fault, cause_of
from narrowgate.gates.ranks import Place
from narrowgate.gates.stability import Observed
from narrowgate.gates.train import RunError, Trained
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.observer import OperandNumerics
from narrowgate.recipes import Recipe, resolve

STANDARD = BUILTIN_POLICIES["standard"]


@pytest.mark.parametrize(
    ("found", "place"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Place(3, 4, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, 1)),
    ],
)
def test_a_job_is_what_the_environment_says(found, place, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert Place.of_environment() == place


@pytest.mark.parametrize(("rank", "message"), [("2", "RANK: found 2, expected 0 to 1"), ("x", "whole numbers")])
def test_places_that_cannot_be_are_refused(rank, message, monkeypatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NarrowgateError, match=message):
        Place.of_environment()


@pytest.mark.parametrize("option", ["--from", "--config"])
def test_what_runs_in_one_process_is_refused_on_several(option, monkeypatch, narrowgate) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = narrowgate("gate", option, "x")
    assert (code, err) == (2, f"narrowgate: gate {option} runs in one process: start it without torchrun\n")


def test_replicas_divide_the_ranks(monkeypatch, narrowgate) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, err = narrowgate("gate", "bf16", "--replicas", "3")
    assert (code, err) == (2, "narrowgate: gate --replicas: found 3, expected a divisor of the 4 ranks\n")


def test_a_launcher_that_left_something_out_is_told(monkeypatch, narrowgate) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    code, _, err = narrowgate("gate", "bf16")
    assert (code, err) == (2, "narrowgate: found no MASTER_PORT in the environment, expected what torchrun sets\n")


def test_ranks_that_do_not_come_are_missed(monkeypatch, narrowgate) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    code, _, err = narrowgate("gate", "bf16", "--collective-timeout", "1")
    assert code == 4
    assert err.startswith("narrowgate: the run failed: rank 0 waited up to 1 s for the other ranks in vain")


def test_of_faults_of_one_moment_the_cause_is_told() -> None:
    silent, told = Fault(2, "silent", "nothing happened"), Fault(2, "signal", "it was told to stop")
    broken, died, first = Fault(0, "error", "connection closed"), Fault(1, "died"), Fault(3, "error", "on fire")
    assert cause_of([broken, died, told], 4) is died
    assert cause_of([silent, first, broken], 4) is first
    assert cause_of([told, silent], 4) is silent


def test_of_ranks_that_waited_in_vain_those_that_did_not_are_named() -> None:
    waited = [Fault(rank, "waited", "a collective did not end") for rank in range(4)]
    assert cause_of([*waited[:2], Fault(2, "silent", "nothing happened"), waited[3]], 4).text == (
        "a collective did not end; rank 2 did not come to one"
    )
    assert cause_of(waited[:2], 4).text == "a collective did not end; ranks 2, 3 did not come to one"
    assert cause_of(waited, 4) is waited[0]
    died = Fault(3, "died")
    assert cause_of([*waited[:3], died], 4) is died


def test_what_all_ranks_found_stands_as_one_process_would_say_it() -> None:
    fault = Fault(1, "error", "narrowgate: unknown policy", exits.USAGE)
    assert fault.line(2, told_alike=2) == "narrowgate: unknown policy"
    assert fault.line(2, told_alike=1) == "narrowgate: rank 1: unknown policy"
    assert Fault(1, "error", "on fire").line(2) == "narrowgate: the run failed: rank 1: on fire"
    assert "interrupted" in Fault(1, "signal", "", exits.INTERRUPTED).line(2)


class Plain:
    """A task of numbered batches."""

    def __init__(self, train: int, held_out: int) -> None:
        self.train, self.held_out = train, held_out

    def build_model(self) -> None: ...
    def loss(self, model: Any, batch: Any) -> None: ...
    def predict(self, model: Any, batch: Any) -> None: ...

    def train_batches(self, seed: int) -> list[int]:
        return list(range(self.train))

    def eval_batches(self) -> list[int]:
        return list(range(self.held_out))


class Splitting(Plain):
    def for_rank(self, rank: int, ranks: int) -> Plain:
        task = Plain(self.train, self.held_out)
        task.train_batches = lambda seed: [(i, rank) for i in range(self.train)]  # type: ignore[method-assign]
        task.eval_batches = lambda: [(i, rank) for i in range(self.held_out)]  # type: ignore[method-assign]
        return task


@pytest.mark.parametrize(("ranks", "train", "held_out"), [(2, 7, 5), (3, 9, 1), (4, 11, 4), (4, 0, 4)])
def test_batches_are_dealt_out_in_whole_rounds_and_predictions_come_back_in_order(ranks, train, held_out) -> None:
    views = [RankTask.of(Plain(train, held_out), rank, ranks) for rank in range(ranks)]  # type: ignore[arg-type]
    own = [list(view.train_batches(0)) for view in views]
    whole = train // ranks
    assert [len(batches) for batches in own] == [whole] * ranks == [view.steps(train) for view in views]
    assert sorted(batch for batches in own for batch in batches) == list(range(whole * ranks))
    predicted = [list(view.eval_batches()) for view in views]
    assert len({len(batches) for batches in predicted}) == 1, "a sharded model runs on all ranks or on none"
    counted = [[batch if counts else None for batch, counts in batches] for batches in predicted]
    assert in_order(counted) == list(range(held_out))


@pytest.mark.parametrize("rank", range(3))
def test_fewer_batches_than_ranks_are_an_error_on_every_rank(rank: int) -> None:
    view = RankTask.of(Plain(2, 3), rank, 3)  # type: ignore[arg-type]
    with pytest.raises(NarrowgateError, match="yielded 2 batches, expected at least one for each of 3 ranks"):
        list(view.train_batches(0))


def test_a_task_that_splits_its_batches_keeps_their_number() -> None:
    views = [RankTask.of(Splitting(4, 3), rank, 2) for rank in range(2)]  # type: ignore[arg-type]
    assert views[1].steps(4) == 4
    assert list(views[1].train_batches(0)) == [(i, 1) for i in range(4)]
    counted = [[batch if counts else None for batch, counts in view.eval_batches()] for view in views]
    assert in_order(counted) == [(i, rank) for i in range(3) for rank in range(2)]


def test_no_held_out_batch_is_an_error_on_every_rank() -> None:
    with pytest.raises(NarrowgateError, match="yielded no batch"):
        list(RankTask.of(Plain(2, 0), 1, 2).eval_batches())  # type: ignore[arg-type]
    assert list(dealt(iter("abcde"), 1, 2)) == ["b", "d"]


def _operand(elements: int, saturated: float, step: int, sqnr: float) -> OperandNumerics:
    return OperandNumerics(
        layer="a", path="fprop", operand="input", format="fp8_e4m3", steps=2, elements=elements, amax=float(elements),
        saturated=saturated, worst_saturated=saturated, worst_saturated_step=step, underflowed=0.0,
        worst_underflowed=0.0, worst_underflowed_step=1, clipped=0.0, worst_clipped=0.0, nonfinite=0.0, sqnr_db=sqnr,
    )  # fmt: skip


@pytest.fixture
def trained() -> Trained:
    return Trained(
        seed=3, weights="w", first_batch="b0", batches="a0", held_out="h", losses=np.ones(2), gradient_norms=np.ones(2),
        logits=None, labels=None, row_weights=None, groups=None, slices={}, peak_memory=10, seconds=1.0,
        first_step_seconds=0.5,
        observed=Observed(2, (_operand(10, 0.1, 1, 30.0),), None, ("p", "q")),
    )  # fmt: skip


def test_one_training_of_ranks_has_the_largest_peak_and_the_worst_rank_of_each_operand(trained) -> None:
    other = replace(
        trained,
        first_batch="b1",
        batches="a1",
        peak_memory=20,
        observed=Observed(2, (_operand(30, 0.3, 2, 20.0),), None, ("q",)),
    )
    found = merged([trained, other])
    assert found.peak_memory == 20
    assert found.first_batch not in ("b0", "b1")
    assert found.batches not in ("a0", "a1")
    (operand,) = found.observed.operands
    assert (operand.elements, operand.worst_saturated, operand.worst_saturated_step) == (40, 0.3, 2)
    assert operand.saturated == pytest.approx((10 * 0.1 + 30 * 0.3) / 40)
    assert operand.sqnr_db == 20.0
    assert found.observed.without_gradient == ("q",)


def test_ranks_that_built_other_weights_are_no_training(trained) -> None:
    with pytest.raises(RunError, match="made other weights on rank 1"):
        merged([trained, replace(trained, weights="v")])


def _wire(gather: int, asked: str | None = None, planned: int | None = None, gathered: int = 2, **more: int) -> Wire:
    given = {"all_gather": gather, **more}
    due = {**given, "all_gather": gather if planned is None else planned}
    return Wire(
        all_gather=asked,
        gathered=gathered,
        planned=tuple(Planned(what=n, collective=n, calls=1, given={"x": b}) for n, b in due.items()),
        counted=tuple(Traffic(collective=n, dtype="uint8", bytes=b) for n, b in given.items()),
        calls={"all_gather": 1},
    )


@pytest.fixture
def ranked(measurements: Callable[..., Measurements], step_time) -> Callable[..., Measurements]:
    """A healthy run on two GPUs, from both arms' wires and the log speedups of all ranks together."""

    def make(baseline: Wire, candidate: Wire, speedups: Any = None) -> Measurements:
        time = RankTime(ms=2.0, local_ms=1.5, alone_ms=1.0, rounds=3)
        together = np.log(1.2) + 0.001 * np.resize([1, -1], 20) if speedups is None else speedups
        run = DistributedRun(
            ranks=2, transport="nccl", baseline=DistributedArm(wire=baseline, time=time),
            candidate=DistributedArm(wire=candidate, time=time), step=step_time(together),
        )  # fmt: skip
        return measurements([1e-5 * x for x in (-1, 1, -1, 1, -1, 1, -1, 1)], distributed=run)

    return make


def test_a_recipe_whose_payload_travels_is_accepted(ranked) -> None:
    decision = decide(ranked(_wire(200), _wire(100, "fp8_e4m3/tensor")), STANDARD)
    assert decision.verdict == "accept"


@pytest.mark.parametrize(
    ("candidate", "told"),
    [
        (_wire(200, "fp8_e4m3/tensor", planned=100), "200 bytes a step, as much as BF16, where 100 are planned"),
        (_wire(150, "fp8_e4m3/tensor", planned=100), "150 bytes a step, where 100 are planned (BF16: 200)"),
        (_wire(200, "fp8_e4m3/tensor", gathered=0), "no layer of this model gathers its weight like that"),
    ],
)
def test_a_payload_that_the_wire_does_not_show_is_named_and_concludes_nothing(ranked, candidate, told) -> None:
    decision = decide(ranked(_wire(200), candidate), STANDARD)
    assert decision.verdict == "inconclusive"
    assert decision.reasons[0].code == "wire_ignored"
    assert told in decision.reasons[0].text


def test_gradients_that_did_not_travel_as_codes_are_named(ranked) -> None:
    wire = _wire(200, reduce_scatter=400)
    asked = wire.model_copy(
        update={
            "reduce_scatter": "fp8_e5m2/row",
            "planned": (
                wire.planned[0],
                Planned(what="codes", collective="all_to_all", calls=1, given={"fp8_e5m2": 210}),
            ),
        }
    )
    (reason,) = (r for r in decide(ranked(wire, asked), STANDARD).reasons if r.code == "wire_ignored")
    assert "shards.reduce_scatter fp8_e5m2/row" in reason.text
    assert "400 bytes a step, as much as BF16, where 210 are planned" in reason.text


@pytest.mark.parametrize(("sent", "ignored"), [(250, False), (400, True)])
def test_a_model_that_the_plan_does_not_describe_is_held_to_less_than_its_baseline(ranked, sent, ignored) -> None:
    """A step that runs its units twice sends twice what is planned, in both arms."""
    baseline, candidate = _wire(400, planned=200), _wire(sent, "fp8_e4m3/tensor", planned=100)
    codes = [reason.code for reason in decide(ranked(baseline, candidate), STANDARD).reasons]
    assert ("wire_ignored" in codes) == ignored


def test_the_step_of_all_ranks_decides_not_that_of_one_alone(ranked) -> None:
    slow = decide(ranked(_wire(200), _wire(200), np.log(0.9) + 0.001 * np.resize([1, -1], 20)), STANDARD)
    assert slow.verdict == "reject"
    assert slow.reasons[0].code == "too_slow"
    emulated = ranked(_wire(200), _wire(200))
    run = emulated.distributed.model_copy(update={"step": StepTime(status="no_gpu")})
    assert decide(emulated.model_copy(update={"distributed": run}), STANDARD).verdict == "inconclusive"


@pytest.mark.parametrize("ranks", [2, 3, 5, 12])
def test_bytes_are_planned_for_any_number_of_ranks(ranks: int) -> None:
    class One(Plain):
        def build_model(self) -> torch.nn.Module:  # type: ignore[override]
            return torch.nn.Sequential(torch.nn.Linear(48, 33, bias=False))

    task = One(1, 1)
    gather = {"all_gather": "fp8_e4m3/row", "requantize": True}
    recipe = Recipe.from_dict({"recipe": "r", "rules": [{"layers": "**", "all": "fp8_e4m3/row"}], "shards": gather})
    cpu = torch.device("cpu")
    bf16, codes = planned_wire(task, cpu, resolve(recipe, task.build_model()), ranks)  # type: ignore[arg-type]
    rows = -(-33 // ranks)
    assert bf16.given("all_gather") == 2 * rows * 48 * 2  # forward and backward
    assert bf16.given("reduce_scatter") == ranks * rows * 48 * 2
    assert codes.given("all_gather") == 2 * rows * (48 + 4)
    assert codes.given("reduce_scatter") == bf16.given("reduce_scatter")


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_a_search_on_ranks_is_refused_once(
    narrowgate: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, rank: int, lines: int
) -> None:
    for name, value in (("RANK", str(rank)), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "::1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    code, out, err = narrowgate("search", "-q")
    assert (code, out, len(err.splitlines())) == (2, "", lines)
