"""Closing a step of many histories in one launch is closing each with plain operations."""

from __future__ import annotations

import copy

import pytest
import torch
from narrowgate.precision import AmaxHistory, cast_operators, delayed, roll
from narrowgate.precision.cast_operators import kernels_on_cpu
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not kernels_on_cpu(), reason="needs Triton's interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def _histories(device: str, lengths: list[int]) -> list[AmaxHistory]:
    """Histories in mid-training: every third recorded nothing in this step, the first one zero."""
    made = []
    for i, length in enumerate(lengths):
        history = AmaxHistory(length)
        history.history.copy_(torch.rand(length) + 0.5)
        history.pending.fill_(0.0 if i == 0 else -1.0 if i % 3 == 2 else 1.0 + i)
        made.append(history.to(device))
    return made


def _state(histories: list[AmaxHistory]) -> list[list[float]]:
    return [[*history.history.tolist(), float(history.pending)] for history in histories]


def _plainly_rolled(histories: list[AmaxHistory], monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    twins = copy.deepcopy(histories)
    with monkeypatch.context() as patch:
        patch.setattr(delayed, "launches_on", lambda history: False)
        roll(twins)
    return _state(twins)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[16] * 40, [1, 2, 3, 5, 16, 1, 100, 3], [1024]], ids=["alike", "mixed", "long"])
def test_one_launch_rolls_every_history_as_plain_operations_do(device, lengths, monkeypatch):
    histories = _histories(device, lengths)
    for step in range(3):
        expected = _plainly_rolled(histories, monkeypatch)
        roll(histories)
        assert _state(histories) == expected
        for history in histories[step::2]:
            history.record(torch.tensor(10.0 + step, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_what_looks_at_version_counters_sees_that_the_history_was_written(device):
    (history,) = _histories(device, [4])
    before = history.history._version, history.pending._version
    roll([history])
    assert history.history._version > before[0]
    assert history.pending._version > before[1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_history_that_is_named_twice_is_entered_once(device, monkeypatch):
    from narrowgate.precision.kernels import roll as kernel

    tables: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}
    monkeypatch.setattr(kernel, "_tables", tables)
    first, second = _histories(device, [4, 4])
    expected = [[0.0, *first.history.tolist()[:3], -1.0], [2.0, *second.history.tolist()[:3], -1.0]]
    roll([second, first, second, first.frozen(), second])
    assert _state([first, second]) == expected
    ((_, addresses),) = tables
    assert len(addresses) == 4  # programs that took the same one would race


def test_histories_without_memory_are_rolled_by_plain_operations(monkeypatch):
    monkeypatch.setattr(cast_operators, "kernels_on_cpu", lambda: True)
    with FakeTensorMode():
        assert not cast_operators.launches_on(torch.zeros(4, device="cuda"))
        history = AmaxHistory(4)
        roll([history])
        assert history.history.shape == (4,)
    history = AmaxHistory(4, "meta")
    roll([history])
    assert history.history.is_meta


@pytest.mark.gpu
def test_a_captured_step_rolls_at_each_replay(monkeypatch):
    histories, fresh = _histories("cuda", [16, 16, 3]), _histories("cuda", [16])
    roll(histories)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        roll(histories)
        roll(fresh)  # met here first: no addresses may be copied now, so it is captured as plain operations
    for _ in range(2):
        expected = _plainly_rolled([*histories, *fresh], monkeypatch)
        graph.replay()
        assert _state([*histories, *fresh]) == expected
        histories[1].record(torch.tensor(7.0, device="cuda"))


@pytest.mark.parametrize("device", DEVICES)
def test_histories_are_rolled_whatever_the_default_device(device, monkeypatch):
    histories = _histories(device, [5, 5])
    expected = _plainly_rolled(histories, monkeypatch)
    with torch.device("meta"):
        roll(histories)
    assert _state(histories) == expected
