"""What the modules of a model save for backward, counted in one eager training step of a copy of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as global_hooks

from ..precision.capability import Device
from ..precision.errors import NarrowgateError
from ..precision.layer import LowPrecisionLayer, layer_state, original_type
from ..precision.saved import is_activation, release_saved
from ..precision.saved_formats import pays, saved_bytes
from ..precision.spec import Spec
from .apply import apply_recipe
from .rates import Rates
from .recipe import Recipe
from .saved_activations import SavedModule, save_format
from .targets import named_modules, unwrap


def plan_saved(
    model: nn.Module,
    recipe: Recipe,
    run: Callable[[nn.Module], Tensor],
    *,
    device: Device,
    rows: Mapping[str, int] | int | None = None,
    rates: Rates | None = None,
) -> tuple[SavedModule, ...]:
    """Run one eager training forward of a copy of ``model`` and return what each module saves for backward.

    Activations count two bytes an element before, whatever dtype ``run`` computes in. Under ``torch.compile`` less is
    saved, as cheap values are computed again: what its partitioner chooses is not predicted here.

    Args:
        model: without a recipe; on any device, the meta device included.
        recipe: for the native backend.
        run: calls the model that it is given on one batch, under autocast where training does, and returns a loss.
        device: what the step is planned for.
        rows: as for :func:`narrowgate.recipes.apply_recipe`: what ``when: profitable`` is decided by.
        rates: likewise.

    Raises:
        RecipeError: as for :func:`narrowgate.recipes.apply_recipe`.
        NarrowgateError: ``run`` saved nothing inside of the model.
    """
    counted = copy.deepcopy(unwrap(model)).train()
    apply_recipe(counted, recipe, backend="native", device=device, rows=rows, rates=rates)
    release_saved(counted)  # its hooks would stand above those that count
    for module in counted.modules():
        if isinstance(module, LowPrecisionLayer):
            layer_state(module).run_on(device)
    counter = _Counter(counted, save_format(recipe))
    handles = [
        global_hooks.register_module_forward_pre_hook(counter.enter),
        global_hooks.register_module_forward_hook(counter.leave, always_call=True),
    ]
    try:
        with torch.compiler.set_stance("force_eager"), saved_tensors_hooks(counter.pack, lambda kept: kept):
            run(counted)
    finally:
        for handle in handles:
            handle.remove()
    if not counter.found:
        raise NarrowgateError("the step that was run saved nothing in the model, expected a training forward of it")
    return tuple(sorted(counter.found.values(), key=lambda entry: entry.bytes - entry.before))


#: Bytes an element of activations, as prices have it: training runs in BF16 whatever ``run`` does here, and the meta
#: device knows no autocast.
_WIDTH = 2


class _Counter:
    """Adds up what is saved, by the module that was running; a tensor that several save counts for the first."""

    def __init__(self, model: nn.Module, spec: Spec | None) -> None:
        self.names = {id(module): (name, module) for name, module, _ in named_modules(model)}
        self.spec = spec
        self.stack: list[nn.Module] = []
        self.found: dict[str, SavedModule] = {}
        #: Saved tensors, held so that no other takes their place.
        self.seen: dict[int, Tensor] = {}
        self.parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack and self.stack[-1] is module:
            self.stack.pop()

    def pack(self, x: Tensor) -> Tensor:
        known = [module for module in self.stack if id(module) in self.names]
        place = x.untyped_storage()._cdata
        if known and place not in self.seen and place not in self.parameters:
            self.seen[place] = x
            name, module = self.names[id(known[-1])]
            width = min(x.element_size(), _WIDTH) if is_activation(x) else x.element_size()
            before = after = x.numel() * width
            if self.spec is not None and is_activation(x) and pays(x.shape, width, self.spec):
                after = saved_bytes(x.shape, self.spec)
            entry = self.found.get(name) or SavedModule(name, original_type(module).__name__, 0, 0, 0)
            self.found[name] = replace(
                entry, tensors=entry.tensors + 1, before=entry.before + before, bytes=entry.bytes + after
            )
        return x
