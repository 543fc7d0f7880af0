"""The large presets as shapes, LoKA's switches, and the mixture of experts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from narrowgate.models import GemConfig, GemTask, Preset, get_preset
from narrowgate.models.experts import Experts, imbalance
from narrowgate.models.functional import RMSNorm
from narrowgate.precision import NAMED_DEVICES, LinearConfig
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.grouped import lower_grouped
from narrowgate.precision.layer import layer_state
from narrowgate.recipes import apply_recipe
from torch import nn


def with_model(small: Preset, **changes: object) -> GemTask:
    return GemTask.open(dataclasses.replace(small, model=dataclasses.replace(small.model, **changes)), "synthetic")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("name", "low", "high"), [("gem-base", 1.25e9, 1.35e9), ("gem-long", 0.65e9, 0.75e9)])
def test_large_presets_build_on_the_meta_device(name: str, low: float, high: float) -> None:
    task = GemTask.open(name, device="meta")
    model = task.build_model()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert low < model.dense_parameters() < high
    odd = [
        n for n, m in model.named_modules() if isinstance(m, nn.Linear) and (m.in_features % 16 or m.out_features % 16)
    ]
    assert odd == ["sparse.numeric", "heads.0.out", "heads.1.out"]


def test_gem_long_has_the_shapes_of_gdpas_benchmark() -> None:
    preset = get_preset("gem-long")
    config = preset.model
    assert (preset.training.batch_size, config.heads, config.d // config.heads) == (1152, 4, 128)
    assert (config.max_tokens, config.pffn_tokens) == (2048, 256)


def test_a_step_is_traced_without_weights() -> None:
    from narrowgate.gates.rows import trace_rows, trace_step

    found = []
    for device in ("cpu", "meta"):
        task = GemTask.open("gem-tiny", device=device, steps=1)
        model = task.build_model()
        found.append((trace_rows(task, model), trace_step(task, model)))
    assert found[0] == found[1]
    large = GemTask.open("gem-base", device="meta")
    rows = trace_rows(large, large.build_model())
    assert rows["layers.0.interaction.mlp.0"] == 4096
    assert rows["layers.0.sequence.uvqk"] > 50 * 4096


def test_lokas_switches_change_the_model(small: Preset) -> None:
    loka = {"bias": False, "norm_affine": False, "norm_block": 8, "activation": "hardswish"}
    model = with_model(small, **loka).build_model()
    norms = [m for m in model.modules() if isinstance(m, RMSNorm)]
    assert all(norm.weight is None and norm.block == 8 for norm in norms)
    assert [n for n, _ in model.named_parameters() if n.endswith("bias")] == ["heads.0.out.bias", "heads.1.out.bias"]
    x = torch.randn(3, 16)
    expected = torch.cat([part / part.square().mean(-1, keepdim=True).add(1e-6).sqrt() for part in x.split(8, -1)], -1)
    torch.testing.assert_close(norms[0](x), expected)


EXPERTS = GemConfig(d=16, heads=2, layers=1, max_tokens=8, norm_affine=False, experts=5, expert_top=2, expert_hidden=24)


def test_a_token_gets_its_best_experts_weighted_by_the_gate() -> None:
    mixture = Experts(EXPERTS)
    tokens = torch.randn(3, 4, 16)
    out = mixture(tokens)
    for b in range(3):
        for n in range(4):
            x = tokens[b, n] / tokens[b, n].square().mean().add(1e-6).sqrt()
            share = torch.softmax(x @ mixture.gate.weight.T, -1)
            expected = tokens[b, n].clone()
            for e in share.argsort(descending=True)[:2]:
                hidden = nn.functional.silu(mixture.up.weight[e] @ x)
                expected = expected + share[e] * (mixture.down.weight[e] @ hidden)
            torch.testing.assert_close(out[b, n], expected, rtol=1e-5, atol=1e-5)


def test_imbalance_tells_even_from_collapsed_use() -> None:
    mixture = Experts(dataclasses.replace(EXPERTS, expert_top=1))
    with torch.no_grad():
        mixture.gate.weight.zero_()
        mixture.gate.weight[0, 0], mixture.gate.weight[1, 0] = 50.0, -50.0
    tokens = torch.randn(64, 4, 16)
    tokens[..., 0] = 1.0
    mixture(tokens)
    collapsed = mixture.imbalance.item()
    tokens[::2, :, 0] = -1.0
    mixture(tokens)
    assert collapsed == pytest.approx(5, rel=0.1)
    assert mixture.imbalance.item() == pytest.approx(2.5, rel=0.1)


def test_a_model_with_experts_trains_lowered_and_balances(small: Preset) -> None:
    task = with_model(small, experts=4, expert_hidden=32)
    model = task.build_model()
    plan = apply_recipe(model, "fp8-row")
    assert {"layers.0.experts.up", "layers.1.experts.down"} <= {layer.name for layer in plan.layers}
    batch = next(iter(task.train_batches(0)))
    task.loss(model, batch).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    torch.manual_seed(1)
    training = task.loss(model, batch)
    uneven = imbalance(model)
    torch.manual_seed(1)
    alone = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
    assert training.item() == pytest.approx(alone.item() + 0.01 * uneven.item(), rel=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_a_compiled_mixture_never_asks_the_host_where_products_are_grouped(bias: bool) -> None:
    """PyTorch's BF16 grouped product runs on a CPU too, where narrowgate does not choose it by itself."""
    mixtures = [Experts(dataclasses.replace(EXPERTS, bias=bias)) for _ in range(2)]
    mixtures[1].load_state_dict(mixtures[0].state_dict())
    for module in (mixtures[1].up, mixtures[1].down):
        lower_grouped(module, LinearConfig())
        layer_state(module).here = NAMED_DEVICES["h200"]
    found = []
    compiled = torch.compile(mixtures[1], fullgraph=True, backend="aot_eager")
    for run, mixture in ((mixtures[0], mixtures[0]), (compiled, mixtures[1])):
        tokens = torch.linspace(-1, 1, 3 * 4 * 16).reshape(3, 4, 16).sin().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = run(tokens)
        found.append([out, *torch.autograd.grad(out.square().sum(), [tokens, *mixture.parameters()])])
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager, rtol=3e-2, atol=3e-2 * float(eager.detach().abs().max()))


def test_more_experts_a_token_than_there_are_is_refused() -> None:
    with pytest.raises(NarrowgateError, match="'experts' must be 0 or at least expert_top = 2, found 1"):
        dataclasses.replace(EXPERTS, experts=1)
