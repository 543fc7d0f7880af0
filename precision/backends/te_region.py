"""Delayed scaling through Transformer Engine: one region around each forward of the whole model.

Transformer Engine advances every amax history in the process when the outermost ``autocast`` ends. A context a layer,
as dynamic scales have, would advance them once a layer; so the model opens one context before its forward and closes
it after, by hooks, and its layers run inside.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..config import LinearConfig
from ..errors import NarrowgateError
from .swap import outside_compile

#: Where a model keeps the handles of its two hooks.
_HANDLES = "_narrowgate_te_region"


class DelayedRegion:
    """The hooks of one model."""

    def __init__(self, config: LinearConfig) -> None:
        self.config = config
        self.recipe: Any = None
        #: Contexts that are open now; several where the model calls itself.
        self.entered: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "recipe": None, "entered": []}

    def open(self, module: nn.Module, args: Any) -> None:
        """Before the model's forward."""
        _enter(self)

    def close(self, module: nn.Module, args: Any, output: Any) -> None:
        """After it, also where it raised."""
        _leave(self)


@outside_compile
def _enter(region: DelayedRegion) -> None:
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]

    from .te_linear import engine_recipe

    if region.recipe is None:
        region.recipe = engine_recipe(region.config)
    context = te.autocast(enabled=True, recipe=region.recipe)
    context.__enter__()
    region.entered.append(context)


@outside_compile
def _leave(region: DelayedRegion) -> None:
    if region.entered:
        region.entered.pop().__exit__(None, None, None)


def attach(model: nn.Module, config: LinearConfig) -> None:
    """Open a region of ``config``'s delayed recipe around each forward of ``model``."""
    region = DelayedRegion(config)
    model.__dict__[_HANDLES] = (
        model.register_forward_pre_hook(region.open),
        model.register_forward_hook(region.close, always_call=True),
    )


def detach(model: nn.Module) -> None:
    """Take the hooks off again."""
    for handle in model.__dict__.pop(_HANDLES, ()):
        handle.remove()


def check_open(name: str) -> None:
    """Refuse to run a layer with delayed scales where no region is open: its scales would never move.

    Raises:
        NarrowgateError: names the layer.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # type: ignore[import-not-found]

    if not (FP8GlobalStateManager.is_fp8_enabled() and FP8GlobalStateManager.get_fp8_recipe().delayed()):
        raise NarrowgateError(
            f"layer '{name}': found a call outside the forward of the model that the recipe was applied to, where "
            "Transformer Engine's delayed scales do not advance; call that model, and do not recompute its layers"
        )
