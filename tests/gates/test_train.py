from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates import batches, train
from narrowgate.gates.batches import (
    Checksum,
    fingerprint,
    length,
    mixed_words,
    tensors,
    to_device,
    weights_fingerprint,
)
from narrowgate.gates.compilation import honest_compilation
from narrowgate.gates.pairs import Pairing, combine, refuse_copies, summarise
from narrowgate.gates.policy import StabilityLimits
from narrowgate.gates.stability import stability
from narrowgate.gates.task import TaskSource, load_task, task_names
from narrowgate.gates.train import Arm, RunError, gradient_norm
from narrowgate.precision.errors import NarrowgateError
from narrowgate.recipes import load_recipe
from torch import nn

CPU = torch.device("cpu")
LIMITS = StabilityLimits()


def quiet(step: int, steps: int | None, loss: float) -> None:
    pass


@pytest.fixture
def task(room: Path) -> Any:
    return load_task("ranker:good")


def test_both_arms_start_alike_and_the_recipe_changes_the_outcome(task) -> None:
    runs = [Arm(task, CPU, recipe, steps=20).train(3, quiet) for recipe in (None, load_recipe("all-fp8.yaml"))]
    assert runs[0].weights == runs[1].weights
    assert runs[0].first_batch == runs[1].first_batch
    assert runs[0].losses[0] == pytest.approx(runs[1].losses[0], rel=0.05)
    assert not np.array_equal(runs[0].losses, runs[1].losses)


def test_a_recipe_that_changes_nothing_gives_identical_arms(task) -> None:
    runs = [Arm(task, CPU, recipe, steps=20).train(3, quiet) for recipe in (None, load_recipe("bf16"))]
    np.testing.assert_array_equal(runs[0].losses, runs[1].losses)
    np.testing.assert_array_equal(runs[0].logits, runs[1].logits)


def test_seeds_differ_in_weights_batches_and_dropout(task) -> None:
    first, second = (Arm(task, CPU, steps=5).train(seed, quiet) for seed in (0, 1))
    assert first.weights != second.weights
    assert first.first_batch != second.first_batch
    assert first.labels is not None
    np.testing.assert_array_equal(first.labels, second.labels)


def test_an_arm_starts_afresh_whatever_it_trained_before(task) -> None:
    arm = Arm(task, CPU, load_recipe("all-fp8.yaml"), steps=10)
    first = arm.train(0, quiet)
    arm.train(1, quiet)
    np.testing.assert_array_equal(arm.train(0, quiet).losses, first.losses)


def test_steps_end_the_training_and_are_watched(task) -> None:
    seen = []
    Arm(task, CPU, steps=7).train(0, lambda step, steps, loss: seen.append((step, steps)))
    assert seen[0] == (1, 7)
    assert seen[-1] == (7, 7)


def test_training_stops_at_a_loss_that_is_not_finite(room: Path) -> None:
    arm = Arm(load_task("ranker:nan_at_step_50"), CPU, load_recipe("all-fp8.yaml"))
    run = arm.train(0, quiet)
    assert len(run.losses) == 50
    assert run.logits is None
    found = stability(run.losses, run.gradient_norms, LIMITS)
    assert (found.first_non_finite, found.non_finite_losses) == (50, 1)


def test_reinitialising_in_place_equals_building_anew(task) -> None:
    from narrowgate.gates.model_state import copy_state
    from narrowgate.gates.train import seed_generators

    seed_generators(0)
    live = task.build_model()
    seed_generators(1)
    fresh = task.build_model()
    copy_state(fresh, live)
    assert weights_fingerprint(live) == weights_fingerprint(fresh)
    with pytest.raises(RunError, match="another shape"):
        copy_state(nn.Linear(2, 3), nn.Linear(2, 4))


