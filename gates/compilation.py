"""Compiling what is measured: every arm alike, apart from the others, and never eager in silence."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

#: A graph that keeps recompiling would fall back to eager in one arm and spoil the comparison: it fails instead.
_RECOMPILES = 64


class Compiler:
    """Compiles modules of one arm alike, and apart from those of other arms.

    Dynamo keeps what it decides by code object. Where a graph breaks within a loop, as at a library's layer that is not
    traced, it gives the frame up for good: for all models of that ``forward``, those compiled before included, which
    are then compiled again in pieces. So an arm's modules get outermost frames of their own, one for each ``forward``.
    Hooks of the module itself run outside of them, as under ``torch.compile``. A copy of what it returns has them no
    longer.
    """

    def __init__(self) -> None:
        """Start without a frame."""
        self._frames: dict[str, CodeType] = {}

    def __call__(self, module: nn.Module) -> Any:
        """Return ``module``, compiled."""
        forward = module.forward

        def whole(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        # Which sizes vary is remembered by a frame's name: it is shared by models of one forward, and by no others.
        own = getattr(forward, "__code__", whole.__code__)
        name = re.sub(r"\W", "_", f"{type(module).__name__}_{own.co_filename}_{own.co_firstlineno}")
        whole.__code__ = self._frames.setdefault(name, whole.__code__.replace(co_name=name))
        frame = torch.compile(whole)

        def call(*args: Any, **kwargs: Any) -> Any:
            with _forward_of(module, frame):
                return module(*args, **kwargs)

        compiled: Any = torch.compile(module)
        compiled.forward = call
        return compiled


@contextlib.contextmanager
def _forward_of(module: nn.Module, forward: Any) -> Iterator[None]:
    """Have ``module`` run ``forward`` between its hooks."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


def compile_model(model: nn.Module) -> Any:
    """Compile a model the same way for every arm; see :class:`Compiler`."""
    return Compiler()(model)


@contextlib.contextmanager
def honest_compilation() -> Iterator[None]:
    """Within, a graph that recompiles without end raises instead of falling back to eager silently."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=_RECOMPILES, fail_on_recompile_limit_hit=True):
        yield
