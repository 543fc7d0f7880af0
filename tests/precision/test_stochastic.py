"""Stochastic rounding: exact against gfloat with injected bits, and the generator's bits tested as random numbers.

Each statistical test states its power. All use fixed seeds, so they pass or fail the same way each time; the bounds
are five standard deviations, which a correct generator would miss once in 1.7 million seeds.
"""

from __future__ import annotations

import gfloat.formats
import numpy as np
import pytest
import torch
from narrowgate.precision import NarrowgateError, Shard, call_key, quantize, stream_key
from narrowgate.precision.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2
from narrowgate.precision.rounding import round_nearest, round_stochastic
from narrowgate.precision.stochastic import philox, random_bits

NARROW = (E4M3, E5M2, E2M3, E3M2, E2M1)
_SIGMAS = 5.0


def _gfloat(x: torch.Tensor, info: str, bits: torch.Tensor, mode: gfloat.RoundMode) -> torch.Tensor:
    fi = getattr(gfloat.formats, f"format_info_{info}")
    rounded = [
        gfloat.round_float(fi, float(v), mode, True, int(b), 16) for v, b in zip(x.tolist(), bits.tolist(), strict=True)
    ]
    return torch.tensor(rounded, dtype=torch.float32)


@pytest.mark.parametrize("element", NARROW, ids=lambda e: e.name)
def test_injected_bits_round_as_in_gfloat(element, fp32_sweep, same_bits):
    # StochasticFast adds half an ulp of the random word, as we do; every value, subnormal and saturating included.
    x = fp32_sweep[torch.randperm(fp32_sweep.numel())[:6000]]
    bits = torch.randint(0, 1 << 16, x.shape)
    bits[:50], bits[50:100] = 0, 0xFFFF
    expected = _gfloat(x, "ocp_" + element.name[4:], bits, gfloat.RoundMode.StochasticFast)
    same_bits(round_stochastic(x, element, bits), expected)


@pytest.mark.parametrize("mode", [gfloat.RoundMode.StochasticFast, gfloat.RoundMode.StochasticFastest])
def test_fp32_to_bf16_with_injected_bits_rounds_as_in_gfloat(mode, fp32_sweep, same_bits):
    # BF16 drops exactly 16 bits of a normal number, so centring the comparison changes nothing.
    x = fp32_sweep[torch.randperm(fp32_sweep.numel())[:3000]]
    bits = torch.randint(0, 1 << 16, x.shape)
    same_bits(round_stochastic(x, BF16, bits), _gfloat(x, "bfloat16", bits, mode))


def test_bf16_keeps_nan_and_infinity_and_never_overflows():
    x = torch.tensor([torch.nan, -torch.nan, 3.4e38, -3.4e38, torch.inf, 0.0, -0.0, -torch.inf])
    rounded = round_stochastic(x, BF16, torch.full(x.shape, 0xFFFF))
    assert torch.isnan(rounded[:2]).all()
    assert rounded[2] == BF16.max
    assert rounded[3] == -BF16.max
    assert rounded[4] == -rounded[7] == torch.inf
    assert torch.equal(torch.signbit(rounded[5:7]), torch.tensor([False, True]))


@pytest.mark.parametrize("element", NARROW, ids=lambda e: e.name)
def test_values_of_the_format_never_move(element, fp32_sweep, same_bits):
    values = round_nearest(fp32_sweep, element)
    for bits in (0, 1, 0x8000, 0xFFFF):
        same_bits(round_stochastic(values, element, torch.full(values.shape, bits)), values)


def test_the_bias_over_all_random_words_is_below_1e_4_of_a_step():
    # All 2**16 words: the expectation itself, not a sample of it. Steps at 1.0 are 1/8.
    words = torch.arange(1 << 16)
    errors = []
    for fraction in torch.linspace(0, 1, 97).tolist():
        x = torch.full(words.shape, 1.0 + fraction / 8)
        mean = round_stochastic(x, E4M3, words).double().mean()
        errors.append(float(mean - x[0].double()) * 8)
    assert max(abs(e) for e in errors) <= 2.0**-17 + 1e-9
    assert abs(sum(errors) / len(errors)) < 2.0**-18
    assert 2.0**-17 < 1e-4


def _philox_reference(key: int, counter: int) -> list[int]:
    """Philox4x32-7 with Python integers, from Salmon et al. (SC 2011), section 3.3."""
    k = [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF]
    c = [counter & 0xFFFFFFFF, counter >> 32 & 0xFFFFFFFF, 0, 0]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_the_reference_generator_gives_random123s_known_answer():
    # Random123's kat_vectors, philox4x32 with 7 rounds, counter and key all zero.
    assert _philox_reference(0, 0) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("key", [0, 1, -1, 0x1234_5678_9ABC_DEF0, -0x7FFF_FFFF_FFFF_FFFF])
