"""The kernels of attention over jagged rows against their reference.

They run on a GPU, or through Triton's interpreter (TRITON_INTERPRET=1), which does not multiply BF16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from narrowgate.models.jagged_operator import gated_jagged_attention, jagged_attention
from narrowgate.models.kernels.reference import ACTIVATIONS, Biases, Rules, reference_backward, reference_forward

from .test_jagged_attention import DEAD, INTERPRETED, offsets

DEVICE = "cpu" if INTERPRETED else "cuda"
kernel_test = pytest.mark.skipif(False, reason="runs here") if INTERPRETED else pytest.mark.gpu


@pytest.fixture(params=["tiles", "rows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program for each tile, or for each row; what kernels do not write is no number.

    Through the interpreter tiles are small, so that short rows are several of them.
    """
    from narrowgate.models.kernels import launch

    def refuse(kernel: Any, *_: Any, **__: Any) -> None:
        raise AssertionError(f"{kernel} is not of the {request.param}")

    monkeypatch.setattr(launch, "_launch" if request.param == "rows" else "_launch_rows", refuse)
    if request.param == "tiles":
        monkeypatch.setattr(launch, "ROW", 0)
    if INTERPRETED:
        monkeypatch.setattr(launch, "SWEEPERS", 2)
        sizes = {"forward": (16, 32), "query_gradient": (32, 16), "key_gradient": (16, 16)}
        for name, (queries, keys) in sizes.items():
            monkeypatch.setitem(launch.TILES, name, (launch.Tiles(queries, keys, 4, 1),) * 3)
    allocate = torch.empty

    def poisoned(*sizes: Any, **kind: Any) -> torch.Tensor:
        x = allocate(*sizes, **kind)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)
    return request.param


def within(lengths: list[int], way: str, dtype: torch.dtype) -> list[int]:
    """Lengths that the way takes, by the longest row of a program for the type."""
    most = 16 if dtype is torch.float32 else 64
    return lengths if way == "tiles" else [n if n <= most else n % (most + 1) for n in lengths]


#: Lengths past several tiles of either size; empty queries, empty keys, both empty.
LONG = [33, 0, 17, 1] if INTERPRETED else [700, 0, 129, 1, 64, 300]
SHORT = [3, 9, 0, 5] if INTERPRETED else [8, 30, 0, 128, 1, 7]
CASES = {
    "everywhere": (LONG, SHORT, {}),
    "few queries": (SHORT, LONG, {}),
    "causal": (LONG, LONG, {"causal": True}),
    "causal, ends aligned": (LONG, SHORT, {"causal": True}),
    "window": (LONG, LONG, {"causal": True, "window": 7, "n_summary": 2}),
    "window across tiles": (LONG, LONG, {"causal": True, "window": 20 if INTERPRETED else 200, "n_summary": 1}),
    "window, ends aligned": (SHORT, LONG, {"causal": True, "window": 9, "n_summary": 3}),
    "window of few keys": (LONG, SHORT, {"causal": True, "window": 4, "n_summary": 2}),
}
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def moments(count: int) -> torch.Tensor:
    """Times [count] of any order, many at a power of two from each other, or next to one."""
    at = torch.arange(count)
    return torch.where(at % 3 == 0, 0, (1 << torch.randint(0, 45, (count,))) + at % 5 - 2)


