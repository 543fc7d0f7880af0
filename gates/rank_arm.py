"""An arm that all ranks of a job train together: sharded with FSDP2, each rank on its own rows.

Every rank ends up with the same :class:`~narrowgate.gates.train.Trained`: losses are means over ranks, gradient norms
those of whole gradients, predictions those of all rows in the task's order. So whatever follows from it, looks and
verdicts included, follows alike on every rank.

Weights and gradients travel in BF16 but for what the recipe's ``shards`` say, and both arms compute in BF16 autocast,
on any device. Tables are sharded as everything else is; or, where a recipe has ``shards.tables``, they lie on one rank
each and rows are exchanged (:mod:`narrowgate.models.embedding_exchange`), in both arms, by the baseline in BF16.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..models.embedding_exchange import EmbeddingExchange, absent_tables, own_tables, shard_tables
from ..models.prediction import Prediction
from ..precision.errors import NarrowgateError
from ..precision.observer import OperandNumerics
from .arithmetic import Arithmetic
from .batches import Checksum, length
from .model_state import RunError, plain_name
from .predictions import Predicted, joined, predict_parts
from .rank_data import RankTask, in_order
from .ranks import Ranks
from .resume import SeedStore, stale
from .rows import rows_for
from .seeds import Job
from .sharded import shard
from .stability import Observed
from .task import Task
from .train import Arm, Trained, Watch

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe, Tables

#: So small that steps which send nothing, in which ranks part, do no harm to what is timed after them.
_RATE = 1e-6


@dataclass
class RankArm(Arm):
    """One rank's share of an arm.

    Attributes:
        ranks: the job; None only where a dataclass needs a default.
        view: this rank's data.
        steady: for timing: leave the weights nearly as they are.
        tables: how rows of embedding tables travel; None: tables are weights as all others.
    """

    ranks: Ranks | None = None
    view: RankTask | None = None
    steady: bool = False
    tables: Tables | None = None
    _exchange: EmbeddingExchange | None = None

    @property
    def job(self) -> Ranks:
        """The job."""
        assert self.ranks is not None
        return self.ranks

    @property
    def own(self) -> RankTask:
        """This rank's data."""
        assert self.view is not None
        return self.view

    def train(self, seed: int, watch: Watch) -> Trained:
        """Train on all ranks; every rank returns the same.

        Raises:
            RunError: ranks built different weights, or as :meth:`Arm.train`.
        """

        def told(step: int, steps: int | None, loss: float) -> None:
            self.job.watch.tick()
            watch(step, steps, loss)

        return merged(self.job.gather(self._told_of_tables(super().train(seed, told))))

    def start(self, seed: int) -> str:
        """As :meth:`Arm.start`; rows of tables are rounded under the seed too, from the first lookup on."""
        weights = super().start(seed)
        if self._exchange is not None:
            self._exchange.seed = seed
            self._exchange.draws.clear()
        return weights

    def batches(self, seed: int) -> tuple[Iterator[Any], int | None]:
        """Return this rank's batches of a seed, and how many steps they make."""
        total = self.own.steps(length(self.own.task.train_batches(seed)))
        if self.steps is not None:
            total = self.steps if total is None else min(total, self.steps)
        return itertools.islice(iter(self.own.train_batches(seed)), self.steps), total

    def park(self) -> None:
        """Drop the model: another arm's memory must be its own, and a sharded one is not moved about."""
        if self._model is not None:
            self.discard()
            if self.compiled:
                import torch._dynamo

                torch._dynamo.reset()

    def discard(self) -> None:
        """Drop the model and what was compiled of it."""
        self._model = self._callable = self._plan = self._fresh_state = self._exchange = None
        super().park()

    @property
    def arithmetic(self) -> Arithmetic:
        """BF16, in which weights are gathered too."""
        return Arithmetic(self.device, bf16=True)

    @contextlib.contextmanager
    def eagerly(self) -> Iterator[None]:
        """Within, compiled units run uncompiled. What passes there draw of an exchange of rows is drawn again."""
        draws = None if self._exchange is None else dict(self._exchange.draws)
        with torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext():
            yield
        if self._exchange is not None and draws is not None:
            self._exchange.draws = draws

    @property
    def exchange(self) -> EmbeddingExchange | None:
        """What exchanges rows of the model that was started last; None where nothing does."""
        return self._exchange

    @property
    def reduces_itself(self) -> bool:
        """Whether the recipe reduces gradients in FSDP2's place."""
        return self._plan is not None and self._plan.reduce is not None

    @property
    def sends_beside_shards(self) -> bool:
        """Whether gradients also travel between replicas."""
        return self.job.replicas > 1

    def module_in_place(self) -> nn.Module:
        """Return the sharded model that was started last, as it is."""
        assert self._model is not None
        return self._model

    def _told_of_tables(self, trained: Trained) -> Trained:
        # As of a weight none of whose rows are here: this rank has seen no gradient.
        if self.tables is None or not trained.observed.steps:
            return trained
        absent = absent_tables(self.module_in_place())
        still = (*trained.observed.without_gradient, *absent)
        return replace(trained, observed=replace(trained.observed, without_gradient=still))

    def _prepared(self, model: nn.Module) -> Any:
        from ..recipes.wire_units import default_units

        ignored: list[nn.Parameter] = []
        if self.tables is not None:
            # Among all ranks, also where there are replicas of the rest.
            self._exchange = shard_tables(model, forward=self.tables.forward, backward=self.tables.backward)
            ignored = own_tables(model)
        shard(model, default_units(model), self.job.mesh, compiled=bool(self.compiled), ignored=ignored)
        return model

    def _made_optimizer(self) -> Any:
        optimizer = super()._made_optimizer()
        if self.tables is not None:
            apart(optimizer)
        return optimizer

    def _rows(self, recipe: Recipe, model: nn.Module) -> dict[str, int] | None:
        # Rows of jagged batches differ by rank; what is decided by them must not.
        return self.job.from_first(lambda: rows_for(recipe, self.task, model))

    def _optimizer(self) -> Any:
        optimizer = super()._optimizer()
        if self.steady:
            optimizer.register_step_pre_hook(_slow)
        return optimizer

    def _predicted(self, model: nn.Module) -> Predicted:
        """Predict this rank's rows, and put all ranks' together."""
        counts: list[bool] = []
        checksum = Checksum()

        def batches() -> Iterator[Any]:
            for batch, counted in self.own.eval_batches():
                self.job.watch.tick()
                counts.append(counted)
                yield batch

        with self.eagerly():
            parts = predict_parts(self.task, model, checksum.over(batches()), self.device, self.arithmetic)
        own = [_on_host(part) if counted else None for part, counted in zip(parts, counts, strict=True)]
        return replace(joined(in_order(self.job.gather(own))), seen=checksum.result())

    def _noted(self, loss: Tensor, model: nn.Module) -> Tensor:
        # FP64 [2]: this rank's loss, and the sum of squares over its rows of the gradients.
        # A table has one owner, whereas each replica has all other gradients.
        own = {id(p) for p in own_tables(model)} if self.tables is not None else set[int]()
        squares = [
            torch.linalg.vector_norm(grad, dtype=torch.float64).square() * (self.job.replicas if id(p) in own else 1)
            for p, grad in _local_gradients(model)
        ]
        return torch.stack([loss.double(), torch.stack(squares).sum()])

    def _fetched(self, noted: list[Tensor]) -> NDArray[np.float64]:
        found = self.job.sum(torch.stack(noted)).cpu().numpy()
        # Each replica has all of the gradients, or what counts as much.
        return np.stack([found[:, 0] / self.job.count, np.sqrt(found[:, 1] / self.job.replicas)], axis=1)

    def _dropout_seed(self, seed: int) -> int:
        # Ranks have rows of their own, and masks of their own; both arms have the same.
        return (super()._dropout_seed(seed) + self.job.rank * 0x9E3779B97F4A7C15) % 2**63

    def _after_step(self) -> None:
        plan = self._plan
        if plan is None or plan.gather is None or not plan.gathered:
            return
        # Of weights that are kept the optimizer itself finds them.
        if plan.recipe.optimizer is None or not plan.recipe.optimizer.keep_weights:
            from ..precision.joint_amaxes import reduce_amaxes

            assert self._model is not None
            reduce_amaxes(self._model)

    def _copy_state(self, source: nn.Module, target: nn.Module) -> None:
        from torch.distributed.tensor import DTensor, distribute_tensor

        fresh = dict([*source.named_parameters(), *source.named_buffers()])
        with torch.no_grad():
            for name, value in [*target.named_parameters(), *target.named_buffers()]:
                values = fresh.get(plain_name(name))
                if values is None or values.shape != value.shape:
                    raise RunError(f"build_model() built '{plain_name(name)}' in another shape for another seed")
                if isinstance(value, DTensor):
                    # Every rank has the whole: nothing is sent.
                    values = distribute_tensor(values, value.device_mesh, value.placements, src_data_rank=None)
                value.copy_(values)
                if isinstance(value, nn.Parameter):
                    value.grad = None