def test_rows_of_a_pair_give_the_interval_of_their_mean(task) -> None:
    pairing = Pairing(task, LIMITS)
    arms = [Arm(task, CPU, recipe, steps=30) for recipe in (None, load_recipe("all-fp8.yaml"))]
    pairs = [pairing.pair(*(arm.train(seed, quiet) for arm in arms)) for seed in (0, 1)]
    rows = combine(pairs)
    assert rows is not None
    quality: list[Any] = [(p.run.baseline.quality["click"], p.run.candidate.quality["click"]) for p in pairs]
    loss = np.mean([c.log_loss for _, c in quality]) / np.mean([b.log_loss for b, _ in quality]) - 1
    auc = np.mean([b.auc - c.auc for b, c in quality])
    assert rows.ne["click"].mean == pytest.approx(loss, rel=1e-9)
    assert rows.auc["click"].mean == pytest.approx(auc, rel=1e-9)
    assert rows.clusters == rows.ne["click"].df + 1 == 500


def test_seeds_that_repeat_one_training_are_refused_as_one_observation(task) -> None:
    """A task that seeds its weights itself and reads its data in one order has an interval of no width."""
    draw, build = task.train_batches, task.build_model

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        model = build()
        model.dropout.p = 0.0  # else masks would tell seeds apart
        return model

    pairing = Pairing(task, LIMITS)
    arms = [Arm(task, CPU, recipe, steps=5) for recipe in (None, load_recipe("all-fp8.yaml"))]

    def pairs() -> list[Any]:
        return [pairing.pair(*(arm.train(seed, quiet) for arm in arms)) for seed in (0, 1)]

    task.build_model = seeded
    refuse_copies(pairs())  # the batches still follow the seed
    task.train_batches = lambda seed: draw(0)
    with pytest.raises(RunError, match=r"seeds 0 and 1 trained the same baseline to the bit, .* one observation"):
        refuse_copies(pairs())


def test_gradient_norms_see_what_is_not_finite_and_count_sparse_gradients() -> None:
    model: Any = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    model(torch.tensor([0, 1])).sum().backward()
    sparse, dense = model[0].weight.grad, [p.grad for p in model[1].parameters()]
    assert sparse is not None
    expected = torch.cat([sparse.coalesce().values().flatten(), *(g.flatten() for g in dense if g is not None)]).norm()
    assert gradient_norm(model) == pytest.approx(float(expected))
    assert dense[0] is not None
    dense[0][0, 0] = float("inf")
    assert not torch.isfinite(gradient_norm(model))


def test_a_model_without_gradients_is_said_so() -> None:
    with pytest.raises(NarrowgateError, match="no parameter has a gradient"):
        gradient_norm(nn.Linear(2, 2))


def test_spikes_are_told_from_noise() -> None:
    rng = np.random.default_rng(0)
    losses = 0.6 + 0.05 * rng.standard_normal(200)
    norms = np.ones(200)
    assert stability(losses, norms, LIMITS).spikes == 0
    losses[[30, 150]] = 1.5
    found = stability(losses, norms, LIMITS)
    assert (found.spikes, found.first_spike) == (2, 31)
    assert stability(losses[:10], norms[:10], LIMITS).spikes == 0


def test_losses_are_summarised_by_their_ends_and_a_short_curve() -> None:
    summary = summarise(np.linspace(1, 0, 1000))
    assert summary.first == pytest.approx(0.95, abs=0.01)
    assert summary.last == pytest.approx(0.05, abs=0.01)
    assert len(summary.curve) == 100
    assert summary.curve[-1][0] == 1000
    assert summarise(np.array([0.5])).curve == ((1, 0.5),)
    assert summarise(np.array([0.5, np.nan])).last is None


class Plain:
    def __init__(self) -> None:
        self.x = torch.ones(2)


def test_tensors_are_found_in_batches_of_any_shape() -> None:
    from collections import namedtuple
    from dataclasses import dataclass

    Pair = namedtuple("Pair", "a b")

    @dataclass
    class Record:
        x: torch.Tensor
        n: int

    batch = {"p": Pair(torch.ones(1), [torch.zeros(2), 3]), "r": Record(torch.ones(3), 4), "s": "text", "o": Plain()}
    assert [t.numel() for t in tensors(batch) if t.is_floating_point()] == [1, 2, 3, 2]
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["p"], Pair)
    assert moved["p"].a.is_meta
    assert moved["p"].b[0].is_meta
    assert moved["r"].x.is_meta
    assert moved["r"].n == 4
    assert moved["s"] == "text"
    assert fingerprint(tensors(batch)) != fingerprint([torch.ones(1)])