def check(
    way: str, queries: list[int], keys: list[int], dtype: torch.dtype, head: int, activation: str = "silu", *,
    reach: int = 0, buckets: int = 0, **rules: Any,
) -> None:  # fmt: skip
    """Compare all results with the reference's; rows are cut to what the way takes but where rules bound them."""
    if "max_q" not in rules:
        queries, keys = within(queries, way, dtype), within(keys, way, dtype)
    made = Rules(**{
        "max_q": max(queries), "max_kv": max(keys), "activation": activation, "scale": head**-0.5, "norm": 7.0, **rules
    })  # fmt: skip
    # As the model has them: what one projection put out, itself a chunk of a wider one.
    layout = "vqk" if queries == keys else "q|kv"
    counts = [sum(n) + DEAD for n in (queries, keys)]
    sources = [
        torch.randn(n, 3 + 2 * head * len(names)).to(DEVICE, dtype)[:, 3:].requires_grad_()
        for n, names in zip(counts, layout.split("|"), strict=False)
    ]
    grad = torch.randn(counts[0], 2 * head).to(DEVICE, dtype)
    first, second = offsets(queries).to(DEVICE), offsets(keys).to(DEVICE)
    bias, time_bias = (torch.randn(2, n, device=DEVICE, requires_grad=True) if n else None for n in (reach, buckets))
    times = moments(counts[1]).to(DEVICE) if buckets else None
    out = jagged_attention(
        sources, first, second, made, heads=2, layout=layout, bias=bias, times=times, time_bias=time_bias
    )
    tables = [table for table in (bias, time_bias) if table is not None]
    found = out, *torch.autograd.grad(out, [*sources, *tables], grad)
    of_tables = found[1 + len(sources) :]
    found = found[: 1 + len(sources)]
    parts, of_parts = (
        {
            name: part.detach().double().unflatten(1, (2, head))
            for x, names in zip(tensors, layout.split("|"), strict=True)
            for name, part in zip(names, x.chunk(len(names), 1), strict=True)
        }
        for tensors in (sources, found[1:])
    )
    q, k, v = (parts[name] for name in "qkv")
    above = grad.double().unflatten(1, (2, head))
    wide = [None if table is None else table.detach().double() for table in (bias, time_bias)]
    biases = Biases(wide[0], wide[1], times)
    *gradients, expected_tables = reference_backward(above, q, k, v, first, second, made, biases)
    expected = reference_forward(q, k, v, first, second, made, biases), *gradients
    results = out.unflatten(1, (2, head)), *(of_parts[name] for name in "qkv")
    for name, a, b in zip(("out", "of q", "of k", "of v"), results, expected, strict=True):
        error = (a.double() - b).abs().max() / b.abs().max()
        assert error < NEAR[dtype], f"{name}: {error:.1e}"
        # Whole heads: of a row that is attended, single elements may round to zero or cancel in a narrow format.
        zeros = ((x == 0).all(-1) for x in (a, b))
        assert torch.equal(*zeros), f"{name}: zeros where nothing is attended"
    assert all(x.dtype is dtype for x in found)
    if bias is not None:
        assert expected_tables[0].abs().min() > 0, "every distance occurs"
    for a, b in zip(of_tables, expected_tables, strict=True):
        assert torch.equal(a == 0, b == 0)
        error = (a.double() - b).abs().max()
        assert error <= NEAR[dtype] * b.abs().max(), f"of a bias {list(a.shape)}: {error:.1e}"


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_reference(case: str, dtype: torch.dtype, way: str) -> None:
    queries, keys, rules = CASES[case]
    check(way, queries, keys, dtype, 16 if INTERPRETED else 128, **rules)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kernels_divide_by_the_root_mean_square(case: str, dtype: torch.dtype, way: str) -> None:
    queries, keys, rules = CASES[case]
    check(way, queries, keys, dtype, 16 if INTERPRETED else 128, eps=1e-2, **rules)


@kernel_test
@pytest.mark.parametrize("reach", [1, 4, 16 if INTERPRETED else 256])
@pytest.mark.parametrize("case", [name for name, (_, _, rules) in CASES.items() if rules])
def test_kernels_add_a_bias_of_distance(case: str, reach: int, way: str) -> None:
    queries, keys, rules = CASES[case]
    # A window shows no distances past it but to the closing queries, which see all of a row.
    if reach > max(within(keys, way, DTYPES[-1])):
        pytest.skip("no row is so long")
    check(way, queries, keys, DTYPES[-1], 16 if INTERPRETED else 128, reach=reach, eps=1e-2, **rules)


