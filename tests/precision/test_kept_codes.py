"""Training whose fused step writes the codes of kept weights: the same bits, never stale, counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from narrowgate.precision import optimizer_state, weight_codes
from narrowgate.precision.kept_weights import keep_weights
from narrowgate.precision.layer import forget_weight_codes, layer_state
from narrowgate.precision.linear import lower_linear
from narrowgate.precision.moments import MOMENTS
from narrowgate.precision.optimizer_state import lower_state, write_codes
from narrowgate.precision.step_codes import StepCodes
from narrowgate.precision.weight_codes import WeightCodes
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from .test_adam_codes import config
from .test_adam_kernel import DEVICE, INTERPRETED, kernel_test, reference, same


def model(device: str = DEVICE, weight: str = "fp8_e4m3+delayed(3)") -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(40, 64), nn.SiLU(), nn.Linear(64, 48, bias=False), nn.SiLU(), nn.Linear(48, 16)
    ).to(device)  # fmt: skip
    for name in ("0", "2"):
        lower_linear(layers.get_submodule(name), config(weight, weight), name=name)
    return layers


def kept_of(layers: nn.Sequential) -> list[WeightCodes]:
    found = [layer_state(layers[i]).kept for i in (0, 2)]
    return [kept for kept in found if kept is not None]


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shapes of weights cast into kept codes."""
    found: list[tuple[int, ...]] = []
    original = weight_codes._cast_into

    def counted(weight: Tensor, *others: Any) -> None:
        found.append(tuple(weight.shape))
        original(weight, *others)

    monkeypatch.setattr(weight_codes, "_cast_into", counted)
    yield found
    torch._dynamo.reset()


class Run:
    """A model in training, its optimizer lowered or not, its weights kept or not, written in the pass or not."""

    def __init__(self, state: str = "bf16+sr", kind: Any = Adam, *, in_pass: bool = True, **options: Any) -> None:
        self.layers, self.in_pass = model(), in_pass
        self.optimizer: Optimizer = kind(self.layers.parameters(), lr=0.05, fused=True, **options)
        lower_state(self.optimizer, state, seed=3)
        assert keep_weights(self.layers.parameters()) == {}
        assert len(kept_of(self.layers)) == 2
        if in_pass:
            write_codes(self.optimizer)
        self.call: Any = self.layers
        self.found: list[Tensor] = []
        self.batch = 0

    @property
    def weight(self) -> nn.Parameter:
        layer = self.layers[0]
        assert isinstance(layer, nn.Linear)
        assert isinstance(layer.weight, nn.Parameter)
        return layer.weight

    def micro_batch(self) -> Tensor:
        self.batch += 1
        x = torch.randn(24, 40, generator=torch.Generator().manual_seed(self.batch)).to(DEVICE).requires_grad_()
        y = self.call(x)
        y.square().mean().backward()
        assert x.grad is not None
        self.found += [y.detach(), x.grad]
        return x

    def step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            if not self.in_pass:
                patch.setattr(StepCodes, "of", lambda self, parameter: None)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def histories(self) -> list[Tensor]:
        states = [layer_state(self.layers[i]).histories["fprop", "weight"].state_dict() for i in (0, 2)]
        return [value for state in states for value in state.values()]

    def everything(self) -> list[Tensor]:
        moments = [self.optimizer.state[p][m] for p in self.layers.parameters() for m in MOMENTS]
        return [*self.found, *(p.detach() for p in self.layers.parameters()), *moments, *self.histories()]


def plain_fp32_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, PyTorch's fused step on FP32 moments as the kernel computes it."""
    if not INTERPRETED:
        return
    # Looked up before either is replaced.
    adam, adamw = reference(False), reference(True)
    monkeypatch.setattr(torch, "_fused_adam_", adam)
    monkeypatch.setattr(torch, "_fused_adamw_", adamw)


def assert_alike(a: Run, b: Run) -> None:
    for mine, other in zip(a.everything(), b.everything(), strict=True):
        same(mine, other)


