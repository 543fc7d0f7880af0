"""The streamed data: a function of seed and number, in bounded memory, with a signal whose worth is known."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from narrowgate.models import Batch, TrainingConfig, get_preset, open_data
from narrowgate.models.data import stream
from narrowgate.models.data.balance import Balance
from narrowgate.models.data.loader import BatchStream
from narrowgate.models.data.metrics import normalized_entropy
from narrowgate.models.data.stream import StreamDataset
from narrowgate.models.data.stream_config import StreamConfig
from narrowgate.precision.errors import NarrowgateError

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
CONFIG = StreamConfig(
    users=3000, items=500, rows=64_000, held_out=9000, contexts=4, context_rows=200, median_events=12.0
)
TRAINING = TrainingConfig(batch_size=512, eval_batch_size=1000, steps=200, epochs=1, lr=1e-3, token_multiple=64)


def make(max_events: int = 30, steps: int | None = None, *, times: bool = False, **changes: object) -> StreamDataset:
    config = dataclasses.replace(CONFIG, **changes)  # pyright: ignore[reportArgumentType]
    return StreamDataset(config, TRAINING, max_events=max_events, steps=steps, times=times)


def same(a: Batch, b: Batch) -> bool:
    names = ("sparse", "dense", "events", "event_rows", "offsets", "labels", "groups")
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in names)


def test_a_batch_follows_from_seed_and_number_alone() -> None:
    data = make()
    batches = list(data.train_batches(3))[:4]
    assert same(next(make().train_batches(3).starting_at(2)), batches[2])
    assert same(next(pickle.loads(pickle.dumps(data)).train_batches(3).starting_at(1)), batches[1])
    assert not same(batches[0], batches[1])
    assert not same(next(iter(data.train_batches(4))), batches[0])
    assert data.steps == len(data.train_batches(0)) == 125
    assert isinstance(data.train_batches(0), BatchStream)


def test_ids_lengths_and_shapes_stay_within_their_bounds() -> None:
    data = make()
    features = data.features
    shapes = set()
    for batch in [*data.train_batches(0)][:10]:
        shapes.add(batch.events.shape)
        for column, field in zip(batch.sparse.unbind(1), features.categorical, strict=True):
            assert 1 <= column.min() <= column.max() < field.rows, field.name
        for bag, field in zip(batch.bags, features.bags, strict=True):
            assert 1 <= bag.min() <= bag.max() < field.rows
        used = int(batch.offsets[-1])
        for column, field in zip(batch.events.unbind(1), features.events, strict=True):
            assert column[:used].min() >= 1
            assert column.max() < field.rows
            assert not column[used:].any()
        assert batch.offsets.diff().max() <= 30
        gaps = batch.events[:used, 3]
        inside = batch.event_rows[1:used] == batch.event_rows[: used - 1]
        assert (gaps[:-1] >= gaps[1:])[inside].all(), "the oldest event comes first"
    assert len(shapes) == 1


def test_times_are_the_ages_that_events_carry_and_change_nothing_else() -> None:
    for batch, other in itertools.islice(
        zip(make(times=True).train_batches(1), make().train_batches(1), strict=True), 2
    ):
        assert same(batch, other)
        assert other.event_times is None
        assert batch.event_times is not None
        assert [(-t).bit_length() for t in batch.event_times.tolist()] == batch.events[:, 3].tolist()
        used = int(batch.offsets[-1])
        assert (batch.event_times[:used] < 0).all(), "a request is at 0"
        inside = batch.event_rows[1:used] == batch.event_rows[: used - 1]
        gaps = batch.event_times[:used].diff()[inside].double()
        assert gaps.min() > 0
        assert gaps.mean() == pytest.approx(3 * 3600, rel=0.1)


def test_lengths_are_log_normal_and_ids_follow_a_power_law() -> None:
    data = make(max_events=400, median_events=40.0, length_spread=0.5)
    lengths = np.concatenate([b.offsets.diff().numpy() for b in [*data.train_batches(0)][:20]])
    logs = np.log(lengths[lengths > 0])
    assert np.median(lengths) == pytest.approx(40, rel=0.05)
    assert logs.std() == pytest.approx(0.5, rel=0.05)
    items = torch.cat([b.events[b.event_rows < 512, 0] for b in [*data.train_batches(0)][:5]])
    counts = torch.bincount(items, minlength=501)[1:].double()
    ranks = torch.arange(1, 501).double()
    # Away from the head, where the continuous law is coarse.
    slope = np.polyfit(ranks[10:].log(), counts[10:].clamp_min(1).log(), 1)[0]
    assert slope == pytest.approx(-0.9, abs=0.1)


def test_labels_occur_at_the_rates_asked_for_and_as_often_as_predicted() -> None:
    data = make(click_rate=0.06, conversion_rate=0.2)
    labels = torch.cat([batch.labels for batch in data.train_batches(0)])
    clicks, conversions = labels.mean(0).tolist()
    assert data.base_rates() == [pytest.approx(0.06), pytest.approx(0.012, rel=0.02)]
    assert clicks == pytest.approx(0.06, rel=0.15)
    assert conversions == pytest.approx(0.012, rel=0.3)
    assert not ((labels[:, 1] == 1) & (labels[:, 0] == 0)).any()
    seen, truth = data.held_out_truth()
    assert seen.shape == truth.shape == (9000, 2)
    for task in range(2):
        deviation = np.sqrt((truth[:, task] * (1 - truth[:, task])).sum())
        assert abs(seen[:, task].sum() - truth[:, task].sum()) < 4 * deviation


def test_bayes_entropy_is_real_and_no_other_odds_beat_it() -> None:
    data = make(click_rate=0.2)
    facts = data.describe()
    json.dumps(facts)
    assert 0.6 < facts["bayes_ne"]["click"] < 0.9
    seen, truth = data.held_out_truth()
    for exponent in (0.8, 1.25):
        odds = (truth / (1 - truth)) ** exponent
        other = normalized_entropy(odds / (1 + odds), seen, data.base_rates())
        assert other[0] > facts["bayes_ne"]["click"]


def test_the_order_of_the_history_tells() -> None:
    data = make(click_rate=0.2)
    first, second = [], []
    for batch in data.train_batches(0):
        ends, lengths = batch.offsets[1:], batch.offsets.diff()
        keep = lengths >= 8
        for found, lag in ((first, 1), (second, 8)):
            event = batch.events[(ends - lag).clamp_min(0)]
            match = keep & (event[:, 1] == batch.sparse[:, 3]) & (event[:, 2] >= 2)
            found.append(batch.labels[match, 0])
    recent, old = torch.cat(first), torch.cat(second)
    assert min(len(recent), len(old)) > 300
    error = (recent.var() / len(recent) + old.var() / len(old)).sqrt()
    assert recent.mean() - old.mean() > 3 * error


def test_the_world_turns() -> None:
    changes = {}
    for drift in (0.0, 1.5):
        batches = list(make(drift=drift, click_rate=0.3).train_batches(0))
        rates = []
        for part in (batches[:40], batches[-40:]):
            clicks, ids = (
                torch.cat(column) for column in zip(*((b.labels[:, 0], b.sparse[:, 1]) for b in part), strict=True)
            )
            rates.append(torch.stack([clicks[ids == i].mean() for i in range(1, 11)]))
        changes[drift] = (rates[0] - rates[1]).square().mean().sqrt().item()
    assert changes[1.5] > 1.5 * changes[0.0]


def test_many_rows_stream_in_the_memory_of_few() -> None:
    data = make(steps=200)
    batches = iter(data.train_batches(0))
    for _ in range(20):
        next(batches)
    statm, rows, peak = Path("/proc/self/statm"), 0, 0
    if not statm.exists():
        pytest.skip("no /proc to read the resident memory from")
    before = int(statm.read_text().split()[1])
    for batch in batches:
        rows += batch.rows
        peak = max(peak, int(statm.read_text().split()[1]))
    assert rows == 180 * 512
    # All of those rows would take 50 MB: 8 fields, 6 + 6 tags, 8 numbers and about 14 events of 5 columns.
    assert (peak - before) * 4096 < 15e6


def test_balancing_evens_the_tokens_of_batches_out_and_the_bound_shrinks() -> None:
    plain = make()
    even = StreamDataset(CONFIG, dataclasses.replace(TRAINING, balance=Balance(sub_batch=32, pool=8)), max_events=30)

    tokens = {
        name: np.array([int(b.offsets[-1]) for b in itertools.islice(data.train_batches(0), 80)])
        for name, data in (("plain", plain), ("even", even))
    }
    assert tokens["even"].reshape(-1, 8).sum(1).tolist() == tokens["plain"].reshape(-1, 8).sum(1).tolist()  # same rows
    assert tokens["even"].std() < 0.5 * tokens["plain"].std()
    spread = {name: np.ptp(found.reshape(-1, 8), axis=1).mean() for name, found in tokens.items()}
    assert spread["even"] < 0.1 * spread["plain"]
    shapes = [next(iter(data.train_batches(0))).events.shape[0] for data in (even, plain)]
    assert shapes[0] < shapes[1]


ROWS = {
    "`gem-base`, shuffled": ("gem-base", None),
    "`gem-long`, shuffled": ("gem-long", None),
    "`sub_batch=32`": ("gem-base", Balance(sub_batch=32)),
    "`sub_batch=18`": ("gem-long", Balance(sub_batch=18)),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_the_docs_say_of_dealt_batches_is_what_is_counted(row: str) -> None:
    name, balance = ROWS[row]
    preset = get_preset(name)
    training = dataclasses.replace(preset.training, balance=balance)
    data = open_data("synthetic", dataclasses.replace(preset, training=training), steps=200)
    assert isinstance(data, StreamDataset)
    size = training.batch_size
    lengths = [data._lengths(stream._TRAIN, 0, number, size) for number in range(200)]
    tokens = np.array([batch.sum() for batch in lengths])
    bound = stream.padded_tokens(data._typical, size, training, balanced=True)
    dead = np.mean([1 - count / max(bound, training.round_up(int(count))) for count in tokens])
    found = [over_their_mean(tokens.reshape(-1, 8)), dead]
    found += [
        over_their_mean(np.array([[p.sum() for p in np.split(b, ranks)] for b in lengths[:64]])) for ranks in (2, 4, 8)
    ]
    (line,) = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {row} |")]
    said = re.findall(r"[0-9.]+", line.removeprefix(f"| {row} |"))
    assert [f"{100 * x:.{len(one.partition('.')[2])}f}" for x, one in zip(found, said, strict=True)] == said


def over_their_mean(loads: np.ndarray) -> float:
    return float((loads.max(1) / loads.mean(1) - 1).mean())


def test_impossible_settings_say_why() -> None:
    with pytest.raises(NarrowgateError, match=r"'click_rate' must lie between 0 and 1, found 1\.5"):
        make(click_rate=1.5)
    with pytest.raises(NarrowgateError, match="too few rows: 100, expected at least one batch of 512"):
        make(rows=100)
