"""Block scales and codes against torchao's ``to_mx`` and Transformer Engine's NVFP4 arithmetic, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from narrowgate.precision import quantize
from narrowgate.precision.formats import E4M3, get_format
from narrowgate.precision.scaling import scale_values, scales_from_amax
from narrowgate.precision.spec import Spec
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, pack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_mx

TORCHAO_ELEMENTS = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp4": torch.float4_e2m1fn_x2,
}


def _blocks(rows: int = 512, columns: int = 256) -> torch.Tensor:
    """Blocks from 2^-90 to 2^90 in size, some with an outlier, some zero, some holding exact powers of two."""
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-90, 90, (rows, columns // 32))).repeat_interleave(32, 1)
    x[::7, ::32] *= 1000.0
    x[3] = 0.0
    x[4] = torch.exp2(torch.randint(-20, 20, (columns,)).float())
    x[5, :32] = 0.0
    x[5, 0] = -1e-3
    return x


@pytest.mark.parametrize("mode", ["floor", "rceil"])
@pytest.mark.parametrize("name", TORCHAO_ELEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mx_equals_torchaos_to_mx(name, mode, dtype):
    x = _blocks().to(dtype)
    scale, data = to_mx(x, TORCHAO_ELEMENTS[name], 32, getattr(ScaleCalculationMode, mode.upper()))
    q = quantize(x, f"{name}+{mode}")
    assert q.scale is not None
    assert q.scale.dtype == torch.float8_e8m0fnu
    assert torch.equal(q.scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(q.data.view(torch.uint8), data.view(torch.uint8).view(q.data.shape))


def test_mx_scales_of_all_bf16_amaxes_equal_to_mx(every_bf16):
    # One block per amax; NaN aside, where both agree, and infinity, of which to_mx makes a scale of 2^120.
    x = torch.zeros(65536, 32)
    x[:, 5] = every_bf16
    for mode in ("floor", "rceil"):
        scale, _ = to_mx(x, torch.float8_e4m3fn, 32, getattr(ScaleCalculationMode, mode.upper()))
        q = quantize(x, f"mxfp8+{mode}")
        assert q.scale is not None
        ours, theirs = q.scale.view(torch.uint8), scale.view(torch.uint8)
        infinite = torch.isinf(every_bf16)
        assert torch.equal(ours[~infinite], theirs[~infinite])
        assert (ours[infinite] == 255).all()


@pytest.mark.parametrize("mode", ["floor", "rceil"])
def test_blocks_below_e8m0s_smallest_scale_are_scaled_by_it(mode):
    # to_mx divides by 2^-126 (floor) or by 1 (rceil) in such blocks although it stores 2^-127, which halves the block
    # or loses it; ours dequantizes to the input.
    x = torch.full((1, 32), 2.0**-125)
    q = quantize(x, f"mxfp8+{mode}")
    assert q.scale is not None
    assert int(q.scale.view(torch.uint8)) == 0
    assert torch.equal(q.dequantize(), x)


def test_rceil_rounds_the_exact_bits_up():
    # Around every power of two times 448 and one or two ulps to either side, down to FP32's subnormals: log2 in FP32
    # cannot tell 1 + 2^-23 from 1. The expected code is computed from the exact binary expansion of the quotient.
    exact = torch.exp2(torch.arange(-149.0, 119.0)) * 448
    up, down = torch.full((), torch.inf), torch.zeros(())
    near = [exact, torch.nextafter(exact, up), torch.nextafter(exact, down)]
    near += [torch.nextafter(near[1], up), torch.nextafter(near[2], down), torch.tensor([0.0, 2.0**-149])]
    amax = torch.cat(near)
    expected = []
    for quotient in (amax.numpy() / np.float32(448)).tolist():
        mantissa, exponent = math.frexp(quotient)
        expected.append(max((exponent - 1 if mantissa == 0.5 else exponent) + 127, 0) if quotient else 0)
    scales = scales_from_amax(amax, Spec.parse("mxfp8+rceil"))
    assert scales.scale.view(torch.uint8).tolist() == expected


def test_the_largest_fp32_amax_has_a_finite_multiplier():
    amax = torch.tensor([torch.finfo(torch.float32).max])
    for name in TORCHAO_ELEMENTS:
        for mode in ("floor", "rceil"):
            scales = scales_from_amax(amax, Spec.parse(f"{name}+{mode}"))
            assert float(scale_values(scales.scale) * scales.multiplier) == 1.0


# --- NVFP4: Transformer Engine's scale chain, transcribed from its formulas in core_nvfp4.cuh
# (compute_global_encode_scaling_factor_FP4, compute_decoding_scaling_factor) as documented in torchao's
# test/prototype/moe_training/nvfp4_training/nvfp4_reference.py; FP4 codes from torchao.


def _te_nvfp4(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.float()
    largest = torch.finfo(torch.float32).max
    s_enc = (torch.tensor(448.0 * 6.0) / x.abs().max()).clamp(max=largest)
    s_enc = torch.where(x.abs().max() == 0, torch.tensor(1.0), s_enc)
    m, k = x.shape
    block_amax = x.abs().view(m // rows, rows, k // 16, 16).amax((1, 3))
    s_dec = (block_amax * (s_enc * torch.tensor(1.0 / 6.0))).clamp(max=448.0).to(torch.float8_e4m3fn)
    encode = (1.0 / (s_dec.float() * (1.0 / s_enc))).clamp(max=largest)
    scaled = x * encode.repeat_interleave(rows, 0).repeat_interleave(16, 1)
    return s_dec, 1.0 / s_enc, pack_uint4(f32_to_f4_unpacked(scaled.clamp(-6.0, 6.0)))


@pytest.mark.parametrize(("spec", "rows"), [("nvfp4", 1), ("nvfp4/16x16", 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_equals_transformer_engines_arithmetic(spec, rows, dtype):
    x = (torch.randn(256, 512) * torch.exp2(torch.randint(-12, 4, (256, 32))).repeat_interleave(16, 1)).to(dtype)
    x[32:48] = 0.0
    x[0, :16] *= 2.0**-30  # a block whose scale underflows E4M3 to zero
    block, tensor, codes = _te_nvfp4(x, rows)
    q = quantize(x, spec)
    assert q.scale is not None
    assert q.tensor_scale is not None
    assert torch.equal(q.scale.view(torch.uint8), block.view(torch.uint8))
    assert torch.equal(q.tensor_scale, tensor)
    assert torch.equal(q.data, codes)


def test_nvfp4_block_scales_round_once():
    # (block_amax / 6) * S_enc rounds twice and falls on the other side of a tie in some blocks, this one for example.
    amax = torch.tensor([1.4375, 0.002105712890625])
    s_enc = torch.tensor(2688.0) / amax[0]
    once = (amax * (s_enc * torch.tensor(1 / 6))).to(torch.float8_e4m3fn)
    twice = ((amax / 6.0) * s_enc).to(torch.float8_e4m3fn)
    assert once[1] != twice[1]
    assert scales_from_amax(amax, Spec.parse("nvfp4")).scale.tolist() == once.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "tile"), [("nvfp4", (1, 16)), ("nvfp4/16x16", (16, 16))])
def test_nvfp4_equals_transformer_engines_reference(spec, tile):
    reference = pytest.importorskip("transformer_engine.pytorch.custom_recipes.reference_nvfp4")
    utils = pytest.importorskip("transformer_engine.pytorch.custom_recipes.reference_utils")
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    quantizer = reference.NVFP4QuantizerRef(
        dtype=utils.Fp4Formats.E2M1, rowwise=True, columnwise=False, quant_tile_shape=tile
    )
    theirs, q = quantizer.quantize(x), quantize(x, spec)
    assert q.scale is not None
    assert torch.equal(q.data, theirs.data.view(torch.uint8))
    # Theirs repeats the scale of a square tile on each of its rows.
    ours = q.scale.view(torch.uint8).repeat_interleave(tile[0], 0)
    assert torch.equal(ours, theirs.scale.view(torch.uint8)[: x.shape[0], : x.shape[1] // 16])


# --- FP32 scales


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1"])
def test_fp32_scales_are_correctly_rounded_and_saturate_nothing(name):
    largest = get_format(name).element.max
    amax = torch.exp2(torch.rand(20_000) * 220 - 107)
    scales = scales_from_amax(amax, Spec.parse(name))
    assert torch.equal(scales.scale, amax / largest)
    assert torch.equal(scales.multiplier, 1.0 / scales.scale)
    assert (amax * scales.multiplier <= largest * (1 + 2**-22)).all()


def test_pow2_scales_are_the_next_power_of_two_up():
    amax = torch.tensor([448.0, 449.0, 447.0, 224.0, 1.0, 1e-30, 3e38])
    scales = scales_from_amax(amax, Spec.parse("fp8_e4m3+pow2"))
    assert torch.equal(scales.scale, torch.exp2(torch.ceil(torch.log2(amax.double() / 448.0))).float())
    assert (amax * scales.multiplier <= E4M3.max).all()
    assert (amax * scales.multiplier > E4M3.max / 2).all()


def test_a_zero_group_has_scale_one():
    assert torch.equal(scales_from_amax(torch.zeros(3), Spec.parse("fp8_e4m3/row")).scale, torch.ones(3))


@pytest.mark.parametrize(
    "spec", ["fp8_e4m3", "fp8_e4m3+pow2", "fp8_e5m2/row", "fp4_e2m1/1x16", "nvfp4", "mxfp8", "mxfp4"]
)
@pytest.mark.parametrize("amax", [2.0**-149, 1e-42, 2.0**-126, 1e-37, 1e-33])
def test_a_tiny_amax_gives_finite_scales_and_loses_no_more_than_the_smallest_step(spec, amax):
    # The reciprocal of amax / 448 would be infinite, and zeros in the group would become NaN.
    x = torch.zeros(2, 32)
    x[0, 3], x[0, 4] = amax, -amax / 2
    y = quantize(x, spec).dequantize()
    assert torch.isfinite(y).all()
    assert ((y - x).abs() <= max(amax, 2.0**-126)).all()
    assert torch.equal(y[1], x[1])


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_scaled_by_its_own_scale_no_amax_is_past_the_largest_value_by_eight_units_in_the_last_place(name, pow2):
    # Kernels that round stochastically rely on it: so far past it, the largest random bits would carry to another code.
    spec = Spec.parse(f"{name}/row{'+pow2' if pow2 else ''}")
    largest = torch.tensor(get_format(name).element.max)
    past = (largest.view(torch.int32) + 8).view(torch.float32)
    for exponent in (-100, 0, 100):
        mantissas = (torch.arange(1 << 23, dtype=torch.int32) + ((exponent + 127) << 23)).view(torch.float32)
        assert bool((mantissas * scales_from_amax(mantissas, spec).multiplier < past).all())
