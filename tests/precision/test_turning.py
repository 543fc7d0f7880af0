"""Transposed codes are the codes, transposed: every byte, whatever it means."""

from __future__ import annotations

import pytest
import torch
from narrowgate.precision.cast_operators import kernels_on_cpu
from narrowgate.precision.turning import turned_codes

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not kernels_on_cpu(), reason="needs Triton's interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
#: Whole tiles; a part of one; rows that come in no fours, which no kernel takes; nothing.
SHAPES = [(256, 128), (132, 200), (4, 1), (36, 300), (130, 64), (0, 16), (16, 0)]


def codes(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_byte_goes_to_its_place(shape, dtype, device):
    given = codes(shape, dtype)
    found = turned_codes(given.to(device))
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8).cpu(), given.view(torch.uint8).t())


@pytest.mark.parametrize("device", DEVICES)
def test_codes_within_a_buffer_of_others(device):
    whole = codes((64, 160), torch.uint8).to(device)
    assert torch.equal(turned_codes(whole[:, 32:96]), whole[:, 32:96].t())
    assert torch.equal(turned_codes(whole[4:36]), whole[4:36].t())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_compilers_are_told(shape):
    operator = torch.ops.narrowgate.turned_codes
    # Not FP8: the check adds up what it compares.
    torch.library.opcheck(operator, (codes(shape, torch.uint8), None), test_utils=("test_schema", "test_faketensor"))