@dataclass(frozen=True)
class RankJob(Job):
    """A job whose arms are trained by all ranks together; rank 0 keeps and finds trainings."""

    ranks: Ranks | None = None

    def arms(self, task: Task, device: torch.device) -> list[tuple[str, Arm]]:
        """Return the named arms, the baseline first."""
        assert self.ranks is not None
        view = RankTask.of(task, self.ranks.rank, self.ranks.count)
        plain = tables_of(self.recipes)
        return [
            (
                name,
                RankArm(
                    view.task,
                    device,
                    arm.recipe,
                    arm.backend,
                    arm.steps,
                    observe_every=arm.observe_every,
                    ranks=self.ranks,
                    view=view,
                    tables=plain if arm.recipe is None else _tables(arm.recipe),
                ),
            )
            for name, arm in super().arms(task, device)
        ]

    def train(self, arm: Arm, seed: int, watch: Watch) -> Trained:
        """Train an arm under a seed, or find that training done."""
        ranks, store = self.ranks, self.store
        assert ranks is not None
        if store is None:
            return arm.train(seed, watch)
        found, note = ranks.from_first(lambda: store.find(arm, seed))
        if found is not None:
            # All ranks have the losses of all, and so agree.
            note = stale(found, arm)
            if note is None:
                watch(len(found.losses), len(found.losses), float(found.losses[-1]))
                return found
        trained = arm.train(seed, watch)
        return ranks.from_first(lambda: store.keep(arm, trained, note))


