"""Weights quantized once a step: the same numbers as without, one cast where one is due, and never a stale code."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from narrowgate.precision import casting, weight_codes
from narrowgate.precision.config import GemmConfig, LinearConfig
from narrowgate.precision.kept_weights import keep_weights
from narrowgate.precision.layer import forget_weight_codes, layer_state
from narrowgate.precision.linear import lower_linear
from narrowgate.precision.spec import Spec
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Codes of both products from one cast, from two, and of fprop alone.
VARIANTS = {
    "tensor": ("fp8_e4m3", "fp8_e4m3"),
    "row": ("fp8_e4m3/row", "fp8_e4m3/row"),
    "square": ("fp8_e4m3/128x128", "fp8_e4m3/128x128"),
    "two formats": ("fp8_e4m3/row", "fp8_e5m2"),
    "clipped": ("fp8_e4m3+clip(rms=2)", "fp8_e4m3/row+clip(p=99)"),
    "fprop alone": ("fp8_e4m3/row", "bf16"),
    "delayed": ("fp8_e4m3+delayed(2)", "fp8_e4m3+delayed(2)"),
}


def config(variant):
    fprop, dgrad = (Spec.parse(text) for text in VARIANTS.get(variant, (variant, variant)))
    row = Spec.parse("fp8_e4m3/row")
    grad = Spec.parse("bf16") if dgrad.high_precision else row
    first = Spec.parse("fp8_e4m3/1x128") if variant == "square" else row
    return LinearConfig(
        GemmConfig(first, fprop), GemmConfig(first if variant == "square" else grad, dgrad), GemmConfig(row, row)
    )


def model(variant, device="cpu", seed=0):
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(136, 64), nn.SiLU(), nn.Linear(64, 48, bias=False)).to(device)
    for name in ("0", "2"):
        lower_linear(layers.get_submodule(name), config(variant), name=name)
    return layers


@pytest.fixture
def keep(monkeypatch):
    """Make a model's layers keep their codes, on a CPU too, where its casts are the reference; return what cannot."""

    def keep(layers):
        with monkeypatch.context() as patch:
            if not INTERPRETED:
                patch.setattr(casting, "kernels_on_cpu", lambda: True)
            return keep_weights(layers.parameters())

    return keep


@pytest.fixture
def casts(monkeypatch):
    """Counts casts of weights into kept codes."""
    found = []
    original = weight_codes._cast_into

    def counted(weight, *others):
        found.append(weight)
        original(weight, *others)

    monkeypatch.setattr(weight_codes, "_cast_into", counted)
    yield found
    torch._dynamo.reset()


def batches(count, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(24, 136, generator=generator).to(device).requires_grad_() for _ in range(count)]


def train(layers, call, steps=2, micro_batches=3, device="cpu"):
    """Return every output, input gradient and weight gradient, and the weights at the end."""
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    found = []
    for _ in range(steps):
        for x in batches(micro_batches, device):
            y = call(x)
            y.square().mean().backward()
            found += [y.detach(), x.grad]
        found += [p.grad.clone() for p in layers.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach() for p in layers.parameters())]


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_the_same_to_the_bit_and_casts_each_weight_once_a_step(variant, keep, casts):
    plain, kept = model(variant), model(variant)
    assert keep(kept) == {}
    assert sum(layer_state(kept[i]).kept is not None for i in (0, 2)) == 2
    expected, found = train(plain, plain), train(kept, kept)
    assert len(casts) == 2 * 2
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_kept_weight_with_a_delayed_scale_is_recorded_and_counted_once_a_step(keep):
    plain, kept = model("delayed"), model("delayed")
    assert keep(kept) == {}
    states = [layer_state(layers[0]) for layers in (plain, kept)]
    for state in states:
        state.histories["fprop", "weight"].history.fill_(0.01)  # most of what follows saturates
    for layers in (plain, kept):
        train(layers, layers)
        layers(batches(1)[0])
    ours, theirs = (state.histories["fprop", "weight"] for state in states)
    assert torch.equal(ours.history, theirs.history)
    assert torch.equal(ours.pending, theirs.pending)
    assert ours.saturated == 3 * theirs.saturated > 0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_loaded_history_is_seen(compiled, keep):
    layers = model("delayed")
    keep(layers)
    call = torch.compile(layers, fullgraph=True) if compiled else layers
    history = layer_state(layers[0]).histories["fprop", "weight"]
    saved = {**history.state_dict(), "history": torch.tensor([100.0, 0.0])}
    (x,) = batches(1)
    before = call(x)
    history.load_state_dict(saved)
    after = call(x)
    assert not torch.equal(before, after)
    reference = model("delayed")
    layer_state(reference[0]).histories["fprop", "weight"].load_state_dict(saved)
    torch.testing.assert_close(after, reference(x))
    torch._dynamo.reset()


