"""Pointwise attention over jagged rows: the GPU twin of :mod:`narrowgate.models.kernels.reference`.

A program takes one tile of queries (``attention_forward_kernel``, ``attention_query_gradient_kernel``) or of keys
(``attention_key_gradient_kernel``) of one row and head, and walks over the tiles of the other side that it may see: no
padding, no tile outside of the causal range or the window, no atomic addition, the same bits every run. Backward
computes the scores anew in both of its kernels, seven products in all where atomic additions would need five; nothing
of the size of the scores is ever in memory. Rows that one tile holds have kernels of their own
(:mod:`narrowgate.models.kernels.jagged_rows`).

With UNIT, queries and keys are divided by their root mean square without being written anew: a score is q·k over both,
so the products take the tokens as they lie, and what they give is multiplied by the inverses. Those of keys come from
``attention_inverse_rms_kernel``; those of queries the forward kernel finds on its way, and backward reads both.

With BUCKETS, scores have a bias of the time between query and key. Its gradient is a histogram of each tile, added up
bucket by bucket by the kernel over tiles of queries; without, nothing of it is compiled.

Activations are zero at zero. So positions past a row's end, which load as zeros, add nothing and need no mask;
only tiles that the causal diagonal or the window's edge crosses are masked element by element.
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from .jagged_tiles import (
    activate,
    bias_at,
    bias_of,
    buckets_of,
    clear,
    inverse_rms,
    keys_of,
    load_inverse,
    load_times,
    load_tokens,
    place_of,
    queries_of,
    row_of,
    store_tokens,
    sum_by_bucket,
    sum_by_distance,
    through_rms,
    visible,
)


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
    tl.store(inverse + at, inverse_rms(values, eps, DH), mask=inside)


@triton.jit
def _forward_tile(
    acc, query, i, j0, k, v, first, queries, keys, k_stride, v_stride, scale, of_queries, k_inverse, bias, times,
    time_bias, when, window, limited,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, REACH: tl.constexpr, BUCKETS: tl.constexpr,
    ACTIVATION: tl.constexpr, HEADS: tl.constexpr, DH: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    j = j0 + tl.arange(0, BN)
    key = load_tokens(k, first, j, keys, k_stride, DH, BD)
    value = load_tokens(v, first, j, keys, v_stride, DH, BD)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if UNIT:
        scores *= (of_queries * scale)[:, None] * load_inverse(k_inverse, first, j, keys, HEADS)[None, :]
    else:
        scores *= scale
    if REACH:
        scores += bias_at(bias, i[:, None] + (keys - queries) - j[None, :], REACH)
    if BUCKETS:
        counted = (i < limited)[:, None] & (j < keys)[None, :]
        bucket = buckets_of(when[:, None], load_times(times, first, j, keys)[None, :], counted, BUCKETS)
        scores += bias_of(time_bias, bucket)
    scores, _ = activate(scores, ACTIVATION)
    if MASKED:
        scores = tl.where(visible(i[:, None], j[None, :], keys - queries, window, limited, WINDOWED), scores, 0.0)
    return tl.dot(scores.to(value.dtype), value, acc, input_precision=PRECISION)


@triton.jit
def attention_forward_kernel(
    q, k, v, out, q_inverse, k_inverse, bias, times, time_bias, q_offsets, kv_offsets, q_stride, q_head, k_stride,
    k_head, v_stride, v_head, rows, sweepers, q_tokens, kv_tokens, tiles, max_q, max_kv, scale, inverse_norm, window,
    n_summary, eps,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, REACH: tl.constexpr,
    BUCKETS: tl.constexpr, HEADS: tl.constexpr, DH: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out`` [Tq, H, dh], contiguous; strides of the inputs are those of tokens and of heads, in elements.

    With UNIT, ``k_inverse`` [Tk, H] is read and ``q_inverse`` [Tq, H] written, for the queries that count. With REACH,
    ``bias`` [H, REACH], FP32, is added to scores; with BUCKETS so is ``time_bias`` [H, BUCKETS], FP32, by how far apart
    ``times`` [Tk], int64, are: that of the key, and that of the key at which the query stands.
    """
    tile, head, row = place_of(tiles, HEADS)
    if CAUSAL:
        # The latest queries see the most: they start first.
        tile = tiles - 1 - tile
    begin, first, queries = row_of(q_offsets, row, rows, max_q, q_tokens)
    out += head * DH
    clear(out, begin, (first - begin).to(tl.int32), tile, tiles, row, rows, sweepers, HEADS * DH, DH, BD, BM)
    i0 = tile * BM
    if i0 < queries:
        _, first_key, keys = row_of(kv_offsets, row, rows, max_kv, kv_tokens)
        k += head * k_head
        v += head * v_head
        i = i0 + tl.arange(0, BM)
        query = load_tokens(q + head * q_head, first, i, queries, q_stride, DH, BD)
        bias += head * REACH
        time_bias += head * BUCKETS
        when = i
        if BUCKETS:
            when = load_times(times, first_key, i + (keys - queries), keys)
        of_queries = tl.full([BM], 1.0, tl.float32)
        if UNIT:
            k_inverse += head
            of_queries = inverse_rms(query, eps, DH)
            tl.store(q_inverse + (first + i) * HEADS + head, of_queries, mask=i < queries)
        limited = queries - n_summary
        low, inner, outer, high = keys_of(
            i0, tl.minimum(i0 + BM, queries), queries, keys, window, n_summary, CAUSAL, WINDOWED, BN
        )
        acc = tl.zeros([BM, BD], tl.float32)
        for j0 in range(inner, outer, BN):
            acc = _forward_tile(
                acc, query, i, j0, k, v, first_key, queries, keys, k_stride, v_stride, scale, of_queries, k_inverse,
                bias, times, time_bias, when, window, limited, False, WINDOWED, UNIT, REACH, BUCKETS, ACTIVATION, HEADS,
                DH, BD, BN, PRECISION,
            )  # fmt: skip
        if CAUSAL:
            before = tl.cdiv(inner - low, BN)
            for step in range(0, before + tl.cdiv(high - outer, BN)):
                j0 = tl.where(step < before, low + step * BN, outer + (step - before) * BN)
                acc = _forward_tile(
                    acc, query, i, j0, k, v, first_key, queries, keys, k_stride, v_stride, scale, of_queries, k_inverse,
                    bias, times, time_bias, when, window, limited, True, WINDOWED, UNIT, REACH, BUCKETS, ACTIVATION,
                    HEADS, DH, BD, BN, PRECISION,
                )  # fmt: skip
        store_tokens(out, first, i, queries, acc * inverse_norm, HEADS * DH, DH, BD)


