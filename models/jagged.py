"""Jagged sequences: flat tokens ``[T, d]`` with row offsets, and the way to padded windows and back.

Rows are padded on the left, so that a row's latest token is the window's last slot: the tail of every row is a plain
slice. Moving between the two layouts is a partial bijection, so both directions and both gradients are gathers, never
atomic additions: repeatable, and fast under ``torch.compile``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class _Gather(torch.autograd.Function):
    """``out[i] = x[index[i]] if valid[i] else 0``, whose adjoint is the same gather along the inverse map."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, valid: Tensor, back_index: Tensor, back_valid: Tensor) -> Tensor:
        return x.index_select(0, index) * valid.unsqueeze(-1).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index, valid, back_index, back_valid = ctx.saved_tensors
        return _Gather.apply(grads[0], back_index, back_valid, index, valid), None, None, None, None


@dataclass(frozen=True, eq=False)
class Rows:
    """The last ``width`` tokens of each row of flat tokens."""

    width: int
    #: [B + 1] int64.
    offsets: Tensor
    #: As :attr:`Jagged.times`.
    times: Tensor | None = field(default=None, kw_only=True)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.offsets.shape[0] - 1


@dataclass(frozen=True, eq=False)
class Window(Rows):
    """The map between flat tokens and the padded last ``width`` tokens of each row."""

    #: [B * width]: the token of each slot, and whether there is one.
    pad_index: Tensor
    pad_valid: Tensor
    #: [T]: the slot of each token, and whether it has one.
    flat_index: Tensor
    flat_valid: Tensor

    def pad(self, x: Tensor) -> Tensor:
        """``[T, d] -> [B, width, d]``, left-padded with zeros, rows cut to their latest tokens."""
        out = _Gather.apply(x, self.pad_index, self.pad_valid, self.flat_index, self.flat_valid)
        return out.view(self.batch, self.width, x.shape[-1])

    def flatten(self, x: Tensor) -> Tensor:
        """``[B, width, d] -> [T, d]``: the adjoint of :meth:`pad`; tokens outside the window get zeros."""
        flat = x.reshape(self.batch * self.width, x.shape[-1])
        return _Gather.apply(flat, self.flat_index, self.flat_valid, self.pad_index, self.pad_valid)


@dataclass(frozen=True, eq=False)
class Jagged:
    """Where the rows lie in a flat ``[T, d]`` tensor; tokens of row ``B`` are dead."""

    #: [T] int64: the row of each token.
    rows: Tensor
    #: [B + 1] int64.
    offsets: Tensor
    #: [T] int64: when each token was, in seconds of any origin; None where nobody asks.
    times: Tensor | None = None

    def last(self, width: int) -> Rows:
        """Return the last ``width`` tokens of every row, where they lie."""
        return Rows(width, self.offsets, times=self.times)

    def window(self, width: int) -> Window:
        """Return the map to the last ``width`` tokens of every row."""
        batch = self.offsets.shape[0] - 1
        ends, lengths = self.offsets[1:], self.offsets.diff()
        slot = torch.arange(width, device=ends.device)
        token = ends.unsqueeze(1) - width + slot
        present = slot >= width - lengths.unsqueeze(1)
        live = self.rows < batch
        row = self.rows.clamp_max(batch - 1)
        place = width - (ends[row] - torch.arange(self.rows.shape[0], device=ends.device))
        kept = live & (place >= 0)
        return Window(
            width,
            self.offsets,
            torch.where(present, token, 0).reshape(-1),
            present.reshape(-1),
            torch.where(kept, row * width + place, 0),
            kept,
            times=self.times,
        )


def even_rows(batch: int, count: int, device: torch.device) -> Rows:
    """Return ``batch`` rows of ``count`` tokens each."""
    return Rows(count, count * torch.arange(batch + 1, device=device))


def append_tokens(x: Tensor, layout: Jagged, extra: Tensor) -> tuple[Tensor, Jagged]:
    """Close every row with tokens of its own.

    Args:
        x: [T, d] flat tokens of ``layout``.
        layout: the rows of ``x``.
        extra: [B, n, d], put behind the tokens of each row.

    Returns:
        [T + B * n, d] with dead tokens still last and set to zero, and the new layout; the time of ``extra`` is 0.
    """
    batch, n, width = extra.shape
    tokens = x.shape[0]
    device = x.device
    owner = torch.arange(batch * n, device=device) // n
    offsets = layout.offsets + n * torch.arange(batch + 1, device=device)
    within = torch.arange(batch * n, device=device) % n
    place = torch.cat([torch.arange(tokens, device=device) + n * layout.rows, offsets[1:][owner] - n + within])
    source = torch.empty_like(place).scatter_(0, place, torch.arange(tokens + batch * n, device=device))
    source_rows = torch.cat([layout.rows, owner])
    rows = source_rows[source]
    both = torch.cat([x, extra.reshape(batch * n, width).to(x.dtype)])
    out = _Gather.apply(both, source, rows < batch, place, source_rows < batch)
    times = None if layout.times is None else torch.cat([layout.times, layout.times.new_zeros(batch * n)])[source]
    return out, Jagged(rows, offsets, times)