def test_a_recomputed_forward_casts_nothing(keep, casts):
    layers = model("row")
    keep(layers)
    (x,) = batches(1)
    checkpoint(layers, x, use_reentrant=False).sum().backward()
    assert len(casts) == 2


def _halve(layers):
    with torch.no_grad():
        layers[0].weight.mul_(0.5)


def _other_storage(layers):
    layers[0].weight.data = layers[0].weight.data * 0.5


def _load(layers):
    layers.load_state_dict({name: value * 0.5 for name, value in layers.state_dict().items()})


def _load_by_assignment(layers):
    layers.load_state_dict({name: value * 0.5 for name, value in layers.state_dict().items()}, assign=True)


def _unseen_and_announced(layers):
    layers[0].weight.data.mul_(0.5)
    forget_weight_codes(layers.parameters())


def _foreach(layers):
    with torch.no_grad():
        torch._foreach_mul_(list(layers.parameters()), 0.5)  # pyright: ignore[reportPrivateImportUsage]


def _average(layers):
    average = torch.optim.swa_utils.AveragedModel(layers)
    with torch.no_grad():
        for p, a in zip(layers.parameters(), average.parameters(), strict=True):
            p.copy_(a * 0.5)


def _step_without_gradients_elsewhere(layers):
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(layers.parameters(), lr=0.1).step()


WRITES = [_halve, _other_storage, _load, _load_by_assignment, _unseen_and_announced, _foreach, _average,
          _step_without_gradients_elsewhere]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_two_micro_batches_is_seen(write, keep):
    plain, kept = model("row"), model("row")
    keep(kept)
    results = []
    for layers in (plain, kept):
        first, second = batches(2)
        before = layers(first)
        before.sum().backward()
        write(layers)
        after = layers(second)
        after.sum().backward()
        assert not torch.equal(before, after)
        results.append([after.detach(), second.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiled_it_casts_once_a_step_and_sees_writes(keep, casts):
    plain, kept = model("row"), model("row")
    keep(kept)
    call = torch.compile(kept, fullgraph=True)
    for a, b in zip(train(plain, plain), train(kept, call), strict=True):
        torch.testing.assert_close(a, b)
    assert len(casts) == 2 * 2
    for write in (_halve, _unseen_and_announced):
        first, second = batches(2)
        torch.testing.assert_close(call(first), plain(first))
        for layers in (plain, kept):
            write(layers)
        torch.testing.assert_close(call(second), plain(second))


def test_a_weight_changed_between_forward_and_backward_is_an_error_as_in_bf16(keep):
    layers = model("row")
    keep(layers)
    (x,) = batches(1)
    y = layers(x)
    _halve(layers)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("variant", ["row", "delayed"])
def test_layers_may_go_without_memory_and_come_back(variant, keep):
    layers = model(variant)
    keep(layers)
    layers.to("meta")
    layers[2].to_empty(device="cpu")
    layers.to("meta").to_empty(device="cpu")
    reference = model(variant)
    layers.load_state_dict(reference.state_dict())
    (x,) = batches(1)
    assert torch.equal(layers(x), reference(x))
    assert layer_state(layers[0]).kept is not None


def test_evaluation_neither_reads_nor_fills_them(keep, casts):
    layers = model("row")
    keep(layers)
    (x,) = batches(1)
    layers(x)
    done = len(casts)
    # As an average is swapped in for an evaluation by those who write through .data, and out again.
    saved = [p.detach().clone() for p in layers.parameters()]
    for p in layers.parameters():
        p.data.mul_(3.0)
    reference = model("row")
    reference.load_state_dict(layers.state_dict())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(layers.eval()(x), reference.eval()(x))
    for p, value in zip(layers.parameters(), saved, strict=True):
        p.data.copy_(value)
    assert torch.equal(layers.train()(x), model("row")(x))
    assert len(casts) == done


def test_other_weights_in_the_layers_place_are_quantized_as_they_are(keep):
    plain, kept = model("row"), model("row")
    keep(kept)
    (x,) = batches(1)
    for scale in (0.5, 2.0, 3.0):
        # Each time another tensor, often at the address of the one before.
        given = {name: value.detach() * scale for name, value in plain.named_parameters()}
        assert torch.equal(functional_call(kept, given, x), functional_call(plain, given, x))
        del given
    assert torch.equal(kept(x), plain(x))

    class Scaled(nn.Module):
        factor = 1.0

        def forward(self, weight):
            return weight * self.factor

    for layers in (plain, kept):
        parametrize.register_parametrization(layers[0], "weight", Scaled())
    for factor in (0.5, 2.0, 3.0):
        Scaled.factor = factor
        assert torch.equal(kept(x), plain(x))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda layers: pickle.loads(pickle.dumps(layers))])
