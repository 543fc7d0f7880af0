"""Low-precision gradient reduction under FSDP2: codes travel, sums are FP32.

A reduce-scatter adds in the dtype that travels, at every hop. Here each rank quantizes its own gradients, sends every
rank the rows that it keeps (one all-to-all of uint8 a group, in place of the reduce-scatter), and sums what arrives in
FP32, in a fixed order; the sum is rounded once, to the dtype of FSDP2's reduction. Averages, divide factors,
accumulation without synchronisation and the all-reduce between replicas stay FSDP2's. The bytes are laid out in
:mod:`narrowgate.precision.reduction_codec`.

:func:`attach_reduction` gives a model its :class:`GradientReduction`, before ``fully_shard``. The model's next forward
finds the modules that were sharded and takes their reductions over (``FSDPModule.set_custom_reduce_scatter``). An
optimizer that is about to use gradients which FSDP2 reduced in another way raises instead.

**Rounding.** The random bits of a gradient depend on (seed, parameter, global rank, optimizer step, reduction within
the step) and on the element's index in the unsharded parameter: not on the mesh. The rank is in the key since errors of
equal bits would add up over the ranks rather than average out.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .errors import NarrowgateError, NotBuiltError
from .reduction_codec import Piece, encode, pieces_of, sum_decoded, sum_into
from .spec import Spec
from .stochastic import call_key, stream_key
from .surroundings import WRAPPER_PARTS

#: Where a model keeps its :class:`GradientReduction`; a plain attribute, never in ``state_dict()``.
_REDUCTION = "_narrowgate_reduction"
#: Models that have one.
_LIVE: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def attach_reduction(model: nn.Module, spec: Spec, seed: int) -> None:
    """Make FSDP2 reduce the gradients of ``model`` as ``spec``, whenever it is sharded.

    Args:
        model: the module whose forward begins a step; it may be sharded now or later.
        spec: BF16, or FP8 with FP32 scales; dynamic, unclipped, with or without ``sr``.
        seed: of stochastic rounding, the same on every rank.
    """
    reduction = GradientReduction(spec, seed)
    # Last: FSDP2 puts its own hook first, so a module that it has sharded is initialised by then.
    reduction.handle = model.register_forward_pre_hook(_before_forward)
    model.__dict__[_REDUCTION] = reduction
    _LIVE.add(model)
    _watch()


def detach_reduction(model: nn.Module) -> None:
    """Undo :func:`attach_reduction`, where it was called: FSDP2 reduces as it did before."""
    reduction: GradientReduction | None = model.__dict__.pop(_REDUCTION, None)
    if reduction is None:
        return
    _LIVE.discard(model)
    for comm in reduction.comms:
        comm.group._reduce_scatter_comm = comm.before
    if reduction.handle is not None:
        reduction.handle.remove()


def reduction_of(model: nn.Module) -> GradientReduction | None:
    """What :func:`attach_reduction` gave ``model``; None where it was not called."""
    return model.__dict__.get(_REDUCTION)


def install_reduction(model: nn.Module) -> int:
    """Take the gradient reduction of all sharded modules of ``model`` over; its first forward does so by itself.

    Returns:
        How many groups of parameters are reduced in low precision: one for each call of ``fully_shard`` that had any.

    Raises:
        NarrowgateError: the recipe of ``model`` says nothing of reductions, something else replaced one, or the model
            is trained by DistributedDataParallel.
        NotBuiltError: parameters are sharded by columns, by tensor parallelism, or over several meshes.
    """
    model = _uncompiled(model)
    reduction = reduction_of(model)
    if reduction is None:
        raise NarrowgateError(
            f"found no shards.reduce_scatter on this {type(model).__name__}, expected a recipe that sets it"
        )
    if not reduction.comms:
        reduction.install(model)
    for comm in reduction.comms:
        if comm.group._reduce_scatter_comm is not comm:
            found = type(comm.group._reduce_scatter_comm).__name__
            raise NarrowgateError(
                f"module '{comm.name}': found {found} in place of the recipe's shards.reduce_scatter {reduction.spec}: "
                "FSDP2 takes one of the two"
            )
    return len(reduction.comms)


@contextmanager
def reduction_errors(model: nn.Module) -> Iterator[dict[str, float]]:
    """Within this block, also reduce all gradients in FP32, and measure how far the low-precision sums are from those.

    On every rank alike, around ``backward``. At its end, the yielded mapping holds for each parameter the relative
    error ||sum - FP32 sum|| / ||FP32 sum|| of all its reductions in the block, over the whole parameter and before
    the sum is rounded to FSDP2's dtype; NaN where the FP32 sum is zero.

    Raises:
        NarrowgateError: as :func:`install_reduction`; or nothing of the model is sharded over several ranks.
    """
    if not install_reduction(model):
        raise NarrowgateError("found no module that FSDP2 shards, expected one whose reduction is measured")
    reduction = reduction_of(_uncompiled(model))
    assert reduction is not None
    errors: dict[str, float] = {}
    for comm in reduction.comms:
        comm.squares = {}
    try:
        yield errors
        for comm in reduction.comms:
            assert comm.squares is not None
            if comm.squares:
                squares = torch.stack(list(comm.squares.values()))
                torch.distributed.all_reduce(squares, group=comm.process_group)
                relative = (squares[:, 0] / squares[:, 1]).sqrt().tolist()
                errors.update(zip(comm.squares, relative, strict=True))
    finally:
        for comm in reduction.comms:
            comm.squares = None


class GradientReduction:
    """How one model's gradients are reduced, and how many steps it has made."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self.spec, self.seed = spec, seed
        #: Optimizer steps that used reduced gradients.
        self.step = 0
        #: Of the model's sharded modules, once found.
        self.comms: list[LowPrecisionReduceScatter] = []
        self.handle: Any = None
        self._covered = False

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs between steps."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.step = state["step"]

    def __getstate__(self) -> dict[str, Any]:
        # Sharded modules can be neither copied nor pickled: a copy finds its own.
        return {**self.__dict__, "comms": [], "_covered": False}

    def install(self, model: nn.Module) -> None:
        """Find the groups of parameters under ``model`` and replace their reductions."""
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

        sharded = list(_sharded(model))
        names = {id(module): _plain(name) for name, module in model.named_modules()} if sharded else {}
        found: list[LowPrecisionReduceScatter] = []
        for name, module, groups in sharded:
            if len(groups) > 1:
                raise NotBuiltError(
                    f"module '{name}': shards.reduce_scatter {self.spec} of parameters over several meshes is not "
                    "built yet"
                )
            group = groups[0]
            if not hasattr(group.mesh_info, "shard_process_group"):
                raise NotBuiltError(
                    f"module '{name}': found replicas without shards, which shards.reduce_scatter {self.spec} does "
                    "not reach: expected fully_shard"
                )
            if type(group._reduce_scatter_comm) is not DefaultReduceScatter:
                raise NarrowgateError(
                    f"module '{name}': found {type(group._reduce_scatter_comm).__name__} in place of FSDP2's own "
                    f"reduce-scatter, expected one of it and the recipe's shards.reduce_scatter {self.spec}"
                )
            found.append(LowPrecisionReduceScatter(self, name, module, group, names))
        if not found:
            from torch.nn.parallel import DistributedDataParallel

            if DistributedDataParallel._get_active_ddp_module() is not None:
                raise NarrowgateError(
                    f"found DistributedDataParallel, which reduces gradients itself: shards.reduce_scatter {self.spec} "
                    "needs fully_shard"
                )
        for comm in found:
            comm.module.set_custom_reduce_scatter(comm)
        self.comms = found

    def end_step(self, model: nn.Module, stepping: set[int]) -> None:
        """Make sure that gradients were reduced as asked, and count the step.

        Args:
            model: the model.
            stepping: ids of the Parameters that an optimizer is about to step.
        """
        if not self._covered:
            self._check_covered(model, stepping)
        ours = (param for comm in self.comms if comm.calls for param in comm.group.fsdp_params)
        if any(id(param.sharded_param) in stepping for param in ours):
            self.step += 1
            for comm in self.comms:
                comm.calls = 0

    def _check_covered(self, model: nn.Module, stepping: set[int]) -> None:
        """Nothing that FSDP2 shards may have been reduced in another way."""
        if "torch.distributed.tensor" not in sys.modules:
            return
        from torch.distributed.tensor import DTensor

        ours = {id(param.sharded_param) for comm in self.comms for param in comm.group.fsdp_params}
        reduced = [(n, p) for n, p in model.named_parameters() if isinstance(p, DTensor) and p.grad is not None]
        for name, parameter in reduced:
            if id(parameter) in stepping and id(parameter) not in ours:
                raise NarrowgateError(
                    f"parameter '{_plain(name)}': its gradient was not reduced by shards.reduce_scatter {self.spec}: "
                    "it is sharded by a module above the recipe's, or after the first forward, or was trained by "
                    "another method than forward (then call narrowgate.precision.install_reduction(model) after "
                    "fully_shard)"
                )
        self._covered = bool(reduced) and all(id(parameter) in ours for _, parameter in reduced)


