"""Block Hadamard rotation along the contraction: spreads an outlier over its block and leaves products unchanged.

Each block of n elements is multiplied by ``R = H D / sqrt(n)``: H is Sylvester's Hadamard matrix and D a fixed
diagonal of signs, so ``R R^T = I``, and two operands rotated along their common contraction have the same product.

Without D a block of equal values (an activation with a mean) would gather into *one* element sqrt(n) times as large:
an outlier where there was none. D is a bent function, ``(-1)**popcount(i_low & i_high)`` over the halves of the bits
of i, whose Hadamard transform is flat: for n = 16, 64, 256 a constant block becomes a block of equal magnitudes
(for 32 and 128 within sqrt(2)), and a lone outlier is spread evenly as before. Random signs, as in arXiv:2509.25149,
reach that only on average.

The transform is computed by log2(n) rounds of additions and subtractions in FP32: the same bits on every device,
without the tensor core's TF32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard_signs(n: int) -> list[float]:
    """Return the diagonal of D: n signs of a bent function (n a power of two)."""
    half = (n.bit_length() - 1) // 2
    return [-1.0 if ((i & ((1 << half) - 1)) & (i >> half)).bit_count() % 2 else 1.0 for i in range(n)]


def hadamard_matrix(n: int, device: torch.device | str | None = None) -> Tensor:
    """Return R [n, n], FP32, with R R^T = I; n a power of two. ``rotate`` computes ``x @ R.T`` blockwise."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * torch.tensor(hadamard_signs(n), device=device) * (1.0 / math.sqrt(n))


def rotate(x: Tensor, n: int, dim: int = -1) -> Tensor:
    """Rotate FP32 ``x`` along ``dim`` in blocks of ``n``; same shape.

    Where the length is no multiple of n, the rest is rotated in blocks of descending powers of two (37 = 32 + 4 + 1),
    which is still orthogonal and pads nothing.
    """
    return _blockwise(x, n, dim, inverse=False)


def rotate_back(x: Tensor, n: int, dim: int = -1) -> Tensor:
    """Undo :func:`rotate`, to FP32 rounding."""
    return _blockwise(x, n, dim, inverse=True)


def _blockwise(x: Tensor, n: int, dim: int, *, inverse: bool) -> Tensor:
    dim %= x.dim()
    length = x.shape[dim]
    parts, start, size = [], 0, n
    while start < length:
        count = (length - start) // size * size
        if count:
            parts.append(_transform(x.narrow(dim, start, count), size, dim, inverse=inverse))
        start += count
        size //= 2
    if not parts:
        return x
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _transform(x: Tensor, n: int, dim: int, *, inverse: bool) -> Tensor:
    shape = x.shape
    x = x.movedim(dim, -1)
    moved = x.shape
    x = x.reshape(*moved[:-1], moved[-1] // n, n)
    signs = torch.tensor(hadamard_signs(n), device=x.device)
    if not inverse:
        x = x * signs
    half = 1
    while half < n:
        pairs = x.unflatten(-1, (n // (2 * half), 2, half))
        first, second = pairs.select(-2, 0), pairs.select(-2, 1)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    x = x * (1.0 / math.sqrt(n))
    if inverse:
        x = x * signs
    result = x.reshape(moved).movedim(-1, dim)
    assert result.shape == shape
    return result