def rank_store(store: SeedStore, ranks: Ranks, tables: Tables | None = None) -> SeedStore:
    """Return the store of trainings by a job's ranks, which are no trainings of one process.

    Args:
        store: of the task.
        ranks: the job.
        tables: as :func:`tables_of` returns them; a baseline has no recipe that would tell.
    """
    own = f"{store.content} {ranks.count} {ranks.transport}" + f" {ranks.replicas}" * (ranks.replicas > 1)
    if tables is not None:
        own += f" tables {tables}"
    content = hashlib.sha256(own.encode()).hexdigest()
    return replace(store, content=content)


def arithmetic_of(ranks: Ranks, tables: Tables | None = None) -> str:
    """Say in what the baseline of a distributed run computes, and how it exchanges rows of tables where it does."""
    mode = "each unit under torch.compile" if ranks.transport == "nccl" else "eager"
    shards = ranks.count // ranks.replicas
    layout = "" if ranks.replicas == 1 else f" ({ranks.replicas} replicas of {shards} shard{'s' * (shards > 1)})"
    rows = "" if tables is None else f", rows of tables exchanged as {tables}"
    return f"BF16 autocast, {mode}, FSDP2 on {ranks.count} ranks{layout} with BF16 payload{rows}"


def merged(trained: Sequence[Trained]) -> Trained:
    """Return what all ranks' parts of one training are together, the same on every rank.

    Raises:
        RunError: ranks began with different weights.
    """
    first = trained[0]
    for rank, other in enumerate(trained):
        if other.weights != first.weights:
            raise RunError(f"seed {first.seed}: build_model() made other weights on rank {rank} than on rank 0")
    peaks = [own.peak_memory for own in trained if own.peak_memory is not None]
    return replace(
        first,
        first_batch=hashlib.sha256("".join(own.first_batch for own in trained).encode()).hexdigest(),
        batches=hashlib.sha256("".join(own.batches for own in trained).encode()).hexdigest(),
        held_out=hashlib.sha256("".join(own.held_out for own in trained).encode()).hexdigest(),
        peak_memory=max(peaks) if peaks else None,
        seconds=max(own.seconds for own in trained),
        first_step_seconds=max(own.first_step_seconds for own in trained),
        evaluation_seconds=max(own.evaluation_seconds for own in trained),
        observed=_observed([own.observed for own in trained]),
    )


