"""Grouped products of experts on a GPU: kernels, native products, compiled graphs; see test_grouped.py."""

from __future__ import annotations

import copy

import pytest
import torch
from narrowgate.precision.capability import NAMED_DEVICES, grouped_obstacle
from narrowgate.precision.grouped import GroupedLinear
from narrowgate.precision.grouped_rows import Groups, group_bits
from narrowgate.precision.layer import layer_state

from .test_grouped import CONFIGS, INTERPRETED, OFFSETS, E, K, N, alike, layer, rows, step


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("width", [1, 5, 8, 24, 9001])
def test_the_kernels_bits_through_tritons_interpreter(width):
    from narrowgate.precision.kernels.philox import fill_group_bits

    check_bits(fill_group_bits, width, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 5, 8, 24, 9001])
def test_on_the_gpu_bits_are_those_of_the_cpu(width):
    check_bits(group_bits, width, "cuda")


def check_bits(found, width: int, device: str) -> None:
    keys = torch.tensor([7, -3, 1 << 40, 99])
    groups = Groups(torch.tensor(OFFSETS["ragged"], dtype=torch.int32), 45)
    arguments = keys, groups.group, groups.place.long()
    got = found(*(t.to(device) for t in arguments), width).cpu().to(torch.int32) & 0xFFFF
    assert torch.equal(got, group_bits(*arguments, width))


on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="FP8 is grouped on Hopper"
)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("name", CONFIGS)
def test_on_the_gpu_native_grouped_products_are_those_of_the_loop(name, offsets):
    check_native(name, [offsets], compiled=False)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", CONFIGS)
def test_on_the_gpu_one_compiled_graph_serves_all_offsets(name):
    check_native(name, OFFSETS, compiled=True)


def check_native(name, all_offsets, *, compiled):
    grouped = copy.deepcopy(layer(name, grouped=True, shape=(144, 72))).cuda()
    loop = copy.deepcopy(grouped)
    assert layer_state(grouped).here.kind == "cuda"
    layer_state(loop).here = NAMED_DEVICES["cpu"]
    torch._dynamo.reset()  # a code object may be compiled a few times only, and each case is a module of its own
    run = torch.compile(grouped, fullgraph=True) if compiled else grouped
    # Inductor adds the bias before it is rounded to BF16.
    bias = float(grouped.bias.detach().abs().max()) if compiled else 0.0
    for offsets in all_offsets:
        x, ends = (t.cuda() for t in rows(offsets, 144))
        torch.cuda.synchronize()
        found, expected = step(run, x, ends, grouped), step(loop, x, ends)
        alike(found[:1], expected[:1], bias)
        alike(found[1:], expected[1:])
        states = (layer_state(module).state_dict() for module in (grouped, loop))
        assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", OFFSETS)
def test_on_the_gpu_grouped_bf16_products_are_those_of_the_cpu(offsets):
    torch.manual_seed(2)
    host = GroupedLinear(E, K, N, bias=True)
    device = copy.deepcopy(host).cuda()
    x, ends = rows(offsets)
    found = step(device, x.cuda(), ends.cuda())
    alike([t.cpu() for t in found], step(host, x, ends))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["row", "tensor, stochastic", "delayed"])
def test_on_the_gpu_a_step_never_waits_for_the_groups_sizes(name):
    module = copy.deepcopy(layer(name, grouped=True, shape=(144, 72))).cuda()
    if grouped_obstacle(CONFIGS[name], layer_state(module).here, E) is not None:
        pytest.skip("this GPU multiplies one expert after another")
    x, ends = (t.cuda() for t in rows("ragged", 144))
    step(module, x, ends)  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(module, x, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
