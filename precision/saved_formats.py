"""Which formats saved tensors may be kept in, and how many bytes they take."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from .spec import Spec

#: Rows shorter than this are statistics, not features.
SHORTEST_ROW = 16
#: Fewer elements than these cost more in kernels than they save.
FEWEST_ELEMENTS = 1024


def unsupported_save(spec: Spec) -> str | None:
    """What is built for saved tensors instead of ``spec``; None where that is."""
    if spec.format == "bf16" and not spec.sr:
        return None
    modified = spec.sr or spec.delayed is not None or spec.hadamard is not None
    modified = modified or spec.clip_p is not None or spec.clip_rms is not None
    if spec.high_precision or spec.fmt.element.bits != 8:
        return "bf16 and formats of eight bits"
    return "codes rounded to nearest, with dynamic scales of unclipped values" if modified else None


def pays(shape: Iterable[int], itemsize: int, spec: Spec) -> bool:
    """Whether a saved tensor is made smaller by ``spec``, and large enough to be worth it.

    Args:
        shape: its sizes; scales reach along the last axis.
        itemsize: bytes of one of its elements.
        spec: a format that :func:`unsupported_save` has nothing against.
    """
    sizes = tuple(shape)
    if len(sizes) < 2 or sizes[-1] < SHORTEST_ROW or prod(sizes) < FEWEST_ELEMENTS:
        return False
    return saved_bytes(sizes, spec) < prod(sizes) * itemsize


def saved_bytes(shape: Iterable[int], spec: Spec) -> int:
    """Bytes of codes and scales of a tensor of ``shape`` in any format, scales along the last axis."""
    *leading, columns = shape
    rows = prod(leading)
    codes = -(-rows * columns * spec.fmt.element.bits // 8)
    if spec.high_precision:
        return codes
    if spec.block is None:
        return codes + 4 * (1 if spec.granularity == "tensor" else rows)
    height, width = spec.block
    scales = -(-rows // height) * -(-columns // width)
    return codes + scales * (1 if spec.fmt.block_scaled else 4) + 4 * spec.fmt.tensor_scale
