"""Inputs and oracles that the numerics tests share."""

from __future__ import annotations

import socket

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedBlock(nn.Module):
    """x + down(silu(gate) * up), [gate, up] = up(RMSNorm(x)): norm, gate and residual around two layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class SwigluBlock(nn.Module):
    """x + down(silu(gate n) * up n), n = norm(x): gate and up are layers of their own, which read the same."""

    def __init__(self, width: int, hidden: int, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


@pytest.fixture(scope="session")
def gated_block() -> type[GatedBlock]:
    """The block whose producers move into casts."""
    return GatedBlock


@pytest.fixture(scope="session")
def swiglu_block() -> type[SwigluBlock]:
    """The block whose saved activations take another format."""
    return SwigluBlock


@pytest.fixture(scope="session")
def every_bf16() -> Tensor:
    """All 65,536 BF16 numbers as FP32: every sign, exponent, NaN and infinity."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(torch.float32)


@pytest.fixture(scope="session")
def fp32_sweep() -> Tensor:
    """Finite FP32 numbers with full mantissas over the range in which 8-bit formats round, and ties of each format."""
    generator = torch.Generator().manual_seed(7)
    exponent = torch.randint(-24, 18, (60_000,), generator=generator)
    mantissa = 1.0 + torch.rand(60_000, generator=generator, dtype=torch.float64)
    random = torch.ldexp(mantissa, exponent).to(torch.float32)
    ties = torch.arange(1, 1 << 12, dtype=torch.float32) / 16  # every multiple of half a step of every format
    scaled = torch.cat([ties * 2.0**e for e in range(-16, 12, 2)])
    near = torch.nextafter(scaled, torch.zeros(())), torch.nextafter(scaled, torch.full((), torch.inf))
    positive = torch.cat([random, scaled, *near])
    return torch.cat([positive, -positive])


@pytest.fixture(scope="session")
def ml_dtype() -> dict[str, type]:
    """ml_dtypes' type of every narrow element format."""
    return {
        "bf16": ml_dtypes.bfloat16,
        "fp8_e4m3": ml_dtypes.float8_e4m3fn,
        "fp8_e5m2": ml_dtypes.float8_e5m2,
        "fp6_e2m3": ml_dtypes.float6_e2m3fn,
        "fp6_e3m2": ml_dtypes.float6_e3m2fn,
        "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    }


@pytest.fixture(scope="session")
def same_bits():
    """Assert that two FP32 tensors hold the same bits, NaNs counted as one."""

    def check(actual: Tensor, expected: Tensor) -> None:
        assert actual.dtype == expected.dtype == torch.float32
        assert actual.shape == expected.shape
        a, e = (np.ascontiguousarray(t.numpy()) for t in (actual, expected))
        wrong = (a.view(np.int32) != e.view(np.int32)) & ~(np.isnan(a) & np.isnan(e))
        first = np.argwhere(wrong)[:5]
        assert not wrong.any(), f"{wrong.sum()} differ, at {first.tolist()}: {a[wrong][:5]} for {e[wrong][:5]}"

    return check


@pytest.fixture
def unused_port() -> int:
    """A TCP port of this host that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
