"""The training loop: repeatable, resumable to the bit, with accumulation, clipping, compilation, recomputation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from narrowgate.models import Batch, GemTask, LoopOptions, Preset, Trainer
from narrowgate.models.checkpointing import MODES, checkpoint_activations
from narrowgate.precision import casting
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.layer import LowPrecisionLayer, layer_state
from narrowgate.recipes import OptimizerState, Recipe
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def trainer(task: GemTask, seed: int = 1, recipe: str | Recipe | None = None, **options: Any) -> Trainer:
    return Trainer(task, seed=seed, recipe=recipe, options=LoopOptions(**options))


def weights(found: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in found.model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def test_a_seed_repeats_a_training_bit_for_bit(task: GemTask) -> None:
    once, again = trainer(task, deterministic=True), trainer(task, deterministic=True)
    assert once.fit() == again.fit()
    assert equal(weights(once), weights(again))
    assert once.step == once.total_steps == 12
    assert trainer(task, seed=2).fit() != once.losses
    assert not torch.are_deterministic_algorithms_enabled()


def test_steps_of_a_training_that_was_stopped_count(task: GemTask, tmp_path: Path) -> None:
    whole = trainer(task).fit()
    stopped = trainer(task)
    step = stopped._step

    def until_five(number: int, batches: Any) -> torch.Tensor:
        if number == 5:
            raise KeyboardInterrupt
        return step(number, batches)

    stopped._step = until_five  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stopped.fit()
    assert stopped.losses == whole[:5]
    stopped.save(tmp_path / "run.pt")
    other = trainer(task)
    other.resume(tmp_path / "run.pt")
    assert other.fit() == whole


def test_a_checkpoint_goes_on_with_its_own_rows_and_options(small: Preset, tmp_path: Path) -> None:
    run = trainer(GemTask.open(small, "synthetic", steps=4))
    run.fit(2)
    path = tmp_path / "run.pt"
    run.save(path)
    synthetic = dataclasses.replace(small.synthetic, seed=7)
    others = [
        (
            trainer(GemTask.open(dataclasses.replace(small, synthetic=synthetic), "synthetic", steps=4)),
            "data synthetic",
        ),
        (trainer(GemTask.open(small, "synthetic", steps=4), clip_norm=0.1), "clip_norm None, here 0.1"),
        (trainer(GemTask.open(small, "synthetic", steps=4), bf16=True), "bf16 False, here True"),
    ]
    for other, message in others:
        with pytest.raises(NarrowgateError, match=message):
            other.resume(path)
        assert other.step == 0
    torch.save({"version": torch.load(path, weights_only=True)["version"]}, path)
    with pytest.raises(NarrowgateError, match="is none of this version's trainings"):
        run.resume(path)


LOW_STATE = Recipe(name="low-state", extends="fp8-tensor", optimizer=OptimizerState(state="fp8_e4m3/1x32+sr"))


@pytest.mark.parametrize(
    "recipe", [None, "fp8-delayed", "gem-fp8", LOW_STATE], ids=["none", "fp8-delayed", "gem-fp8", "state"]
)
def test_a_resumed_training_gives_the_same_bits(recipe: str | Recipe | None, small: Preset, tmp_path: Path) -> None:
    # Dropout, rowwise Adagrad and, with a recipe, histories and stochastic rounding: all have to come back.
    training = dataclasses.replace(small.training, table_lr=0.05)
    model = dataclasses.replace(small.model, d=32, fm_hidden=(64,), dropout=0.3)
    task = GemTask.open(dataclasses.replace(small, training=training, model=model), "synthetic", steps=8)
    whole = trainer(task, recipe=recipe)
    whole.fit()
    half = trainer(task, recipe=recipe)
    half.fit(5)
    half.save(tmp_path / "run.pt")
    torch.manual_seed(99)
    other = trainer(task, recipe=recipe)
    other.resume(tmp_path / "run.pt")
    assert other.step == 5
    assert other.fit() == whole.losses
    assert equal(weights(other), weights(whole))
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_stopping_and_going_on_changes_nothing(task: GemTask) -> None:
    whole, parts = trainer(task), trainer(task)
    whole.fit(every=5)
    for until in (1, 4, 12):
        parts.fit(until)
    assert parts.losses == whole.losses


def test_global_generators_are_left_alone(task: GemTask) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    trainer(task).fit(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_accumulation_averages_the_gradients_of_its_batches(task: GemTask) -> None:
    found = trainer(task, accumulate=3, clip_norm=1e9)
    assert found.total_steps == 4
    model = task.build_model()
    model.load_state_dict(found.model.state_dict())
    for module in (model, found.model):
        for part in module.modules():
            if hasattr(part, "config"):
                part.config = dataclasses.replace(part.config, dropout=0.0)
    losses = [task.loss(model, batch) for batch in list(task.train_batches(1))[:3]]
    torch.stack(losses).mean().backward()
    found.fit(1)
    assert found.losses[0] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
    for name, parameter in found.model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, dict(model.named_parameters())[name].grad, rtol=1e-4, atol=1e-6, msg=name
        )


def test_clipping_bounds_the_gradient_norm(task: GemTask) -> None:
    norms = []
    for limit in (None, 1e-3):
        found = trainer(task, clip_norm=limit)
        found.fit(1)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in found.model.parameters()]).item())
    assert norms[0] > 1e-2
    assert norms[1] == pytest.approx(1e-3, rel=1e-3)


def test_training_lowers_the_loss_and_prediction_covers_the_held_out_rows(small: Preset) -> None:
    task = GemTask.open(small, "synthetic", steps=60)
    found, seen = trainer(task), []
    losses = found.fit(watch=lambda step, total, loss: seen.append((step, total, loss)))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert seen == [(20, 60, losses[19]), (40, 60, losses[39]), (60, 60, losses[59])]
    prediction = found.predict()
    assert prediction.logits.shape == prediction.labels.shape == (120, 2)
    assert not prediction.logits.requires_grad


def test_bf16_autocast_reaches_the_products(task: GemTask) -> None:
    found = trainer(task, bf16=True)
    seen: list[torch.dtype] = []
    layer = found.model.get_submodule("layers.0.interaction.out")
    assert isinstance(layer, nn.Linear)
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    assert torch.tensor(found.fit(2)).isfinite().all()
    assert seen == [torch.bfloat16] * 2


@pytest.mark.parametrize("mode", MODES)
def test_recomputed_regions_give_the_same_losses_with_fewer_saved_bytes(mode: str, task: GemTask) -> None:
    saved = {}
    losses = {}
    for name, regions in {"none": {}, "some": {"interaction": mode, "sequence": mode, "cross": mode}}.items():
        found = trainer(task, checkpoint=regions)
        losses[name] = found.fit(4)
        saved[name] = saved_bytes(found.model, next(iter(task.train_batches(0))), task)
    assert losses["some"] == losses["none"]
    assert saved["some"] < 0.7 * saved["none"]


def saved_bytes(model: nn.Module, batch: Batch, task: GemTask) -> int:
    """Bytes that autograd holds between forward and backward, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        task.loss(model, batch).backward()
    return sum(held.values())


