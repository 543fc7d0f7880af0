"""A recipe's ``shards`` on a model: what FSDP2 gathers and reduces in low precision, and what stands in the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..precision.errors import NarrowgateError, NotBuiltError
from ..precision.spec import Spec
from .plan import LayerPlan, Plan
from .targets import Target

#: Why a kind of target cannot gather its weight in low precision yet.
_NOT_BUILT = {
    "attention": "nn.MultiheadAttention's projections",
    "grouped": "grouped experts",
}


def check_shards(model: nn.Module, targets: Sequence[Target], plan: Plan) -> None:
    """Refuse, before anything is changed, what :func:`gather_low` could not do.

    Raises:
        NotBuiltError: a planned weight belongs to attention or grouped experts, or something else uses it too.
        NarrowgateError: a weight is parametrized or sharded already, or a live optimizer holds it.
    """
    gathered = list(_gathered(targets, plan))
    if not gathered:
        return
    spec = plan.gather
    for target, layer in gathered:
        if layer.kind in _NOT_BUILT:
            raise NotBuiltError(
                f"layer '{layer.name}': shards.all_gather {spec} of {_NOT_BUILT[layer.kind]} is not built yet; leave "
                "its fprop or dgrad in bf16"
            )
        weight = target.module._parameters.get("weight")
        if weight is None:
            raise NarrowgateError(f"layer '{layer.name}': found a parametrized weight, which cannot gather as {spec}")
        if _is_sharded(weight):
            raise NarrowgateError(
                f"layer '{layer.name}': found its weight sharded already, expected apply_recipe before fully_shard, "
                f"as shards.all_gather is {spec}"
            )
    _check_tied(model, gathered, spec)
    _check_optimizers(gathered, spec)


def gather_low(targets: Sequence[Target], plan: Plan) -> list[nn.Module]:
    """Put the hooks of FSDP2 around the planned weights and return the modules that have them."""
    from ..precision.sharding import shard_weight

    by_weight: dict[int, tuple[str, list[nn.Module]]] = {}
    for target, layer in _gathered(targets, plan):
        by_weight.setdefault(id(target.module._parameters["weight"]), (layer.name, []))[1].append(target.module)
    for name, modules in by_weight.values():
        shard_weight(modules, plan.gather, name=name)
    return [module for _, modules in by_weight.values() for module in modules]


def reduce_low(model: nn.Module, plan: Plan, seed: int) -> None:
    """Make FSDP2 reduce the gradients of ``model`` as the plan says, once it shards it."""
    if plan.reduce is not None:
        from ..precision.reduction import attach_reduction

        attach_reduction(model, plan.reduce, seed)


def own_reduction(model: nn.Module) -> None:
    """Undo :func:`reduce_low`."""
    from ..precision.reduction import detach_reduction

    detach_reduction(model)


def _gathered(targets: Sequence[Target], plan: Plan) -> Iterator[tuple[Target, LayerPlan]]:
    names = {layer.name for layer in plan.gathered}
    return ((t, layer) for t, layer in zip(targets, plan.layers, strict=True) if layer.name in names)


def _is_sharded(weight: torch.Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


def _check_tied(model: nn.Module, gathered: list[tuple[Target, LayerPlan]], spec: Spec) -> None:
    """All that use a gathered weight must multiply by its codes."""
    names = {id(target.module._parameters["weight"]): layer.name for target, layer in gathered}
    ours = {id(target.module) for target, _ in gathered}
    for name, module in model.named_modules():
        for entry, parameter in module._parameters.items():
            if id(parameter) in names and (id(module) not in ours or entry != "weight"):
                raise NotBuiltError(
                    f"layer '{names[id(parameter)]}': its weight is '{f'{name}.{entry}' if name else entry}' too, "
                    f"which is not gathered as {spec}: sharing one is not built yet"
                )


def _check_optimizers(gathered: list[tuple[Target, LayerPlan]], spec: Spec) -> None:
    """The weights become other Parameters, so an optimizer that has the present ones would train what nobody uses."""
    names = {id(target.module._parameters["weight"]): layer.name for target, layer in gathered}
    found = _holder(names)
    if found is not None:
        gc.collect()  # what nobody uses any more may wait for the collector
        found = _holder(names)
    if found is not None:
        raise NarrowgateError(
            f"found the weight of layer '{found[1]}' in an optimizer ({found[0]}) already, and "
            f"shards.all_gather {spec} makes it another Parameter: build the optimizer after apply_recipe"
        )


def _holder(names: dict[int, str]) -> tuple[str, str] | None:
    """(an optimizer's type, the name of one of ``names`` that it holds); None where no optimizer holds any."""
    # Optimizers keep no list of themselves: the garbage collector's is the one there is. By type, since isinstance
    # would wake lazy objects up.
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.optim.Optimizer):
            for group in getattr(candidate, "param_groups", ()):
                for parameter in group["params"]:
                    if id(parameter) in names:
                        return type(candidate).__name__, names[id(parameter)]
    return None