def test_philox_equals_the_reference(key):
    counters = [0, 1, 7, (1 << 32) - 1, 1 << 32, (1 << 40) + 3]
    words = torch.stack(philox(key, torch.tensor(counters)), -1)
    assert words.tolist() == [_philox_reference(key, c) for c in counters]
    assert torch.equal(words, torch.stack(philox(torch.tensor(key), torch.tensor(counters)), -1))


def test_elements_take_their_16_bits_in_the_documented_order():
    bits = random_bits(5, (3, 11), "cpu").view(-1).tolist()
    for i, value in enumerate(bits):
        word = _philox_reference(5, i // 8)[i % 8 // 2]
        assert value == (word >> 16 if i % 2 else word & 0xFFFF)


@pytest.mark.parametrize("start", [(0, 0), (2, 0), (0, 3), (5, 8), (6, 7)])
def test_a_shard_draws_the_bits_of_the_unsharded_tensor(start):
    full = random_bits(9, (12, 24), "cpu")
    rows, columns = 12 - start[0], 24 - start[1]
    shard = random_bits(9, (rows, columns), "cpu", Shard((12, 24), start))
    assert torch.equal(shard, full[start[0] :, start[1] :])


def test_quantizing_shards_equals_quantizing_the_whole():
    x = torch.randn(24, 40)
    whole = quantize(x, "fp8_e4m3/row+sr", seed=3).dequantize()
    for rows in (slice(0, 7), slice(7, 24)):
        part = quantize(x[rows], "fp8_e4m3/row+sr", seed=3, shard=Shard((24, 40), (rows.start, 0)))
        assert torch.equal(part.dequantize(), whole[rows])


def test_a_shard_outside_its_tensor_is_an_error():
    with pytest.raises(NarrowgateError, match="lies outside"):
        random_bits(9, (4, 4), "cpu", Shard((6, 6), (3, 0)))


def test_the_global_generators_are_never_consumed():
    before = torch.get_rng_state()
    quantize(torch.ones(100), "fp8_e4m3+sr", seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_stochastic_rounding_is_an_error():
    with pytest.raises(NarrowgateError, match="give quantize a seed"):
        quantize(torch.ones(4), "fp8_e4m3+sr")
    with pytest.raises(NarrowgateError, match=r"random_bits has shape \(3,\), expected \(4,\)"):
        quantize(torch.ones(4), "fp8_e4m3+sr", random_bits=torch.zeros(3))


def test_stream_keys_are_stable_and_tell_streams_apart():
    # The value is part of the contract: a run resumed by a later version draws the same bits.
    assert stream_key(0, "tower.0", "fprop", "input") == stream_key(0, "tower.0", "fprop", "input")
    assert stream_key(0, "tower.0", "fprop", "input") == 5446253695151347658
    arguments = [
        (seed, layer, path, operand)
        for seed in (0, 1)
        for layer in ("a", "a.b", "b")
        for path in ("fprop", "dgrad", "wgrad")
        for operand in ("input", "weight", "grad")
    ]
    assert len({stream_key(*a) for a in arguments}) == len(arguments)


def test_call_keys_are_the_same_from_integers_and_tensors_and_never_repeat_within_a_stream():
    key = stream_key(0, "layer", "dgrad", "grad")
    calls = [(step, micro, call) for step in (0, 1, 2, 70_000) for micro in range(3) for call in range(3)]
    keys = [call_key(key, *c) for c in calls]
    assert len(set(keys)) == len(calls)
    assert all(-(1 << 63) <= k < 1 << 63 for k in keys)
    for c, expected in zip(calls, keys, strict=True):
        tensors = [torch.tensor(v) for v in c]
        assert call_key(key, *tensors) == expected
        assert call_key(torch.tensor(key), *tensors) == expected


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.9])
def test_rounding_is_unbiased_with_the_variance_of_a_coin(fraction):
    # n = 2**20: the mean's standard error is at most 0.5 / 1024 of a step, so a bias of 0.0025 of a step is seen
    # with certainty and one of 0.003 with power > 0.8; the variance of a coin is known to 1 %.
    n = 1 << 20
    x = torch.full((n,), 1.0 + fraction / 8)
    rounded = round_stochastic(x, E4M3, random_bits(11, (n,), "cpu"))
    up = (rounded.double() - 1.0) * 8
    assert set(up.unique().tolist()) == {0.0, 1.0}
    deviation = np.sqrt(fraction * (1 - fraction) / n)
    assert abs(float(up.mean()) - fraction) < _SIGMAS * deviation
    # var(sample variance) of a Bernoulli: p(1-p)(1-2p)^2 / n, plus the mean's own error squared.
    spread = np.sqrt(fraction * (1 - fraction) * (1 - 2 * fraction) ** 2 / n) + _SIGMAS / n
    assert abs(float(up.var()) - fraction * (1 - fraction)) < _SIGMAS * spread + 1e-6


