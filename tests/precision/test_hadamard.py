"""The rotation: orthonormal, Sylvester's up to signs, product-preserving, and flat on constants."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch
from narrowgate.precision import measure, quantize, sqnr_db
from narrowgate.precision.hadamard import hadamard_matrix, hadamard_signs, rotate, rotate_back

SIZES = (16, 32, 64, 128, 256)


@pytest.mark.parametrize("n", SIZES)
def test_the_matrix_is_orthonormal_and_scipys_up_to_signs(n):
    matrix = hadamard_matrix(n).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(n, dtype=torch.float64), atol=1e-6)
    signs = torch.tensor(hadamard_signs(n), dtype=torch.float64)
    expected = torch.from_numpy(scipy.linalg.hadamard(n)).double() * signs / n**0.5
    assert torch.allclose(matrix, expected, atol=1e-7)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_rotating_multiplies_every_block_by_the_matrix(n, dim):
    x = torch.randn(2 * n, 2 * n, 3) if dim == 1 else torch.randn(2 * n, 3, 2 * n)
    blocks = x.movedim(dim, -1).unflatten(-1, (2, n))
    expected = (blocks.double() @ hadamard_matrix(n).T.double()).flatten(-2).movedim(-1, dim)
    assert torch.allclose(rotate(x, n, dim).double(), expected, atol=1e-5)
    assert torch.allclose(rotate_back(rotate(x, n, dim), n, dim), x, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 16, 37, 64, 100])
def test_any_length_is_rotated_without_padding(length):
    x = torch.randn(3, length)
    y = rotate(x, 16)
    assert y.shape == x.shape
    assert torch.allclose(y.norm(dim=1), x.norm(dim=1), rtol=1e-5)
    assert torch.allclose(rotate_back(y, 16), x, atol=1e-5)


@pytest.mark.parametrize("length", [128, 100])
def test_both_operands_rotated_have_the_same_product(length):
    a, b = torch.randn(20, length, dtype=torch.float64), torch.randn(30, length, dtype=torch.float64)
    product = rotate(a.float(), 64).double() @ rotate(b.float(), 64).double().T
    assert torch.allclose(product, a @ b.T, atol=1e-4)


@pytest.mark.parametrize(("n", "peak"), [(16, 1.0), (64, 1.0), (256, 1.0), (32, 2**0.5), (128, 2**0.5)])
def test_constants_and_lone_outliers_spread_flat(n, peak):
    # Sylvester's matrix alone would gather a constant block into one element of sqrt(n).
    assert float(rotate(torch.ones(1, n), n).abs().max()) == pytest.approx(peak, rel=1e-5)
    outlier = torch.zeros(1, n)
    outlier[0, 3] = 1.0
    spread = rotate(outlier, n).abs()
    assert torch.allclose(spread, torch.full_like(spread, n**-0.5))


def test_rotation_lowers_the_error_of_heavy_tails_in_four_bits():
    # An outlier takes its row's scale; shared by its block, it leaves the others more of the format's range.
    x = torch.distributions.StudentT(3.0).sample((256, 1024))
    plain = measure(x, "fp4_e2m1/row").sqnr_db
    assert measure(x, "fp4_e2m1/row+hadamard(64)").sqnr_db > plain + 3


def test_dequantize_returns_to_the_input_basis_or_stays_rotated():
    x = torch.randn(32, 64)
    q = quantize(x, "fp8_e4m3/row+hadamard(32)")
    assert sqnr_db(x, q.dequantize()) > 28
    assert sqnr_db(rotate(x, 32), q.dequantize(rotated=True)) > 28