class LowPrecisionReduceScatter:
    """The reduction of one group of parameters; has the interface of ``torch.distributed.fsdp``'s ``ReduceScatter``."""

    def __init__(self, owner: GradientReduction, name: str, module: Any, group: Any, names: dict[int, str]) -> None:
        self.owner, self.name, self.module, self.group = owner, name, module, group
        #: What FSDP2 used until now.
        self.before = group._reduce_scatter_comm
        #: Reductions since the last optimizer step.
        self.calls = 0
        #: By parameter: FP64 [2], squares of the error and of the FP32 sum; None where nobody measures.
        self.squares: dict[str, Tensor] | None = None
        self._pieces: dict[tuple[bool, ...], tuple[Piece, ...]] = {}
        self._shapes: list[tuple[str, int, tuple[int, ...]]] = []
        rank = torch.distributed.get_rank()
        for parameter in group.fsdp_params:
            place = parameter._module_info
            full = ".".join(part for part in (names[id(place.module)], place.param_name) if part)
            if parameter.is_dtensor or parameter.fsdp_placement.dim != 0:
                kind = "tensor parallelism" if parameter.is_dtensor else "another dimension than rows"
                raise NotBuiltError(
                    f"parameter '{full}': found it sharded by {kind}, which shards.reduce_scatter {owner.spec} is not "
                    "built for yet"
                )
            key = stream_key(owner.seed, full, "reduce_scatter", f"rank {rank}")
            self._shapes.append((full, key, tuple(parameter._orig_size)))

    @property
    def process_group(self) -> Any:
        """The ranks that share the group's parameters."""
        return self.group.mesh_info.shard_process_group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2, as its own reduction makes it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce ``input_tensor`` [ranks * S] into ``output_tensor`` [S], as ``op`` of FSDP2 says."""
        assert not async_op, "FSDP2 orders reductions by streams"
        ranks, rank, spec = group.size(), group.rank(), self.owner.spec
        buffer, dtype = input_tensor.view(ranks, -1), input_tensor.dtype
        pieces = self._present(ranks, buffer.shape[1])
        self.calls += 1
        lines = encode(buffer, pieces, spec, lambda piece: self._seed(piece, buffer.device))
        received = torch.empty_like(lines)
        torch.distributed.all_to_all_single(received, lines, group=group)
        sum_into(output_tensor, received, pieces, spec, rank, _end(op, ranks))
        if self.squares is not None:
            exact = _exact(buffer, group)
            for piece, total in sum_decoded(received, pieces, spec, dtype, rank):
                self._measure(piece, total, exact[piece.start : piece.stop])

    def _present(self, ranks: int, numel: int) -> tuple[Piece, ...]:
        """The layout of a reduction of all trainable parameters, which must be ``numel`` elements a rank."""
        trained = tuple(parameter.sharded_param.requires_grad for parameter in self.group.fsdp_params)
        pieces = self._pieces.get(trained)
        if pieces is None:
            shapes = [shape for shape, included in zip(self._shapes, trained, strict=True) if included]
            pieces = self._pieces[trained] = pieces_of(shapes, ranks)
        expected = sum(piece.numel for piece in pieces)
        if numel != expected:
            raise NarrowgateError(
                f"module '{self.name}': found gradients of {numel} of its {expected} elements a rank, and "
                f"shards.reduce_scatter {self.owner.spec} has to know which: freeze parameters that get no gradient, "
                "shard them apart, or call set_reduce_scatter_unused_params(True) (PyTorch 2.13)"
            )
        return pieces

    def _seed(self, piece: Piece, device: torch.device) -> Tensor | None:
        if not self.owner.spec.sr:
            return None
        key = call_key(piece.key, self.owner.step, call=self.calls - 1)
        assert isinstance(key, int)
        # Filled on the device: a tensor of a number would wait for a copy to it.
        return torch.full((), key, dtype=torch.int64, device=device)

    def _measure(self, piece: Piece, total: Tensor, exact: Tensor) -> None:
        assert self.squares is not None
        found = torch.stack([(total - exact).double().square().sum(), exact.double().square().sum()])
        known = self.squares.get(piece.name)
        self.squares[piece.name] = found if known is None else known + found


def _end(op: Any, ranks: int) -> tuple[str, float]:
    """What FSDP2's operation does beside summing: to the FP32 sum, before its only rounding."""
    from torch.distributed import ReduceOp

    if op == ReduceOp.SUM:
        return "", 1.0
    if op == ReduceOp.AVG:
        return "divide", float(ranks)
    assert op == ReduceOp.PREMUL_SUM, op
    # What pickling keeps of it is the one place where the factor can be read.
    return "multiply", float(op.__getstate__()[1])


