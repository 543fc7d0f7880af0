"""The operators through which compilers see the cast kernels: ``narrowgate::cast_fp8`` and others.

Both quantize the [M, N] matrix that a pointwise :class:`~narrowgate.precision.kernels.program.Program` makes of its
leaves; ``mn|0`` is the stand-alone cast. On a GPU they launch Triton kernels, elsewhere they are the reference.

``cast_fp8(leaves, program, rows, columns, rows_key, rows_bits, rows_limit, columns_key, columns_bits, columns_limit)``

- ``leaves``: tensors that broadcast to one shape [..., N]; ``program``: a program's text.
- ``rows``, ``columns``: format expression of the operand contracted over columns and over rows; "" for none;
  ``columns`` may be "=", the codes of ``rows``.
- ``*_key``: int64 [], key of the random bits of ``+sr``; ``*_bits``: int16 [M, N], the bits themselves instead;
  ``*_limit``: FP32 [], the magnitude at which values are clipped: needed with ``clip(p=...)``, and found by the kernels
  with ``clip(rms=...)`` where it is not given.

It returns codes [M, N] and their scales, codes [N, M] and their scales, empty where not asked for. Scales are FP32: [],
[M] or [N] for ``row``, [N / 128, M] and [M / 128, N] for 1x128, [M / 128, N / 128] for 128x128.

``cast_fp8_delayed(leaves, program, spec, rows, columns, key, limit, history, pending, saturated, workspace,
recording)``

- ``rows``, ``columns``: whether the codes for a contraction over columns, over rows, are wanted.
- ``history`` to ``workspace``: the state of an :class:`~narrowgate.precision.delayed.AmaxHistory`; the last three are
  written; ``recording``: enter the amax into ``pending`` and count what saturates.

It returns codes [M, N] and [N, M], empty where not wanted, and their scale, FP32 [].

``cast_fp8_summed`` and ``cast_fp8_delayed_summed`` take and return the same and, last, the sums of the columns of the
matrix, FP32 [N], as it is before clipping and rounding: the gradient of a bias out of the cast of a layer's gradient.

``write_bf16(leaves, program)`` returns the same matrix in BF16, not quantized at all: what casts are compared with.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .capability import CAST_GRANULARITIES
from .kernels.program import IDENTITY, Program
from .rounding import overflow_threshold, torch_dtype
from .spec import Spec

#: The numbers by which kernels know a granularity; 0 is none.
_NUMBERS = {name: number for number, name in enumerate(CAST_GRANULARITIES, 1)}
#: As ``columns`` of ``cast_fp8``: the codes of ``rows``, transposed.
SAME = "="

# Not torch.library.custom_op, whose wrappers cost as much host time as launching the kernels does.
_LIBRARY = torch.library.Library("narrowgate", "FRAGMENT")
for _name, _sums in (("", ""), ("_summed", ", Tensor")):
    _LIBRARY.define(
        f"cast_fp8{_name}(Tensor[] leaves, str program, str rows, str columns, Tensor? rows_key, Tensor? rows_bits, "
        "Tensor? rows_limit, Tensor? columns_key, Tensor? columns_bits, Tensor? columns_limit) "
        f"-> (Tensor, Tensor, Tensor, Tensor{_sums})",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _LIBRARY.define(
        f"cast_fp8_delayed{_name}(Tensor[] leaves, str program, str spec, bool rows, bool columns, Tensor? key, "
        "Tensor? limit, Tensor history, Tensor(a!) pending, Tensor(b!) saturated, Tensor(c!) workspace, "
        f"bool recording) -> (Tensor, Tensor, Tensor{_sums})",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
_LIBRARY.define("write_bf16(Tensor[] leaves, str program) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


# Read once: a compiler that meets the environment, or a cached function, complains.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def kernels_on_cpu() -> bool:
    """Triton's interpreter runs kernels on CPU tensors; without it the operators there are their reference."""
    return _INTERPRETED


