"""The driver of ``search``: by a measurer that knows the truth, and on real trainings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates import search_measure
from narrowgate.gates.decision import decide_family
from narrowgate.gates.measurements import Measurements, PartEffect, StepTime
from narrowgate.gates.policy import BUILTIN_POLICIES
from narrowgate.gates.progress import Progress
from narrowgate.gates.report import FILES, RecipeFacts, Report, decided
from narrowgate.gates.search import SCREEN_SEEDS, Found, Limits, Screened, search, unit_groups
from narrowgate.gates.search_store import Member, SearchStore, as_family
from narrowgate.gates.task import TaskSource
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


def test_a_long_list_of_blocks_is_cut_into_runs() -> None:
    names = [f"blocks.{i}.{part}" for i in range(12) for part in ("up", "down")]
    groups = unit_groups(names)
    assert len(groups) == 8
    assert [name for own in groups.values() for name in own] == names
    assert groups["blocks.1 to blocks.2"] == ["blocks.1.up", "blocks.1.down", "blocks.2.up", "blocks.2.down"]
    towers = [f"tower{i}.{part}" for i in range(20) for part in ("up", "down")]
    assert len(unit_groups(towers)) == 8
    assert [name for own in unit_groups(towers).values() for name in own] == towers
    assert unit_groups(["a.x", "b.x"]) == {"a.x": ["a.x"], "b.x": ["b.x"]}
    assert unit_groups(["a"]) == {"a": ["a"]}


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Train screens in this process; return what was trained, as (seed, arm), as it happens."""
    from narrowgate.gates import run as runs
    from narrowgate.gates.pairs import Pairing
    from narrowgate.gates.seeds import train_seed
    from narrowgate.gates.train import Arm

    trained: list[tuple[int, str]] = []
    train = Arm.train

    def counted(arm: Arm, seed: int, watch: Any) -> Any:
        trained.append((seed, "baseline" if arm.recipe is None else arm.recipe.name))
        return train(arm, seed, watch)

    def train_here(job: Any, seeds: Sequence[int], progress: Progress) -> dict[int, Any]:
        task = job.source.open()
        arms, pairing = job.arms(task, torch.device("cpu")), Pairing(task, job.limits)
        return {seed: train_seed(job, pairing, arms, seed, progress.step, progress.trained) for seed in seeds}

    monkeypatch.setattr(Arm, "train", counted)
    for module in (search_measure, runs):
        monkeypatch.setattr(module, "train_seeds", train_here)
    return trained


SEARCH = (
    "search", "--task", "ranker:good", "--from", "all-fp8.yaml", "--rank-by", "flops", "--device", "cpu", "--seeds",
    "5", "--screen-seeds", "2", "--policy", "loose", "--out", "found",
)  # fmt: skip


def test_a_search_on_a_users_task_writes_recipes_that_can_be_gated(room, narrowgate, in_process) -> None:
    code, out, err = narrowgate(*SEARCH, "--max-candidates", "3")
    data = json.loads((room / "found" / "search.json").read_text())
    assert code == data["exit_code"] == 3, err
    assert data["finished"]
    assert "SEARCH INCONCLUSIVE" in out
    assert "planning for NVIDIA H200" in err
    assert data["screen"]["steps"] == 30
    assert set(data["screen"]["seeds"]).isdisjoint(data["gate"]["seeds"])
    screened = {seed for seed, _ in in_process if seed >= SCREEN_SEEDS}
    judged = {seed for seed, _ in in_process if seed < SCREEN_SEEDS}
    assert (screened, judged) == ({1000, 1001}, {0, 1, 2, 3, 4})
    for candidate in data["candidates"]:
        recipe = load_recipe(room / "found" / candidate["file"])
        assert (recipe.name, recipe.hash()) == (candidate["name"], candidate["hash"])
    assert data["finalists"]
    for name in data["finalists"]:
        assert sorted(p.name for p in (room / "found" / name).iterdir()) == sorted(FILES)
        report = json.loads((room / "found" / name / "report.json").read_text())
        assert report["statistics"]["family"] == data["family"]["size"] == len(data["finalists"])
        assert f"`{name}`" in (room / "found" / "summary.md").read_text()
        assert f"| {name} |" in (room / "found" / "search.md").read_text()
    place = f"found/recipes/{data['finalists'][0]}.yaml"
    code, _, err = narrowgate("gate", place, "--task", "ranker:good", "--seeds", "1", "--steps", "5", "-q")
    assert code == 3, err


def test_a_search_goes_on_where_it_was_interrupted(room, narrowgate, in_process, monkeypatch) -> None:
    """Interrupted after a screen trained and before its result was kept, then in the full gate, then never."""
    whole = search_measure.screened

    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(search_measure, "screened", stop)
    assert narrowgate(*SEARCH, "--max-candidates", "1")[0] == 130
    assert len(in_process) == 4
    monkeypatch.setattr(search_measure, "screened", whole)
    judge = search_measure.run_gate

    def crash(*args: Any) -> Any:
        raise RuntimeError("matrix on fire")

    monkeypatch.setattr(search_measure, "run_gate", crash)
    code, _, err = narrowgate(*SEARCH, "--max-candidates", "1")
    assert (code, "matrix on fire" in err) == (4, True)
    failed = json.loads((room / "found" / "search.json").read_text())
    assert (failed["verdict"], failed["exit_code"], failed["finished"]) == ("failed", 4, False)
    # Every training of the screen was found done.
    assert len(in_process) == 4
    monkeypatch.setattr(search_measure, "run_gate", judge)
    code, _, err = narrowgate(*SEARCH, "--max-candidates", "1")
    assert code == 3
    assert "1 recipe, 1 of them known" in err
    assert [seed for seed, _ in in_process[4:]] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    # Again: screens are known for good, and the recipe judged before is the one that is judged now.
    code, text, _ = narrowgate(*SEARCH, "--max-candidates", "1", "--json", "-q")
    again = json.loads(text)
    assert all(seed < SCREEN_SEEDS for seed, _ in in_process[14:])
    assert again["family"] == {"size": 1, "correction": "holm", "judged_before": again["finalists"]}


