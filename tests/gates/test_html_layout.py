"""How the page lies on a screen: what a look at it in a browser found, kept from coming back."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from narrowgate.gates import html
from narrowgate.gates.charts import WIDTH, Axis, shortened, text_width
from narrowgate.gates.html import breakable, columns_of_numbers, marked, render_html
from narrowgate.gates.report import Report, load_report

#: DejaVu Sans's advances in thousandths of the size, from the font's own table; the widest of the usual sans-serifs.
DEJAVU = {
    **dict.fromkeys("'", 275), **dict.fromkeys("ijl", 278), **dict.fromkeys("IJ", 295), **dict.fromkeys(" .,", 318),
    **dict.fromkeys(":;/", 337), "f": 352, "-": 361, **dict.fromkeys("[]()", 390), "t": 392, "r": 411, "_": 500,
    "s": 521, "z": 525, "c": 550, "L": 557, "F": 575, "k": 579, **dict.fromkeys("vxy", 592), "P": 603,
    **dict.fromkeys("TYoae", 615), **dict.fromkeys("EhnubdgpqS0123456789", 636), "K": 656,
    **dict.fromkeys("AVXZBRC", 698),
    **dict.fromkeys("UNH", 752), **dict.fromkeys("DGOQ", 787), "w": 818, **dict.fromkeys("+=<>", 838), "M": 863,
    "%": 950, "m": 974, "W": 989, "…": 1000,
}  # fmt: skip
#: The size of a chart's text on a narrow screen, in the chart's units.
SIZE = 14


def width(text: str) -> float:
    return SIZE * sum(DEJAVU[char] for char in text) / 1000


def texts(text: str) -> list[list[tuple[float, float, float, str]]]:
    """Return each chart's texts as (left, right, base line, text)."""
    found = []
    for svg in re.findall(r"<svg .*?</svg>", text, re.DOTALL):
        boxes = []
        for element in ElementTree.fromstring(svg).iter("text"):
            at, wide = float(element.get("x")), width(element.text)
            left = at - {"start": 0, "middle": wide / 2, "end": wide}[element.get("text-anchor")]
            boxes.append((left, left + wide, float(element.get("y")), element.text))
        found.append(boxes)
    return found


def check_texts(page: str) -> None:
    charts = texts(page)
    assert charts
    for boxes in charts:
        for left, right, _, text in boxes:
            assert left >= -0.5, f"{text!r} is cut at the left"
            assert right <= WIDTH + 0.5, f"{text!r} is cut at the right"
        for (left, right, y, text), (other_left, other_right, other_y, other) in itertools.combinations(boxes, 2):
            if abs(y - other_y) < 10:
                assert right <= other_left + 0.5 or other_right <= left + 0.5, f"{text!r} lies on {other!r}"


def module(name: str, calls: int, baseline_ms: float, candidate_ms: float) -> dict[str, Any]:
    ratio = baseline_ms / candidate_ms
    return {
        "name": name, "type": "Linear", "mkn": [[2048, 1024, 8192]], "calls": calls, "share": 0.5,
        "baseline_ms": baseline_ms, "candidate_ms": candidate_ms, "speedup": ratio, "ci_low": ratio, "ci_high": ratio,
    }  # fmt: skip


def grown(report: Report, scale: float) -> Report:
    """A report with long names, and with times ``scale`` times as long as usual."""
    long = "sparse_arch.embedding_bag_collection.interaction_tower.WIDE_CROSS_MEMORY_MIXER.layers.11.projection_mmmm"
    modules = [module(long, 128, 0.31 * scale, 1e-4 * scale), module("top", 1, 0.1 * scale, 0.3 * scale)]
    classes = [
        {"class": "communication overlap", "baseline_ms": 12.0 * scale, "candidate_ms": 7.0 * scale},
        {"class": "cast", "baseline_ms": 0.0, "candidate_ms": 2.5 * scale},
    ]
    evidence = report.evidence.model_copy(
        update={
            "step": report.evidence.step.model_copy(update={"attribution": classes}),
            "module": report.evidence.module.model_copy(
                update={"results": {"modules": modules, "total": modules[1], "covered": 1.0}}
            ),
        }
    )
    wall = {
        "kernel attribution": 1.7 * scale,
        "a part of the run with a name longer than all": 60.0 * scale,
        "all": 80.0 * scale,
    }
    return report.model_copy(update={"evidence": evidence, "wall_seconds": wall})


def test_no_text_of_a_chart_is_cut_or_lies_on_another(stored: Path) -> None:
    check_texts(render_html(load_report(stored)))


@pytest.mark.parametrize("scale", [1e-3, 0.03, 1.0, 7.0, 90.0, 3e3])
def test_long_names_and_large_times_stay_within_their_charts(rejected: Report, scale: float) -> None:
    page = render_html(grown(rejected, scale))
    check_texts(page)
    assert ">kernel attribution<" in page[page.index("<svg") :], "there is room for it"


@pytest.mark.parametrize(
    "text", ["fused BF16 timing", "layers.0.interaction.cross_up", "+14.216 ms", "WWW mmm %%%", "…"]
)
def test_no_text_is_wider_than_it_is_taken_for(text: str) -> None:
    assert width(text) <= text_width(text) <= 1.4 * width(text)


