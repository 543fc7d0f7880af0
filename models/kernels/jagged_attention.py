"""Pointwise attention over jagged rows: the GPU twin of :mod:`narrowgate.models.kernels.reference`.

A program takes one tile of queries (``attention_forward_kernel``, ``attention_query_gradient_kernel``) or of keys
(``attention_key_gradient_kernel``) of one row and head, and walks over the tiles of the other side that it may see: no
padding, no tile outside of the causal range or the window, no atomic addition, the same bits every run. Backward
computes the scores anew in both of its kernels, seven products in all where atomic additions would need five; nothing
of the size of the scores is ever in memory.

With UNIT, queries and keys are divided by their root mean square without being written anew: a score is q·k over both,
so the products take the tokens as they lie, and what they give is multiplied by the inverses. Those of keys come from
``attention_inverse_rms_kernel``; those of queries the forward kernel finds on its way, and backward reads both.

Activations are zero at zero. So positions past a row's end, which load as zeros, add nothing and need no mask;
only tiles that the causal diagonal or the window's edge crosses are masked element by element.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activate(x, NAME: tl.constexpr):
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
def _place(tiles, HEADS: tl.constexpr):
    """(tile, head, row) of this program."""
    program = tl.program_id(0)
    return program % tiles, program // tiles % HEADS, program // tiles // HEADS


@triton.jit
def _row(offsets, row, rows, longest, tokens):
    """(first token, the first that counts, how many count); row ``rows`` and further ones are what lies behind."""
    first = tl.load(offsets + tl.minimum(row, rows))
    end = tl.load(offsets + row + 1, mask=row < rows, other=tokens)
    count = tl.where(row < rows, tl.minimum(end - first, longest), 0)
    return first, end - count, count.to(tl.int32)


@triton.jit
def _load(base, first, at, count, stride, DH: tl.constexpr, BD: tl.constexpr):
    """Tokens [len(at), BD] of one head; zeros past the ``count`` of the row and past the head's width."""
    d = tl.arange(0, BD)
    rows = base + first * stride + at[:, None] * stride + d[None, :]
    if BD == DH:
        x = tl.load(rows, mask=(at < count)[:, None], other=0.0)
    else:
        x = tl.load(rows, mask=(at < count)[:, None] & (d < DH)[None, :], other=0.0)
    return x