@pytest.mark.parametrize("recipe", ["fp8-delayed", "gem-fp8"])
def test_recomputation_under_a_recipe_repeats_its_rounding(recipe: str, small: Preset) -> None:
    model = dataclasses.replace(small.model, d=32, fm_hidden=(64,))
    task = GemTask.open(dataclasses.replace(small, model=model), "synthetic", steps=4)
    regions = {"interaction": "all", "sequence": "pointwise"}
    assert trainer(task, recipe=recipe, checkpoint=regions).fit() == trainer(task, recipe=recipe).fit()


KEPT = Recipe(name="kept", extends="gem-fp8", optimizer=OptimizerState(state="bf16+sr", keep_weights=True))


def passes(found: Trainer) -> list[int | None]:
    """How often the optimizer wrote each lowered layer's codes in its own pass; None where it keeps none."""
    states = [layer_state(module) for module in found.model.modules() if isinstance(module, LowPrecisionLayer)]
    return [None if state.kept is None else state.kept.passes for state in states]


def test_weights_are_kept_where_the_recipe_says_so_and_train_the_same(
    small: Preset, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    task = GemTask.open(dataclasses.replace(small, model=wide(small)), "synthetic", steps=4)
    plain = trainer(task, recipe="gem-fp8")
    with monkeypatch.context() as patch:
        patch.setattr(casting, "kernels_on_cpu", lambda: True)
        kept, overruled = trainer(task, recipe=KEPT), trainer(task, recipe="gem-fp8", accumulate=2)
    assert len(passes(kept)) > 4
    assert set(passes(kept)) == {0}
    assert set(passes(plain)) == set(passes(overruled)) == {None}
    assert kept.fit() == plain.fit()
    assert equal(weights(kept), weights(plain))
    # A CPU itself casts nothing that could be saved, and says nothing of it.
    assert set(passes(trainer(task, recipe=KEPT))) == {None}
    assert not [warning for warning in recwarn.list if "keep_weights" in str(warning.message)]


class Products(TorchDispatchMode):
    """Counts the products of a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = func.name().partition("::")[2].partition(".")[0] in ("mm", "addmm", "bmm", "weight_product")
        self.count += product and torch._C._current_graph_task_id() != -1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", [None, "gem-fp8", KEPT], ids=["none", "gem-fp8", "kept"])
def test_only_where_all_is_recomputed_are_products(
    recipe: str | Recipe | None, small: Preset, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = GemTask.open(dataclasses.replace(small, model=wide(small)), "synthetic", steps=4)
    monkeypatch.setattr(casting, "kernels_on_cpu", lambda: True)
    counted = {}
    for mode in (None, *MODES):
        run = trainer(task, recipe=recipe, checkpoint={} if mode is None else {"interaction": mode})
        run.fit(1)
        with Products() as products:
            task.loss(run.model, next(iter(task.train_batches(0)))).backward()
        counted[mode] = products.count
    assert 0 < counted[None] == counted["pointwise"] < counted["all"]


@pytest.mark.gpu
def test_on_a_gpu_a_recipe_trains_the_same_with_weights_that_adam_quantized(small: Preset) -> None:
    task = GemTask.open(dataclasses.replace(small, model=wide(small)), "synthetic", device="cuda", steps=6)
    kept, plain = (trainer(task, recipe=recipe, deterministic=True) for recipe in (KEPT, "gem-fp8"))
    assert kept.fit() == plain.fit()
    assert set(passes(plain)) == {None}
    # Not the first step, in which Adam makes its state.
    assert set(passes(kept)) == {5}


def wide(small: Preset) -> Any:
    """A model with layers that gem-fp8 lowers."""
    return dataclasses.replace(small.model, d=32, fm_hidden=(64,))


def test_recomputation_compiles_whole(small: Preset) -> None:
    shallow = dataclasses.replace(small, model=dataclasses.replace(small.model, layers=1))
    task = GemTask.open(shallow, "synthetic")
    batch = next(iter(task.train_batches(0)))
    model = task.build_model().eval()
    expected = torch.autograd.grad(task.loss(model, batch), list(model.parameters()))
    checkpoint_activations(model, {"interaction": "pointwise", "sequence": "all"})
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(task.loss(compiled, batch), list(model.parameters()))
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-6)


def test_a_compiled_training_runs_within_its_memory_budget(small: Preset, monkeypatch: pytest.MonkeyPatch) -> None:
    shallow = dataclasses.replace(small, model=dataclasses.replace(small.model, layers=1, dropout=0.0))
    task = GemTask.open(shallow, "synthetic", steps=3)
    budgets = []

    def compiled(model: nn.Module) -> Any:
        # That the model compiles is tested elsewhere: here it counts that the loop runs what comes out, and when.
        def forward(batch: Batch) -> Any:
            budgets.append(functorch.activation_memory_budget)
            return model(batch)

        return forward

    monkeypatch.setattr(torch, "compile", compiled)
    found = trainer(task, compiled=True, memory_budget=0.3).fit()
    assert found == trainer(task).fit()
    assert budgets == [0.3] * 3
    assert functorch.activation_memory_budget == 1.0


@pytest.mark.gpu
def test_deterministic_losses_repeat_on_a_gpu(small: Preset) -> None:
    task = GemTask.open(small, "synthetic", device="cuda", steps=100)
    assert trainer(task, deterministic=True).fit() == trainer(task, deterministic=True).fit()


def test_what_cannot_be_is_said(task: GemTask, tmp_path: Path) -> None:
    with pytest.raises(NarrowgateError, match="'accumulate' must be at least 1, found 0"):
        LoopOptions(accumulate=0)
    with pytest.raises(NarrowgateError, match="'memory_budget' needs compiled=True"):
        LoopOptions(memory_budget=0.5)
    with pytest.raises(NarrowgateError, match="unknown region 'interactions'; did you mean 'interaction'"):
        trainer(task, checkpoint={"interactions": "all"})
    with pytest.raises(NarrowgateError, match="region 'cross' is one of all, pointwise, found 'every'"):
        trainer(task, checkpoint={"cross": "every"})
    with pytest.raises(NarrowgateError, match="found 12 batches, expected at least 13"):
        trainer(task, accumulate=13)
    with pytest.raises(NarrowgateError, match="no layers in this Linear"):
        checkpoint_activations(nn.Linear(2, 2), {})
    with pytest.raises(NarrowgateError, match="does not exist"):
        trainer(task).resume(tmp_path / "none.pt")
    (tmp_path / "bad.pt").write_text("no checkpoint")
    with pytest.raises(NarrowgateError, match="cannot be read"):
        trainer(task).resume(tmp_path / "bad.pt")
    trainer(task).save(tmp_path / "one.pt")
    with pytest.raises(NarrowgateError, match="of another training: seed 1, here 2"):
        trainer(task, seed=2).resume(tmp_path / "one.pt")


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("model", {"first_order": True}, "model.first_order False, here True"),
        ("training", {"first_order_lr": 0.5}, "training.first_order_lr 0.1, here 0.5"),
        ("training", {"betas": (0.9, 0.999)}, r"training.betas \(0.9, 0.98\), here \(0.9, 0.999\)"),
        ("training", {"eval_batch_size": 7}, None),
        ("model", {"residual": "autocast"}, None),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_by_the_setting(
    part: str, changes: dict[str, Any], message: str | None, small: Preset, tmp_path: Path
) -> None:
    trainer(GemTask.open(small, "synthetic")).save(tmp_path / "one.pt")
    other = dataclasses.replace(small, **{part: dataclasses.replace(getattr(small, part), **changes)})
    again = trainer(GemTask.open(other, "synthetic"))
    if message is None:
        again.resume(tmp_path / "one.pt")
    else:
        with pytest.raises(NarrowgateError, match=message):
            again.resume(tmp_path / "one.pt")


def test_a_checkpoint_from_before_settings_were_kept_is_read(task: GemTask, tmp_path: Path) -> None:
    trainer(task).save(tmp_path / "one.pt")
    state = torch.load(tmp_path / "one.pt", weights_only=True)
    state["facts"] = {name: value for name, value in state["facts"].items() if "." not in name}
    torch.save(state, tmp_path / "one.pt")
    trainer(task).resume(tmp_path / "one.pt")
