"""In which formats optimizer state can be stored, and whose; needs no torch."""

from __future__ import annotations

from .spec import Spec

#: Eight bits are kept from this many elements on, and from this many a row: below, scales eat what codes save.
SMALLEST, SHORTEST = 4096, 16
_BLOCKS = ("1x128", "1x32", "1x16")


def unsupported_state(spec: Spec) -> str | None:
    """Return what is built instead of optimizer state stored as ``spec``; None where that is."""
    if spec.high_precision:
        return None
    blocks = spec.fmt.element.bits == 8 and spec.granularity in _BLOCKS
    modified = spec.clip_p is not None or spec.clip_rms is not None or spec.hadamard is not None
    if blocks and not modified:
        return None
    return "fp32, bf16, and FP8 or MXFP8 in unclipped blocks of a row (fp8_e4m3/1x128), each with or without sr"


def stored_format(shape: tuple[int, ...], spec: Spec) -> Spec | None:
    """How the moments of a parameter of unsharded ``shape`` are stored under ``spec``; None where they stay FP32."""
    if spec.format == "fp32":
        return None
    if spec.high_precision:
        return spec
    elements = 1
    for size in shape:
        elements *= size
    return spec if len(shape) > 1 and elements >= max(SMALLEST, SHORTEST * shape[0]) else None
