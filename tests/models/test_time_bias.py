"""The bias of the time between events: what only it can tell, and that every way to compute it is one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from narrowgate.models import Batch, FeatureSpec, Field, GemConfig, GemModel, GemTask, Preset, open_data
from narrowgate.precision.errors import NarrowgateError
from torch import Tensor

ROWS, EVENTS = 128, 4
FEATURES = FeatureSpec(
    categorical=(Field("user", 4),),
    bags=(),
    numeric=(),
    events=(Field("item", 5), Field("gap", 2)),
    tasks=("hurried",),
)
CONFIG = GemConfig(
    d=16, heads=2, layers=1, max_tokens=6, fm_hidden=(32,), cross_rank=8, pffn_tokens=3, head_hidden=16, dropout=0.0
)


def hurried(seed: int) -> Batch:
    """Histories of which nothing but ``event_times`` tells the label: whether the last event came within a minute."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    labels = draw(0, 2, ROWS)
    gaps = torch.full((ROWS, EVENTS), 5000)
    gaps[:, -1] = torch.where(labels == 1, draw(1, 60, ROWS), draw(3600, 40_000, ROWS))
    return Batch(
        sparse=draw(1, 4, ROWS, 1),
        bags=(),
        dense=torch.zeros(ROWS, 0),
        events=torch.ones(ROWS * EVENTS, 2, dtype=torch.int64),
        event_rows=torch.arange(ROWS).repeat_interleave(EVENTS),
        offsets=EVENTS * torch.arange(ROWS + 1),
        labels=labels.float().unsqueeze(1),
        groups=torch.arange(ROWS),
        rows=ROWS,
        event_times=gaps.cumsum(1).flatten(),
    )


def held_out_accuracy(config: GemConfig) -> float:
    torch.manual_seed(1)
    model = GemModel(config, FEATURES)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(140):
        batch = hurried(step)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
        optimizer.step()
    with torch.no_grad():
        batch = hurried(1000)
        return float(((model.eval()(batch) > 0) == (batch.labels > 0)).double().mean())


def test_a_model_learns_what_only_the_time_between_events_tells() -> None:
    assert held_out_accuracy(dataclasses.replace(CONFIG, time_buckets=32)) > 0.9
    assert held_out_accuracy(dataclasses.replace(CONFIG, bias_reach=4)) < 0.65


def timed(small: Preset, **changes: Any) -> Preset:
    return dataclasses.replace(small, model=dataclasses.replace(small.model, **{"time_buckets": 16, **changes}))


def test_every_layer_learns_its_own_bias_from_generated_data(small: Preset) -> None:
    task = GemTask.open(timed(small), "synthetic")
    model = task.build_model()
    task.loss(model, next(iter(task.train_batches(0)))).backward()
    tables = [parameter for name, parameter in model.named_parameters() if name.endswith("time_bias")]
    assert [table.shape for table in tables] == [(2, 16)] * 2
    for table in tables:
        assert table.grad is not None
        assert table.grad.any()


def test_without_buckets_nothing_is_there(small: Preset) -> None:
    task = GemTask.open(small, "synthetic")
    assert not any("time_bias" in name for name, _ in task.build_model().named_parameters())
    assert next(iter(task.train_batches(0))).event_times is None


def test_movielens_has_times_of_ratings_and_only_the_order_of_next_items(
    small: Preset, movielens: Any, tmp_path: Any
) -> None:
    folder = movielens.million(tmp_path)
    batch = next(iter(open_data(f"ml-1m:{folder}", timed(small)).train_batches(0)))
    assert batch.event_times is not None
    live = batch.event_times[: int(batch.offsets[-1])]
    assert set(live.tolist()) <= set(movielens.ratings[:, 3].tolist())
    with pytest.raises(NarrowgateError) as caught:
        open_data(f"ml-1m:{folder}?task=next-item", timed(small))
    assert str(caught.value) == (
        "ml-1m, task next-item: model field 'time_buckets' needs the times of events, but it knows the order of events"
        " only"
    )


def test_a_batch_without_times_is_refused(small: Preset) -> None:
    task = GemTask.open(timed(small), "synthetic")
    batch = dataclasses.replace(next(iter(task.train_batches(0))), event_times=None)
    with pytest.raises(NarrowgateError, match="has no event_times, which model field 'time_buckets' = 16 needs"):
        task.loss(task.build_model(), batch)


@pytest.mark.parametrize("buckets", [-1, 3, 128])
def test_buckets_are_a_power_of_two(buckets: int) -> None:
    with pytest.raises(NarrowgateError, match=f"'time_buckets' must be a power of two up to 64 or 0, found {buckets}"):
        dataclasses.replace(CONFIG, time_buckets=buckets)


def twice(task: GemTask, state: dict[str, Tensor], batch: Batch, *, compiled: bool = False) -> list[dict[str, Tensor]]:
    """The loss and the gradients of the biases by name, on the CPU; two runs of them."""
    model = task.build_model().eval()
    model.load_state_dict(state)
    forward: Any = torch.compile(model, fullgraph=True) if compiled else model
    tables = {name: parameter for name, parameter in model.named_parameters() if name.endswith("_bias")}
    runs = []
    for _ in range(2):
        loss = F.binary_cross_entropy_with_logits(forward(batch)[: batch.rows], batch.labels[: batch.rows])
        gradients = torch.autograd.grad(loss, list(tables.values()))
        runs.append({"loss": loss.detach().cpu()} | {n: x.cpu() for n, x in zip(tables, gradients, strict=True)})
    return runs


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention", ["padded", "jagged"])
def test_a_gpu_computes_what_a_cpu_does(small: Preset, attention: str, compiled: bool) -> None:
    presets = [timed(small, bias_reach=4, window=5, layers=1, attention=kind) for kind in ("padded", attention)]
    here, there = (GemTask.open(preset, device=device) for preset, device in zip(presets, ("cpu", "cuda"), strict=True))
    batch, state = next(iter(here.train_batches(0))), here.build_model().state_dict()
    for name, table in state.items():
        if name.endswith("_bias"):
            table.normal_()
    expected, _ = twice(here, state, batch)
    first, second = twice(there, state, batch.to("cuda"), compiled=compiled)
    assert list(expected) == ["loss", *(f"layers.0.sequence.{kind}_bias" for kind in ("position", "time"))]
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-6)
        # Compilers may scatter the padded one's gradient of position.
        assert "position" in name or torch.equal(first[name], second[name])
