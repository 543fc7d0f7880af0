"""FP8 casts of a matrix along one or both contraction axes, in one pass over memory where the scales allow it.

``amax_kernel`` reads the values once and leaves partial maxima: of the whole, by row, or by column, and sums of squares
where an operand is clipped at a multiple of the RMS; :mod:`~narrowgate.precision.kernels.partials` makes scales of rows
and columns of them. ``cast_kernel`` reads the values once more, takes its scale from there, from a history, or from its
own tile's maximum, and writes codes row-major (operand of a contraction over columns), transposed (of a contraction
over rows, which Hopper's matrix units want contiguous), or both. "Values" are what a :mod:`program
<narrowgate.precision.kernels.program>` computes.

Where they are asked for (``SUMS``), sums of columns are left by one of the two on the way, for
:mod:`narrowgate.precision.kernels.partials` to add up.

Passes over the values: one for ``128``-blocks, whose maximum fits a tile, and for delayed scales; two for dynamic
``tensor`` and ``row`` scales, and wherever an RMS must be known first.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from .cast_operands import ABSENT, BLOCK, TENSOR, columns_operand, rows_operand
from .partials import NO_LIMIT, bound_of, of_rows, over_all, with_sums
from .rounding import clip_amax, clip_to, magnitude_bits, multiplier_of, scale_of, sums_of_squares
from .tiles import inside_of, rows_of


@triton.jit
def _largest(history, length, LENGTH: tl.constexpr):
    """Largest entry of an amax history, FP32; 0 while it holds none."""
    at = tl.arange(0, LENGTH)
    return tl.max(tl.load(history + at, mask=at < length, other=0.0), 0)


@triton.jit
def amax_kernel(
    leaves, strides, M, N, tensor_out, row_out, column_out, squares_out, sums, history, history_length,
    TILE: tl.constexpr, ALONG: tl.constexpr, PIECES: tl.constexpr, BY_TENSOR: tl.constexpr, BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr, SQUARES: tl.constexpr, SUMS: tl.constexpr, HISTORY: tl.constexpr, ALIGNED: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Partial maxima as magnitude bits: [programs], [tiles along columns, M] and [programs along rows, N * PIECES].

    With SQUARES, partial sums of squares too: FP64 [programs]. With HISTORY and without SQUARES it does nothing where
    the history holds an entry: the cast will not ask. With SUMS, partial sums of columns as ``cast_kernel`` has them.
    """
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    if HISTORY and not SQUARES and _largest(history, history_length, HISTORY) > 0:
        return
    n = pid_n * BN + tl.arange(0, BN)
    inside_n = inside_of(n, N, EVEN)
    known = ALONG(leaves, n, inside_n)
    # Of eight neighbours, which lie in one thread, and reduced once.
    larger = tl.zeros([BM, BN // 8], tl.float32)
    squares = tl.zeros([BM, BN // 8], tl.float64)
    total = tl.zeros([], tl.int32)
    KEPT: tl.constexpr = SUMS if SUMS else 1
    if BY_COLUMN:
        # Piece by piece, so that one set of maxima is enough; what another piece loaded is still in cache.
        for p in tl.static_range(PIECES):
            piece = tl.zeros([BM, BN], tl.int32)
            added = tl.zeros([KEPT, BN], tl.float32)
            for i in range(LOOP):
                m = (pid_m * LOOP + i).to(tl.int64) * BM + tl.arange(0, BM)
                inside_m = inside_of(m, M, EVEN)
                values = TILE(leaves, strides, m, n, inside_m, inside_n, ALIGNED, known)
                v = tl.where(inside_m[:, None] & inside_n[None, :], values[p], 0.0)
                bits = magnitude_bits(v)
                piece = tl.maximum(piece, bits)
                if SUMS:
                    added += of_rows(v, SUMS, BM, BN)
                if SQUARES:
                    squares += sums_of_squares(v, BM, BN)
                if BY_ROW:
                    tl.store(row_out + (p * tl.num_programs(1) + pid_n) * M + m, tl.max(bits, 1), mask=inside_m)
            columns = tl.max(piece, 0)
            if BY_TENSOR:
                total = tl.maximum(total, tl.max(columns, 0))
            tl.store(column_out + pid_m * (N * PIECES) + p * N + n, columns, mask=inside_n)
            if SUMS:
                tl.store(sums + pid_m * (N * PIECES) + p * N + n, tl.sum(added, 0), mask=inside_n)
    else:
        added = tl.zeros([KEPT, BN], tl.float32)
        added_too = tl.zeros([KEPT, BN], tl.float32)
        for i in range(LOOP):
            m = (pid_m * LOOP + i).to(tl.int64) * BM + tl.arange(0, BM)
            inside_m = inside_of(m, M, EVEN)
            values = TILE(leaves, strides, m, n, inside_m, inside_n, ALIGNED, known)
            for p in tl.static_range(PIECES):
                v = tl.where(inside_m[:, None] & inside_n[None, :], values[p], 0.0)
                if BY_TENSOR:
                    larger = _larger(larger, _of_eight(v, BM, BN))
                if SUMS:
                    added, added_too = with_sums(
                        added, added_too, v, sums, pid_m * LOOP + i, n, N, inside_n, p, PIECES, SUMS, BM, BN
                    )
                if SQUARES:
                    squares += sums_of_squares(v, BM, BN)
                if BY_ROW:
                    largest = tl.max(magnitude_bits(v), 1)
                    tl.store(row_out + (p * tl.num_programs(1) + pid_n) * M + m, largest, mask=inside_m)
        if SUMS and PIECES <= 2:
            tl.store(sums + pid_m * (N * PIECES) + n, tl.sum(added, 0), mask=inside_n)
            if PIECES == 2:
                tl.store(sums + pid_m * (N * PIECES) + N + n, tl.sum(added_too, 0), mask=inside_n)
        if BY_TENSOR:
            total = tl.max(magnitude_bits(larger))
    if BY_TENSOR:
        tl.store(tensor_out + pid_m * tl.num_programs(1) + pid_n, total)
    if SQUARES:
        found = tl.sum(squares)
        if not (found < float("inf")):
            # Rare enough to read again: some value is not finite, and counts as zero.
            squares = tl.zeros([BM, BN // 8], tl.float64)
            for i in range(LOOP):
                m = (pid_m * LOOP + i).to(tl.int64) * BM + tl.arange(0, BM)
                inside_m = inside_of(m, M, EVEN)
                values = TILE(leaves, strides, m, n, inside_m, inside_n, ALIGNED, known)
                for p in tl.static_range(PIECES):
                    v = tl.where(inside_m[:, None] & inside_n[None, :], values[p], 0.0)
                    squares += sums_of_squares(tl.where(tl.abs(v) < float("inf"), v, 0.0), BM, BN)
            found = tl.sum(squares)
        tl.store(squares_out + pid_m * tl.num_programs(1) + pid_n, found)


@triton.jit
def cast_kernel(
    leaves, strides, M, N,
    r_codes, r_scale, r_limit, r_key, r_bits,
    c_codes, c_scale, c_limit, c_key, c_bits,
    amax, parts, squares, sums, history, history_length, pending, saturated, workspace,
    TILE: tl.constexpr, ALONG: tl.constexpr, PIECES: tl.constexpr,
    R: tl.constexpr, R_SR: tl.constexpr, R_MAX: tl.constexpr, R_MANTISSA: tl.constexpr, R_BIAS: tl.constexpr,
    R_POW2: tl.constexpr, R_CLIP: tl.constexpr, R_RMS: tl.constexpr,
    C: tl.constexpr, C_SR: tl.constexpr, C_MAX: tl.constexpr, C_MANTISSA: tl.constexpr, C_BIAS: tl.constexpr,
    C_POW2: tl.constexpr, C_CLIP: tl.constexpr, C_RMS: tl.constexpr,
    SAME: tl.constexpr, SUMS: tl.constexpr, HISTORY: tl.constexpr, RECORD: tl.constexpr, OVERFLOW: tl.constexpr,
    STEPWISE: tl.constexpr, APART: tl.constexpr, WORDS: tl.constexpr, PAIRS: tl.constexpr,
    ALONE: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    """Quantize [M, N * PIECES] values: the operand contracted over columns (``r_``), over rows (``c_``), or both.

    Scales of rows are ready, a tensor's is the largest of ``parts`` partial maxima ``amax``, a block's is found here.
    With SAME the second operand is the first, transposed. With HISTORY there is one set of codes, whose scale comes
    from the history; the last program to finish makes the scale NaN where a value was not finite and, with RECORD,
    enters the amax into ``pending``. With SUMS, that many rows at a time, each program leaves sums of the columns that
    it saw in a row of ``sums``; of more than two results side by side, each tile does. Codes rounded
    stochastically are stored by fours where WORDS says that columns, and turned ones by twos where PAIRS says that rows
    allow it. With ALONE each result side by side has programs of its own, next to each other: they read the same
    leaves, which the second can find in L2, and with half the registers more of them share a multiprocessor.
    """
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    own_piece = pid_m % PIECES
    if ALONE:
        pid_m = pid_m // PIECES
    n = pid_n * BN + tl.arange(0, BN)
    inside_n = inside_of(n, N, EVEN)
    known = ALONG(leaves, n, inside_n)
    width = N * PIECES
    TURNED: tl.constexpr = SAME or C != ABSENT
    # Magnitudes are kept apart for each eight neighbours, which lie in one thread, and reduced once.
    own = tl.zeros([BM, BN // 8], tl.float32)
    KEPT: tl.constexpr = SUMS if SUMS else 1
    added = tl.zeros([KEPT, BN], tl.float32)
    added_too = tl.zeros([KEPT, BN], tl.float32)
    first_program = (pid_m == 0) & (pid_n == 0)
    elements = tl.full([], 1.0, tl.float64) * M * width
    r_bound = bound_of(r_limit, squares, parts, elements, R_CLIP, R_RMS)
    c_bound = bound_of(c_limit, squares, parts, elements, C_CLIP, C_RMS)

    r_tensor, c_tensor = 1.0, 1.0
    if R == TENSOR or C == TENSOR:
        held = 0.0
        if HISTORY:
            held = _largest(history, history_length, HISTORY)
        bits = held.to(tl.int32, bitcast=True) if held > 0 else over_all(amax, parts, 512)
        if R == TENSOR:
            r_tensor = _tensor_scale(bits, held, r_bound, R_MAX, R_POW2, R_CLIP)
            if not HISTORY:
                tl.store(r_scale, r_tensor, mask=first_program)
        if C == TENSOR:
            c_tensor = _tensor_scale(bits, held, c_bound, C_MAX, C_POW2, C_CLIP)
            if not HISTORY:
                tl.store(c_scale, c_tensor, mask=first_program)

    for i in range(LOOP):
        tile_m = pid_m * LOOP + i
        m = tile_m.to(tl.int64) * BM + rows_of(BM, TURNED)
        inside_m = inside_of(m, M, EVEN)
        inside = inside_m[:, None] & inside_n[None, :]
        if not ALONE:
            values = TILE(leaves, strides, m, n, inside_m, inside_n, ALIGNED, known)
        for p in tl.static_range(PIECES):
            if not ALONE or own_piece == p:
                if ALONE:
                    values = TILE(leaves, strides, m, n, inside_m, inside_n, ALIGNED, known)
                v = tl.where(inside, values[p], 0.0)
                if SUMS:
                    added, added_too = with_sums(
                        added, added_too, v, sums, tile_m, n, N, inside_n, p, PIECES, SUMS, BM, BN
                    )
                if R != ABSENT:
                    x = clip_to(v, r_bound, HISTORY or R >= BLOCK) if R_CLIP != NO_LIMIT else v
                    if HISTORY:
                        own = _larger(own, _of_eight(x, BM, BN))
                    rows_operand(
                        x, r_codes, r_scale, r_key, r_bits, r_tensor, c_codes, m, tile_m, pid_n, p, M, N, PIECES, R,
                        R_SR, R_MAX, R_MANTISSA, R_BIAS, R_POW2, SAME, HISTORY, STEPWISE, WORDS, PAIRS, EVEN, BM, BN,
                    )  # fmt: skip
                if C != ABSENT:
                    if APART and R != ABSENT:
                        v = _apart(v)
                    x = clip_to(v, c_bound, HISTORY or C >= BLOCK) if C_CLIP != NO_LIMIT else v
                    if HISTORY:
                        own = _larger(own, _of_eight(x, BM, BN))
                    columns_operand(
                        x, c_codes, c_scale, c_key, c_bits, c_tensor, m, tile_m, pid_n, p, M, N, PIECES, C, C_SR, C_MAX,
                        C_MANTISSA, C_BIAS, C_POW2, HISTORY, STEPWISE, PAIRS, EVEN, BM, BN,
                    )  # fmt: skip

    if SUMS and PIECES <= 2:
        tl.store(sums + pid_m.to(tl.int64) * width + n, tl.sum(added, 0), mask=inside_n)
        if PIECES == 2:
            tl.store(sums + pid_m.to(tl.int64) * width + N + n, tl.sum(added_too, 0), mask=inside_n)
    if HISTORY:
        found = tl.max(magnitude_bits(own))
        tl.atomic_max(workspace, found, sem="relaxed")
        if RECORD:
            # Rounding is monotonic: what no scaled maximum passes, nothing does, and most programs need not count.
            bound = r_bound if R == TENSOR else c_bound
            multiplier = multiplier_of(r_tensor if R == TENSOR else c_tensor)
            if not (found.to(tl.float32, bitcast=True) * multiplier <= OVERFLOW):
                past = tl.zeros([BM], tl.int32)
                for i in range(LOOP):
                    m = (pid_m * LOOP + i).to(tl.int64) * BM + tl.arange(0, BM)
                    inside_m = inside_of(m, M, EVEN)
                    values = TILE(leaves, strides, m, n, inside_m, inside_n, ALIGNED, known)
                    for p in tl.static_range(PIECES):
                        v = tl.where(inside_m[:, None] & inside_n[None, :], values[p], 0.0)
                        if (R_CLIP if R == TENSOR else C_CLIP) != NO_LIMIT:
                            v = clip_to(v, bound, True)
                        past += _past(v * multiplier, OVERFLOW)
                count = tl.sum(past, 0)
                if count > 0:
                    tl.atomic_add(saturated, count.to(tl.int64), sem="relaxed")
        if tl.atomic_add(workspace + 1, 1) == tl.num_programs(0) * tl.num_programs(1) - 1:
            largest = tl.atomic_max(workspace, 0)
            finite = largest < 0x7F800000
            tl.store(r_scale, tl.where(finite, r_tensor if R == TENSOR else c_tensor, float("nan")))
            if RECORD:
                tl.store(
                    pending,
                    tl.maximum(tl.load(pending), tl.where(finite, largest.to(tl.float32, bitcast=True), -1.0)),
                )
            # Left as it was found, for the next launch.
            tl.atomic_xchg(workspace, 0)
            tl.atomic_xchg(workspace + 1, 0)


@triton.jit
def _apart(x):
    """FP32 ``x`` through an instruction that compilers do not see through: what follows is computed once more.

    Without it the layout of the transposed copy is imposed on the whole program, which is then computed twice.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def _tensor_scale(bits, known, bound, LARGEST: tl.constexpr, POW2: tl.constexpr, CLIP: tl.constexpr):
    if CLIP != NO_LIMIT:
        # What a history holds was clipped when it was recorded.
        bits = tl.where(known > 0, bits, clip_amax(bits, bound))
    return scale_of(bits, LARGEST, POW2)


@triton.jit
def _larger(a, b):
    """The larger of two magnitudes, NaN where one is."""
    return tl.maximum(a, b, tl.PropagateNan.ALL)


@triton.jit
def _of_eight(x, BM: tl.constexpr, BN: tl.constexpr):
    """The largest magnitude, FP32 [BM, BN / 8], of eight neighbours in a row of ``x`` [BM, BN]."""
    even, odd = tl.split(tl.reshape(tl.abs(x), [BM, BN // 8, 2, 2, 2]))
    even, odd = tl.split(_larger(even, odd))
    even, odd = tl.split(_larger(even, odd))
    return _larger(even, odd)


@triton.jit
def _past(scaled, OVERFLOW: tl.constexpr):
    """How many elements of each row of a tile saturate; what is not finite is no saturation."""
    magnitude = tl.abs(scaled)
    return tl.sum(((magnitude > OVERFLOW) & (magnitude < float("inf"))).to(tl.int32), 1)
