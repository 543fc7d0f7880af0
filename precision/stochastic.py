"""Random bits for stochastic rounding: a counter-based generator, the same bits whatever computes them.

The bits of an element depend on a 64-bit key and on the element's index in the *unsharded* tensor, nothing else: not
on the launch shape, the sharding, recomputation or the order of calls. PyTorch's global generators are never used.

**Keys.** :func:`stream_key` hashes (seed, layer name, path, operand) once, on the host. :func:`call_key` mixes in
(optimizer step, micro-batch, call) each time; these may be Python integers or int64 tensors on the device, so a
compiled or graph-captured step does not bake them in.

**Generator.** Philox4x32-7 (Salmon et al., SC 2011: the fewest rounds that pass all tests of TestU01's BigCrush; casts
wait for these instructions, so the three rounds of margin that simulations take are left out) with counter words
(index low, index high, 0, 0) and the key's low and high word: exactly Triton's ``tl.randint4x(key, index, 7)`` with an
int64 index, so a kernel repeats these bits.
Each counter gives four 32-bit words, used as eight 16-bit numbers: element ``i`` takes counter ``i // 8``, word
``(i % 8) // 2``, the low half where i is even and the high half where it is odd.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import NarrowgateError

_MASK32 = 0xFFFF_FFFF
_ROUND_A, _ROUND_B = 0xD251_1F53, 0xCD9E_8D57
_KEY_A, _KEY_B = 0x9E37_79B9, 0xBB67_AE85
#: Rounds of Philox.
ROUNDS = 7
#: Elements that one counter serves.
LANES = 8
#: Counters that the CPU takes at a time: a round's six arrays of 64 KiB stay in its second-level cache.
_CHUNK = 1 << 13


@dataclass(frozen=True)
class Shard:
    """Where a local tensor lies in the unsharded one, so that it draws the unsharded tensor's bits."""

    #: Shape of the unsharded tensor.
    shape: tuple[int, ...]
    #: Index of the local tensor's first element along every axis.
    start: tuple[int, ...]


def stream_key(seed: int, layer: str, path: str, operand: str) -> int:
    """Return the key of one operand's stream: a stable 64-bit hash (BLAKE2b), as a signed integer."""
    text = "\0".join((str(seed), layer, path, operand))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def call_key(
    key: int | Tensor, step: int | Tensor = 0, micro_batch: int | Tensor = 0, call: int | Tensor = 0
) -> int | Tensor:
    """Return the 64-bit key of one call: ``key`` mixed with (step, micro_batch, call).

    For one stream the calls of a run never share a key (step below 2**32, the others below 2**16); between streams a
    clash is as likely as between random 64-bit numbers. Any argument may be an int64 tensor of shape [].
    """
    word = _wrap((step << 32) | ((micro_batch & 0xFFFF) << 16) | (call & 0xFFFF))
    # The finalizer of SplitMix64 (Steele et al., OOPSLA 2014): a bijection in which each bit moves half of the others.
    z = _wrap((key ^ word) + (0x9E37_79B9_7F4A_7C15 - (1 << 64)))
    z = _wrap((z ^ _shift(z, 30)) * (0xBF58_476D_1CE4_E5B9 - (1 << 64)))
    z = _wrap((z ^ _shift(z, 27)) * (0x94D0_49BB_1331_11EB - (1 << 64)))
    return z ^ _shift(z, 31)


