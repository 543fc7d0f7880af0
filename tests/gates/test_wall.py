"""How a run's own time was spent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from narrowgate.gates.measurements import FusedTime, Measurements, ModuleTime, SeedRun, StepTime
from narrowgate.gates.plots_speed import wall_chart
from narrowgate.gates.render import terminal_text, wall_text
from narrowgate.gates.wall import Marks, wall_seconds

#: Opening took 2 s, training 100, attribution of quality none, speed 60.
MARKS = Marks(started=10, opened=12, trained=112, attributed=112, timed=172)
STEP = StepTime(status="measured", profile_seconds=5.0)
MODULES = ModuleTime(status="measured", seconds=25.0)
FUSED = FusedTime(seconds=10.0)


def test_the_terminal_says_what_took_longest(accepted) -> None:
    wall = {"setup": 0.2, "training": 60.4, "step timing": 90.0, "all": 151.0}
    text = terminal_text(accepted.model_copy(update={"wall_seconds": wall}))
    assert "  Took 151 s (step timing 90, training 60).\n" in text
    assert wall_text({"all": 0.3}) == "0 s"


@pytest.fixture
def seeds(arm: Callable[..., Any]) -> Callable[..., list[SeedRun]]:
    """Two pairs: a baseline trains 10 s of which 2 go into predicting, a candidate 20 s; the first steps compile."""

    def make(first: float = 8.0) -> list[SeedRun]:
        def run(seconds: float, first_step: float) -> Any:
            timed = {"seconds": seconds + first_step, "first_step_seconds": first_step, "evaluation_seconds": 2.0}
            return arm(0.8, 0.7).model_copy(update=timed)

        return [
            SeedRun(seed=0, baseline=run(10, first), candidate=run(20, first)),
            SeedRun(seed=1, baseline=run(10, 0), candidate=run(20, 0)),
        ]

    return make


def measured(seeds: list[SeedRun], timed: bool = True) -> Measurements:
    """What a recipe's gate measured, as far as its time goes."""
    times = {"step_time": STEP, "module_time": MODULES, "fused_time": FUSED}
    return Measurements.model_construct(
        seeds=tuple(seeds), **(times if timed else {"step_time": StepTime(status="no_gpu")})
    )


def test_parts_of_a_run_add_up_and_tell_compilation_training_and_evaluation_apart(seeds) -> None:
    found = wall_seconds(MARKS, [measured(seeds())], compiled=True)
    assert found == pytest.approx(
        {
            "setup": 2, "compilation": 16, "training": 52, "evaluation": 8, "pairing": 24, "step timing": 20,
            "kernel attribution": 5, "fused BF16 timing": 10, "module timing": 25, "all": 162,
        }
    )  # fmt: skip
    assert list(found)[-1] == "all"
    assert sum(found.values()) == pytest.approx(2 * 162)


def test_baselines_that_recipes_share_count_once(seeds) -> None:
    found = wall_seconds(MARKS, [measured(seeds(0.0))] * 2, compiled=True)
    assert found["training"] + found["evaluation"] == pytest.approx(2 * 10 + 2 * 2 * 20)
    assert found["module timing"] == 50


def test_trainings_side_by_side_share_the_time_that_passed(seeds) -> None:
    marks = Marks(started=0, opened=0, trained=38, attributed=38, timed=38)
    found = wall_seconds(marks, [measured(seeds(), timed=False)], compiled=False)
    assert found == pytest.approx({"training": 38 * 68 / 76, "evaluation": 38 * 8 / 76, "all": 38})


def test_trainings_found_finished_took_no_time(seeds) -> None:
    reused = [s.model_copy(update={"baseline": s.baseline.model_copy(update={"reused": True})}) for s in seeds(0.0)]
    found = wall_seconds(MARKS, [measured(reused, timed=False)], compiled=True)
    assert found["training"] + found["evaluation"] == pytest.approx(40)


def test_a_real_run_says_how_it_spent_its_time(measure: Callable[..., Any]) -> None:
    report = measure(seeds=1, steps=10)
    wall = report.wall_seconds
    assert {"setup", "training", "evaluation", "all"} <= wall.keys()
    assert wall["training"] > 0
    assert wall["evaluation"] > 0
    parts = sum(s for part, s in wall.items() if part != "all")
    assert parts == pytest.approx(wall["all"], rel=1e-6)
    chart = wall_chart(report)
    assert chart is not None
    assert {row[0] for row in chart.table.rows} == wall.keys()
