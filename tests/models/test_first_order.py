"""The linear part of log odds: what it computes, and how it is trained."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from narrowgate.models import Batch, GemModel, GemTask, Preset, Trainer
from narrowgate.models.first_order import FirstOrder, first_order_parameters
from narrowgate.models.optimizers import table_parameters
from narrowgate.models.schedule import learning_rate
from narrowgate.recipes import apply_recipe
from torch import Tensor


def opened(small: Preset, **training: Any) -> GemTask:
    model = dataclasses.replace(small.model, first_order=True)
    return GemTask.open(
        dataclasses.replace(small, model=model, training=dataclasses.replace(small.training, **training)), "synthetic"
    )


@pytest.fixture
def linear(small: Preset) -> GemTask:
    return opened(small)


def part_of(model: GemModel) -> FirstOrder:
    assert model.first_order is not None
    return model.first_order


def filled(part: FirstOrder) -> FirstOrder:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return part


def row_by_row(part: FirstOrder, task: GemTask, batch: Batch) -> Tensor:
    """The same in double precision, one id at a time."""
    spec, weight = task.data.features, part.weight.detach().double()
    begins, begin = {}, 0
    for kind in ("categorical", "bags", "events"):
        for index, field in enumerate(getattr(spec, kind)):
            begins[kind, index] = begin
            begin += field.rows

    def of(kind: str, index: int, identity: int) -> Tensor:
        return weight[begins[kind, index] + identity]

    found = []
    for row in range(batch.sparse.shape[0]):
        odds = torch.zeros(len(spec.tasks), dtype=torch.float64)
        if part.numeric is not None:
            odds += batch.dense[row].double() @ part.numeric.detach().double()
        for i in range(len(spec.categorical)):
            odds += of("categorical", i, int(batch.sparse[row, i]))
        for i, bag in enumerate(batch.bags):
            for identity in bag[row].tolist():
                odds += of("bags", i, identity) if identity else 0
        begin, end = int(batch.offsets[row]), int(batch.offsets[row + 1])
        for event in range(begin, end):
            for i in range(len(spec.events)):
                odds += of("events", i, int(batch.events[event, i])) / (end - begin)
        found.append(odds)
    return torch.stack(found)


def test_it_is_linear_in_ids_values_numbers_and_the_mean_of_a_history(linear: GemTask) -> None:
    part = filled(FirstOrder(linear.data.features))
    for batch in (next(iter(linear.train_batches(0))), *linear.eval_batches()):
        found = part(batch)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), row_by_row(part, linear, batch), rtol=1e-5, atol=1e-5)


def test_a_source_without_numbers_has_no_weights_of_them(linear: GemTask) -> None:
    spec, batch = dataclasses.replace(linear.data.features, numeric=()), next(iter(linear.train_batches(0)))
    part, batch = filled(FirstOrder(spec)), dataclasses.replace(batch, dense=batch.dense[:, :0])
    # FSDP2 fails on a parameter without elements.
    assert [p.shape for p in part.parameters()] == [part.weight.shape]
    expected = filled(FirstOrder(linear.data.features))
    assert expected.numeric is not None
    with torch.no_grad():
        expected.numeric.zero_()
    full = dataclasses.replace(batch, dense=torch.zeros(len(batch.dense), len(linear.data.features.numeric)))
    torch.testing.assert_close(part(batch), expected(full), rtol=0, atol=0)


def test_it_starts_at_zero_beside_the_network(small: Preset, linear: GemTask) -> None:
    batch, found = next(iter(linear.train_batches(0))), []
    for task in (GemTask.open(small, "synthetic"), linear):
        torch.manual_seed(0)
        found.append(task.build_model().eval()(batch))
    assert torch.equal(found[1], found[0])


def test_dead_tokens_and_rows_without_events_have_no_part_of_a_history(linear: GemTask) -> None:
    part, batch = filled(FirstOrder(linear.data.features)), next(iter(linear.train_batches(0)))
    used = int(batch.offsets[-1])
    assert used < len(batch.events)
    events = batch.events.clone()
    events[used:] = 1
    assert torch.equal(part(dataclasses.replace(batch, events=events)), part(batch))
    rows = batch.sparse.shape[0]
    none = dataclasses.replace(
        batch, offsets=torch.zeros_like(batch.offsets), event_rows=torch.full_like(batch.event_rows, rows)
    )
    assert part(none).isfinite().all()
    torch.testing.assert_close(part(none).double(), row_by_row(part, linear, none), rtol=1e-5, atol=1e-5)


def test_it_is_compiled_with_the_model_and_stays_fp32_under_autocast(linear: GemTask) -> None:
    model, batch = linear.build_model().eval(), next(iter(linear.train_batches(0)))
    part = part_of(model)
    filled(part)
    found = part(batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(part(batch), found)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch), model(batch), rtol=1e-5, atol=1e-5)


def test_terms_are_added_in_fp32_where_fsdp2_hands_out_bf16(linear: GemTask) -> None:
    part, batch = filled(FirstOrder(linear.data.features)).bfloat16(), next(iter(linear.train_batches(0)))
    for dense in (batch.dense, batch.dense.bfloat16()):
        given = dataclasses.replace(batch, dense=dense)
        found = part(given)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), row_by_row(part, linear, given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("table_lr", [None, 0.05])
def test_its_weights_have_a_rate_of_their_own_and_decay(small: Preset, table_lr: float | None) -> None:
    task = opened(small, table_lr=table_lr, first_order_lr=0.2, first_order_decay=0.5)
    model = task.build_model()
    own = {id(p) for p in first_order_parameters(model)}
    assert len(own) == 2
    assert not own & {id(p) for p in table_parameters(model)}
    weight, table = part_of(model).weight, model.sparse.tables["item"].get_parameter("weight")
    optimizer = task.optimizer(model)
    (group,) = [g for g in optimizer.param_groups if own & {id(p) for p in g["params"]}]
    assert {id(p) for p in group["params"]} == own
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    for step in range(3):
        expected = 0.2 * learning_rate(step, task.steps, task.preset.training) / task.preset.training.lr
        assert group["lr"] == pytest.approx(expected)
        with torch.no_grad():
            weight.fill_(1.0)
        before = table.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        torch.testing.assert_close(
            model.first_order.weight, torch.full_like(model.first_order.weight, 1 - expected / 2)
        )
        assert torch.equal(model.sparse.tables["item"].weight, before)


@pytest.mark.parametrize("table_lr", [None, 0.05])
def test_a_training_resumes_with_it(small: Preset, table_lr: float | None, tmp_path: Any) -> None:
    task = opened(small, table_lr=table_lr)
    whole = Trainer(task, seed=1)
    losses = whole.fit(6)
    half = Trainer(task, seed=1)
    half.fit(3)
    half.save(tmp_path / "half.pt")
    again = Trainer(task, seed=1)
    again.resume(tmp_path / "half.pt")
    assert again.fit(6) == losses
    assert first_order_parameters(again.model)[0].any()


def test_it_learns_what_one_weight_an_id_can_say(small: Preset) -> None:
    """Labels that depend on the user alone: the network has hardly moved by the time the linear part knows them."""
    task = opened(small, lr=1e-6, steps=60)
    part = FirstOrder(task.data.features)
    optimizer = torch.optim.Adam(part.parameters(), lr=0.1)
    batches = list(task.train_batches(0))
    loss = math.inf
    for _ in range(6):
        for batch in batches:
            labels = (batch.sparse[:, :1] % 2).float().expand(-1, len(task.task_names))
            value = torch.nn.functional.binary_cross_entropy_with_logits(part(batch), labels)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            loss = float(value.detach())
    assert loss < 0.2


def test_no_recipe_lowers_it(linear: GemTask) -> None:
    model = linear.build_model()
    weights = first_order_parameters(model)
    plan = apply_recipe(model, "gem-fp8")
    assert first_order_parameters(model) == weights
    assert not [layer for layer in plan.layers if "first_order" in layer.name]


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same_and_repeats_its_bits(linear: GemTask) -> None:
    part, batch = filled(FirstOrder(linear.data.features)), next(iter(linear.train_batches(0)))
    expected, there, moved = row_by_row(part, linear, batch), batch.to("cuda"), copy.deepcopy(part).cuda()
    found = moved(there)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(moved(there), found)
    found.square().sum().backward()
    part(batch).square().sum().backward()
    for ours, theirs in zip(moved.parameters(), part.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)