def test_whatever_differs_in_a_batch_is_told_from_it() -> None:
    x = np.arange(6.0)
    objects = np.array(["a", 1, None], dtype=object)
    every = [
        x, x.astype(np.float32), x.reshape(2, 3), x + 1, x[::-1], x.astype(">f8"), x.astype("M8[s]"), np.float32(1),
        np.array(["a", "b"]), np.array(["a", "c"]), objects, objects[::-1], torch.tensor(x), "a", b"a", 1, 1.0, True,
        "1", [1, 2], [2, 1], {"a": 3}, {"a": 4}, np.zeros(0), 2**70, "\udc80", np.array([(1, 2.0)], dtype="i4,f8"),
    ]  # fmt: skip
    found = [fingerprint(tensors([part])) for part in every]
    assert len(set(found)) == len(every)
    assert found == [fingerprint(tensors([part])) for part in every]
    counted = Checksum()
    counted.add(tensors(every))
    assert counted.result() != Checksum().result()


def test_padding_and_addresses_are_no_data() -> None:
    fields = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    raw = [np.frombuffer(bytearray([fill] * 2 * fields.itemsize), fields) for fill in (0, 255)]
    for array in raw:
        array["a"], array["b"] = 1, 2.0
    assert raw[0].tobytes() != raw[1].tobytes()
    assert fingerprint(tensors(raw[0])) == fingerprint(tensors(raw[1]))
    named = [np.array([("".join(["a", "b"]), 1)], dtype=[("s", object), ("n", "i8")]) for _ in range(2)]
    assert fingerprint(tensors(named[0])) == fingerprint(tensors(named[1]))
    named[1]["s"] = "ac"
    assert fingerprint(tensors(named[0])) != fingerprint(tensors(named[1]))


def test_what_an_object_computes_on_its_first_use_is_no_data() -> None:
    batch = Plain()
    before = fingerprint(tensors([batch]))
    vars(batch)["lengths"] = [1, 2, {"most": 3}]
    assert fingerprint(tensors([batch])) == before
    vars(batch)["more"] = [torch.ones(1)]
    assert fingerprint(tensors([batch])) != before


def test_numbers_in_a_row_are_one_tensor_and_keep_their_ends() -> None:
    assert len(list(tensors(list(range(10_000))))) == 1
    assert fingerprint(tensors(["ab", "c"])) != fingerprint(tensors(["a", "bc"]))
    read_only = np.arange(4.0)
    read_only.flags.writeable = False
    assert fingerprint(tensors(read_only)) == fingerprint(tensors(read_only.copy()))


def test_what_an_object_says_of_itself_is_no_data() -> None:
    first, second = Plain(), Plain()
    vars(second)["made_at"] = "another time"
    assert fingerprint(tensors(first)) == fingerprint(tensors(second))
    vars(second)["x"] = np.ones(2)
    assert fingerprint(tensors(first)) != fingerprint(tensors(second))


def test_what_a_gpu_hashes_tells_bits_places_and_ends_apart() -> None:
    data = torch.randint(0, 256, (8 * 1000 + 5,), dtype=torch.uint8)
    found = {bytes(mixed_words(data).tolist())}
    assert found == {bytes(mixed_words(data.clone()).tolist())}
    assert mixed_words(data).shape == (8 + 5,)
    for at in (0, 7, 4001, 7999, 8004):
        other = data.clone()
        other[at] ^= 1
        found.add(bytes(mixed_words(other).tolist()))
    swapped = data.clone()
    swapped[:8], swapped[80:88] = data[80:88], data[:8]
    found |= {bytes(mixed_words(d).tolist()) for d in (swapped, torch.zeros(16, dtype=torch.uint8))}
    found |= {bytes(mixed_words(torch.zeros(n, dtype=torch.uint8)).tolist()) for n in (0, 7, 24)}
    assert len(found) == 1 + 5 + 2 + 3
    storage = torch.cat([torch.zeros(3, dtype=torch.uint8), data])
    assert torch.equal(mixed_words(storage[3:]), mixed_words(data)), "wherever it lies"


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 256, (8 * 1000,), dtype=torch.uint8)
    whole = mixed_words(data)
    monkeypatch.setattr(batches, "_CHUNK", 7)
    assert torch.equal(mixed_words(data), whole)


