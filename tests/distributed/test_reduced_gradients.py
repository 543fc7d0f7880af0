"""Low-precision gradient reduction against one process that quantizes each worker's gradients: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from narrowgate.precision import Spec, call_key, quantize, stream_key
from torch import Tensor

TWO = ["reduce_tensor", "reduce_row", "reduce_row_blocks", "reduce_block", "reduce_bf16", "reduce_bf16_sr",
       "reduce_into_bf16", "reduce_into_fp16"]  # fmt: skip


class Oracle:
    """Workers one after another in this process, by what docs/sharding.md says."""

    def __init__(self, training: Any, case: str, workers: int, replicas: int = 1, device: str = "cpu") -> None:
        self.training, self.case, self.workers, self.replicas = training, case, workers, replicas
        spec, _, self.dtype, self.factor, self.parts = training.REDUCED[case]
        self.spec = Spec.parse(spec)
        self.model = training.build_reduced(case, device)

    def local(self, step: int, worker: int, parts: range) -> dict[str, Tensor]:
        self.model.zero_grad()
        for part in parts:
            self.training.loss_of(self.model, self.case, step, worker, part).backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def sent(self, name: str, value: Tensor, step: int, call: int, worker: int) -> Tensor:
        """What arrives of a worker's gradient."""
        value = value.to(self.dtype or torch.float32)
        if self.dtype == torch.float16:
            value = value / self.workers  # FSDP2 divides before it sums, for fear of an overflow
        if value.dim() == 1:
            return value.float()
        key = call_key(stream_key(0, name, "reduce_scatter", f"rank {worker}"), step, call=call)
        return quantize(value, self.spec, dim=1, seed=key if self.spec.sr else None).dequantize()

    def reduce(self, gradients: list[dict[str, Tensor]], step: int, call: int) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        shards = self.workers // self.replicas
        for name in gradients[0]:
            arrived = [self.sent(name, gradient[name], step, call, w) for w, gradient in enumerate(gradients)]
            partial = []
            for replica in range(self.replicas):
                total = torch.zeros_like(arrived[0])
                for value in arrived[replica * shards : (replica + 1) * shards]:
                    total = total + value
                if self.factor is not None:
                    total = total * (1 / self.factor)
                elif self.dtype != torch.float16:
                    total = total / shards
                partial.append(total.to(self.dtype or torch.float32).float())
            out[name] = sum(partial[1:], partial[0]) / self.replicas
        return out

    def step(self, step: int) -> dict[str, Tensor]:
        if self.parts == "each":
            found = [[self.local(step, w, range(part, part + 1)) for w in range(self.workers)] for part in range(2)]
            first, second = (self.reduce(gradients, step, call) for call, gradients in enumerate(found))
            return {name: first[name] + second[name] for name in first}
        parts = range(1 if self.parts == "once" else 2)
        return self.reduce([self.local(step, w, parts) for w in range(self.workers)], step, 0)

    def train(self) -> list[dict[str, Tensor]]:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        gradients = []
        for step in range(2):
            gradients.append(self.step(step))
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[-1][name]
            optimizer.step()
        return gradients


def assert_equal(found: dict[str, Any], oracle: Oracle) -> None:
    for mine, other in zip(found["gradients"], oracle.train(), strict=True):
        for name, value in other.items():
            assert torch.equal(mine[name], value), name
    state = oracle.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in found["state"].items())


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_sum_what_each_gradient_quantizes_to(found, training, case):
    assert_equal(found[2][case], Oracle(training, case, 2))


@pytest.mark.parametrize("case", ["reduce_row", "reduce_block"])
def test_so_do_four_of_which_some_keep_few_rows_or_none(found, training, case):
    assert_equal(found[4][case], Oracle(training, case, 4))


def test_so_do_replicas_which_average_the_sums_of_their_shards(found, training):
    assert_equal(found[4]["replicas"]["reduce_row"], Oracle(training, "reduce_row", 4, replicas=2))


def given(training: Any, case: str, ranks: int) -> int:
    """Bytes that a rank hands over in one backward, from the shapes alone."""
    spec, (width, hidden, out), dtype, _, _ = training.REDUCED[case]
    total = 0
    for n, k in ((hidden, width), (out, hidden), (8, out)):
        rows = -(-n // ranks)
        line = (dtype or torch.float32).itemsize * rows  # the bias
        if spec.startswith("bf16"):
            line += 2 * rows * k
        elif "/1x" in spec:
            line += rows * k + 4 * rows * -(-k // int(spec.partition("/1x")[2].partition("+")[0]))
        elif "/128x128" in spec:
            touched = max((r * rows + rows - 1) // 128 - r * rows // 128 for r in range(ranks)) + 1
            line += rows * k + 4 * -(-k // 128) * max(touched, 1 if rows % 128 == 0 else (rows + 126) // 128 + 1)
        else:
            line += rows * k + 4 * (rows if "/row" in spec else 1)
        total += ranks * (line + -line % 16)
    return total


@pytest.mark.parametrize("case", TWO)
def test_codes_and_scales_travel_in_one_collective_for_each_group(found, training, case):
    parts = 2 if training.REDUCED[case][4] == "each" else 1
    assert found[2][case]["calls"] == {"all_to_all": 3 * parts}  # and no reduce_scatter
    assert found[2][case]["sent"] == parts * given(training, case, 2)


def test_fp8_gradients_are_about_a_quarter_of_fp32(found, training):
    values = sum(p.numel() for p in training.build_reduced("reduce_block").parameters())
    assert 0.25 < found[2]["reduce_block"]["sent"] / (4 * values) < 0.27


@pytest.mark.parametrize("case", ["reduce_tensor", "reduce_row", "reduce_block", "reduce_bf16"])
def test_the_measured_error_is_that_of_the_formats(found, training, case):
    """Against FP32 sums; of FP8's order, and of BF16's, and none for what travels as it is."""
    oracle = Oracle(training, case, 2)
    oracle.train()
    locals_ = [oracle.local(2, worker, range(1)) for worker in range(2)]
    errors = found[2][case]["errors"]
    assert errors.keys() == locals_[0].keys()
    for name, error in errors.items():
        exact = locals_[0][name] + locals_[1][name]
        sums = sum(oracle.sent(name, gradient[name], 2, 0, w) for w, gradient in enumerate(locals_))
        assert error == pytest.approx(float((sums - exact).double().norm() / exact.double().norm()), rel=1e-6)
        low, high = (1e-4, 4e-3) if case == "reduce_bf16" else (0.01, 0.15)
        assert error == 0 if exact.dim() == 1 else low < error < high


def test_steps_are_part_of_the_recipe_s_state(found):
    assert found[2]["reduce_row"]["recipe_state"] == {"": {"step": 2}}


def test_parameters_without_a_gradient_are_an_error_unless_frozen_or_filled(found):
    idle = found[2]["idle"]
    assert "module '': found gradients of 36 of its 72 elements a rank" in idle["refused"]
    assert idle["frozen"].keys() == {"used.weight", "used.bias"}
    assert all((value == 2).all() for value in idle["frozen"].values())
    if "filled" in idle:
        assert all((value == (2 if name in idle["frozen"] else 0)).all() for name, value in idle["filled"].items())
        assert len(idle["filled"]) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("case", TWO)
def test_so_do_two_gpus(found_on_gpus, training, case):
    assert_equal(found_on_gpus[case], Oracle(training, case, 2, device="cuda"))
