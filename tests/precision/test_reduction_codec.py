"""What a rank sends of its gradients, and the sums of what arrives, without processes: against whole gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from narrowgate.precision import Spec, quantize, reduction_codec
from narrowgate.precision.cast_operators import kernels_on_cpu
from narrowgate.precision.reduction_codec import Piece, encode, ended, line_bytes, pieces_of, sum_decoded, sum_into
from torch import Tensor

#: A split block, a vector, fewer rows than ranks, one row, experts, and nothing at all.
SHAPES = [(300, 130), (300,), (3, 257), (1, 8), (5, 7, 40), (4, 0)]
SPECS = ["fp8_e4m3", "fp8_e5m2+pow2", "fp8_e5m2/row+sr", "fp8_e4m3/128x128", "fp8_e4m3/1x128+sr", "fp8_e5m2/1x16",
         "bf16", "bf16+sr"]  # fmt: skip


def buffer(gradients: list[Tensor], ranks: int, dtype: torch.dtype) -> Tensor:
    """As FSDP2 copies them in: rows padded to the ranks, each rank's parts one after another."""
    parts = []
    for gradient in gradients:
        rows = -(-len(gradient) // ranks) * ranks
        padded = gradient.new_zeros((rows, *gradient.shape[1:]))
        padded[: len(gradient)] = gradient
        parts.append(padded.reshape(ranks, -1))
    return torch.cat(parts, 1).to(dtype)


def reduce(gradients: list[list[Tensor]], spec: Spec, dtype: torch.dtype, keys: list[int]) -> list[Tensor]:
    """The sums over ranks that all ranks together end up with."""
    ranks, shapes = len(gradients), [tuple(gradient.shape) for gradient in gradients[0]]
    lines, found = [], [[] for _ in shapes]
    layouts = [pieces_of([(str(i), key + i, shape) for i, shape in enumerate(shapes)], ranks) for key in keys]
    for own, pieces in zip(gradients, layouts, strict=True):

        def seed(piece: Piece, own: list[Tensor] = own) -> Tensor | None:
            return torch.tensor(piece.key, device=own[0].device) if spec.sr else None

        lines.append(encode(buffer(own, ranks, dtype), pieces, spec, seed))
        assert lines[-1].shape == (ranks, sum(line_bytes(pieces, spec, dtype).values()))
    for rank in range(ranks):
        arrived = torch.stack([line[rank] for line in lines])
        for piece, total in sum_decoded(arrived, layouts[rank], spec, dtype, rank):
            assert total.dtype == torch.float32
            found[int(piece.name)].append(total)
        compare_with_one_pass(arrived, layouts[rank], spec, dtype, rank)
    empty = gradients[0][0].new_zeros(0)
    return [torch.cat([empty, *parts])[: math.prod(s)].view(s) for parts, s in zip(found, shapes, strict=True)]


def compare_with_one_pass(
    arrived: Tensor, pieces: tuple[Piece, ...], spec: Spec, dtype: torch.dtype, rank: int
) -> None:
    """What FSDP2 gets is these sums, divided or multiplied in FP32 and rounded once: every element, and no other."""
    if dtype is torch.bfloat16 and kernels_on_cpu():
        return  # Triton's interpreter makes BF16 by truncation
    for end in (("", 1.0), ("divide", 3.0), ("multiply", 0.7)):
        out = torch.full((pieces[-1].stop,), torch.nan, dtype=dtype, device=arrived.device)
        sum_into(out, arrived, pieces, spec, rank, end)
        for piece, total in sum_decoded(arrived, pieces, spec, dtype, rank):
            expected = ended(total, end).to(dtype)
            assert torch.equal(out[piece.start : piece.stop].nan_to_num(7e4), expected.nan_to_num(7e4)), (piece, end)


def normal(ranks: int, shapes: list[tuple[int, ...]], device: str = "cpu") -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(ranks)
    return [
        [torch.randn(shape, generator=generator).to(device) * 10.0**i for i, shape in enumerate(shapes)]
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.float16)])
def test_the_sum_is_that_of_each_whole_gradient_quantized(device, spec, ranks, dtype):
    spec = Spec.parse(spec)
    gradients = [[g.clamp(-6e4, 6e4) for g in own] for own in normal(ranks, SHAPES, device)]
    keys = [100 * rank for rank in range(ranks)]
    for index, total in enumerate(reduce(gradients, spec, dtype, keys)):
        expected = torch.zeros(SHAPES[index], device=device)
        for rank in range(ranks):
            value = gradients[rank][index].to(dtype)
            if value.dim() > 1 and value.numel():
                flat = quantize(value.flatten(0, -2), spec, dim=1, seed=keys[rank] + index if spec.sr else None)
                value = flat.dequantize().view(value.shape)
            expected += value.float()
        assert torch.equal(total, expected), index


