"""Four RMSNorm + SwiGLU blocks, forward and backward: BF16, narrowgate, Transformer Engine and torchao side by side.

A block is y = down(silu(gate) * up) with [gate, up] one linear layer of RMSNorm(x), as Transformer Engine's
LayerNormMLP has it; parameters are BF16. All arms of a case take turns in one run. Everything but Transformer Engine
runs under torch.compile. ``ms`` is a step launched by Python, ``graph_ms`` the same step replayed from a CUDA graph.
``floor_ms`` is what the variant's GEMMs take at the rates measured in the same run, plus the bytes that its casts must
move at the copy bandwidth measured in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import nn

from ...precision.gemm import scaled_gemm
from ...precision.layer import LowPrecisionLayer, end_step
from ...precision.quantization import quantize
from .mlp_arms import ARMS, VARIANTS, Stack, accumulate, config, mlp_arms
from .timing import Say, Work, compiled_already, graph_of, in_turns, load_libraries, replayed_milliseconds, warmed

#: Case -> (rows, width, hidden width).
CASES = {"d1024": (16384, 1024, 4096), "d2048": (16384, 2048, 8192), "d4096": (16384, 4096, 8192)}
CPU_CASES = {"quick": (64, 128, 256)}
BLOCKS, CPU_BLOCKS = 4, 1
_STEPS = 3


@dataclass(frozen=True)
class MlpBenchmark:
    """How to measure a case."""

    device: torch.device
    rounds: int
    say: Say
    #: TB/s, read and written, as measured in this run; not asked for on a CPU.
    copy_rate: float = 0.0
    arms: Collection[str] = ARMS
    #: Print the kernels of each narrowgate arm.
    profile: bool = False

    @property
    def gpu(self) -> bool:
        """On a CPU nothing is compiled, products are emulated, and memory and floors stay unknown."""
        return self.device.type == "cuda"

    def run(self, case: str) -> list[dict[str, Any]]:
        """Measure a case of :data:`CASES` (on a CPU of :data:`CPU_CASES`), and return a row for each arm."""
        # All arms share one forward's code: past Dynamo's limit of compilations the last ones would run uncompiled.
        with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
            return self._measured(case)

    def _measured(self, case: str) -> list[dict[str, Any]]:
        count, width, hidden = (CASES if self.gpu else CPU_CASES)[case]
        blocks = BLOCKS if self.gpu else CPU_BLOCKS
        torch.manual_seed(0)
        base = Stack(width, hidden, blocks).to(self.device, torch.bfloat16)
        x, g = (torch.randn(count, width, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        exact = step(base, x, g)
        steps: dict[str, Work] = {}
        errors: dict[str, list[float]] = {}
        memory: dict[str, float | None] = {}
        self.say(f"\n{case}: {count} rows, {blocks} blocks of {width} x {hidden}")
        load_libraries(self.arms)
        for name, model, context in mlp_arms(base, self.arms, width, hidden, self.say, compiled=self.gpu):
            run = _stepping(name, model, context, x, g)
            found = run()
            for _ in range(2 if self.gpu else 0):
                found = run()
            pairs = zip(found[:2], exact[:2], strict=True)
            errors[name] = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
            memory[name] = self._memory(run)
            steps[name] = run
            if self.profile and self.gpu and name.startswith(("narrowgate", "bf16_fused")):
                profile(name, run, self.say)
        repeat = _STEPS if self.gpu else 1
        with compiled_already():
            times = in_turns(steps, self.rounds, repeat, self.device)
        replays: dict[str, list[float]] = {}
        floors: dict[str, float] = {}
        if self.gpu:
            graphs = {name: graph for name, run in steps.items() if (graph := captured(name, run, self.say))}
            replays = in_turns({name: graph.replay for name, graph in graphs.items()}, self.rounds, repeat, self.device)
            floors = {variant: floor(variant, count, width, hidden, self.copy_rate) for variant in VARIANTS}
        return [
            self._row(
                case, name, times, replays, floors, memory[name], dict(zip(("y", "dx"), errors[name], strict=True))
            )
            for name in times
        ]

    def _memory(self, run: Work) -> float | None:
        """Peak of a step above what lies there before it, in MiB."""
        if not self.gpu:
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def _row(
        self,
        case: str,
        name: str,
        times: Mapping[str, list[float]],
        replays: Mapping[str, list[float]],
        floors: Mapping[str, float],
        memory: float | None,
        error: Mapping[str, float],
    ) -> dict[str, Any]:
        arm, _, variant = name.partition(" ")
        ms, speedup = statistics.median(times[name]), _speedup(times, name)
        least = floors.get(variant) if arm == "narrowgate" else None
        replayed = statistics.median(replays[name]) if name in replays else None
        graph_speedup = _speedup(replays, name) if replayed and "bf16" in replays else None
        # An emulated arm's time says nothing about the format.
        claimed = round(speedup, 4) if self.gpu or arm == "bf16" else None
        shown = f"graph {replayed:8.3f} ms {graph_speedup or float('nan'):5.2f}x" if replayed else ""
        emulated = not self.gpu and not arm.startswith("bf16")
        room = f"{memory:7.0f} MiB" if memory is not None else "emulated" if emulated else ""
        faster = f"{claimed:5.2f}x" if claimed else " " * 6
        near = f"  floor {least:.2f} ms ({least / ms:.0%})" if least else ""
        self.say(f"  {name:30} {ms:8.3f} ms  {faster}  {shown}  {room}  error y {error['y']:.3f}"
                 f" dx {error['dx']:.3f}{near}")  # fmt: skip
        return {
            "case": case, "arm": arm, "variant": variant or "bf16", "ms": round(ms, 4), "speedup": claimed,
            "graph_ms": replayed and round(replayed, 4), "graph_speedup": graph_speedup and round(graph_speedup, 4),
            "floor_ms": least and round(least, 4), "accumulate": accumulate(arm, variant),
            "activation_mib": memory and round(memory, 1),
            "relative_error": {what: round(value, 5) for what, value in error.items()},
            **({} if self.gpu else {"emulated": emulated}),
        }  # fmt: skip


def measure_mlp(
    *,
    device: torch.device,
    rounds: int,
    say: Say,
    copy_rate: float,
    quick: bool = False,
    wanted: Callable[[str], bool] = lambda name: True,
) -> list[dict[str, Any]]:
    """Measure every case, and return a row for each arm of each.

    Args:
        device: a GPU; on a CPU one tiny case runs uncompiled, emulated and without peers, and claims no share.
        rounds: how often every arm takes its turn.
        say: takes lines of progress.
        copy_rate: TB/s, read and written, as measured in this run.
        quick: on a GPU the first case only.
        wanted: which cases, by name.
    """
    benchmark = MlpBenchmark(device, rounds, say, copy_rate)
    names = list(CASES)[: 1 if quick else None] if benchmark.gpu else list(CPU_CASES)
    rows: list[dict[str, Any]] = []
    for case in filter(wanted, names):
        rows += benchmark.run(case)
        if benchmark.gpu:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    return rows


def step(model: nn.Module, x: torch.Tensor, g: torch.Tensor, context: Any = None) -> tuple[torch.Tensor, ...]:
    """Run forward and backward; return output and gradient of the input."""
    inner = x.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    if context is None:
        y = model(inner)
    else:
        with context():
            y = model(inner)
    y.backward(g)
    assert inner.grad is not None
    return y.detach(), inner.grad


def _stepping(name: str, model: nn.Module, context: Any, x: torch.Tensor, g: torch.Tensor) -> Work:
    layers = [m for m in model.modules() if isinstance(m, LowPrecisionLayer)] if name.startswith("narrowgate") else []

    def run() -> Any:
        found = step(model, x, g, context)
        if layers:
            # What an optimizer's step triggers: amaxes enter their histories. The peers do it in their forward.
            end_step(layers)
        return found

    return run


def _speedup(times: Mapping[str, list[float]], name: str) -> float:
    return statistics.median(b / t for b, t in zip(times["bf16"], times[name], strict=True))


def captured(name: str, run: Work, say: Say) -> torch.cuda.CUDAGraph | None:
    """Return the step as a CUDA graph, which shows the device's time where launching costs the host more than that."""
    warmed([run, run])
    try:
        return graph_of([run])
    except Exception as error:  # whatever a peer does that cannot be captured
        say(f"not captured: {name}: {(str(error).splitlines() or [type(error).__name__])[0]}")
        torch.cuda.synchronize()
        return None


