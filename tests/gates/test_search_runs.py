"""Whole searches through the command line: real trainings of a small task, and of a built-in model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from narrowgate.gates import search_measure
from narrowgate.gates.policy import BUILTIN_POLICIES
from narrowgate.gates.progress import Progress
from narrowgate.gates.report import FILES
from narrowgate.gates.search import SCREEN_SEEDS
from narrowgate.gates.search_record import search_schema
from narrowgate.gates.search_store import SearchStore
from narrowgate.gates.task import TaskSource
from narrowgate.recipes import load_recipe

jsonschema = pytest.importorskip("jsonschema")

STANDARD = BUILTIN_POLICIES["standard"]


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
    jsonschema.validate(data, search_schema())
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
    jsonschema.validate(failed, search_schema())
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
    jsonschema.validate(data, search_schema())
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
