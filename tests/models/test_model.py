"""The whole model: shapes, gradients, dead tokens, autocast, compilation, configuration faults."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from narrowgate.models import Batch, GemConfig, GemModel, GemTask, Preset, get_preset, preset, preset_names
from narrowgate.precision.errors import NarrowgateError
from torch import nn


def first(task: GemTask) -> Batch:
    return next(iter(task.train_batches(0)))


def with_model(small: Preset, **changes: Any) -> GemTask:
    return GemTask.open(dataclasses.replace(small, model=dataclasses.replace(small.model, **changes)), "synthetic")


def test_logits_are_one_fp32_number_a_row_and_task(task: GemTask) -> None:
    logits = task.build_model()(first(task))
    assert logits.shape == (32, 2)
    assert logits.dtype == torch.float32


def test_every_parameter_gets_a_finite_gradient(task: GemTask) -> None:
    model = task.build_model()
    task.loss(model, first(task)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_dead_tokens_change_nothing(task: GemTask) -> None:
    model, batch = task.build_model().eval(), first(task)
    used = int(batch.offsets[-1])
    assert used < len(batch.events), "this batch is filled up with dead tokens"
    events = batch.events.clone()
    events[used:] = 1
    other = dataclasses.replace(batch, events=events)
    assert torch.equal(model(other), model(batch))
    shorter = dataclasses.replace(batch, events=batch.events[:used], event_rows=batch.event_rows[:used])
    torch.testing.assert_close(model(shorter), model(batch), rtol=1e-5, atol=1e-5)


def test_dead_tokens_get_no_gradient(task: GemTask) -> None:
    model, batch = task.build_model(), first(task)
    used = int(batch.offsets[-1])
    unseen = 25  # the last item: make only dead tokens show it
    events, sparse = batch.events.clone(), batch.sparse.clone()
    events[:used, 0].clamp_(max=unseen - 1)
    sparse[:, 1].clamp_(max=unseen - 1)
    events[used:, 0] = unseen
    task.loss(model, dataclasses.replace(batch, events=events, sparse=sparse)).backward()
    table = model.sparse.tables["item"]
    assert isinstance(table, nn.Embedding)
    assert table.weight.grad is not None
    assert not table.weight.grad[unseen].any()
    assert table.weight.grad[: unseen - 1].any()


def test_histories_change_predictions(task: GemTask) -> None:
    model, batch = task.build_model().eval(), first(task)
    used = int(batch.offsets[-1])
    events = batch.events.clone()
    events[:used, 0] = 1 + events[:used, 0] % 24
    changed = model(dataclasses.replace(batch, events=events)) != model(batch)
    assert torch.equal(changed.any(1), batch.offsets.diff() > 0)


def test_rows_are_independent(task: GemTask) -> None:
    model, batch = task.build_model().eval(), first(task)
    sparse = batch.sparse.clone()
    sparse[0, 1] = 1 + sparse[0, 1] % 24
    changed = model(dataclasses.replace(batch, sparse=sparse)) != model(batch)
    assert changed[0].all()
    assert not changed[1:].any()


@pytest.mark.parametrize("residual", ["fp32", "autocast"])
def test_bf16_autocast_stays_close_and_finite(small: Preset, residual: str) -> None:
    task = with_model(small, residual=residual)
    model, batch = task.build_model().eval(), first(task)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
        loss = task.loss(model, batch)
    assert logits.dtype == loss.dtype == torch.float32
    torch.testing.assert_close(logits, model(batch), rtol=0, atol=0.05)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "hardswish", "norm_affine": False, "norm_block": 8},
        {"activation": "gelu", "bias": True, "window": 2, "sequence_dropout": 0.3},
        {"layers": 1, "fm_hidden": (32, 16), "n_recent": 1, "n_pma": 1, "n_summary": 1},
    ],
)
def test_switches_build_models_that_train(small: Preset, changes: dict[str, Any]) -> None:
    task = with_model(small, **changes)
    model = task.build_model()
    task.loss(model, first(task)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_compiles_into_one_graph_with_the_same_gradients(task: GemTask) -> None:
    model, batch = task.build_model().eval(), first(task)
    eager = task.loss(model, batch)
    eager.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert isinstance(compiled, nn.Module)
    loss = task.loss(compiled, batch)
    loss.backward()
    torch.testing.assert_close(loss, eager, rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_only_heads_have_biases_unless_asked(small: Preset, task: GemTask) -> None:
    model = task.build_model()
    assert [n for n, _ in model.named_parameters() if n.endswith(".bias")] == ["heads.0.out.bias", "heads.1.out.bias"]
    assert any(
        n == "layers.0.sequence.uvqk.bias" for n, _ in with_model(small, bias=True).build_model().named_parameters()
    )


@pytest.mark.parametrize("name", ["gem-tiny", "gem-small"])
def test_presets_align_every_hidden_gemm_to_16(name: str) -> None:
    task = GemTask.open("gem-tiny", "synthetic")
    with torch.device("meta"):
        model = GemModel(preset(name), task.data.features)
    odd = [
        n for n, m in model.named_modules() if isinstance(m, nn.Linear) and (m.in_features % 16 or m.out_features % 16)
    ]
    assert odd == ["sparse.numeric", "heads.0.out", "heads.1.out"]


def test_unknown_model_is_named_with_the_closest_one() -> None:
    with pytest.raises(NarrowgateError, match=r"unknown model 'gem-tinny'; did you mean 'gem-tiny'\?"):
        get_preset("gem-tinny")
    assert preset_names()[:2] == ["gem-tiny", "gem-small"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "'d' must be a multiple of heads"),
        ({"layers": 0}, "'layers' must be at least 1, found 0"),
        ({"max_tokens": 3}, "'max_tokens' must leave room"),
        ({"window": 0}, "'window' must be at least 1"),
        ({"norm_block": 5}, "'norm_block' must divide d = 16"),
        ({"dropout": 1.0}, r"'dropout' must lie in \[0, 1\)"),
        ({"sequence_dropout": -0.1}, r"'sequence_dropout' must lie in \[0, 1\)"),
        ({"activation": "sillu"}, "found 'sillu'; did you mean 'silu'"),
        ({"residual": "bf16"}, "'residual' is one of fp32, autocast"),
    ],
)
def test_impossible_configurations_say_why(small: Preset, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NarrowgateError, match=message):
        GemConfig(**(dataclasses.asdict(small.model) | changes))
