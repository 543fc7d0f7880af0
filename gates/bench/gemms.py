"""Products: throughput by formats and shape, with the copy and cast bandwidth that prices need beside it.

Torchao and Transformer Engine multiply with the same library, so products have no arms of peers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...precision.capability import current_device, gemm_support
from ...precision.casting import Request, quantize_both
from ...precision.config import GemmConfig
from ...precision.gemm import scaled_gemm
from ...precision.quantization import quantize
from ...precision.spec import Spec
from ...recipes.rates import BF16, variant_of
from .timing import COPY_BYTES, Say, copier, milliseconds, replayed_milliseconds, terabytes_per_second

#: M, K, N. Towers at several batch sizes, narrow layers, and (the last six) weight gradients, contracted over rows.
SHAPES = (
    (4096, 512, 512), (4096, 1024, 1024), (4096, 4096, 4096), (4096, 8192, 8192), (16384, 256, 256), (16384, 256, 1024),
    (16384, 512, 512), (16384, 1024, 4096), (16384, 4096, 4096), (16384, 8192, 8192), (65536, 256, 256),
    (65536, 256, 1024), (65536, 512, 512), (65536, 1024, 1024), (65536, 4096, 4096), (512, 16384, 512),
    (512, 16384, 2048), (512, 65536, 512), (1024, 16384, 1024), (4096, 16384, 1024), (4096, 16384, 4096),
)  # fmt: skip
QUICK_SHAPES = ((4096, 4096, 4096), (16384, 1024, 4096), (16384, 4096, 4096), (4096, 16384, 1024))
CPU_SHAPES = ((128, 256, 128), (64, 128, 256))
GEMMS = (
    ("fp8_e4m3", "fp8_e4m3", "fast"),
    ("fp8_e4m3", "fp8_e4m3", "accurate"),
    ("fp8_e4m3/row", "fp8_e4m3/row", "fast"),
    ("fp8_e4m3/row", "fp8_e4m3/row", "accurate"),
    ("fp8_e4m3/1x128", "fp8_e4m3/128x128", "accurate"),
    ("fp8_e4m3/1x128", "fp8_e4m3/1x128", "accurate"),
)
_CAST_SHAPE = (16384, 4096)
_COPIES = 15


def measure_gemms(
    *, device: torch.device, say: Say, quick: bool = False, wanted: Callable[[str], bool] = lambda name: True
) -> list[dict[str, Any]]:
    """Measure every product, and return a row for each with its share of the ceiling and whether it was emulated.

    Args:
        device: a GPU; on a CPU products are emulated and claim no share.
        say: takes lines of progress.
        quick: fewer shapes; on a CPU always tiny ones.
        wanted: which cases, by name (``MxKxN``).
    """
    gpu = device.type == "cuda"
    shapes = (QUICK_SHAPES if quick else SHAPES) if gpu else CPU_SHAPES
    shapes = [shape for shape in shapes if wanted(case_name(*shape))]
    return with_shares(gemm_rows(device, say, shapes, emulated=not gpu), claim=gpu)


def case_name(m: int, k: int, n: int) -> str:
    """Name a product of [m, k] by [k, n]."""
    return f"{m}x{k}x{n}"


def gemm_rows(
    device: torch.device, say: Say, shapes: Sequence[tuple[int, int, int]] = SHAPES, *, emulated: bool = False
) -> list[dict[str, Any]]:
    """Return one row a shape and variant that the device multiplies natively; operands are quantized beforehand.

    Args:
        device: where to multiply.
        say: takes lines of progress.
        shapes: (m, k, n) of each product.
        emulated: multiply what is not native too, by emulation.
    """
    here, rows = current_device(device), []
    for m, k, n in shapes:
        a, b = (torch.randn(size, k, device=device, dtype=torch.bfloat16) for size in (m, n))
        runs: list[tuple[str, Callable[[], object]]] = [(BF16, lambda a=a, b=b: torch.mm(a, b.t()))]
        for first, second, accumulate in GEMMS:
            gemm = GemmConfig(Spec.parse(first), Spec.parse(second), accumulate)
            native = gemm_support(gemm, here).native
            if not native and not emulated:
                continue
            x, w = quantize(a, gemm.first), quantize(b, gemm.second)
            runs.append((variant_of(gemm), _product(x, w, gemm, native)))
        for variant, run in runs:
            ms = replayed_milliseconds(run, device)
            tflops = 2 * m * k * n / ms / 1e9
            arm = "bf16" if variant == BF16 else "narrowgate"
            row = {"case": case_name(m, k, n), "arm": arm, "variant": variant, "m": m, "k": k, "n": n}
            rows.append({**row, "ms": round(ms, 5), "tflops": round(tflops, 1 if tflops >= 10 else 6)})
            say(f"{m:6} {k:6} {n:6}  {variant:20} {ms * 1e3:9.1f} us  {tflops:7.1f} TFLOP/s")
    return rows


def _product(x: Any, w: Any, gemm: GemmConfig, native: bool) -> Callable[[], object]:
    return lambda: scaled_gemm(x, w, gemm, native=native, out_dtype=torch.bfloat16)


def with_shares(rows: Sequence[Mapping[str, Any]], *, claim: bool) -> list[dict[str, Any]]:
    """Add to rows of products ``ceiling_tflops``, ``ceiling_share`` and ``emulated``.

    The ceiling of BF16, and that of FP8, is the best that any product of that width reached in this run: what the
    library and this device's power and clocks leave of the data sheet, which no recipe can beat.
    """
    ceilings: dict[bool, float] = {}
    for row in rows:
        wide = row["variant"] == BF16
        ceilings[wide] = max(ceilings.get(wide, 0.0), row["tflops"])
    found = []
    for row in rows:
        ceiling = ceilings[row["variant"] == BF16]
        shares = {
            "ceiling_tflops": ceiling if claim else None,
            "ceiling_share": round(row["tflops"] / ceiling, 4) if claim else None,
            "emulated": not claim and row["variant"] != BF16,
        }
        found.append({**row, **shares})
    return found


def bandwidth_rows(device: torch.device, say: Say) -> list[dict[str, Any]]:
    """Return copy bandwidth, and that of our own cast kernels: the bytes that prices count over its time."""
    copy = copier(device)
    copy_ms = statistics.median(milliseconds(copy, 1, device) for _ in range(_COPIES))
    copied = ("copy", "bf16", 2.0 * COPY_BYTES, copy_ms)
    x = torch.randn(_CAST_SHAPE, device=device, dtype=torch.bfloat16)
    spec = Spec.parse("fp8_e4m3")

    # Read for the amax, read for the cast, written as codes: what narrowgate.recipes.pricing.cast_bytes says.
    moved = float(x.numel() * (2 + 2 + 1))
    casts = (
        "cast",
        "narrowgate",
        moved,
        replayed_milliseconds(lambda: quantize_both(x, Request(spec), None), device),
    )
    rows = []
    for variant, arm, size, ms in (copied, casts):
        rate = terabytes_per_second(size, ms)
        row = {"case": variant, "arm": arm, "variant": variant, "bytes": size}
        rows.append({**row, "ms": round(ms, 5), "tb_per_s": round(rate, 3)})
        say(f"{variant:42} {ms * 1e3:9.1f} us  {rate:7.2f} TB/s")
    return rows
