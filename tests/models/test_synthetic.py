"""Generated data: its probabilities are true, its mark is not beaten, its signal can be learnt."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from narrowgate.models import GemTask, Preset, get_preset
from narrowgate.models.data import synthetic
from narrowgate.models.data.rows import RowData
from narrowgate.models.presets import SyntheticConfig


@pytest.fixture(scope="module")
def rows() -> RowData:
    return synthetic.generate(get_preset("gem-tiny").synthetic)


def test_planted_probabilities_are_calibrated(rows: RowData) -> None:
    labels = rows.labels[rows.held_out]
    assert rows.probabilities is not None
    for place in range(2):
        p = rows.probabilities[:, place]
        for part in np.array_split(np.argsort(p), 8):
            spread = np.sqrt((p[part] * (1 - p[part])).sum())
            assert abs(labels[part, place].sum() - p[part].sum()) < 4 * spread


def test_conversions_are_clicks(rows: RowData) -> None:
    assert (rows.labels[:, 1] <= rows.labels[:, 0]).all()
    assert rows.probabilities is not None
    assert (rows.probabilities[:, 1] < rows.probabilities[:, 0]).all()


def test_a_configuration_always_gives_the_same_rows_and_a_seed_others() -> None:
    config = SyntheticConfig(users=20, items=10, impressions=10)
    one, two = synthetic.generate(config), synthetic.generate(config)
    np.testing.assert_array_equal(one.sparse, two.sparse)
    np.testing.assert_array_equal(one.labels, two.labels)
    other = synthetic.generate(dataclasses.replace(config, seed=1))
    assert not np.array_equal(one.labels, other.labels)


def test_held_out_rows_of_a_user_share_one_history_of_training_rows(rows: RowData) -> None:
    per_user = rows.history_end[rows.held_out].reshape(2000, 10)
    assert (per_user == per_user[:, :1]).all()
    assert (rows.history_end - rows.history_start)[rows.held_out].tolist() == [40] * 20_000
    assert len(rows.events) == len(rows.train)


def test_the_true_probabilities_beat_every_other_guess(rows: RowData) -> None:
    from narrowgate.models.data.metrics import normalized_entropy

    labels, p = rows.labels[rows.held_out], rows.probabilities
    assert p is not None
    base = rows.labels[rows.train].mean(0, dtype=np.float64).tolist()
    best = normalized_entropy(p, labels, base)
    odds = np.log(p / (1 - p))
    for other in (0.9 * odds, 1.1 * odds, odds + 0.1, odds - 0.1):
        worse = normalized_entropy(1 / (1 + np.exp(-other)), labels, base)
        assert all(b < w for b, w in zip(best, worse, strict=True))
    assert all(0.6 < b < 0.95 for b in best)


def test_a_model_learns_most_of_it_and_stays_above_the_mark() -> None:
    preset = get_preset("gem-tiny")
    task = GemTask.open(shorter(preset), "synthetic", steps=70)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.optimizer(model)
    for batch in task.train_batches(0):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    model.eval()
    parts = [task.predict(model, batch) for batch in task.eval_batches()]
    odds = torch.cat([part.logits for part in parts]).double().numpy()
    labels = torch.cat([part.labels for part in parts]).numpy()
    base = np.array(task.base_rates())
    entropy = (np.logaddexp(0, odds) - labels * odds).mean(0) / -(base * np.log(base) + (1 - base) * np.log(1 - base))
    marks = task.describe()["data"]["bayes_ne"]
    for name, found in zip(task.task_names, entropy, strict=True):
        assert marks[name] < found < 1
    click = marks["click"]
    assert (1 - entropy[0]) / (1 - click) > 0.3


def shorter(preset: Preset) -> Preset:
    """Short sequences: most of the signal, half of the time."""
    return dataclasses.replace(preset, model=dataclasses.replace(preset.model, max_tokens=8))
