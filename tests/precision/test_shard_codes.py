"""Shards quantized one by one, their maxima joined as an all-reduce would, against the whole weight quantized."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from narrowgate.precision import Spec, joint_amaxes, quantize, shard_codes, sharding
from narrowgate.precision.shard_codes import own_amax, quantize_rows, reach

SPECS = ["fp8_e4m3", "fp8_e5m2+pow2", "fp6_e2m3", "fp4_e2m1/128x128", "fp8_e4m3/row", "fp8_e4m3/1x16",
         "fp8_e4m3/128x128", "mxfp8", "mxfp8_e5m2/32x32", "mxfp8/32x32+rceil", "mxfp6_e3m2/32x32", "mxfp4",
         "mxfp4/32x32", "nvfp4", "nvfp4/16x16"]  # fmt: skip


def raw(x: torch.Tensor) -> torch.Tensor:
    """Bytes: NaN equals itself."""
    return x.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("count", [1, 48, 57, 300])
@pytest.mark.parametrize("lost", [None, torch.nan, torch.inf])
def test_shards_have_the_codes_and_scales_of_the_whole(device, spec, count, lost):
    spec, columns = Spec.parse(spec), 41
    weight = torch.randn(count, columns, generator=torch.Generator().manual_seed(count)) * torch.logspace(
        -3, 3, columns
    )
    weight = weight.to(device)
    if lost is not None:
        weight[-1, 7] = lost
    whole = quantize(weight, spec, dim=1)
    assert whole.scale is not None
    for ranks in (1, 2, 3, 4):
        kept = -(-count // ranks)
        firsts = [min(rank * kept, count) for rank in range(ranks)]
        shards = [weight[first : first + kept] for first in firsts]
        reaches, amax = reach(spec, count, ranks), None
        if reaches is not None:
            own = [
                own_amax(shard, spec, (count, columns), first, reaches)
                for shard, first in zip(shards, firsts, strict=True)
            ]
            amax = torch.stack(own).amax(0)
        found = [
            quantize_rows(shard, spec, (count, columns), first, reaches, amax)
            for shard, first in zip(shards, firsts, strict=True)
        ]
        unequal = torch.cat([part.data.view(torch.uint8) for part in found]) != whole.data.view(torch.uint8)
        if spec.fmt.element.bits == 8:  # under a NaN scale no code means anything, and kernels have their own
            unequal &= ~whole.dequantize().isnan()
        assert not unequal.any()
        scales = [part.scale for part in found if part.scale is not None]
        joined = reaches != "blocks" and spec.granularity != "tensor"
        for scale in [torch.cat([raw(s) for s in scales])] if joined else map(raw, scales):
            assert torch.equal(scale, raw(whole.scale))
        for part in found:
            assert part.tensor_scale is None or torch.equal(part.tensor_scale, whole.tensor_scale)
            assert (part.tensor_scale is None) == (whole.tensor_scale is None)


def test_a_joint_maximum_reaches_the_kernels_at_an_aligned_address(monkeypatch):
    seen = []
    original = shard_codes.quantize_both

    def spied(x, rows, columns):
        seen.append(rows.history.history.data_ptr() % 16)
        return original(x, rows, columns)

    monkeypatch.setattr(shard_codes, "quantize_both", spied)
    for amax in torch.tensor([1.0, 2.0, 3.0]).unbind():
        found = quantize_rows(torch.ones(4, 8), Spec.parse("fp8_e4m3"), (8, 8), 0, "tensor", amax)
        assert found.scale == amax / 448
    assert seen == [0, 0, 0]


class _Mesh:
    """The first of two ranks."""

    def get_group(self) -> None:
        return None

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return 0


def test_a_backward_gathers_the_codes_that_its_forward_made(monkeypatch):
    made = []

    def counted(*args):
        made.append(args)
        return quantize_rows(*args)

    monkeypatch.setattr(sharding, "quantize_rows", counted)
    rows = torch.randn(4, 24)
    shard = sharding.ShardedWeight(rows, Spec.parse("fp8_e4m3/row"), (8, 24), "layer")
    mesh = _Mesh()

    @torch.no_grad()  # as FSDP2 calls it
    def sent() -> torch.Tensor:
        return shard.fsdp_pre_all_gather(mesh)[0][0]

    def step(between=lambda: None) -> list[torch.Tensor]:
        """What a forward and its backward send."""
        found = [sent()]
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: found.append(sent()))
        between()
        y.sum().backward()
        return found

    first, second = step()
    assert torch.equal(first, second)
    assert len(made) == 1
    step()
    assert len(made) == 2  # another forward makes its own, whatever was written past all counters
    step(lambda: rows.mul_(-1.0))
    assert len(made) == 4  # a write between the two is seen
    assert torch.equal(step()[1], quantize(rows, "fp8_e4m3/row").data.view(torch.uint8))
    step(lambda: torch.Tensor.mul_(shard, 2.0))
    assert len(made) == 7
    assert shard._known.codes is None
    with torch.inference_mode():
        sent()
    assert shard._known.codes is None
    sent()
    torch.Tensor.mul_(shard, 2.0)
    assert shard._known.codes is None


def test_under_a_scale_that_ranks_share_a_backward_makes_codes_anew(monkeypatch):
    """Other ranks may not know that this one was written to, and send codes of one scale with it."""
    monkeypatch.setattr(sharding, "reduce_amax", lambda amax, group: None)
    for write in (lambda rows: None, lambda rows: rows.mul_(2.0)):
        rows = torch.randn(4, 24)
        shard = sharding.ShardedWeight(rows, Spec.parse("fp8_e4m3"), (8, 24), "layer")
        found = [shard.fsdp_pre_all_gather(_Mesh())]
        y = (torch.ones(2, requires_grad=True) * 2).sum()
        y.register_hook(lambda grad, shard=shard, found=found: found.append(shard.fsdp_pre_all_gather(_Mesh())))
        write(rows)
        y.backward()
        assert shard._known.codes is None
        (codes,), (scale, _) = found[1]
        whole = quantize(rows, "fp8_e4m3")
        assert torch.equal(codes, whole.data.view(torch.uint8))
        assert torch.equal(scale, whole.scale)


def test_under_a_scale_that_ranks_found_together_a_backward_gathers_the_codes_of_its_forward(monkeypatch):
    made = []
    monkeypatch.setattr(sharding, "quantize_rows", lambda *args: made.append(args) or quantize_rows(*args))
    rows = torch.randn(4, 24)
    shard = sharding.ShardedWeight(rows, Spec.parse("fp8_e4m3"), (8, 24), "layer")
    for step in range(2):
        # As reduce_amaxes leaves it: another rank has a larger value.
        amax = rows.abs().max() * 2
        shard._known.amax, shard._known.version = amax, rows._version
        found = [shard.fsdp_pre_all_gather(_Mesh())]
        y = (torch.ones(2, requires_grad=True) * 2).sum()
        y.register_hook(lambda grad, found=found: found.append(shard.fsdp_pre_all_gather(_Mesh())))
        y.backward()
        assert len(made) == step + 1
        whole = quantize_rows(rows, shard._spec, (8, 24), 0, "tensor", amax)
        for (codes,), (scale, _) in found:
            assert torch.equal(codes, whole.data.view(torch.uint8))
            assert scale == amax / 448
        shard.fsdp_pre_all_gather(_Mesh())
        made.pop()
        torch.Tensor.mul_(shard, 1.5)
        assert shard._known.codes is shard._known.amax is None


def test_rows_that_fsdp2_pads_keep_what_is_known_of_them():
    """Only the ranks that it pads move theirs: what is known must stay alike on all."""
    rows = torch.randn(3, 24)
    shard = sharding.ShardedWeight(rows, Spec.parse("fp8_e4m3"), (7, 24), "layer")
    shard._known.amax, shard._known.version = rows.abs().max() * 2, rows._version
    with torch.no_grad():
        padded: Any = shard.new_zeros((4, 24))
        moved: Any = padded.narrow(0, 0, 3)
        moved.copy_(shard)
        assert moved._known is not shard._known
        assert moved._known.amax is shard._known.amax
        assert moved._known.version == moved._rows._version
        moved.copy_(rows)  # other values, for all that is known of them
        assert moved._known.amax is None
        padded.narrow(0, 0, 2).copy_(shard.narrow(0, 0, 2))
        moved.mul_(2)
        assert moved._known.amax is None


def test_reducing_again_forgets_codes_of_the_scale_before(monkeypatch):
    """Another rank may have been written to since, behind its shard, so that the joint amax is another one."""
    rows = torch.randn(4, 24)
    shard = sharding.ShardedWeight(rows, Spec.parse("fp8_e4m3"), (8, 24), "layer")
    parameter = _Distributed(shard)
    others = iter([10.0, 40.0])
    monkeypatch.setattr(joint_amaxes, "_shard_mesh", lambda mesh: mesh)
    monkeypatch.setattr(joint_amaxes, "reduce_amax", lambda amax, group: amax.fill_(next(others)))
    monkeypatch.setattr("torch.distributed.tensor.DTensor", _Distributed)
    model = SimpleNamespace(named_parameters=lambda: [("weight", parameter)])
    joint_amaxes.reduce_amaxes(model)
    shard.fsdp_pre_all_gather(_Mesh())
    assert shard._known.codes is not None
    y = (torch.ones(2, requires_grad=True) * 2).sum()
    found = []
    y.register_hook(lambda grad: found.append(shard.fsdp_pre_all_gather(_Mesh())))
    joint_amaxes.reduce_amaxes(model)
    y.backward()
    assert found[0][1][0] == 40 / 448


class _Distributed:
    """Stands for a DTensor on two ranks."""

    device_mesh = _Mesh()

    def __init__(self, local):
        self._local_tensor = local


def test_copies_of_a_shard_have_no_codes():
    shard = sharding.ShardedWeight(torch.randn(4, 24), Spec.parse("fp8_e4m3/row"), (8, 24), "layer")
    shard.fsdp_pre_all_gather(_Mesh())
    assert shard._known.codes is not None
    shard._known.lasting = True
    for other in (copy.deepcopy(shard._known), pickle.loads(pickle.dumps(shard._known))):
        assert other.codes is None
        assert not other.lasting
