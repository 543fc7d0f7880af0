"""Training whose fused step writes the codes of kept weights: the same bits, never stale, counted once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from narrowgate.precision import AmaxHistory, NarrowgateError, Spec, casting, optimizer_state, weight_codes
from narrowgate.precision.delayed import roll
from narrowgate.precision.kept_weights import keep_weights, kept_history
from narrowgate.precision.layer import forget_weight_codes, layer_state
from narrowgate.precision.linear import lower_linear
from narrowgate.precision.moments import MOMENTS
from narrowgate.precision.optimizer_state import lower_state, state_spec, write_codes
from narrowgate.precision.step_codes import StepCodes
from narrowgate.precision.weight_codes import WeightCodes
from narrowgate.recipes import Recipe, Rule, apply_recipe
from narrowgate.recipes.recipe import OptimizerState
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


@kernel_test
def test_an_optimizer_without_kept_weights_is_left_alone():
    layers = model()
    optimizer = Adam(layers.parameters(), fused=True)
    write_codes(optimizer)
    assert type(optimizer) is Adam
    keep_weights(layers.parameters())
    unfused = Adam(layers.parameters(), fused=False)
    write_codes(unfused)
    assert type(unfused) is Adam


@kernel_test
def test_an_unlowered_optimizer_stays_what_it_looked_like(monkeypatch):
    run = Run("fp32")
    plain = Adam(model().parameters(), lr=0.05, fused=True)
    for _ in range(2):
        run.micro_batch()
        run.step(monkeypatch)
    assert repr(run.optimizer) == repr(plain)
    state = run.optimizer.state_dict()
    assert all(value["exp_avg"].dtype == torch.float32 for value in state["state"].values())
    plain.load_state_dict(state)
    run.optimizer.load_state_dict(plain.state_dict())
    twin = copy.deepcopy(run.optimizer)
    assert type(twin) is type(run.optimizer)
    run.micro_batch()
    run.step(monkeypatch)
    assert [kept.passes for kept in kept_of(run.layers)] == [2, 2]


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


@kernel_test
@pytest.mark.parametrize("why", ["shared amaxes", "shared weight", "captured before", "narrow"])
def test_what_the_pass_cannot_write_is_cast_where_it_is_used(why, monkeypatch):
    from narrowgate.precision.kernels import adam_codes

    launched: list[Tensor] = []
    original = adam_codes.launch_adam_codes

    def spied(rule: Any, tensors: Any, *others: Any) -> None:
        launched.append(tensors.parameter)
        original(rule, tensors, *others)

    monkeypatch.setattr(adam_codes, "launch_adam_codes", spied)
    run = Run("bf16")
    state, kept = layer_state(run.layers[0]), kept_of(run.layers)
    if why == "shared amaxes":
        state.group = object()  # type: ignore[assignment]
        monkeypatch.setattr("narrowgate.precision.layer.roll", lambda histories, group: roll(histories))
    elif why == "shared weight":
        twin = nn.Linear(40, 64).to(DEVICE)
        twin.weight = run.weight
        lower_linear(twin, config(), name="twin")
        assert keep_weights([twin.weight]) == {}
    elif why == "captured before":
        kept[0]._stamp.captured = True
    else:
        run.layers[0] = nn.Linear(36, 64).to(DEVICE)
        lower_linear(run.layers[0], config(), name="0")
        run.layers.insert(0, nn.Linear(40, 36).to(DEVICE))
        run.optimizer = lower_state(Adam(run.layers.parameters(), fused=True), "bf16")
        assert keep_weights(run.layers.parameters()) == {}
        kept = [codes for i in (1, 3) if (codes := layer_state(run.layers[i]).kept) is not None]
    for _ in range(3):
        run.micro_batch()
        run.step(monkeypatch)
    assert [codes.passes for codes in kept] == [0, 2]
    assert {x.shape for x in launched} == {(48, 64)}


@kernel_test
@pytest.mark.parametrize("state", ["bf16+sr", "fp32"])
def test_a_plan_wraps_an_optimizer_that_writes_codes(state):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).to(DEVICE)
    recipe = Recipe(
        name="r", optimizer=OptimizerState(state=state), rules=[Rule(layers="0", all="fp8_e4m3+delayed(4)"),
                                                              Rule(layers="2", all="fp8_e4m3")],
    )  # fmt: skip
    optimizer = Adam(layers.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert apply_recipe(layers, recipe).wrap_optimizer(optimizer, keep_weights=True) is optimizer
    for _ in range(3):
        layers(torch.ones(8, 32, device=DEVICE)).sum().backward()
        optimizer.step()
        scheduler.step()
    found = [layer_state(layers[i]).kept for i in (0, 2)]
    assert [kept.passes for kept in found if kept is not None] == [2, 0]


@kernel_test
def test_an_optimizer_that_writes_codes_can_still_be_lowered(monkeypatch):
    plain_fp32_step(monkeypatch)
    run = Run("fp32")
    run.micro_batch()
    run.step(monkeypatch)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    with pytest.raises(NarrowgateError, match=r"found torch\.float64"):
        lower_state(run.optimizer, "bf16")
    run.optimizer.param_groups.pop()
    run.micro_batch()
    run.step(monkeypatch)  # still as before
    assert state_spec(run.optimizer) == Spec(format="fp32")
    lower_state(run.optimizer, "bf16+sr", seed=3)
    assert state_spec(run.optimizer) == Spec.parse("bf16+sr")
    for _ in range(2):
        run.micro_batch()
        run.step(monkeypatch)
    assert {run.optimizer.state[p][m].dtype for p in run.layers.parameters() for m in MOMENTS} == {torch.bfloat16}
    assert [kept.passes for kept in kept_of(run.layers)] == [3, 3]


class Around(Optimizer):
    """Steps another optimizer, whose parameters and state are its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inners, self.param_groups, self.state = [inner], inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inners[0].step(closure)