@pytest.mark.gpu
def test_a_gpu_hashes_as_a_cpu_would() -> None:
    data = torch.randint(0, 256, (8 * 1000 + 3,), dtype=torch.uint8)
    assert torch.equal(mixed_words(data.cuda()).cpu(), mixed_words(data))
    linear = nn.Linear(16, 16).cuda()
    before = weights_fingerprint(linear)
    assert weights_fingerprint(linear) == before
    with torch.no_grad():
        linear.weight[3, 4] += 1
    assert weights_fingerprint(linear) != before


def test_lengths_are_known_where_batches_say_them() -> None:
    assert length([1, 2]) == 2
    assert length(x for x in [1]) is None


def test_a_task_source_passes_device_and_steps_to_built_in_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgate.models import GemTask

    monkeypatch.setattr(GemTask, "open", classmethod(lambda cls, **given: given))
    opened = TaskSource(model="gem-small", data="ml-1m:DIR", device="cuda", steps=9).open()
    assert opened == {"model": "gem-small", "data": "ml-1m:DIR", "device": "cuda", "steps": 9}


def test_task_names_must_fit_the_logits() -> None:
    class Named:
        task_names = ("a", "a")

    class Nameless:
        pass

    assert task_names(Nameless(), 1) == ("task",)  # type: ignore[arg-type]
    assert task_names(Nameless(), 2) == ("task0", "task1")  # type: ignore[arg-type]
    with pytest.raises(NarrowgateError, match="expected 2 different names"):
        task_names(Named(), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", [None, "all-fp8.yaml", "stochastic.yaml"])
def test_an_arm_is_compiled_once_and_every_seed_starts_afresh(
    room: Path, compile_by: Callable[..., None], recipe: str | None
) -> None:
    text = (room / "all-fp8.yaml").read_text()
    (room / "stochastic.yaml").write_text(text.replace("grad: fp8_e5m2", "grad: fp8_e5m2+sr"))
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_by(backend)
    loaded = None if recipe is None else load_recipe(recipe)
    arm = train.Arm(load_task("ranker:good"), CPU, loaded, steps=10, compiled=True)
    with honest_compilation():
        first = arm.train(0, quiet)
        built = len(graphs)
        other = arm.train(1, quiet)
        again = arm.train(0, quiet)
    assert len(graphs) == built
    np.testing.assert_array_equal(first.losses, again.losses)
    np.testing.assert_array_equal(first.logits, again.logits)
    assert first.weights == again.weights != other.weights
    eager = train.Arm(load_task("ranker:good"), CPU, loaded, steps=10)
    np.testing.assert_allclose(eager.train(0, quiet).losses, first.losses, rtol=1e-5 if recipe is None else 1e-2)
    assert eager.train(1, quiet).weights == other.weights
    arm.discard()
    assert arm._model is None


@pytest.mark.gpu
def test_on_a_gpu_an_arm_is_compiled_once_and_repeats_itself(room: Path) -> None:
    device = torch.device("cuda")
    arm = train.Arm(load_task("ranker:good"), device, load_recipe("all-fp8.yaml"), steps=20)
    first = arm.train(0, quiet)
    compiled = arm._callable
    arm.train(1, quiet)
    again = arm.train(0, quiet)
    assert arm._callable is compiled
    assert first.weights == again.weights
    np.testing.assert_allclose(first.losses, again.losses, rtol=1e-2)
    assert first.peak_memory is not None
    arm.park()
