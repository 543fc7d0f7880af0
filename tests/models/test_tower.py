"""The wide tower: what it computes, how it trains, what its two recipes reach, and that a seed repeats it."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from narrowgate.gates.task import Task, load_task
from narrowgate.models import GemTask, LoopOptions, Trainer, get_preset, open_data
from narrowgate.models.data.metrics import normalized_entropy
from narrowgate.models.tower import TOWER, TOWER_TINY, TowerConfig, TowerModel, TowerPreset, TowerTask, tower_preset
from narrowgate.precision.capability import NAMED_DEVICES
from narrowgate.precision.errors import NarrowgateError
from narrowgate.recipes import load_recipe, plan_casts, resolve
from torch import Tensor, nn

RECIPES = Path(__file__).parents[2] / "benchmarks" / "recipes"
#: The two products of a block.
LAYERS = ["blocks.0.gate_up", "blocks.0.down", "blocks.1.gate_up", "blocks.1.down"]


def preset(steps: int = 8) -> TowerPreset:
    """A tower in milliseconds; every width is what FP8 asks for."""
    return tower_preset(
        "small",
        TowerConfig(embedding=16, width=32, hidden=64, blocks=2, events=4),
        replace(TOWER_TINY.training, batch_size=64, eval_batch_size=128, steps=steps),
        replace(TOWER_TINY.synthetic, users=50, items=40, rows=steps * 64, held_out=200, median_events=3.0),  # type: ignore[type-var]
    )


@pytest.fixture
def task() -> TowerTask:
    return opened(preset())


def opened(preset: TowerPreset) -> TowerTask:
    return TowerTask(preset, open_data("synthetic", preset))


def trained(task: TowerTask, seed: int, recipe: str | Path | None = None) -> tuple[list[float], Tensor]:
    """Return losses and held-out logits."""
    options = LoopOptions(bf16=True)
    trainer = Trainer(task, seed=seed, recipe=None if recipe is None else load_recipe(str(recipe)), options=options)
    return trainer.fit(), trainer.predict().logits


def test_both_factories_give_a_task_of_the_gates() -> None:
    for name, steps in (("stream", 150), ("stream_tiny", 150)):
        task = load_task(f"narrowgate.models.tower:{name}")
        assert isinstance(task, Task)
        assert len(task.train_batches(0)) == steps  # type: ignore[arg-type]


def test_a_tiny_tower_learns_both_labels_and_stays_above_what_is_possible() -> None:
    task = opened(TOWER_TINY)
    trainer = Trainer(task, seed=0, options=LoopOptions(bf16=True))
    losses = trainer.fit()
    prediction = trainer.predict()
    labels, truth = task.data.held_out_truth()  # type: ignore[attr-defined]
    base = task.base_rates()
    found = normalized_entropy(torch.sigmoid(prediction.logits).double().numpy(), labels, base)
    least = normalized_entropy(truth, labels, base)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert least[0] < found[0] < 0.96
    assert least[1] < found[1] < 0.98


def test_a_seed_repeats_a_pair_bit_for_bit(task: TowerTask) -> None:
    recipe = RECIPES / "tower-fp8.yaml"
    base, other, low = trained(task, 3), trained(task, 4), trained(task, 3, recipe)
    for once, again in ((base, trained(pickle.loads(pickle.dumps(task)), 3)), (low, trained(task, 3, recipe))):
        assert again[0] == once[0]
        assert torch.equal(again[1], once[1])
    assert base[0] != other[0]
    assert not torch.equal(base[1], low[1])


def test_compiles_as_one_graph_with_the_same_gradients(task: TowerTask) -> None:
    torch.manual_seed(0)
    model, batch = task.build_model(), next(iter(task.train_batches(0)))
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = task.loss(run, batch)  # type: ignore[arg-type]
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_a_history_is_the_mean_of_its_latest_events(task: TowerTask) -> None:
    model, batch = task.build_model(), next(iter(task.train_batches(0)))
    events = model.encoder(batch, model.sparse)
    # One row longer than what the model pools, one without events.
    offsets = torch.zeros(65, dtype=torch.int64)
    offsets[1], offsets[2:] = 6, 6
    rows = torch.full_like(batch.event_rows, 64)
    rows[:6] = 0
    batch = replace(batch, offsets=offsets, event_rows=rows)
    found = model.history(batch)
    expected = model.encoder(batch, model.sparse)[2:6].mean(0)
    torch.testing.assert_close(found[0], expected)
    assert not found[1:].any()
    assert events.shape[1] == found.shape[1] == 16


def test_without_blocks_contribution_the_stream_passes_through(task: TowerTask) -> None:
    model, batch = task.build_model(), next(iter(task.train_batches(0)))
    seen: list[Tensor] = []
    for module in (model.blocks[0], model.norm):
        module.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    for block in model.blocks:
        nn.init.zeros_(block.down.weight)  # type: ignore[union-attr, arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        model(batch)
    assert torch.equal(seen[0], seen[1])
    assert seen[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["tower-fp8", "tower-clip"])
def test_recipes_reach_the_blocks_alone_and_run_natively_on_an_h200(name: str) -> None:
    with torch.device("meta"):
        model = TowerModel(TOWER.tower, TOWER.synthetic.features())  # type: ignore[union-attr]
    plan = resolve(load_recipe(str(RECIPES / f"{name}.yaml")), model, device=NAMED_DEVICES["h200"])
    reached = {entry.name: (entry.in_features, entry.out_features) for entry in plan.lowered}
    assert reached == {
        f"blocks.{i}.{layer}": shape
        for i in range(4)
        for layer, shape in (("gate_up", (2048, 16384)), ("down", (8192, 2048)))
    }
    assert plan.native
    left = {entry.name for entry in plan.layers} - set(reached)
    assert left == {"sparse.numeric", "project", "heads.0", "heads.1"}


@pytest.mark.parametrize("name", ["tower-fp8", "tower-clip"])
def test_norms_gates_and_their_backward_move_into_the_casts(task: TowerTask, name: str) -> None:
    model, batch = task.build_model(), next(iter(task.train_batches(0)))

    def run(traced: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return task.loss(traced, batch)

    casts = plan_casts(model, load_recipe(str(RECIPES / f"{name}.yaml")), run, device=NAMED_DEVICES["h200"])
    fused = {(cast.layer, cast.tensor) for cast in casts if cast.fused}
    # The gradient of `down` is the residual stream's, which lies in memory anyway.
    assert fused == {(layer, "input") for layer in LAYERS} | {(f"blocks.{i}.gate_up", "grad") for i in (0, 1)}


def test_the_two_recipes_differ_in_gradients_alone() -> None:
    good, bad = (load_recipe(str(RECIPES / f"tower-{name}.yaml")).rules[0] for name in ("fp8", "clip"))
    assert good.fprop == bad.fprop
    assert good.dgrad != bad.dgrad


def test_ranks_share_a_batch(task: TowerTask) -> None:
    torch.manual_seed(0)
    model, whole = task.build_model(), next(iter(task.train_batches(0)))
    parts = [task.for_rank(rank, 2) for rank in range(2)]
    losses = [part.loss(model, next(iter(part.train_batches(0)))) for part in parts]
    assert all(isinstance(part, TowerTask) for part in parts)
    torch.testing.assert_close(torch.stack(losses).mean(), task.loss(model, whole))


def test_description_is_json_and_counts_parameters(task: TowerTask) -> None:
    facts = task.describe()
    json.dumps(facts)
    total = sum(p.numel() for p in task.build_model().parameters())
    assert facts["model"]["dense_parameters"] + facts["model"]["embedding_parameters"] == total
    assert facts["model"]["config"] == {"embedding": 16, "width": 32, "hidden": 64, "blocks": 2, "events": 4}
    assert facts["training"]["steps"] == 8


def test_the_full_size_has_a_fifth_of_a_billion_dense_parameters() -> None:
    with torch.device("meta"):
        model = TowerModel(TOWER.tower, TOWER.synthetic.features())  # type: ignore[union-attr]
    assert 0.2e9 < model.dense_parameters() < 0.21e9


def test_opens_on_other_data_and_refuses_a_shape_that_is_none() -> None:
    data = open_data("synthetic", get_preset("gem-tiny"), steps=2)
    task = TowerTask(preset(), data)
    logits = task.predict(task.build_model(), next(iter(task.eval_batches()))).logits
    assert logits.shape[1] == len(data.task_names)
    assert isinstance(task, GemTask)
    with pytest.raises(NarrowgateError, match=r"tower field 'blocks' must be at least 1, found 0"):
        replace(TOWER.tower, blocks=0)
    with pytest.raises(NarrowgateError, match="'gem-tiny' is a Preset, expected a TowerPreset"):
        TowerTask.open("gem-tiny")
