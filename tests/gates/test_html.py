from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from narrowgate.gates.charts import Axis, histogram
from narrowgate.gates.html import render_html, slice_rows, worst_operands
from narrowgate.gates.measurements import Operand, RowEstimate, SliceQuality, StepTime, TaskQuality
from narrowgate.gates.plots_quality import loss_charts, quality_charts
from narrowgate.gates.plots_speed import speed_charts, wall_chart, waterfall
from narrowgate.gates.report import Report, Reuse, load_report

#: Elements that HTML never closes.
VOID = {"meta", "link", "wbr"}
CLASSES = (
    {"class": "gemm fp8", "baseline_ms": 12.0, "candidate_ms": 7.0},
    {"class": "cast", "baseline_ms": 0.0, "candidate_ms": 2.5},
    {"class": "communication", "baseline_ms": 0.0, "candidate_ms": 0.0},
    {"class": "optimizer", "baseline_ms": 3.0, "candidate_ms": 3.25},
)


class Page(HTMLParser):
    """Reads a page strictly: elements close in order, ids are unique, and every address is collected."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        assert len(found) == len(attrs), attrs
        if found.get("id"):
            self.ids.append(str(found["id"]))
        self.references += str(found.get("aria-labelledby") or "").split()
        self.addresses += [str(found[name]) for name in ("src", "href", "action", "xlink:href") if name in found]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


@pytest.fixture
def charted(accepted: Report) -> Report:
    step = accepted.evidence.step.model_copy(update={"attribution": CLASSES})
    return accepted.model_copy(
        update={
            "evidence": accepted.evidence.model_copy(update={"step": step}),
            "wall_seconds": {"setup": 1.0, "quality": 20.0, "all": 21.0},
        }
    )


def test_the_page_stands_alone_and_is_well_formed(charted: Report, rejected: Report) -> None:
    for report in (charted, rejected):
        text = render_html(report)
        page = Page(text)
        assert set(page.references) <= set(page.ids)
        assert all(address == "data:," for address in page.addresses)
        assert "script" not in page.tags
        assert "img" not in page.tags
        assert re.search(r'Content-Security-Policy" content="default-src \'none\'', text)
        assert not re.search(r"url\(|@import|https?://", re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL))


def test_the_verdict_and_its_reasons_come_first(rejected: Report) -> None:
    text = render_html(rejected)
    body = text[text.index("<body>") :]
    assert body.index("REJECT") < body.index("is worse by") < body.index("Gates") < body.index("<svg")
    for reason in rejected.reasons:
        assert reason.text.replace("'", "&#39;").replace(">", "&gt;").replace("`", "") in re.sub("</?code>", "", body)


def test_both_colour_schemes_and_narrow_screens_are_styled(accepted: Report) -> None:
    text = render_html(accepted)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "max-width: 560px" in text


def test_every_chart_says_what_it_shows_and_has_its_numbers_in_a_table(charted: Report) -> None:
    text = render_html(charted)
    figures = re.findall(r"<figure .*?</figure>", text, re.DOTALL)
    assert len(figures) == len(svgs(text)) == 2 + 2 + 1 + 1
    for figure in figures:
        (svg,) = svgs(figure)
        title, description = svg.find("title"), svg.find("desc")
        assert title.text
        assert len(description.text) > 10
        assert svg.get("role") == "img"
        assert svg.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        assert "<table" in figure


def test_marks_lie_within_their_chart(stored: Path) -> None:
    text = render_html(load_report(stored))
    for svg in svgs(text):
        _, _, width, height = map(float, svg.get("viewBox").split())
        for mark in svg.iter():
            for name, most in (
                ("cx", width),
                ("x", width),
                ("x1", width),
                ("cy", height),
                ("y", height),
                ("y2", height),
            ):
                if mark.get(name) is not None:
                    assert 0 <= float(mark.get(name)) <= most, ElementTree.tostring(mark)
    assert len(text) < 300_000


def test_texts_of_others_are_escaped(accepted: Report) -> None:
    bad = "<script>alert(1)</script>"
    recipe = accepted.recipe.model_copy(
        update={
            "name": bad,
            "description": bad,
            "resolved": {"recipe": bad},
            "plan": {"groups": [{"layers": 1, "fprop": bad, "dgrad": bad, "wgrad": bad, "example": bad}]},
        }
    )
    report = accepted.model_copy(update={"recipe": recipe, "data": {"name": bad}, "environment": {"gpu": bad}})
    text = render_html(report)
    Page(text)
    assert bad not in text
    assert text.count("&lt;script&gt;") >= 8


def test_seeds_interval_and_margin_stand_in_the_quality_chart(rejected: Report) -> None:
    ne, auc = quality_charts(rejected)
    assert ne.title == "NE, click: fail"
    dots = [m for m in ne.marks if m.kind == "circle"]
    assert len(dots) == 8
    assert dots[3].text.startswith("seed 3: +1.0030 % (baseline 0.83000, candidate 0.83832")
    margin = next(m for m in ne.marks if m.style == "threshold")
    assert all(m.at["cx"] > margin.at["x1"] for m in dots), "every seed lies past the margin"
    seeds, rows = [m for m in ne.marks if m.style == "interval"]
    assert margin.at["x1"] < seeds.at["x1"] < seeds.at["x2"]
    assert rows.at["x2"] < margin.at["x1"], "this run's rows show no loss"
    assert [row[0] for row in ne.table.rows[-2:]] == ["interval over seeds", "interval over rows"]
    assert auc.title == "AUC, click: pass"


def test_slices_and_groups_get_charts_and_a_table_of_their_own(measurements, make_report) -> None:
    m = measurements([1e-5] * 5)

    def quality(whole: TaskQuality, ne: float) -> TaskQuality:
        part = SliceQuality(log_loss=0.5, ne=ne, auc=0.7, calibration=1.0, rows=40)
        return whole.model_copy(update={"gauc": 0.6, "slices": {"new=1": part}})

    seeds = tuple(
        s.model_copy(
            update={
                arm: getattr(s, arm).model_copy(
                    update={"quality": {"click": quality(getattr(s, arm).quality["click"], ne)}}
                )
                for arm, ne in (("baseline", 0.8), ("candidate", 0.804 + 0.001 * s.seed))
            }
        )
        for s in m.seeds
    )
    report = make_report(m.model_copy(update={"seeds": seeds}))
    ne = next(gate for gate in report.gates if gate.name == "ne")
    sliced = ne.model_copy(update={"slice": "new=1", "status": "fail"})
    gauc = ne.model_copy(update={"name": "gauc", "metric": "GAUC loss", "threshold": 0.001})
    report = report.model_copy(update={"gates": (*report.gates, sliced, gauc)})
    _, _, part, groups = quality_charts(report)
    assert part.title == "NE, click, new=1: fail"
    assert [row[3] for row in part.table.rows[:5]] == [f"+{0.5 + 0.125 * i:.4f} %" for i in range(5)]
    assert groups.title.startswith("GAUC, click")
    assert groups.x_label == "GAUC loss (lower is better)"
    assert slice_rows(report) == [("click, new=1", "40", "0.80000", "0.80600", "+0.7500 %", "0.70000", "0.70000")]
    Page(render_html(report))


def test_many_seeds_stay_readable(measurements, make_report) -> None:
    (chart, _) = quality_charts(make_report(measurements(1e-5 * np.resize([1, -1], 300))))
    assert chart.height < 600
    assert sum(m.kind == "circle" for m in chart.marks) == 300
    assert not any(m.text == "seed 0" for m in chart.marks)


@pytest.mark.parametrize("seeds", [0, 1, 2])
def test_runs_that_decide_nothing_make_a_page_too(measurements, make_report, seeds: int) -> None:
    m = measurements([1e-5] * seeds, speed=StepTime(status="emulated")).model_copy(update={"rows": None})
    Page(render_html(make_report(m)))


def test_a_training_that_broke_is_drawn_as_far_as_it_went(measurements, make_report, arm) -> None:
    whole, broken = ((10, 0.7), (20, 0.6), (30, 0.5)), ((10, 0.8), (20, None))
    m = measurements([0.0] * 5)
    seeds = tuple(
        s.model_copy(
            update={
                "baseline": arm(0.8, 0.7, curve=whole),
                "candidate": arm(None, None, note="not finite", curve=broken, last=None, first_non_finite=15),
            }
        )
        for s in m.seeds
    )
    report = make_report(m.model_copy(update={"seeds": seeds, "rows": None}))
    assert report.verdict == "reject"
    assert loss_charts(report) == []
    longer = tuple(
        s.model_copy(update={"candidate": arm(None, None, curve=((10, 0.8), (20, 0.9), (30, None)))}) for s in seeds
    )
    curves, difference = loss_charts(make_report(m.model_copy(update={"seeds": longer, "rows": None})))
    assert curves.table.rows[-1] == ("30", "0.50000", "0.50000 to 0.50000", "-", "-")
    assert [row[:2] for row in difference.table.rows] == [("10", "0.10000"), ("20", "0.30000")]
    Page(render_html(report))


def test_a_first_step_far_above_the_rest_does_not_flatten_the_curve(measurements, make_report, arm) -> None:
    curve = ((1, 9.0), *((i, 0.7 - i / 1000) for i in range(2, 101)))
    seeds = tuple(
        s.model_copy(update=dict.fromkeys(("baseline", "candidate"), arm(0.8, 0.7, curve=curve)))
        for s in measurements([0.0] * 5).seeds
    )
    chart = loss_charts(make_report(measurements([0.0] * 5).model_copy(update={"seeds": seeds})))[0]
    assert "up to 9.00000, run out of the picture" in chart.summary
    assert max(float(t.label) for t in chart.y) < 1


def test_a_late_divergence_stays_in_the_picture(measurements, make_report, arm) -> None:
    calm = tuple((i, 0.7) for i in range(1, 101))
    wild = tuple((i, 0.7 if i < 90 else 1e4) for i in range(1, 101))
    seeds = tuple(
        s.model_copy(update={"baseline": arm(0.8, 0.7, curve=calm), "candidate": arm(0.8, 0.7, curve=wild)})
        for s in measurements([0.0] * 5).seeds
    )
    chart = loss_charts(make_report(measurements([0.0] * 5).model_copy(update={"seeds": seeds})))[0]
    assert "logarithmic" in chart.x_label
    assert any(t.label == "10000" for t in chart.y)


def test_a_threshold_out_of_reach_is_named_instead_of_squeezing_the_data(measurements, make_report, step_time) -> None:
    near = speed_charts(
        make_report(measurements([0.0] * 8, speed=step_time(np.log(1.1) + 0.02 * np.resize([1, -1], 20))))
    )
    far = speed_charts(
        make_report(measurements([0.0] * 8, speed=step_time(np.log(3.0) + 0.001 * np.resize([1, -1], 20))))
    )
    assert any(m.style == "threshold" for m in near[1].marks)
    assert not any(m.style == "threshold" for m in far[1].marks)
    assert "Out of the picture: no change, asked 1.05x." in far[1].summary
    assert sum(m.kind == "circle" for m in near[0].marks) == 80


def test_the_waterfall_leads_from_one_arm_to_the_other(charted: Report, accepted: Report) -> None:
    chart = waterfall(charted)
    bars = [m for m in chart.marks if m.kind == "rect"]
    assert [m.text for m in bars] == [
        "baseline: 15.000 ms",
        "gemm fp8: -5.000 ms",
        "cast: +2.500 ms",
        "optimizer: +0.250 ms",
        "candidate: 12.750 ms",
    ]
    assert [m.style for m in bars[1:4]] == ["bar better", "bar worse", "bar worse"]
    end = bars[3].at["x"] + bars[3].at["width"]
    assert end == pytest.approx(bars[4].at["x"] + bars[4].at["width"], abs=0.02), "the changes end at the candidate"
    assert chart.table.rows[-1] == ("all classes", "15.0000", "12.7500", "-2.2500")
    assert waterfall(accepted) is None


def test_the_runs_own_time_is_shown_by_part_where_it_is_known(charted: Report, accepted: Report) -> None:
    chart = wall_chart(charted)
    assert chart.summary == "21.0 s in all."
    assert [row[0] for row in chart.table.rows] == ["setup", "quality", "all"]
    assert wall_chart(accepted) is None


def test_every_result_of_every_level_can_be_read(stored: Path) -> None:
    text = render_html(load_report(stored))
    for name in ("step", "quality"):
        assert f"Results of level {name}" in text
    assert ">clocks.throttle</th>" in text.replace("<wbr>", "")
    assert "Results of level kernel" not in text, "nobody measured it"


def test_the_plan_names_every_layer_with_the_line_that_set_it(stored: Path) -> None:
    report = load_report(stored)
    text = unescape(render_html(report).replace("<wbr>", ""))
    lines = set()
    for layer in report.recipe.plan["layers"]:
        assert f'<th scope="row" class="name">{layer["name"]}<small>' in text
        places = [place for path in layer["paths"].values() for place in path["set_by"].values()]
        lines |= {f"{place['file']}:{place['line']}" for place in places if place["line"] is not None}
    assert lines
    for line in lines:
        assert line in text


def test_emulated_paths_are_marked_with_their_reason(accepted: Report) -> None:
    path = {"input": "fp8_e4m3", "weight": "fp8_e4m3", "native": False, "reason": "no FP8 here", "set_by": {}}
    plan = {
        "groups": [],
        "layers": [{"name": "a.b", "type": "Linear", "in_features": 8, "out_features": 4, "paths": {"fprop": path}}],
    }
    text = render_html(accepted.model_copy(update={"recipe": accepted.recipe.model_copy(update={"plan": plan})}))
    assert "emulated" in text
    assert "no FP8 here" in text
    assert "8 x 4" in text


@pytest.mark.parametrize("values", [[0.0], [1.0, 1.0], [-3e-7, 5e-7], [1e6, 2e6], [-5.0, 5.0]])
def test_axes_have_round_ticks_within_their_ends(values: list[float]) -> None:
    axis = Axis.over(values, 50, 450)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 12
    assert all(50 <= t.at <= 450 for t in ticks)
    for tick in ticks:
        assert axis(float(tick.label)) == pytest.approx(tick.at, abs=0.02), "the label says where the tick stands"
    assert all(50 <= axis(v) <= 450 for v in values)


@pytest.mark.parametrize("draw", [lambda g: [2.0] * 7, lambda g: list(g.normal(size=500)), lambda g: [1.0, 2.0]])
def test_a_histogram_counts_every_value_once(draw: Callable[[np.random.Generator], list[float]]) -> None:
    values = draw(np.random.default_rng(3))
    bins = histogram(values)
    assert sum(n for *_, n in bins) == len(values)
    for low, high, n in bins[:-1]:
        assert n == sum(low <= v < high for v in values)


def test_the_operands_that_lost_the_most_are_listed_once_with_their_worst_seed(measurements, make_report, arm) -> None:
    def operand(layer: str, saturated: float, step: int) -> Operand:
        return Operand(
            layer=layer, path="fprop", operand="input", format="fp8_e4m3", steps=3, elements=64, amax=9.0,
            saturated=saturated / 2, worst_saturated=saturated, worst_saturated_step=step, underflowed=0.0,
            worst_underflowed=0.0, worst_underflowed_step=1, clipped=0.0, worst_clipped=0.0, nonfinite=0.0,
            sqnr_db=31.5,
        )  # fmt: skip

    m = measurements([0.0] * 2)
    lost = [(operand("a", 0.01, 1), operand("b", 0.2, 1)), (operand("a", 0.05, 50),)]
    seeds = tuple(
        s.model_copy(update={"candidate": arm(0.8, 0.7, worst=own)}) for s, own in zip(m.seeds, lost, strict=True)
    )
    report = make_report(m.model_copy(update={"seeds": seeds}))
    assert [(row[0], row[3]) for row in worst_operands(report)] == [("b", "20 % at step 1"), ("a", "5 % at step 50")]
    assert "31.5 dB" in render_html(report)
    assert 'id="numerics"' not in render_html(make_report(m))


def test_reused_trainings_are_said(accepted: Report) -> None:
    reuse = Reuse(trainings=16, baseline=8, candidate=1, notes=("disk full",))
    assert "9 of 16 trainings were kept from an earlier run of the same content; disk full" in render_html(
        accepted.model_copy(update={"reuse": reuse})
    )


def test_an_infinite_row_interval_is_left_out(measurements, make_report) -> None:
    m = measurements([1e-5] * 8, row=RowEstimate(mean=0.0, error=None, df=0))
    chart = quality_charts(make_report(m))[0]
    assert sum(mark.style == "interval" for mark in chart.marks) == 1
