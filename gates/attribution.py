"""Where the time of a step goes: kernels of both arms, by class, from a few profiled steps after the timed ones.

Profiling slows the host, so nothing that is profiled is timed: kernels' own durations come from the profiler, and what
of the step's time, as the quartets measured it, no kernel fills is the class ``gaps``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .measurements import KernelClass, Quartet

#: (class, what a kernel's name holds), the first that fits. Names are those of PyTorch, Triton, Inductor, cuBLAS
#: (nvjet), CUTLASS, NCCL and Transformer Engine. Inductor names its kernels after the operations that they fuse.
_CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("communication", r"nccl|all_?gather|all_?reduce|reduce_?scatter"),
        ("gemm fp8", r"nvjet_\w*_(qq|qr|rq)|(gemm|cutlass|scaled_mm).*(e4m3|e5m2|fp8|float_8|float8)|f8f8|e4m3.*gemm"),
        ("gemm", r"nvjet|gemm|cutlass|splitk|cublas|wgmma"),
        ("write", r"\bwrite_kernel"),
        ("amax", r"amax|scale_kernel|roll_kernel"),
        ("transpose", r"transpose"),
        ("cast", r"cast_kernel|cast_fp8|float8|fp8|quantize|_fill\b|random_bits"),
        ("optimizer", r"multi_tensor_apply|adam|adagrad|foreach"),
        ("attention", r"attention|flash|fmha|jagged|softmax"),
        ("embedding", r"embedding|indexing_backward|index_put|index_select|gather|scatter"),
        ("norm", r"norm"),
        ("copies", r"memcpy|memset|copy_kernel|CatArray|\bcopy_"),
        ("activation", r"silu|gelu|sigmoid|relu|hardswish|tanh|dropout"),
    )
)
_OTHER = "elementwise"
_GAPS = "gaps"
#: Classes whose kernels make operands smaller, or turn them for it.
_CASTING = ("cast", "amax", "transpose")
#: Share of the candidate's step that casting should take at most.
CASTING_BAR = 0.10
#: Profiled steps an arm.
STEPS = 5
#: A class owns the loss where it holds at least this share of what the candidate loses.
_OWNS = 0.25


def kernel_class(name: str) -> str:
    """Return the class of a kernel, from its name; ``elementwise`` where nothing tells."""
    return next((label for label, pattern in _CLASSES if pattern.search(name)), _OTHER)


def by_class(kernels: Iterable[tuple[str, float]], steps: int, step_ms: float) -> dict[str, float]:
    """Return milliseconds a step by class.

    Args:
        kernels: (name, microseconds) of every kernel launched in ``steps`` steps, or of kernels summed by name.
        steps: how many steps those are.
        step_ms: the step's time as it was measured apart; what kernels do not fill of it is ``gaps``.
    """
    found: dict[str, float] = {}
    for name, microseconds in kernels:
        label = kernel_class(name)
        found[label] = found.get(label, 0.0) + microseconds / 1000 / steps
    found[_GAPS] = max(0.0, step_ms - math.fsum(found.values()))
    return found


def attribute(
    baseline: Callable[[int], None], candidate: Callable[[int], None], quartets: Sequence[Quartet]
) -> tuple[KernelClass, ...]:
    """Profile both arms on a GPU and return their time by class, the largest difference first.

    Args:
        baseline: one whole step, warmed up.
        candidate: the same of the other arm.
        quartets: what the steps took, unprofiled.
    """
    times = [
        by_class(_profile(step, STEPS), STEPS, _geometric_mean([getattr(q, name) for q in quartets]))
        for step, name in ((baseline, "baseline_ms"), (candidate, "candidate_ms"))
    ]
    classes = [
        KernelClass(name=name, baseline_ms=times[0].get(name, 0.0), candidate_ms=times[1].get(name, 0.0))
        for name in dict.fromkeys((*times[0], *times[1]))
    ]
    return tuple(sorted(classes, key=lambda c: -abs(c.candidate_ms - c.baseline_ms)))


def owner_of_loss(classes: Sequence[KernelClass]) -> str | None:
    """Say which classes grew most, as a sentence's end; None where none owns a large part of what grew.

    GEMMs count as one: a product that moved from BF16 to FP8 is no loss of the latter.
    """
    times: dict[str, tuple[float, float]] = {}
    for c in classes:
        name = "gemm" if c.name.startswith("gemm") else c.name
        before, after = times.get(name, (0.0, 0.0))
        times[name] = before + c.baseline_ms, after + c.candidate_ms
    grown = {name: after - before for name, (before, after) in times.items() if after > before}
    owners = [name for name, growth in grown.items() if growth >= _OWNS * math.fsum(grown.values())]
    if not owners:
        return None
    owners.sort(key=lambda name: -grown[name])
    return ", ".join(f"{name} {times[name][0]:.3f} to {times[name][1]:.3f} ms" for name in owners)


def write_milliseconds(fused: Callable[[int], None]) -> float:
    """Profile steps of BF16 on the fused kernels on a GPU; return milliseconds a step in which they write BF16."""
    return by_class(_profile(fused, STEPS), STEPS, 0.0).get("write", 0.0)


def casting_overhead(
    classes: Sequence[KernelClass], step_ms: float, write_ms: float | None = None
) -> dict[str, Any] | None:
    """Return what of the candidate's step is casting, beside the bar; None where nobody profiled.

    The definition adds to the time of stand-alone kernels, of a fused kernel, what it takes longer than the same
    kernel writing BF16. A fused kernel has the name of a stand-alone one, so all are counted whole, and what their
    counterparts take is taken off. Without those the figure is an upper bound.

    Args:
        classes: both arms' time by class.
        step_ms: the candidate's whole step, as it was measured apart.
        write_ms: what the same kernels take where they write BF16 (:func:`write_milliseconds`); None where that was
            not profiled.
    """
    if not classes:
        return None
    own = {c.name: c.candidate_ms for c in classes if c.name in _CASTING}
    ms = max(0.0, math.fsum(own.values()) - (write_ms or 0.0))
    whole = "the whole time of kernels that cast (weights too), find amaxes and scales, or transpose, by their names"
    return {
        "ms": ms,
        "share": ms / step_ms,
        "bar": CASTING_BAR,
        "upper_bound": write_ms is None,
        "write_bf16_ms": write_ms,
        "by_class_ms": own,
        "baseline_ms": math.fsum(c.baseline_ms for c in classes if c.name in _CASTING),
        "measured": f"upper bound: {whole}; no counterpart that writes BF16 was profiled, so nothing is taken off"
        if write_ms is None
        else f"{whole}, less what the same fused kernels take where they write BF16 (arm bf16_fused)",
    }


def _profile(step: Callable[[int], None], steps: int) -> list[tuple[str, float]]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for i in range(steps):
            step(i)
        torch.cuda.synchronize()
    return [
        (event.key, float(event.self_device_time_total))
        for event in found.key_averages()
        if event.device_type.name == "CUDA" and event.self_device_time_total > 0
    ]


def _geometric_mean(pairs: Sequence[tuple[float, float]]) -> float:
    logs = [math.log(t) for pair in pairs for t in pair]
    return math.exp(math.fsum(logs) / len(logs))
