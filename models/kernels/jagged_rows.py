"""Pointwise attention over rows that one tile holds: a program does all of a row and head, forward or backward.

The same as :mod:`narrowgate.models.kernels.jagged_attention`, for rows no longer than a tile on either side. Both sides
of all scores are then in one program: forward finds the inverse root mean squares of keys on its way too, and backward
loads q, k, v and the gradient once, computes scores and slopes once, five products in all instead of seven, and writes
all gradients. No atomic addition, the same bits every run.

Behind a row's end tokens load as zeros, as there, and add nothing. A row without queries or without keys is one whose
tokens all get zeros.
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
    load_inverse,
    load_times,
    load_tokens,
    row_of,
    store_tokens,
    sum_by_bucket,
    sum_by_distance,
    visible,
)


@triton.jit
def _zeroed(begin, first, own, other):
    """How many tokens of a row's side get zeros: those its bound leaves out; all if there are none on the other."""
    return (first - begin).to(tl.int32) + tl.where(other > 0, 0, own)


@triton.jit
def _without(acc, share, x, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """``acc`` less a share of each token of x [BLOCK, BD]; ``share`` broadcasts to the rows or columns of a diagonal.

    Its product with x needs no token in registers. A share of a narrow type is two numbers: rounded, and what is left.
    """
    at = tl.arange(0, BLOCK)
    diagonal = tl.where(at[:, None] == at[None, :], -share, 0.0)
    rounded = diagonal.to(x.dtype)
    acc = tl.dot(rounded, x, acc, input_precision=PRECISION)
    if x.dtype != tl.float32:
        left = diagonal - rounded.to(tl.float32)
        acc = tl.dot(left.to(x.dtype), x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def attention_row_forward_kernel(
    q, k, v, out, q_inverse, k_inverse, bias, times, time_bias, q_offsets, kv_offsets, q_stride, q_head, k_stride,
    k_head, v_stride, v_head, rows, sweepers, q_tokens, kv_tokens, max_q, max_kv, scale, inverse_norm, window,
    n_summary, eps,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, REACH: tl.constexpr,
    BUCKETS: tl.constexpr, HEADS: tl.constexpr, DH: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out`` as ``attention_forward_kernel`` writes it, for rows of up to BM queries and BN keys that count.

    With UNIT ``q_inverse`` [Tq, H] and ``k_inverse`` [Tk, H], FP32, are written where a row has queries and keys.
    """
    head, row = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    begin, first, queries = row_of(q_offsets, row, rows, max_q, q_tokens)
    _begin, first_key, keys = row_of(kv_offsets, row, rows, max_kv, kv_tokens)
    out += head * DH
    clear(out, begin, _zeroed(begin, first, queries, keys), 0, 1, row, rows, sweepers, HEADS * DH, DH, BD, BM)
    if (queries > 0) & (keys > 0):
        i, j = tl.arange(0, BM), tl.arange(0, BN)
        query = load_tokens(q + head * q_head, first, i, queries, q_stride, DH, BD)
        key = load_tokens(k + head * k_head, first_key, j, keys, k_stride, DH, BD)
        value = load_tokens(v + head * v_head, first_key, j, keys, v_stride, DH, BD)
        shift, limited = keys - queries, queries - n_summary
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if UNIT:
            of_queries, of_keys = inverse_rms(query, eps, DH), inverse_rms(key, eps, DH)
            tl.store(q_inverse + (first + i) * HEADS + head, of_queries, mask=i < queries)
            tl.store(k_inverse + (first_key + j) * HEADS + head, of_keys, mask=j < keys)
            # Without an eps those of zeros are infinite, which times zero is no number.
            of_keys = tl.where(j < keys, of_keys, 0.0)
            scores *= (of_queries * scale)[:, None] * of_keys[None, :]
        else:
            scores *= scale
        if REACH:
            scores += bias_at(bias + head * REACH, i[:, None] + shift - j[None, :], REACH)
        if BUCKETS:
            of_them, when = load_times(times, first_key, i + shift, keys), load_times(times, first_key, j, keys)
            counted = (i < limited)[:, None] & (j < keys)[None, :]
            scores += bias_of(time_bias + head * BUCKETS, buckets_of(of_them[:, None], when[None, :], counted, BUCKETS))
        scores, _ = activate(scores, ACTIVATION)
        if CAUSAL:
            scores = tl.where(visible(i[:, None], j[None, :], shift, window, limited, WINDOWED), scores, 0.0)
        found = tl.dot(scores.to(value.dtype), value, input_precision=PRECISION)
        store_tokens(out, first, i, queries, found * inverse_norm, HEADS * DH, DH, BD)


@triton.jit
def attention_row_backward_kernel(
    q, k, v, grad, q_grad, k_grad, v_grad, bias_grad, time_grad, q_inverse, k_inverse, bias, times, time_bias,
    q_offsets, kv_offsets, q_stride, q_head, k_stride, k_head, v_stride, v_head, grad_stride, grad_head, q_grad_stride,
    k_grad_stride, v_grad_stride, rows, sweepers, q_tokens, kv_tokens, max_q, max_kv, scale, inverse_norm, window,
    n_summary,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, UNIT: tl.constexpr, REACH: tl.constexpr,
    BUCKETS: tl.constexpr, HEADS: tl.constexpr, DH: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients, of rows of up to BM queries and BN keys that count: what the kernels of tiles write, as they do.

    ``bias_grad`` [programs, REACH] and ``time_grad`` [programs, BUCKETS], FP32, are all zeros before.
    """
    head, row = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    begin, first, queries = row_of(q_offsets, row, rows, max_q, q_tokens)
    begin_key, first_key, keys = row_of(kv_offsets, row, rows, max_kv, kv_tokens)
    q_grad += head * DH
    k_grad += head * DH
    v_grad += head * DH
    clear(q_grad, begin, _zeroed(begin, first, queries, keys), 0, 1, row, rows, sweepers, q_grad_stride, DH, BD, BM)
    of_row = _zeroed(begin_key, first_key, keys, queries)
    clear(k_grad, begin_key, of_row, 0, 1, row, rows, sweepers, k_grad_stride, DH, BD, BN)
    clear(v_grad, begin_key, of_row, 0, 1, row, rows, sweepers, v_grad_stride, DH, BD, BN)
    if (queries > 0) & (keys > 0):
        i, j = tl.arange(0, BM), tl.arange(0, BN)
        key = load_tokens(k + head * k_head, first_key, j, keys, k_stride, DH, BD)
        query = load_tokens(q + head * q_head, first, i, queries, q_stride, DH, BD)
        value = load_tokens(v + head * v_head, first_key, j, keys, v_stride, DH, BD)
        above = load_tokens(grad + head * grad_head, first, i, queries, grad_stride, DH, BD)
        shift, limited = keys - queries, queries - n_summary
        of_queries, of_keys = tl.full([BM], 1.0, tl.float32), tl.full([BN], 1.0, tl.float32)
        if UNIT:
            of_queries = load_inverse(q_inverse + head, first, i, queries, HEADS)
            of_keys = load_inverse(k_inverse + head, first_key, j, keys, HEADS)
        # Keys by queries: two of the three sums contract over what is the second axis already.
        products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        if UNIT:
            products *= of_keys[:, None] * of_queries[None, :]
        scores = products * scale
        if REACH:
            scores += bias_at(bias + head * REACH, i[None, :] + shift - j[:, None], REACH)
        bucket = 0
        if BUCKETS:
            of_them, when = load_times(times, first_key, i + shift, keys), load_times(times, first_key, j, keys)
            counted = (i < limited)[None, :] & (j < keys)[:, None]
            bucket = buckets_of(of_them[None, :], when[:, None], counted, BUCKETS)
            scores += bias_of(time_bias + head * BUCKETS, bucket)
        scores, slope = activate(scores, ACTIVATION)
        inner = slope * tl.dot(value, tl.trans(above), input_precision=PRECISION)
        if CAUSAL:
            seen = visible(i[None, :], j[:, None], shift, window, limited, WINDOWED)
            scores = tl.where(seen, scores, 0.0)
            inner = tl.where(seen, inner, 0.0)
        if REACH:
            of_bias = sum_by_distance(tl.zeros([REACH], tl.float32), tl.trans(inner), shift, BM, BN, REACH)
            own = bias_grad + tl.program_id(0).to(tl.int64) * REACH
            tl.store(own + tl.arange(0, REACH), of_bias * inverse_norm)
        if BUCKETS:
            of_time = sum_by_bucket(tl.zeros([BUCKETS], tl.float32), inner, bucket, BUCKETS)
            own = time_grad + tl.program_id(0).to(tl.int64) * BUCKETS
            tl.store(own + tl.arange(0, BUCKETS), of_time * inverse_norm)
        key_share, query_share = tl.zeros([BN], tl.float32), tl.zeros([BM], tl.float32)
        if UNIT:
            # Dividing by the root mean square takes from a token's gradient its share along the token: the mean over
            # the head of their product, which is a sum over scores as well.
            along = inner * products
            key_share = tl.sum(along, 1) * of_keys * (1.0 / DH)
            query_share = tl.sum(along, 0) * of_queries * (1.0 / DH)
        # One sum after the other, each stored before the next: registers hold one of them.
        of_value = tl.dot(scores.to(above.dtype), above, input_precision=PRECISION)
        store_tokens(v_grad, first_key, j, keys, of_value * inverse_norm, v_grad_stride, DH, BD)
        of_key = tl.dot((inner * of_queries[None, :]).to(query.dtype), query, input_precision=PRECISION)
        if UNIT:
            of_key = _without(of_key, key_share[:, None], key, BN, PRECISION)
        of_key *= (of_keys * (scale * inverse_norm))[:, None]
        store_tokens(k_grad, first_key, j, keys, of_key, k_grad_stride, DH, BD)
        of_query = tl.dot(tl.trans((inner * of_keys[:, None]).to(key.dtype)), key, input_precision=PRECISION)
        if UNIT:
            # As columns: the sums over keys lie in that order.
            of_query = _without(of_query, query_share[None, :], query, BM, PRECISION)
        of_query *= (of_queries * (scale * inverse_norm))[:, None]
        store_tokens(q_grad, first, i, queries, of_query, q_grad_stride, DH, BD)
