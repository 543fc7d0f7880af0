"""The whole-step benchmark at toy size: what a result holds, how turns are taken, what becomes of arms that fail."""

from __future__ import annotations

import json
import re
import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates.attribution import kernel_class
from narrowgate.gates.bench import gem, gem_attention, gem_loop
from narrowgate.gates.bench.gem_arms import ARMS, GemArm, pick_arms
from narrowgate.gates.speed import BlockTime, StepFunction
from narrowgate.models import GemConfig, GemTask
from narrowgate.precision import casting
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.layer import LowPrecisionLayer, layer_state
from narrowgate.precision.optimizer_state import state_spec
from narrowgate.recipes import apply_recipe
from scipy import stats

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_gem"
SETTINGS = gem.GemSettings(torch.device("cpu"), lambda line: None, rounds=3, steps=1, batches=1)
FACTS = ("ms", "ratio", "ci", "peak_bytes", "breakdown", "first_loss", "recipe_hash")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(scope="module")
def task() -> GemTask:
    sized = runpy.run_path(str(SCRIPT))["sized"]
    options = type("Options", (), {"model": "gem-base", "tiny": True, "batch": 32, "max_tokens": None})
    return GemTask.open(sized(options), "synthetic")


def test_every_part_runs_on_a_cpu_and_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    usual = ("--device", "cpu", "--tiny", "--batch", "32", "--rounds", "2", "--steps", "1", "--out", str(out))
    parts = ("--attention", "--determinism", "--loader", "--balance", "--stream", "100")
    assert run(monkeypatch, *usual, "--arms", "bf16-fused", "gem-fp8", "te-current-large", *parts) == 0
    assert "a dry run" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert {"name", "date", "command", "machine", "versions", "runs", "rows"} == found.keys()
    assert found["name"] == "gem_base"
    rows = {(row["case"].partition("rows")[2].strip(), row["arm"], row["variant"]): row for row in found["rows"]}
    assert list(rows)[:3] == [("", "bf16", "bf16"), ("", "bf16_fused", "bf16"), ("", "narrowgate", "gem-fp8")]
    for row in found["rows"]:
        assert row["ms"] > 0
        assert row["command"] == found["command"]
        assert row.get("dry_run") or row["arm"] == "loader"
        assert row.get("ratio") is row.get("ci") is row.get("exposed") is row.get("saved_of_promised") is None
    ours, plain = rows["", "narrowgate", "gem-fp8"], rows["", "bf16", "bf16"]
    assert set(FACTS) <= ours.keys()
    fused = rows["", "bf16_fused", "bf16"]
    assert ours["lowered"] == fused["lowered"] > plain["lowered"] == 0
    assert fused["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-3)
    # The same weights, batch and dropout: the recipe's error is all that lies between them.
    assert 0 < abs(ours["first_loss"] / plain["first_loss"] - 1) < 0.02
    assert all(row["same_bits"] for (case, *_), row in rows.items() if case == "repeats")
    assert rows["stream", "loader", "cpu"]["rows"] == 128
    shuffled, balanced = (rows["balance", "bf16", variant] for variant in ("shuffled", "balanced"))
    assert np.ptp(shuffled["live_tokens"]) > np.ptp(balanced["live_tokens"])
    assert shuffled["tokens"] >= balanced["tokens"] >= max(balanced["live_tokens"])
    assert "spread" not in shuffled | balanced
    assert sum(shuffled["live_tokens"]) == sum(balanced["live_tokens"])
    attention = [row for row in found["rows"] if "attention" in row["case"]]
    assert {row["arm"] for row in attention} == {"padded", "narrowgate"}
    assert max(row["relative_error"] for row in attention if row["arm"] == "narrowgate") < 1e-5
    skipped, *libraries = found["runs"][0]["skipped"]
    assert len(libraries) == 9
    assert skipped["name"] == "te-current-large"
    assert not skipped["fault"]
    first = found["rows"]

    assert run(monkeypatch, *usual, "--add", "--loader") == 0
    found = json.loads(out.read_text())
    assert found["rows"][: len(first) - 2] == [row for row in first if not row["case"].endswith("loader")]
    assert [run_["command"] for run_ in found["runs"]] == [first[0]["command"], found["command"]]


@pytest.mark.gpu
@pytest.mark.timeout(600)  # three models are compiled, beside other tests
def test_a_gpu_is_measured_compiled_with_memory_and_breakdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    arms = ("--arms", "bf16-fused", "gem-fp8")
    assert run(monkeypatch, "--tiny", "--rounds", "3", "--steps", "3", "--out", str(out), *arms) == 0
    steps = [row for row in json.loads(out.read_text())["rows"] if row["case"].endswith("rows")]
    assert [row["arm"] for row in steps] == ["bf16", "bf16_fused", "narrowgate"]
    for row in steps:
        assert row["ci"][0] <= row["ratio"] <= row["ci"][1]
        assert row["peak_bytes"] > row["rest_bytes"] > 0
        assert sum(row["breakdown"].values()) == pytest.approx(row["ms"], rel=0.5)
    assert steps[2]["breakdown"]["gemm fp8"] > 0
    assert steps[0]["breakdown"]["attention"] > 0


@pytest.mark.gpu
def test_a_gpu_measures_attention_and_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    parts = ("--attention", "--loader", "--balance")
    assert run(monkeypatch, "--tiny", "--rounds", "3", "--steps", "3", "--out", str(out), *parts) == 0
    found = json.loads(out.read_text())
    assert {entry["name"].partition(",")[0] for entry in found["runs"][0]["skipped"]} <= {"fbgemm_hstu"}
    attention = {row["arm"]: row for row in found["rows"] if "attention" in row["case"]}
    assert {"padded", "narrowgate"} <= attention.keys()
    assert attention["narrowgate"]["relative_error"] < 0.02
    loader = {row["variant"]: row for row in found["rows"] if row["case"].endswith("loader")}
    assert loader.keys() == {"staged", "streamed"}
    assert loader["streamed"]["ci"][0] <= loader["streamed"]["exposed"] <= loader["streamed"]["ci"][1]
    shuffled, balanced = (row for row in found["rows"] if row["case"].endswith("balance"))
    for row in (shuffled, balanced):
        assert len(row["batch_ms"]) == len(row["live_tokens"]) == 16
        assert row["spread_ci"][0] <= row["spread"] <= row["spread_ci"][1]
        assert row["peak_bytes"] > 0
    assert balanced["ci"][0] <= balanced["ratio"] <= balanced["ci"][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu"), "a CPU measures nothing: expected --tiny, or --stream"),
        (("--device", "cpu", "--tiny", "--rounds", "1"), "--rounds: found 1, expected at least 2"),
        (("--device", "cpu", "--tiny", "--steps", "0"), "--steps: found 0, expected at least 1"),
        (("--device", "cpu", "--tiny", "--batch", "33", "--balance"), "found --batch 33, expected a multiple of 4"),
        (("--device", "cpu", "--tiny", "--arms", "gem-fp9"), "found 'gem-fp9'; did you mean 'gem-fp8'?"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_rows_that_stay_keep_what_their_ratios_refer_to() -> None:
    surviving = runpy.run_path(str(SCRIPT))["surviving"]

    def row(arm: str, variant: str, command: str, case: str = "c") -> dict[str, Any]:
        return {"case": case, "arm": arm, "variant": variant, "command": command}

    old = [
        row("bf16", "bf16", "1"),
        row("narrowgate", "x", "1"),
        row("torchao", "y", "1"),
        row("bf16", "bf16", "1", "d"),
    ]
    assert surviving(old, [row("bf16", "bf16", "2"), row("narrowgate", "x", "2")]) == [old[0], *old[2:]]
    assert surviving(old, [row("bf16", "bf16", "2"), row("narrowgate", "x", "2"), row("torchao", "y", "2")]) == old[3:]
    attention = [row("padded", "silu", "1"), row("narrowgate", "silu", "1"), row("fbgemm_hstu", "silu", "1")]
    assert surviving(attention, [row("padded", "silu", "2"), row("narrowgate", "silu", "2")]) == attention[::2]


class DriftingTimer:
    """Steps take what they say, times a drift that is linear in the blocks that ran, in logs."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.drift, self.ms = 0.01, 0.0
        self.time = 0.0

    def block(self, step: StepFunction, steps: int) -> BlockTime:
        step(0)
        ms = self.ms * np.exp(self.drift * len(self.order))
        self.time += 1.0
        return BlockTime(float(ms), float(ms))

    def now(self) -> float:
        return self.time

    def clocks(self) -> None:
        return None


def turns(timer: DriftingTimer, rounds: int, deadline: float = 1e9) -> Any:
    def step(name: str, ms: float) -> StepFunction:
        def run_(i: int) -> None:
            timer.order.append(name)
            timer.ms = ms

        return run_

    steps = {"a": step("a", 12.0), "b": step("b", 10.0), "c": step("c", 8.0)}
    return gem.take_turns(steps, timer, replace(SETTINGS, rounds=rounds), deadline)


def test_a_linear_drift_falls_on_all_arms_alike() -> None:
    timer = DriftingTimer()
    found, stopped = turns(timer, 8)
    assert stopped == "8 rounds, as asked"
    for start in range(0, len(timer.order), 6):
        one = timer.order[start : start + 6]
        assert one == one[::-1]
    assert len({tuple(timer.order[start : start + 3]) for start in range(0, 48, 6)}) >= 4
    for name, expected in (("b", 1.2), ("c", 1.5)):
        mean, (low, high) = gem.ratio(found["a"], found[name])
        assert mean == pytest.approx(expected, rel=1e-12)
        assert low == pytest.approx(high, rel=1e-9)


def test_no_round_starts_after_the_deadline_once_there_are_a_few() -> None:
    found, stopped = turns(DriftingTimer(), 20, deadline=0.0)
    assert len(found["a"]) == 3
    assert stopped == "the time allowed ended after 3 rounds"


def test_the_interval_is_students_t_on_log_ratios() -> None:
    draw = np.random.default_rng(0)
    a, b = (np.exp(draw.normal(mean, 0.05, (9, 2))) for mean in (2.5, 2.3))
    blocks = [[(BlockTime(x, x), BlockTime(y, y)) for x, y in times.tolist()] for times in (a, b)]
    mean, bounds = gem.ratio(*blocks)
    logs = (np.log(a) - np.log(b)).mean(1)
    assert mean == pytest.approx(np.exp(logs.mean()))
    expected = stats.ttest_1samp(logs, 0).confidence_interval(0.9)
    assert bounds == pytest.approx(tuple(np.exp(expected)))


def test_ratios_are_to_bf16_and_to_the_same_fusion_in_bf16() -> None:
    running = {
        name: gem.Running(ARMS[name], lambda i: None, None, 0, 0.5, 3, 1, 9.0)
        for name in ("bf16", "bf16-fused", "gem-fp8")
    }
    draw = np.random.default_rng(0)
    times = {"bf16": 12.0, "bf16-fused": 11.0, "gem-fp8": 8.0}
    found = {
        name: [(BlockTime(a, a), BlockTime(b, b)) for a, b in (ms * np.exp(draw.normal(0, 0.001, (20, 2)))).tolist()]
        for name, ms in times.items()
    }
    settings = replace(SETTINGS, device=torch.device("cuda", 0))
    rows = {name: gem.result_row("case", one, found, name, settings) for name, one in running.items()}
    assert rows["bf16"]["ratio"] == rows["bf16-fused"]["ratio_to_fused"] == 1
    for name, row in rows.items():
        for reference, suffix in (("bf16", ""), ("bf16-fused", "_to_fused")):
            expected = times[reference] / times[name]
            low, high = row[f"ci{suffix}"]
            assert low <= row[f"ratio{suffix}"] <= high
            assert row[f"ratio{suffix}"] == pytest.approx(expected, rel=2e-3)
    assert rows["gem-fp8"]["peak_bytes"] == 3
    assert "dry_run" not in rows["gem-fp8"]


def fails(task: GemTask, model: torch.nn.Module) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.\nmore lines")


def test_an_arm_that_fails_is_named_and_ours_is_a_fault(task: GemTask) -> None:
    arms = [
        *pick_arms([]),
        GemArm("ours", "narrowgate", "x", fails),
        GemArm("peer", "torchao", "x", fails, may_fail=True),
    ]
    result = gem.measure_steps(task, arms, SETTINGS, "case")
    assert [row["arm"] for row in result.rows] == ["bf16"]
    assert [(entry["name"], entry["fault"]) for entry in result.skipped] == [("ours", True), ("peer", False)]
    assert result.faults == ["ours: OutOfMemoryError: CUDA out of memory."]


def test_weights_are_kept_as_the_recipe_says_but_in_the_arm_that_keeps_them(
    task: GemTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(casting, "kernels_on_cpu", lambda: True)
    models: list[torch.nn.Module] = []

    def built(task: GemTask) -> torch.nn.Module:
        models.append(build(task))
        return models[-1]

    build = GemTask.build_model
    monkeypatch.setattr(GemTask, "build_model", built)
    found: list[set[bool]] = []
    for name in ("gem-fp8", "gem-fp8-kept"):
        # Built and wrapped; a step wants a batch, and there is none.
        with pytest.raises(ZeroDivisionError):
            gem.make_running(ARMS[name], task, [], SETTINGS)
        lowered = [module for module in models[-1].modules() if isinstance(module, LowPrecisionLayer)]
        found.append({layer_state(module).kept is not None for module in lowered})
    assert found == [{False}, {True}]


def test_the_lean_arm_is_the_recipe_with_eight_bits_for_the_rest(task: GemTask) -> None:
    model = task.build_model()
    plan = ARMS["gem-fp8-lean"].prepare(task, model)
    assert plan is not None
    assert plan.to_dict()["activations"]["save"] == "fp8_e4m3/row"
    optimizer = plan.wrap_optimizer(torch.optim.Adam(model.parameters()))
    assert str(state_spec(optimizer)) == "fp8_e4m3/1x128+sr"
    usual = apply_recipe(task.build_model(), "gem-fp8")
    assert [layer.config for layer in plan.layers] == [layer.config for layer in usual.layers]


@pytest.mark.parametrize(("disturbed", "walks"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_arms_are_stepped_until_none_compiles_and_rows_say_which_did(disturbed, walks, monkeypatch):
    compiled, calls = [0], {"bf16": 0, "gem-fp8": 0}
    monkeypatch.setattr(gem, "graphs_compiled", lambda: compiled[0])

    def step(name: str, i: int) -> None:
        walk, at = divmod(calls[name], 2)
        calls[name] += 1
        compiled[0] += name == "gem-fp8" and walk < disturbed and at == 0

    running = {name: gem.Running(ARMS[name], partial(step, name), None, 0, 0.5, 3, 1, 9.0) for name in calls}
    said: list[str] = []
    gem.settle(running, 2, said.append)
    assert calls == {"bf16": 2 * walks, "gem-fp8": 2 * walks}
    assert said == ["  gem-fp8: 1 graphs were compiled again beside the other arms"] * min(disturbed, 3)
    found = {name: [(BlockTime(2.0, 2.0), BlockTime(2.0, 2.0))] * 3 for name in calls}
    rows = [gem.result_row("case", running[name], found, name, SETTINGS) for name in calls]
    assert [row.get("compiled_again") for row in rows] == [None, min(disturbed, 3) or None]


def test_what_was_measured_is_kept_when_a_later_part_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    out = tmp_path / "rows.json"

    def fails(*arguments: Any) -> None:
        raise NarrowgateError("no more")

    monkeypatch.setattr(gem_loop, "measure_loader", fails)
    code = run(monkeypatch, "--device", "cpu", "--tiny", "--arms", "bf16", "--loader", "--rounds", "2", "--steps", "1",
               "--out", str(out))  # fmt: skip
    assert code == 2
    assert "bench_gem: error: no more" in capsys.readouterr().err
    assert [row["arm"] for row in json.loads(out.read_text())["rows"]] == ["bf16"]


def test_bf16_itself_must_run(task: GemTask) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        gem.measure_steps(task, [GemArm("bf16", "bf16", "bf16", fails)], SETTINGS, "case")


def test_arms_that_come_too_late_are_left_out(task: GemTask) -> None:
    result = gem.measure_steps(task, pick_arms(["gem-fp8"]), replace(SETTINGS, seconds=0.0), "case")
    assert [row["arm"] for row in result.rows] == ["bf16"]
    assert "were over before its turn" in result.skipped[0]["reason"]
    assert not result.faults


def test_a_padded_arm_differs_in_nothing_but_the_layout(task: GemTask) -> None:
    arms = pick_arms(["bf16-padded"])
    one, other = gem.measure_steps(task, arms, SETTINGS, "case").rows
    assert one["first_loss"] == pytest.approx(other["first_loss"], rel=1e-6)
    assert ARMS["bf16-padded"].task(task).data is task.data


@pytest.mark.parametrize(
    ("name", "theirs", "layers"),
    [
        ("torchao-tensorwise", "tensorwise", 16),
        ("torchao-tensorwise-large", "tensorwise", 3),
        ("torchao-rowwise-large", "rowwise", 3),
        ("torchao-gw-hp-large", "rowwise_with_gw_hp", 3),
    ],
)
def test_torchaos_arms_are_its_own_recipes(task: GemTask, name: str, theirs: str, layers: int) -> None:
    config = pytest.importorskip("torchao.float8.config")
    from narrowgate.precision.backends.torchao_linear import float8_settings

    plan = ARMS[name].prepare(task, task.build_model())
    assert plan is not None
    assert len(plan.lowered) == layers
    (used,) = {layer.config for layer in plan.lowered}
    settings, products = float8_settings(used, False)
    assert vars(settings) == vars(config.Float8LinearConfig.from_recipe_name(theirs))
    assert [product.use_fast_accum for product in products] == [True, False, False]


def test_the_fill_counts_what_attention_sees_of_padding(task: GemTask) -> None:
    batch = next(iter(task.train_batches(0)))
    facts = gem.shape_facts(task, [batch])
    config = task.preset.model
    lengths = [min(n + config.n_summary, config.max_tokens) for n in batch.offsets.diff().tolist()]
    assert facts["fill"] == pytest.approx(sum(lengths) / (32 * config.max_tokens), abs=1e-4)
    assert facts["tokens"] == len(batch.events)


def test_even_lengths_are_half_full() -> None:
    lengths = gem_attention.even_lengths(4096, 256)
    assert lengths.min() == 1
    assert lengths.max() == 256
    assert lengths.float().mean().item() / 256 == pytest.approx(0.5, abs=0.02)


def test_uses_are_those_of_the_model() -> None:
    from narrowgate.models import attention

    config = GemConfig(d=16, heads=2, layers=3, max_tokens=8, fm_hidden=(32,), pffn_tokens=3, attention="jagged")
    calls: list[tuple[int, int]] = []
    original = attention.attention_rules

    def counted(queries: Any, keys: Any, *rest: Any, **named: Any) -> Any:
        calls.append((queries.width, keys.width))
        return original(queries, keys, *rest, **named)

    sized = runpy.run_path(str(SCRIPT))["sized"]
    preset = sized(type("Options", (), {"model": "gem-base", "tiny": True, "batch": 8, "max_tokens": None}))
    task = GemTask.open(replace(preset, model=config), "synthetic")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attention_rules", counted)
        task.loss(task.build_model(), next(iter(task.train_batches(0))))
    expected = [
        (use.queries or config.max_tokens, use.keys or config.max_tokens)
        for use in gem_attention.uses(config)
        for _ in range(use.calls)
    ]
    assert sorted(calls) == sorted(expected)


def test_each_use_of_attention_compiles_for_its_own_shapes(task: GemTask, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: list[Any] = []

    def backend(graph: Any, given: Any) -> Any:
        inputs.extend(given)
        return graph.forward

    config = task.preset.model
    monkeypatch.setattr(gem_attention.torch, "compile", partial(torch.compile, backend=backend))
    lengths = gem_attention.even_lengths(4, config.max_tokens)
    for use in gem_attention.uses(config):
        case = gem_attention.Case(config, use, lengths, torch.device("cpu"), torch.float32)
        for function in (case.padded, case.jagged):
            case.step(gem_attention.compiled(function))
    assert len(inputs) > 6
    assert all(isinstance(given, torch.Tensor) for given in inputs), "a size among the inputs is a dynamic one"


def test_attention_kernels_are_told_from_the_rest_by_their_names() -> None:
    source = (ROOT / "models" / "kernels" / "jagged_attention.py").read_text()
    names = re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)
    assert len(names) == 4
    assert {kernel_class(name) for name in names} == {"attention"}


def test_unknown_arms_are_met_with_the_nearest() -> None:
    with pytest.raises(NarrowgateError, match="found 'te-curent-large'; did you mean 'te-current-large'"):
        pick_arms(["te-curent-large"])