def floor(variant: str, rows: int, width: int, hidden: int, copy_rate: float) -> float:
    """Return milliseconds of BLOCKS blocks: GEMMs as measured now, and each byte that the variant must move, once."""
    made = config(variant)
    gemms = 0.0
    for inputs, outputs in ((width, 2 * hidden), (hidden, width)):
        shapes = {"fprop": (rows, inputs, outputs), "dgrad": (rows, outputs, inputs), "wgrad": (outputs, rows, inputs)}
        for path, gemm in made.gemms():
            m, k, n = shapes[path]
            a, b = (
                quantize(torch.randn(size, k, device="cuda", dtype=torch.bfloat16), spec.replace(delayed=None), dim=1)
                for size, spec in ((m, gemm.first), (n, gemm.second))
            )
            run = lambda a=a, b=b, gemm=gemm: scaled_gemm(a, b, gemm, native=True, out_dtype=torch.bfloat16)  # noqa: E731
            gemms += replayed_milliseconds(run, "cuda")
    # Passes over a tensor of BF16 before its codes are written: one, or two where the scale must be known first.
    reads = 2 if variant in ("current", "row") else 1
    elements = {
        # Norm: x is read for the statistics' sake once more than for the cast. Two copies of one byte are written.
        "norm": (2 * reads + 2) * rows * width,
        "swiglu": (4 * reads + 2) * rows * hidden,
        "d_swiglu": (6 * reads + 4) * rows * hidden,
        "grad": (2 * reads + 2) * rows * width,
        "d_norm": 6 * rows * width,
        "weights": (2 * reads + 2) * 3 * width * hidden,
    }
    return BLOCKS * (gemms + sum(elements.values()) / copy_rate / 1e9)


def profile(name: str, run: Work, say: Say) -> None:
    """Say which kernels a step launched, and for how long they ran."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    say(f"  kernels of {name}:")
    events: list[Any] = [e for e in found.key_averages() if e.device_type.name == "CUDA"]
    busy = [event for event in events if event.self_device_time_total > 0]
    for event in sorted(busy, key=lambda e: -e.self_device_time_total)[:22]:
        say(f"    {event.self_device_time_total / 1e3:8.3f} ms {event.count:4}x {event.key[:100]}")
