"""Adam and AdamW on moments in BF16, in one pass over a parameter.

An element's parameter and gradient are read in FP32 and its moments in BF16; updated in FP32, all but the gradient are
written back: 20 bytes, where a step on FP32 moments takes 28. The arithmetic is that of PyTorch's fused kernels, with
their multiply-add pairs, and the random bits are those of :mod:`narrowgate.precision.stochastic`, so that the results
are those of a fused step between two roundings (:mod:`narrowgate.precision.moments`).
"""

# Triton comes with CUDA builds of PyTorch only, and its decorator hides that a kernel takes a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..stochastic import ROUNDS
from .device import current_for

_ROUNDS = tl.constexpr(ROUNDS)
#: Elements a program takes: eight a thread, as many as one counter of Philox serves.
BLOCK, WARPS = 1024, 4
INTERPRETED = triton.knobs.runtime.interpret
#: What was launched before, so is compiled and loaded.
_launched: set[object] = set()


@dataclass(frozen=True)
class AdamRule:
    """What the updates of one call have in common; numbers are rounded to FP32."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    #: AdamW: the parameter decays, not the gradient grows.
    decoupled: bool
    maximize: bool
    #: Moments are rounded stochastically, else to nearest.
    stochastic: bool


@dataclass(frozen=True)
class AdamTensors:
    """One parameter's tensors, all contiguous and of one size, and where it lies in the unsharded one."""

    #: FP32.
    parameter: Tensor
    #: FP32.
    grad: Tensor
    #: BF16.
    exp_avg: Tensor
    #: BF16.
    exp_avg_sq: Tensor
    #: Index of the first element in the unsharded parameter.
    offset: int


def coefficients(lr: float | Tensor, steps: Tensor, rule: AdamRule) -> Tensor:
    """FP32 [n, 4] on the device of ``steps``, FP32 [n], which count the step to be taken.

    A row holds how much of the parameter AdamW takes away, the size of a step, and the root of the second moment's
    bias correction, each computed by the operations of PyTorch's kernel.
    """
    rate = lr.reshape(()) if isinstance(lr, Tensor) and lr.device == steps.device else float(lr)
    rates = torch.zeros_like(steps) + rate
    size = rates / (1 - torch.pow(rule.beta1, steps))
    root = (1 - torch.pow(rule.beta2, steps)).sqrt()
    return torch.stack((rates * rule.weight_decay, size, root, root), -1)


