"""Compiling what is measured: every arm alike, apart from the others, and never eager in silence."""

from __future__ import annotations

import contextlib
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
    are then compiled again in pieces. So an arm's modules get an outermost frame of their own, one a class.
    """

    def __init__(self) -> None:
        """Start without a frame."""
        self._frames: dict[str, CodeType] = {}

    def __call__(self, module: nn.Module) -> Any:
        """Return ``module``, compiled."""

        def whole(*args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        # Which sizes vary is remembered by name, and so is still shared by the arms of one model.
        name = type(module).__name__
        whole.__code__ = self._frames.setdefault(name, whole.__code__.replace(co_name=name))
        compiled: Any = torch.compile(module)
        compiled.forward = torch.compile(whole)
        return compiled


def compile_model(model: nn.Module) -> Any:
    """Compile a model the same way for every arm; see :class:`Compiler`."""
    return Compiler()(model)


@contextlib.contextmanager
def honest_compilation() -> Iterator[None]:
    """Within, a graph that recompiles without end raises instead of falling back to eager silently."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=_RECOMPILES, fail_on_recompile_limit_hit=True):
        yield
