"""Quality by group and by slice, and the margins that tasks and slices have of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates.decision import decide
from narrowgate.gates.measurements import Measurements, PartEffect, PartQuality, RowEstimate
from narrowgate.gates.metrics import group_aucs
from narrowgate.gates.policy import BUILTIN_POLICIES, Margins, Policy, SliceMargins, load_policy
from narrowgate.gates.predictions import slice_masks
from narrowgate.precision.errors import NarrowgateError
from sklearn.metrics import roc_auc_score

STANDARD = BUILTIN_POLICIES["standard"]


@pytest.mark.parametrize("weighted", [False, True])
def test_group_aucs_are_those_of_scikit_learn_within_each_group(weighted: bool) -> None:
    rng = np.random.default_rng(0)
    n = 600
    groups = rng.integers(0, 60, n) * 7 - 50
    scores = np.round(rng.standard_normal(n), 1)  # with ties
    labels = (rng.random(n) < 0.3).astype(float)
    weights = rng.integers(1, 4, n).astype(float) if weighted else None
    found = group_aucs(scores, labels, weights, groups)
    aucs, masses = [], []
    for group in np.unique(groups):
        rows = groups == group
        if 0 < labels[rows].sum() < rows.sum():
            own = None if weights is None else weights[rows]
            aucs.append(roc_auc_score(labels[rows], scores[rows], sample_weight=own))
            masses.append(rows.sum() if own is None else own.sum())
    np.testing.assert_allclose(found.auc, aucs, rtol=1e-12)
    np.testing.assert_allclose(found.weight, masses)
    assert found.mean == pytest.approx(np.average(aucs, weights=masses))


def test_groups_of_one_class_have_no_gauc() -> None:
    assert group_aucs(np.ones(4), np.array([1.0, 1, 0, 0]), None, np.array([0, 0, 1, 1])).mean is None


def test_marks_become_slices_and_join_over_batches() -> None:
    parts = [{"new": torch.tensor([True, False]), "age": torch.tensor([3, 5])}] * 2
    found = slice_masks(parts)
    assert {name: mask.tolist() for name, mask in found.items()} == {
        "new": [True, False] * 2, "age=3": [True, False] * 2, "age=5": [False, True] * 2,
    }  # fmt: skip
    with pytest.raises(NarrowgateError, match="different slices in different batches"):
        slice_masks([parts[0], {}])
    with pytest.raises(NarrowgateError, match="slice 'user' has 500 values, expected at most 100"):
        slice_masks([{"user": torch.arange(500)}])


def test_a_run_measures_groups_and_slices_and_judges_those_the_policy_names(
    room: Path, measure: Callable[..., Any]
) -> None:
    (room / "mine.yaml").write_text(
        "policy: mine\nextends: loose\nmax_gauc_loss: 0.1\nslices:\n"
        "  market=*: {max_ne_increase: 10%, max_auc_loss: 0.1}\n"
    )
    report = measure("ranker:sliced", policy="mine.yaml")
    quality = report.measurements.seeds[0].candidate.quality["click"]
    assert set(quality.slices) == {"new", "market=0", "market=1", "market=2"}
    assert sum(quality.slices[f"market={i}"].rows for i in range(3)) == quality.rows == 2000
    assert 0.5 < quality.gauc < 1
    rows = report.measurements.rows
    assert rows.gauc["click"].error > 0
    assert rows.slices["market=2"].ne["click"].error > rows.ne["click"].error
    gates = {(gate.metric, gate.slice): gate for gate in report.gates if gate.task}
    assert set(gates) == {
        ("relative NE increase", None), ("AUC loss", None), ("GAUC loss", None),
        *((metric, f"market={i}") for metric in ("relative NE increase", "AUC loss") for i in range(3)),
    }  # fmt: skip
    assert gates["relative NE increase", "market=1"].threshold == 0.1
    assert gates["relative NE increase", "market=1"].status == "pass"
    shown = report.evidence.quality.results["click"]["slices"]["market=2"]
    assert shown["rows"] == quality.slices["market=2"].rows
    assert 0 < shown["candidate"]["ne"] < 2


def test_a_slice_that_nobody_marks_is_undecided_and_not_left_out(measurements) -> None:
    policy = Policy(**STANDARD.model_dump() | {"slices": {"market=9": {}}})
    decision = decide(measurements([0.0] * 8), policy)
    assert decision.verdict == "inconclusive"
    assert "NE on task click, slice market=9 cannot be judged: not measured" in decision.reasons[0].text


def test_a_task_has_margins_of_its_own(measurements) -> None:
    m: Measurements = measurements([4e-4 + x for x in (1e-5, -1e-5) * 4])
    assert decide(m, STANDARD).verdict == "accept"
    tight = Policy(**STANDARD.model_dump() | {"tasks": {"click": {"max_ne_increase": "0.02%"}}})
    decision = decide(m, tight)
    assert decision.verdict == "reject"
    assert "past the margin +0.0200 %" in decision.reasons[0].text
    other = Policy(**STANDARD.model_dump() | {"tasks": {"buy": {}}})
    assert decide(m, other).verdict == "inconclusive"


def test_a_slice_that_loses_rejects_though_the_whole_passes(measurements) -> None:
    m: Measurements = measurements([0.0] * 8)
    seeds = []
    for seed in m.seeds:
        arms = {}
        for name, worse in (("baseline", 1.0), ("candidate", 1.01)):
            run = getattr(seed, name)
            own = run.quality["click"]
            part = {"log_loss": own.log_loss, "ne": own.ne * worse, "auc": own.auc, "calibration": 1.0, "rows": 50}
            quality = own.model_validate(own.model_dump() | {"slices": {"new": part}})
            arms[name] = run.model_copy(update={"quality": {"click": quality}})
        seeds.append(seed.model_copy(update=arms))
    row = RowEstimate(mean=0.01, error=1e-6, df=100)
    assert m.rows is not None
    rows = m.rows.model_validate(m.rows.model_dump() | {"slices": {"new": {"ne": {"click": row.model_dump()}}}})
    effect = {"click": PartEffect(seeds=8, ne_increase=(0.01,) * 8, auc_loss=(0.0,) * 8)}
    part = PartQuality(kind="path", name="wgrad", layers=3, only=effect, without={})
    m = m.model_copy(update={"seeds": tuple(seeds), "rows": rows, "parts": (part,)})
    assert decide(m, STANDARD).verdict == "accept"
    policy = Policy(**STANDARD.model_dump() | {"slices": {"*": {}}})
    decision = decide(m, policy)
    assert decision.verdict == "reject"
    assert "NE on task click, slice new is worse by +1.0000 %" in decision.reasons[0].text
    assert (decision.reasons[0].gate, decision.reasons[0].slice) == ("ne", "new")
    assert "Most is lost" not in decision.reasons[0].text  # parts are measured over all rows


@pytest.mark.parametrize("name", ["age[18-25]", "os=?", "[!x]*", "plain"])
def test_a_slice_whose_name_looks_like_a_pattern_is_meant_by_its_name(measurements, name: str) -> None:
    policy = Policy(
        **STANDARD.model_dump() | {"max_ne_increase": 0.05, "slices": {"*": {}, name: {"max_ne_increase": 1e-6}}}
    )
    assert policy.judges(name)
    assert policy.margin("max_ne_increase", "click", name) == 1e-6
    m: Measurements = measurements([0.0] * 8)
    assert m.rows is not None
    row = RowEstimate(mean=0.0, error=1e-6, df=100).model_dump()
    rows = m.rows.model_validate(m.rows.model_dump() | {"slices": {name: {"ne": {"click": row}}}})
    only = Policy(**STANDARD.model_dump() | {"slices": {name: {"max_ne_increase": 1e-6}}})
    gates = [g for g in decide(m.model_copy(update={"rows": rows}), only).gates if g.slice is not None]
    assert {gate.slice for gate in gates} == {name}
    assert [gate.threshold for gate in gates if gate.name == "ne"] == [1e-6]


def test_the_narrower_wording_wins() -> None:
    policy = Policy(
        **STANDARD.model_dump()
        | {
            "tasks": {"click": Margins(max_auc_loss=0.002)},
            "slices": {"*": SliceMargins(max_auc_loss=0.003), "new*": SliceMargins(max_ne_increase=0.01)},
        }
    )
    assert policy.margin("max_auc_loss", "click") == 0.002
    assert policy.margin("max_auc_loss", "buy") == STANDARD.max_auc_loss
    assert policy.margin("max_auc_loss", "click", "new users") == 0.003
    assert policy.margin("max_ne_increase", "click", "new users") == 0.01
    assert policy.margin("max_gauc_loss", "click") is None


def test_goals_in_olives_wording_are_margins(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "policy: mine\nextends: standard\nne: {percent-max-degradation: 0.03}\nauc: {max-degradation: 0.001}\n"
        "speedup: {percent-min-improvement: 10}\ntasks:\n  click: {ne: {percent-max-degradation: 0.02%}}\n"
        "slices:\n  new: {auc: {max-degradation: 0.01}}\n"
    )
    mine = load_policy(path)
    assert mine.max_ne_increase == pytest.approx(0.0003)
    assert mine.max_auc_loss == 0.001
    assert mine.min_speedup == pytest.approx(1.1)
    assert mine.margin("max_ne_increase", "click") == pytest.approx(0.0002)
    assert mine.margin("max_auc_loss", "click", "new") == 0.01


@pytest.mark.parametrize(
    ("line", "place", "message"),
    [
        ("ne: {max-degradation: 0.01}", ":3:1: ne:", "found goal 'max-degradation'"),
        ("ne: {percent-max-degradation: much}", ":3:1: ne:", "found 'much', expected a percentage"),
        ("ne: 0.05", ":3:1: ne:", "expected one goal: {percent-max-degradation: NUMBER}"),
        ("auc: {max-degradations: 1}", ":3:1: auc:", "did you mean 'max-degradation'"),
        ("tasks: {click: {max_ne_increse: 1}}", ":3:17: tasks.click.max_ne_increse:", "did you mean 'max_ne_increase'"),
        ("slices: {new: {gauc: {max-degradation: 0.1}}}", ":3:16: slices.new.gauc:", "ne, auc can be judged there"),
        (
            "tasks: {click: {speedup: {percent-min-improvement: 5}}}",
            ":3:17: tasks.click.speedup:",
            "ne, auc, gauc can be judged there",
        ),
        ("max_auc_loss: 0.1\nauc: {max-degradation: 0.1}", ":4:1: auc:", "say the same; write one of them"),
    ],
)
def test_a_goal_that_does_not_fit_is_one_line_with_its_place(
    tmp_path: Path, line: str, place: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"policy: mine\nextends: standard\n{line}\n")
    with pytest.raises(NarrowgateError) as caught:
        load_policy(path)
    assert str(caught.value).startswith(f"{path}{place}")
    assert message in str(caught.value)


def test_a_policy_of_tasks_that_the_model_has_not_is_refused_before_training(
    room: Path, measure: Callable[..., Any]
) -> None:
    (room / "mine.yaml").write_text("policy: mine\nextends: loose\ntasks: {clicks: {max_auc_loss: 0.1}}\n")
    with pytest.raises(NarrowgateError, match="tasks: found 'clicks', expected click; did you mean 'click'"):
        measure(policy="mine.yaml")
