"""Kernels are launched on the device of their tensors, whichever is current, with Triton's wrapper or without."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from narrowgate.precision import AmaxHistory, Spec, roll
from narrowgate.precision.casting import Request, quantize_summed
from narrowgate.precision.kernels.device import current_for

second_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.mark.parametrize(("device", "other"), [("cpu", False), ("cuda:0", False), ("cuda:1", True)])
def test_only_where_another_device_is_current_is_it_changed(device, other, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    x: Any = SimpleNamespace(is_cuda=device != "cpu", device=torch.device(device))
    found = current_for(x)
    assert isinstance(found, torch.cuda.device if other else contextlib.nullcontext)
    assert getattr(found, "idx", 1) == 1


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=second_gpu) for text in ("fp8_e4m3/row", "fp8_e4m3+delayed(4)")]
)
def test_a_tensor_on_another_gpu_is_cast_as_on_the_current_one(text):
    x = torch.randn(200, 328, device="cuda:0").bfloat16()
    found = []
    for device in ("cuda:0", "cuda:1", "cuda:1"):  # the last one launches what was compiled for the second
        history = AmaxHistory(4, device) if "delayed" in text else None
        first, _, sums = quantize_summed(x.to(device), Request(Spec.parse(text), history=history), None)
        assert first is not None
        assert first.data.device == sums.device == torch.device(device)
        if history is not None:
            roll([history])
            sums = torch.cat([sums, history.history])
        found.append([first.data.float().cpu(), first.scale.cpu(), sums.cpu()])
    assert torch.cuda.current_device() == 0
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.gpu
def test_a_launcher_that_is_not_known_launches_what_the_known_one_does(monkeypatch):
    from narrowgate.precision.kernels import compiled, launch
    from narrowgate.precision.kernels import roll as rolling

    x, found = torch.randn(256, 384, device="cuda").bfloat16(), []
    for known in (compiled._KNOWN, False):
        monkeypatch.setattr(compiled, "_KNOWN", known)
        monkeypatch.setattr(launch, "_casts", {})
        monkeypatch.setattr(rolling, "_launches", {})
        for text in ("fp8_e4m3/row", "fp8_e4m3+delayed(4)"):
            history = AmaxHistory(4, "cuda") if "delayed" in text else None
            for _ in range(3):  # from the second on it is compiled
                first, _, sums = quantize_summed(x, Request(Spec.parse(text), history=history), None)
                assert first is not None
                results = [first.data.float(), first.scale, sums]
                if history is not None:
                    roll([history])
                    results.append(history.history.clone())
                found.append(results)
    for ours, theirs in zip(found[:6], found[6:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
