"""What the kernels of attention over jagged rows do with a tile: find it, load it, know what it may see, store it."""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, NAME: tl.constexpr):
    """Activation of FP32 scores, and its derivative; what a kernel does not use is not compiled."""
    if NAME == "silu":
        gate = tl.sigmoid(x)
        y = x * gate
        slope = gate + y * (1.0 - gate)
    elif NAME == "gelu":
        gate = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        y = x * gate
        slope = gate + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        gate = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        y = x * gate
        slope = gate + y * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif NAME == "hardswish":
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
        slope = tl.where(x < -3.0, 0.0, tl.where(x <= 3.0, x * (1.0 / 3.0) + 0.5, 1.0))
    else:
        tl.static_assert(NAME == "relu")
        y = tl.maximum(x, 0.0)
        slope = tl.where(x > 0.0, 1.0, 0.0)
    return y, slope


@triton.jit
def place_of(tiles, HEADS: tl.constexpr):
    """(tile, head, row) of this program."""
    program = tl.program_id(0)
    return program % tiles, program // tiles % HEADS, program // tiles // HEADS


@triton.jit
def row_of(offsets, row, rows, longest, tokens):
    """(first token, the first that counts, how many count); row ``rows`` and further ones are what lies behind."""
    first = tl.load(offsets + tl.minimum(row, rows))
    end = tl.load(offsets + row + 1, mask=row < rows, other=tokens)
    count = tl.where(row < rows, tl.minimum(end - first, longest), 0)
    return first, end - count, count.to(tl.int32)


@triton.jit
def load_tokens(base, first, at, count, stride, DH: tl.constexpr, BD: tl.constexpr):
    """Tokens [len(at), BD] of one head; zeros past the ``count`` of the row and past the head's width."""
    d = tl.arange(0, BD)
    rows = base + first * stride + at[:, None] * stride + d[None, :]
    if BD == DH:
        x = tl.load(rows, mask=(at < count)[:, None], other=0.0)
    else:
        x = tl.load(rows, mask=(at < count)[:, None] & (d < DH)[None, :], other=0.0)
    return x


@triton.jit
def store_tokens(base, first, at, count, x, stride, DH: tl.constexpr, BD: tl.constexpr):
    """Write what :func:`load_tokens` would read, in the type that lies there."""
    d = tl.arange(0, BD)
    rows = base + first * stride + at[:, None] * stride + d[None, :]
    tl.store(rows, x.to(base.dtype.element_ty), mask=(at < count)[:, None] & (d < DH)[None, :])


@triton.jit
def load_inverse(inverse, first, at, count, HEADS: tl.constexpr):
    """Inverse root mean squares of a tile's tokens, of one head; zeros past the row's end."""
    return tl.load(inverse + (first + at) * HEADS, mask=at < count, other=0.0)


