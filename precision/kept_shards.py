"""Codes of sharded weights that are made once for each optimizer step, however many gathers send them.

Without this a forward's codes serve its backward, and the next micro-batch makes its own. With it the first gather
after a write makes them, for all until the next write: in other micro-batches, in backward and in evaluation. Scales
that span ranks are found together at the end of the step (:func:`narrowgate.precision.reduce_amaxes`).

A write is seen that is made through the Parameter, by an optimizer, by loading or through its ``data``, or that moves
the version counter of the shard's own tensor. One that does neither, through the DTensors of a ``state_dict()`` or by
a collective into them, needs :func:`forget_shard_codes`, on every rank.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from .joint_amaxes import reduce_amaxes_of
from .sharding import LASTING, ShardedWeight

#: Whose steps end with finding scales, once each.
_HOOKED: WeakSet[Optimizer] = WeakSet()


def keep_shard_codes(optimizer: Optimizer) -> set[str]:
    """Have the sharded weights that ``optimizer`` steps keep their codes until they are written to.

    Called on every rank. Memory: as many bytes as the rank's rows of them have elements.

    Returns:
        The layers' names.
    """
    names = set()
    for local in _shards(optimizer):
        names.add(local._name)
        local._known.last()
    if names and optimizer not in _HOOKED:
        _HOOKED.add(optimizer)
        optimizer.register_step_post_hook(torch.compiler.disable(_after_step))  # type: ignore[arg-type]
        _after_step(optimizer)
    return names


def forget_shard_codes() -> None:
    """Have the next gather of each weight find its scales and codes anew, after writes that nothing could see."""
    for known in LASTING:
        known.amax = known.codes = None


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    # What casts or moves a model puts other tensors into its Parameters, of which nobody said that they last.
    for local in _shards(optimizer):
        local._known.last()
    reduce_amaxes_of(("", parameter) for parameter in _parameters(optimizer))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _shards(optimizer: Optimizer) -> list[ShardedWeight]:
    found = [getattr(parameter, "_local_tensor", parameter) for parameter in _parameters(optimizer)]
    return [local for local in found if isinstance(local, ShardedWeight)]
