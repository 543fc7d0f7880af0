"""What kernels read of a program's leaves: themselves where they lie as rows, else what was made to."""

from __future__ import annotations

import pytest
import torch
from narrowgate.precision.kernels.leaves import LeafLayout
from narrowgate.precision.kernels.program import Program

PROGRAM = Program.parse("mn,m,n,s;mul 0 1;mul 4 2;mul 5 3|6")


def leaves(x):
    m, n = torch.randn(*x.shape[:-1], 1), torch.randn(x.shape[-1])
    return [x, m, n, torch.tensor(2.0)]


@pytest.mark.parametrize(
    ("x", "stride", "same"),
    [
        (torch.randn(6, 16), 16, True),
        (torch.randn(2, 3, 16), 16, True),
        (torch.randn(6, 24)[:, :16], 24, True),
        (torch.randn(6, 20)[:, :16], 20, True),
        (torch.randn(16, 6).t(), 16, False),
        (torch.randn(3, 2, 16).transpose(0, 1), 16, False),
    ],
    ids=["matrix", "3d", "columns", "odd_columns", "transposed", "swapped"],
)
def test_a_layout_found_on_some_leaves_reads_others_of_their_strides(x, stride, same):
    layout = LeafLayout(leaves(x), PROGRAM)
    assert layout.strides == (stride, 1, 0, 0)
    assert layout.aligned == (stride % 8 == 0)
    # Other tensors of the same shapes and strides, as a kept launch meets them.
    others = leaves(torch.empty_strided(x.shape, x.stride()).copy_(torch.randn(x.shape)))
    flat = layout.flat(others)
    assert all((a is b) == (same or b is not others[0]) for a, b in zip(flat, others, strict=True))
    rows = others[0].reshape(-1, x.shape[-1])
    seen = torch.as_strided(flat[0], rows.shape, (layout.strides[0], 1), flat[0].storage_offset())
    assert torch.equal(seen, rows)