def is_ready(rule: AdamRule, tensors: AdamTensors, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
    """Whether such a launch compiles nothing, as one that is being captured must not."""
    return INTERPRETED or _variant(rule, tensors, grad_scale, found_inf) in _launched


def launch_adam(
    rule: AdamRule,
    tensors: AdamTensors,
    coefficients: Tensor,
    keys: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update one parameter and its moments in place.

    Args:
        rule: what is computed.
        tensors: what is updated; the gradient, too, where there is a ``grad_scale``.
        coefficients: its row of :func:`coefficients`.
        keys: int64 [2]: the keys of the random bits of both moments, where they are rounded stochastically.
        grad_scale: FP32 []: what gradients are to be divided by.
        found_inf: FP32 []: where it is 1, nothing is written.
    """
    count = tensors.parameter.numel()
    if not count:
        return
    skip = tensors.offset % 8
    keys = coefficients if keys is None else keys
    scale, found = (coefficients if x is None else x for x in (grad_scale, found_inf))
    with current_for(tensors.parameter):
        _adam[(triton.cdiv(count + skip, BLOCK),)](
            tensors.parameter.detach(), tensors.grad.detach(), tensors.exp_avg, tensors.exp_avg_sq,
            coefficients, keys, scale, found, tensors.offset // 8, count,
            rule.beta1, rule.beta2, rule.eps, rule.weight_decay,
            SKIP=skip, COUPLED=bool(rule.weight_decay) and not rule.decoupled,
            DECOUPLED=bool(rule.weight_decay) and rule.decoupled, MAXIMIZE=rule.maximize,
            UNSCALE=grad_scale is not None, GUARDED=found_inf is not None, STOCHASTIC=rule.stochastic,
            STEPWISE=INTERPRETED, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    _launched.add(_variant(rule, tensors, grad_scale, found_inf))


def _variant(rule: AdamRule, tensors: AdamTensors, *optional: Tensor | None) -> object:
    """What Triton compiles a kernel of its own for."""
    count = tensors.parameter.numel()
    addresses = [x.data_ptr() for x in (tensors.parameter, tensors.grad, tensors.exp_avg, tensors.exp_avg_sq)]
    aligned = tuple(address % 16 == 0 for address in addresses)
    sizes = (count == 1, count % 16 == 0, count >= 1 << 31, tensors.offset >= 1 << 34, tensors.offset % 8)
    decay = (bool(rule.weight_decay), rule.decoupled)
    present = tuple(x is not None for x in optional)
    return tensors.parameter.device, aligned, sizes, decay, rule.maximize, rule.stochastic, present


@triton.jit(do_not_specialize=["first"])
def _adam(
    parameters, grads, exp_avgs, exp_avg_sqs, coefficients, keys, grad_scale, found_inf, first, count,
    beta1, beta2, eps, weight_decay,
    SKIP: tl.constexpr, COUPLED: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, UNSCALE: tl.constexpr,
    GUARDED: tl.constexpr, STOCHASTIC: tl.constexpr, STEPWISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if GUARDED:  # noqa: SIM102  (what is not there is not loaded)
        if tl.load(found_inf) == 1.0:
            return
    tile = tl.program_id(0).to(tl.int64)
    # Tiles begin at a multiple of eight elements of the unsharded parameter: a thread uses all that it draws.
    at = tile * BLOCK + tl.arange(0, BLOCK) - SKIP
    inside = at < count
    if SKIP != 0:
        inside = inside & (at >= 0)
    counter = first.to(tl.int64) + tile * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    step_tile(
        parameters, grads, exp_avgs, exp_avg_sqs, at, inside, counter, coefficients, keys, grad_scale,
        beta1, beta2, eps, weight_decay, COUPLED, DECOUPLED, MAXIMIZE, UNSCALE, STOCHASTIC, STEPWISE, BLOCK,
    )  # fmt: skip


@triton.jit
def step_tile(
    parameters, grads, exp_avgs, exp_avg_sqs, at, inside, counter, coefficients, keys, grad_scale,
    beta1, beta2, eps, weight_decay,
    COUPLED: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, UNSCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr, STEPWISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the elements ``at``, int64 [BLOCK], of a parameter where they are ``inside``.

    Eight neighbours share one of the counters of random bits, int64 [BLOCK // 8]; ``coefficients`` and ``keys`` are the
    parameter's rows.
    """
    g = tl.load(grads + at, mask=inside, other=0.0)
    p = tl.load(parameters + at, mask=inside, other=0.0)
    m = tl.load(exp_avgs + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sqs + at, mask=inside, other=0.0).to(tl.float32)
    size, root = tl.load(coefficients + 1), tl.load(coefficients + 2)
    # Drawn before what was loaded is used, while it is on its way.
    m_words, v_words = _words(keys, counter, STOCHASTIC), _words(keys + 1, counter, STOCHASTIC)
    if UNSCALE:
        g = tl.div_rn(g, tl.load(grad_scale))
        tl.store(grads + at, g, mask=inside)
    if MAXIMIZE:
        g = -g
    if COUPLED:
        g = tl.fma(p, weight_decay, g)
    if DECOUPLED:
        p = tl.fma(-tl.load(coefficients), p, p)
    p, m, v = updated(p, g, m, v, size, root, beta1, beta2, eps)
    tl.store(parameters + at, p, mask=inside)
    tl.store(exp_avgs + at, _rounded(m, m_words, STOCHASTIC, STEPWISE, BLOCK), mask=inside)
    tl.store(exp_avg_sqs + at, _rounded(v, v_words, STOCHASTIC, STEPWISE, BLOCK), mask=inside)


@triton.jit
def updated(p, g, m, v, size, root, beta1, beta2, eps):
    """One step of Adam; FP32, each operation rounded to nearest."""
    m = tl.fma(m, beta1, tl.fma(g, -beta1, g))
    square = g * g
    v = tl.fma(v, beta2, tl.fma(square, -beta2, square))
    p = p - tl.div_rn(m * size, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    return p, m, v


@triton.jit
def _words(key, counter, STOCHASTIC: tl.constexpr):
    """Random words, int32 [n, 2, 2], of counters int64 [n]: the word j // 2 of an element 8 c + j."""
    if STOCHASTIC:
        w0, w1, w2, w3 = tl.randint4x(tl.load(key), counter, _ROUNDS)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    else:
        words = counter
    return words


@triton.jit
def _rounded(x, words, STOCHASTIC: tl.constexpr, STEPWISE: tl.constexpr, BLOCK: tl.constexpr):
    """FP32 ``x`` [BLOCK] rounded to BF16, stochastically with ``words`` [BLOCK // 8, 2, 2]."""
    bits = words
    if STOCHASTIC:
        # The low half of a word where an element's index is even, the high half where it is odd.
        bits = tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), (BLOCK,)).to(tl.int32)
    return to_bf16(x, bits, STOCHASTIC, STEPWISE)


@triton.jit
def to_bf16(x, bits, STOCHASTIC: tl.constexpr, STEPWISE: tl.constexpr):
    """FP32 ``x`` rounded to BF16, stochastically with 16 random ``bits`` an element, int32.

    ``STEPWISE`` rounds to nearest where the conversion, which the interpreter has not, would do it.
    """
    if STOCHASTIC:
        # A finite number stays finite: 0x7F7F0000 is the largest that BF16 has.
        clamped = tl.minimum(tl.maximum(x, -3.3895313892515355e38), 3.3895313892515355e38)
        moved = (clamped.to(tl.int32, bitcast=True) + bits) & -0x10000
        x = tl.where(tl.abs(x) < float("inf"), moved.to(tl.float32, bitcast=True), x)
    elif STEPWISE:
        word = x.to(tl.int32, bitcast=True)
        even = (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000
        x = tl.where(x == x, even.to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)
