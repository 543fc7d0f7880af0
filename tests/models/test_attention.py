"""The three uses of pointwise attention against loops over rows, and what a token may see."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from narrowgate.models import GemConfig
from narrowgate.models.attention import Pooling, SequenceArch, sequence_mask
from narrowgate.models.functional import RMSNorm, unit_rms
from narrowgate.models.jagged import Jagged
from torch import Tensor

LENGTHS = [6, 2, 9, 4]
CONFIG = GemConfig(d=16, heads=2, layers=1, max_tokens=9, pffn_tokens=3, dropout=0.0)


def layout(lengths: list[int]) -> Jagged:
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Jagged(rows, F.pad(torch.tensor(lengths).cumsum(0), (1, 0)))


def one_row(q: Tensor, k: Tensor, v: Tensor, heads: int, divisor: int, mask: Tensor | None = None) -> Tensor:
    """A row's attention, head by head: no padding, no transposes."""
    out = []
    for part in range(heads):
        width = q.shape[1] // heads
        at = slice(part * width, (part + 1) * width)
        cosine = F.normalize(q[:, at], dim=-1) @ F.normalize(k[:, at], dim=-1).T
        scores = F.silu(cosine * width**0.5)
        out.append((scores if mask is None else scores * mask) @ v[:, at] / divisor)
    return torch.cat(out, 1)


def norm(x: Tensor, module: RMSNorm) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], module.weight, 1e-6)


def test_pooling_matches_rows_attended_one_by_one() -> None:
    pooling, tokens = Pooling(CONFIG), torch.randn(sum(LENGTHS), 16)
    pooled = pooling(tokens, layout(LENGTHS).window(9))
    for row, part in enumerate(tokens.split(LENGTHS)):
        k, v = pooling.kv(norm(part, pooling.norm)).chunk(2, -1)
        torch.testing.assert_close(pooled[row], one_row(pooling.seeds, k, v, 2, 9), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_sequence_layer_matches_rows_attended_one_by_one(window: int | None) -> None:
    config = GemConfig(d=16, heads=2, layers=1, max_tokens=9, pffn_tokens=3, window=window)
    layer = SequenceArch(config).eval()
    tokens, summary = torch.randn(sum(LENGTHS), 16), torch.randn(4, 2, 16)
    updated = layer(tokens, summary, layout(LENGTHS).window(9)).split(LENGTHS)
    for row, part in enumerate(tokens.split(LENGTHS)):
        k, v = layer.pffn_kv(summary[row].flatten()).unflatten(0, (3, -1)).chunk(2, -1)
        x = part + one_row(layer.pffn_q(norm(part, layer.pffn_norm)), k, v, 2, 3)
        u, v, q, k = F.silu(layer.uvqk(norm(x, layer.norm))).split(16, -1)
        n = len(part)
        mask = torch.zeros(n, n)
        for i in range(n):
            for j in range(i + 1):
                mask[i, j] = window is None or i - j < window or i >= n - 2
        seen = one_row(q, k, v, 2, 9, mask)
        expected = x + layer.out(norm(seen, layer.attention_norm) * u)
        torch.testing.assert_close(updated[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 2])
def test_a_later_token_never_changes_an_earlier_output(window: int | None) -> None:
    config = GemConfig(d=16, heads=2, layers=1, max_tokens=9, window=window)
    layer, summary = SequenceArch(config).eval(), torch.randn(1, 2, 16)
    tokens = torch.randn(9, 16)
    before = layer(tokens, summary, layout([9]).window(9))
    changed = tokens.clone()
    changed[5] += 1
    after = layer(changed, summary, layout([9]).window(9))
    assert torch.equal(after[:5], before[:5])
    assert not torch.equal(after[5], before[5])
    assert not torch.equal(after[-1], before[-1]), "summary tokens see the whole row"


def test_a_row_never_changes_another() -> None:
    layer, tokens, summary = SequenceArch(CONFIG).eval(), torch.randn(12, 16), torch.randn(2, 2, 16)
    before = layer(tokens, summary, layout([5, 7]).window(9))
    changed = tokens.clone()
    changed[:5] = torch.randn(5, 16)
    after = layer(changed, summary, layout([5, 7]).window(9))
    assert torch.equal(after[5:], before[5:])


def test_window_hides_old_events_from_events_but_not_from_summaries() -> None:
    mask = sequence_mask(6, 2, 2, torch.device("cpu"))
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1],
    ]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unit_rms_has_the_gradient_of_the_formula(compiled: bool, dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 8).to(dtype).requires_grad_()
    grad = torch.randn(5, 3, 8).to(dtype)
    function = torch.compile(unit_rms, backend="aot_eager", fullgraph=True) if compiled else unit_rms
    out = function(x)
    (found,) = torch.autograd.grad(out, x, grad)
    wide = x.detach().double().requires_grad_()
    formula = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    (expected,) = torch.autograd.grad(formula, wide, grad.double())
    near = 1e-5 if dtype == torch.float32 else 2e-2
    assert out.dtype == found.dtype == dtype
    torch.testing.assert_close(out.double(), formula, rtol=near, atol=near)
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)


def test_unit_rms_keeps_zeros_and_passes_gradients_through_them() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    out = unit_rms(x)
    out.sum().backward()
    assert not out.any()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_block_norm_gives_each_block_its_own_root_mean_square() -> None:
    config = GemConfig(d=16, heads=2, layers=1, max_tokens=8, norm_block=4, norm_affine=False)
    x = torch.randn(3, 16)
    expected = F.rms_norm(x.view(3, 4, 4), (4,), eps=1e-6).view(3, 16)
    torch.testing.assert_close(RMSNorm(16, config)(x), expected)
    torch.testing.assert_close(RMSNorm(6, config)(x[:, :6]), F.rms_norm(x[:, :6], (6,), eps=1e-6))
