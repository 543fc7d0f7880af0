"""Attention over jagged rows: the reference against padded attention; the kernels have test_jagged_kernels."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from narrowgate.models import GemConfig, GemTask, Preset
from narrowgate.models.attention import (
    Pooling,
    SequenceArch,
    attend_in_rows,
    pointwise_attention,
    sequence_mask,
)
from narrowgate.models.checkpointing import checkpoint_activations
from narrowgate.models.functional import ACTIVATION_FUNCTIONS
from narrowgate.models.jagged import Jagged, even_rows
from narrowgate.models.jagged_operator import LAYOUTS, gated_jagged_attention, jagged_attention
from narrowgate.models.kernels.reference import (
    ACTIVATIONS,
    Biases,
    Rules,
    reference_backward,
    reference_forward,
    time_bucket,
)
from narrowgate.precision.errors import NarrowgateError
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: What needs no kernel, and would take the interpreter minutes.
plain_test = pytest.mark.skipif(INTERPRETED, reason="the reference's tests run without the interpreter")

LENGTHS, DEAD, WIDTH = [6, 0, 9, 4, 1, 12], 3, 10
CONFIG = GemConfig(d=16, heads=2, layers=1, max_tokens=WIDTH, n_summary=2)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def layout() -> Jagged:
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS) + 1), torch.tensor([*LENGTHS, DEAD]))
    return Jagged(numbers, offsets(LENGTHS))


def tokens(count: int = sum(LENGTHS) + DEAD) -> Tensor:
    return torch.randn(count, CONFIG.d, requires_grad=True)


def event_times(count: int, most: int = 1 << 20) -> Tensor:
    """Rising times with gaps of every size; also below zero."""
    gaps = torch.randint(0, most, (count,), generator=torch.Generator().manual_seed(4))
    return (gaps >> torch.arange(count) % 20).cumsum(0) - most


def results(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape))]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert b.any()


@plain_test
@pytest.mark.parametrize("activation", ["silu", "gelu", "hardswish"])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_self_attention_equals_the_padded_one(window: int | None, activation: str) -> None:
    config = dataclasses.replace(CONFIG, window=window, activation=activation)
    q, k, v, rows, padded = tokens(), tokens(), tokens(), layout().last(WIDTH), layout().window(WIDTH)
    mask = sequence_mask(WIDTH, config.n_summary, window, q.device)
    expected = pointwise_attention(
        *map(padded.pad, (q, k, v)), heads=2, activation=ACTIVATION_FUNCTIONS[activation], mask=mask
    )
    found = attend_in_rows([q, k, v], "q|k|v", rows, rows, config, causal=True)
    same(results(found, q, k, v), results(padded.flatten(expected), q, k, v))


@plain_test
def test_long_queries_over_few_keys_equal_the_padded_ones() -> None:
    q, k, v, padded = tokens(), tokens(18), tokens(18), layout().window(WIDTH)
    expected = pointwise_attention(
        padded.pad(q), k.view(6, 3, -1), v.view(6, 3, -1), heads=2, activation=torch.nn.functional.silu
    )
    found = attend_in_rows([q, k, v], "q|k|v", layout().last(WIDTH), even_rows(6, 3, q.device), CONFIG)
    same(results(found, q, k, v), results(padded.flatten(expected), q, k, v))


@plain_test
def test_few_queries_over_long_keys_equal_the_padded_ones() -> None:
    q, k, v, padded = tokens(12), tokens(), tokens(), layout().window(WIDTH)
    expected = pointwise_attention(
        q.view(6, 2, -1), padded.pad(k), padded.pad(v), heads=2, activation=torch.nn.functional.silu
    )
    found = attend_in_rows([q, k, v], "q|k|v", even_rows(6, 2, q.device), layout().last(WIDTH), CONFIG)
    same(results(found, q, k, v), results(expected.flatten(0, 1), q, k, v))


@plain_test
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 2, "bias": True},
        {"activation": "gelu", "layers": 1},
        {"bias_reach": 4, "window": 6},
        {"time_buckets": 16, "window": 3},
        {"time_buckets": 32, "bias_reach": 2},
    ],
)
def test_the_model_computes_the_same_with_either(small: Preset, changes: dict[str, Any]) -> None:
    found = []
    for attention in ("padded", "jagged"):
        config = dataclasses.replace(small.model, attention=attention, **changes)
        task = GemTask.open(dataclasses.replace(small, model=config), "synthetic")
        torch.manual_seed(0)
        model = task.build_model().eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("position_bias", "time_bias")):
                torch.nn.init.normal_(parameter)
        loss = task.loss(model, next(iter(task.train_batches(0))))
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@plain_test
@pytest.mark.parametrize("buckets", [1, 2, 32, 64])
def test_a_bucket_is_the_bit_length_of_the_difference(buckets: int) -> None:
    near = [2**n + d for n in range(63) for d in (-1, 0, 1)] + [2**63 - 1]
    found = time_bucket(torch.tensor(near + [-n for n in near]), buckets).tolist()
    assert found == [min(n.bit_length(), buckets - 1) for n in near * 2]


@plain_test
@pytest.mark.parametrize("attention", ["padded", "jagged"])
def test_a_bias_of_time_is_of_events_only(attention: str) -> None:
    config = dataclasses.replace(CONFIG, time_buckets=8, max_tokens=6, window=4)
    layer, summary = SequenceArch(config).eval(), torch.randn(1, 2, CONFIG.d)
    torch.nn.init.normal_(layer.time_bias)
    x = torch.randn(6, CONFIG.d)

    def run(times: list[int]) -> Tensor:
        places = Jagged(torch.zeros(6, dtype=torch.int64), offsets([6]), torch.tensor(times))
        return layer(x, summary, places.window(6) if attention == "padded" else places.last(6))

    before = run([10, 11, 15, 40, 0, 0])
    changed = before != run([10, 11, 15, 41, 7, 9])
    assert not changed.any(), "40 s and 41 s are one bucket apart from every event, and summary tokens have no time"
    assert (before[4:] == run([0, 90, 95, 96, 0, 0])[4:]).all()
    later = before != run([10, 11, 15, 99, 0, 0])
    assert later.any(1).tolist() == [False, False, False, True, False, False], "an event sees how long ago others were"
    torch.testing.assert_close(before, run([t - 1000 for t in (10, 11, 15, 40, 0, 0)]), rtol=0, atol=0)


def jagged_task(small: Preset) -> GemTask:
    config = dataclasses.replace(small.model, attention="jagged", window=3, layers=1)
    return GemTask.open(dataclasses.replace(small, model=config), "synthetic")


@plain_test
@pytest.mark.parametrize("biases", [{}, {"time_buckets": 16}, {"bias_reach": 4, "time_buckets": 8}])
@pytest.mark.parametrize("padded", [False, True])
def test_a_layer_compiles_into_one_graph(padded: bool, biases: dict[str, int]) -> None:
    layer, pooling = SequenceArch(dataclasses.replace(CONFIG, window=3, **biases)).eval(), Pooling(CONFIG)
    when = event_times(sum(LENGTHS) + DEAD) if biases else None
    numbers = layout().rows

    def both(x: Tensor, summary: Tensor, at: Tensor) -> Tensor:
        places = Jagged(numbers, at, when)
        rows = places.window(WIDTH) if padded else places.last(WIDTH)
        return pooling(layer(x, summary, rows), rows)

    x, summary = tokens(), torch.randn(len(LENGTHS), 2, CONFIG.d)
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    found, expected = (results(f(x, summary, offsets(LENGTHS)), x, *layer.parameters()) for f in (compiled, both))
    same(found, expected)


@plain_test
@pytest.mark.parametrize("mode", ["all", "pointwise"])
def test_recomputing_changes_no_bit(small: Preset, mode: str) -> None:
    task = jagged_task(small)
    model, batch = task.build_model().eval(), next(iter(task.train_batches(0)))
    found = []
    for regions in ({}, {"sequence": mode, "cross": mode}):
        checkpoint_activations(model, regions)
        found.append(torch.autograd.grad(task.loss(model, batch), list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_dead_tokens_stay_zero(autocast: bool) -> None:
    q, rows = tokens(), layout().last(WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attend_in_rows([q, q, q], "q|k|v", rows, rows, CONFIG, causal=True)
    (grad,) = torch.autograd.grad(out.sum(), q)
    for x in (out, grad):
        assert not x[-DEAD:].any()
        assert not x[sum(LENGTHS[:-1]) :][: LENGTHS[-1] - WIDTH].any(), "cut to the latest tokens"
        kept = torch.cat([x[: sum(LENGTHS[:-1])], x[-DEAD - WIDTH : -DEAD]])
        assert kept.any(1).all()


QUERIES, KEYS = [3, 0, 5, 2], [4, 3, 2, 0]


@plain_test
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(
    "rules", [{}, {"causal": True, "eps": 1e-3}, {"causal": True, "window": 2, "n_summary": 1}], ids=str
)
def test_gradients_of_the_reference_match_numeric_ones(activation: str, rules: dict[str, Any]) -> None:
    q, k, v = (torch.randn(n, 2, 3, dtype=torch.float64, requires_grad=True) for n in (11, 10, 10))
    bias, time_bias = (torch.randn(2, n, dtype=torch.float64, requires_grad=True) for n in (2, 4))
    made = Rules(4, 3, activation, 0.7, 3.0, **rules)

    def biases(bias: Tensor | None, time_bias: Tensor | None) -> Biases:
        return Biases(bias, time_bias, None if time_bias is None else event_times(10, most=5))

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *tables: Tensor | None) -> Tensor:
            ctx.save_for_backward(q, k, v, *tables)
            return reference_forward(q, k, v, offsets(QUERIES), offsets(KEYS), made, biases(*tables))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            q, k, v, *tables = ctx.saved_tensors
            *found, of_tables = reference_backward(
                grads[0], q, k, v, offsets(QUERIES), offsets(KEYS), made, biases(*tables)
            )
            left = iter(of_tables)
            return *found, *(None if table is None else next(left) for table in tables)

    given = [(None, None), (bias, None), (None, time_bias), (bias, time_bias)] if made.causal else [(None, None)]
    for tables in given:
        assert torch.autograd.gradcheck(Both.apply, (q, k, v, *tables), fast_mode=True)


@plain_test
@pytest.mark.parametrize(
    ("eps", "reach", "buckets"), [(None, 0, 0), (1e-3, 0, 0), (None, 4, 0), (None, 0, 4), (None, 2, 8)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operator_is_registered_soundly(layout: str, eps: float | None, reach: int, buckets: int) -> None:
    tokens, at = ([11, 10, 10], offsets(KEYS)) if "|" in layout else ([11], offsets(QUERIES))
    sources = [
        torch.randn(n, 6 * len(names), dtype=torch.float64, requires_grad=True)
        for n, names in zip(tokens, layout.split("|"), strict=False)
    ]
    rules = (4, 3, "silu", 0.7, 3.0, True, 2, 1, eps)
    bias, time_bias = (
        torch.randn(2, n, dtype=torch.float64, requires_grad=True) if n else None for n in (reach, buckets)
    )
    when = event_times(tokens[-1]) if buckets else None
    arguments = (sources, layout, 2, offsets(QUERIES), at, bias, when, time_bias, *rules)
    torch.library.opcheck(torch.ops.narrowgate.jagged_attention, arguments)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gate_beside_attention_is_left_alone(compiled: bool) -> None:
    uvqk, u, above = torch.randn(10, 24), torch.randn(10, 6), torch.randn(10, 6)
    at, rules = offsets(KEYS), Rules(5, 4, "silu", 0.7, 3.0, causal=True, eps=1e-3)

    def gated(x: Tensor, bias: Tensor) -> Tensor:
        gate, out = gated_jagged_attention(x, at, rules, heads=2, bias=bias)
        return (gate * u + out * above).sum()

    def apart(x: Tensor, bias: Tensor) -> Tensor:
        out = jagged_attention([x[:, 6:]], at, at, rules, heads=2, layout="vqk", bias=bias)
        return (x[:, :6] * u + out * above).sum()

    found, bias = [], torch.randn(2, 4)
    for function in (torch.compile(gated, backend="aot_eager", fullgraph=True) if compiled else gated, apart):
        given = uvqk.clone().requires_grad_(), bias.clone().requires_grad_()
        found.append([function(*given), *torch.autograd.grad(function(*given), given)])
    same(*found)
    x = uvqk.requires_grad_()
    (grad,) = torch.autograd.grad(jagged_attention([x], at, at, rules, heads=2, layout="uvqk").sum(), x)
    assert not grad[:, :6].any()
    assert grad[:, 6:].any()


@plain_test
@pytest.mark.parametrize("layout", ["q|kv", "vqk"])
def test_a_packed_source_is_its_parts(layout: str) -> None:
    q, k, v = (torch.randn(10, 6) for _ in range(3))
    at, rules = offsets(KEYS), Rules(5, 4, "silu", 0.7, 3.0, causal=True, eps=1e-3)
    packed = [torch.cat([v, q, k], 1)] if layout == "vqk" else [q, torch.cat([k, v], 1)]
    found = []
    for sources, form in ([q, k, v], "q|k|v"), (packed, layout):
        sources = [x.requires_grad_() for x in sources]
        found.append(results(jagged_attention(sources, at, at, rules, heads=2, layout=form), *sources))
    (out, of_q, of_k, of_v), (other, *gradients) = found
    expected = [torch.cat([of_v, of_q, of_k], 1)] if layout == "vqk" else [of_q, torch.cat([of_k, of_v], 1)]
    same([other, *gradients], [out, *expected])


NOW = torch.zeros(10, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "rules", "message"),
    [
        ({"sources": [(11, 6), (10, 8), (10, 6)]}, {}, r"found \[11, 6\], \[10, 8\], \[10, 6\]"),
        ({"sources": [(11, 6), (10, 6), (9, 6)]}, {}, "as many keys as values"),
        ({"sources": [(11, 6), (10, 6)]}, {}, r"\[T, d\], \[T, d\], \[T, d\] for 'q|k|v'"),
        ({"sources": [(11, 6), (10, 6)], "layout": "q|kv"}, {}, r"\[T, d\], \[T, 2 d\] for 'q|kv'"),
        ({"sources": [(11, 6)], "layout": "kqv"}, {}, "layout is one of .* found 'kqv'"),
        ({"heads": 4}, {}, "d a multiple of 4 heads"),
        ({"sources": [(11, 6), (10, 6), (10, 6, torch.float64)]}, {}, "takes one type"),
        ({"q_offsets": torch.tensor([0, 11])}, {}, r"of one B, found \[2\], \[5\]"),
        ({}, {"activation": "softmax"}, "found 'softmax'"),
        ({}, {"window": 2}, "a window needs causal=True"),
        ({"bias": torch.zeros(2, 4)}, {}, "a bias needs causal=True"),
        ({"bias": torch.zeros(2, 6)}, {"causal": True}, r"a bias \[2, R\] with R a power of two, found \[2, 6\]"),
        ({"bias": torch.zeros(1, 4)}, {"causal": True}, r"found \[1, 4\]"),
        ({"time_bias": torch.zeros(2, 4)}, {"causal": True}, "times and time_bias need each other"),
        ({"times": torch.zeros(10)}, {"causal": True}, "times and time_bias need each other"),
        ({"time_bias": torch.zeros(2, 4), "times": NOW}, {}, "a time_bias needs causal=True"),
        (
            {"time_bias": torch.zeros(2, 128), "times": NOW},
            {"causal": True},
            r"a time_bias \[2, B\] with B a power of two up to 64, found \[2, 128\]",
        ),
        (
            {"time_bias": torch.zeros(2, 4), "times": NOW[1:]},
            {"causal": True},
            r"takes times \[10\] int64, one a key, found \[9\] torch.int64",
        ),
        ({"time_bias": torch.zeros(2, 4), "times": NOW.int()}, {"causal": True}, r"found \[10\] torch.int32"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], rules: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = {
        "sources": [(11, 6), (10, 6), (10, 6)], "q_offsets": offsets(QUERIES), "kv_offsets": offsets(KEYS), "heads": 2
    } | changes  # fmt: skip
    inputs["sources"] = [
        torch.zeros(n, width, dtype=(*kind, torch.float32)[0]) for n, width, *kind in inputs["sources"]
    ]
    with pytest.raises(NarrowgateError, match=message):
        jagged_attention(**inputs, rules=dataclasses.replace(Rules(5, 4, "silu", 1.0, 1.0), **rules))


def test_impossible_configurations_say_why() -> None:
    with pytest.raises(NarrowgateError, match="'attention' is one of padded, jagged, found 'ragged'"):
        dataclasses.replace(CONFIG, attention="ragged")
    with pytest.raises(NarrowgateError, match=r"'heads' must leave heads at most 128 wide .* found 512 / 2 = 256"):
        dataclasses.replace(CONFIG, d=512, attention="jagged")


@plain_test
@pytest.mark.parametrize("rules", [
    {}, {"causal": True}, {"causal": True, "window": 3, "n_summary": 2}, {"causal": True, "window": 1},
    {"max_q": 4, "max_kv": 6, "causal": True},
])  # fmt: skip
def test_flops_are_those_of_the_pairs_that_are_seen(rules: dict[str, Any]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    queries, keys = [6, 0, 9, 4, 1, 12, 2], [6, 3, 4, 11, 0, 12, 9]
    made = Rules(**{"max_q": 20, "max_kv": 20, "activation": "silu", "scale": 1.0, "norm": 1.0, **rules})
    pairs = 0
    for n, m in zip(queries, keys, strict=True):
        n, m = min(n, made.max_q), min(m, made.max_kv)
        mask = made.mask(n, m, torch.device("cpu"))
        pairs += n * m if mask is None else int(mask.sum())
    q, kv = (torch.randn(sum(n) + 2, width, requires_grad=True) for n, width in ((queries, 16), (keys, 32)))
    with FlopCounterMode(display=False) as forward:
        out = jagged_attention([q, kv], offsets(queries), offsets(keys), made, heads=2, layout="q|kv")
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    names = ["jagged_attention", "jagged_attention_backward"]
    found = [
        mode.get_flop_counts()["Global"][getattr(torch.ops.narrowgate, name)]
        for mode, name in zip((forward, backward), names, strict=True)
    ]
    # q kᵀ and scores v; backward two of each.
    assert found == [2 * 2 * 2 * 8 * pairs, 4 * 2 * 2 * 8 * pairs]
