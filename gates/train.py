"""Training one arm: the same weights, batches and dropout for a seed, whichever arm it is.

On a GPU an arm's model is compiled once and re-initialised in place for every seed and for timing, so that
compilation is paid once an arm. Nothing waits for the device inside a step: losses and gradient norms stay there and
are fetched in bulk.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..precision.errors import NarrowgateError
from .arithmetic import Arithmetic
from .batches import Checksum, fingerprint, length, tensors, to_device, weights_fingerprint
from .compilation import compile_model
from .model_state import RunError as RunError
from .model_state import copy_state, gradient_norm, hyperparameters
from .predictions import Predicted, predict
from .rows import rows_for
from .stability import NOT_OBSERVED, Observed
from .task import Task, holds_some, make_optimizer
from .tensor_watch import TensorWatch

if TYPE_CHECKING:
    from ..recipes.plan import Plan
    from ..recipes.recipe import Recipe

#: Called with (step, steps or None, loss) from time to time.
Watch = Callable[[int, "int | None", float], None]

#: Steps between two fetches from a GPU; on a CPU every step is at hand anyway.
_FETCH_EVERY = 20
#: A draw is numbered optimizer step * 2**32 + forward: room for 2**20 steps a seed.
_DRAWS_A_SEED_BITS = 52


@dataclass(frozen=True)
class Trained:
    """What one training of one arm left behind, on the host."""

    seed: int
    #: Hash of the initial weights, before any recipe, and of the first batch: equal for both arms of a seed.
    weights: str
    first_batch: str
    #: Checksums of all batches that it took, and of those that it predicted.
    batches: str
    held_out: str
    #: [steps] float64 each: training loss and total gradient norm.
    losses: NDArray[np.float64]
    gradient_norms: NDArray[np.float64]
    #: [rows, tasks] float64; None where training stopped at a loss or gradient that was not finite.
    logits: NDArray[np.float64] | None
    #: [rows, tasks], [rows] and [rows]; None where there are none (or no predictions).
    labels: NDArray[np.float64] | None
    row_weights: NDArray[np.float64] | None
    groups: NDArray[np.int64] | None
    #: By the slice's name, [rows] bool.
    slices: dict[str, NDArray[np.bool_]]
    peak_memory: int | None
    seconds: float
    first_step_seconds: float
    #: Part of ``seconds`` that predicting the held-out rows took.
    evaluation_seconds: float = 0.0
    #: The optimizer's hyperparameters by parameter group after the first and after the last step.
    optimizer: tuple[dict[str, Any], ...] = ()
    observed: Observed = NOT_OBSERVED
    #: Taken from disk (:mod:`narrowgate.gates.resume`), and what that had to tell.
    reused: bool = False
    notes: tuple[str, ...] = ()


@dataclass
class _Fit:
    """What :meth:`Arm._fit` hands back."""

    losses: NDArray[np.float64]
    norms: NDArray[np.float64]
    first_batch: str
    batches: str
    first_step_seconds: float
    optimizer: tuple[dict[str, Any], ...]
    #: Allocator peak in bytes, without the passes that only count.
    peak: int | None


@dataclass
class Arm:
    """One arm's model, compiled where the device is a GPU, ready to be trained seed after seed.

    Attributes:
        recipe: the candidate's recipe; None for the baseline.
        backend: overrides the recipe's backend.
        steps: at most so many training steps a seed; None for all batches.
        compiled: compile once and re-initialise in place; None is on a GPU only.
        observe_every: how often tensors are watched (:mod:`narrowgate.gates.stability`); None is never.
        fused_bf16: what the recipe would quantize is written in BF16 instead, by the same fused kernels.
    """

    task: Task
    device: torch.device
    recipe: Recipe | None = None
    backend: str | None = None
    steps: int | None = None
    compiled: bool | None = None
    observe_every: int | None = None
    fused_bf16: bool = False
    _model: nn.Module | None = None
    _callable: Any = None
    _plan: Plan | None = None
    _fresh_state: Any = None

    def __post_init__(self) -> None:
        if self.compiled is None:
            self.compiled = self.device.type == "cuda"

    def train(self, seed: int, watch: Watch) -> Trained:
        """Train from scratch under ``seed`` and predict the held-out rows.

        Raises:
            RunError: the task has no batches, or contradicts itself.
            NarrowgateError: the recipe or what the task returns cannot be used.
        """
        weights = self.start(seed)
        self._reset_peak()
        started = time.perf_counter()
        tensors_watch = self._tensor_watch()
        fit = self._fit(seed, watch, tensors_watch)
        broken = not (np.isfinite(fit.losses).all() and np.isfinite(fit.norms).all())
        assert self._model is not None
        # Not the compiled one: a second graph an arm costs a minute to compile, for some batches.
        begun = time.perf_counter()
        predicted = Predicted() if broken else self._predicted(self._model)
        ended = time.perf_counter()
        return Trained(
            seed=seed,
            weights=weights,
            first_batch=fit.first_batch,
            batches=fit.batches,
            held_out=predicted.seen,
            losses=fit.losses,
            gradient_norms=fit.norms,
            logits=predicted.logits,
            labels=predicted.labels,
            row_weights=predicted.weights,
            groups=predicted.groups,
            slices=predicted.slices,
            peak_memory=fit.peak,
            seconds=ended - started,
            first_step_seconds=fit.first_step_seconds,
            evaluation_seconds=ended - begun,
            optimizer=fit.optimizer,
            observed=tensors_watch.result(),
        )

    def observe(self, seed: int, watch: Watch) -> tuple[NDArray[np.float64], Observed]:
        """Train under ``seed`` without predicting; return the losses [steps] and what was seen of tensors."""
        self.start(seed)
        tensor_watch = self._tensor_watch()
        return self._fit(seed, watch, tensor_watch).losses, tensor_watch.result()

    def begin(self, seed: int, steps: int) -> NDArray[np.float64]:
        """Train at most ``steps`` first steps under ``seed``, and predict nothing.

        Returns:
            [2, steps]: losses and gradient norms.
        """
        asked = self.steps
        self.steps = steps if asked is None else min(asked, steps)
        try:
            self.start(seed)
            fit = self._fit(seed, lambda *_: None, TensorWatch(None, False, "only its first steps are run"))
            return np.stack([fit.losses, fit.norms])
        finally:
            self.steps = asked

    def start(self, seed: int) -> str:
        """Put the model into its initial state for ``seed``; return the hash of its weights before any recipe."""
        seed_generators(seed)
        fresh = self.task.build_model()
        if not isinstance(fresh, nn.Module):
            raise NarrowgateError(f"build_model() returned a {type(fresh).__name__}, expected a torch.nn.Module")
        fresh = fresh.to(self.device)
        weights = weights_fingerprint(fresh)
        if self._model is None or not self.compiled:
            self._model = fresh
            if self.recipe is not None:
                self._apply(fresh, self.recipe, seed)
            self._callable = self._prepared(fresh)
        else:
            self._model.to(self.device)
            self._copy_state(fresh, self._model)
        if self._plan is not None and self.compiled:
            self._reset_recipe(seed)
        return weights

    def stepper(self, seed: int) -> Callable[[Any], None]:
        """Return a function that runs one whole optimizer step on a batch, for timing."""
        self.start(seed)
        assert self._model is not None
        self._model.train()
        optimizer, arithmetic = self._optimizer(), self.arithmetic

        def step(batch: Any) -> None:
            optimizer.zero_grad(set_to_none=True)
            with arithmetic.context():
                loss = self.task.loss(self._callable, batch)
            loss.backward()
            optimizer.step()
            self._after_step()

        return step

    def module(self, seed: int) -> nn.Module:
        """Return the model itself in its initial state for ``seed`` and in training mode, for timing parts of it."""
        self.start(seed)
        assert self._model is not None
        return self._model.train()

    def park(self) -> None:
        """Give the device's memory back, so that another arm's peak is its own; what was compiled stays usable."""
        if self._model is not None:
            self._model.zero_grad(set_to_none=True)
            self._model.to("cpu")
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def discard(self) -> None:
        """Drop the model and what was compiled of it; the next training builds them anew."""
        self.park()
        self._model = self._callable = self._plan = self._fresh_state = None

    def batches(self, seed: int) -> tuple[Iterator[Any], int | None]:
        """Return the training batches of a seed, at most ``steps`` of them, and how many there are."""
        source = self.task.train_batches(seed)
        total = length(source)
        if self.steps is not None:
            total = self.steps if total is None else min(total, self.steps)
        return itertools.islice(iter(source), self.steps), total

    def _apply(self, model: nn.Module, recipe: Recipe, seed: int) -> None:
        if self.fused_bf16:
            from ..recipes import apply_fused_bf16

            apply_fused_bf16(model, recipe)
            return
        from ..recipes import apply_recipe

        rows = self._rows(recipe, model)
        self._plan = apply_recipe(model, recipe, backend=self.backend, seed=seed, rows=rows)

    def _optimizer(self) -> Any:
        optimizer = self._made_optimizer()
        return optimizer if self._plan is None else self._plan.wrap_optimizer(optimizer)

    def _tensor_watch(self) -> TensorWatch:
        """Return what watches tensors: gradients in every arm, operands where the native backend quantizes them."""
        if self._plan is None:
            return TensorWatch(self.observe_every, counts=False, why_not="nothing is quantized")
        native = self._plan.backend == "native"
        return TensorWatch(self.observe_every, native, f"backend {self._plan.backend} does not tell")

    def _fit(self, seed: int, watch: Watch, tensor_watch: TensorWatch) -> _Fit:
        assert self._model is not None
        model = self._model
        model.train()
        optimizer, arithmetic = self._optimizer(), self.arithmetic
        # It may hold copies of them. What it holds nothing of and does not move, it does not train.
        strange = not holds_some(optimizer, model)
        before = fingerprint(model.parameters()) if strange else ""
        batches, total = self.batches(seed)
        fetched: list[NDArray[np.float64]] = []
        waiting: list[Tensor] = []
        facts: list[dict[str, Any]] = []
        first_batch, checksum, first_step, peak, started = "", Checksum(), 0.0, None, time.perf_counter()
        fetch_every = _FETCH_EVERY if self.device.type == "cuda" else 1
        step = 0
        seed_generators(self._dropout_seed(seed))

        def loss_of(callable_: Any, batch: Any) -> Tensor:
            with arithmetic.context():
                return self.task.loss(callable_, batch)

        for step, batch in enumerate(batches, 1):
            if step == 1:
                first_batch = fingerprint(tensors(batch))
            checksum.add(tensors(batch))
            batch = to_device(batch, self.device)
            if self.compiled and tensor_watch.due(step):
                peak, begun = self._peak(peak), time.perf_counter()
                with self.eagerly():
                    tensor_watch.probe(step, model, lambda batch=batch: loss_of(model, batch))
                self._reset_peak()
                if step == 1:  # what the first step takes is compilation, not counting
                    started += time.perf_counter() - begun
            optimizer.zero_grad(set_to_none=True)
            with contextlib.nullcontext() if self.compiled else tensor_watch.within(step):
                loss = loss_of(self._callable, batch)
                if loss.numel() != 1:
                    raise NarrowgateError(f"loss() returned a tensor of shape {list(loss.shape)}, expected a scalar")
                loss.backward()
            waiting.append(self._noted(loss.detach().reshape(()), model))
            tensor_watch.gradients(step, model)
            optimizer.step()
            if step == 1 and strange and fingerprint(model.parameters()) == before:
                raise NarrowgateError(
                    "optimizer() returned one that holds none of the model's parameters, and its first step moved "
                    "none, expected one of the parameters of the model that it was given"
                )
            self._after_step()
            if step % fetch_every == 0 or step == 1:
                fetched.append(self._fetched(waiting))
                waiting.clear()
                watch(step, total, float(fetched[-1][-1, 0]))
                if step == 1:
                    first_step = time.perf_counter() - started
                    facts = hyperparameters(optimizer)
                if not np.isfinite(fetched[-1]).all():
                    break
        if waiting:
            fetched.append(self._fetched(waiting))
        if not fetched:
            raise NarrowgateError(f"train_batches({seed}) yielded no batch")
        watch(step, step, float(fetched[-1][-1, 0]))
        values = np.concatenate(fetched)
        return _Fit(
            losses=values[:, 0],
            norms=values[:, 1],
            first_batch=first_batch,
            batches=checksum.result(),
            first_step_seconds=first_step,
            optimizer=(*facts, *hyperparameters(optimizer)),
            peak=self._peak(peak),
        )

    # What an arm of several ranks does in another way: narrowgate.gates.rank_arm.

    @property
    def arithmetic(self) -> Arithmetic:
        """In what the arm computes around its recipe."""
        return Arithmetic.of(self.device)

    def eagerly(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the model itself, not :attr:`_callable`, runs without compiled code."""
        return contextlib.nullcontext()

    def _prepared(self, model: nn.Module) -> Any:
        """Return what is called in training, of a fresh model with its recipe."""
        return compile_model(model) if self.compiled else model

    def _made_optimizer(self) -> Any:
        """Return the task's optimizer, before the recipe has it."""
        assert self._model is not None
        return make_optimizer(self.task, self._model)

    def _rows(self, recipe: Recipe, model: nn.Module) -> dict[str, int] | None:
        return rows_for(recipe, self.task, model)

    def _predicted(self, model: nn.Module) -> Predicted:
        return predict(self.task, model, self.device)

    def _noted(self, loss: Tensor, model: nn.Module) -> Tensor:
        """[2]: what is kept of a step on the device, from which :meth:`_fetched` makes the loss and gradient norm."""
        return torch.stack([loss.float(), gradient_norm(model)])

    def _fetched(self, noted: list[Tensor]) -> NDArray[np.float64]:
        """[steps, 2] on the host: loss and gradient norm of each step."""
        return torch.stack(noted).double().cpu().numpy()

    def _dropout_seed(self, seed: int) -> int:
        # Apart from the seed that drew the weights, so that masks are not a function of them.
        return (seed * 0x9E3779B1 + 0x7F4A7C15) % 2**63

    def _after_step(self) -> None:
        """Do what belongs to a step behind the optimizer's."""

    def _copy_state(self, source: nn.Module, target: nn.Module) -> None:
        copy_state(source, target)

    def _peak(self, before: int | None) -> int | None:
        if self.device.type != "cuda":
            return None
        return max(before or 0, torch.cuda.max_memory_allocated(self.device))

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _reset_recipe(self, seed: int) -> None:
        """Start the recipe's own state (scales, random streams) anew without touching the compiled graph."""
        from ..recipes import load_recipe_state, recipe_state

        assert self._model is not None
        if self._fresh_state is None:
            self._fresh_state = recipe_state(self._model)
        state = copy.deepcopy(self._fresh_state)
        for layer in state["layers"].values():
            # The keys of stochastic rounding are constants of the compiled graph; the counter of draws is not. Seeds
            # draw from far apart.
            layer["draw"] += seed << _DRAWS_A_SEED_BITS
        load_recipe_state(self._model, state)


def seed_generators(seed: int) -> None:
    """Seed every generator that a model or its data may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
