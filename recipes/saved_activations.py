"""The ``activations`` part of a recipe: in what format backward keeps what the forward saves for it.

Low-precision products keep the codes of their wgrad operand whatever it says. With a format, everything else that is
saved goes into it, the inputs of layers whose wgrad is BF16 included, which is lossy and warned about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..precision.saved_formats import pays, saved_bytes
from ..precision.spec import Spec
from .recipe import Recipe

if TYPE_CHECKING:
    from .plan import LayerPlan, Plan

_BF16 = Spec(format="bf16")


@dataclass(frozen=True)
class SavedInput:
    """What backward keeps of one layer's input, to multiply it in wgrad."""

    layer: str
    #: Format expression.
    format: str
    #: Whether it is the wgrad operand itself, else a tensor in BF16 or as ``activations.save`` says.
    operand: bool
    #: Of BF16, and of what is kept, in one step; None where the rows or the sizes are unknown.
    bf16_bytes: int | None
    bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON-ready data."""
        return {
            "layer": self.layer,
            "format": self.format,
            "operand": self.operand,
            "bf16_bytes": self.bf16_bytes,
            "bytes": self.bytes,
        }


@dataclass(frozen=True)
class SavedModule:
    """What one module saves for backward in one eager step, parameters apart (see :func:`plan_saved`)."""

    name: str
    type: str
    tensors: int
    #: Bytes with activations in BF16, and as they are kept.
    before: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON-ready data."""
        return {
            "name": self.name,
            "type": self.type,
            "tensors": self.tensors,
            "before": self.before,
            "bytes": self.bytes,
        }


def save_format(recipe: Recipe) -> Spec | None:
    """Return the format of saved tensors outside products; None leaves them as they are."""
    activations = recipe.flatten().activations
    return activations.save if activations is not None and isinstance(activations.save, Spec) else None


def lossy_layers(plan: Plan) -> tuple[LayerPlan, ...]:
    """Return the layers whose backward multiplies BF16 by an input that was kept in low precision."""
    spec = save_format(plan.recipe)
    if spec is None or spec.high_precision:
        return ()
    return tuple(layer for layer in plan.layers if layer.config.wgrad.high_precision)


def saved_inputs(plan: Plan) -> tuple[SavedInput, ...]:
    """Return in which format each layer's input is kept for its wgrad, with the bytes of one step where it is known.

    Bytes are those of the layer's own copy: a tensor that two layers read in BF16 is kept once.
    """
    spec = save_format(plan.recipe)
    found: list[SavedInput] = []
    for layer in plan.layers:
        operand = layer.config.wgrad.second
        kept = operand if not operand.high_precision else spec if spec is not None else _BF16
        rows = None if plan.rows is None or not layer.in_features else plan.rows.get(layer.name)
        wide = size = None
        if rows is not None:
            wide = 2 * rows * layer.in_features
            # wgrad contracts rows, so that its scales lie along them; a saved tensor's lie along its features.
            sizes = (layer.in_features, rows) if not operand.high_precision else (rows, layer.in_features)
            size = saved_bytes(sizes, kept) if rows else 0
            if operand.high_precision and not pays((rows, layer.in_features), 2, kept):
                kept, size = _BF16, wide
        found.append(SavedInput(layer.name, str(kept), not operand.high_precision, wide, size))
    return tuple(found)


def activations_dict(plan: Plan) -> dict[str, Any]:
    """Return what the plan knows of saved tensors as JSON-ready data."""
    spec = save_format(plan.recipe)
    return {
        "save": "operand" if spec is None else str(spec),
        "lossy": [layer.name for layer in lossy_layers(plan)],
        "inputs": [entry.to_dict() for entry in saved_inputs(plan)],
        "modules": [entry.to_dict() for entry in plan.saved] if plan.saved is not None else None,
    }


def activations_notes(plan: Plan) -> list[str]:
    """Return what backward keeps outside products, one line a fact; nothing where the recipe leaves it alone."""
    spec = save_format(plan.recipe)
    if spec is None:
        return []
    notes = [f"backward keeps what is saved outside low-precision products as {spec}"]
    known = [entry for entry in saved_inputs(plan) if entry.bytes is not None]
    wide, kept = (sum(getattr(entry, name) or 0 for entry in known) for name in ("bf16_bytes", "bytes"))
    if wide:
        notes.append(f"inputs that layers keep for wgrad: {_mib(wide)} in bf16, {_mib(kept)} like this")
    if plan.saved is not None:
        before, after = (sum(getattr(entry, name) for entry in plan.saved) for name in ("before", "bytes"))
        notes.append(f"saved in one eager step: {_mib(before)} with activations in bf16, {_mib(after)} like this")
        shrunk = [entry for entry in plan.saved if entry.bytes < entry.before]
        notes += [
            f"saved by {entry.name or '(root)'} ({entry.type}): {_mib(entry.before)}, {_mib(entry.bytes)} like this"
            for entry in shrunk[:_SHOWN]
        ]
        if len(shrunk) > _SHOWN:
            notes.append(f"and by {len(shrunk) - _SHOWN} more modules that save less (plan --json has them)")
    return notes


#: Modules that a plan's text names; its JSON has all.
_SHOWN = 8


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
