"""A model under FSDP2: sharded by units, with switches that take the wire away, and timed by all ranks at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .compilation import Compiler
from .measurements import Clocks
from .speed import BlockTime, StepFunction, Timer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def all_gather(output: Tensor, given: Tensor, *, group: Any, async_op: bool) -> Any:
    """Gather every rank's ``given`` into ``output``."""
    # PyTorch 2.13 renamed it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, given, group=group, async_op=async_op)


def reduce_scatter(output: Tensor, given: Tensor, *, op: Any, group: Any, async_op: bool) -> Any:
    """Reduce every rank's ``given``, and keep this rank's part in ``output``."""
    # PyTorch 2.13 renamed it.
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce(output, given, op=op, group=group, async_op=async_op)


def shard(
    model: nn.Module, units: list[str], mesh: DeviceMesh, *, compiled: bool, ignored: Iterable[nn.Parameter] = ()
) -> None:
    """Hand ``model`` to FSDP2, unit by unit, in BF16; ``ignored`` parameters stay whole.

    Args:
        model: with its recipe, on the device; its units are replaced by compiled ones where ``compiled``.
        units: names of modules, as :func:`narrowgate.recipes.wire_units.default_units` finds them.
        mesh: of one dimension, or replicas beside shards.
        compiled: compile each unit by itself: FSDP2's hooks between them stay out of the graphs.
        ignored: what FSDP2 leaves alone.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kept = set(ignored)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    compile_unit = Compiler()
    for name in units:
        module = model.get_submodule(name)
        if compiled:
            module: Any = compile_unit(module)
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent)._modules[last] = module
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=kept)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=kept)


class Local(Protocol):
    """What sends nothing where :attr:`local` is set, and does all else."""

    local: bool


class Switch:
    """FSDP2's collectives as they are, or without a wire where :attr:`local` is set."""

    def __init__(self) -> None:
        self.local = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer, as FSDP2's own collectives make it."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(Switch):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        if not self.local:
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        # Not onto itself: the input is this rank's part of the output.
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():
                part.copy_(input_tensor)
        return None


class _Scatter(Switch):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if not self.local:
            return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        return None


def switch_collectives(model: nn.Module) -> tuple[Local, ...]:
    """Put switches in the place of all collectives of a sharded model, and return them."""
    from torch.distributed.fsdp import FSDPModule

    from ..precision.sharding import AMAX_REDUCTION

    gather, scatter = _Gather(), _Scatter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
    return gather, scatter, AMAX_REDUCTION


def without_wire(step: StepFunction, switches: Iterable[Local]) -> StepFunction:
    """Return ``step`` as it is where nothing is sent."""
    own = tuple(switches)

    def local(i: int) -> None:
        for switch in own:
            switch.local = True
        try:
            step(i)
        finally:
            for switch in own:
                switch.local = False

    return local


class RankTimer:
    """Another timer's blocks on all ranks: begun together, as slow as the slowest; and one clock for all."""

    def __init__(self, inner: Timer, device: torch.device) -> None:
        self.inner, self.device = inner, device

    def block(self, step: StepFunction, steps: int) -> BlockTime:
        """Time a block on every rank; return the largest times."""
        dist.barrier()
        own = self.inner.block(step, steps)
        times = torch.tensor([own.device_ms, own.host_ms], dtype=torch.float64, device=self.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        device_ms, host_ms = times.tolist()
        return BlockTime(device_ms, host_ms)

    def now(self) -> float:
        """The first rank's clock: all ranks stop alike."""
        told = torch.tensor(self.inner.now(), dtype=torch.float64, device=self.device)
        dist.broadcast(told, 0)
        return float(told)

    def clocks(self) -> Clocks | None:
        """This rank's device's clocks."""
        return self.inner.clocks()
