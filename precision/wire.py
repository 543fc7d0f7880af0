"""Bytes on the wire, counted at the collective: a setting that some layer above it ignored cannot hide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators of collectives: what they are called here, and the argument that holds what a rank gives.
_COLLECTIVES = {
    "c10d::_allgather_base_": ("all_gather", "input_tensor"),
    "c10d::allgather_": ("all_gather", "input_tensors"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
}
#: Operators of theirs that send nothing.
_SILENT = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")


class WireCount(TorchDispatchMode):
    """Within this block, counts what this rank hands to each collective of ``torch.distributed``.

    ``with WireCount() as wire: step()``. A rank that hands N bytes to an all-gather of R ranks receives (R - 1) * N.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Calls by collective: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``;
        #: others by the name of their operator.
        self.calls: Counter[str] = Counter()
        #: Bytes by (collective, dtype of what it was given). FSDP2 packs payloads of several dtypes as ``uint8``.
        self.bytes: Counter[tuple[str, torch.dtype]] = Counter()

    def total(self, collective: str) -> int:
        """Bytes handed to one collective, of any dtype."""
        return sum(count for (name, _), count in self.bytes.items() if name == collective)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema, args)
        return func(*args, **(kwargs or {}))

    def _count(self, schema: Any, args: Sequence[Any]) -> None:
        if schema.name.partition("::")[2] in _SILENT:
            return
        collective, given = _COLLECTIVES.get(schema.name, (schema.name, None))
        self.calls[collective] += 1
        for argument, value in zip(schema.arguments, args, strict=False):
            if given in (None, argument.name):
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor):
                        self.bytes[collective, leaf.dtype] += leaf.nbytes
