"""Batches by rank: the parts of a batch are the batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from narrowgate.models import GemTask, get_preset
from narrowgate.precision.errors import NarrowgateError


@pytest.fixture(scope="module")
def task() -> GemTask:
    return GemTask.open("gem-tiny", steps=2)


@pytest.fixture(scope="module")
def model(task: GemTask) -> torch.nn.Module:
    torch.manual_seed(0)
    return task.build_model().eval()


@pytest.mark.parametrize("ranks", [2, 8])
def test_parts_of_every_batch_predict_what_the_batch_does(task, model, ranks) -> None:
    parts = [task.for_rank(rank, ranks) for rank in range(ranks)]
    assert {len(part.train_batches(0)) for part in parts} == {2}
    for whole, *own in (
        *zip(task.train_batches(1), *(part.train_batches(1) for part in parts), strict=True),
        *zip(task.eval_batches(), *(part.eval_batches() for part in parts), strict=True),
    ):
        expected = task.predict(model, whole)
        found = [part.predict(model, batch) for part, batch in zip(parts, own, strict=True)]
        for name in ("labels", "groups", "logits"):
            joined = torch.cat([getattr(prediction, name) for prediction in found])
            torch.testing.assert_close(joined, getattr(expected, name), rtol=0, atol=1e-6)
        assert len({batch.sparse.shape[0] for batch in own}) == 1
        for batch in own:
            alive = batch.event_rows < batch.sparse.shape[0]
            assert not batch.events[~alive].any()
            assert int(batch.offsets[-1]) == int(alive.sum())


def test_times_stay_with_their_events() -> None:
    tiny = get_preset("gem-tiny")
    timed = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, time_buckets=16))
    task = GemTask.open(timed, steps=1)
    whole = next(iter(task.train_batches(1)))
    own = [next(iter(task.for_rank(rank, 4).train_batches(1))) for rank in range(4)]
    parts, dead = [], []
    for batch in own:
        assert batch.event_times is not None
        used = int(batch.offsets[-1])
        parts.append(batch.event_times[:used])
        dead.append(batch.event_times[used:])
    assert whole.event_times is not None
    assert torch.equal(torch.cat(parts), whole.event_times[: int(whole.offsets[-1])])
    assert not torch.cat(dead).any()


def test_the_mean_of_the_ranks_losses_is_the_batchs(task, model) -> None:
    batch = next(iter(task.train_batches(0)))
    losses = [part.loss(model, next(iter(part.train_batches(0)))) for part in map(task.for_rank, range(4), [4] * 4)]
    torch.testing.assert_close(torch.stack(losses).mean(), task.loss(model, batch), rtol=1e-6, atol=0)


def test_rates_and_facts_are_those_of_the_whole(task) -> None:
    part = task.for_rank(1, 2)
    assert part.base_rates() == task.base_rates()
    assert part.describe() == task.describe()
    assert part.steps == task.steps


def test_ranks_that_do_not_divide_a_batch_are_refused(task) -> None:
    with pytest.raises(NarrowgateError, match="512 rows on 3 ranks"):
        task.for_rank(0, 3)