def launches_on(x: Tensor) -> bool:
    """Whether a kernel can be handed the address of ``x``: none has a subclass, such as a fake, or what is traced."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    return x.is_cuda or (x.device.type == "cpu" and kernels_on_cpu())


@cache
def _launcher() -> Any:
    # Triton is there where kernels are launched, and only there. An import statement costs the host time every time.
    from .kernels.launch import launch_cast

    return launch_cast


def _cast(
    leaves: Sequence[Tensor],
    program: str,
    rows: str,
    columns: str,
    rows_key: Tensor | None,
    rows_bits: Tensor | None,
    rows_limit: Tensor | None,
    columns_key: Tensor | None,
    columns_bits: Tensor | None,
    columns_limit: Tensor | None,
    into: Sequence[Tensor] | None = None,
    summed: bool = False,
) -> tuple[Tensor, ...]:
    return _launcher()(
        leaves,
        program,
        _operand(rows, rows_bits, rows_limit),
        None if columns == SAME else _operand(columns, columns_bits, columns_limit),
        same=columns == SAME,
        limits=(rows_limit, columns_limit),
        keys=(rows_key, columns_key),
        bits=(rows_bits, columns_bits),
        into=into,
        summed=summed,
    )


def _cast_summed(leaves: Sequence[Tensor], program: str, *inputs: Any) -> tuple[Tensor, ...]:
    return _cast(leaves, program, *inputs, summed=True)


def cast_into(x: Tensor, rows: str, columns: str, limits: Sequence[Tensor | None], into: Sequence[Tensor]) -> None:
    """``cast_fp8`` of ``x`` [M, N], rounded to nearest, into tensors of the sizes that it would return.

    Args:
        x: what is cast.
        rows: as for the operator.
        columns: as for the operator.
        limits: ``rows_limit`` and ``columns_limit``.
        into: codes and scales of both operands, empty where there are none.
    """
    inputs = None, None, limits[0], None, None, limits[1]
    if x.is_cuda or kernels_on_cpu():
        _cast([x], IDENTITY, rows, columns, *inputs, into=into)
        return
    for target, found in zip(into, _cast_on_cpu([x], IDENTITY, rows, columns, *inputs), strict=True):
        if target.numel():
            target.copy_(found)


def _cast_on_cpu(
    leaves: Sequence[Tensor], program: str, rows: str, columns: str, *inputs: Tensor | None
) -> tuple[Tensor, ...]:
    rows_key, rows_bits, rows_limit, columns_key, columns_bits, columns_limit = inputs
    if kernels_on_cpu():
        return _cast(leaves, program, rows, columns, rows_key, rows_bits, rows_limit, columns_key, columns_bits,
                     columns_limit)  # fmt: skip
    from .kernels.reference import reference_cast

    random = (rows_key, rows_bits), (columns_key, columns_bits)
    return reference_cast(leaves, Program.parse(program), rows, columns, *random)


def _cast_summed_on_cpu(leaves: Sequence[Tensor], program: str, *inputs: Any) -> tuple[Tensor, ...]:
    if kernels_on_cpu():
        return _cast_summed(leaves, program, *inputs)
    return *_cast_on_cpu(leaves, program, *inputs), _column_sums(leaves, program)


def _column_sums(leaves: Sequence[Tensor], program: str) -> Tensor:
    from .kernels.reference import values

    return values(leaves, Program.parse(program)).sum(0)


def _cast_fake(
    leaves: Sequence[Tensor], program: str, rows: str, columns: str, *inputs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parsed = Program.parse(program)
    count, width = matrix(leaves, parsed)
    shape = (count, width * parsed.pieces)
    codes, scale = _empty(leaves[0], rows, shape, 1)
    turned, second_scale = _empty(leaves[0], rows if columns == SAME else columns, shape, 0)
    return codes, scale, turned, scale.new_empty(0) if columns == SAME else second_scale


def _cast_summed_fake(leaves: Sequence[Tensor], program: str, *inputs: Any) -> tuple[Tensor, ...]:
    return *_cast_fake(leaves, program, *inputs), _sums_fake(leaves, program)


def _sums_fake(leaves: Sequence[Tensor], program: str) -> Tensor:
    parsed = Program.parse(program)
    return leaves[0].new_empty(matrix(leaves, parsed)[1] * parsed.pieces, dtype=torch.float32)


def _delayed(
    leaves: Sequence[Tensor],
    program: str,
    spec: str,
    rows: bool,
    columns: bool,
    key: Tensor | None,
    limit: Tensor | None,
    history: Tensor,
    pending: Tensor,
    saturated: Tensor,
    workspace: Tensor,
    recording: bool,
    summed: bool = False,
) -> tuple[Tensor, ...]:
    if 0 in [leaf.numel() for leaf in leaves]:
        found = _delayed_reference(leaves, program, spec, rows, columns, key, history, pending, saturated, workspace,
                                   recording)  # fmt: skip
        return (*found, _column_sums(leaves, program)) if summed else found
    operand = _operand(spec, None, limit)
    codes, scale, turned, second_scale, *sums = _launcher()(
        leaves,
        program,
        operand if rows else None,
        operand if columns and not rows else None,
        same=rows and columns,
        limits=(limit, limit),
        keys=(key, key),
        bits=(None, None),
        state=(history, pending, saturated, workspace),
        recording=recording,
        summed=summed,
    )
    return codes, turned, scale if rows else second_scale, *sums


def _delayed_summed(leaves: Sequence[Tensor], program: str, *inputs: Any) -> tuple[Tensor, ...]:
    return _delayed(leaves, program, *inputs, summed=True)


def _delayed_on_cpu(
    leaves: Sequence[Tensor], program: str, spec: str, rows: bool, columns: bool, *inputs: Any
) -> tuple[Tensor, ...]:
    if kernels_on_cpu():
        return _delayed(leaves, program, spec, rows, columns, *inputs)
    key, _, *state = inputs
    return _delayed_reference(leaves, program, spec, rows, columns, key, *state)


def _delayed_summed_on_cpu(leaves: Sequence[Tensor], program: str, *inputs: Any) -> tuple[Tensor, ...]:
    if kernels_on_cpu():
        return _delayed_summed(leaves, program, *inputs)
    return *_delayed_on_cpu(leaves, program, *inputs), _column_sums(leaves, program)


def _delayed_reference(
    leaves: Sequence[Tensor], program: str, spec: str, rows: bool, columns: bool, key: Tensor | None, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from .kernels.reference import reference_delayed_cast

    *state, recording = inputs
    history, pending, saturated, workspace = state
    return reference_delayed_cast(
        leaves, Program.parse(program), Spec.parse(spec), rows, columns, key,
        (history, pending, saturated, workspace), recording,
    )  # fmt: skip


def _delayed_fake(
    leaves: Sequence[Tensor], program: str, spec: str, rows: bool, columns: bool, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    parsed = Program.parse(program)
    count, width = matrix(leaves, parsed)
    shape = (count, width * parsed.pieces)
    codes, scale = _empty(leaves[0], spec, shape, 1)
    turned, _ = _empty(leaves[0], spec, shape, 0)
    nothing = codes.new_empty(0)
    return codes if rows else nothing, turned if columns else nothing, scale


def _delayed_summed_fake(leaves: Sequence[Tensor], program: str, *inputs: Any) -> tuple[Tensor, ...]:
    return *_delayed_fake(leaves, program, *inputs), _sums_fake(leaves, program)


def _write(leaves: Sequence[Tensor], program: str) -> Tensor:
    from .kernels.write import launch_write

    return launch_write(leaves, program)


def _write_on_cpu(leaves: Sequence[Tensor], program: str) -> Tensor:
    if kernels_on_cpu():
        return _write(leaves, program)
    from .kernels.reference import values

    return values(leaves, Program.parse(program)).to(torch.bfloat16)


def _write_fake(leaves: Sequence[Tensor], program: str) -> Tensor:
    parsed = Program.parse(program)
    count, width = matrix(leaves, parsed)
    return leaves[0].new_empty((count, width * parsed.pieces), dtype=torch.bfloat16)


for _name, _on_gpu, _on_cpu, _fake in (
    ("cast_fp8", _cast, _cast_on_cpu, _cast_fake),
    ("cast_fp8_delayed", _delayed, _delayed_on_cpu, _delayed_fake),
    ("cast_fp8_summed", _cast_summed, _cast_summed_on_cpu, _cast_summed_fake),
    ("cast_fp8_delayed_summed", _delayed_summed, _delayed_summed_on_cpu, _delayed_summed_fake),
    ("write_bf16", _write, _write_on_cpu, _write_fake),
):
    _LIBRARY.impl(_name, _on_gpu, "CUDA")
    _LIBRARY.impl(_name, _on_cpu, "CPU")
    torch.library.register_fake(f"narrowgate::{_name}", _fake, lib=_LIBRARY)


@lru_cache(maxsize=4096)
def _known_operand(expression: str, given_bits: bool, given_limit: bool) -> Any:
    from .kernels.launch import Operand

    return Operand(Spec.parse(expression), given_bits, given_limit)


def _operand(expression: str, bits: Tensor | None, limit: Tensor | None) -> Any:
    return _known_operand(expression, bits is not None, limit is not None) if expression else None


def matrix(leaves: Sequence[Tensor], program: Program) -> tuple[int, int]:
    """Return (M, N) of one result of ``program`` over N-D ``leaves``: their common shape, leading axes flattened."""
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in leaves))
    return math.prod(shape[:-1]), shape[-1]


def operand_sizes(spec: Spec, shape: tuple[Any, Any], dim: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the sizes of an operand's codes and scales, contracted over ``dim`` of a matrix of ``shape``."""
    count, width = shape
    blocks = [(n + 127) // 128 for n in shape]
    scales: dict[str | None, tuple[Any, ...]] = {
        "tensor": (),
        "row": (count if dim == 1 else width,),
        "1x128": (blocks[1], count) if dim == 1 else (blocks[0], width),
        "128x128": (blocks[0], blocks[1]),
    }
    return (count, width) if dim == 1 else (width, count), scales[spec.granularity]


def _empty(like: Tensor, expression: str, shape: tuple[Any, Any], dim: int) -> tuple[Tensor, Tensor]:
    if not expression:
        return like.new_empty(0, dtype=torch.float8_e4m3fn), like.new_empty(0, dtype=torch.float32)
    spec = Spec.parse(expression)
    codes, scale = operand_sizes(spec, shape, dim)
    dtype = torch_dtype(spec.fmt.element)
    return like.new_empty(codes, dtype=dtype), like.new_empty(scale, dtype=torch.float32)


def granularity_code(spec: Spec | None) -> int:
    """The number by which kernels know a granularity; 0 for none."""
    return 0 if spec is None else _NUMBERS[spec.granularity or ""]


def overflow(spec: Spec) -> float:
    """Magnitude of a scaled value past which it saturates."""
    return overflow_threshold(spec.fmt.element)