def test_a_screen_whose_baseline_learns_nothing_ends_the_search(room, narrowgate, in_process) -> None:
    code, _, err = narrowgate(*SEARCH, "--screen-steps", "1", "-q")
    assert code == 2
    assert err.startswith("narrowgate: search: a screen of so few steps tells nothing: The baseline's")
    assert len(err.splitlines()) == 1


def test_the_full_gates_time_is_foreseen_from_screens_also_from_known_ones(room, in_process, monkeypatch) -> None:
    monkeypatch.setattr(search_measure, "usable_cores", lambda: 2)
    recipe = load_recipe("all-fp8.yaml")

    def measurer(**more: Any) -> search_measure.TaskMeasurer:
        source, kept = TaskSource(task="ranker:good", steps=60), SearchStore(room / "kept")
        return search_measure.TaskMeasurer(source, STANDARD, Progress(), kept, seeds=6, screen_seeds=2, **more)

    first = measurer()
    assert first.reserve(2) == 0
    (screened,) = first.screen([recipe], "one")
    # Twice the steps of a screen, three arms, six seeds, two at a time.
    assert first.reserve(2) == pytest.approx(screened.seconds * 2 * 3 * 6 / 2)
    trained = len(in_process)
    again = measurer()
    again.screen([recipe], "one")
    assert again.reserve(2) == pytest.approx(first.reserve(2))
    assert len(in_process) == trained == 4
    # Another number of steps is another screen.
    measurer(screen_steps=31).screen([recipe], "one")
    assert len(in_process) == 8


def test_more_gate_seeds_than_leave_any_for_screens_are_refused() -> None:
    policy = STANDARD.model_copy(update={"seeds": SCREEN_SEEDS + 1})
    with pytest.raises(Exception, match="expected at most 1000"):
        search_measure.TaskMeasurer(TaskSource(), policy, Progress())


def test_where_nothing_pays_the_search_says_so_and_trains_nothing(room, narrowgate, in_process) -> None:
    code, text, _ = narrowgate("search", "--task", "ranker:good", "--out", "none", "--json", "-q")
    data = json.loads(text)
    assert code == data["exit_code"] == 3
    assert data["verdict"] == "inconclusive"
    assert "predicted to gain on NVIDIA H200" in next(s["why"] for s in data["skipped"] if s["recipe"] == "fp8-row")
    assert "emulated on NVIDIA H200" in next(s["why"] for s in data["skipped"] if s["recipe"] == "nvfp4")
    assert in_process == []
    assert json.loads((room / "none" / "search.json").read_text()) == data


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "h20"], "--device: found 'h20', expected auto, cpu, cuda, h100, h200, b200; did you mean"),
        (["--rank-by", "speed"], "--rank-by: found 'speed', expected time or flops"),
        (["--task", "ranker:good", "--model", "gem-tiny"], "search: --task brings its own model and data"),
        (["--from", "all-fp8.yaml", "--from", "all-fp8.yaml"], "--from: recipe 'all-fp8' is given twice"),
        (["--from", "gem-fp9"], "neither a built-in recipe nor a file"),
        (["--from", "fp8-row", "--device", "h100"], "search: fp8-row has no predicted times: no measured rates for"),
        (["--policy", "lose"], "unknown policy 'lose'"),
        (["--backend", "cuda"], "--backend: found 'cuda'"),
        (["--max-candidates", "0"], "--max-candidates"),
        (["--rates", "nowhere.json"], "nowhere.json: No such file or directory; expected a file of measured rates"),
        (["--model", "gem-huge"], "unknown model 'gem-huge'"),
        (["--out", "all-fp8.yaml"], "all-fp8.yaml: cannot write reports there"),
    ],
)
def test_bad_input_is_one_line_and_code_2(room, narrowgate, arguments: list[str], said: str) -> None:
    code, out, err = narrowgate("search", *arguments, "-q")
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert said.lower() in err.lower()


def test_ranks_of_a_job_are_refused(room, narrowgate, monkeypatch) -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "::1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    code, _, err = narrowgate("search", "-q")
    assert (code, err.startswith("narrowgate: search: found the ranks of a job (torchrun), expected one process")) == (
        2,
        True,
    )


def test_a_real_search_on_a_built_in_model(room, narrowgate) -> None:
    code, text, err = narrowgate(
        "search", "--model", "gem-tiny", "--from", "gem-fp8", "--device", "h200", "--rank-by", "flops", "--steps", "36",
        "--screen-steps", "36", "--screen-seeds", "1", "--seeds", "1", "--max-candidates", "1", "--json",
    )  # fmt: skip
    data = json.loads(text)
    assert code == 3, err
    assert (data["model"], data["planned_for"], data["device"]) == ("gem-tiny", "NVIDIA H200", "cpu")
    (candidate,) = data["candidates"]
    assert candidate["hash"] == load_recipe("gem-fp8").hash()
    assert set(candidate["screen"]["losses_margins"]) == {"ne click", "auc click", "ne conversion", "auc conversion"}
    assert candidate["verdict"] == "inconclusive"
    assert (room / "search" / candidate["report"]).exists()


def test_found_without_reports_is_inconclusive() -> None:
    assert Found().verdict == "inconclusive"
