"""What stands in a graph that is compiled while some model saves its activations in a format of its recipe.

Both operators are gone before anything is compiled, and compute nothing (see :mod:`narrowgate.precision.saved_graph`).

``keep_saved(spec)`` carries the format. Annotations tell which nodes it concerns, but the compilers' caches, which know
a graph by its text, do not see annotations.

``kept_operand(x)`` stands between an operand that forward has made and the backward that multiplies it: it is to be
saved as it is, not made again in backward out of a value that was itself saved in fewer bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("narrowgate", "FRAGMENT")
_LIBRARY.define("keep_saved(str spec) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("keep_saved", lambda spec: torch.empty(0), "CompositeImplicitAutograd")
_LIBRARY.define("kept_operand(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("kept_operand", lambda x: x.clone(), "CompositeExplicitAutograd")

#: Whether the pass that removes the marks is installed.
installed = False


def marked(x: Tensor) -> Tensor:
    """Part of an operand that is saved for backward, with its mark where one is read."""
    return torch.ops.narrowgate.kept_operand(x) if torch.compiler.is_compiling() and _installed() else x


def _installed() -> bool:
    """A constant to Dynamo: graphs without marks stay good, as what saves in a format is guarded by its forward."""
    return installed


# What torch.compiler.assume_constant_result does, which would import Dynamo here.
_installed._dynamo_marked_constant = True  # type: ignore[attr-defined]
