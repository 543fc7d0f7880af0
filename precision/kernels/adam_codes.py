"""Adam and AdamW on a weight matrix whose FP8 codes are written in the same pass, row-major and transposed.

The step is that of :mod:`narrowgate.precision.kernels.adam`, on moments in BF16 or FP32; the codes, their scale, the
amax and the count of what saturates are those that the cast kernel would find in the weight afterwards, once the step
was entered in the amax history. With BF16 moments an element takes 22 bytes: the 20 of the step, and two written.

The kernel runs before the history is rolled, so it scales by what the history is about to hold. Where that is nothing
(no step was recorded, or only zeros), the scale is that of the weight's own amax, which is known when the last program
is done: it then makes all codes, slowly, which no run meets twice.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..cast_operators import overflow
from ..spec import Spec
from .adam import AdamRule, AdamTensors, to_bf16, updated
from .device import current_for
from .rounding import NEAREST, magnitude_bits, multiplier_of, rounded_to, scale_of, tile_bits

#: Rows and columns of a tile, the most tiles a program takes, and warps: eight elements a thread at a time, in 128
#: registers. What a program does once costs as much as a tile, so it takes several where there are enough.
_TILE = (32, 64, 16, 8)
_PROGRAMS = 1024
_INTERPRETED = triton.knobs.runtime.interpret
#: Triton's interpreter runs no assembly.
_ASSEMBLY = tl.constexpr(not _INTERPRETED)
#: What was launched before, so is compiled and loaded.
_launched: set[object] = set()


@dataclass(frozen=True)
class CodesOut:
    """Where the codes of a weight [N, K] go, and what their scale comes from."""

    #: ``fp8_*+delayed(n)``, rounded to nearest, without a clip.
    spec: Spec
    #: FP8 [N, K].
    codes: Tensor
    #: FP32 [].
    scale: Tensor
    #: FP8 [K, N].
    turned: Tensor
    #: FP32 [n], read as it will be once ``pending`` was entered.
    history: Tensor
    #: FP32 [], read.
    pending: Tensor
    #: FP32 []: the amax of the new weight, -1 where it is not finite.
    amax: Tensor
    #: int64 [2]: how many of its elements saturated, and where they are counted, 0 between launches.
    past: Tensor
    #: int32 [2]: where programs gather the amax, and count themselves; 0 between launches.
    workspace: Tensor


def is_ready(
    rule: AdamRule, tensors: AdamTensors, out: CodesOut, grad_scale: Tensor | None, found_inf: Tensor | None
) -> bool:
    """Whether such a launch compiles nothing, as one that is being captured must not."""
    return _INTERPRETED or _variant(rule, tensors, out, grad_scale, found_inf) in _launched


def launch_adam_codes(
    rule: AdamRule,
    tensors: AdamTensors,
    out: CodesOut,
    coefficients: Tensor,
    keys: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update a weight [N, K] and its moments in place, and write its codes; K is a multiple of 8, and nothing is empty.

    Args:
        rule: what is computed.
        tensors: what is updated, from offset 0; moments in BF16 or FP32. The gradient, too, where there is a
            ``grad_scale``.
        out: what is written.
        coefficients: its row of :func:`narrowgate.precision.kernels.adam.coefficients`.
        keys: int64 [2]: the keys of the random bits of both moments, where they are rounded stochastically.
        grad_scale: FP32 []: what gradients are to be divided by.
        found_inf: FP32 []: where it is 1, nothing is updated, and the codes are those of the weight as it is.
    """
    count, width = tensors.parameter.shape
    assert width % 8 == 0, width
    assert tensors.offset == 0, tensors.offset
    bm, bn, most, warps = _TILE
    tiles = triton.cdiv(count, bm) * triton.cdiv(width, bn)
    loop = max(1, min(most, tiles // _PROGRAMS))
    element = out.spec.fmt.element
    keys = coefficients if keys is None else keys
    scale, found = (coefficients if x is None else x for x in (grad_scale, found_inf))
    with current_for(tensors.parameter):
        _adam_codes[(triton.cdiv(width, bn), triton.cdiv(count, bm * loop))](
            tensors.parameter.detach(), tensors.grad.detach(), tensors.exp_avg, tensors.exp_avg_sq,
            coefficients, keys, scale, found, count, width,
            out.codes, out.scale, out.turned, out.history, out.pending, out.amax, out.past, out.workspace,
            out.history.numel(), rule.beta1, rule.beta2, rule.eps, rule.weight_decay,
            COUPLED=bool(rule.weight_decay) and not rule.decoupled,
            DECOUPLED=bool(rule.weight_decay) and rule.decoupled, MAXIMIZE=rule.maximize,
            UNSCALE=grad_scale is not None, GUARDED=found_inf is not None, STOCHASTIC=rule.stochastic,
            STEPWISE=_INTERPRETED, MAX=element.max, MANTISSA=element.mantissa_bits, BIAS=element.bias,
            POW2=out.spec.pow2, OVERFLOW=overflow(out.spec), HISTORY=triton.next_power_of_2(out.history.numel()),
            EVEN=count % (bm * loop) == 0 and width % bn == 0, BM=bm, BN=bn, LOOP=loop, num_warps=warps,
        )  # fmt: skip
    _launched.add(_variant(rule, tensors, out, grad_scale, found_inf))


def _variant(rule: AdamRule, tensors: AdamTensors, out: CodesOut, *optional: Tensor | None) -> object:
    """What Triton compiles a kernel of its own for, and the shape."""
    pointers = (tensors.parameter, tensors.grad, tensors.exp_avg, tensors.exp_avg_sq, out.codes, out.turned)
    aligned = tuple(x.data_ptr() % 16 == 0 for x in pointers)
    shape = (tuple(tensors.parameter.shape), out.history.numel(), tensors.exp_avg.dtype)
    decay = (bool(rule.weight_decay), rule.decoupled)
    present = tuple(x is not None for x in optional)
    return tensors.parameter.device, aligned, shape, decay, rule.maximize, rule.stochastic, str(out.spec), present


@triton.jit(do_not_specialize=["length"])
def _adam_codes(
    parameters, grads, exp_avgs, exp_avg_sqs, coefficients, keys, grad_scale, found_inf, N, K,
    codes, scale, turned, history, pending, amax, past, workspace, length,
    beta1, beta2, eps, weight_decay,
    COUPLED: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, UNSCALE: tl.constexpr,
    GUARDED: tl.constexpr, STOCHASTIC: tl.constexpr, STEPWISE: tl.constexpr, MAX: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, POW2: tl.constexpr, OVERFLOW: tl.constexpr, HISTORY: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    pid_n, pid_m = tl.program_id(0), tl.program_id(1)
    # What the history will hold: the newest entry is entered after the step, and the oldest drops out.
    newest = tl.load(pending)
    entries = tl.arange(0, HISTORY)
    held = tl.load(history + entries, mask=entries < length - (newest >= 0).to(tl.int32), other=0.0)
    known = tl.maximum(tl.max(held, 0), newest)
    tensor_scale = scale_of(tl.maximum(known, 0.0).to(tl.int32, bitcast=True), MAX, POW2)
    multiplier = multiplier_of(tensor_scale)
    size, root = tl.load(coefficients + 1), tl.load(coefficients + 2)
    skips = tl.zeros([1, 1], tl.int32)
    if GUARDED:
        skips += (tl.load(found_inf) == 1.0).to(tl.int32)
    n = pid_n * BN + tl.arange(0, BN)
    # Magnitudes are kept apart for each eight neighbours, which lie in one thread, and reduced once.
    larger = tl.zeros([BM, BN // 8], tl.int32)
    local = tl.arange(0, BM)
    offsets = tl.max_contiguous(local[:, None] * K + tl.arange(0, BN)[None, :], [1, 8])
    turned_offsets = tl.arange(0, BN)[:, None] * N + local[None, :]
    for i in range(LOOP):
        first = (pid_m * LOOP + i).to(tl.int64) * BM
        m = first + tl.arange(0, BM)
        start = first * K + pid_n * BN
        if _ASSEMBLY and i + 1 < LOOP:
            left = K - pid_n * BN
            _fetch(parameters, grads, exp_avgs, exp_avg_sqs, start + BM * K, K, N - first - BM, left, EVEN, BM, BN)
        at = offsets
        inside = _inside(m, N, n, K, EVEN)
        g = tl.load(grads + start + at, mask=inside, other=0.0)
        p = tl.load(parameters + start + at, mask=inside, other=0.0)
        mean = tl.load(exp_avgs + start + at, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(exp_avg_sqs + start + at, mask=inside, other=0.0).to(tl.float32)
        written = inside
        if GUARDED:
            written = inside & (skips == 0)
        if UNSCALE:
            g = tl.div_rn(g, tl.load(grad_scale))
            tl.store(grads + start + at, g, mask=written)
        if MAXIMIZE:
            g = -g
        if COUPLED:
            g = tl.fma(p, weight_decay, g)
        before = p
        if DECOUPLED:
            p = tl.fma(-tl.load(coefficients), p, p)
        p, mean, square = updated(p, g, mean, square, size, root, beta1, beta2, eps)
        if GUARDED:
            p = tl.where(skips == 0, p, before)
        tl.store(parameters + start + at, p, mask=written)
        _store_moment(exp_avgs + start, at, mean, written, keys, m, pid_n * BN, K, STOCHASTIC, STEPWISE, BM, BN)
        _store_moment(
            exp_avg_sqs + start, at, square, written, keys + 1, m, pid_n * BN, K, STOCHASTIC, STEPWISE, BM, BN
        )
        p = tl.where(inside, p, 0.0)
        larger = tl.maximum(larger, tl.max(tl.reshape(magnitude_bits(p), [BM, BN // 8, 8]), 2))
        rounded = rounded_to(p * multiplier, 0, MAX, MANTISSA, BIAS, NEAREST, STEPWISE)
        # Eight codes a thread, as many as of what is read: sixteen would have all the rest pass through shared memory.
        tl.store(codes + start + at, rounded.to(codes.dtype.element_ty), mask=inside)
        across = (pid_n * BN).to(tl.int64) * N + first
        tl.store(
            turned + across + turned_offsets,
            _turned(rounded, turned.dtype.element_ty, BM, BN),
            mask=_inside(n, K, m, N, EVEN),
        )

    found = tl.max(larger)
    tl.atomic_max(workspace, found, sem="relaxed")
    # Rounding is monotonic: what no scaled maximum passes, nothing does, and most programs need not count.
    if known > 0 and not (found.to(tl.float32, bitcast=True) * multiplier <= OVERFLOW):
        tl.debug_barrier()  # what this program wrote is read again
        count = tl.zeros([BM], tl.int32)
        for i in range(LOOP):
            m = (pid_m * LOOP + i).to(tl.int64) * BM + tl.arange(0, BM)
            p = tl.load(parameters + m[:, None] * K + n[None, :], mask=_inside(m, N, n, K, EVEN), other=0.0)
            scaled = tl.abs(p * multiplier)
            count += tl.sum(((scaled > OVERFLOW) & (scaled < float("inf"))).to(tl.int32), 1)
        tl.atomic_add(past + 1, tl.sum(count, 0).to(tl.int64), sem="relaxed")
    # All threads' stores come before the count that the last program may go by.
    tl.debug_barrier()
    if tl.atomic_add(workspace + 1, 1) == tl.num_programs(0) * tl.num_programs(1) - 1:
        largest = tl.atomic_max(workspace, 0)
        if not (known > 0):
            tensor_scale = scale_of(largest, MAX, POW2)
            multiplier = multiplier_of(tensor_scale)
            _encode_all(parameters, codes, N, K, K, 1, multiplier, MAX, MANTISSA, BIAS, STEPWISE)
            _encode_all(parameters, turned, K, N, 1, K, multiplier, MAX, MANTISSA, BIAS, STEPWISE)
        finite = largest < 0x7F800000
        tl.store(scale, tl.where(finite, tensor_scale, float("nan")))
        tl.store(amax, tl.where(finite, largest.to(tl.float32, bitcast=True), -1.0))
        tl.store(past, tl.atomic_xchg(past + 1, 0))
        # Left as it was found, for the next launch.
        tl.atomic_xchg(workspace, 0)
        tl.atomic_xchg(workspace + 1, 0)


@triton.jit
def _fetch(
    parameters, grads, exp_avgs, exp_avg_sqs, start, K, rows, columns, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Bring what the next tile reads, of which ``rows`` and ``columns`` are there, to L2: a line of 128 bytes a thread.

    A program has too few warps to hide what a load takes from memory, and no registers left to load ahead.
    """
    LINES: tl.constexpr = BN // 32
    lane = tl.arange(0, 4 * LINES * BM)
    row, stream, line = lane // (4 * LINES), lane // LINES % 4, lane % LINES
    at = start + row * K + line * 32
    # Of moments in BF16 a line holds twice as many.
    WIDER: tl.constexpr = 4 // (exp_avgs.dtype.element_ty.primitive_bitwidth // 8)
    moment = start + row * K + line * 32 * WIDER
    address = tl.where(stream == 0, (parameters + at).to(tl.int64), (grads + at).to(tl.int64))
    address = tl.where(stream == 2, (exp_avgs + moment).to(tl.int64), address)
    address = tl.where(stream == 3, (exp_avg_sqs + moment).to(tl.int64), address)
    wanted = (row < rows) & ((stream < 2) | (line * WIDER < LINES))
    if not EVEN:
        wanted &= tl.where(stream < 2, line * 32, line * 32 * WIDER) < columns
    tl.inline_asm_elementwise(
        "{.reg .pred wanted; setp.ne.s32 wanted, $2, 0; @wanted prefetch.global.L2 [$1]; mov.b32 $0, 0;}",
        "=r,l,r", [address, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _inside(a, rows, b, columns, EVEN: tl.constexpr):
    """Which positions of a tile lie inside; with EVEN, all of them, which compiles to no mask at all."""
    if EVEN:
        return tl.full([a.shape[0], b.shape[0]], True, tl.int1)
    else:  # noqa: RET505 - a branch not taken must not be compiled, so one return a branch
        return (a < rows)[:, None] & (b < columns)[None, :]


@triton.jit
def _store_moment(
    moments, at, x, written, key, m, first, K, STOCHASTIC: tl.constexpr, STEPWISE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Store FP32 ``x`` [BM, BN] of rows ``m`` and columns from ``first``, in the format that moments are stored in."""
    if moments.dtype.element_ty == tl.float32:
        tl.store(moments + at, x, mask=written)
    else:
        bits = tl.zeros([1, 1], tl.int32)
        if STOCHASTIC:
            bits = tile_bits(tl.load(key), m, first, K, BM, BN)
        tl.store(moments + at, to_bf16(x, bits, STOCHASTIC, STEPWISE), mask=written)


@triton.jit
def _turned(x, dtype: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """FP32 ``x`` [BM, BN] as codes [BN, BM].

    It converts anew, two rows at a time: ptxas (CUDA 12.8 to 13.0) stores wrong bytes where one conversion's result is
    stored both packed along the row and byte by byte.
    """
    even, odd = tl.split(tl.permute(tl.reshape(x, [BM // 2, 2, BN]), (0, 2, 1)))
    pairs = tl.join(even, odd).to(dtype)
    return tl.reshape(tl.permute(pairs, (1, 0, 2)), [BN, BM])


@triton.jit
def _encode_all(
    parameters, codes, rows, columns, down, right, multiplier, MAX: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, STEPWISE: tl.constexpr,
):  # fmt: skip
    """Codes [rows, columns] of all parameters, whose strides are ``down`` and ``right``; by one program.

    Other programs wrote them, so they are read where all of them see the same.
    """
    for row in range(rows):
        for start in range(0, columns, 1024):
            at = start + tl.arange(0, 1024)
            source = parameters + tl.full([], 1, tl.int64) * row * down + at.to(tl.int64) * right
            p = tl.load(source, mask=at < columns, other=0.0, cache_modifier=".cg")
            rounded = rounded_to(p * multiplier, 0, MAX, MANTISSA, BIAS, NEAREST, STEPWISE)
            target = codes + tl.full([], 1, tl.int64) * row * columns + at
            tl.store(target, rounded.to(codes.dtype.element_ty), mask=at < columns)