def test_a_copy_keeps_nothing_of_the_originals(clone, keep):
    layers = model("row")
    keep(layers)
    (x,) = batches(1)
    layers(x)
    other = clone(layers)
    assert layer_state(other[0]).kept is None
    with torch.no_grad():
        other[0].weight.mul_(2.0)
    assert torch.equal(layers(x), model("row")(x))
    assert not torch.equal(other(x), layers(x))


@pytest.mark.parametrize(("variant", "reason"), [
    ("fp8_e4m3+sr", "fp8_e4m3/tensor+sr is drawn anew at each use"),
    ("fp8_e4m3+delayed(4)+clip(rms=2)", "fp8_e4m3/tensor+clip(rms=2)+delayed(4) records each use"),
    ("bf16", "fprop does not quantize the weight"),
    ("mxfp8", "mxfp8 has no cast kernel"),
    ("fp8_e4m3+hadamard(16)", "fp8_e4m3/tensor+hadamard(16) has no cast kernel"),
])  # fmt: skip
def test_weights_that_change_with_each_use_or_have_no_kernel_are_not_kept(variant, reason, keep):
    spec = Spec.parse(variant)
    layer = nn.Linear(64, 64)
    lower_linear(layer, LinearConfig(GemmConfig(spec, spec), GemmConfig(spec, spec), GemmConfig(spec, spec)))
    assert keep(layer) == {"": reason}
    assert layer_state(layer).kept is None


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has the kernels")
def test_a_cpu_says_that_it_has_no_cast_to_save():
    layers = model("row")
    told = keep_weights(layers.parameters())
    assert told["0"] == "no cast kernel takes a weight of [64, 136], torch.float32, on cpu"
    assert told.keys() == {"0", "2"}


def test_only_what_an_optimizer_steps_is_kept(keep):
    layers = model("row")
    for p in layers[0].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD([layers[2].weight], lr=0.1)
    with torch.no_grad():
        assert keep(nn.Module()) == {}
    kept = [p for group in optimizer.param_groups for p in group["params"]]
    module = nn.Module()
    module.weight = kept[0]
    assert keep(module) == {}
    assert layer_state(layers[0]).kept is None
    assert layer_state(layers[2]).kept is not None


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("variant", ["tensor", "row", "fprop alone", "delayed"])
def test_on_the_gpu_training_is_the_same(variant, compiled, casts):
    plain, kept = model(variant, "cuda"), model(variant, "cuda")
    assert keep_weights(kept.parameters()) == {}
    results = [train(m, torch.compile(m, fullgraph=True) if compiled else m, device="cuda") for m in (plain, kept)]
    assert len(casts) == 2 * 2
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_codes_of_a_weight_whose_optimizers_step_is_captured_are_not_trusted(keep, monkeypatch):
    plain, kept = model("row"), model("row")
    keep(kept)
    (x,) = batches(1)
    with monkeypatch.context() as patch:
        patch.setattr(weight_codes, "_capturing", lambda weight: True)
        torch.optim.SGD(kept.parameters(), lr=0.1).step()
    for _ in range(2):  # as a replay writes: past the version counter and the hook
        assert torch.equal(kept(x), plain(x))
        for p in (*plain.parameters(), *kept.parameters()):
            p.data.mul_(1.5)


@pytest.mark.gpu
def test_a_captured_optimizer_step_is_followed(keep):
    plain, kept = model("row", "cuda"), model("row", "cuda")
    keep(kept)
    (x,) = batches(1, "cuda")
    for layers in (plain, kept):
        for p in layers.parameters():
            p.grad = torch.ones_like(p)
    optimizer = torch.optim.Adam(kept.parameters(), lr=0.1, capturable=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(2):
        graph.replay()
        plain.load_state_dict(kept.state_dict())
        assert torch.equal(kept(x), plain(x))


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_the_weight_of_its_time(casts):
    plain, kept = model("row", "cuda"), model("row", "cuda")
    keep_weights(kept.parameters())
    (x,) = batches(1, "cuda")
    x = x.detach()
    for _ in range(2):
        kept(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kept(x)
    for scale in (0.5, 3.0):
        with torch.no_grad():
            for layers in (plain, kept):
                for p in layers.parameters():
                    p.mul_(scale)
        graph.replay()
        assert torch.equal(y, plain(x))
        # What a replay wrote is not trusted by a later forward outside of it.
        with torch.no_grad():
            for p in (*plain.parameters(), *kept.parameters()):
                p.data.mul_(1.5)
        assert torch.equal(kept(x), plain(x))
