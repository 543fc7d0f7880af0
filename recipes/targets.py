"""The layers of a model that a rule can reach, under the names that people know them by.

A target is a module with a GEMM that can be swapped in place: ``nn.Linear`` and subclasses that keep its ``forward``;
the projections of ``nn.MultiheadAttention``, as ``NAME.in_proj`` (packed: query, key and value) and ``NAME.out_proj``;
:class:`narrowgate.precision.GroupedLinear`; :class:`narrowgate.precision.MatMul`. Everything else that multiplies
matrices is listed with the reason why no rule reaches it, so that a plan never looks complete where it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..precision.attention import attention_obstacle
from ..precision.backends import backend_of, original_type
from ..precision.grouped import GroupedLinear
from ..precision.matmul import MatMul
from ..precision.surroundings import WRAPPER_PARTS

#: Wrappers whose child is called ``module``: a name that models use too, so the wrapper's type decides.
_MODULE_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)

_GEMM_MODULES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Bilinear, "bilinear products are not lowered"),
    (nn.RNNBase, "recurrent layers are not lowered"),
    (nn.RNNCellBase, "recurrent cells are not lowered"),
    (nn.modules.conv._ConvNd, "convolutions are not lowered"),
)


@dataclass(frozen=True, eq=False)
class Target:
    """One layer that rules can match."""

    name: str
    module: nn.Module
    #: Name of the class before lowering.
    type: str
    #: K and N; 0 where unknown, as for a product of two tensors.
    in_features: int
    out_features: int
    #: Parameters of the module itself, bias included.
    params: int
    #: ``linear``, ``attention`` (a projection), ``grouped`` or ``product``.
    kind: str = "linear"
    #: The module whose call multiplies it, where that is another one: attention, for its output projection.
    caller: nn.Module | None = None


@dataclass(frozen=True)
class Unreachable:
    """A module that multiplies matrices and that no rule reaches."""

    name: str
    type: str
    reason: str

    def to_dict(self) -> dict[str, str]:
        """Return the entry as JSON-ready data."""
        return {"name": self.name, "type": self.type, "reason": self.reason}


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield (name without wrapper parts, module, parent) in registration order, each module once."""
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module, nn.Module | None]] = [("", model, None)]
    while stack:
        name, module, parent = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module, parent
        for part, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((name if _is_wrapper(module, part) else f"{name}.{part}" if name else part, child, module))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name without wrapper parts, Parameter) in registration order; one that is used twice comes once."""
    seen: set[int] = set()
    for name, module, _ in named_modules(model):
        for part, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{part}" if name else part, parameter


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile``, DDP and the like: the module that the empty name means."""
    for part, child in model._modules.items():
        if child is not None and _is_wrapper(model, part):
            return unwrap(child)
    return model


def find_targets(model: nn.Module) -> tuple[list[Target], list[Unreachable]]:
    """Return the targets of ``model`` in registration order, and what multiplies matrices out of reach."""
    targets: list[Target] = []
    unreachable: list[Unreachable] = []
    for name, module, parent in named_modules(model):
        kind = original_type(module).__name__
        reason = _out_of_reach(module, parent)
        if reason is not None:
            unreachable.append(Unreachable(name, kind, reason))
            continue
        params = sum(p.numel() for p in module.parameters(recurse=False))
        if isinstance(module, nn.Linear):
            within = parent if isinstance(parent, nn.MultiheadAttention) else None
            role = "linear" if within is None else "attention"
            sizes = (module.in_features, module.out_features, params)
            targets.append(Target(name, module, kind, *sizes, role, caller=within))
        elif isinstance(module, nn.MultiheadAttention):
            name = f"{name}.in_proj" if name else "in_proj"
            targets.append(Target(name, module, kind, module.embed_dim, 3 * module.embed_dim, params, "attention"))
        elif isinstance(module, GroupedLinear):
            targets.append(Target(name, module, kind, module.in_features, module.out_features, params, "grouped"))
        elif isinstance(module, MatMul):
            targets.append(Target(name, module, kind, 0, 0, params, "product"))
    return targets, unreachable


def _is_wrapper(parent: nn.Module, part: str) -> bool:
    return part in WRAPPER_PARTS or (part == "module" and isinstance(parent, _MODULE_WRAPPERS))


def _out_of_reach(module: nn.Module, parent: nn.Module | None) -> str | None:
    if isinstance(module, nn.Linear):
        if isinstance(parent, nn.MultiheadAttention) and attention_obstacle(parent) is not None:
            return "nn.MultiheadAttention reads this weight directly and never calls the module"
        if isinstance(module._parameters.get("weight"), UninitializedParameter):
            return "its shape is unknown before the first forward"
        if "forward" in module.__dict__:
            return "its forward was replaced on the instance, which a swapped class would not reach"
        if backend_of(module) is None and type(module).forward is not nn.Linear.forward:
            return "its class has a forward of its own, which a swap would discard"
        return None
    if isinstance(module, nn.MultiheadAttention):
        return attention_obstacle(module)
    for ours in (GroupedLinear, MatMul):
        if isinstance(module, ours) and backend_of(module) is None:
            if "forward" in module.__dict__ or type(module).forward is not ours.forward:
                return "it has a forward of its own, which a swap would discard"
            return None
    return next((reason for kind, reason in _GEMM_MODULES if isinstance(module, kind)), None)