def _exact(buffer: Tensor, group: Any) -> Tensor:
    """The FP32 sum of this rank's rows."""
    wide = buffer.to(torch.float32).flatten()
    out = wide.new_empty(buffer.shape[1])
    # PyTorch 2.13 renames it.
    scatter = getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
    scatter(out, wide, group=group)
    return out


def _uncompiled(model: nn.Module) -> nn.Module:
    """The module inside what ``torch.compile`` returned."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else _uncompiled(inner)


def _plain(name: str) -> str:
    """A module's or parameter's name without the parts that wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def _sharded(model: nn.Module) -> Iterator[tuple[str, Any, list[Any]]]:
    """(name, FSDP2 module, its groups of parameters) of what ``model`` has sharded, each group once."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, fsdp.FSDPModule):
            continue
        found: Any = module
        state = found._get_fsdp_state()
        # PyTorch 2.11 has one group at most, 2.13 a list.
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        if groups and id(groups[0]) not in seen:
            seen.add(id(groups[0]))
            yield _plain(name), found, groups


def _before_forward(module: nn.Module, args: Any) -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _install(module)


def _install(module: nn.Module) -> None:
    _LIVE.add(module)  # a copy of a model does not pass by attach_reduction
    install_reduction(module)


def _before_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _LIVE:
        return
    stepping = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in list(_LIVE):
        reduction = reduction_of(model)
        if reduction is not None:
            reduction.end_step(model, stepping)


@cache
def _watch() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    # What is compiled breaks its graph here rather than trace what only eager state needs.
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_optimizer_step))  # type: ignore[arg-type]
    globals()["_install"] = torch.compiler.disable(_install)
