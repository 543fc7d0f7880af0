"""Scales of shards that span ranks, found for all weights at once: one all-reduce a step instead of one a gather."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .errors import NarrowgateError
from .gathered import GatheredWeight
from .shard_codes import own_amax, reach, tensor_amaxes
from .sharding import ShardedWeight, reduce_amax

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def reduce_amaxes(model: nn.Module) -> int:
    """Find all scales that span ranks with one all-reduce for each process group, instead of one for each weight.

    Optional; on every rank, after ``optimizer.step()``. Holds for all gathers until a weight is written to; what writes
    through the tensors of a ``state_dict()`` and not through the Parameters has to call it again.

    Args:
        model: a model after ``fully_shard``, its weights sharded.

    Returns:
        How many weights the next gathers need no all-reduce for.

    Raises:
        NarrowgateError: a weight is gathered at the moment.
    """
    return reduce_amaxes_of(model.named_parameters())


def reduce_amaxes_of(parameters: Iterable[tuple[str, Tensor]]) -> int:
    """:func:`reduce_amaxes` of the weights among these named parameters."""
    from torch.distributed.tensor import DTensor

    meshes: dict[DeviceMesh, DeviceMesh] = {}
    waiting: dict[ProcessGroup, list[tuple[ShardedWeight, int, str]]] = {}
    for name, parameter in parameters:
        if isinstance(parameter, GatheredWeight):
            raise NarrowgateError(f"'{name}' is gathered at the moment: reshard the model first")
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        if not isinstance(local, ShardedWeight) or not isinstance(parameter, DTensor):
            continue
        mesh = meshes.get(parameter.device_mesh)
        if mesh is None:
            mesh = meshes[parameter.device_mesh] = _shard_mesh(parameter.device_mesh)
        _, first = local._place(mesh)
        reaches = reach(local._spec, local._full[0], mesh.size())
        if reaches is not None:
            waiting.setdefault(mesh.get_group(), []).append((local, first, reaches))
    groups = {group: _own_amaxes(shards) for group, shards in waiting.items()}
    for group, found in groups.items():
        joined = torch.cat([amax.reshape(-1) for _, amax in found])
        reduce_amax(joined, group)
        parts = joined.split([amax.numel() for _, amax in found])
        for (local, amax), part in zip(found, parts, strict=True):
            known = local._known
            known.amax, known.version, known.codes = part.view(amax.shape), local._rows._version, None
    return sum(map(len, groups.values()))


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[-1]]  # replicas beside shards: FSDP2 gathers over the last dimension


def _own_amaxes(shards: list[tuple[ShardedWeight, int, str]]) -> list[tuple[ShardedWeight, Tensor]]:
    """What this rank knows of the maxima of (weight, its first row here, what they reach)."""
    scaled = [entry for entry in shards if entry[0]._spec.granularity == "tensor"]
    amaxes = tensor_amaxes([local._rows.detach() for local, _, _ in scaled])
    found = [(local, amax) for (local, _, _), amax in zip(scaled, amaxes, strict=True)]
    for local, first, reaches in shards:
        if local._spec.granularity != "tensor":
            found.append((local, own_amax(local._rows.detach(), local._spec, local._full, first, reaches)))
    return found