def test_quantized_sums_are_unbiased_where_nearest_is_not():
    # 4096 updates of 0.02 of a step each: nearest rounding loses all of them, stochastic keeps their sum.
    x = torch.full((4096,), 1.0 + 0.02 / 8)
    x[0] = 448.0  # holds the tensor scale at 1
    kept = [quantize(x, "fp8_e4m3+sr", seed=s).dequantize()[1:].double().sum() - 4095 for s in range(16)]
    assert quantize(x, "fp8_e4m3").dequantize()[1:].double().sum() == 4095
    expected = 4095 * 0.02 / 8
    error = np.sqrt(4095 * 0.02 * 0.98 / 16) / 8
    assert abs(float(torch.stack(kept).mean()) - expected) < _SIGMAS * error


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double() - 32767.5, b.double() - 32767.5
    return float((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt())


def test_bits_are_independent_between_streams_steps_calls_and_neighbours():
    # n = 2**17: the correlation of independent bits has standard deviation 1/sqrt(n) = 0.0028, so one of 0.02 is
    # seen with power > 0.98.
    n, bound = 1 << 17, _SIGMAS / np.sqrt(1 << 17)
    key = stream_key(0, "layer", "dgrad", "grad")
    base = random_bits(call_key(key), (n,), "cpu")
    others = {
        "another step": call_key(key, 1),
        "another micro-batch": call_key(key, 0, 1),
        "another call": call_key(key, 0, 0, 1),
        "another operand": call_key(stream_key(0, "layer", "wgrad", "grad")),
        "another layer": call_key(stream_key(0, "layer2", "dgrad", "grad")),
        "another seed": call_key(stream_key(1, "layer", "dgrad", "grad")),
    }
    for why, other in others.items():
        assert abs(_correlation(base, random_bits(other, (n,), "cpu"))) < bound, why
    for lag in (1, 2, 3, 4, 5, 6, 7, 8, 1024):
        assert abs(_correlation(base[:-lag], base[lag:])) < bound, lag


def test_bits_are_uniform_in_every_lane():
    # Chi-square over 256 bins in each of the eight lanes: 255 degrees of freedom, standard deviation sqrt(510).
    n = 1 << 19
    bits = random_bits(3, (n,), "cpu").view(-1, 8)
    for lane in range(8):
        counts = torch.bincount(bits[:, lane] >> 8, minlength=256).double()
        expected = n / 8 / 256
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi2 - 255) < _SIGMAS * np.sqrt(510), lane


@pytest.mark.gpu
def test_the_bits_are_those_of_tritons_randint4x():
    triton = pytest.importorskip("triton")
    tl = pytest.importorskip("triton.language")

    @triton.jit
    def draw(out, key):
        index = tl.arange(0, 256)
        w0, w1, w2, w3 = tl.randint4x(key, index.to(tl.int64), 7)
        tl.store(out + index * 4 + 0, w0.to(tl.int32, bitcast=True))
        tl.store(out + index * 4 + 1, w1.to(tl.int32, bitcast=True))
        tl.store(out + index * 4 + 2, w2.to(tl.int32, bitcast=True))
        tl.store(out + index * 4 + 3, w3.to(tl.int32, bitcast=True))

    for key in (3, stream_key(0, "layer", "dgrad", "grad")):
        out = torch.empty(256, 4, dtype=torch.int32, device="cuda")
        draw[(1,)](out, key)
        expected = torch.stack(philox(key, torch.arange(256)), -1)
        assert torch.equal(out.cpu().to(torch.int64) & 0xFFFFFFFF, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("start", "rows"), [(0, 7), (3, 5), (1, 1), (6, 0), (0, 3001)])
def test_a_key_on_the_device_draws_the_bits_of_the_same_integer(device, start, rows):
    key = stream_key(1, "layer", "wgrad", "grad")
    shard = Shard((start + rows, 13), (start, 0))
    expected = random_bits(key, (rows, 13), "cpu", shard)
    drawn = random_bits(torch.tensor(key, device=device), (rows, 13), device, shard)
    assert drawn.dtype == expected.dtype
    assert torch.equal(drawn.cpu(), expected)
