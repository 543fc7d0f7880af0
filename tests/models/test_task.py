"""The task: the same for both arms, repeatable, portable; its optimizer; its prediction; its description."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from narrowgate.gates import Task
from narrowgate.models import Dataset, GemTask, Preset, TrainingConfig
from narrowgate.models.schedule import learning_rate
from torch import nn


def losses(task: GemTask, seed: int) -> list[float]:
    torch.manual_seed(seed)
    model = task.build_model()
    optimizer = task.optimizer(model)
    found = []
    for batch in task.train_batches(seed):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_is_a_task_of_the_gates(task: GemTask) -> None:
    assert isinstance(task, Task)


def test_a_seed_repeats_its_losses_bit_for_bit(task: GemTask) -> None:
    once = losses(task, 5)
    assert losses(task, 5) == once
    assert losses(task, 6) != once
    assert len(once) == task.steps == 12


def test_training_lowers_the_loss(small: Preset) -> None:
    found = losses(GemTask.open(small, "synthetic", steps=60), 0)
    assert sum(found[-5:]) < 0.9 * sum(found[:5])


def test_survives_pickling(task: GemTask) -> None:
    assert losses(pickle.loads(pickle.dumps(task)), 1) == losses(task, 1)


def test_opening_twice_gives_the_same_data(small: Preset) -> None:
    one, two = (GemTask.open(small, "synthetic").describe()["data"]["sha256"] for _ in range(2))
    assert one == two


def test_prediction_covers_the_held_out_rows_without_gradients(task: GemTask) -> None:
    model = task.build_model().eval()
    parts = [task.predict(model, batch) for batch in task.eval_batches()]
    assert isinstance(task.data, Dataset)
    assert sum(len(part.logits) for part in parts) == len(task.data.rows.held_out)
    for part in parts:
        assert part.logits.dtype == torch.float32
        assert not part.logits.requires_grad
        assert part.logits.shape == part.labels.shape
        assert part.groups is not None
        assert part.groups.shape == part.logits.shape[:1]
    labels = torch.cat([part.labels for part in parts]).numpy()
    assert (labels == task.data.rows.labels[task.data.rows.held_out]).all()


def test_padding_rows_of_the_last_batch_weigh_nothing(task: GemTask) -> None:
    model, batch = task.build_model().eval(), list(task.eval_batches())[-1]
    assert batch.rows < len(batch.labels)
    batch.labels[batch.rows :] = 1 - batch.labels[batch.rows :]
    expected = nn.functional.binary_cross_entropy_with_logits(model(batch)[: batch.rows], batch.labels[: batch.rows])
    assert task.loss(model, batch).item() == pytest.approx(expected.item())


def test_description_is_json_and_counts_parameters(task: GemTask) -> None:
    facts = task.describe()
    json.dumps(facts)
    total = sum(p.numel() for p in task.build_model().parameters())
    assert facts["model"]["dense_parameters"] + facts["model"]["embedding_parameters"] == total
    assert facts["training"]["steps"] == 12
    assert facts["data"]["rows_train"] == 480
    assert facts["data"]["base_rate"] == dict(zip(task.task_names, task.base_rates(), strict=True))


def test_learning_rate_rises_then_falls_and_never_ends() -> None:
    training = TrainingConfig(batch_size=1, eval_batch_size=1, steps=100, epochs=1, lr=2.0, warmup=0.1)
    rates = [learning_rate(step, 100, training) for step in range(130)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == rates[10] == 2.0
    assert rates[10:100] == sorted(rates[10:100], reverse=True)
    assert rates[55] == pytest.approx(1.0)
    assert rates[110:] == [pytest.approx(0.02)] * 20


def test_optimizer_follows_its_own_steps_and_its_state_restores_them(task: GemTask) -> None:
    model = task.build_model()
    optimizer = task.optimizer(model)
    for batch in list(task.train_batches(0))[:4]:
        task.loss(model, batch).backward()
        optimizer.step()
    expected = learning_rate(4, 12, task.preset.training)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
    other = task.optimizer(model)
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert other.param_groups[0]["lr"] == pytest.approx(learning_rate(5, 12, task.preset.training))
