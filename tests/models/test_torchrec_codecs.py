"""What torchrec sends of embeddings under a recipe: the codes of the reference quantization, and what they come to."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from narrowgate.models.torchrec_codecs import RowCodec, torchrec_codecs
from narrowgate.precision import quantize
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.spec import Spec
from narrowgate.recipes import Recipe

WIDTH = 16
SENT = {"fp32": (torch.float32, 16), "bf16": (torch.bfloat16, 16), "fp8_e4m3/row": (torch.uint8, 20),
        "fp8_e5m2/row+pow2": (torch.uint8, 20)}  # fmt: skip

#: Formats of values, not of codes.
PLAIN = ("fp32", "bf16", "bf16+sr")


def rows(count: int = 12, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(3)) * 2.0 ** torch.arange(count)[:, None]


@pytest.mark.parametrize("spec", SENT)
@pytest.mark.parametrize("shape", [(12, 16), (6, 32), (192,), (0, 16)])
def test_rows_arrive_as_the_reference_rounds_them(spec: str, shape: tuple[int, ...]) -> None:
    x, codec = rows()[: shape[0] * shape[-1] // 16 if len(shape) > 1 else None].reshape(shape), RowCodec(spec, WIDTH)
    sent = codec.encode(x)
    dtype, each = SENT[spec]
    assert sent.dtype == dtype == codec.quantized_dtype
    # What adds rows up on their way needs to see them.
    assert sent.shape == (x.shape if spec in PLAIN else (sent.numel(),))
    assert sent.numel() == codec.calc_quantized_size(x.numel()) == each * x.numel() // WIDTH
    expected = quantize(x.reshape(-1, WIDTH), Spec.parse(spec), dim=1).dequantize()
    arrived = codec.decode(sent)
    assert arrived.dtype == torch.float32
    assert torch.equal(arrived.view(-1, WIDTH), expected)


def test_parts_that_came_from_several_ranks_are_read_as_one() -> None:
    x, codec = rows(), RowCodec("fp8_e4m3/row", WIDTH)
    parts = codec.encode(x).split([codec.calc_quantized_size(n * WIDTH) for n in (5, 0, 7)])
    other_way = torch.cat([parts[2], parts[0]])
    assert torch.equal(
        codec.decode(other_way).view(-1, WIDTH), codec.decode(codec.encode(x)).view(-1, WIDTH).roll(7, 0)
    )


def test_stochastic_rounding_draws_anew_and_again_under_its_count() -> None:
    x = torch.full((4000, WIDTH), 1.03)
    x[:, 0] = 448.0  # a scale of 1: what is left lies between two codes, 1 and 1.125
    codec = RowCodec("fp8_e4m3/row+sr", WIDTH, stream="forward")
    first, second = codec.decode(codec.encode(x)), codec.decode(codec.encode(x))
    assert not torch.equal(first, second)
    found = first.view(-1, WIDTH)[:, 1:]
    assert set(found.unique().tolist()) == {1.0, 1.125}
    assert abs(found.mean() - 1.03) < 5 * (0.125**2 * 0.24 * 0.76 / found.numel()) ** 0.5
    again = RowCodec("fp8_e4m3/row+sr", WIDTH, stream="forward")
    again.draws = 1
    assert torch.equal(again.decode(again.encode(x)), second)
    backward = RowCodec("fp8_e4m3/row+sr", WIDTH, stream="backward")
    assert not torch.equal(backward.decode(backward.encode(x)), first)


def test_compiled_steps_draw_anew_too() -> None:
    codec, other = (RowCodec("fp8_e4m3/row+sr", WIDTH) for _ in range(2))
    compiled, x = torch.compile(codec.encode, backend="eager"), rows()
    found = [compiled(x) for _ in range(2)]
    assert [torch.equal(a, other.encode(x)) for a in found] == [True, True]
    assert not torch.equal(*found)


def test_values_that_are_rounded_stochastically_keep_their_shape() -> None:
    x, codec = torch.full((4000, WIDTH), 1.0 + 2.0**-9), RowCodec("bf16+sr", WIDTH)
    sent = codec.encode(x)
    assert (sent.dtype, sent.shape) == (torch.bfloat16, x.shape)
    found = codec.decode(sent)
    assert set(found.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs(found.mean() - x.mean()) < 5 * 2.0**-7 * (0.25 * 0.75 / x.numel()) ** 0.5
    with pytest.raises(NarrowgateError, match=r"bf16\+sr has no gradient"):
        codec.encode(x.requires_grad_())


@pytest.mark.parametrize("spec", SENT)
def test_gradients_pass_or_are_refused(spec: str) -> None:
    """torchrec encodes within autograd where its collectives are synchronous, and within functions of its own else."""
    x, codec = rows().requires_grad_(), RowCodec(spec, WIDTH)
    with torch.no_grad():
        codec.encode(x)
    if spec in PLAIN:
        codec.decode(codec.encode(x)).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones_like(x))
    else:
        with pytest.raises(NarrowgateError, match=r"set_use_sync_collectives\(False\), or fp32 or bf16"):
            codec.encode(x)


def test_widths_that_do_not_fit_are_said() -> None:
    codec = RowCodec("bf16", WIDTH)
    message = "found 40 elements of embeddings to send, expected a multiple of width 16"
    for call in (
        lambda: codec.calc_quantized_size(40),
        lambda: codec.encode(torch.zeros(5, 8)),
        lambda: codec.padded_size(torch.zeros(1, 40), [32, 40], 1, None),
    ):
        with pytest.raises(NarrowgateError, match=message):
            call()
    assert codec.padded_size(torch.zeros(1, 48), [32, 48], 1, None) == (48, 0)


def recipe(**tables: str) -> Recipe:
    shards = {"shards": {"tables": tables}} if tables else {}
    return Recipe.from_dict({"recipe": "x", "rules": [{"layers": "**", "all": "bf16"}], **shards})


@dataclass
class _Codecs:
    forward: Any
    backward: Any


@pytest.fixture
def torchrec(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of torchrec as the registry is made of."""
    for name in ("torchrec", "torchrec.distributed", "torchrec.distributed.types"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchrec.distributed.types"].QuantizedCommCodecs = _Codecs  # type: ignore[attr-defined]


@pytest.mark.usefixtures("torchrec")
def test_codes_go_where_rows_are_moved_and_not_where_they_are_summed() -> None:
    moved = {"POOLED_EMBEDDINGS_ALL_TO_ALL", "SEQUENCE_EMBEDDINGS_ALL_TO_ALL"}
    low = torchrec_codecs(recipe(forward="fp8_e4m3/row", backward="bf16"), width=WIDTH)
    assert set(low) == moved
    assert {c.forward.quantized_dtype for c in low.values()} == {torch.uint8}
    assert {c.backward.quantized_dtype for c in low.values()} == {torch.bfloat16}
    plain = torchrec_codecs(recipe(forward="bf16", backward="bf16"), width=WIDTH)
    assert set(plain) == moved | {"POOLED_EMBEDDINGS_REDUCE_SCATTER"}


@pytest.mark.usefixtures("torchrec")
@pytest.mark.parametrize(
    ("tables", "width", "message"),
    [
        ({}, WIDTH, r"without shards\.tables"),
        ({"forward": "bf16"}, 0, "width: found 0, expected"),
        ({"forward": "bf16"}, True, "width: found True, expected"),
        ({"forward": "bf16"}, 16.0, r"width: found 16\.0, expected"),
        ({"forward": "bf16"}, "16", "width: found '16', expected"),
        ({"forward": "bf16"}, None, "width: found None, expected"),
        ({"forward": "bf16"}, 2**70, "width: found 118"),
    ],
)
def test_what_cannot_be_built_is_said(tables: dict[str, str], width: Any, message: str) -> None:
    with pytest.raises(NarrowgateError, match=message):
        torchrec_codecs(recipe(**tables), width=width)


def test_without_torchrec_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(NarrowgateError, match="needs torchrec, which cannot be imported"):
        torchrec_codecs(recipe(forward="bf16"), width=WIDTH)
