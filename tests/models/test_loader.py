"""Batches: every row once an epoch, the right history for each, shapes known ahead."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from narrowgate.models import Batch, Dataset, FeatureSpec, Field, TrainingConfig
from narrowgate.models.data.balance import Balance, deal
from narrowgate.models.data.rows import AGE_BUCKETS, RowData, strictly_earlier
from narrowgate.precision.errors import NarrowgateError

TRAINING = TrainingConfig(batch_size=10, eval_batch_size=8, steps=100, epochs=2, lr=1e-3)


def make_rows(users: int = 9, each: int = 7) -> RowData:
    """Rows that carry their own number as a feature, and events that carry theirs."""
    count = users * each
    user = np.repeat(np.arange(users), each)
    times = 100 + 8 * np.tile(np.arange(each), users)
    training = np.tile(np.arange(each), users) < each - 2
    train, held_out = np.flatnonzero(training), np.flatnonzero(~training)
    start, end = strictly_earlier(user, times, user[train], times[train])
    return RowData(
        features=FeatureSpec(
            categorical=(Field("row", count),),
            bags=(),
            numeric=("one",),
            events=(Field("row", count), Field("gap", AGE_BUCKETS)),
            tasks=("odd",),
        ),
        sparse=np.arange(count)[:, None],
        bags=(),
        dense=np.ones((count, 1), np.float32),
        labels=(np.arange(count) % 2).astype(np.float32)[:, None],
        groups=user,
        times=times,
        history_start=start,
        history_end=end,
        events=train[:, None],
        event_times=times[train],
        train=train,
        held_out=held_out,
        facts={"name": "made"},
    )


@pytest.fixture
def rows() -> RowData:
    return make_rows()


def shown(batch: Batch) -> list[int]:
    return batch.sparse[: batch.rows, 0].tolist()


def test_an_epoch_shows_every_training_row_once(rows: RowData) -> None:
    data = Dataset(rows, TRAINING, max_events=4)
    seen = [row for batch in data.train_batches(3) for row in shown(batch)]
    assert data.steps == 9
    assert sorted(seen[:45]) == rows.train.tolist()
    assert sorted(seen[45:90]) == rows.train.tolist()
    assert seen[:45] != seen[45:90]


def test_a_seed_gives_its_order_again_and_another_seed_another(rows: RowData) -> None:
    data = Dataset(rows, TRAINING, max_events=4)
    stream = data.train_batches(1)
    once = [shown(batch) for batch in stream]
    assert len(stream) == len(once)
    assert [shown(batch) for batch in stream] == once
    assert [shown(batch) for batch in data.train_batches(2)] != once


def test_a_stream_goes_on_from_any_batch(rows: RowData) -> None:
    for balance in (None, Balance(sub_batch=5, pool=4)):
        data = Dataset(rows, dataclasses.replace(TRAINING, balance=balance), max_events=4)
        whole = [shown(batch) for batch in data.train_batches(1)]
        assert [shown(batch) for batch in data.train_batches(1).starting_at(6)] == whole[6:]
    assert [shown(batch) for batch in data.eval_batches().starting_at(1)] == [shown(b) for b in data.eval_batches()][1:]


def test_balanced_batches_show_every_row_once_with_even_tokens() -> None:
    rows = make_rows(users=80, each=9)
    spread = []
    for balance in (None, Balance(sub_batch=5, pool=8)):
        data = Dataset(rows, dataclasses.replace(TRAINING, batch_size=35, epochs=1, balance=balance), max_events=6)
        batches = list(data.train_batches(2))
        seen = [row for batch in batches for row in shown(batch)]
        assert sorted(seen) == rows.train.tolist()
        spread.append(np.ptp([int(batch.offsets[-1]) for batch in batches[:8]]))
    assert spread[1] <= 0.3 * spread[0]


def test_dealing_keeps_sub_batches_together_and_puts_heavy_beside_light() -> None:
    rows = np.arange(12)
    lengths = np.array([9, 9, 1, 1, 8, 8, 2, 2, 5, 5, 4, 4])
    dealt = deal(rows, lengths, 6, 2).reshape(2, 3, 2)
    assert (dealt[..., 1] == dealt[..., 0] + 1).all()
    assert sorted(dealt.flatten()) == rows.tolist()
    assert lengths[dealt].sum((1, 2)).tolist() == [30, 28]


def test_ranks_that_share_a_dealt_batch_by_consecutive_rows_carry_alike() -> None:
    """As :class:`RankData` cuts it, for 2, 4 and 8 of them."""
    lengths = np.random.default_rng(0).lognormal(3.0, 0.8, 8 * 1024).astype(np.int64)
    shuffled = np.arange(len(lengths))
    dealt = deal(shuffled, lengths, 1024, 16)
    assert sorted(dealt) == shuffled.tolist()

    def over_their_mean(rows: np.ndarray, ranks: int) -> float:
        loads = lengths[rows].reshape(8, ranks, -1).sum(2)
        return float((loads.max(1) / loads.mean(1) - 1).mean())

    for ranks, most in ((2, 0.005), (4, 0.02), (8, 0.05)):
        assert over_their_mean(dealt, ranks) < most < over_their_mean(shuffled, ranks)


def test_sub_batches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(NarrowgateError, match="'sub_batch' must divide the batch of 10 rows, found 4"):
        dataclasses.replace(TRAINING, balance=Balance(sub_batch=4))
    with pytest.raises(NarrowgateError, match="'pool' must be at least 1, found 0"):
        Balance(pool=0)


def test_evaluation_shows_every_held_out_row_once_in_order(rows: RowData) -> None:
    batches = list(Dataset(rows, TRAINING, max_events=4).eval_batches())
    assert [row for batch in batches for row in shown(batch)] == rows.held_out.tolist()
    assert {batch.sparse.shape[0] for batch in batches} == {8}
    assert len({batch.events.shape for batch in batches}) == 1
    assert batches[-1].rows == 2
    assert batches[-1].offsets.diff()[2:].sum() == 0


@pytest.mark.parametrize("max_events", [2, 4, 50])
def test_a_row_carries_its_latest_earlier_events_with_their_age(rows: RowData, max_events: int) -> None:
    data = Dataset(rows, TRAINING, max_events=max_events)
    for batch in [*data.train_batches(0), *data.eval_batches()]:
        for place, row in enumerate(shown(batch)):
            at = slice(int(batch.offsets[place]), int(batch.offsets[place + 1]))
            earlier = [e for e in rows.train if rows.groups[e] == rows.groups[row] and rows.times[e] < rows.times[row]]
            assert batch.events[at, 0].tolist() == earlier[-max_events:]
            ages = rows.times[row] - rows.times[earlier[-max_events:]]
            assert batch.events[at, 1].tolist() == (1 + np.floor(np.log2(ages))).astype(int).tolist()
            assert set(batch.event_rows[at].tolist()) <= {place}


@pytest.mark.parametrize("balance", [None, Balance(sub_batch=2, pool=3)])
def test_times_travel_with_their_events_where_they_are_asked_for(rows: RowData, balance: Balance | None) -> None:
    training = dataclasses.replace(TRAINING, balance=balance)
    timed, plain = (Dataset(rows, training, max_events=4, times=times) for times in (True, False))
    for batch, other in zip(
        [*timed.train_batches(0), *timed.eval_batches()], [*plain.train_batches(0), *plain.eval_batches()], strict=True
    ):
        used = int(batch.offsets[-1])
        assert batch.event_times is not None
        assert batch.event_times[:used].tolist() == rows.times[batch.events[:used, 0]].tolist()
        assert not batch.event_times[used:].any()
        assert other.event_times is None
        assert torch.equal(batch.events, other.events)


def test_an_order_is_no_time(rows: RowData) -> None:
    order = dataclasses.replace(rows, seconds=False)
    Dataset(order, TRAINING, max_events=4)
    with pytest.raises(
        NarrowgateError, match=r"^made: model field 'time_buckets' needs the times of events, but it kn"
    ):
        Dataset(order, TRAINING, max_events=4, times=True)


def test_dead_tokens_fill_up_to_the_multiple(rows: RowData) -> None:
    for batch in Dataset(rows, TRAINING, max_events=4).train_batches(0):
        used, total = int(batch.offsets[-1]), len(batch.events)
        assert total % 16 == 0
        assert batch.event_rows[used:].tolist() == [10] * (total - used)
        assert not batch.events[used:, 1].any()


def test_simultaneous_events_are_no_history() -> None:
    group, times = np.array([0, 0, 0, 1]), np.array([5, 5, 7, 6])
    start, end = strictly_earlier(group, times, group, times)
    assert (end - start).tolist() == [0, 0, 2, 0]


def test_labels_and_groups_travel_with_their_rows(rows: RowData) -> None:
    for batch in Dataset(rows, TRAINING, max_events=4).train_batches(0):
        assert torch.equal(batch.labels[:, 0].long(), batch.sparse[:, 0] % 2)
        assert torch.equal(batch.groups, batch.sparse[:, 0] // 7)


def test_too_few_rows_is_said(rows: RowData) -> None:
    with pytest.raises(NarrowgateError, match=r"made: too few rows: 45 to train on and 18 held out, .* batch of 64"):
        Dataset(rows, dataclasses.replace(TRAINING, batch_size=64), max_events=4)


def test_base_rate_is_the_training_share(rows: RowData) -> None:
    assert Dataset(rows, TRAINING, max_events=4).base_rates() == [pytest.approx(np.mean(rows.train % 2))]
