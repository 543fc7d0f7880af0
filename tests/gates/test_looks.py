"""Looks declared ahead: levels against the literature, error rates through the decision, and runs that stop early."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from narrowgate.gates.decision import accept_p, decide, decide_family
from narrowgate.gates.looks import level_at, look_levels, overall_p, planned
from narrowgate.gates.measurements import Measurements
from narrowgate.gates.policy import BUILTIN_POLICIES, load_policy
from narrowgate.precision.errors import NarrowgateError
from pydantic import ValidationError
from scipy import stats

STANDARD = BUILTIN_POLICIES["standard"]
MARGIN = STANDARD.max_ne_increase
LOOKS = (5, 8, 12)


@pytest.mark.parametrize(
    ("looks", "boundaries"),
    [
        # One-sided 2.5 %, equal steps: the published boundaries of Lan and DeMets' O'Brien-Fleming-like function,
        # for as many seeds that t is normal.
        ((5000, 10_000), [2.963, 1.969]),
        ((2000, 4000, 6000, 8000, 10_000), [4.877, 3.357, 2.680, 2.290, 2.031]),
    ],
)
def test_levels_are_the_published_ones(looks: tuple[int, ...], boundaries: list[float]) -> None:
    own = [stats.norm.isf(level) for level in look_levels(looks, 0.025)]
    assert own == pytest.approx(boundaries, abs=0.03)


def test_one_look_spends_everything_and_the_last_of_many_nearly_so() -> None:
    assert look_levels((8,), 0.05) == (0.05,)
    assert level_at((), 8, 0.05) == 0.05
    levels = look_levels(LOOKS, 0.05)
    assert list(levels) == sorted(levels)
    assert 0.04 < levels[-1] < 0.05


def test_the_p_value_over_all_looks_reaches_alpha_where_the_look_does() -> None:
    for seeds in LOOKS:
        level = level_at(LOOKS, seeds, 0.05)
        assert overall_p(LOOKS, seeds, level) == pytest.approx(0.05, rel=5e-3)
        assert overall_p(LOOKS, seeds, level / 2) < 0.05
    assert overall_p((), 8, 0.03) == 0.03
    assert overall_p(LOOKS, 5, 0.0) == 0.0
    assert overall_p(LOOKS, 5, 1.0) == 1.0


def test_looks_follow_the_seeds_asked_for() -> None:
    assert planned(LOOKS, 12) == (5, 8, 12)
    assert planned(LOOKS, 8) == (5, 8)
    assert planned(LOOKS, 5) == planned((), 12) == ()


@pytest.mark.parametrize("side", ["accepts", "rejects"])
def test_stopping_at_declared_looks_keeps_the_level(side: str) -> None:
    """The truth lies exactly at the margin; t bounds at each look's level, as the judges take them."""
    draws = 40_000
    rng = np.random.default_rng(3)
    differences = rng.standard_normal((draws, LOOKS[-1]))
    crossed = np.zeros(draws, dtype=bool)
    for look, level in zip(LOOKS, look_levels(LOOKS, STANDARD.alpha), strict=True):
        seen = differences[:, :look]
        t = seen.mean(1) / (seen.std(1, ddof=1) / look**0.5)
        crossed |= t < stats.t.ppf(level, look - 1) if side == "accepts" else t > stats.t.isf(level, look - 1)
    assert crossed.mean() == pytest.approx(STANDARD.alpha, abs=4 * (0.05 * 0.95 / draws) ** 0.5)


def test_the_decision_takes_the_bounds_of_those_levels(measurements) -> None:
    rng, draws, wrong, peeked = np.random.default_rng(4), 500, 0, 0
    for _ in range(draws):
        differences = MARGIN + 3e-4 * rng.standard_normal(LOOKS[-1])

        def passes(looks: tuple[int, ...], differences=differences) -> bool:
            found = (decide(measurements(differences[:n], looks=looks), STANDARD).gates for n in LOOKS)
            return any(next(g for g in gates if g.name == "ne").status == "pass" for gates in found)

        wrong += passes(LOOKS)
        peeked += passes(())
    assert wrong / draws < 0.05 + 4 * (0.05 * 0.95 / draws) ** 0.5
    assert peeked / draws > 0.08  # what spending is for


def test_an_early_look_needs_more_than_the_last(measurements) -> None:
    differences = MARGIN - 3e-4 + 2e-4 * np.resize([1, -1], 5)
    early = decide(measurements(differences, looks=LOOKS), STANDARD)
    alone = decide(measurements(differences), STANDARD)
    assert [next(g for g in d.gates if g.name == "ne").status for d in (early, alone)] == ["undecided", "pass"]


def test_a_family_of_recipes_may_look_too(measurements) -> None:
    good = measurements([0.0] * 8, looks=LOOKS)
    assert [d.verdict for d in decide_family([good, good], STANDARD)] == ["accept", "accept"]
    assert accept_p(measurements(MARGIN - 2e-4 + 2e-4 * np.resize([1, -1], 8), looks=LOOKS), STANDARD) > accept_p(
        measurements(MARGIN - 2e-4 + 2e-4 * np.resize([1, -1], 8)), STANDARD
    )


def test_measurements_of_no_declared_look_are_refused(measurements) -> None:
    with pytest.raises(ValidationError, match="7 seeds were measured, and looks were declared at"):
        Measurements.model_validate(measurements([0.0] * 7).model_dump() | {"looks": LOOKS})


@pytest.mark.parametrize("looks", ["[4, 8]", "[8, 5]", "[5, 5, 8]", "[5, 7]"])
def test_looks_that_do_not_fit_the_policy_are_refused(tmp_path: Path, looks: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"policy: mine\nextends: standard\nlooks: {looks}\n")
    with pytest.raises(NarrowgateError, match="expected increasing numbers of seeds from min_seeds 5 on"):
        load_policy(path)


def test_a_run_stops_at_the_look_that_decides(room: Path, narrowgate) -> None:
    (room / "patient.yaml").write_text("policy: patient\nextends: loose\nseeds: 8\nlooks: [5, 8]\n")
    code, _, err = narrowgate(
        "gate", "bf16", "--task", "ranker:good", "--steps", "20", "--policy", "patient.yaml", "--device", "cpu"
    )
    assert code == 3
    assert "up to the look at 5 of at most 8 seeds" in err
    report = json.loads((room / "reports" / "report.json").read_text())
    assert report["statistics"]["n"] == len(report["measurements"]["seeds"]) == 5
    assert (report["statistics"]["looks"], report["statistics"]["look_seeds"]) == (2, [5, 8])
    assert report["statistics"]["seed_alpha"] < 0.05
