"""Rows in groups, by offsets that stay on the device: which group a row is in, and groups padded to equal steps.

Nothing here asks the host how long a group is, so shapes depend on the number of rows and groups only. Where a product
contracts over the rows of each group, its FP8 matrix units want every group to begin at a multiple of 16 rows, and none
to be empty (``prepare_grouped_gemm_data`` in PyTorch's GroupMMCommon.cuh). So groups are laid out anew, each rounded up
to a multiple of :data:`STEP` rows and at least as long, in a tensor long enough for every way in which T rows fall into
E groups. The rows in between are zeros, which change no sum and no amax.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import NarrowgateError
from .stochastic import LANES, philox

#: Rows that a padded group is a multiple of.
STEP = 16


class Groups:
    """T rows of which ``ends[e - 1] .. ends[e]`` are group e's."""

    def __init__(self, ends: Tensor, rows: int) -> None:
        """Note where groups end.

        Args:
            ends: int32 [E], rising to ``rows``, on the rows' device.
            rows: T.
        """
        self.ends, self.rows, self.count = ends, rows, ends.shape[0]
        #: Rows of a padded tensor: enough for E empty groups beside T rows in one, and for E ragged ones.
        self.padded_rows = (rows + STEP - 1) // STEP * STEP + STEP * self.count
        self._known: dict[str, Tensor] = {}

    @property
    def starts(self) -> Tensor:
        """First row of each group, int32 [E]."""
        return self._once("starts", lambda: torch.cat((self.ends.new_zeros(1), self.ends[:-1])))

    @property
    def group(self) -> Tensor:
        """Group of each row, int64 [T]."""
        return self._once("group", lambda: _find(self.ends, self.rows))

    @property
    def place(self) -> Tensor:
        """Place of each row within its group, int32 [T]."""
        return self._once("place", lambda: _count(self.rows, self.ends) - self.starts[self.group])

    @property
    def padded_ends(self) -> Tensor:
        """Where each group ends in a padded tensor, int32 [E]: multiples of :data:`STEP`, rising strictly."""
        return self._once("padded_ends", self._pad_ends)

    @property
    def padded_group(self) -> Tensor:
        """Group of each padded row, int64; the rows behind the last group count to it."""
        return self._once("padded_group", lambda: _find(self.padded_ends, self.padded_rows).clamp(max=self.count - 1))

    @property
    def padded_place(self) -> Tensor:
        """Place of each padded row within its group, int32."""
        return self._once("padded_place", self._pad_place)

    def _pad_ends(self) -> Tensor:
        steps = ((self.ends - self.starts + STEP - 1) // STEP).clamp(min=1)
        return (steps * STEP).cumsum(0, dtype=torch.int32)

    def _pad_place(self) -> Tensor:
        starts = torch.cat((self.padded_ends.new_zeros(1), self.padded_ends[:-1]))
        return _count(self.padded_rows, self.ends) - starts[self.padded_group]

    def _once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        # Not functools.cached_property, whose lock Dynamo cannot trace in Python 3.11.
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]

    def pad(self, x: Tensor) -> Tensor:
        """Lay ``x`` [T, C] out with its groups padded by zeros: [padded_rows, C], in one pass."""
        if self.rows == 0:
            return x.new_zeros(self.padded_rows, x.shape[1])
        sizes = (self.ends - self.starts)[self.padded_group]
        source = self.starts[self.padded_group] + self.padded_place
        held = x.index_select(0, source.clamp(max=self.rows - 1))
        return torch.where((self.padded_place < sizes).unsqueeze(1), held, 0)

    def largest(self, magnitudes: Tensor) -> Tensor:
        """Largest of the non-negative FP32 ``magnitudes`` [T, C] of each group: [E, C]; 0 if empty, NaN if one is."""
        return _largest(magnitudes, self.group, self.count)

    def padded_largest(self, magnitudes: Tensor) -> Tensor:
        """:meth:`largest` of padded rows: [padded_rows, C] -> [E, C]."""
        blocks = magnitudes.unflatten(0, (self.padded_rows // STEP, STEP)).amax(1)
        return _largest(blocks, self.padded_group[::STEP], self.count)

    def sizes(self) -> list[int]:
        """Rows of each group, on the host: waits for the device."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1)).tolist()


def check_offsets(offsets: Tensor, x: Tensor) -> Tensor:
    """Return ``offsets`` as int32 beside ``x`` [T, ..], with a check on the device that they rise from 0 to T.

    The check is asynchronous: on a GPU, offsets that do not fit end the process's use of the device, with the message
    below. A compiled graph does not check.
    """
    ends = offsets.to(device=x.device, dtype=torch.int32)
    if not torch.compiler.is_compiling():
        rises = torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_full((1,), x.shape[0])) >= 0
        fits = rises.all() & (ends[-1] == x.shape[0])
        torch.ops.aten._assert_async.msg(fits, "grouped linear: expected offsets that rise from 0 to T")
    return ends


def host_sizes(offsets: Tensor, rows: int) -> list[int]:
    """Return the rows of each group, on the host: waits for the device.

    Raises:
        NarrowgateError: the offsets do not rise from 0 to ``rows``.
    """
    ends = offsets.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if any(size < 0 for size in sizes) or sum(sizes) != rows:
        raise NarrowgateError(f"grouped linear: expected offsets that rise from 0 to {rows}, found {ends}")
    return sizes


def group_bits(keys: Tensor, group: Tensor, place: Tensor, width: int) -> Tensor:
    """Return 16 random bits for every element of rows that belong to groups: int32 [R, width] in [0, 2**16).

    The bits of a row are those that :func:`narrowgate.precision.stochastic.random_bits` gives the same row of its
    group's own matrix [.., width] under the group's key.

    Args:
        keys: int64 [E], a 64-bit key for each group.
        group: int64 [R], each row's group.
        place: int [R], each row's place within its group.
        width: columns.
    """
    return _group_bits_op(keys, group, place.to(torch.int64), width).to(torch.int32).bitwise_and_(0xFFFF)


# An op of its own for the reasons that narrowgate::random_bits is one.
@torch.library.custom_op("narrowgate::group_bits", mutates_args=())
def _group_bits_op(keys: Tensor, group: Tensor, place: Tensor, width: int) -> Tensor:
    """The bits as int16 [R, width]."""
    if keys.is_cuda:
        from .kernels.philox import fill_group_bits

        return fill_group_bits(keys, group, place, width)
    first = place * width
    # As many counters as a row can touch, whatever the place of its first element within one.
    counters = first.unsqueeze(1) // LANES + torch.arange(width // LANES + 2, device=keys.device)
    words = philox(keys[group].unsqueeze(1), counters)
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1).flatten(1)
    column = (first % LANES).unsqueeze(1) + torch.arange(width, device=keys.device)
    return halves.gather(1, column).to(torch.int16)


@_group_bits_op.register_fake
def _(keys: Tensor, group: Tensor, place: Tensor, width: int) -> Tensor:
    return keys.new_empty((group.shape[0], width), dtype=torch.int16)


def _count(rows: int, like: Tensor) -> Tensor:
    return torch.arange(rows, dtype=torch.int32, device=like.device)


def _find(ends: Tensor, rows: int) -> Tensor:
    return torch.searchsorted(ends, _count(rows, ends), right=True)


def _largest(magnitudes: Tensor, group: Tensor, count: int) -> Tensor:
    # As integers: non-negative FP32 numbers order as their bits do, with NaN above all. The largest of a set does not
    # depend on the order in which it is looked through.
    bits = magnitudes.view(torch.int32)
    found = bits.new_zeros(count, bits.shape[1])
    index = group.unsqueeze(1).expand(bits.shape)
    return found.scatter_reduce(0, index, bits, "amax").view(torch.float32)
