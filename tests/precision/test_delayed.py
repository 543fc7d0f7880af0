"""Delayed scales: which steps decide, what a stale scale costs, and that the state survives what training does."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from narrowgate.precision import AmaxHistory, NarrowgateError, quantize, roll, share_amaxes
from narrowgate.precision.config import GemmConfig, LinearConfig
from narrowgate.precision.layer import layer_state
from narrowgate.precision.linear import lower_linear
from narrowgate.precision.spec import Spec
from torch import nn
from torch.multiprocessing.spawn import start_processes

SPEC = "fp8_e4m3+delayed(3)"


def _scale(q) -> float:
    return float(q.scale)


def _step(history: AmaxHistory, *amaxes: float) -> float:
    """One optimizer step with a micro-batch of each amax; returns the scale that all of them had."""
    scales = [_scale(quantize(torch.tensor([a, -a / 2]), SPEC, history=history)) for a in amaxes]
    assert len(set(scales)) == 1
    roll([history])
    return scales[0]


def test_the_scale_covers_the_largest_of_the_last_n_steps():
    history = AmaxHistory(3)
    for a in (448.0, 896.0, 448.0, 448.0):
        _step(history, a)
    assert _step(history, 1.0) == 896.0 / 448  # still in the window of three
    assert _step(history, 1.0) == 1.0
    assert _step(history, 1.0) == 1.0
    assert _step(history, 1.0) == pytest.approx(1 / 448)


def test_the_first_step_scales_by_its_own_amax():
    assert _step(AmaxHistory(3), 896.0) == 2.0
    assert _scale(quantize(torch.tensor([896.0]), SPEC)) == 2.0  # without a history, always


def test_a_stale_scale_saturates_is_counted_and_recovers_in_the_next_step():
    history = AmaxHistory(3)
    _step(history, 1.0)
    x = torch.tensor([1.0, 50.0, -100.0, 0.5])
    q = quantize(x, SPEC, history=history)
    assert q.dequantize().tolist() == [1.0, 1.0, -1.0, 0.5]
    assert int(history.saturated) == 2
    roll([history])
    q = quantize(x, SPEC, history=history)
    assert _scale(q) == pytest.approx(100 / 448)
    assert int(history.saturated) == 2


def test_micro_batches_join_in_one_step_and_recomputation_changes_nothing():
    history = AmaxHistory(3)
    _step(history, 1.0)
    for a in (2.0, 8.0, 8.0, 4.0):  # 8.0 twice: forward and its recomputation
        assert _scale(quantize(torch.tensor([a]), SPEC, history=history)) == pytest.approx(1 / 448)
    roll([history])
    assert history.history.tolist() == [8.0, 1.0, 0.0]


def test_a_step_without_a_finite_amax_leaves_the_history():
    history = AmaxHistory(1)
    _step(history, 5.0)
    quantize(torch.tensor([torch.inf]), "fp8_e4m3+delayed(1)", history=history)
    roll([history])
    roll([history])  # a step in which the layer did not run
    assert history.history.tolist() == [5.0]


def test_evaluation_uses_the_history_and_leaves_it():
    history = AmaxHistory(3)
    _step(history, 1.0)
    history.recording = False
    q = quantize(torch.tensor([9.0]), SPEC, history=history)
    assert _scale(q) == pytest.approx(1 / 448)
    assert float(history.pending) == -1.0
    assert int(history.saturated) == 0


def test_resuming_in_the_middle_of_a_step_is_exact():
    history = AmaxHistory(3)
    _step(history, 3.0)
    quantize(torch.tensor([7.0]), SPEC, history=history)
    resumed = AmaxHistory(3)
    resumed.load_state_dict(history.state_dict())
    for h in (history, resumed, copy.deepcopy(history), pickle.loads(pickle.dumps(history))):
        roll([h])
        assert h.history.tolist() == [7.0, 3.0, 0.0]


def test_a_state_that_does_not_fit_is_an_error():
    with pytest.raises(NarrowgateError, match=r"'history' has shape \(5,\), expected \(3,\)"):
        AmaxHistory(3).load_state_dict(AmaxHistory(5).state_dict())
    with pytest.raises(NarrowgateError, match="'pending' is missing"):
        AmaxHistory(3).load_state_dict({"history": torch.zeros(3)})


def test_the_history_belongs_to_delayed_specs():
    with pytest.raises(NarrowgateError, match="belongs to delayed"):
        quantize(torch.ones(3), "fp8_e4m3", history=AmaxHistory(3))


def _rank(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    histories = [AmaxHistory(2), AmaxHistory(2)]
    histories[0].record(torch.tensor(float(1 + rank)))
    if rank == 0:
        histories[1].record(torch.tensor(9.0))  # only one rank ran this layer
    roll(histories, dist.group.WORLD)
    assert [h.history.tolist() for h in histories] == [[2.0, 0.0], [9.0, 0.0]]
    dist.destroy_process_group()


def test_data_parallel_ranks_share_one_history(unused_port):
    start_processes(_rank, args=(unused_port,), nprocs=2, start_method="fork")


def _training_rank(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    spec = Spec.parse("fp8_e4m3+delayed(3)")
    for name, layer in model.named_children():
        lower_linear(layer, LinearConfig(*[GemmConfig(spec, spec)] * 3), name=name)
    share_amaxes(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    largest = []
    for step in range(2):
        model(torch.full((4, 16), float(1 + rank + 4 * step))).sum().backward()
        optimizer.step()
        largest.append(layer_state(model[0]).histories["fprop", "input"].history.max().item())
    assert largest == [2.0, 6.0], "the larger rank's input, on both ranks"
    held = torch.stack([h.history for layer in model for h in layer_state(layer).histories.values()])
    first = held.clone()
    dist.broadcast(first, 0)
    assert torch.equal(held, first)
    dist.destroy_process_group()


def test_lowered_layers_share_amaxes_at_the_end_of_each_step(unused_port):
    start_processes(_training_rank, args=(unused_port,), nprocs=2, start_method="fork")


def test_sharing_amaxes_needs_ranks():
    with pytest.raises(NarrowgateError, match="init_process_group first"):
        share_amaxes(nn.Linear(2, 2))
