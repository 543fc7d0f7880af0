"""Gradients of small embedding tables as one product: exact, repeatable, and the same model around them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from narrowgate.models import Batch, GemTask, Preset, small_tables
from narrowgate.models.small_tables import MAX_ROWS, MIN_TOKENS, is_small, products_pay, sum_of_rows
from torch import Tensor, nn

WIDTH, ROWS = 24, (1, 4, 40, 129)
#: More tokens than one partial sum takes, in a number that no number of partial sums divides.
TOKENS = 3 * 4096 + 5


def problem(device: str = "cpu") -> tuple[Tensor, list[tuple[nn.Embedding, Tensor]]]:
    """Rows of a large table, and small tables with ids; one table looks a few ids up very often."""
    given = torch.randn(TOKENS, WIDTH).to(device).requires_grad_()
    small = []
    for rows in ROWS:
        ids = (rows * torch.rand(TOKENS) ** 4).long()
        small.append((nn.Embedding(rows, WIDTH, device=device), ids.to(device)))
    return given, small


def exact(small: list[tuple[nn.Embedding, Tensor]], grad: Tensor) -> list[Tensor]:
    """Gradients in double."""
    zeros = [torch.zeros(len(t.weight), WIDTH, dtype=torch.float64, device=grad.device) for t, _ in small]
    return [zero.index_add_(0, ids, grad.double()) for zero, (_, ids) in zip(zeros, small, strict=True)]


def gradients(out: Tensor, given: Tensor, small: list[tuple[nn.Embedding, Tensor]], grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, [given, *(table.weight for table, _ in small)], grad))


def wide(shape: torch.Size) -> Tensor:
    """FP32 gradients whose magnitudes span 80 octaves, with all their bits in use."""
    return torch.randn(shape) * torch.exp2(torch.randint(-40, 40, shape).float())


def test_forward_is_the_sum_of_look_ups_in_order_to_the_bit() -> None:
    given, small = problem()
    rows = [given, *(table(ids) for table, ids in small)]
    # As PyTorch adds up to four, one after the other.
    expected = torch.stack(rows[:-1]).sum(0) + rows[-1]
    assert torch.equal(sum_of_rows([given], small), expected)
    assert torch.equal(sum_of_rows([given], small, torch.bfloat16), expected.bfloat16())
    assert torch.equal(sum_of_rows([], small), torch.stack(rows[1:]).sum(0))
    assert torch.equal(sum_of_rows([given], [], torch.bfloat16), given.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_dense_fp32_and_round_nothing_but_sums(dtype: torch.dtype) -> None:
    given, small = problem()
    out = sum_of_rows([given], small, dtype)
    grad = torch.randn_like(out)
    of_given, *found = gradients(out, given, small, grad)
    assert torch.equal(of_given, grad.float())
    for here, there in zip(found, exact(small, grad), strict=True):
        assert here.dtype == torch.float32
        assert not here.is_sparse
        assert here.is_contiguous()
        # An FP32 gradient rounded to BF16 errs by 1e-3 here, in two BF16 parts by 5e-6.
        assert (here - there).norm() < 5e-7 * there.norm()


@pytest.mark.parametrize("scale", [2.0**-60, 1.0, 2.0**60])
def test_an_fp32_gradient_of_one_token_arrives_to_the_bit(scale: float) -> None:
    table = nn.Embedding(50, WIDTH)
    ids = torch.randperm(50)
    grad = wide(torch.Size((50, WIDTH))) * scale
    (found,) = torch.autograd.grad(sum_of_rows([], [(table, ids)]), [table.weight], grad)
    assert torch.equal(found[ids], grad)


def test_few_tokens_or_none_have_gradients_too() -> None:
    table = nn.Embedding(4, WIDTH)
    for tokens in (0, 1, 7):
        ids = torch.arange(tokens) % 4
        out = sum_of_rows([], [(table, ids)], torch.bfloat16)
        (found,) = torch.autograd.grad(out, [table.weight], torch.ones_like(out))
        assert torch.equal(found[:, 0], torch.bincount(ids, minlength=4).float())


def test_a_table_that_is_looked_up_twice_gets_both_gradients() -> None:
    table, (a, b) = nn.Embedding(4, WIDTH), torch.randint(4, (2, 100))
    grad = torch.randn(100, WIDTH)
    (found,) = torch.autograd.grad(sum_of_rows([], [(table, a), (table, b)]), [table.weight], grad)
    (expected,) = torch.autograd.grad(F.embedding(a, table.weight) + F.embedding(b, table.weight), [table.weight], grad)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_autocast_in_backward_changes_nothing() -> None:
    given, small = problem()
    out = sum_of_rows([given], small)
    grad = torch.randn_like(out)
    plain = torch.autograd.grad(out, [small[1][0].weight], grad, retain_graph=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        within = torch.autograd.grad(out, [small[1][0].weight], grad)[0]
    assert torch.equal(plain, within)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_into_one_graph_with_the_same_bits(dtype: torch.dtype) -> None:
    given, small = problem()
    compiled: Any = torch.compile(lambda x: sum_of_rows([x * 1.0], small, dtype), fullgraph=True)
    grad = torch.randn(TOKENS, WIDTH).to(dtype)
    expected, out = sum_of_rows([given], small, dtype), compiled(given)
    assert torch.equal(out, expected)
    for here, there in zip(gradients(out, given, small, grad), gradients(expected, given, small, grad), strict=True):
        assert torch.equal(here, there)


def test_the_operator_keeps_what_pytorch_asks_of_one() -> None:
    ids = [torch.randint(rows, (60,)) for rows in (3, 8)]
    for dtype in (torch.bfloat16, torch.float32):
        grad = torch.randn(60, 5).to(dtype)
        torch.library.opcheck(torch.ops.narrowgate.small_table_gradients.default, (grad, ids, [3, 8]))


@pytest.mark.parametrize(
    ("table", "small"),
    [
        (nn.Embedding(MAX_ROWS, 2), True),
        (nn.Embedding(MAX_ROWS + 1, 2), False),
        (nn.Embedding(5, 2, padding_idx=0), False),
        (nn.Embedding(5, 2, sparse=True), False),
        (nn.Embedding(5, 2, max_norm=1.0), False),
        (nn.Embedding(5, 2, scale_grad_by_freq=True), False),
        (nn.Embedding(5, 2, dtype=torch.bfloat16), False),
        (nn.EmbeddingBag(5, 2), False),
    ],
)
def test_only_plain_tables_of_few_rows_are_small(table: nn.Module, small: bool) -> None:
    assert is_small(table) == small


def test_products_are_for_many_tokens_on_a_gpu() -> None:
    assert not products_pay(torch.zeros(MIN_TOKENS, 4, dtype=torch.int64))


def compare(task: GemTask, batch: Batch, monkeypatch: pytest.MonkeyPatch, **sharded: Any) -> None:
    """Train one step with scatters and one with products; everything but the tables' last bits agrees."""
    found = []
    for products in (False, True):
        used: list[int] = []

        def counted(given: Any, small: Any, dtype: Any = None, used: list[int] = used) -> Tensor:
            used.append(len(small))
            return sum_of_rows(given, small, dtype)

        monkeypatch.setattr("narrowgate.models.embedding.products_pay", lambda ids, products=products: products)
        monkeypatch.setattr("narrowgate.models.embedding.sum_of_rows", counted)
        torch.manual_seed(0)
        model = task.build_model()
        if sharded:
            from narrowgate.models.embedding_exchange import shard_tables

            shard_tables(model, **sharded)
        with torch.autocast("cpu", torch.bfloat16):
            loss = task.loss(model, batch)
        loss.backward()
        monkeypatch.undo()
        found.append((used, loss, {name: p.grad for name, p in model.named_parameters()}, list(model.state_dict())))
    (few, loss, plain, keys), (many, same, product, others) = found
    # Sharded tables are their owners' alone: positions are left.
    assert (few, many) == ([0], [1 if sharded else len(task.data.features.events) + 1])
    assert torch.equal(loss, same)
    assert keys == others
    for name, grad in plain.items():
        assert grad is not None, name
        torch.testing.assert_close(product[name], grad, rtol=1e-5, atol=1e-6 * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("residual", ["fp32", "autocast"])
def test_a_model_gets_the_same_gradients_either_way(
    small: Preset, residual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = dataclasses.replace(small.model, residual=residual)
    task = GemTask.open(dataclasses.replace(small, model=model), "synthetic")
    compare(task, next(iter(task.train_batches(0))), monkeypatch)


def test_sharded_tables_stay_with_their_exchange(task: GemTask, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(task, next(iter(task.train_batches(0))), monkeypatch, forward="fp32", backward="fp32")


def test_a_compiled_model_takes_products_without_a_break(task: GemTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgate.models.embedding.products_pay", lambda ids: True)
    model, batch = task.build_model(), next(iter(task.train_batches(0)))
    model.eval()
    names = [n for n, _ in model.named_parameters()]
    eager = torch.autograd.grad(task.loss(model, batch), list(model.parameters()))
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    traced = torch.autograd.grad(task.loss(compiled, batch), list(model.parameters()))
    for name, here, there in zip(names, traced, eager, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_gradients_are_exact_and_repeat_their_bits(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_tables, "_CHUNKS", 2)
    given, small = problem("cuda")
    run: Any = lambda x: sum_of_rows([x * 1.0], small, dtype)  # noqa: E731
    run = torch.compile(run, fullgraph=True) if compiled else run
    grad = torch.randn(TOKENS, WIDTH, device="cuda").to(dtype)
    found = [gradients(run(given), given, small, grad)[1:] for _ in range(3)]
    for here, again, third, there in zip(*found, exact(small, grad), strict=True):
        assert torch.equal(here, again)
        assert torch.equal(here, third)
        assert (here - there).norm() < 2e-6 * there.norm()


@pytest.mark.gpu
def test_gpu_products_start_with_many_tokens() -> None:
    ids = torch.zeros(MIN_TOKENS, 4, dtype=torch.int64, device="cuda")
    assert products_pay(ids)
    assert not products_pay(ids[1:])
    with torch.no_grad():
        assert not products_pay(ids)
