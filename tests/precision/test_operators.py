"""What compilers are told of the operators is what the operators do: shapes, strides, dtypes, what is written."""

from __future__ import annotations

import pytest
import torch
from narrowgate.precision import casting
from narrowgate.precision.cast_operators import SAME
from narrowgate.precision.config import GemmConfig
from narrowgate.precision.kernels.program import IDENTITY
from narrowgate.precision.layer import layer_state
from narrowgate.precision.linear import keep_weight_codes, lower_linear
from narrowgate.precision.quantization import quantize
from narrowgate.precision.spec import Spec

from .test_weight_codes import config

#: Widths that matrix units take as they are, that are padded for them, and nothing at all.
SHAPES = [(32, 64), (24, 136), (7, 19), (1, 32), (0, 64), (16, 0)]
#: Compiled graphs are made elsewhere; here the operator itself is looked at.
CHECKS = ("test_schema", "test_faketensor")
UNITS = {"rows and columns": ("fp8_e4m3/row", "fp8_e5m2"), "the same": ("fp8_e4m3/128x128", SAME),
         "rows": ("fp8_e4m3/1x128", ""), "columns": ("", "fp8_e4m3/1x128")}  # fmt: skip
row_scales_on_cpu = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="this PyTorch multiplies no scaled rows on a CPU",
)


def matrix(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


@pytest.mark.parametrize("name", ["cast_fp8", "cast_fp8_summed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("wanted", UNITS)
def test_casts(wanted: str, shape: tuple[int, int], name: str) -> None:
    arguments = [matrix(shape)], IDENTITY, *UNITS[wanted], None, None, None, None, None, None
    torch.library.opcheck(getattr(torch.ops.narrowgate, name), arguments, test_utils=CHECKS)


@pytest.mark.parametrize("name", ["cast_fp8_delayed", "cast_fp8_delayed_summed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True)])
def test_delayed_casts(rows: bool, columns: bool, shape: tuple[int, int], name: str) -> None:
    state = torch.ones(4), torch.zeros(()), torch.zeros((), dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    arguments = [matrix(shape)], IDENTITY, "fp8_e4m3+delayed(4)", rows, columns, None, None, *state, True
    torch.library.opcheck(getattr(torch.ops.narrowgate, name), arguments, test_utils=CHECKS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_writes(shape: tuple[int, int]) -> None:
    torch.library.opcheck(torch.ops.narrowgate.write_bf16, ([matrix(shape)], IDENTITY), test_utils=CHECKS)


@pytest.mark.parametrize("width", [64, 136, 19])
@pytest.mark.parametrize("path", ["fprop", "dgrad"])
@pytest.mark.parametrize("variant", ["tensor", "row"])
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=row_scales_on_cpu)], ids=["emulated", "native"])
def test_products_of_kept_weights(
    native: bool, variant: str, path: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.Linear(width, 24)
    lower_linear(layer, config(variant), name="layer")
    with monkeypatch.context() as patch:
        patch.setattr(casting, "kernels_on_cpu", lambda: True)
        assert keep_weight_codes(layer.parameters()) == {}
    kept = layer_state(layer).kept
    assert kept is not None
    gemm: GemmConfig = getattr(layer_state(layer).config, path)
    first = quantize(matrix((32, width if path == "fprop" else 24)), Spec.parse(str(gemm.first)), dim=1)

    arguments = (
        first.data, first.scale, layer.weight.detach(), kept.buffers, str(gemm.first), kept.rows, kept.columns,
        path == "dgrad", gemm.accumulate, native, torch.bfloat16,
    )  # fmt: skip
    # The schema's check multiplies what it is given, which PyTorch cannot do with FP8.
    torch.library.opcheck(torch.ops.narrowgate.weight_product, arguments, test_utils="test_faketensor")