@kernel_test
@pytest.mark.parametrize(("buckets", "reach"), [(32, 0), (64, 4)])
@pytest.mark.parametrize("case", [name for name, (_, _, rules) in CASES.items() if rules])
def test_kernels_add_a_bias_of_time(case: str, buckets: int, reach: int, way: str) -> None:
    queries, keys, rules = CASES[case]
    # Short rows of queries keep some that have a bias.
    rules = {**rules, "n_summary": 1 if "aligned" in case else 2}
    check(way, queries, keys, DTYPES[-1], 16 if INTERPRETED else 128, buckets=buckets, reach=reach, eps=1e-2, **rules)


@kernel_test
def test_kernels_take_a_time_difference_for_its_bit_length(way: str) -> None:
    # A row of two events for each difference; ReLU of the bias alone is what the second one sees of the first.
    apart = [2**n + d for n in range(62) for d in (-1, 0, 1)]
    times = torch.tensor([[1000, 1000 - n] for n in apart]).flatten().to(DEVICE)
    q, v = torch.zeros(len(times), 16, device=DEVICE), torch.zeros(len(times), 16, device=DEVICE)
    v[::2] = 1
    table = torch.arange(64.0, device=DEVICE).unsqueeze(0)
    at, rules = offsets([2] * len(apart)).to(DEVICE), Rules(2, 2, "relu", 1.0, 1.0, causal=True)
    out = jagged_attention([q, q, v], at, at, rules, heads=1, times=times, time_bias=table)
    assert out[1::2, 0].int().tolist() == [n.bit_length() for n in apart]


@kernel_test
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_kernels_know_every_activation(activation: str, way: str) -> None:
    check(way, SHORT, SHORT, DTYPES[-1], 16, activation)


@kernel_test
@pytest.mark.parametrize("head", [4, 20] if INTERPRETED else [4, 20, 32, 64, 96])
def test_heads_of_any_width(head: int, way: str) -> None:
    check(way, SHORT, SHORT, DTYPES[-1], head, causal=True)
    check(way, SHORT, SHORT, DTYPES[-1], head, causal=True, eps=1e-2)


@kernel_test
def test_rows_longer_than_the_bound_count_by_their_latest_tokens(way: str) -> None:
    bound = 18 if way == "tiles" else 7
    for given in ({"window": 5, "n_summary": 1}, {"eps": 1e-2}):
        for dtype in (torch.float32, DTYPES[-1]):
            check(way, LONG, LONG, dtype, 16, max_q=bound, max_kv=bound, causal=True, **given)
            check(way, LONG, SHORT, dtype, 16, max_q=bound, max_kv=5, **given | {"window": 0})