def _wrap(x: int | Tensor) -> int | Tensor:
    """Reduce a Python integer to signed 64 bits, as tensors do by themselves."""
    return x if isinstance(x, Tensor) else (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(x: int | Tensor, bits: int) -> int | Tensor:
    """Logical right shift of a signed 64-bit number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def philox(key: int | Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-7 of an int64 ``counter`` under a 64-bit ``key``: four words, int64 in [0, 2**32)."""
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    c0, c1 = counter & _MASK32, (counter >> 32) & _MASK32
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(ROUNDS):
        # The product of two 32-bit words fills 64 bits; int64 wraps to the same bits, so only the shift needs a mask.
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1, c2, c3 = (
            ((product_b >> 32) & _MASK32) ^ (c1 ^ k0),
            product_b & _MASK32,
            ((product_a >> 32) & _MASK32) ^ (c3 ^ k1),
            product_a & _MASK32,
        )
        k0, k1 = (k0 + _KEY_A) & _MASK32, (k1 + _KEY_B) & _MASK32
    return c0, c1, c2, c3


def random_bits(
    key: int | Tensor, shape: Sequence[int], device: torch.device | str, shard: Shard | None = None
) -> Tensor:
    """Return 16 random bits for every element of a tensor of ``shape``: int32 in [0, 2**16).

    Args:
        key: 64-bit key (an integer or an int64 tensor of shape []), see :func:`call_key`.
        shape: shape of the local tensor.
        device: where the bits are made.
        shard: where the local tensor lies in the unsharded one; default: it is the unsharded one.

    Raises:
        NarrowgateError: the shard does not lie inside the unsharded tensor.
    """
    shape = tuple(shape)
    if shard is None:
        return _contiguous(key, 0, math.prod(shape), device).view(shape)
    inside = len(shard.shape) == len(shard.start) == len(shape) and all(
        s >= 0 and s + n <= full for s, n, full in zip(shard.start, shape, shard.shape, strict=True)
    )
    if not inside:
        raise NarrowgateError(f"a shard of shape {shape} at {shard.start} lies outside a tensor of shape {shard.shape}")
    if shape[1:] == tuple(shard.shape[1:]):
        offset = shard.start[0] * math.prod(shape[1:]) if shape else 0
        return _contiguous(key, offset, math.prod(shape), device).view(shape)
    index = torch.zeros((), dtype=torch.int64, device=device)
    for start, size, full in zip(shard.start, shape, shard.shape, strict=True):
        index = index.unsqueeze(-1) * full + torch.arange(start, start + size, device=device)
    words = torch.stack(philox(key, index // LANES), -1)
    lane = index % LANES
    word = words.gather(-1, (lane // 2).unsqueeze(-1)).squeeze(-1)
    return ((word >> (16 * (lane % 2))) & 0xFFFF).to(torch.int32)


def _contiguous(key: int | Tensor, offset: int, count: int, device: torch.device | str) -> Tensor:
    """Bits of the elements offset .. offset + count of the unsharded tensor."""
    if isinstance(key, Tensor):
        return _random_bits_op(key, offset, count).to(torch.int32).bitwise_and_(0xFFFF)
    return _halves(key, offset, count, device)


def _halves(key: int | Tensor, offset: int, count: int, device: torch.device | str) -> Tensor:
    first, skip = offset // LANES, offset % LANES
    counters = (skip + count + LANES - 1) // LANES
    words = philox(key, torch.arange(first, first + counters, device=device))
    halves = [half for word in words for half in ((word & 0xFFFF).to(torch.int32), (word >> 16).to(torch.int32))]
    return torch.stack(halves, -1).view(-1).narrow(0, skip, count)


# An op of its own: traced, Philox is some 100 integer operations a draw, which cost a compiler more time than the
# whole layer around it, and in eager mode as many launches.
@torch.library.custom_op("narrowgate::random_bits", mutates_args=())
def _random_bits_op(key: Tensor, offset: int, count: int) -> Tensor:
    """The 16 bits of the elements offset .. offset + count, int16 [count]."""
    if key.is_cuda:
        from .kernels.philox import fill_random_bits

        return fill_random_bits(key, offset, count)
    if key.device.type == "cpu":
        return torch.from_numpy(_fill_on_cpu(int(key), offset, count))
    return _halves(key, offset, count, key.device).to(torch.int16)


def _fill_on_cpu(key: int, offset: int, count: int) -> NDArray[np.int16]:
    """:func:`_halves` in place in cache-sized pieces: NumPy's loops over unsigned words take half of the time.

    Philox is all but the rest of emulated stochastic rounding's cost, so it is worth a second version.
    """
    u64 = np.uint64
    first, skip = offset // LANES, offset % LANES
    counters = (skip + count + LANES - 1) // LANES
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    keys = [(u64((k0 + r * _KEY_A) & _MASK32), u64((k1 + r * _KEY_B) & _MASK32)) for r in range(ROUNDS)]
    factor_a, factor_b, mask, half = u64(_ROUND_A), u64(_ROUND_B), u64(_MASK32), u64(32)
    words = np.empty((counters, 4), np.dtype("<u4"))
    for start in range(0, counters, _CHUNK):
        out = words[start : start + _CHUNK]
        counter = np.arange(first + start, first + start + len(out), dtype=u64)
        c0, c1 = counter & mask, counter >> half
        c2, c3, a, b = np.zeros_like(c0), np.zeros_like(c0), np.empty_like(c0), np.empty_like(c0)
        for k0, k1 in keys:
            np.multiply(c0, factor_a, out=a)
            np.multiply(c2, factor_b, out=b)
            np.right_shift(b, half, out=c0)
            np.right_shift(a, half, out=c2)
            np.bitwise_xor(c0, c1, out=c0)
            np.bitwise_xor(c2, c3, out=c2)
            np.bitwise_xor(c0, k0, out=c0)
            np.bitwise_xor(c2, k1, out=c2)
            np.bitwise_and(b, mask, out=c1)
            np.bitwise_and(a, mask, out=c3)
        for lane, word in enumerate((c0, c1, c2, c3)):
            out[:, lane] = word
    # Little-endian: the low half of a word comes before its high half, as the lanes do.
    return words.view(np.dtype("<i2")).reshape(-1)[skip : skip + count].astype(np.int16)


@_random_bits_op.register_fake
def _(key: Tensor, offset: int, count: int) -> Tensor:
    return key.new_empty(count, dtype=torch.int16)