@triton.jit
def _store(base, first, at, count, x, stride, DH: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    rows = base + first * stride + at[:, None] * stride + d[None, :]
    tl.store(rows, x.to(base.dtype.element_ty), mask=(at < count)[:, None] & (d < DH)[None, :])


@triton.jit
def _load_inverse(inverse, first, at, count, HEADS: tl.constexpr):
    """Inverse root mean squares of a tile's tokens, of one head; zeros past the row's end."""
    return tl.load(inverse + (first + at) * HEADS, mask=at < count, other=0.0)


@triton.jit
def _inverse_rms(x, eps, DH: tl.constexpr):
    """1 / √(mean x² + eps) of each token [BM, BD], FP32; elements past the head's width are zeros."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) * (1.0 / DH) + eps)


@triton.jit
def _through_rms(grad, x, inverse, DH: tl.constexpr):
    """The gradient of ``x`` for that of ``x`` over its root mean square, all FP32."""
    y = x.to(tl.float32) * inverse[:, None]
    return (grad - y * (tl.sum(grad * y, 1) * (1.0 / DH))[:, None]) * inverse[:, None]


@triton.jit
def attention_inverse_rms_kernel(
    x, inverse, stride, head_stride, tokens, eps,
    HEADS: tl.constexpr, DH: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``inverse`` [T, H], FP32, of x [T, H, dh]; a program takes ``BLOCK`` heads of tokens."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BD)
    inside = at < tokens * HEADS
    place = at // HEADS * stride + at % HEADS * head_stride
    values = tl.load(x + place[:, None] + d[None, :], mask=inside[:, None] & (d < DH)[None, :], other=0.0)
    tl.store(inverse + at, _inverse_rms(values, eps, DH), mask=inside)


@triton.jit
def _clear(
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
        _store(base, first, start + tl.arange(0, BLOCK), count, zeros, stride, DH, BD)


@triton.jit
def _visible(i, j, shift, window, limited, WINDOWED: tl.constexpr):
    """Which keys j the queries i may see; queries from ``limited`` on have no window."""
    back = i + shift - j
    seen = back >= 0
    if WINDOWED:
        seen = seen & ((back < window) | (i >= limited))
    return seen


@triton.jit
def _keys_of(i0, i1, queries, keys, window, n_summary, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BN: tl.constexpr):
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
def _queries_of(
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


@triton.jit
def _forward_tile(
    acc, query, i, j0, k, v, first, queries, keys, k_stride, v_stride, scale, of_queries, k_inverse, window, limited,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, ACTIVATION: tl.constexpr, HEADS: tl.constexpr,
    DH: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    j = j0 + tl.arange(0, BN)
    key = _load(k, first, j, keys, k_stride, DH, BD)
    value = _load(v, first, j, keys, v_stride, DH, BD)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if UNIT:
        scores *= (of_queries * scale)[:, None] * _load_inverse(k_inverse, first, j, keys, HEADS)[None, :]
    else:
        scores *= scale
    scores, _ = _activate(scores, ACTIVATION)
    if MASKED:
        scores = tl.where(_visible(i[:, None], j[None, :], keys - queries, window, limited, WINDOWED), scores, 0.0)
    return tl.dot(scores.to(value.dtype), value, acc, input_precision=PRECISION)


@triton.jit
def attention_forward_kernel(
    q, k, v, out, q_inverse, k_inverse, q_offsets, kv_offsets, q_stride, q_head, k_stride, k_head, v_stride, v_head,
    rows, sweepers, q_tokens, kv_tokens, tiles, max_q, max_kv, scale, inverse_norm, window, n_summary, eps,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr,
    DH: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out`` [Tq, H, dh], contiguous; strides of the inputs are those of tokens and of heads, in elements.

    With UNIT, ``k_inverse`` [Tk, H] is read and ``q_inverse`` [Tq, H] written, for the queries that count.
    """
    tile, head, row = _place(tiles, HEADS)
    if CAUSAL:
        # The latest queries see the most: they start first.
        tile = tiles - 1 - tile
    begin, first, queries = _row(q_offsets, row, rows, max_q, q_tokens)
    out += head * DH
    _clear(out, begin, (first - begin).to(tl.int32), tile, tiles, row, rows, sweepers, HEADS * DH, DH, BD, BM)
    i0 = tile * BM
    if i0 < queries:
        _, first_key, keys = _row(kv_offsets, row, rows, max_kv, kv_tokens)
        k += head * k_head
        v += head * v_head
        i = i0 + tl.arange(0, BM)
        query = _load(q + head * q_head, first, i, queries, q_stride, DH, BD)
        of_queries = tl.full([BM], 1.0, tl.float32)
        if UNIT:
            k_inverse += head
            of_queries = _inverse_rms(query, eps, DH)
            tl.store(q_inverse + (first + i) * HEADS + head, of_queries, mask=i < queries)
        limited = queries - n_summary
        low, inner, outer, high = _keys_of(
            i0, tl.minimum(i0 + BM, queries), queries, keys, window, n_summary, CAUSAL, WINDOWED, BN
        )
        acc = tl.zeros([BM, BD], tl.float32)
        for j0 in range(inner, outer, BN):
            acc = _forward_tile(
                acc, query, i, j0, k, v, first_key, queries, keys, k_stride, v_stride, scale, of_queries, k_inverse,
                window, limited, False, WINDOWED, UNIT, ACTIVATION, HEADS, DH, BD, BN, PRECISION,
            )  # fmt: skip
        if CAUSAL:
            before = tl.cdiv(inner - low, BN)
            for step in range(0, before + tl.cdiv(high - outer, BN)):
                j0 = tl.where(step < before, low + step * BN, outer + (step - before) * BN)
                acc = _forward_tile(
                    acc, query, i, j0, k, v, first_key, queries, keys, k_stride, v_stride, scale, of_queries, k_inverse,
                    window, limited, True, WINDOWED, UNIT, ACTIVATION, HEADS, DH, BD, BN, PRECISION,
                )  # fmt: skip
        _store(out, first, i, queries, acc * inverse_norm, HEADS * DH, DH, BD)


@triton.jit
def _query_gradient_tile(
    acc, query, grad, i, j0, k, v, first, queries, keys, k_stride, v_stride, scale, of_queries, k_inverse, window,
    limited,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, ACTIVATION: tl.constexpr, HEADS: tl.constexpr,
    DH: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    j = j0 + tl.arange(0, BN)
    key = _load(k, first, j, keys, k_stride, DH, BD)
    value = _load(v, first, j, keys, v_stride, DH, BD)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    inner = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    if UNIT:
        of_keys = _load_inverse(k_inverse, first, j, keys, HEADS)[None, :]
        scores *= (of_queries * scale)[:, None] * of_keys
        inner *= of_keys
    else:
        scores *= scale
    _, slope = _activate(scores, ACTIVATION)
    inner *= slope
    if MASKED:
        inner = tl.where(_visible(i[:, None], j[None, :], keys - queries, window, limited, WINDOWED), inner, 0.0)
    return tl.dot(inner.to(key.dtype), key, acc, input_precision=PRECISION)


@triton.jit
def attention_query_gradient_kernel(
    q, k, v, grad, q_grad, q_inverse, k_inverse, q_offsets, kv_offsets, q_stride, q_head, k_stride, k_head, v_stride,
    v_head, grad_stride, grad_head, q_grad_stride, rows, sweepers, q_tokens, kv_tokens, tiles, max_q, max_kv, scale,
    inverse_norm, window, n_summary,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr,
    DH: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``q_grad`` [Tq, H, dh], whose heads lie side by side."""
    tile, head, row = _place(tiles, HEADS)
    if CAUSAL:
        tile = tiles - 1 - tile
    begin, first, queries = _row(q_offsets, row, rows, max_q, q_tokens)
    q_grad += head * DH
    _clear(q_grad, begin, (first - begin).to(tl.int32), tile, tiles, row, rows, sweepers, q_grad_stride, DH, BD, BM)
    i0 = tile * BM
    if i0 < queries:
        _, first_key, keys = _row(kv_offsets, row, rows, max_kv, kv_tokens)
        k += head * k_head
        v += head * v_head
        i = i0 + tl.arange(0, BM)
        query = _load(q + head * q_head, first, i, queries, q_stride, DH, BD)
        above = _load(grad + head * grad_head, first, i, queries, grad_stride, DH, BD)
        of_queries = tl.full([BM], 1.0, tl.float32)
        if UNIT:
            k_inverse += head
            of_queries = _load_inverse(q_inverse + head, first, i, queries, HEADS)
        limited = queries - n_summary
        low, inner, outer, high = _keys_of(
            i0, tl.minimum(i0 + BM, queries), queries, keys, window, n_summary, CAUSAL, WINDOWED, BN
        )
        acc = tl.zeros([BM, BD], tl.float32)
        for j0 in range(inner, outer, BN):
            acc = _query_gradient_tile(
                acc, query, above, i, j0, k, v, first_key, queries, keys, k_stride, v_stride, scale, of_queries,
                k_inverse, window, limited, False, WINDOWED, UNIT, ACTIVATION, HEADS, DH, BD, BN, PRECISION,
            )  # fmt: skip
        if CAUSAL:
            before = tl.cdiv(inner - low, BN)
            for step in range(0, before + tl.cdiv(high - outer, BN)):
                j0 = tl.where(step < before, low + step * BN, outer + (step - before) * BN)
                acc = _query_gradient_tile(
                    acc, query, above, i, j0, k, v, first_key, queries, keys, k_stride, v_stride, scale, of_queries,
                    k_inverse, window, limited, True, WINDOWED, UNIT, ACTIVATION, HEADS, DH, BD, BN, PRECISION,
                )  # fmt: skip
        acc *= scale * inverse_norm
        if UNIT:
            acc = _through_rms(acc, query, of_queries, DH)
        _store(q_grad, first, i, queries, acc, q_grad_stride, DH, BD)


@triton.jit
def _key_gradient_tile(
    of_key, of_value, key, value, j, i0, q, grad, first, queries, keys, q_stride, grad_stride, scale, of_keys,
    q_inverse, window, limited,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, ACTIVATION: tl.constexpr, HEADS: tl.constexpr,
    DH: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i = i0 + tl.arange(0, BM)
    query = _load(q, first, i, queries, q_stride, DH, BD)
    above = _load(grad, first, i, queries, grad_stride, DH, BD)
    # Keys by queries: what both sums contract over is then the second axis already.
    scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)
    inner = tl.dot(value, tl.trans(above), input_precision=PRECISION)
    if UNIT:
        of_queries = _load_inverse(q_inverse, first, i, queries, HEADS)[None, :]
        scores *= (of_keys * scale)[:, None] * of_queries
        inner *= of_queries
    else:
        scores *= scale
    scores, slope = _activate(scores, ACTIVATION)
    inner *= slope
    if MASKED:
        seen = _visible(i[None, :], j[:, None], keys - queries, window, limited, WINDOWED)
        scores = tl.where(seen, scores, 0.0)
        inner = tl.where(seen, inner, 0.0)
    of_value = tl.dot(scores.to(above.dtype), above, of_value, input_precision=PRECISION)
    of_key = tl.dot(inner.to(query.dtype), query, of_key, input_precision=PRECISION)
    return of_key, of_value


@triton.jit
def attention_key_gradient_kernel(
    q, k, v, grad, k_grad, v_grad, q_inverse, k_inverse, q_offsets, kv_offsets, q_stride, q_head, k_stride, k_head,
    v_stride, v_head, grad_stride, grad_head, k_grad_stride, v_grad_stride, rows, sweepers, q_tokens, kv_tokens, tiles,
    max_q, max_kv, scale, inverse_norm, window, n_summary,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr,
    DH: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``k_grad`` and ``v_grad`` [Tk, H, dh], whose heads lie side by side.

    A program walks with BN keys over BM queries at a time.
    """
    tile, head, row = _place(tiles, HEADS)
    begin, first, keys = _row(kv_offsets, row, rows, max_kv, kv_tokens)
    k_grad += head * DH
    v_grad += head * DH
    uncounted = (first - begin).to(tl.int32)
    _clear(k_grad, begin, uncounted, tile, tiles, row, rows, sweepers, k_grad_stride, DH, BD, BN)
    _clear(v_grad, begin, uncounted, tile, tiles, row, rows, sweepers, v_grad_stride, DH, BD, BN)
    j0 = tile * BN
    if j0 < keys:
        _, first_query, queries = _row(q_offsets, row, rows, max_q, q_tokens)
        q += head * q_head
        grad += head * grad_head
        j = j0 + tl.arange(0, BN)
        key = _load(k + head * k_head, first, j, keys, k_stride, DH, BD)
        value = _load(v + head * v_head, first, j, keys, v_stride, DH, BD)
        of_keys = tl.full([BN], 1.0, tl.float32)
        if UNIT:
            q_inverse += head
            of_keys = _load_inverse(k_inverse + head, first, j, keys, HEADS)
        limited = queries - n_summary
        low, inner, outer, high, summaries = _queries_of(
            j0, tl.minimum(j0 + BN, keys), queries, keys, window, n_summary, CAUSAL, WINDOWED, BM
        )
        of_key = tl.zeros([BN, BD], tl.float32)
        of_value = tl.zeros([BN, BD], tl.float32)
        for i0 in range(inner, outer, BM):
            of_key, of_value = _key_gradient_tile(
                of_key, of_value, key, value, j, i0, q, grad, first_query, queries, keys, q_stride, grad_stride, scale,
                of_keys, q_inverse, window, limited, False, WINDOWED, UNIT, ACTIVATION, HEADS, DH, BD, BM, PRECISION,
            )  # fmt: skip
        if CAUSAL:
            before = tl.cdiv(inner - low, BM)
            near = before + tl.cdiv(high - outer, BM)
            for step in range(0, near + tl.cdiv(queries - summaries, BM)):
                i0 = tl.where(step < before, low + step * BM, outer + (step - before) * BM)
                i0 = tl.where(step < near, i0, summaries + (step - near) * BM)
                of_key, of_value = _key_gradient_tile(
                    of_key, of_value, key, value, j, i0, q, grad, first_query, queries, keys, q_stride, grad_stride,
                    scale, of_keys, q_inverse, window, limited, True, WINDOWED, UNIT, ACTIVATION, HEADS, DH, BD, BM,
                    PRECISION,
                )  # fmt: skip
        of_key *= scale * inverse_norm
        if UNIT:
            of_key = _through_rms(of_key, key, of_keys, DH)
        _store(k_grad, first, j, keys, of_key, k_grad_stride, DH, BD)
        _store(v_grad, first, j, keys, of_value * inverse_norm, v_grad_stride, DH, BD)