def test_scales_as_the_kernels_lay_them_travel_too(monkeypatch):
    """Blocks of a row one after another: a row of one block has its scale at any stride."""
    original = reduction_codec.quantize_both

    def laid(x, rows, columns):
        found, _ = original(x, rows, columns)
        return replace(found, scale=found.scale.t().clone(memory_format=torch.contiguous_format).t()), None

    spec, gradients = Spec.parse("fp8_e4m3/1x128"), normal(2, [(1, 8), (2, 40), (6, 300)])
    expected = reduce(gradients, spec, torch.float32, [0, 0])
    monkeypatch.setattr(reduction_codec, "quantize_both", laid)
    for a, b in zip(reduce(gradients, spec, torch.float32, [0, 0]), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("bf16", 0.0017),
        ("bf16+sr", 0.0024),
        ("fp8_e4m3/row", 0.026),
        ("fp8_e4m3/row+sr", 0.037),
        ("fp8_e5m2/row", 0.053),
        ("fp8_e5m2/row+sr", 0.074),
    ],
)
def test_errors_of_sums_are_those_that_the_docs_give(spec, error):
    """Relative to the FP32 sum, of independent normal gradients: of independent errors, so whatever the ranks."""
    gradients = normal(4, [(128, 256)])
    (total,) = reduce(gradients, Spec.parse(spec), torch.float32, [7, 8, 9, 10])
    exact = sum((own[0].double() for own in gradients), torch.zeros((), dtype=torch.float64))
    assert float((total - exact).norm() / exact.norm()) == pytest.approx(error, rel=0.04)


def test_stochastic_rounding_is_unbiased_and_nearest_is_not():
    """All ranks have the same small gradient beside one large value: nearest loses it every time."""
    gradient = torch.full((1, 64), 2.0**-12)
    gradient[0, 0] = 448.0
    for spec, lost in (("fp8_e4m3", True), ("fp8_e4m3+sr", False)):
        sums = [reduce([[gradient]] * 2, Spec.parse(spec), torch.float32, [k, k + 10**6])[0] for k in range(40)]
        mean = torch.stack(sums)[:, 0, 1:].mean()
        assert mean == 0 if lost else float(mean) == pytest.approx(2.0**-11, rel=0.1)


def test_a_gradient_that_is_not_finite_takes_its_group_with_it():
    gradients = normal(2, [(6, 8)])
    gradients[0][0][4, 2] = torch.inf
    for spec, lost in (("fp8_e4m3", [0, 1, 2, 3, 4, 5]), ("fp8_e5m2/row", [4])):
        (total,) = reduce(gradients, Spec.parse(spec), torch.float32, [0, 0])
        assert total.isnan().any(1).nonzero().flatten().tolist() == lost
        assert total[lost].isnan().all()
    (total,) = reduce(gradients, Spec.parse("bf16"), torch.float32, [0, 0])
    assert torch.isinf(total).nonzero().tolist() == [[4, 2]]