@kernel_test
@pytest.mark.parametrize(("state", "kind"), [("bf16+sr", Adam), ("bf16", AdamW), ("fp32", Adam), ("fp32", AdamW)])
def test_training_is_the_same_with_codes_from_the_pass(state, kind, casts, monkeypatch):
    plain_fp32_step(monkeypatch)
    ours, theirs = Run(state, kind), Run(state, kind, in_pass=False)
    assert type(ours.optimizer).__name__.endswith(kind.__name__)
    assert isinstance(ours.optimizer, kind)
    counts = []
    for run in (ours, theirs):
        before = len(casts)
        for _ in range(5):
            for _ in range(2):
                run.micro_batch()
            run.step(monkeypatch)
        counts.append(len(casts) - before)
    # The first step makes the optimizer's state and takes the long way.
    assert counts == [2 * 2, 5 * 2]
    assert [kept.passes for kept in kept_of(ours.layers)] == [4, 4]
    assert [kept.passes for kept in kept_of(theirs.layers)] == [0, 0]
    # What the last step found has not been used yet, so it is in no history.
    assert_alike(ours, theirs)


def _halve(run: Run) -> None:
    with torch.no_grad():
        run.weight.mul_(0.5)


def _other_storage(run: Run) -> None:
    run.weight.data = run.weight.data * 0.5


def _load(run: Run) -> None:
    run.layers.load_state_dict({name: value * 0.5 for name, value in run.layers.state_dict().items()})


def _unseen_and_announced(run: Run) -> None:
    run.weight.data.mul_(0.5)
    forget_weight_codes(run.layers.parameters())


def _average(run: Run) -> None:
    average = torch.optim.swa_utils.AveragedModel(run.layers)
    with torch.no_grad():
        for p, a in zip(run.layers.parameters(), average.parameters(), strict=True):
            p.copy_(a * 0.5)


def _load_history(layer: nn.Module, times: float) -> None:
    state = layer_state(layer).state_dict()
    layer_state(layer).load_state_dict(
        {name: value * times if name.endswith(".history") else value for name, value in state.items()}
    )


def _history_loaded(run: Run) -> None:
    _load_history(run.layers[0], 4)


def _later_history_loaded(run: Run) -> None:
    # So small that much saturates, which must not count twice.
    _load_history(run.layers[2], 0.25)


def _evaluated(run: Run) -> None:
    with torch.no_grad():
        run.found.append(run.layers.eval()(torch.ones(4, 40, device=DEVICE)))
    run.layers.train()


def _saved_and_loaded(run: Run) -> None:
    saved = [layer_state(run.layers[i]).state_dict() for i in (0, 2)]
    _halve(run)
    for i, state in zip((0, 2), saved, strict=True):
        layer_state(run.layers[i]).load_state_dict(state)


@kernel_test
@pytest.mark.parametrize("write", [_halve, _other_storage, _load, _unseen_and_announced, _average, _history_loaded,
                                   _later_history_loaded, _evaluated, _saved_and_loaded])  # fmt: skip
@pytest.mark.parametrize("used", [False, True])
def test_whatever_happens_after_the_step_is_seen(write, used, monkeypatch):
    ours, theirs = Run("bf16"), Run("bf16", in_pass=False)
    for run in (ours, theirs):
        for _ in range(2):
            run.micro_batch()
            run.step(monkeypatch)
        if used:
            run.micro_batch()
        write(run)
        run.micro_batch()
        run.step(monkeypatch)
        run.micro_batch()
    assert sum(kept.passes for kept in kept_of(ours.layers)) >= 3
    assert_alike(ours, theirs)


