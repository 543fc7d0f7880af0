"""Cast kernels against the reference, bit for bit: on a GPU, or through Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from narrowgate.precision.casting import Request, quantize_both
from narrowgate.precision.delayed import AmaxHistory, roll
from narrowgate.precision.quantization import quantize
from narrowgate.precision.spec import Spec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

#: Past one tile and ragged in both directions, aligned and not; a single row and a single column.
SHAPES = [(256, 256), (200, 328), (130, 131), (1, 64), (65, 1), (16, 8)]
GRANULARITIES = ["tensor", "row", "1x128", "128x128"]
FORMATS = ["fp8_e4m3", "fp8_e5m2"]
MODIFIERS = ["", "+pow2", "+sr", "+clip(rms=2)", "+clip(p=99)", "+clip(rms=2)+pow2+sr"]


def values(shape, dtype=torch.bfloat16, seed=0):
    """Normal values over a wide range of magnitudes, with zeros, ties and an all-zero row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    x[shape[0] // 2] = 0.0
    return x.to(DEVICE, dtype)


def key(number):
    return torch.tensor(number, dtype=torch.int64, device=DEVICE)


def compare(found, expected):
    """Codes and scales are equal bit for bit, whatever their layout in memory."""
    if expected is None:
        assert found is None
        return
    assert found.dim == expected.dim
    assert found.scale.shape == expected.scale.shape
    nan = expected.scale.isnan()
    assert torch.equal(found.scale.isnan(), nan)
    assert torch.equal(found.scale.nan_to_num(nan=0.0), expected.scale.nan_to_num(nan=0.0))
    a, b = (q.data.contiguous().view(torch.uint8) for q in (found, expected))
    # Under a NaN scale no code means anything.
    unequal = (a != b) & ~expected.dequantize(rotated=True).isnan()
    assert not unequal.any(), f"{int(unequal.sum())} of {a.numel()} codes differ, the first at {unequal.nonzero()[0]}"


def check(x, rows, columns):
    requests = [
        None if text is None else Request(Spec.parse(text), seed=key(seed) if "+sr" in text else None)
        for text, seed in ((rows, 11), (columns, 12))
    ]
    found = quantize_both(x, *requests)
    for operand, request, dim in zip(found, requests, (1, 0), strict=True):
        compare(operand, None if request is None else quantize(x, request.spec, dim=dim, seed=request.seed))
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_both_operands_equal_the_reference(shape, granularity):
    for fmt in FORMATS:
        check(values(shape), f"{fmt}/{granularity}", f"{fmt}/{granularity}")


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_modifiers_act_inside_the_kernel(granularity, modifier):
    for fmt, shape in itertools.product(FORMATS, [(200, 328), (130, 131)]):
        check(values(shape), f"{fmt}/{granularity}{modifier}", f"{fmt}/{granularity}{modifier}")


@pytest.mark.parametrize("shape", [(256, 256), (131, 136), (130, 132), (67, 129), (66, 12)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_codes_rounded_stochastically_are_stored_whatever_divides_a_side(granularity, shape):
    # By fours and twos where 4 divides the columns and 2 the rows, and one by one where they do not.
    for fmt in FORMATS:
        check(values(shape), f"{fmt}/{granularity}+sr", f"{fmt}/{granularity}+sr")


@pytest.mark.parametrize("shape", [(256, 256), (131, 136)], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "128x128"])
def test_both_orientations_of_the_same_draws_are_the_same_codes(granularity, shape):
    x, spec = values(shape), f"fp8_e4m3/{granularity}+sr"
    found = torch.ops.narrowgate.cast_fp8([x], "mn|0", spec, "=", key(7), None, None, None, None, None)
    expected = quantize(x, spec, dim=1, seed=key(7))
    assert torch.equal(found[0].view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(found[2].view(torch.uint8), expected.data.t().contiguous().view(torch.uint8))


@pytest.mark.parametrize("pow2", ["", "+pow2"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_no_random_bits_carry_a_groups_largest_value_past_the_formats(fmt, pow2):
    rows = 64 if INTERPRETED else 1 << 20
    generator = torch.Generator(DEVICE).manual_seed(3)
    amax = torch.rand(rows, 1, generator=generator, device=DEVICE) + 1.0
    amax = amax * torch.exp2(torch.randint(-90, 90, (rows, 1), generator=generator, device=DEVICE).float())
    x = amax * torch.tensor([1.0, -1.0] * 8, device=DEVICE)
    bits = torch.full(x.shape, -1, dtype=torch.int16, device=DEVICE)
    spec = f"{fmt}/row{pow2}+sr"
    found = torch.ops.narrowgate.cast_fp8([x], "mn|0", spec, "", None, bits, None, None, None, None)
    expected = quantize(x, spec, dim=1, random_bits=bits.to(torch.int32) & 0xFFFF)
    assert torch.equal(found[0].view(torch.uint8), expected.data.view(torch.uint8))


@pytest.mark.parametrize(("rows", "columns"), [
    ("fp8_e5m2/row+sr", "fp8_e5m2+clip(p=99)"), ("fp8_e4m3/1x128", "fp8_e5m2/row"), ("fp8_e4m3", "fp8_e4m3/row"),
    ("fp8_e4m3/128x128", "fp8_e4m3/1x128"), ("fp8_e4m3/row", None), (None, "fp8_e4m3/1x128+sr"), (None, "fp8_e4m3"),
])  # fmt: skip
def test_the_two_operands_may_differ_or_be_absent(rows, columns):
    check(values((200, 328)), rows, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_input_dtype(dtype):
    check(values((96, 136), torch.float32).clamp(-1e4, 1e4).to(dtype), "fp8_e4m3/row", "fp8_e4m3")


def test_a_transposed_and_a_sliced_input():
    x = values((144, 272))
    check(x.t(), "fp8_e4m3/row", "fp8_e4m3/row")
    check(x[:, 16:144], "fp8_e4m3", "fp8_e4m3")
    check(x[::2], "fp8_e4m3/1x128", "fp8_e4m3/1x128")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25])
def test_an_rms_leaves_out_what_is_not_finite_and_is_infinite_where_squares_are(bad):
    x = values((200, 328), torch.float32)
    x[70, 150], x[3, 5] = bad, 50.0
    for granularity in GRANULARITIES:
        check(x, f"fp8_e4m3/{granularity}+clip(rms=2)", f"fp8_e5m2/{granularity}+clip(rms=1)")


@pytest.mark.parametrize("modifier", ["", "+sr", "+clip(rms=2)+sr"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_costs_its_own_group_alone(granularity, bad, modifier):
    x = values((200, 328))
    x[70, 150] = bad
    found = check(x, f"fp8_e4m3/{granularity}{modifier}", f"fp8_e4m3/{granularity}{modifier}")
    assert all(q.dequantize()[70, 150].isnan() for q in found)


# Triton's interpreter makes other numbers of BF16's subnormal ones.
@pytest.mark.parametrize("dtype", [torch.float32, *([] if INTERPRETED else [torch.bfloat16])], ids=str)
@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-40, 1e-38, 3e38])
def test_amaxes_at_the_ends_of_the_range(tiny, dtype):
    x = torch.zeros((64, 128), device=DEVICE, dtype=dtype)
    x[3, 5] = tiny
    for granularity in GRANULARITIES:
        check(x, f"fp8_e4m3/{granularity}", f"fp8_e5m2/{granularity}+pow2")


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_empty_tensors(shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    for granularity in GRANULARITIES:
        check(x, f"fp8_e4m3/{granularity}", f"fp8_e4m3/{granularity}")


@pytest.mark.parametrize("held", [0.0, 3.0])
@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_an_empty_tensor_enters_a_history_as_the_reference_has_it(shape, held):
    spec = Spec.parse("fp8_e4m3+delayed(4)")
    ours, theirs = AmaxHistory(4, DEVICE), AmaxHistory(4, DEVICE)
    ours.history[0] = theirs.history[0] = held
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    found, turned = quantize_both(x, Request(spec, history=ours), Request(spec, history=ours))
    compare(found, quantize(x, spec, dim=1, history=theirs))
    compare(turned, quantize(x, spec, dim=0, history=theirs.frozen()))
    for name in ("history", "pending", "saturated"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_a_delayed_scale_follows_its_history_as_the_reference_does():
    spec = Spec.parse("fp8_e4m3+delayed(4)")
    ours, theirs = AmaxHistory(4, DEVICE), AmaxHistory(4, DEVICE)
    for step, size in enumerate((1.0, 2.0, 40.0, 0.01, 1.0)):
        x = values((200, 328), seed=step) * size
        found, turned = quantize_both(x, Request(spec, history=ours), Request(spec, history=theirs))
        expected = quantize(x, spec, dim=1, history=theirs)
        compare(found, expected)
        compare(turned, quantize(x, spec, dim=0, history=theirs.frozen() if step else theirs))
        roll([ours, theirs])
        for name in ("history", "pending", "saturated"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert not ours.workspace.any()


@pytest.mark.parametrize("text", ["fp8_e4m3+delayed(4)", "fp8_e5m2+delayed(4)+sr", "fp8_e4m3+delayed(4)+clip(rms=1.5)"])
@pytest.mark.parametrize("sides", ["both", "rows", "columns"])
def test_a_program_of_several_tiles_counts_what_saturates_in_each(text, sides, monkeypatch):
    from narrowgate.precision.kernels import launch

    monkeypatch.setattr(launch, "CAST_PROGRAMS", 1)
    monkeypatch.setattr(launch, "_casts", {})
    spec = Spec.parse(text)
    ours, theirs = AmaxHistory(4, DEVICE), AmaxHistory(4, DEVICE)
    ours.history[0] = theirs.history[0] = 2.0
    x = values((296, 328)) * 0.01
    # Tiles of 32 rows: the first four hold the largest that still fit, later ones some that do not.
    x[5, 7], x[40, 3] = -2.0, 2.0
    x[130, 40:50], x[200, 9], x[290, 300] = 5.0, -7.0, 9.0
    seed = key(3) if spec.sr else None
    request = Request(spec, history=ours, seed=seed)
    found, turned = quantize_both(
        x,
        None if sides == "columns" else request,
        None if sides == "rows" or (spec.sr and sides == "both") else request,
    )
    expected = quantize(x, spec, dim=1, history=theirs, seed=seed)
    if found is not None:
        compare(found, expected)
        assert launch.last_tiles()["cast"][2] > 1
    if turned is not None:
        compare(turned, quantize(x, spec, dim=0, history=theirs.frozen(), seed=seed) if sides == "both" else
                quantize(x, spec, dim=0, history=_held(2.0), seed=seed))  # fmt: skip
    assert torch.equal(ours.pending, theirs.pending)
    assert ours.saturated == theirs.saturated > 0


def _held(amax):
    history = AmaxHistory(4, DEVICE)
    history.history[0] = amax
    return history


def test_a_delayed_scale_only_reads_its_history_in_evaluation():
    spec = Spec.parse("fp8_e4m3+delayed(4)")
    history = AmaxHistory(4, DEVICE)
    history.history[0] = 3.0
    before = history.state_dict()
    x = values((96, 128))
    found, _ = quantize_both(x, Request(spec, history=history.frozen()), None)
    compare(found, quantize(x, spec, dim=1, history=history.frozen()))
    assert all(torch.equal(before[name], value) for name, value in history.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_delayed_scale_is_nan_where_a_value_is_not_finite_and_the_history_never_learns_of_it(bad):
    spec = Spec.parse("fp8_e4m3+delayed(4)")
    history, theirs = AmaxHistory(4, DEVICE), AmaxHistory(4, DEVICE)
    history.history[0] = theirs.history[0] = 3.0
    x = values((200, 328))
    x[150, 300] = bad
    found, _ = quantize_both(x, Request(spec, history=history), None)
    compare(found, quantize(x, spec, dim=1, history=theirs))
    assert found.dequantize().isnan().all()
    assert history.pending == theirs.pending == -1.0
    assert history.saturated == theirs.saturated > 0
    assert not history.workspace.any()


def test_the_two_operands_of_different_delayed_specs_keep_a_history_each():
    rows, columns = Spec.parse("fp8_e4m3+delayed(4)"), Spec.parse("fp8_e5m2+delayed(2)")
    histories = AmaxHistory(4, DEVICE), AmaxHistory(2, DEVICE)
    twins = AmaxHistory(4, DEVICE), AmaxHistory(2, DEVICE)
    x = values((96, 128))
    found = quantize_both(x, Request(rows, history=histories[0]), Request(columns, history=histories[1]))
    compare(found[0], quantize(x, rows, dim=1, history=twins[0]))
    compare(found[1], quantize(x, columns, dim=0, history=twins[1]))
    assert [h.pending for h in histories] == [h.pending for h in twins]


def test_codes_lie_contiguous_along_their_contraction():
    first, second = check(values((144, 272)), "fp8_e4m3", "fp8_e4m3")
    assert first.data.is_contiguous()
    assert second.data.t().is_contiguous()


@pytest.mark.parametrize("width", [96, 40, 128, 66])
@pytest.mark.parametrize("rows", ["fp8_e4m3", "fp8_e4m3/row", "fp8_e5m2/row+clip(rms=1)", "fp8_e4m3/row+sr"])
def test_results_of_any_width_lie_side_by_side(width, rows):
    leaves = [values((70, width), seed=seed) for seed in range(3)]
    program = "mn,mn,mn;mul 0 1;maximum 2 #0.0|3,4"
    x = torch.cat([leaves[0].float() * leaves[1].float(), leaves[2].float().clamp_min(0.0)], -1)
    columns = "fp8_e4m3/row+sr" if rows.endswith("+sr") else "fp8_e4m3/row"
    keys = [key(number) if rows.endswith("+sr") else None for number in (3, 4)]
    found = torch.ops.narrowgate.cast_fp8(leaves, program, rows, columns, keys[0], None, None, keys[1], None, None)
    for (codes, scale), spec, dim, seed in zip((found[:2], found[2:]), (rows, columns), (1, 0), keys, strict=True):
        expected = quantize(x, spec, dim=dim, seed=seed)
        assert torch.equal(scale.reshape(-1), expected.scale.reshape(-1))
        own = codes if dim == 1 else codes.t()
        assert torch.equal(own.contiguous().view(torch.uint8), expected.data.contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", [(70, 128), (256, 256), (131, 384)], ids=str)
@pytest.mark.parametrize("modifier", ["", "+sr", "+clip(rms=1)+pow2"])
@pytest.mark.parametrize(("rows", "columns"), [("1x128", "1x128"), ("128x128", "="), ("1x128", "row"), ("128x128", "")])
def test_results_in_blocks_lie_side_by_side(rows, columns, modifier, shape):
    leaves = [values(shape, seed=seed) for seed in range(3)]
    program = "mn,mn,mn;mul 0 1;maximum 2 #0.0|3,4"
    x = torch.cat([leaves[0].float() * leaves[1].float(), leaves[2].float().clamp_min(0.0)], -1)
    rows, columns = (f"fp8_e4m3/{text}{modifier}" if text not in ("", "=") else text for text in (rows, columns))
    drawn = [modifier == "+sr" and text not in ("", "=") for text in (rows, columns)]
    keys = [key(number) if own else None for number, own in zip((3, 4), drawn, strict=True)]
    found = torch.ops.narrowgate.cast_fp8(leaves, program, rows, columns, keys[0], None, None, keys[1], None, None)
    scale = found[1].t() if "/1x128" in rows else found[1]
    compare_codes((found[0], scale), quantize(x, rows, dim=1, seed=keys[0]))
    if columns == "=":
        assert torch.equal(found[2].t().view(torch.uint8), found[0].view(torch.uint8))
    elif columns:
        compare_codes((found[2].t(), found[3]), quantize(x, columns, dim=0, seed=keys[1]))


def compare_codes(found, expected):
    codes, scale = found
    assert torch.equal(scale.reshape(-1), expected.scale.contiguous().reshape(-1))
    assert torch.equal(codes.contiguous().view(torch.uint8), expected.data.contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", [(200, 136), (256, 256)], ids=str)
@pytest.mark.parametrize("rows", ["fp8_e4m3", "fp8_e4m3/row", "fp8_e4m3/128x128+clip(rms=1)"])
def test_leaves_that_rows_or_columns_share_scale_every_tile(shape, rows, monkeypatch):
    from narrowgate.precision.kernels import launch

    for name in ("AMAX_PROGRAMS", "CAST_PROGRAMS"):
        monkeypatch.setattr(launch, name, 1)
    monkeypatch.setattr(launch, "_casts", {})
    x, m, n = values(shape), values((shape[0], 1), torch.float32, 1), values((1, shape[1]), seed=2)[0]
    s = torch.tensor(1.7, device=DEVICE)
    expected = x.float() * m * n.float() * s
    program = "mn,m,n,s;mul 0 1;mul 4 2;mul 5 3|6"
    found = torch.ops.narrowgate.cast_fp8(
        [x, m, n, s], program, rows, "fp8_e4m3/row", None, None, None, None, None, None
    )
    for codes, spec, dim in ((found[0], rows, 1), (found[2].t(), "fp8_e4m3/row", 0)):
        wanted = quantize(expected, spec, dim=dim).data
        assert torch.equal(codes.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_an_rms_is_found_although_a_history_knows_the_scale():
    spec = Spec.parse("fp8_e4m3+delayed(4)+clip(rms=1.5)")
    ours, theirs = AmaxHistory(4, DEVICE), AmaxHistory(4, DEVICE)
    for step, size in enumerate((1.0, 30.0, 0.5)):
        x = values((200, 328), seed=step) * size
        found, _ = quantize_both(x, Request(spec, history=ours), None)
        compare(found, quantize(x, spec, dim=1, history=theirs))
        roll([ours, theirs])
        assert torch.equal(ours.history, theirs.history)
        assert torch.equal(ours.saturated, theirs.saturated)


def test_a_limit_that_is_given_is_taken():
    x, limit = values((96, 128)), torch.tensor(0.75, device=DEVICE)
    found = torch.ops.narrowgate.cast_fp8(
        [x], "mn|0", "fp8_e4m3+clip(rms=2)", "", None, None, limit, None, None, None
    )  # fmt: skip
    expected = quantize(x.float().clamp(-0.75, 0.75), "fp8_e4m3", dim=1)
    assert torch.equal(found[1], expected.scale)
    assert torch.equal(found[0].view(torch.uint8), expected.data.view(torch.uint8))