@triton.jit
def inverse_rms(x, eps, DH: tl.constexpr):
    """1 / √(mean x² + eps) of each token [BM, BD], FP32; elements past the head's width are zeros."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) * (1.0 / DH) + eps)


@triton.jit
def through_rms(grad, x, inverse, DH: tl.constexpr):
    """The gradient of ``x`` for that of ``x`` over its root mean square, all FP32."""
    y = x.to(tl.float32) * inverse[:, None]
    return (grad - y * (tl.sum(grad * y, 1) * (1.0 / DH))[:, None]) * inverse[:, None]


@triton.jit
def bias_at(bias, distance, REACH: tl.constexpr):
    """The bias of one head for distances of queries to keys before them; far ones share the last."""
    return tl.load(bias + tl.minimum(tl.maximum(distance, 0), REACH - 1))


@triton.jit
def sum_by_distance(sums, x, nearest, BM: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr):
    """Add x [BM, BN], FP32, to ``sums`` [REACH] by distance; ``nearest`` is that of its first query and first key."""
    # Diagonals become columns: element (i, j) of distance i - j + BN - 1 within the tile.
    WIDE: tl.constexpr = 2 * max(BM, BN)
    diagonal = tl.arange(0, WIDE)
    at = tl.arange(0, BM)[:, None] + (BN - 1) - diagonal[None, :]
    inside = (at >= 0) & (at < BN)
    by_diagonal = tl.sum(tl.where(inside, tl.gather(x, tl.where(inside, at, 0), 1), 0.0), 0)
    distance = tl.arange(0, REACH)
    source = distance - nearest + (BN - 1)
    known = (source >= 0) & (source < WIDE)
    sums += tl.where(known, tl.gather(by_diagonal, tl.where(known, source, 0), 0), 0.0)
    beyond = tl.sum(tl.where(nearest - (BN - 1) + diagonal >= REACH, by_diagonal, 0.0), 0)
    return sums + tl.where(distance == REACH - 1, beyond, 0.0)


@triton.jit
def load_times(times, first, at, count):
    """Times of the keys ``at`` of a row, int64; zeros outside of it."""
    return tl.load(times + first + at, mask=(at >= 0) & (at < count), other=0)


@triton.jit
def buckets_of(of_queries, of_keys, counted, BUCKETS: tl.constexpr):
    """The bit length of the seconds between queries and keys, far ones sharing the last; -1 for what is not counted."""
    apart = of_queries - of_keys
    apart = tl.where(apart < 0, -apart, apart)
    # Without the bit below the leading one nothing rounds up to the next power of two: FP32's exponent is exact.
    exponent = (apart & ~(apart >> 1)).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return tl.where(counted, tl.minimum(tl.maximum(exponent - 126, 0), BUCKETS - 1), -1)


@triton.jit
def bias_of(bias, bucket):
    """The bias of one head for each bucket; 0 where there is none."""
    return tl.load(bias + bucket, mask=bucket >= 0, other=0.0)


@triton.jit
def sum_by_bucket(sums, x, bucket, BUCKETS: tl.constexpr):
    """Add x [BM, BN], FP32, to ``sums`` [BUCKETS] by bucket [BM, BN]."""
    # Pairs of a tile lie about as far apart: only the buckets between its least and its last are looked for.
    least = tl.min(tl.min(tl.where(bucket >= 0, bucket, BUCKETS), 1), 0)
    last = tl.max(tl.max(bucket, 1), 0)
    place = tl.arange(0, BUCKETS)
    for b in range(least, last + 1):
        found = tl.sum(tl.sum(tl.where(bucket == b, x, 0.0), 1), 0)
        sums += tl.where(place == b, found, 0.0)
    return sums


@triton.jit
def clear(
    base,
    first,
    count,
    tile,
    tiles,
    row,
    rows,
    sweepers,
    stride,
    DH: tl.constexpr,
    BD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zeros for tokens that count in no row, shared among the programs of a row, or of those behind the last."""
    zeros = tl.zeros([BLOCK, BD], tl.float32)
    programs = tl.where(row < rows, tiles, tiles * sweepers)
    share = tile + tl.maximum(row - rows, 0) * tiles
    for start in range(share * BLOCK, count, programs * BLOCK):
        store_tokens(base, first, start + tl.arange(0, BLOCK), count, zeros, stride, DH, BD)


@triton.jit
def visible(i, j, shift, window, limited, WINDOWED: tl.constexpr):
    """Which keys j the queries i may see; queries from ``limited`` on have no window."""
    back = i + shift - j
    seen = back >= 0
    if WINDOWED:
        seen = seen & ((back < window) | (i >= limited))
    return seen


@triton.jit
def keys_of(i0, i1, queries, keys, window, n_summary, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BN: tl.constexpr):
    """Keys for queries i0 .. i1 - 1: seen by some in [low, high), by all in [first, last)."""
    shift = keys - queries
    low = 0
    first = 0
    last = keys
    high = keys
    if CAUSAL:
        high = tl.minimum(tl.maximum(i1 + shift, 0), keys)
        last = tl.maximum(i0 + shift + 1, 0) // BN * BN
    if WINDOWED:
        low = tl.where(i1 > queries - n_summary, 0, tl.maximum(i0 + shift - window + 1, 0) // BN * BN)
        first = tl.cdiv(tl.maximum(i1 + shift - window, 0), BN) * BN
    first = tl.minimum(tl.maximum(first, low), high)
    last = tl.maximum(tl.minimum(last, high), first)
    return low, first, last, high


@triton.jit
def queries_of(
    j0, j1, queries, keys, window, n_summary, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BM: tl.constexpr
):
    """Queries that see some of the keys j0 .. j1 - 1 in [low, high), all in [first, last), and summaries from there."""
    shift = keys - queries
    low = 0
    first = 0
    last = queries
    high = queries
    if CAUSAL:
        low = tl.maximum(j0 - shift, 0) // BM * BM
        first = tl.cdiv(tl.maximum(j1 - 1 - shift, 0), BM) * BM
    if WINDOWED:
        high = tl.minimum(tl.maximum(j1 - 1 - shift + window, 0), queries)
        last = tl.maximum(j0 - shift + window, 0) // BM * BM
    first = tl.minimum(tl.maximum(first, low), high)
    last = tl.maximum(tl.minimum(last, high), first)
    summaries = queries
    if WINDOWED:
        passed = low + tl.cdiv(tl.maximum(high - low, 0), BM) * BM
        summaries = tl.maximum(passed, tl.maximum(queries - n_summary, 0) // BM * BM)
    return low, first, last, high, summaries
