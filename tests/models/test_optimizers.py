"""Adam with rowwise Adagrad: both formulas, sparse and dense gradients, schedule, state, recipes' step hooks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from narrowgate.models import GemTask, Preset
from narrowgate.models.optimizers import AdamWithRowwiseAdagrad, table_parameters
from narrowgate.models.schedule import learning_rate
from narrowgate.precision import cast_operators
from narrowgate.precision.cast_operators import kernels_on_cpu
from narrowgate.recipes import apply_recipe, recipe_state
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

KERNELS_ON = [
    pytest.param("cpu", marks=pytest.mark.skipif(not kernels_on_cpu(), reason="needs Triton's interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture
def tabled(small: Preset) -> GemTask:
    return GemTask.open(
        dataclasses.replace(small, training=dataclasses.replace(small.training, table_lr=0.05)), "synthetic"
    )


def test_both_parts_follow_their_formulas() -> None:
    dense, table = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(6, 3))
    other, expected = nn.Parameter(dense.detach().clone()), table.detach().double()
    ours = AdamWithRowwiseAdagrad([dense], [table], lr=0.1, table_lr=0.3, betas=(0.9, 0.98))
    adam = torch.optim.Adam([other], lr=0.1, betas=(0.9, 0.98))
    total = torch.zeros(6, dtype=torch.float64)
    for _ in range(4):
        dense.grad, table.grad = torch.randn(4, 3), torch.randn(6, 3)
        table.grad[2] = 0
        other.grad = dense.grad.clone()
        ours.step()
        adam.step()
        grad = table.grad.double()
        for row in range(6):
            total[row] += (grad[row] ** 2).mean()
            expected[row] -= 0.3 * grad[row] / (total[row].sqrt() + 1e-8)
    torch.testing.assert_close(dense, other, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(table.double(), expected, rtol=1e-5, atol=1e-6)
    assert ours.state[table]["sum"].shape == (6,)


def test_sparse_gradients_give_what_dense_ones_give() -> None:
    weight, ids = torch.randn(7, 4), torch.tensor([1, 5, 1, 2])
    found = []
    for sparse in (False, True):
        table = nn.Embedding(7, 4, sparse=sparse)
        table.weight = nn.Parameter(weight.clone())
        optimizer = AdamWithRowwiseAdagrad([], [table.weight], lr=0.1, table_lr=0.3)
        for step in range(3):
            optimizer.zero_grad()
            ((table(ids) - step) ** 2).sum().backward()
            assert table.weight.grad.is_sparse == sparse
            optimizer.step()
        found.append(table.weight.detach())
    torch.testing.assert_close(found[1], found[0])
    assert torch.equal(found[1][3], weight[3])


@pytest.mark.parametrize("device", KERNELS_ON)
def test_tables_of_all_sizes_step_in_one_launch_as_their_formula_says(device: str) -> None:
    shapes = [(300, 16), (1, 16), (77, 16), (0, 16), (33, 5), (3, 700)]
    tables = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    tables.append(nn.Parameter(torch.randn(1 + 9 * 8, device=device)[1:].view(9, 8)))  # not on a multiple of 16 bytes
    expected = [table.detach().double() for table in tables]
    totals = [torch.zeros(table.shape[0], dtype=torch.float64, device=device) for table in tables]
    optimizer = AdamWithRowwiseAdagrad([], tables, lr=0.1, table_lr=0.3)
    for _ in range(3):
        for table, total, exact in zip(tables, totals, expected, strict=True):
            table.grad = torch.randn_like(table)
            table.grad[::3] = 0
            grad = table.grad.double()
            total += (grad**2).mean(1)
            exact -= torch.where(grad != 0, 0.3 * grad / (total.sqrt() + 1e-8).unsqueeze(1), 0)
        # A square that underflows: such a row has a gradient all the same.
        tables[0].grad[3] = 1e-30
        expected[0][3] -= 0.3 * 1e-30 / (totals[0][3].sqrt() + 1e-8)
        versions = [table._version for table in tables]
        optimizer.step()
        assert all(table._version > before for table, before in zip(tables, versions, strict=True))
    for table, total, exact in zip(tables, totals, expected, strict=True):
        torch.testing.assert_close(table.double(), exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state[table]["sum"].double(), total, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("device", KERNELS_ON)
def test_a_table_that_the_launch_cannot_take_is_stepped_all_the_same(device: str) -> None:
    plain, turned, halves = (nn.Parameter(torch.ones(6, 4, device=device)) for _ in range(3))
    turned.data = torch.ones(4, 6, device=device).t()
    halves.data = halves.data.bfloat16()
    held = nn.Parameter(torch.ones(6, 4, device=device))
    optimizer = AdamWithRowwiseAdagrad([], [plain, turned, halves, held], lr=0.1, table_lr=0.25)
    optimizer.state[held]["sum"] = torch.zeros(6, dtype=torch.float64, device=device)
    for table in (plain, turned, halves, held):
        table.grad = torch.ones_like(table)
    plain.grad[1] = torch.nan
    optimizer.step()
    assert plain[1].isnan().all()
    for table in (plain[2:], turned, halves, held):
        assert (table == 0.75).all()


@pytest.mark.parametrize("device", KERNELS_ON)
def test_rates_may_be_whole_numbers(device: str) -> None:
    table = nn.Parameter(torch.ones(6, 4, device=device))
    optimizer = AdamWithRowwiseAdagrad([], [table], lr=1, table_lr=1, table_eps=0)
    table.grad = torch.ones_like(table)
    optimizer.step()
    assert (table == 0).all()


def test_tables_without_memory_are_stepped_by_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_operators, "kernels_on_cpu", lambda: True)
    with FakeTensorMode():
        tables = [nn.Parameter(torch.ones(6, 4))]
        tables[0].grad = torch.ones_like(tables[0])
    tables.append(nn.Parameter(torch.ones(6, 4, device="meta")))
    tables[1].grad = torch.ones_like(tables[1])
    for table in tables:
        optimizer = AdamWithRowwiseAdagrad([], [table], lr=0.1, table_lr=0.25)
        optimizer.step()
        assert optimizer.state[table]["sum"].shape == (6,)


def test_a_compiled_step_moves_tables_as_the_eager_one_does() -> None:
    found = []
    for compiled in (False, True):
        table = nn.Parameter(torch.ones(6, 4))
        optimizer = AdamWithRowwiseAdagrad([], [table], lr=0.1, table_lr=0.25)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for value in (1.0, 3.0):
            table.grad = torch.full_like(table, value)
            step()
        found.append(table.detach())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.gpu
def test_a_captured_step_of_tables_follows_the_gradients_of_each_replay() -> None:
    table = nn.Parameter(torch.ones(6, 4, device="cuda"))
    optimizer = AdamWithRowwiseAdagrad([], [table], lr=0.1, table_lr=0.25)
    table.grad = torch.zeros_like(table)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    table.grad.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(table.detach(), torch.full_like(table, 0.75))


def test_the_task_gives_tables_to_adagrad_and_all_rates_follow_the_schedule(tabled: GemTask) -> None:
    model = tabled.build_model()
    optimizer = tabled.optimizer(model)
    groups = {group["rowwise"]: group for group in optimizer.param_groups}
    assert {id(p) for p in groups[True]["params"]} == {id(p) for p in table_parameters(model)}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    for batch in list(tabled.train_batches(0))[:3]:
        tabled.loss(model, batch).backward()
        optimizer.step()
    rate = learning_rate(3, tabled.steps, tabled.preset.training)
    assert groups[False]["lr"] == pytest.approx(rate)
    assert groups[True]["lr"] == pytest.approx(rate * 0.05 / tabled.preset.training.lr)


def test_state_travels(tabled: GemTask) -> None:
    def run(steps: int, state: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = tabled.build_model()
        optimizer = tabled.optimizer(model)
        batches = list(tabled.train_batches(0))
        start = 0
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            start = 2
        for step in range(start, steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            tabled.loss(model, batches[step]).backward()
            optimizer.step()
        return model, optimizer

    whole, _ = run(4)
    half, optimizer = run(2)
    again, _ = run(4, (half.state_dict(), optimizer.state_dict()))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_a_step_moves_a_recipes_histories_once(tabled: GemTask) -> None:
    model = tabled.build_model()
    apply_recipe(model, "fp8-delayed")
    optimizer = tabled.optimizer(model)
    for batch in list(tabled.train_batches(0))[:2]:
        optimizer.zero_grad()
        tabled.loss(model, batch).backward()
        optimizer.step()
    layers = recipe_state(model)["layers"]
    history = next(value for layer in layers.values() for key, value in layer.items() if key == "fprop.input.history")
    assert (history > 0).sum() == 2


def test_training_with_it_lowers_the_loss(small: Preset) -> None:
    preset = dataclasses.replace(small, training=dataclasses.replace(small.training, table_lr=0.05))
    task = GemTask.open(preset, "synthetic", steps=60)
    model = task.build_model()
    optimizer = task.optimizer(model)
    losses = []
    for batch in task.train_batches(0):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
