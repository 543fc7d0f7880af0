"""Libraries' attentions beside ours: what each computes and sees, what is skipped and why, and the rows of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from narrowgate.gates.bench import attention_peers, gem_attention
from narrowgate.gates.bench.gem import GemSettings
from narrowgate.models.config import GemConfig
from narrowgate.precision.errors import NarrowgateError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CONFIG = GemConfig(
    d=64, heads=2, layers=2, max_tokens=40, n_summary=3, n_pma=2, pffn_tokens=4, fm_hidden=(32,), attention="jagged"
)
WINDOWED = replace(CONFIG, window=7)
SETTINGS = GemSettings(torch.device("cpu"), lambda line: None, rounds=2, steps=1)
LENGTHS = torch.tensor([1, 40, 17, 2, 33, 8])
USES = ("self", "feed_forward", "pooling")
PEERS = ["pytorch_varlen", "flex_attention", "fbgemm_hstu"]


def case_of(
    use: str,
    config: GemConfig = CONFIG,
    lengths: Tensor = LENGTHS,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> gem_attention.Case:
    (found,) = (one for one in gem_attention.uses(config) if one.name == use)
    torch.manual_seed(0)
    return gem_attention.Case(config, found, lengths, torch.device(device), dtype or torch.float32)


def seen(case: gem_attention.Case, row: int, exempt: bool = True) -> Tensor:
    """[queries, keys] of one row, told from the definition, pair by pair."""
    queries, keys = (int(lengths[row]) for lengths in case.lengths)
    window, summary = case.config.window, case.config.n_summary
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            near = window is None or i - j < window or (exempt and i >= queries - summary)
            mask[i, j] = not case.causal or (j <= i and near)
    return mask


def dense(case: gem_attention.Case, weights: Callable[[Tensor], Tensor], exempt: bool = True) -> tuple[Tensor, ...]:
    """Output and gradients of q, k and v in FP64: ``weights`` makes what is summed of scores, -inf where unseen."""
    heads, width = case.config.heads, case.head
    inputs = [x.detach().double().cpu().requires_grad_() for x in case.inputs]
    q, k, v = (x.unflatten(-1, (heads, width)) for x in inputs)
    q, k = (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    out = []
    ends = [lengths.cumsum(0).tolist() for lengths in case.lengths]
    for row, (end_q, end_k) in enumerate(zip(*ends, strict=True)):
        mask = seen(case, row, exempt)
        query = q[end_q - mask.shape[0] : end_q].transpose(0, 1)
        key, value = (x[end_k - mask.shape[1] : end_k].transpose(0, 1) for x in (k, v))
        scores = (query @ key.mT / width**0.5).masked_fill(~mask, float("-inf"))
        out.append((weights(scores) @ value).transpose(0, 1).flatten(1))
    made = torch.cat(out)
    return made.detach(), *torch.autograd.grad(made, inputs, case.grad.double().cpu())


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def silu(divisor: float) -> Callable[[Tensor], Tensor]:
    def weights(scores: Tensor) -> Tensor:
        finite = scores.masked_fill(scores.isinf(), 0)
        return torch.nn.functional.silu(finite) / divisor

    return weights


def apart(found: Any, expected: Any) -> float:
    return max(
        float((a.double().cpu() - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(found, expected, strict=True)
    )


def as_documented(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, window: tuple[int, int],
    weights: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """What both libraries document: keys from ``window[0]`` before to ``window[1]`` after one's own, -1 for all."""
    assert ends_q.dtype == ends_k.dtype == torch.int32
    rows = []
    for row in range(len(ends_q) - 1):
        query = q[ends_q[row] : ends_q[row + 1]].transpose(0, 1)
        key, value = (x[ends_k[row] : ends_k[row + 1]].transpose(0, 1) for x in (k, v))
        back = torch.arange(query.shape[1]).unsqueeze(1) - torch.arange(key.shape[1])
        hidden = (back > window[0]) & (window[0] >= 0) | (back < -window[1]) & (window[1] >= 0)
        rows.append((weights((query @ key.mT).masked_fill(hidden, float("-inf"))) @ value).transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("config", [CONFIG, WINDOWED])
@pytest.mark.parametrize("use", USES)
def test_flops_count_what_is_seen(use: str, config: GemConfig) -> None:
    case = case_of(use, config)
    for exempt, rules in ((True, case.rules), (False, replace(case.rules, n_summary=0))):
        pairs = sum(int(seen(case, row, exempt).sum()) for row in range(len(LENGTHS)))
        assert case.flops(rules) == 12 * 64 * pairs


@pytest.mark.parametrize("config", [CONFIG, WINDOWED])
@pytest.mark.parametrize("use", USES)
def test_a_mask_made_in_slices_is_that_of_the_whole_batch(
    use: str, config: GemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    monkeypatch.setattr(attention_peers, "_SLICE", 2)
    lengths = torch.tensor([300, 1, 129, 1, 2, 511, 128, 90, 70])
    case = case_of(use, replace(config, max_tokens=511, n_pma=70, pffn_tokens=90), lengths)
    tokens = [int(one.sum()) for one in case.lengths]
    found = attention_peers.block_mask(case)
    expected = create_block_mask(attention_peers.mask_function(case), None, None, *tokens, device="cpu")
    assert found.shape == expected.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for counts, places in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        for row, count in enumerate(getattr(expected, counts)[0, 0].tolist()):
            here, there = (getattr(mask, places)[0, 0, row, :count].tolist() for mask in (found, expected))
            assert sorted(here) == sorted(there)


@pytest.mark.parametrize("config", [CONFIG, WINDOWED])
@pytest.mark.parametrize("use", USES)
def test_flex_attention_is_the_softmax_of_what_our_kernels_see(use: str, config: GemConfig) -> None:
    case = case_of(use, config)
    made = attention_peers.flex(case)
    assert (made.variant, made.same_function, made.note) == ("softmax", False, None)
    compiled = torch.compile(made.function, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        out = compiled(*(x.detach() for x in case.inputs))
    assert apart([out], dense(case, softmax)[:1]) < 1e-5
    assert made.rules == case.rules


@pytest.mark.parametrize("config", [CONFIG, WINDOWED])
@pytest.mark.parametrize("use", USES)
def test_varlen_attention_is_called_as_it_is_documented(
    use: str, config: GemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, *, scale: float,
        window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        assert (ends_q.diff() <= max_q).all()
        assert (ends_k.diff() <= max_k).all()
        return as_documented(q * scale, k, v, ends_q, ends_k, window_size, softmax)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    case = case_of(use, config)
    made = attention_peers.varlen(case)
    assert apart(case.step(made.function), dense(case, softmax, exempt=False)) < 1e-5
    assert (made.variant, made.same_function) == ("softmax", False)
    assert (made.note is None) == (config.window is None or use != "self")
    assert case.flops(made.rules) == 12 * 64 * sum(
        int(seen(case, row, exempt=False).sum()) for row in range(len(LENGTHS))
    )


@pytest.mark.parametrize("config", [CONFIG, WINDOWED])
@pytest.mark.parametrize("use", USES)
def test_the_installed_varlen_attention_takes_these_arguments(use: str, config: GemConfig) -> None:
    case = case_of(use, config, dtype=torch.bfloat16)
    made = attention_peers.varlen(case)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [mode.from_tensor(x.detach()).requires_grad_() for x in case.inputs]
        out = made.function(*inputs)
        found = torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert out.shape == case.grad.shape
    assert [x.shape for x in found] == [x.shape for x in case.inputs]


def with_hstu(monkeypatch: pytest.MonkeyPatch, attention: Callable[..., Tensor]) -> None:
    names = attention_peers.HSTU.split(".")
    for depth in range(1, len(names) + 1):
        module = ModuleType(".".join(names[:depth]))
        if depth < len(names):
            module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.hstu_attn_varlen_func = attention  # type: ignore[attr-defined]


def early_hstu(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    num_contexts: Tensor | None, num_targets: Tensor | None, target_group_size: int = 1,
    window_size: tuple[int, int] = (-1, -1), alpha: float = 1.0, rab: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert num_contexts is num_targets is rab is None
    return as_documented(q * alpha, k, v, cu_seqlens_q, cu_seqlens_k, window_size, silu(max_seqlen_q))


def late_hstu(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_q: Tensor | None,
    seqused_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, scaling_seqlen: int, num_contexts: Tensor | None,
    num_targets: Tensor | None, target_group_size: int = 1, window_size: tuple[int, int] = (-1, -1),
    alpha: float = 1.0,
) -> Tensor:  # fmt: skip
    assert seqused_q is seqused_k is num_contexts is num_targets is None
    return as_documented(q * alpha, k, v, cu_seqlens_q, cu_seqlens_k, window_size, silu(scaling_seqlen))


@pytest.mark.parametrize("attention", [early_hstu, late_hstu])
def test_hstu_computes_what_ours_does_where_it_fits(
    attention: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_hstu(monkeypatch, attention)
    case = case_of("self")
    made = attention_peers.hstu(case)
    assert (made.variant, made.same_function, made.one_graph) == ("silu", True, False)
    assert apart(case.step(made.function), dense(case, silu(40))) < 1e-5
    assert apart(case.step(case.jagged), dense(case, silu(40))) < 1e-5
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        assert apart(case.step(gem_attention.compiled(made.function, whole=False)), dense(case, silu(40))) < 1e-5


def test_hstu_pools_rows_that_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with_hstu(monkeypatch, late_hstu)
    pooling = case_of("pooling", lengths=LENGTHS.clamp_min(2))
    made = attention_peers.hstu(pooling)
    assert apart(pooling.step(made.function), dense(pooling, silu(40))) < 1e-5
    for use, message in (("pooling", "row 0 has 2 and 1"), ("feed_forward", "row 1 has 40 and 4")):
        with pytest.raises(NarrowgateError, match=f"takes no row of more queries than keys, {message}"):
            attention_peers.hstu(case_of(use))
    with_hstu(monkeypatch, early_hstu)
    with pytest.raises(NarrowgateError, match="divides by max_seqlen_q, 2, expected a divisor of 40"):
        attention_peers.hstu(pooling)


def test_hstu_with_a_window_is_no_longer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with_hstu(monkeypatch, late_hstu)
    case = case_of("self", WINDOWED)
    made = attention_peers.hstu(case)
    assert not made.same_function
    assert made.note == "the closing summary tokens have the window too"
    found = case.step(made.function)
    assert apart(found, dense(case, silu(40), exempt=False)) < 1e-5
    assert apart(found, dense(case, silu(40))) > 1e-2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, activation="gelu"), "computes SiLU, the model has gelu"),
        (replace(CONFIG, heads=4), "takes heads of 32, 64, 128, 256 elements, found 16"),
    ],
)
def test_hstu_says_what_it_cannot(config: GemConfig, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_hstu(monkeypatch, late_hstu)
    with pytest.raises(NarrowgateError, match=message):
        attention_peers.hstu(case_of("self", config))


def test_hstu_of_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_hstu(monkeypatch, lambda q, k, v, seq_offsets_q, seq_offsets_k: q)
    with pytest.raises(NarrowgateError, match="takes no alpha, cu_seqlens_k, cu_seqlens_q, "):
        attention_peers.hstu(case_of("self"))


def test_a_dry_run_has_the_rows_and_says_what_is_missing() -> None:
    found = gem_attention.measure_attention(WINDOWED, 6, SETTINGS, "toy")
    lengths = gem_attention.even_lengths(6, 40)
    sparsity = 1 - float(lengths.sum()) / 240
    head = f"toy attention, sparsity {sparsity:.2f}"
    rows = {(row["case"], row["arm"]): row for row in found.rows}
    assert list(rows) == [
        (case, arm) for case in (*(f"{head}, {use}" for use in USES), head) for arm in ("padded", "narrowgate")
    ]
    for row in found.rows:
        assert (row["variant"], row["same_function"], row["dry_run"]) == ("silu", True, True)
        assert row["ms"] > 0
        assert row["ratio"] is row["ci"] is row["tflops"] is row["note"] is None
        assert (row["relative_error"] is None) == (row["max_error"] is None) == (row["arm"] == "padded")
        if row["arm"] == "narrowgate":
            assert 0 < row["relative_error"] < 1e-5
            assert 0 < row["max_error"] < 1e-5
    whole = rows[head, "narrowgate"]
    assert whole["calls"] == {"self": 2, "feed_forward": 2, "pooling": 3}
    assert whole["flops"] == sum(
        number * rows[f"{head}, {use}", "narrowgate"]["flops"] for use, number in whole["calls"].items()
    )
    assert [entry["name"] for entry in found.skipped] == [f"{name}, {use}" for use in USES for name in PEERS]
    assert {entry["reason"] for entry in found.skipped} == {"runs forward and backward on CUDA only, found cpu"}
    assert not found.faults


def test_an_arm_has_rows_where_it_runs_and_a_reason_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def peer(name: str, case: gem_attention.Case) -> attention_peers.Peer:
        if name == "pytorch_varlen":
            return attention_peers.Peer("softmax", case.padded, case.rules, same_function=False, note="a note")
        if name == "flex_attention":
            raise RuntimeError("does not compile\nmore lines")
        if case.use.name == "feed_forward":
            raise NarrowgateError("takes no such rows")

        def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return 2 * case.jagged(q, k, v)

        return attention_peers.Peer("silu", twice, case.rules, same_function=True)

    monkeypatch.setattr(attention_peers, "peer", peer)
    found = gem_attention.measure_attention(CONFIG, 6, SETTINGS, "toy")
    assert {(entry["name"], entry["reason"]) for entry in found.skipped} == {
        *((f"flex_attention, {use}", "RuntimeError: does not compile") for use in USES),
        ("fbgemm_hstu, feed_forward", "takes no such rows"),
    }
    rows = {(row["case"].partition(", ")[2].partition(", ")[2], row["arm"]): row for row in found.rows}
    assert {use for use, arm in rows if arm == "pytorch_varlen"} == {*USES, ""}
    assert {use for use, arm in rows if arm == "fbgemm_hstu"} == {"self", "pooling"}
    other = rows["", "pytorch_varlen"]
    assert (other["variant"], other["same_function"], other["note"]) == ("softmax", False, "a note")
    assert other["relative_error"] is other["max_error"] is None
    # Twice as much in all of output and gradients.
    assert rows["self", "fbgemm_hstu"]["relative_error"] == pytest.approx(1, rel=1e-4)
    assert rows["self", "fbgemm_hstu"]["max_error"] == pytest.approx(1, rel=1e-4)


def test_ours_and_the_padded_version_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **named: Any) -> Tensor:
        raise RuntimeError("broken kernel")

    monkeypatch.setattr(gem_attention, "attend_in_rows", fails)
    with pytest.raises(RuntimeError, match="broken kernel"):
        gem_attention.measure_attention(CONFIG, 6, SETTINGS, "toy")


@pytest.mark.gpu
@pytest.mark.parametrize("config", [CONFIG, WINDOWED])
@pytest.mark.parametrize("use", USES)
def test_arms_on_a_gpu_compute_what_they_say(use: str, config: GemConfig) -> None:
    config = replace(config, d=256, heads=4, max_tokens=200)
    lengths = gem_attention.even_lengths(8, 200)
    case = case_of(use, config, lengths, "cuda", torch.bfloat16)
    exact = dense(case, silu(case.rules.norm))
    assert apart(case.step(gem_attention.compiled(case.jagged)), exact) < 2e-2
    assert apart(case.step(gem_attention.compiled(case.padded)), exact) < 2e-2
    ran = []
    for name in PEERS:
        try:
            made = attention_peers.peer(name, case)
        except (NarrowgateError, ImportError):
            assert name == "fbgemm_hstu", "PyTorch's own come with every version that is supported"
            continue
        found = case.step(gem_attention.compiled(made.function, whole=made.one_graph))
        weights = softmax if made.variant == "softmax" else silu(case.rules.norm)
        assert apart(found, dense(case, weights, exempt=made.rules == case.rules)) < 2e-2, name
        ran.append(name)
    assert ran[:2] == PEERS[:2]


@pytest.mark.gpu
def test_all_available_arms_are_measured_in_one_run_on_a_gpu() -> None:
    settings = GemSettings(torch.device("cuda", torch.cuda.current_device()), print, rounds=4, steps=1)
    found = gem_attention.measure_attention(replace(CONFIG, d=256, heads=4, max_tokens=200), 64, settings, "toy")
    skipped = {entry["name"].partition(",")[0] for entry in found.skipped}
    assert skipped <= {"fbgemm_hstu"}, found.skipped
    whole = [row for row in found.rows if len(row["calls"]) == 3]
    assert [row["arm"] for row in whole][:4] == ["padded", "narrowgate", "pytorch_varlen", "flex_attention"]
    for row in found.rows:
        assert row["ci"][0] <= row["ratio"] <= row["ci"][1]
        assert row["tflops"] > 0
        if row["same_function"] and row["arm"] != "padded":
            assert row["relative_error"] < 2e-2
    assert isinstance(whole[1]["saved_of_promised"], float)