@kernel_test
@pytest.mark.parametrize("causal", [False, True])
def test_both_ways_agree(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgate.models.kernels import launch

    head, dtype = 16 if INTERPRETED else 128, DTYPES[-1]
    queries, keys = within(LONG, "rows", dtype), within(SHORT if causal else LONG, "rows", dtype)
    at, at_keys = offsets(queries).to(DEVICE), offsets(keys).to(DEVICE)
    rules = Rules(max(queries), max(keys), "silu", head**-0.5, 7.0, causal=causal, eps=1e-6)
    sources = [
        torch.randn(sum(n), width * 2 * head, device=DEVICE, dtype=dtype, requires_grad=True)
        for n, width in ((queries, 1), (keys, 2))
    ]
    above = torch.randn(sum(queries), 2 * head, device=DEVICE, dtype=dtype)
    found = []
    for most in (launch.ROW, 0):
        monkeypatch.setattr(launch, "ROW", most)
        out = jagged_attention(sources, at, at_keys, rules, heads=2, layout="q|kv")
        found.append([out.detach(), *torch.autograd.grad(out, sources, above)])
    for a, b in zip(*found, strict=True):
        # Less than what rounding of a narrow type leaves them from the truth.
        assert (a - b).abs().max() <= NEAR[dtype] / 2 * b.abs().max()


@kernel_test
def test_a_row_without_keys_gets_zeros_whatever_its_queries_are(way: str) -> None:
    q, kv = torch.full((3, 32), torch.inf, device=DEVICE), torch.full((2, 64), torch.inf, device=DEVICE)
    q, kv = q.requires_grad_(), kv.requires_grad_()
    first, second = torch.tensor([0, 3, 3], device=DEVICE), torch.tensor([0, 0, 2], device=DEVICE)
    rules = Rules(8, 8, "silu", 1.0, 1.0)
    out = jagged_attention([q, kv], first, second, rules, heads=2, layout="q|kv")
    for x in (out, *torch.autograd.grad(out, [q, kv], torch.full_like(out, torch.inf))):
        assert torch.equal(x, torch.zeros_like(x))


@kernel_test
def test_no_eps_is_as_good_as_one(way: str) -> None:
    # Every query meets the places behind the last key, whose root mean square is zero then.
    check(way, LONG, LONG, DTYPES[-1], 16, eps=0.0)


@kernel_test
def test_no_rows_at_all(way: str) -> None:
    x = torch.randn(4, 32, device=DEVICE, requires_grad=True)
    at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for eps in (None, 1e-6):
        rules = Rules(8, 8, "silu", 1.0, 1.0, causal=True, eps=eps)
        out = jagged_attention([x, x, x], at, at, rules, heads=2)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert not out.any()
        assert not grad.any()
        empty = jagged_attention([x[:0], x, x], at, at, rules, heads=2)
        assert empty.shape == (0, 32)


@kernel_test
@pytest.mark.skipif(INTERPRETED, reason="compares launches of a GPU")
def test_kernels_repeat_to_the_bit(way: str) -> None:
    lengths = within(LONG, way, torch.bfloat16)
    x = torch.randn(sum(lengths), 3 * 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    most, at = max(lengths), offsets(lengths).to(DEVICE)
    rules = Rules(most, most, "silu", 0.125, 9.0, causal=True, eps=1e-6)
    tables = [torch.randn(2, n, device=DEVICE, requires_grad=True) for n in (64, 32)]
    times = moments(sum(lengths)).to(DEVICE)
    runs = []
    for bias, time_bias in ((None, None), tables) * 3:
        given = {} if bias is None else {"bias": bias, "times": times, "time_bias": time_bias}
        out = jagged_attention([x], at, at, rules, heads=2, layout="vqk", **given)
        runs.append((out, *torch.autograd.grad(out, [x, *(tables if given else [])], out.detach())))
    for same in (runs[::2], runs[1::2]):
        assert all(torch.equal(a, b) for run in same[1:] for a, b in zip(run, same[0], strict=True))


@kernel_test
@pytest.mark.parametrize("head", [3, 16])
def test_kernels_leave_a_gate_alone(head: int, way: str) -> None:
    lengths = within(SHORT, way, DTYPES[-1])
    most, at = max(lengths), offsets(lengths).to(DEVICE)
    rules = Rules(most, most, "silu", 0.7, 3.0, causal=True, eps=1e-3)
    uvqk = torch.randn(sum(lengths) + DEAD, 8 * head, device=DEVICE, dtype=DTYPES[-1], requires_grad=True)
    gate, out = gated_jagged_attention(uvqk, at, rules, heads=2)
    assert torch.equal(gate, uvqk[:, : 2 * head])
    above = torch.randn_like(gate)
    (grad,) = torch.autograd.grad([gate, out], uvqk, [above, out.detach()])
    assert torch.equal(grad[:, : 2 * head], above)
    rest = uvqk[:, 2 * head :].detach().requires_grad_()
    alone = jagged_attention([rest], at, at, rules, heads=2, layout="vqk")
    (expected,) = torch.autograd.grad(alone, rest, out.detach())
    assert torch.equal(out, alone)
    assert torch.equal(grad[:, 2 * head :], expected)
