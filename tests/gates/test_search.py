"""The driver of ``search``, by a measurer that knows the truth and the real decision function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates.decision import decide_family
from narrowgate.gates.measurements import Measurements, PartEffect, StepTime
from narrowgate.gates.policy import BUILTIN_POLICIES
from narrowgate.gates.report import RecipeFacts, Report, decided
from narrowgate.gates.search import Found, Limits, Screened, search
from narrowgate.gates.search_record import SCHEMA_FILE, search_schema
from narrowgate.gates.search_report import Facts, search_dict, search_text, write_search
from narrowgate.gates.search_store import Member, SearchStore, as_family
from narrowgate.precision.capability import NAMED_DEVICES
from narrowgate.recipes import Recipe, load_recipe, resolve
from narrowgate.recipes.search import Start, open_start
from torch import nn

STANDARD = BUILTIN_POLICIES["standard"]
MARGIN = STANDARD.max_ne_increase


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64)}) for _ in "ab")
        self.head = nn.Linear(64, 16)


@pytest.fixture(scope="module")
def tower() -> Tower:
    with torch.device("meta"):
        return Tower()


def start_of(name: str, model: nn.Module) -> Start:
    return open_start(load_recipe(name), model, device=NAMED_DEVICES["cpu"], rows=512, by="flops")


class Truth:
    """Measures from a true loss, with noise; a fake gate decides with the real function, at a speedup that passes."""

    def __init__(
        self,
        loss: Callable[[Recipe], float],
        measurements: Callable[..., Measurements],
        make_report: Callable[..., Report],
        rng: np.random.Generator,
        *,
        noise: float = 1e-5,
        screen_seeds: int = 3,
        reuse_screens: bool = False,
        speed: StepTime | None = None,
    ) -> None:
        self.loss, self.measurements, self.make_report, self.rng = loss, measurements, make_report, rng
        self.noise, self.screen_seeds, self.reuse, self.speed = noise, screen_seeds, reuse_screens, speed
        self.screened: dict[str, list[float]] = {}
        self.calls: list[int] = []
        self.judged: list[Recipe] = []

    def draw(self, recipe: Recipe, seeds: int) -> list[float]:
        return (self.loss(recipe) * MARGIN + self.noise * self.rng.standard_normal(seeds)).tolist()

    def screen(self, recipes: Sequence[Recipe], text: str) -> list[Screened]:
        self.calls.append(len(recipes))
        found = []
        for recipe in recipes:
            ne = self.screened.setdefault(recipe.hash(), self.draw(recipe, self.screen_seeds))
            effect = PartEffect(seeds=len(ne), ne_increase=tuple(ne), auc_loss=(0.0,) * len(ne))
            found.append(Screened(seeds=len(ne), effects={"click": effect}))
        return found

    def gate(self, recipes: Sequence[Recipe]) -> list[Report]:
        self.judged += recipes
        draws = [self.screened[r.hash()] if self.reuse else self.draw(r, 8) for r in recipes]
        measured = [self.measurements(ne, speed=self.speed) for ne in draws]
        reports = []
        for recipe, m, decision in zip(recipes, measured, decide_family(measured, STANDARD), strict=True):
            facts = RecipeFacts(
                name=recipe.name, description="", hash=recipe.hash(), backend="native", resolved={}, plan={}
            )
            report = self.make_report(m, recipe=facts)
            reports.append(decided(report, decision, STANDARD))
        return reports

    def reserve(self, recipes: int) -> float:
        return 100.0


@pytest.fixture
def truth(measurements, make_report) -> Callable[..., Truth]:
    def make(loss: Callable[[Recipe], float], seed: int = 0, **more: Any) -> Truth:
        return Truth(loss, measurements, make_report, np.random.default_rng(seed), **more)

    return make


def costing(model: nn.Module, costs: dict[str, float]) -> Callable[[Recipe], float]:
    """Margins that a recipe loses: the cost of each layer in low precision, 0.7 of it with a BF16 weight gradient."""

    def loss(recipe: Recipe) -> float:
        plan = resolve(recipe, model, device=NAMED_DEVICES["cpu"])
        return sum(costs.get(e.name, 0.0) * (0.7 if e.config.wgrad.high_precision else 1.0) for e in plan.lowered)

    return loss


@pytest.mark.parametrize("sensitive", ["embed", "blocks.0.up", "blocks.1.down", "head"])
def test_a_planted_sensitive_layer_is_found_and_left_in_bf16(tower: Tower, truth, sensitive: str) -> None:
    measurer = truth(costing(tower, {sensitive: 6.0, "blocks.0.down": 0.05}))
    found = search([start_of("fp8-row", tower)], measurer, STANDARD, Limits(candidates=20))
    assert found.verdict == "accept"
    best = found.finalists[0].recipe
    plan = resolve(best, tower, device=NAMED_DEVICES["cpu"])
    assert [layer.name for layer in plan.layers if layer.config.high_precision] == [sensitive]
    assert found.reports[0].verdict == "accept"
    assert found.reports[0].recipe.name == best.name
    # The start itself lost too much, and so never reached the full gate.
    assert all(recipe.hash() != load_recipe("fp8-row").hash() for recipe in measurer.judged)


def test_a_start_that_passes_is_gated_without_further_screens(tower: Tower, truth) -> None:
    measurer = truth(costing(tower, {}))
    found = search([start_of("fp8-row", tower)], measurer, STANDARD, Limits())
    assert measurer.calls == [1]
    assert [recipe.hash() for recipe in measurer.judged] == [load_recipe("fp8-row").hash()]
    assert found.verdict == "accept"
    assert found.ended == "nothing that could still be worth more is left to try"


def test_starts_are_screened_together_and_those_that_cannot_win_are_not_relaxed(tower: Tower, truth) -> None:
    """FP8 passes; FP4, worth more, does not: it alone is gone on with."""
    fine = {load_recipe(name).hash() for name in ("fp8-row", "fp8-tensor")}
    measurer = truth(lambda recipe: 0.0 if recipe.hash() in fine else 9.0)
    starts = [start_of(name, tower) for name in ("fp8-row", "fp8-tensor", "nvfp4")]
    found = search(starts, measurer, STANDARD, Limits(candidates=8, finalists=2))
    assert measurer.calls[0] == 3
    assert {c.base for c in found.candidates[3:]} == {"nvfp4"}
    assert {c.base for c in found.finalists} == {"fp8-row", "fp8-tensor"}


def test_of_two_layers_none_is_screened_twice(truth) -> None:
    with torch.device("meta"):
        pair = nn.ModuleDict({"body": nn.Linear(64, 64), "head": nn.Linear(64, 64)})
    found = search([start_of("fp8-row", pair)], truth(costing(pair, {"body": 4.0})), STANDARD, Limits())
    names = [candidate.recipe.name for candidate in found.candidates]
    assert len(set(names)) == len(names)
    assert found.finalists[0].levels == {"body": "bf16"}


def test_a_start_that_is_worth_less_than_what_passed_is_left_at_that(tower: Tower, truth) -> None:
    lossy = load_recipe("gem-fp8").hash()
    measurer = truth(lambda recipe: 9.0 if recipe.hash() == lossy else 0.0)
    starts = [start_of(name, tower) for name in ("gem-fp8", "fp8-row", "fp8-tensor")]
    assert starts[0].worth < starts[1].worth
    search(starts, measurer, STANDARD, Limits(finalists=2))
    assert measurer.calls == [3]


@pytest.mark.parametrize("budget", [1, 2, 5, 9])
def test_no_more_candidates_than_the_budget_are_screened(tower: Tower, truth, budget: int) -> None:
    starts = [start_of(name, tower) for name in ("fp8-row", "fp8-tensor", "fp8-block")]
    found = search(starts, truth(lambda recipe: 9.0), STANDARD, Limits(candidates=budget))
    assert sum(not candidate.probe for candidate in found.candidates) <= budget
    assert len(found.skipped) == max(0, 3 - budget)
    # Nothing promises: what lost least is judged all the same, and is no accept.
    assert len(found.reports) == 1
    assert found.verdict == "reject"


def test_screening_ends_while_the_full_gate_still_fits(tower: Tower, truth) -> None:
    ticks = iter(range(0, 10_000, 60))
    measurer = truth(lambda recipe: 9.0)
    found = search(
        [start_of("fp8-row", tower)], measurer, STANDARD, Limits(seconds=300.0), clock=lambda: float(next(ticks))
    )
    assert found.ended == "the full gate would not fit into the 5 minutes otherwise"
    # At 60, 120 and 180 s the 100 s of the full gate still fit.
    assert len(measurer.calls) == 4
    assert len(found.reports) == 1


def test_the_same_measurements_lead_through_the_same_candidates(tower: Tower, truth) -> None:
    costs = costing(tower, {"blocks.0.up": 3.0, "head": 1.0})
    names = [
        [c.recipe.name for c in search([start_of("gem-fp8", tower)], truth(costs), STANDARD, Limits()).candidates]
        for _ in range(2)
    ]
    assert names[0] == names[1]
    assert len(set(names[0])) == len(names[0])


def test_what_was_found_is_told_in_files_and_text(tower: Tower, truth, tmp_path) -> None:
    found = search([start_of("fp8-row", tower)], truth(costing(tower, {"head": 6.0})), STANDARD, Limits(finalists=1))
    found.skipped["nvfp4"] = "a pipe | in it"
    facts = Facts(
        model="tower", data="rows", policy="standard", device="cuda", planned_for="NVIDIA H200", by="flops", seeds=8,
        steps=60, screen_seeds=3, screen_steps=30, max_candidates=12, finalists=1, minutes=None,
    )  # fmt: skip
    data = search_dict(found, facts, finished=True)
    best = found.finalists[0].recipe
    assert (data["verdict"], data["exit_code"], data["accepted"]) == ("accept", 0, [best.name])
    mine = next(c for c in data["candidates"] if c["name"] == best.name)
    assert mine["verdict"] == "accept"
    assert set(mine["levels"]) == {"head"}
    write_search(data, tmp_path)
    assert json.loads((tmp_path / "search.json").read_text()) == data
    text = (tmp_path / "search.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {best.name} |"))
    assert row.endswith("| promising | ACCEPT |")
    assert "a pipe \\| in it" in text
    shown = search_text(found, data, tmp_path)
    assert "SEARCH ACCEPT: tower, rows" in shown
    # A probe that lost too much is in the data and not in the way of a reader.
    lost = next(c for c in data["candidates"] if c["probe"] and not c["screen"]["promising"])
    assert lost["name"] not in shown
    failed = search_dict(found, facts, finished=False, failure="it burned")
    assert (failed["verdict"], failed["exit_code"], failed["failure"]) == ("failed", 4, "it burned")


def test_the_shipped_schema_is_current() -> None:
    """UPDATE_GOLDEN=1 writes it anew."""
    text = json.dumps(search_schema(), indent=1) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        SCHEMA_FILE.write_text(text)
    assert SCHEMA_FILE.read_text() == text


def accepts(tower: Tower, truth, draws: int, **more: Any) -> float:
    """How often a search accepts anything, where every candidate truly loses exactly the margin."""
    starts = [start_of("fp8-row", tower), start_of("fp8-tensor", tower)]
    hits = 0
    for seed in range(draws):
        measurer = truth(lambda recipe: 1.0, seed, noise=MARGIN, **more)
        hits += search(starts, measurer, STANDARD, Limits(candidates=6, finalists=2)).verdict == "accept"
    return hits / draws


def test_searching_among_bad_recipes_accepts_one_no_more_often_than_alpha(tower: Tower, truth) -> None:
    draws, alpha = 250, STANDARD.alpha
    assert accepts(tower, truth, draws) <= alpha + 4 * (alpha * (1 - alpha) / draws) ** 0.5
    # What the seeds of their own are for: judged on the seeds that chose them, the chosen flatter themselves.
    assert accepts(tower, truth, 60, screen_seeds=8, reuse_screens=True) > 0.25


def test_recipes_judged_before_in_the_folder_count_in_the_family(make_report, measurements) -> None:
    report = make_report(measurements([MARGIN * (0.3 + 0.9 * x) for x in (-1, 1, -1, 1, -1, 1, -1, 1.0)]))
    assert report.verdict == "accept"
    own = as_family([report], [], "t")[1][0].share
    assert 1 / 3 < own < 1

    def before(name: str, share: float) -> Member:
        return Member(task="t", name=name, hash=name, share=share)

    ((again,), members) = as_family([report], [before("a", 5.0), before("b", 5.0)], "t")
    assert again.verdict == "inconclusive"
    assert again.statistics.family == 3
    assert again.statistics.accept_alpha == pytest.approx(STANDARD.alpha / 3)
    assert [member.hash for member in members] == [report.recipe.hash]
    # Holm: claims that stand by themselves cost the others less.
    assert as_family([report], [before("a", 0.0), before("b", 0.0)], "t")[0][0].verdict == "accept"
    # The same recipe again is one claim.
    same = Member(task="t", name="r1", hash=report.recipe.hash, share=5.0)
    assert as_family([report], [same], "t")[0] == [report]


def test_a_store_keeps_the_family_when_screens_are_forgotten_and_survives_damage(tmp_path) -> None:
    store = SearchStore(tmp_path / "s")
    assert store.screens() == {}
    effect = PartEffect(seeds=1, ne_increase=(0.1,), auc_loss=())
    store.keep_screens({"k": Screened(seeds=1, effects={"t": effect}, fault="it spiked")})
    store.keep_family([Member(task="t", name="a", hash="h", share=0.5), Member(task="u", name="b", hash="i", share=2)])
    store.keep_family([Member(task="t", name="a", hash="h", share=0.25)])
    assert store.screens()["k"].effects["t"] == effect
    store.forget_screens()
    assert store.screens() == {}
    assert [member.share for member in store.family("t")] == [0.25]
    assert [member.name for member in store.family("u")] == ["b"]
    (tmp_path / "s" / "screens.json").write_text('{"k": {"seeds"')
    assert store.screens() == {}


def test_losses_are_told_in_margins_and_what_breaks_is_far_past_them() -> None:
    effect = PartEffect(seeds=2, ne_increase=(MARGIN, 3 * MARGIN), auc_loss=())
    assert Screened(seeds=2, effects={"t": effect}).losses(STANDARD) == pytest.approx({"ne t": 2.0})
    broken = PartEffect(seeds=2, ne_increase=(MARGIN,), auc_loss=(0.0,))
    assert min(Screened(seeds=2, effects={"t": broken}).losses(STANDARD).values()) > 5
    assert Screened(seeds=2, effects={"t": effect}, fault="spiked").losses(STANDARD)["stability"] > 5


def test_found_without_reports_is_inconclusive() -> None:
    assert Found().verdict == "inconclusive"