def _observed(seen: Sequence[Observed]) -> Observed:
    """Put what ranks saw of tensors together: elements of all, and of each operand the worst rank's worst step."""
    still = set(seen[0].without_gradient).intersection(*(own.without_gradient for own in seen))
    by_key: dict[tuple[str, str, str, str], list[OperandNumerics]] = {}
    for operand in (operand for own in seen for operand in own.operands):
        by_key.setdefault((operand.layer, operand.path, operand.operand, operand.format), []).append(operand)
    why = next((own.not_counted for own in seen if own.not_counted), None)
    return Observed(
        steps=max(own.steps for own in seen),
        operands=() if why else tuple(_operand(found) for found in by_key.values()),
        not_counted=why,
        without_gradient=tuple(name for name in seen[0].without_gradient if name in still),
    )


def _operand(found: Sequence[OperandNumerics]) -> OperandNumerics:
    elements = sum(own.elements for own in found)

    def share(name: str) -> float:
        return sum(getattr(own, name) * own.elements for own in found) / max(elements, 1)

    over = max(found, key=lambda own: own.worst_saturated)
    under = max(found, key=lambda own: own.worst_underflowed)
    noise = [own.sqnr_db for own in found if own.sqnr_db is not None]
    return replace(
        found[0],
        steps=max(own.steps for own in found),
        elements=elements,
        amax=max(own.amax for own in found),
        saturated=share("saturated"),
        worst_saturated=over.worst_saturated,
        worst_saturated_step=over.worst_saturated_step,
        underflowed=share("underflowed"),
        worst_underflowed=under.worst_underflowed,
        worst_underflowed_step=under.worst_underflowed_step,
        clipped=share("clipped"),
        worst_clipped=max(own.worst_clipped for own in found),
        nonfinite=share("nonfinite"),
        sqnr_db=min(noise) if noise else None,
    )


def _local_gradients(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    grads: list[tuple[nn.Parameter, Any]] = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    if not grads:
        raise NarrowgateError("no parameter has a gradient after loss().backward()")
    return [(p, g.to_local() if hasattr(g, "to_local") else g) for p, g in grads]


def apart(optimizer: Any) -> None:
    """Give what FSDP2 shards and what it left whole parameter groups of their own, in place; one kernel takes no both.

    Args:
        optimizer: that has not stepped yet.
    """
    from torch.distributed.tensor import DTensor

    groups = []
    for group in optimizer.param_groups:
        kinds = [[p for p in group["params"] if isinstance(p, DTensor) == sharded] for sharded in (True, False)]
        groups += [{**group, "params": parameters} for parameters in kinds if parameters]
    optimizer.param_groups = groups


def tables_of(recipes: Sequence[Recipe]) -> Tables | None:
    """Return how the baseline of ``recipes`` exchanges rows of embedding tables: in BF16; None where it does not.

    Raises:
        NarrowgateError: some recipes exchange rows, and others do not.
    """
    from ..recipes.wire_plan import PLAIN_TABLES

    asking = [recipe.name for recipe in recipes if _tables(recipe) is not None]
    others = [recipe.name for recipe in recipes if recipe.name not in asking]
    if asking and others:
        raise NarrowgateError(
            f"recipe '{asking[0]}' has shards.tables and '{others[0]}' has not: expected all or none in one run, since"
            " the baseline exchanges rows of tables as the recipes do; gate them in runs of their own"
        )
    return PLAIN_TABLES if asking else None


def _tables(recipe: Recipe) -> Tables | None:
    shards = recipe.flatten().shards
    return None if shards is None else shards.tables


def _slow(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(_RATE)
        else:
            group["lr"] = _RATE


def _on_host(part: Prediction) -> Prediction:
    def host(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.detach().cpu()

    slices = None if part.slices is None else {name: mark.cpu() for name, mark in part.slices.items()}
    return Prediction(
        part.logits.detach().cpu(), part.labels.detach().cpu(), host(part.weights), host(part.groups), slices
    )