@kernel_test
def test_an_optimizer_around_another_is_left_alone():
    layers = model()
    groups = [{"params": [p for p in layers.parameters() if p.dim() == dim]} for dim in (2, 1)]
    optimizer = Around(Adam(groups, fused=True))
    layers(torch.ones(4, 40, device=DEVICE)).square().mean().backward()
    before = [p.detach().clone() for p in layers.parameters()]
    keep_weights(layers.parameters())
    write_codes(optimizer)
    assert type(optimizer) is Around
    assert all(torch.equal(p, b) for p, b in zip(layers.parameters(), before, strict=True))
    with pytest.raises(NarrowgateError, match=r"holds another optimizer \('inners', Adam\), expected that one itself"):
        lower_state(optimizer, "bf16")
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


@kernel_test
def test_an_optimizer_that_writes_codes_is_missed_where_its_state_should_be_lower(recwarn):
    layers = nn.Sequential(nn.Linear(32, 64)).to(DEVICE)
    rules = [Rule(layers="0", all="fp8_e4m3+delayed(4)")]
    apply_recipe(layers, Recipe(name="r", optimizer=OptimizerState(state="bf16+sr"), rules=rules))
    optimizer = Adam(layers.parameters(), fused=True)
    keep_weights(layers.parameters())
    write_codes(optimizer)
    layers(torch.ones(8, 32, device=DEVICE)).sum().backward()
    optimizer.step()
    assert any("asks for optimizer state in bf16+sr, this Adam keeps its own" in str(w.message) for w in recwarn.list)


def test_only_weights_of_one_set_of_codes_are_kept_with_a_history(monkeypatch):
    monkeypatch.setattr(casting, "kernels_on_cpu", lambda: True)
    weight, delayed = nn.Parameter(torch.ones(8, 16)), "fp8_e4m3+delayed(3)"

    def found(fprop: str, dgrad: str, weight: Tensor = weight) -> bool:
        history = AmaxHistory(3)
        kept = kept_history(config(fprop, dgrad), weight, {("fprop", "weight"): history})
        assert kept in (None, history)
        return kept is history

    assert found(delayed, delayed)
    assert not found(delayed, "fp8_e5m2+delayed(3)")
    assert not found(delayed, "fp8_e4m3")
    assert not found("fp8_e4m3", "fp8_e4m3")
    assert not found("fp8_e4m3+sr+delayed(3)", "fp8_e4m3+sr+delayed(3)")
    assert not found("fp8_e4m3+delayed(3)+clip(rms=2)", "fp8_e4m3+delayed(3)+clip(rms=2)")
    assert not found(delayed, delayed, torch.ones(8, 16))


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
