from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates.decision import decide
from narrowgate.gates.evidence import evidence_of, statistics_of
from narrowgate.gates.measurements import (
    ArmRun,
    LossSummary,
    Measurements,
    Quartet,
    RowEstimate,
    RowIntervals,
    SeedRun,
    Stability,
    StepTime,
    TaskQuality,
)
from narrowgate.gates.policy import BUILTIN_POLICIES
from narrowgate.gates.report import RecipeFacts, Report


def _arm(ne: float | None, auc: float | None, note: str | None = None, **changes: Any) -> ArmRun:
    stability = {
        "steps": 100,
        "non_finite_losses": 0,
        "non_finite_gradients": 0,
        "first_non_finite": None,
        "spikes": 0,
        "first_spike": None,
        "max_gradient_norm": 1.0,
    }
    stability.update({k: changes.pop(k) for k in list(changes) if k in Stability.model_fields})
    losses = {"first": 0.69, "last": 0.5, "curve": ((100, 0.5),)}
    losses.update({k: changes.pop(k) for k in list(changes) if k in LossSummary.model_fields})
    return ArmRun(
        quality={
            "click": TaskQuality(
                log_loss=None if ne is None else 0.6 * ne, ne=ne, auc=auc, calibration=ne and 1.0, note=note
            )
        },
        losses=LossSummary(**losses),
        stability=Stability(**stability),
        peak_memory=changes.pop("peak_memory", 10**9),
        seconds=1.0,
        first_step_seconds=0.1,
        **changes,
    )


@pytest.fixture
def compile_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Have ``torch.compile`` take a backend where the code under test names none, and forget what was compiled."""
    compile_with = torch.compile

    def use(backend: Any) -> None:
        monkeypatch.setattr(torch, "compile", partial(compile_with, backend=backend))
        torch._dynamo.reset()

    yield use
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def arm() -> Callable[..., ArmRun]:
    """Build one arm's run; keywords change its stability, losses or peak memory."""
    return _arm


def _step_time(log_speedups: Sequence[float], host: Sequence[float] | None = None, **changes: Any) -> StepTime:
    host = log_speedups if host is None else host

    def times(log_speedup: float) -> tuple[float, float]:
        return (10 * np.exp(log_speedup), 10 * np.exp(log_speedup))

    quartets = tuple(
        Quartet(
            order="ABBA",
            baseline_ms=times(device),
            candidate_ms=(10.0, 10.0),
            baseline_host_ms=times(clock),
            candidate_host_ms=(10.0, 10.0),
        )
        for device, clock in zip(log_speedups, host, strict=True)
    )
    return StepTime(status="measured", quartets=quartets, **changes)


@pytest.fixture(scope="session")
def step_time() -> Callable[..., StepTime]:
    """Build a step-time experiment from one log speedup a quartet (and one by the host's clock)."""
    return _step_time


def _measurements(
    ne_increase: Sequence[float],
    auc_loss: Sequence[float] | None = None,
    speed: StepTime | None = None,
    row: RowEstimate | None = None,
    **changes: Any,
) -> Measurements:
    auc_loss = [0.0] * len(ne_increase) if auc_loss is None else auc_loss
    tight = RowEstimate(mean=0.0, error=1e-6, df=1000) if row is None else row
    if speed is None:
        speed = _step_time(np.log(1.2) + 0.001 * np.resize([1, -1], 20))
    fields = {
        "tasks": ("click",),
        "seeds": tuple(
            SeedRun(
                seed=i,
                baseline=_arm(0.8 + 0.01 * i, 0.75 + 0.01 * i),
                candidate=_arm((0.8 + 0.01 * i) * (1 + d), 0.75 + 0.01 * i - a),
            )
            for i, (d, a) in enumerate(zip(ne_increase, auc_loss, strict=True))
        ),
        "rows": RowIntervals(
            rows=1001,
            clusters=1001,
            ne={"click": tight},
            auc={"click": RowEstimate(mean=0.0, error=1e-6, df=1000)},
        ),
        "step_time": speed,
        "device": "a GPU",
    }
    return Measurements(**(fields | changes))


@pytest.fixture(scope="session")
def measurements() -> Callable[..., Measurements]:
    """Build the measurements of a healthy run of one task, from each seed's relative NE increase and AUC loss."""
    return _measurements


