"""Training a built-in model outside of the gates: one loop that can be stopped, saved and taken up again.

Every step draws from a seed of its own, made of the run's seed and the step's number. A run that resumes therefore
needs no state of random generators, and repeats its losses bit for bit on the same machine (with ``deterministic`` on
a GPU too).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..precision.errors import NarrowgateError
from .batch import Batch
from .checkpointing import checkpoint_activations
from .optimizers import scheduled_optimizer
from .prediction import Prediction
from .task import GemTask

if TYPE_CHECKING:
    from ..recipes.plan import Plan
    from ..recipes.recipe import Recipe

_VERSION = 2
#: What a checkpoint holds, beside its version.
_PARTS = frozenset({"facts", "losses", "model", "optimizer", "recipe"})
#: Fields of a preset that a training may go on with another value of: how it is computed, and how long it takes.
_FREE = ("attention", "residual", "token_multiple", "eval_batch_size", "steps", "epochs")
#: Called with the number of steps done, of all steps, and the last loss.
Watch = Callable[[int, int, float], None]


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How a training runs; its sizes and rates come with the preset.

    Raises:
        NarrowgateError: a value out of range.
    """

    #: BF16 autocast; None where the device is a GPU.
    bf16: bool | None = None
    #: Largest total gradient norm; gradients above are scaled down to it.
    clip_norm: float | None = None
    #: Batches whose gradients one optimizer step averages.
    accumulate: int = 1
    compiled: bool = False
    #: Only algorithms that repeat their bits; slower on a GPU.
    deterministic: bool = False
    #: Mode by region: see :func:`narrowgate.models.checkpointing.checkpoint_activations`.
    checkpoint: Mapping[str, str] = field(default_factory=dict)
    #: Share of the activations that compiled code may keep (``torch.compile``'s own budget); None leaves it alone.
    memory_budget: float | None = None

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise NarrowgateError(f"training option 'accumulate' must be at least 1, found {self.accumulate}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise NarrowgateError(f"training option 'clip_norm' must be positive or none, found {self.clip_norm}")
        if self.memory_budget is not None and not 0 <= self.memory_budget <= 1:
            raise NarrowgateError(f"training option 'memory_budget' must lie in [0, 1], found {self.memory_budget}")
        if self.memory_budget is not None and not self.compiled:
            raise NarrowgateError(
                "training option 'memory_budget' needs compiled=True: only torch.compile plans memory"
            )


class Trainer:
    """One training of one model under one seed.

    Args:
        task: model, data and rates.
        seed: decides initial weights, the order of batches and dropout.
        options: how to run.
        recipe: applied to the model; None for the baseline.
        backend: overrides the recipe's backend.

    Raises:
        NarrowgateError: the recipe or an option cannot be used, or fewer batches than one optimizer step takes.
    """

    def __init__(
        self,
        task: GemTask,
        *,
        seed: int = 0,
        options: LoopOptions | None = None,
        recipe: str | Recipe | None = None,
        backend: str | None = None,
    ) -> None:
        self.task = task
        self.seed = seed
        self.options = options or LoopOptions()
        #: Optimizer steps of the whole training.
        self.total_steps = task.steps // self.options.accumulate
        if not self.total_steps:
            raise NarrowgateError(f"found {task.steps} batches, expected at least {self.options.accumulate} for a step")
        #: Loss of every step so far.
        self.losses: list[float] = []
        self.plan: Plan | None = None
        with _generators(task.device), self._determinism():
            torch.manual_seed(seed)
            self.model: nn.Module = task.build_model()
        if recipe is not None:
            from ..recipes import apply_recipe

            self.plan = apply_recipe(self.model, recipe, backend=backend, seed=seed)
        if self.options.checkpoint:
            checkpoint_activations(self.model, self.options.checkpoint)
        optimizer = scheduled_optimizer(self.model, self.total_steps, task.preset.training)
        # Where kernels cast: elsewhere there is nothing to save. Else the recipe decides.
        several = task.device.type == "cuda" and (self.options.accumulate > 1 or bool(self.options.checkpoint))
        self.optimizer: Optimizer = (
            optimizer if self.plan is None else self.plan.wrap_optimizer(optimizer, keep_weights=several or None)
        )
        self._forward: Any = torch.compile(self.model) if self.options.compiled else self.model

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return len(self.losses)

    def fit(self, until: int | None = None, *, watch: Watch | None = None, every: int = 20) -> list[float]:
        """Train up to step ``until`` (the end by default) and return all losses so far.

        Losses stay on the device and are fetched every ``every`` steps, so that nothing waits for it in between.
        """
        until = self.total_steps if until is None else min(until, self.total_steps)
        waiting: list[Tensor] = []

        def fetch() -> None:
            if waiting:
                self.losses += torch.stack(waiting).tolist()
                waiting.clear()

        self.model.train()
        try:
            with _generators(self.task.device), self._determinism(), self._budget():
                batches = self.task.train_batches(self.seed).starting_at(self.step * self.options.accumulate)
                for step in range(self.step, until):
                    waiting.append(self._step(step, batches))
                    if len(waiting) == every or step == until - 1:
                        fetch()
                        if watch is not None:
                            watch(self.step, self.total_steps, self.losses[-1])
        finally:
            fetch()  # steps that were done count, whatever ends the loop: the optimizer has counted them too
        return list(self.losses)

    def predict(self) -> Prediction:
        """Return what the model says about all held-out rows, on the host."""
        self.model.eval()
        with self._determinism(), torch.no_grad(), self._autocast():
            parts = [self.task.predict(self.model, batch) for batch in self.task.eval_batches()]
        self.model.train()
        groups = [part.groups.cpu() for part in parts if part.groups is not None]
        return Prediction(
            torch.cat([part.logits for part in parts]).cpu(),
            torch.cat([part.labels for part in parts]).cpu(),
            groups=torch.cat(groups) if len(groups) == len(parts) else None,
        )

    def save(self, path: str | Path) -> None:
        """Write a checkpoint of tensors and plain values; replaces ``path`` only once it is whole."""
        from ..recipes import recipe_state

        path = Path(path)
        state = {
            "version": _VERSION,
            "facts": self._facts(),
            "losses": list(self.losses),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "recipe": None if self.plan is None else recipe_state(self.model),
        }
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            torch.save(state, scratch)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)

    def resume(self, path: str | Path) -> None:
        """Go on from a checkpoint of the same training.

        Raises:
            NarrowgateError: no such file, not a checkpoint, or of another training; says what differs.
        """
        from ..recipes import load_recipe_state

        try:
            state = torch.load(path, map_location=self.task.device, weights_only=True)
        except FileNotFoundError:
            raise NarrowgateError(f"checkpoint '{path}' does not exist") from None
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise NarrowgateError(f"checkpoint '{path}' cannot be read: {why}") from None
        if not isinstance(state, dict) or state.get("version") != _VERSION or not state.keys() >= _PARTS:
            raise NarrowgateError(f"checkpoint '{path}' is none of this version's trainings")
        for name, here in self._facts().items():
            saved = state["facts"].get(name)
            if saved != here and (name in state["facts"] or not name.startswith(("model.", "training."))):
                raise NarrowgateError(f"checkpoint '{path}' is of another training: {name} {saved}, here {here}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.plan is not None:
            load_recipe_state(self.model, state["recipe"])
        self.losses = list(state["losses"])

    def _step(self, step: int, batches: Iterator[Batch]) -> Tensor:
        """Run one optimizer step and return its loss, a scalar on the device."""
        torch.manual_seed(_step_seed(self.seed, step))
        self.optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        for _ in range(self.options.accumulate):
            with self._autocast():
                loss = self.task.loss(self._forward, next(batches)) / self.options.accumulate
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        if self.options.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
        self.optimizer.step()
        assert total is not None
        return total

    @property
    def _bf16(self) -> bool:
        return self.task.device.type == "cuda" if self.options.bf16 is None else self.options.bf16

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.task.device.type, torch.bfloat16) if self._bf16 else contextlib.nullcontext()

    @contextlib.contextmanager
    def _determinism(self) -> Iterator[None]:
        if not self.options.deterministic:
            yield
            return
        # cuBLAS repeats its bits only with a workspace of fixed size, and PyTorch insists on it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

    def _budget(self) -> contextlib.AbstractContextManager[object]:
        if self.options.memory_budget is None:
            return contextlib.nullcontext()
        import torch._functorch.config as functorch

        return functorch.patch(activation_memory_budget=self.options.memory_budget)

    def _data(self) -> str:
        """The source's name and a hash of its facts, but for what is computed of its rows in floating point."""
        facts = {name: value for name, value in self.task.data.describe().items() if name != "bayes_ne"}
        text = json.dumps(facts, sort_keys=True, default=str)
        return f"{facts.get('name')} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint must agree in."""
        return {
            "model": self.task.preset.name,
            "seed": self.seed,
            "steps": self.total_steps,
            "accumulate": self.options.accumulate,
            "clip_norm": self.options.clip_norm,
            "bf16": self._bf16,
            "data": self._data(),
            "recipe": None if self.plan is None else self.plan.recipe.hash(),
            **{
                f"{part}.{field.name}": repr(getattr(value, field.name))
                for part, value in (("model", self.task.preset.model), ("training", self.task.preset.training))
                for field in fields(value)
                if field.name not in _FREE
            },
        }


@contextlib.contextmanager
def _generators(device: torch.device) -> Iterator[None]:
    """Within, torch's generators may be seeded; they are as before afterwards."""
    index = device.index if device.index is not None else (torch.cuda.current_device() if device.type == "cuda" else 0)
    with torch.random.fork_rng(devices=[index] if device.type == "cuda" else []):
        yield


def _step_seed(seed: int, step: int) -> int:
    # Weyl steps: far apart for neighbours, so that no two steps' streams begin alike.
    return (seed * 0x9E3779B97F4A7C15 + (step + 1) * 0xBF58476D1CE4E5B9) % 2**63
