"""FSDP2 with quantized shards against one process with the same quantization: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from narrowgate.precision import Spec

GATHERED = ["tensor", "tensor_uneven", "tensor_for_rows", "row", "row_uneven", "row_blocks", "block", "block_split",
            "smaller_than_the_mesh", "mx", "mx_split", "mx_fp6", "nvfp4", "nvfp4_split"]  # fmt: skip


@pytest.fixture(scope="session")
def alone(training) -> Any:
    """Trains a case in this process, once."""
    known: dict[str, dict[str, Any]] = {}

    def train(case: str) -> dict[str, Any]:
        if case not in known:
            model = training.build(case)
            known[case] = training.train(model, case, training.optimizer_of(model))
            known[case]["state"] = {name: value.clone() for name, value in model.state_dict().items()}
        return known[case]

    return train


def assert_multiplied(ours: list[Any], expected: list[Any]) -> None:
    """The codes and scales that layers multiplied, in the order of their use, bit for bit."""
    assert [codes[0] for codes in ours] == [codes[0] for codes in expected]
    for use, (mine, other) in enumerate(zip(ours, expected, strict=True)):
        for what, a, b in zip(("codes", "scales", "scale of the tensor"), mine[1:], other[1:], strict=True):
            if a is None or b is None:
                assert a is b, (use, what)
                continue
            a, b = _bytes(a), _bytes(b).view(_bytes(a).shape)
            assert torch.equal(a, b), f"use {use}: {int((a != b).sum())} of {a.numel()} bytes of the {what} differ"


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)


def differences(ours: dict[str, Any], theirs: dict[str, Any], *parts: str) -> dict[str, float]:
    """Of each tensor: the norm of the difference over the norm of ``theirs``."""
    found = {}
    for part in parts:
        mine, other = (dict(enumerate(x[part])) if isinstance(x[part], list) else x[part] for x in (ours, theirs))
        for name, b in other.items():
            found[f"{part} {name}"] = float((mine[name].double() - b.double()).norm() / b.double().norm())
    return found


#: What two GPUs may part from one by. Kernels may add FP32 sums in another order, 1e-6, and such a difference can put a
#: value of an activation or a gradient on the other side of a rounding: one code of many thousands, off by a step of at
#: most an eighth of it, stays below 1e-3 of its tensor's norm. Faults of a gather are 10 times as large at least
#: (test_faults_of_a_gather_are_far_outside_of_the_tolerance).
TOLERANCE = 1e-3


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], *parts: str) -> None:
    for part in parts:
        mine, other = ours[part], theirs[part]
        pairs = zip(mine, other, strict=True) if isinstance(mine, list) else ((mine[k], other[k]) for k in other)
        assert all(torch.equal(a, b) for a, b in pairs), part


@pytest.mark.parametrize("case", GATHERED)
def test_two_ranks_train_to_the_bits_of_one_process(found, alone, case):
    assert_same(found[2][case], alone(case), "losses", "gradients", "state")


@pytest.mark.parametrize("case", ["row_uneven", "block_split", "smaller_than_the_mesh", "mx", "nvfp4", "nvfp4_split"])
def test_so_do_four_of_which_some_hold_few_rows_or_none(found, alone, case):
    assert_same(found[4][case], alone(case), "losses", "gradients", "state")


@pytest.mark.parametrize("case", ["tensor_uneven", "row_uneven", "nvfp4_split"])
def test_so_do_replicas_of_shards(found, alone, case):
    assert_same(found[4]["replicas"][case], alone(case), "losses", "gradients", "state")
    assert_same(found[4]["replicas"]["joint"], alone("nvfp4"), "losses", "gradients")


@pytest.mark.parametrize("case", GATHERED)
def test_layers_multiply_the_codes_of_the_whole_weight(found, training, case):
    """The reference quantization of the whole, at each use in a step: forward, and backward where they serve."""
    assert_multiplied(found[2][case]["multiplied"], training.whole_codes(case))
    if case in found[4]:
        assert_multiplied(found[4][case]["multiplied"], training.whole_codes(case))


ON_GPUS = ["tensor", "row_uneven", "block", "block_split", "mx", "nvfp4", "nvfp4_split"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPUS)
def test_so_do_layers_on_two_gpus(found_on_gpus, training, case):
    assert_multiplied(found_on_gpus[case]["multiplied"], training.whole_codes(case, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPUS)
def test_two_gpus_train_as_one_does_but_for_the_order_of_sums(found_on_gpus, training, case):
    model = training.build(case, "cuda")
    alone = training.train(model, case, training.optimizer_of(model))
    apart = differences(found_on_gpus[case], {**alone, "state": model.state_dict()}, "losses", "gradients", "state")
    worst = {name: value for name, value in apart.items() if not value <= TOLERANCE}
    assert not worst, f"relative differences past {TOLERANCE}: {worst}"


def _scaled(weight: torch.Tensor) -> None:
    weight[:16, :16] *= 2


def _turned(weight: torch.Tensor) -> None:
    weight[:16, :16] = weight[:16, :16].t().clone()


def _lost(weight: torch.Tensor) -> None:
    weight[len(weight) // 2 :] = 0


@pytest.mark.parametrize("fault", [_scaled, _turned, _lost])
@pytest.mark.parametrize("layer", [0, 2])
def test_faults_of_a_gather_are_far_outside_of_the_tolerance(alone, training, layer, fault):
    """A wrong scale of the smallest square block, that block transposed, a shard of two that never came."""
    model = training.build("nvfp4")
    with torch.no_grad():
        fault(model.state_dict()[f"{layer}.weight"])
    found = training.train(model, "nvfp4", training.optimizer_of(model))
    assert max(differences(found, alone("nvfp4"), "losses", "gradients").values()) > 10 * TOLERANCE


@pytest.mark.parametrize("case", ["tensor", "row", "block_split", "nvfp4"])
def test_so_does_a_single_rank_which_gathers_nothing(found, alone, case):
    assert_same(found[1][case], alone(case), "losses", "gradients", "state")


def test_so_does_a_model_that_was_made_on_the_meta_device(found, alone):
    assert_same(found[2]["meta"], alone("tensor"), "losses", "gradients")


def test_codes_come_from_the_master_whatever_a_policy_would_gather(found, training):
    """Not from its BF16 rounding; gradients are those of the policy."""
    layer = training.build("tensor")[0]
    x, _ = training.batch(64, 0)
    assert torch.equal(found[2]["policy"]["output"], layer(x.bfloat16()))
    assert found[2]["policy"]["gradients"] == {torch.float32}


def test_one_rank_s_nan_takes_its_whole_group_with_it(found):
    lost = found[2]["not_finite"]
    assert lost["tensor_uneven"].all()
    assert lost["row_uneven"].tolist() == [False] * 56 + [True]
    assert lost["block_split"].tolist() == [False] * 256 + [True] * 44
    assert lost["mx_split"].tolist() == [False] * 32 + [True] * 25
    assert lost["nvfp4_split"].tolist() == [False] * 48 + [True] * 9


def test_gathering_tensor_scaled_codes_changes_nothing_over_gathering_the_master(found):
    assert_same(found[2]["tensor"], found[2]["bf16"], "losses", "gradients", "state")


# On the wire, counted at the collective: one forward and one backward. The root gathers once, FSDP2 keeps it for
# backward; the two inner layers gather twice.


def sent(training, case: str, ranks: int) -> int:
    """Bytes that a rank hands to the all-gathers of a step, from the shapes alone."""
    _, gather, _, (width, hidden, out) = training.CASES[case]
    total = 4 * (_rows(8, ranks) * out + _rows(8, ranks))  # the head, in the master's FP32
    for n, k in ((hidden, width), (out, hidden)):
        rows = _rows(n, ranks)
        bias = 4 * rows
        if gather == "bf16":
            codes = 4 * rows * k  # no MixedPrecisionPolicy here, so FP32 travels
        else:
            spec = Spec.parse(gather)
            codes = rows * (-(-k // 2) if spec.fmt.element.bits == 4 else k)
            height, width = spec.block or (1, k)
            if spec.granularity != "tensor" and rows % height == 0:
                codes += (1 if spec.fmt.block_scaled else 4) * (rows // height) * -(-k // width)
        total += 2 * (codes + bias)
    return total


def _rows(n: int, ranks: int) -> int:
    return -(-n // ranks)


@pytest.mark.parametrize("case", [*GATHERED, "bf16"])
def test_codes_and_scales_are_all_that_travels(found, training, case):
    assert found[2][case]["wire"]["all_gather"] == sent(training, case, 2)
    if case in found[4]:
        assert found[4][case]["wire"]["all_gather"] == sent(training, case, 4)


def test_codes_are_a_quarter_of_the_fp32_master(found):
    ratio = found[2]["tensor"]["wire"]["all_gather"] / found[2]["bf16"]["wire"]["all_gather"]
    assert 0.25 < ratio < 0.28  # biases and the head stay as they are


@pytest.mark.parametrize("case", GATHERED)
def test_only_scales_that_span_ranks_are_reduced(found, case):
    calls = found[2][case]["wire"]["calls"]
    spans = case.startswith(("tensor", "nvfp4")) or case in ("block_split", "mx_split", "smaller_than_the_mesh")
    assert calls.get("all_reduce", 0) == (4 if spans else 0)  # two weights, gathered twice each


def test_one_all_reduce_finds_the_scales_of_all_weights(found, alone):
    reduced = found[2]["reduced"]
    assert_same(reduced, alone("tensor"), "losses", "gradients")
    assert reduced["known"] == 2
    assert reduced["reduce"] == {"all_reduce": 1}
    assert "all_reduce" not in reduced["step"]
    for case in ("block_split", "nvfp4", "nvfp4_split"):
        assert_same(reduced[case], alone(case), "losses", "gradients")


def test_a_write_to_a_weight_ends_what_is_known_of_it(found):
    reduced = found[2]["reduced"]
    assert reduced["after"]["all_reduce"] == 1
    before, doubled = reduced["doubled"]
    assert not torch.equal(before, doubled)
    assert "layer '0': its weight was written to since reduce_amaxes" in reduced["stale"]


@pytest.mark.parametrize("case", ["tensor", "row_uneven", "block_split", "nvfp4_split"])
def test_codes_that_are_made_once_a_step_train_the_same(found, alone, case):
    kept = found[2]["kept"]
    assert kept["layers"] == ["0", "2"]
    assert_same(kept[case], alone(case), "losses", "gradients")
    # Scales that span ranks are found by the end of a step, not by its gathers.
    assert "all_reduce" not in kept[case]["wire"]["calls"]


def test_a_write_that_nothing_sees_counts_once_codes_are_forgotten(found):
    first, after, other_first, other_after = found[2]["kept"]["outputs"]
    assert torch.equal(first, other_first)
    assert torch.equal(after, other_after)
    assert not torch.equal(first, after)


def test_codes_are_forgotten_and_kept_again_on_all_ranks_after_a_move(found):
    moved = found[2]["kept"]["moved"]
    expected = moved["loading"][0]
    for out, lasting in moved.values():
        assert torch.equal(out, expected)
        assert lasting == [True, True]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_goes_on_with_others(found, alone, training, ranks):
    """Model and Adam through torch.distributed.checkpoint, saved by two."""
    case = "block_split"
    model = training.build(case)
    optimizer = training.optimizer_of(model)
    training.train(model, case, optimizer)
    assert_same(found[ranks]["resume"], training.train(model, case, optimizer), "losses", "gradients")


def test_a_checkpoint_of_sharded_codes_loads_strictly_into_a_plain_model(found, training):
    _, _, _, (width, hidden, out) = training.CASES["block_split"]
    nn = torch.nn
    plain = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, out), nn.Linear(out, 8))
    plain.load_state_dict(found[2]["block_split"]["state"], strict=True)
    assert {value.dtype for value in found[2]["block_split"]["state"].values()} == {torch.float32}
