"""Delayed scaling: the scale comes from the largest amax of the last n optimizer steps, not from this tensor.

A kernel can then cast in one pass, at the price of a scale that may be stale: a tensor that grew saturates for one
step. That is counted, and as the amax of every step enters the history, the next step's scale covers it.

The state is a few small tensors and every method is a tensor operation in place, so it works under torch.compile and
in CUDA graphs. The contract with the caller:

- pass the history to :func:`narrowgate.precision.quantize` on every forward and backward (``history=``);
- call :func:`roll` once per optimizer step. All micro-batches of a step, and a recomputed forward, see the same
  history, hence the same scale; their amaxes join in a maximum, so their order and repetition do not matter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cast_operators import launches_on
from .errors import NarrowgateError
from .rounding import overflow_threshold

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .formats import ElementFormat

#: ``pending`` of a step in which nothing was recorded.
_NOTHING = -1.0


class AmaxHistory:
    """Amax history of one operand: the last ``length`` optimizer steps, newest first."""

    def __init__(self, length: int, device: torch.device | str | None = None) -> None:
        """Start an empty history of ``length`` steps on ``device``."""
        assert length >= 1, length
        #: FP32 [length]; zeros where no step was recorded yet.
        self.history = torch.zeros(length, device=device)
        #: FP32 []: largest amax since the last :func:`roll`; -1 if none.
        self.pending = torch.full((), _NOTHING, device=device)
        #: int64 []: elements that saturated since the counter was last set to zero.
        self.saturated = torch.zeros((), dtype=torch.int64, device=device)
        #: int32 [2], zeros: where a cast kernel gathers an amax and counts the programs that are done.
        self.workspace = torch.zeros(2, dtype=torch.int32, device=device)
        #: False in evaluation: the history is used and left as it is.
        self.recording = True

    def amax(self, current: Tensor) -> Tensor:
        """Return the amax to scale by: the history's largest, or ``current`` (FP32, []) while it holds none."""
        largest = self.history.amax()
        return torch.where(largest > 0, largest, current)

    def record(self, current: Tensor) -> None:
        """Note this tensor's amax (FP32, []); a non-finite one never enters."""
        finite = torch.where(current < torch.inf, current, _NOTHING)
        self.pending.copy_(torch.maximum(self.pending, finite))

    def to(self, device: torch.device | str) -> AmaxHistory:
        """Move the state to ``device`` in place and return it."""
        self.history, self.pending = self.history.to(device), self.pending.to(device)
        self.saturated, self.workspace = self.saturated.to(device), self.workspace.to(device)
        return self

    def frozen(self) -> AmaxHistory:
        """Return this history as evaluation sees it: the same tensors, read and never written."""
        twin = copy.copy(self)
        twin.recording = False
        return twin

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state; resuming from it in the middle of an accumulated step is exact."""
        return {name: getattr(self, name).clone() for name in ("history", "pending", "saturated")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            NarrowgateError: an entry is missing or the history has another length.
        """
        for name in ("history", "pending", "saturated"):
            own, saved = getattr(self, name), state.get(name)
            if saved is None:
                raise NarrowgateError(f"amax history: '{name}' is missing, found {sorted(state)}")
            if saved.shape != own.shape:
                raise NarrowgateError(
                    f"amax history: '{name}' has shape {tuple(saved.shape)}, expected {tuple(own.shape)}"
                )
            own.copy_(saved)


def count_saturated(history: AmaxHistory, scaled: Tensor, element: ElementFormat) -> None:
    """Add to ``history`` how many elements lie beyond what ``element`` holds; what is not finite saturates nothing.

    Args:
        history: whose counter.
        scaled: the values over the scale that the history knows, also where a non-finite one spoils the tensor's own.
        element: the format.
    """
    magnitude = scaled.abs()
    past = (magnitude > overflow_threshold(element)) & (magnitude < torch.inf)
    # In place on the tensor, not the attribute: within autograd.Function a compiler allows no other.
    history.saturated.add_(past.sum())


def roll(histories: Sequence[AmaxHistory], group: ProcessGroup | None = None) -> None:
    """Close an optimizer step: what was recorded since the last call becomes the newest entry of every history.

    A history that recorded nothing, or only non-finite amaxes, keeps its entries.

    Args:
        histories: all histories of the model, on one device; with ``group``, in the same order on every rank.
        group: data-parallel group over which the amaxes are joined (one all-reduce for all histories).
    """
    if not histories:
        return
    # A few operations for all histories of one length, not a few for each: a model has hundreds.
    by_length: dict[int, list[AmaxHistory]] = {}
    for history in histories:
        by_length.setdefault(history.history.numel(), []).append(history)
    if group is None and launches_on(histories[0].history):
        from .kernels.roll import roll_in_one

        for length, alike in list(by_length.items()):
            if roll_in_one([h.history for h in alike], [h.pending for h in alike], _NOTHING):
                del by_length[length]
        histories = [history for alike in by_length.values() for history in alike]
        if not histories:
            return
    pending = torch.stack([history.pending for history in histories])
    if group is not None:
        torch.distributed.all_reduce(pending, torch.distributed.ReduceOp.MAX, group)
    newest = dict(zip(map(id, histories), pending.unbind(), strict=True))
    for alike in by_length.values():
        entries = [history.history for history in alike]
        held, latest = torch.stack(entries), torch.stack([newest[id(history)] for history in alike]).unsqueeze(1)
        rolled = torch.where(latest >= 0, torch.cat((latest, held[:, :-1]), 1), held)
        torch._foreach_copy_(entries, list(rolled.unbind()))  # type: ignore[attr-defined]
    cleared = [history.pending for history in histories]
    torch._foreach_copy_(cleared, [torch.full_like(pending[0], _NOTHING)] * len(cleared))  # type: ignore[attr-defined]