@triton.jit
def _query_gradient_tile(
    acc, of_bias, of_time, query, grad, i, i0, j0, k, v, first, queries, keys, k_stride, v_stride, scale, of_queries,
    k_inverse, bias, times, time_bias, when, window, limited,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, REACH: tl.constexpr, BUCKETS: tl.constexpr,
    ACTIVATION: tl.constexpr, HEADS: tl.constexpr, DH: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    j = j0 + tl.arange(0, BN)
    key = load_tokens(k, first, j, keys, k_stride, DH, BD)
    value = load_tokens(v, first, j, keys, v_stride, DH, BD)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    inner = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    of_keys = 1.0
    if UNIT:
        of_keys = load_inverse(k_inverse, first, j, keys, HEADS)[None, :]
        scores *= (of_queries * scale)[:, None] * of_keys
    else:
        scores *= scale
    if REACH:
        scores += bias_at(bias, i[:, None] + (keys - queries) - j[None, :], REACH)
    bucket = 0
    if BUCKETS:
        counted = (i < limited)[:, None] & (j < keys)[None, :]
        bucket = buckets_of(when[:, None], load_times(times, first, j, keys)[None, :], counted, BUCKETS)
        scores += bias_of(time_bias, bucket)
    _, slope = activate(scores, ACTIVATION)
    inner *= slope
    if MASKED:
        inner = tl.where(visible(i[:, None], j[None, :], keys - queries, window, limited, WINDOWED), inner, 0.0)
    if REACH:
        of_bias = sum_by_distance(of_bias, inner, i0 + keys - queries - j0, BM, BN, REACH)
    if BUCKETS:
        of_time = sum_by_bucket(of_time, inner, bucket, BUCKETS)
    if UNIT:
        inner *= of_keys
    return tl.dot(inner.to(key.dtype), key, acc, input_precision=PRECISION), of_bias, of_time


@triton.jit
def attention_query_gradient_kernel(
    q, k, v, grad, q_grad, bias_grad, time_grad, q_inverse, k_inverse, bias, times, time_bias, q_offsets, kv_offsets,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, grad_stride, grad_head, q_grad_stride, rows, sweepers,
    q_tokens, kv_tokens, tiles, max_q, max_kv, scale, inverse_norm, window, n_summary,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, REACH: tl.constexpr,
    BUCKETS: tl.constexpr, HEADS: tl.constexpr, DH: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``q_grad`` [Tq, H, dh], whose heads lie side by side.

    With REACH also a program's own row of ``bias_grad``, FP32 [programs, REACH], which is all zeros before; with
    BUCKETS that of ``time_grad``, FP32 [programs, BUCKETS].
    """
    tile, head, row = place_of(tiles, HEADS)
    if CAUSAL:
        tile = tiles - 1 - tile
    begin, first, queries = row_of(q_offsets, row, rows, max_q, q_tokens)
    q_grad += head * DH
    clear(q_grad, begin, (first - begin).to(tl.int32), tile, tiles, row, rows, sweepers, q_grad_stride, DH, BD, BM)
    i0 = tile * BM
    if i0 < queries:
        _, first_key, keys = row_of(kv_offsets, row, rows, max_kv, kv_tokens)
        k += head * k_head
        v += head * v_head
        i = i0 + tl.arange(0, BM)
        query = load_tokens(q + head * q_head, first, i, queries, q_stride, DH, BD)
        above = load_tokens(grad + head * grad_head, first, i, queries, grad_stride, DH, BD)
        of_queries = tl.full([BM], 1.0, tl.float32)
        if UNIT:
            k_inverse += head
            of_queries = load_inverse(q_inverse + head, first, i, queries, HEADS)
        bias += head * REACH
        of_bias = tl.zeros([REACH if REACH else 1], tl.float32)
        time_bias += head * BUCKETS
        of_time = tl.zeros([BUCKETS if BUCKETS else 1], tl.float32)
        when = i
        if BUCKETS:
            when = load_times(times, first_key, i + (keys - queries), keys)
        limited = queries - n_summary
        low, inner, outer, high = keys_of(
            i0, tl.minimum(i0 + BM, queries), queries, keys, window, n_summary, CAUSAL, WINDOWED, BN
        )
        acc = tl.zeros([BM, BD], tl.float32)
        for j0 in range(inner, outer, BN):
            acc, of_bias, of_time = _query_gradient_tile(
                acc, of_bias, of_time, query, above, i, i0, j0, k, v, first_key, queries, keys, k_stride, v_stride,
                scale, of_queries, k_inverse, bias, times, time_bias, when, window, limited, False, WINDOWED, UNIT,
                REACH, BUCKETS, ACTIVATION, HEADS, DH, BD, BM, BN, PRECISION,
            )  # fmt: skip
        if CAUSAL:
            before = tl.cdiv(inner - low, BN)
            for step in range(0, before + tl.cdiv(high - outer, BN)):
                j0 = tl.where(step < before, low + step * BN, outer + (step - before) * BN)
                acc, of_bias, of_time = _query_gradient_tile(
                    acc, of_bias, of_time, query, above, i, i0, j0, k, v, first_key, queries, keys, k_stride, v_stride,
                    scale, of_queries, k_inverse, bias, times, time_bias, when, window, limited, True, WINDOWED, UNIT,
                    REACH, BUCKETS, ACTIVATION, HEADS, DH, BD, BM, BN, PRECISION,
                )  # fmt: skip
        acc *= scale * inverse_norm
        if UNIT:
            acc = through_rms(acc, query, of_queries, DH)
        store_tokens(q_grad, first, i, queries, acc, q_grad_stride, DH, BD)
        if REACH:
            own = bias_grad + tl.program_id(0).to(tl.int64) * REACH
            tl.store(own + tl.arange(0, REACH), of_bias * inverse_norm)
        if BUCKETS:
            own = time_grad + tl.program_id(0).to(tl.int64) * BUCKETS
            tl.store(own + tl.arange(0, BUCKETS), of_time * inverse_norm)


@triton.jit
def _key_gradient_tile(
    of_key, of_value, key, value, j, i0, q, grad, first, first_key, queries, keys, q_stride, grad_stride, scale,
    of_keys, q_inverse, bias, times, time_bias, when, window, limited,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, REACH: tl.constexpr, BUCKETS: tl.constexpr,
    ACTIVATION: tl.constexpr, HEADS: tl.constexpr, DH: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    i = i0 + tl.arange(0, BM)
    query = load_tokens(q, first, i, queries, q_stride, DH, BD)
    above = load_tokens(grad, first, i, queries, grad_stride, DH, BD)
    # Keys by queries: what both sums contract over is then the second axis already.
    scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)
    inner = tl.dot(value, tl.trans(above), input_precision=PRECISION)
    if UNIT:
        of_queries = load_inverse(q_inverse, first, i, queries, HEADS)[None, :]
        scores *= (of_keys * scale)[:, None] * of_queries
        inner *= of_queries
    else:
        scores *= scale
    if REACH:
        scores += bias_at(bias, i[None, :] + (keys - queries) - j[:, None], REACH)
    if BUCKETS:
        of_them = load_times(times, first_key, i + (keys - queries), keys)
        counted = (i < limited)[None, :] & (j < keys)[:, None]
        scores += bias_of(time_bias, buckets_of(of_them[None, :], when[:, None], counted, BUCKETS))
    scores, slope = activate(scores, ACTIVATION)
    inner *= slope
    if MASKED:
        seen = visible(i[None, :], j[:, None], keys - queries, window, limited, WINDOWED)
        scores = tl.where(seen, scores, 0.0)
        inner = tl.where(seen, inner, 0.0)
    of_value = tl.dot(scores.to(above.dtype), above, of_value, input_precision=PRECISION)
    of_key = tl.dot(inner.to(query.dtype), query, of_key, input_precision=PRECISION)
    return of_key, of_value


@triton.jit
def attention_key_gradient_kernel(
    q, k, v, grad, k_grad, v_grad, q_inverse, k_inverse, bias, times, time_bias, q_offsets, kv_offsets, q_stride,
    q_head, k_stride, k_head, v_stride, v_head, grad_stride, grad_head, k_grad_stride, v_grad_stride, rows, sweepers,
    q_tokens, kv_tokens, tiles, max_q, max_kv, scale, inverse_norm, window, n_summary,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, REACH: tl.constexpr,
    BUCKETS: tl.constexpr, HEADS: tl.constexpr, DH: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``k_grad`` and ``v_grad`` [Tk, H, dh], whose heads lie side by side.

    A program walks with BN keys over BM queries at a time.
    """
    tile, head, row = place_of(tiles, HEADS)
    begin, first, keys = row_of(kv_offsets, row, rows, max_kv, kv_tokens)
    k_grad += head * DH
    v_grad += head * DH
    uncounted = (first - begin).to(tl.int32)
    clear(k_grad, begin, uncounted, tile, tiles, row, rows, sweepers, k_grad_stride, DH, BD, BN)
    clear(v_grad, begin, uncounted, tile, tiles, row, rows, sweepers, v_grad_stride, DH, BD, BN)
    j0 = tile * BN
    if j0 < keys:
        _, first_query, queries = row_of(q_offsets, row, rows, max_q, q_tokens)
        q += head * q_head
        grad += head * grad_head
        j = j0 + tl.arange(0, BN)
        key = load_tokens(k + head * k_head, first, j, keys, k_stride, DH, BD)
        value = load_tokens(v + head * v_head, first, j, keys, v_stride, DH, BD)
        of_keys = tl.full([BN], 1.0, tl.float32)
        if UNIT:
            q_inverse += head
            of_keys = load_inverse(k_inverse + head, first, j, keys, HEADS)
        bias += head * REACH
        time_bias += head * BUCKETS
        when = j
        if BUCKETS:
            when = load_times(times, first, j, keys)
        limited = queries - n_summary
        low, inner, outer, high, summaries = queries_of(
            j0, tl.minimum(j0 + BN, keys), queries, keys, window, n_summary, CAUSAL, WINDOWED, BM
        )
        of_key = tl.zeros([BN, BD], tl.float32)
        of_value = tl.zeros([BN, BD], tl.float32)
        for i0 in range(inner, outer, BM):
            of_key, of_value = _key_gradient_tile(
                of_key, of_value, key, value, j, i0, q, grad, first_query, first, queries, keys, q_stride, grad_stride,
                scale, of_keys, q_inverse, bias, times, time_bias, when, window, limited, False, WINDOWED, UNIT, REACH,
                BUCKETS, ACTIVATION, HEADS, DH, BD, BM, PRECISION,
            )  # fmt: skip
        if CAUSAL:
            before = tl.cdiv(inner - low, BM)
            near = before + tl.cdiv(high - outer, BM)
            for step in range(0, near + tl.cdiv(queries - summaries, BM)):
                i0 = tl.where(step < before, low + step * BM, outer + (step - before) * BM)
                i0 = tl.where(step < near, i0, summaries + (step - near) * BM)
                of_key, of_value = _key_gradient_tile(
                    of_key, of_value, key, value, j, i0, q, grad, first_query, first, queries, keys, q_stride,
                    grad_stride, scale, of_keys, q_inverse, bias, times, time_bias, when, window, limited, True,
                    WINDOWED, UNIT, REACH, BUCKETS, ACTIVATION, HEADS, DH, BD, BM, PRECISION,
                )  # fmt: skip
        store_tokens(v_grad, first, j, keys, of_value * inverse_norm, v_grad_stride, DH, BD)
        of_key *= scale * inverse_norm
        if UNIT:
            of_key = through_rms(of_key, key, of_keys, DH)
        store_tokens(k_grad, first, j, keys, of_key, k_grad_stride, DH, BD)
