"""Of the whole-step benchmark: batches dealt evenly, and arms that keep less for backward."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._functorch.config as functorch
from narrowgate.gates.bench import gem, gem_balance
from narrowgate.gates.bench.gem_arms import ARMS
from narrowgate.gates.speed import BlockTime, StepFunction
from narrowgate.models import GemTask
from torch.optim.optimizer import register_optimizer_step_post_hook

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_gem"
SETTINGS = gem.GemSettings(torch.device("cpu"), lambda line: None, rounds=3, steps=1, batches=1)


@pytest.fixture(scope="module")
def task() -> GemTask:
    options = type("Options", (), {"model": "gem-base", "tiny": True, "batch": 32, "max_tokens": None})
    return GemTask.open(runpy.run_path(str(SCRIPT))["sized"](options), "synthetic")


class Clockless:
    """Stands for a timer whose blocks are somebody else's."""

    def now(self) -> float:
        return 0.0

    def clocks(self) -> None:
        return None


def test_batches_are_timed_one_by_one_and_spread_is_within_a_pool(task: GemTask, monkeypatch) -> None:
    # Two pools of two; the second is slower as a whole, which is no spread.
    times = {"even": [10.0, 10.0, 20.0, 20.0], "odd": [8.0, 12.0, 15.0, 25.0]}
    draw = np.random.default_rng(0)
    stepped: list[tuple[str, int]] = []
    built: list[str] = []

    def made(*_: Any) -> gem.Running:
        name = ("even", "odd")[len(built)]
        built.append(name)
        return gem.Running(ARMS["bf16"], lambda i: stepped.append((name, i)), None, 0, 0.5, 3, 1, 9.0)

    def turns(steps: dict[str, StepFunction], *_: Any, **__: Any) -> Any:
        found = {}
        for name, step in steps.items():
            arm, batch = name.split()
            stepped.clear()
            step(5)  # the batch is the name's, whatever the number of the step
            assert stepped == [(arm, int(batch))]
            blocks = times[arm][int(batch)] * np.exp(draw.normal(0, 0.002, (50, 2))) * [1.0, 1.21]
            found[name] = [(BlockTime(a, a), BlockTime(b, b)) for a, b in blocks.tolist()]
        assert list(steps)[:4] == ["even 0", "odd 0", "even 1", "odd 1"]
        return found, "done"

    monkeypatch.setattr(gem_balance, "take_turns", turns)
    monkeypatch.setattr(gem_balance, "make_running", made)
    monkeypatch.setattr(gem_balance, "release", lambda settings: None)
    monkeypatch.setattr(gem_balance, "_peak", lambda one, batches, settings, before: batches)
    monkeypatch.setattr(gem_balance.torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(gem_balance, "CudaTimer", lambda device: Clockless())
    monkeypatch.setattr(gem_balance, "stage", lambda batches, device, n: gem.stage(batches, torch.device("cpu"), n))
    settings = replace(SETTINGS, device=torch.device("cuda", 0))
    even, odd = gem_balance.measure_balance({"even": task, "odd": task}, 2, settings, "case").rows
    assert (even["variant"], odd["variant"]) == ("even", "odd")
    assert even["peak_bytes"] == odd["peak_bytes"] == len(even["live_tokens"]) == 4
    assert even["spread"] == pytest.approx(0, abs=4e-3)
    assert odd["spread"] == pytest.approx((12 / 10 + 25 / 20) / 2 - 1, abs=2e-3)
    assert odd["spread_ci"][0] < odd["spread"] < odd["spread_ci"][1]
    assert even["noise"] == pytest.approx(0.002 / 2**0.5, rel=0.2)
    assert (even["ratio"], even["ci"]) == (1, [1, 1])
    assert odd["ratio"] == pytest.approx(1, rel=1e-3)
    # The median of both blocks, of which the second is slower here.
    assert odd["batch_ms"] == pytest.approx([1.105 * ms for ms in times["odd"]], rel=5e-3)
    assert odd["ms"] == pytest.approx(1.105 * 15, rel=5e-3)


def test_checkpointed_arms_compute_what_the_others_do_and_keep_less(task: GemTask, monkeypatch) -> None:
    """Of one step each: the loss, the gradients, and the bytes that autograd keeps between forward and backward."""
    batch = next(iter(task.train_batches(0)))
    budgets: list[float] = []
    kept: dict[str, int] = {}
    gradients: dict[str, list[torch.Tensor]] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def noted(optimizer: Any, *_: Any) -> None:
        budgets.append(functorch.activation_memory_budget)
        found.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])

    names = ("bf16", "bf16-checkpointed", "bf16-budget", "gem-fp8", "gem-fp8-checkpointed", "gem-fp8-saved",
             "gem-fp8-saved-checkpointed")  # fmt: skip
    for name in names:
        held: dict[int, int] = {}
        found: list[list[torch.Tensor]] = []
        hook = register_optimizer_step_post_hook(noted)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                gem.make_running(ARMS[name], task, [batch], SETTINGS)
        finally:
            hook.remove()
        kept[name], gradients[name] = sum(held.values()), found[0]
    assert budgets == [1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    for name, as_in in (("bf16-checkpointed", "bf16"), ("bf16-budget", "bf16"), ("gem-fp8-checkpointed", "gem-fp8"),
                        ("gem-fp8-saved-checkpointed", "gem-fp8-saved")):  # fmt: skip
        for one, other in zip(gradients[name], gradients[as_in], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    # In what a layer itself hands to autograd FP8 shows on a GPU only: here the plan says that it is asked for.
    assert ARMS["gem-fp8-saved"].prepare(task, task.build_model()).to_dict()["activations"]["save"] == "fp8_e4m3/row"
    for less, more in (("bf16-checkpointed", "bf16"), ("gem-fp8-saved-checkpointed", "gem-fp8-saved")):
        assert kept[less] < kept[more], (less, kept)