def _report(m: Measurements, **changes: Any) -> Report:
    standard = BUILTIN_POLICIES["standard"]
    decision = decide(m, standard)
    report = Report(
        schema_version=1,
        verdict=decision.verdict,
        reasons=decision.reasons,
        recipe=RecipeFacts(
            name="r1", description="d | d", hash="0" * 64, backend="native", resolved={"recipe": "r1"},
            plan={"groups": [{"layers": 2, "fprop": "fp8_e4m3", "dgrad": "bf16", "wgrad": "bf16", "example": "a.b"}]},
        ),
        model={"name": "gem-tiny", "config": {"d": 32}},
        data={"name": "synthetic", "bayes_ne": {"click": 0.7}},
        environment={"torch": "2.13", "gpu": None},
        gates=decision.gates,
        statistics=statistics_of(m, decision),
        evidence=evidence_of(m, standard, "BF16 autocast, under torch.compile"),
        policy=standard,
        wall_seconds={"all": 1.5},
        measurements=m,
    )  # fmt: skip
    return report.model_copy(update=changes)


@pytest.fixture(scope="session")
def make_report() -> Callable[..., Report]:
    """Build the report that the standard policy makes of measurements; keywords replace its fields."""
    return _report


@pytest.fixture
def accepted(measurements, make_report) -> Report:
    """A report that accepts the recipe ``r1``."""
    return make_report(measurements([1e-5 * x for x in (-1, 1, -1, 1, -1, 1, -1, 1)]))


@pytest.fixture
def rejected(measurements, make_report) -> Report:
    """A report that rejects ``r1`` for its quality, from a run without a GPU."""
    return make_report(measurements([1e-2 + 1e-5 * x for x in range(8)], speed=StepTime(status="no_gpu")))


#: Reports of real runs.
REPORTS = sorted((Path(__file__).parents[2] / "benchmarks" / "reports").glob("*/report.json"))


@pytest.fixture(params=REPORTS, ids=[path.parent.name for path in REPORTS])
def stored(request: pytest.FixtureRequest) -> Path:
    """A committed report of a real run."""
    return request.param


#: A user's module, of which every test has a copy of its own.
TASK_MODULE = Path(__file__).with_name("ranker.py").read_text()

RECIPE = """\
recipe: all-fp8
description: every layer in FP8
rules:
  - layers: "**"
    fprop: fp8_e4m3
    dgrad: {grad: fp8_e5m2, weight: fp8_e4m3}
    wgrad: {grad: fp8_e5m2, input: fp8_e4m3}
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's task module ``ranker`` and the recipe ``all-fp8.yaml``; imports from it."""
    (tmp_path / "ranker.py").write_text(TASK_MODULE)
    (tmp_path / "all-fp8.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("ranker", None)


@pytest.fixture
def measure(room: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Run a gate of the user's task in this process, where a test can plant faults; return its report."""
    import torch
    from narrowgate.gates import run as runs
    from narrowgate.gates.pairs import Pairing
    from narrowgate.gates.policy import load_policy
    from narrowgate.gates.progress import Progress
    from narrowgate.gates.seeds import train_seed
    from narrowgate.gates.task import TaskSource
    from narrowgate.recipes import load_recipe

    def train_here(job: Any, seeds: Sequence[int], progress: Progress) -> dict[int, Any]:
        task = job.source.open()
        arms, pairing = job.arms(task, torch.device("cpu")), Pairing(task, job.limits)
        return {seed: train_seed(job, pairing, arms, seed, progress.step, progress.trained) for seed in seeds}

    monkeypatch.setattr(runs, "train_seeds", train_here)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker: layers this small only lose by more

    def run(
        task: str = "ranker:good",
        recipe: str = "all-fp8.yaml",
        policy: str = "loose",
        seeds: int = 5,
        steps: int = 60,
        **more: Any,
    ) -> Any:
        source = TaskSource(task=task, device="cpu", steps=steps)
        gate = runs.Run(source, (load_recipe(recipe),), load_policy(policy), seeds=seeds, **more)
        (report,) = runs.run_gate(gate, Progress())
        return report

    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def narrowgate(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; return exit code, standard output and standard error."""
    from narrowgate.gates.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err

    return run
