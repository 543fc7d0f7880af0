"""quantize(): granularities, axes, ragged edges, empty tensors and the order of steps, against a scalar reference."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from narrowgate.precision import NarrowgateError, quantize
from narrowgate.precision.formats import get_format
from narrowgate.precision.quantization import prepare
from narrowgate.precision.spec import PLAIN_GRANULARITIES, Spec

PLAIN = ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1")


def _scalar_reference(x: np.ndarray, spec: Spec, dim: int, ml_dtype) -> tuple[np.ndarray, dict[tuple[int, ...], float]]:
    """Dequantized values and the scale of every group, by loops over the elements; plain formats with FP32 scales."""
    element = get_format(spec.format).element
    ndim, dim = x.ndim, dim % x.ndim
    other = (ndim - 1 if dim != ndim - 1 else ndim - 2) if ndim > 1 else None

    def group_of(index: tuple[int, ...]) -> tuple[int, ...]:
        if spec.granularity == "tensor":
            return ()
        key = list(index)
        if spec.granularity == "row":
            key[dim] = 0
        else:
            assert spec.block is not None
            rows, length = spec.block
            key[dim] //= length
            if other is not None and rows > 1:
                key[other] //= rows
        return tuple(key)

    indices = list(itertools.product(*map(range, x.shape)))
    amax: dict[tuple[int, ...], np.float32] = {}
    for index in indices:
        amax[group_of(index)] = max(amax.get(group_of(index), np.float32(0)), abs(x[index]))
    scale = {g: a / np.float32(element.max) if a else np.float32(1) for g, a in amax.items()}
    y = np.empty_like(x)
    for index in indices:
        s = scale[group_of(index)]
        code = np.float32(x[index] * (np.float32(1) / s)).clip(-element.max, element.max).astype(ml_dtype[spec.format])
        y[index] = np.float32(code) * s
    return y, {g: float(s) for g, s in scale.items()}


@pytest.mark.parametrize("granularity", PLAIN_GRANULARITIES)
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("shape", "dim"), [((5, 40), -1), ((40, 5), 0), ((3, 19, 6), 1), ((2, 3, 33), -1), ((37,), 0)])
def test_every_granularity_on_either_axis_equals_the_scalar_reference(name, granularity, shape, dim, ml_dtype):
    spec = Spec(format=name, granularity=granularity)
    x = torch.randn(shape) * torch.exp2(torch.randint(-3, 3, shape).float())
    expected, scales = _scalar_reference(x.numpy(), spec, dim, ml_dtype)
    q = quantize(x, spec, dim=dim)
    assert torch.equal(q.dequantize(), torch.from_numpy(expected))
    assert q.scale is not None
    assert all(float(q.scale[g]) == s for g, s in scales.items())
    assert q.scale.numel() == len(scales)


@pytest.mark.parametrize("granularity", ["128x128", "1x128", "row"])
def test_large_blocks_with_ragged_edges(granularity):
    # 130 x 300 in 128-blocks: the last ones are 2 rows and 44 columns, scaled by what they hold, not by padding.
    x = torch.randn(130, 300)
    x[128:] *= 100
    q = quantize(x, f"fp8_e4m3/{granularity}")
    rows, columns = {"128x128": (128, 128), "1x128": (1, 128), "row": (1, 300)}[granularity]
    assert q.scale is not None
    assert q.scale.shape == (math.ceil(130 / rows), math.ceil(300 / columns))
    for i, j in itertools.product(range(q.scale.shape[0]), range(q.scale.shape[1])):
        block = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        assert q.scale[i, j] == block.abs().max() / 448


SHAPES = {
    # spec: (data shape, scale shape) of a [48, 80] tensor contracted over its last axis
    "fp8_e4m3": ((48, 80), ()),
    "fp8_e4m3/row": ((48, 80), (48, 1)),
    "fp8_e4m3/1x128": ((48, 80), (48, 1)),
    "fp4_e2m1/1x16": ((48, 40), (48, 5)),
    "fp6_e3m2": ((48, 80), ()),
    "mxfp8": ((48, 80), (48, 3)),
    "mxfp8/32x32": ((48, 80), (2, 3)),
    "mxfp4": ((48, 40), (48, 3)),
    "nvfp4": ((48, 40), (48, 5)),
    "nvfp4/16x16": ((48, 40), (3, 5)),
}


@pytest.mark.parametrize("spec", SHAPES)
def test_shapes_and_dtypes_are_as_documented(spec):
    q = quantize(torch.randn(48, 80), spec)
    assert q.scale is not None
    assert (tuple(q.data.shape), tuple(q.scale.shape)) == SHAPES[spec]
    stored = {"fp8_e4m3": torch.float8_e4m3fn, "mxfp8": torch.float8_e4m3fn}.get(q.spec.format, torch.uint8)
    assert q.data.dtype == stored
    scales = {"mxfp8": torch.float8_e8m0fnu, "mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}
    assert q.scale.dtype == scales.get(q.spec.format, torch.float32)
    assert (q.tensor_scale is not None) == (q.spec.format == "nvfp4")
    assert q.shape == (48, 80)
    assert q.elements().shape == q.dequantize().shape == (48, 80)


@pytest.mark.parametrize("spec", [*SHAPES, "mxfp6_e2m3", "mxfp6_e3m2/32x32", "mxfp8_e5m2+rceil", "bf16", "fp32"])
def test_quantizing_the_transpose_along_the_other_axis_gives_the_transpose(spec):
    x = torch.randn(50, 70)
    a, b = quantize(x, spec, dim=1), quantize(x.T.contiguous(), spec, dim=0)
    assert torch.equal(a.dequantize(), b.dequantize().T)
    assert torch.equal(a.data.view(torch.uint8) if a.data.dtype.itemsize == 1 else a.data,
                       b.data.view(torch.uint8).T if b.data.dtype.itemsize == 1 else b.data.T)  # fmt: skip


@pytest.mark.parametrize("spec", ["mxfp8/32x32", "mxfp4/32x32", "nvfp4/16x16", "fp8_e4m3/128x128", "fp8_e4m3"])
def test_square_blocks_serve_both_axes(spec):
    # Quantized once for fprop and dgrad: the values are the same whichever axis is contracted.
    x = torch.randn(70, 150)
    assert torch.equal(quantize(x, spec, dim=0).dequantize(), quantize(x, spec, dim=1).dequantize())


@pytest.mark.parametrize("shape", [(0,), (0, 32), (32, 0), (3, 0, 5), (0, 0)])
@pytest.mark.parametrize(
    "spec", [*SHAPES, "bf16", "nvfp4+hadamard(16)+sr", "fp8_e4m3+clip(p=99)", "fp8_e5m2+clip(rms=4)"]
)
def test_empty_tensors_stay_empty(spec, shape):
    for dim in range(len(shape)):
        assert quantize(torch.empty(shape), spec, dim=dim, seed=0).dequantize().shape == shape


def test_a_scalar_is_a_tensor():
    assert float(quantize(torch.tensor(-3.0), "fp8_e4m3").dequantize()) == -3.0
    with pytest.raises(NarrowgateError, match="dim -1 is no axis"):
        quantize(torch.tensor(1.0), "fp8_e4m3/row")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_input_dtypes_go_through_fp32(dtype):
    x = torch.randn(16, 64).to(dtype)
    for spec in ("fp8_e4m3/row", "nvfp4", "mxfp8", "bf16"):
        assert torch.equal(quantize(x, spec).dequantize(), quantize(x.float(), spec).dequantize())


def test_strided_inputs_equal_contiguous_ones():
    x = torch.randn(64, 96)
    for spec in SHAPES:
        assert torch.equal(quantize(x.T, spec).dequantize(), quantize(x.T.contiguous(), spec).dequantize())
        assert torch.equal(quantize(x[:, ::2], spec).dequantize(), quantize(x[:, ::2].clone(), spec).dequantize())


def test_a_bf16_scaled_copy_is_never_rounded_again():
    # 448/421.25 * 1.0634766 scaled in BF16 would land on another code; FP32 all the way does not.
    x = torch.tensor([448.0, 1.0634766])
    assert quantize(x, "fp8_e4m3").dequantize()[1] == 1.125


def test_dequantize_rounds_the_fp32_product_once():
    q = quantize(torch.randn(64, 64) * 3, "nvfp4")
    assert torch.equal(q.dequantize(torch.bfloat16), q.dequantize().to(torch.bfloat16))
    assert torch.equal(q.elements(torch.bfloat16).float(), q.elements())


def test_zero_groups_stay_zero_beside_others():
    x = torch.randn(64, 64)
    x[:32, :32] = 0
    for spec in (*SHAPES, "fp8_e4m3/row+pow2"):
        y = quantize(x, spec).dequantize()
        assert torch.equal(y[:32, :32], torch.zeros(32, 32))
        assert torch.isfinite(y).all()


def test_a_block_of_one_outlier_keeps_it_and_flushes_the_rest():
    x = torch.full((1, 32), 1e-4)
    x[0, 7] = 100.0
    for spec in ("mxfp4", "nvfp4", "fp4_e2m1/1x32", "mxfp8"):
        y = quantize(x, spec).dequantize()
        assert float(y[0, 7]) == pytest.approx(100.0, rel=0.05 if spec == "mxfp8" else 0.34)
    y = quantize(x, "mxfp4").dequantize()
    assert torch.count_nonzero(y) == 1


def test_steps_run_in_one_order_whatever_the_spelling():
    x = torch.randn(8, 64)
    x[0, 0] = 50
    a = quantize(x, "fp8_e4m3/row+sr+hadamard(16)+clip(rms=3)", seed=4)
    b = quantize(x, "fp8_e4m3/row+clip(rms=3)+hadamard(16)+sr", seed=4)
    assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    by_hand = quantize(prepare(x, a.spec, 1), "fp8_e4m3/row+sr", seed=4)
    assert torch.equal(a.data.view(torch.uint8), by_hand.data.view(torch.uint8))


def test_a_given_amax_decides_the_scale():
    x = torch.tensor([1.0, 2.0, 3.0])
    q = quantize(x, "fp8_e4m3", amax=torch.tensor(448.0))
    assert q.scale is not None
    assert float(q.scale) == 1.0
    shard = quantize(torch.randn(16, 32), "nvfp4", amax=torch.tensor(2688.0))
    assert shard.tensor_scale is not None
    assert float(shard.tensor_scale) == 1.0
    with pytest.raises(NarrowgateError, match="amax belongs to"):
        quantize(x, "fp8_e4m3/row", amax=torch.tensor(1.0))


def test_given_amaxes_decide_the_scales_of_blocks():
    x = torch.randn(200, 130)
    own, other = quantize(x[:128], "fp8_e4m3/128x128"), quantize(x, "fp8_e4m3/128x128")
    amax = torch.tensor([[224.0, 448.0], [448.0, 896.0]])
    assert quantize(x, "fp8_e4m3/128x128", amax=amax).scale.tolist() == [[0.5, 1.0], [1.0, 2.0]]
    whole = x.new_tensor([[x[:128, :128].abs().max(), x[:128, 128:].abs().max()]])
    again = quantize(x[:64], "fp8_e4m3/128x128", amax=whole)
    assert torch.equal(again.scale, own.scale)
    assert torch.equal(again.data.view(torch.uint8), other.data[:64].view(torch.uint8))
    with pytest.raises(NarrowgateError, match="expected one for each of 4 scales"):
        quantize(x, "fp8_e4m3/128x128", amax=torch.ones(1, 2))


def test_users_faults_are_named():
    with pytest.raises(NarrowgateError, match="dim 2 is no axis of a tensor of shape"):
        quantize(torch.ones(2, 2), "fp8_e4m3/row", dim=2)
    with pytest.raises(NarrowgateError, match=r"floating-point tensor, found torch\.int64"):
        quantize(torch.ones(2, dtype=torch.int64), "fp8_e4m3")


def test_high_precision_formats_are_stored_as_themselves():
    x = torch.randn(5, 7)
    x[0, 0] = torch.inf
    q = quantize(x, "bf16")
    assert q.scale is None
    assert q.data.dtype == torch.bfloat16
    assert torch.equal(q.data, x.to(torch.bfloat16))
    assert quantize(x, "fp32").data.dtype == torch.float32
    assert quantize(x.requires_grad_(), "fp8_e4m3").dequantize().requires_grad is False