def test_a_long_name_loses_its_beginning_and_no_more_than_it_must() -> None:
    name = "tower.layers.11.interaction.cross_up"
    assert shortened(name, 1000) == name
    cut = shortened(name, 150)
    assert cut.startswith("…")
    assert name.endswith(cut[1:])
    assert text_width(cut) <= 150 < text_width(f"…{name[-len(cut) :]}")


@pytest.mark.parametrize("high", [1.0, 9.9, 123.0, 4e4, 7e6])
def test_labels_of_ticks_keep_apart_and_stand_at_their_values(high: float) -> None:
    ticks = Axis(0.0, high, 180.0, 400.0).apart(5, " ms")
    assert len(ticks) >= 1
    assert [float(t.label.removesuffix(" ms")) for t in ticks] == pytest.approx(
        [(t.at - 180) / 220 * high for t in ticks], abs=high / 1e4
    )
    for before, after in itertools.pairwise(ticks):
        assert before.written_at + width(before.label) / 2 < after.written_at - width(after.label) / 2


def luminance(colour: str) -> float:
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(a * b for a, b in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_their_ground(scheme: int) -> None:
    css = (Path(html.__file__).parent / "report.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", re.findall(r":root \{(.*?)\}", css, re.DOTALL)[scheme]))
    grounds = ["page", "soft", "pass-soft", "fail-soft", "undecided-soft"]
    written = [(text, ground) for text in ("text", "quiet") for ground in grounds]
    written += [(status, f"{status}-soft") for status in ("pass", "fail", "undecided")]
    written += [("baseline", "page"), ("baseline", "soft")]
    for text, ground in written:
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mark in ("baseline", "candidate", "other", "pass", "fail"):
        assert contrast(colours[mark], colours["page"]) >= 3, mark


def test_the_contrast_ratio_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_columns_of_numbers_are_aligned_at_the_right(rejected: Report) -> None:
    rows = [("a.b", "1.25 ms", "-", "2 x 4", "1e-05"), ("c", "-0.5 ms", "", "8", "12")]
    assert columns_of_numbers(rows) == {1, 4}, "a column that is missing throughout has nothing to align"
    assert columns_of_numbers([]) == set()
    text = render_html(grown(rejected, 1.0))
    seeds = text[text.index("The numbers") :]
    assert '<th scope="col" class="right">baseline</th>' in seeds
    assert re.search(r'<th scope="row">seed.0</th><td class="right">0\.\d{6}</td>', seeds)


def test_names_may_break_behind_dots_and_nowhere_in_a_number() -> None:
    assert breakable("layers.0.cross_up") == "layers.<wbr>0.<wbr>cross_<wbr>up"
    assert breakable("0.3632x") == "0.3632x"
    assert breakable("interval over rows") == "interval\u00a0over\u00a0rows"
    assert breakable("<b>.c") == "&lt;b&gt;.<wbr>c"


def test_commands_in_texts_are_marked_as_code(rejected: Report) -> None:
    assert marked("run `a <b>`, then `c`") == "run <code>a &lt;b&gt;</code>, then <code>c</code>"
    assert marked("one ` alone") == "one ` alone"
    reason = rejected.reasons[0].model_copy(update={"text": "Ask `narrowgate doctor`."})
    assert "<li>Ask <code>narrowgate doctor</code>.</li>" in render_html(
        rejected.model_copy(update={"reasons": (reason,)})
    )


def test_both_arms_of_several_ranks_stand_in_one_table(rejected: Report) -> None:
    def arm(step_ms: float) -> dict[str, Any]:
        return {
            "payload": {"all_gather": "fp8_e4m3", "reduce_scatter": "bf16"}, "step_ms": step_ms, "local_ms": 1.0,
            "exposed_ms": None, "alone_ms": 2.0, "scaling_ratio": 0.5, "bytes": {"all_gather": {"uint8": 338202}},
        }  # fmt: skip

    results = {
        "ranks": 2, "transport": "nccl", "times": "measured", "payload_ratio": {"all_gather": 0.5},
        "baseline": arm(4.0), "candidate": arm(3.25),
    }  # fmt: skip
    level = rejected.evidence.distributed.model_copy(update={"status": "measured", "results": results})
    report = rejected.model_copy(update={"evidence": rejected.evidence.model_copy(update={"distributed": level})})
    text = render_html(report)
    section = text[text.index('id="ranks"') :]
    assert "2 ranks over nccl, times measured; the candidate gathers 0.500 of the baseline&#39;s bytes." in section
    assert '<td class="right">4.000 ms</td>' in section
    assert '<td class="right">3.250 ms</td>' in section
    assert text.count("3.250 ms") == 1, "told once"
    assert 'id="ranks"' not in render_html(rejected)


def test_what_the_table_of_operands_says_is_not_listed_before(stored: Path, rejected: Report) -> None:
    text = render_html(load_report(stored))
    assert "saturation and underflow" not in text
    assert re.search(r"Counted in \d+ steps a seed\.", text)
    assert "saturation and underflow: not counted" in render_html(rejected), "without a table the reason is said"
