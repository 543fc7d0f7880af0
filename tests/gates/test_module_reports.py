"""Modules timed alone, as reports and comparisons show them."""

from __future__ import annotations

import json

import pytest
from narrowgate.gates.compare import compare
from narrowgate.gates.html import render_html
from narrowgate.gates.measurements import (
    KernelClass,
)
from narrowgate.gates.plots_modules import module_chart
from narrowgate.gates.render import render_report, terminal_text
from narrowgate.gates.report import Report, report_schema

from .test_module_time import left, run, timed


@pytest.fixture
def report(measurements, make_report) -> Report:
    """A report whose modules were timed but for one, and whose steps were profiled."""
    modules = timed(
        run("tower.up", 3.0, 2.0, calls=2, share=0.7),
        run("tower.down", 1.0, 0.9, share=0.2),
        left_out=[left("head | x", 0.1)],
    )
    m = measurements([0.0] * 8, module_time=modules)
    kernels = tuple(
        KernelClass(name=name, baseline_ms=before, candidate_ms=after)
        for name, before, after in (
            ("gemm", 8.0, 1.0),
            ("cast", 0.0, 1.5),
            ("amax", 0.0, 0.25),
            ("transpose", 0.5, 0.25),
        )
    )
    return make_report(m.model_copy(update={"step_time": m.step_time.model_copy(update={"kernels": kernels})}))


def test_the_level_of_modules_has_a_row_for_each_and_its_own_baseline_and_scope(report: Report) -> None:
    level = report.evidence.module
    assert level.status == "measured"
    assert "same region" in level.baseline
    assert "random tensors" in level.scope
    first, second = level.results["modules"]
    assert (first["name"], first["type"], first["mkn"], first["calls"]) == ("tower.up", "Linear", [[64, 32, 16]], 2)
    assert (first["baseline_ms"], first["candidate_ms"]) == pytest.approx((3.0, 2.0))
    assert first["ci_low"] < first["speedup"] < first["ci_high"]
    assert second["speedup"] == pytest.approx(1 / 0.9)
    total = level.results["total"]
    assert (total["baseline_ms"], total["candidate_ms"]) == pytest.approx((7.0, 4.9))
    gate = next(g for g in report.gates if g.name == "module_time")
    assert (gate.measured, gate.ci_low, gate.ci_high) == pytest.approx(
        (total["speedup"], total["ci_low"], total["ci_high"])
    )
    assert level.results["covered"] == pytest.approx(0.9)
    (out,) = level.results["left_out"]
    assert (out["name"], out["share"], out["why"]) == ("head | x", 0.1, "the budget of 60 s ended")


def test_casting_overhead_stands_beside_its_bar_and_says_what_it_counts(report: Report) -> None:
    casting = report.evidence.step.results["casting_overhead"]
    assert casting["ms"] == pytest.approx(2.0)
    assert casting["share"] == pytest.approx(2.0 / 10.0)
    assert casting["bar"] == 0.10
    assert casting["by_class_ms"] == {"cast": 1.5, "amax": 0.25, "transpose": 0.25}
    assert casting["baseline_ms"] == 0.5
    assert "upper bound" in casting["measured"]
    assert report.verdict == "accept", "the bar is no gate"


def test_every_file_shows_modules_and_casting(report: Report) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    files = report.files()
    jsonschema.validate(json.loads(files["report.json"]), report_schema())
    markdown = render_report(report)
    row = "| tower.up | Linear | 64 x 32 x 16 | 2 | 70.0 % | 3.0000 ms | 2.0000 ms | ["
    assert row in markdown
    assert "| head \\| x | Linear | 64 x 32 x 16 | 1 | 10.0 % | - | - | the budget of 60 s ended |" in markdown
    assert "| all, by calls |" in markdown
    assert "- casting overhead: at most 20.0 % of the candidate's step (2.000 ms" in markdown
    assert "- modules not timed, 10.0 %" in markdown
    page = render_html(report)
    assert "Modules alone" in page
    assert '<td class="right">3.0000 ms</td>' in page
    text = terminal_text(report)
    assert "module_time" in text
    assert "the bar is 10 %" in text
    assert 'name="module_time"' in files["junit.xml"]


def test_the_chart_shows_a_steps_calls_of_both_arms_within_its_frame(report: Report) -> None:
    chart = module_chart(report)
    assert chart is not None
    assert chart.title == "Modules alone: pass"
    assert "7.000 ms baseline, 4.900 ms candidate" in chart.summary
    bars = [mark for mark in chart.marks if mark.kind == "rect"]
    assert [bar.style for bar in bars] == ["bar baseline", "bar candidate"] * 2
    assert bars[0].at["width"] / bars[1].at["width"] == pytest.approx(1.5, rel=0.01)
    assert bars[0].text == "tower.up, baseline: 6.0000 ms a step"
    assert all(mark.at.get("y", 0) <= chart.height for mark in chart.marks)
    assert len(chart.table.rows) == 2 + 1 + 1, "what was left out and the sum stand in the table too"


def test_compare_sets_modules_side_by_side(report: Report, accepted: Report) -> None:
    found = compare(report, report)
    assert [(m.name, m.a, m.b) for m in found.modules] == [
        ("tower.up", pytest.approx(1.5), pytest.approx(1.5)),
        ("tower.down", pytest.approx(1 / 0.9), pytest.approx(1 / 0.9)),
    ]
    assert [(m.name, m.b) for m in compare(report, accepted).modules] == [("tower.up", None), ("tower.down", None)]
