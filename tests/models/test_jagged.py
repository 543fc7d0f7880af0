"""Flat tokens, padded windows, and the ways between them."""

from __future__ import annotations

import pytest
import torch
from narrowgate.models.jagged import Jagged, append_tokens
from torch import Tensor

LENGTHS = [3, 0, 5, 1]


def layout(lengths: list[int], dead: int = 0) -> Jagged:
    sizes = torch.tensor(lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor([*lengths, dead]))
    return Jagged(rows, torch.nn.functional.pad(sizes.cumsum(0), (1, 0)))


def by_hand(x: Tensor, lengths: list[int], width: int) -> Tensor:
    out = torch.zeros(len(lengths), width, x.shape[1], dtype=x.dtype)
    start = 0
    for row, length in enumerate(lengths):
        kept = x[start : start + length][-width:]
        out[row, width - len(kept) :] = kept
        start += length
    return out


@pytest.mark.parametrize("width", [2, 5, 7])
@pytest.mark.parametrize("dead", [0, 4])
def test_padding_aligns_the_latest_tokens_right(width: int, dead: int) -> None:
    x = torch.randn(sum(LENGTHS) + dead, 3)
    window = layout(LENGTHS, dead).window(width)
    torch.testing.assert_close(window.pad(x), by_hand(x, LENGTHS, width), rtol=0, atol=0)


def test_flattening_undoes_padding_and_zeroes_what_was_cut() -> None:
    x = torch.randn(sum(LENGTHS) + 2, 3)
    window = layout(LENGTHS, 2).window(4)
    back = window.flatten(window.pad(x))
    expected = x.clone()
    expected[3] = 0  # the first of five tokens
    expected[-2:] = 0  # dead
    torch.testing.assert_close(back, expected, rtol=0, atol=0)


def test_gradients_of_both_directions_match_numeric_ones() -> None:
    window = layout(LENGTHS, 2).window(4)
    x = torch.randn(sum(LENGTHS) + 2, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(window.pad, x)
    assert torch.autograd.gradcheck(window.flatten, y)


def test_appending_closes_every_row_and_keeps_dead_tokens_last() -> None:
    x, extra = torch.randn(sum(LENGTHS) + 3, 2), torch.randn(4, 2, 2)
    tokens, closed = append_tokens(x, layout(LENGTHS, 3), extra)
    expected, start = [], 0
    for row, length in enumerate(LENGTHS):
        expected += [x[start : start + length], extra[row]]
        start += length
    torch.testing.assert_close(tokens[:-3], torch.cat(expected), rtol=0, atol=0)
    assert not tokens[-3:].any()
    assert closed.offsets.tolist() == [0, 5, 7, 14, 17]
    assert closed.rows.tolist() == [0] * 5 + [1] * 2 + [2] * 7 + [3] * 3 + [4] * 3


def test_gradients_of_appending_match_numeric_ones() -> None:
    x = torch.randn(sum(LENGTHS) + 1, 2, dtype=torch.float64, requires_grad=True)
    extra = torch.randn(4, 2, 2, dtype=torch.float64, requires_grad=True)
    rows = layout(LENGTHS, 1)
    assert torch.autograd.gradcheck(lambda a, b: append_tokens(a, rows, b)[0], (x, extra))