@kernel_test
def test_a_scaler_that_skips_a_step_leaves_codes_and_history_as_a_cast_does(monkeypatch):
    ours, theirs = Run("bf16"), Run("bf16", in_pass=False)
    for run in (ours, theirs):
        scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)  # type: ignore[attr-defined]
        for number in range(4):
            x = run.micro_batch()
            scaler.scale(torch.ones((), device=DEVICE))
            if number == 2:
                assert run.weight.grad is not None
                run.weight.grad[0, 0] = torch.inf
            with monkeypatch.context() as patch:
                if not run.in_pass:
                    patch.setattr(StepCodes, "of", lambda self, parameter: None)
                scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            assert x.grad is not None
        run.micro_batch()
    assert [kept.passes for kept in kept_of(ours.layers)] == [3, 3]
    assert_alike(ours, theirs)


@kernel_test
def test_what_a_step_that_failed_wrote_does_not_count(casts, monkeypatch):
    run = Run("bf16")
    for _ in range(2):
        run.micro_batch()
        run.step(monkeypatch)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    run.micro_batch()
    del casts[:]
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_state, "_put_back", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            run.optimizer.step()
    run.weight.data.mul_(0.5)
    forget_weight_codes()
    run.micro_batch()
    assert casts == [(64, 40), (48, 64)]


@kernel_test
def test_another_weight_in_its_place_before_the_hook_is_seen(monkeypatch):
    ours, theirs = Run("bf16"), Run("bf16", in_pass=False)
    for run in (ours, theirs):
        run.optimizer.register_step_post_hook(lambda *_, run=run: _other_storage(run))
        for _ in range(3):
            run.micro_batch()
            run.step(monkeypatch)
    assert_alike(ours, theirs)


@kernel_test
def test_weights_may_be_swapped_between_a_step_and_a_forward(monkeypatch):
    run = Run("bf16")
    for _ in range(2):
        run.micro_batch()
        run.step(monkeypatch)
    weight = run.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        run.layers.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert run.weight is weight
    for _ in range(2):
        run.micro_batch()
        run.step(monkeypatch)
    assert [kept.passes for kept in kept_of(run.layers)] == [3, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["bf16+sr", "fp32"])
def test_compiled_training_is_the_same_with_codes_from_the_pass(state, monkeypatch):
    ours, theirs = Run(state), Run(state, in_pass=False)
    for run in (ours, theirs):
        run.call = torch.compile(run.layers, fullgraph=True)
        for _ in range(5):
            run.micro_batch()
            run.micro_batch()
            run.step(monkeypatch)
    assert [kept.passes for kept in kept_of(ours.layers)] == [4, 4]
    assert_alike(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["bf16+sr", "fp32"])
def test_a_captured_training_step_replays_as_it_runs(state, monkeypatch):
    """Forward, backward and step in one graph: it casts where it uses, and the step compiles nothing."""
    ours, theirs = (Run(state, capturable=True) for _ in range(2))
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).cuda()

    def once(run: Run) -> None:
        run.layers(x).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            once(ours)
            once(theirs)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            once(ours)
        for _ in range(3):
            graph.replay()
            once(theirs)
    torch.cuda.synchronize()
    for mine, other in zip(ours.layers.parameters(), theirs.layers.parameters(), strict=True):
        same(mine, other)
    ours.batch = theirs.batch = 0
    for run in (ours, theirs):  # and goes on outside of the graph
        for _ in range(2):
            run.micro_batch()
            run.step(monkeypatch)
    for mine, other in zip(ours.found, theirs.found, strict=True):
        same(mine, other)
    assert [kept.passes for kept in kept_of(ours.layers)] == [2, 2]


@pytest.mark.gpu
def test_rates_and_steps_compile_nothing(monkeypatch):
    from narrowgate.precision.kernels import adam_codes

    kernel: Any = adam_codes._adam_codes
    run, sizes = Run("bf16+sr"), []
    for step in range(5):
        run.micro_batch()
        run.optimizer.param_groups[0]["lr"] = 0.5**step
        run.step(monkeypatch)
        sizes.append(len(kernel.device_caches[torch.cuda.current_device()][0]))
    assert sizes[1] == sizes[-1] > 0
