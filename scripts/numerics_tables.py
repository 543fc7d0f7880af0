"""Write docs/numerics_tables.md: what each format and granularity costs, on drawn and on recorded tensors.

    python scripts/numerics_tables.py [--activations FILE.npz] [--gradients FILE.npz] [--out FILE.md]

Each FILE.npz holds 2-D float arrays [rows, features], named after where they were recorded; activations are contracted
over their last axis. ``numpy.savez(path, **{name: tensor.float().cpu().numpy()})`` writes one. Without the files the
tables have drawn tensors only.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
from pathlib import Path

import numpy as np
import torch
from narrowgate.precision import measure, quantize, stream_key
from narrowgate.precision.formats import get_format
from narrowgate.precision.spec import PLAIN_GRANULARITIES
from torch import Tensor

PLAIN_FORMATS = ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1")
BLOCK_SPECS = (
    "mxfp8", "mxfp8+rceil", "mxfp8/32x32", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxfp4+rceil",
    "mxfp4/32x32", "nvfp4", "nvfp4/16x16",
)  # fmt: skip
MODIFIED_SPECS = (
    "bf16", "fp8_e4m3", "fp8_e4m3+pow2", "fp8_e4m3+sr", "fp8_e4m3+clip(p=99.99)", "fp8_e4m3+hadamard(64)",
    "fp4_e2m1/row", "fp4_e2m1/row+clip(p=99.9)", "fp4_e2m1/row+clip(rms=4)", "fp4_e2m1/row+hadamard(16)",
    "fp4_e2m1/row+hadamard(256)", "nvfp4+hadamard(16)", "nvfp4+sr",
)  # fmt: skip
GRADIENT_SPECS = ("fp8_e4m3", "fp8_e4m3+sr", "fp8_e4m3/row", "fp8_e5m2", "fp8_e5m2+sr", "mxfp8")
#: Rows that are read of each recorded array: enough for a decibel's tenth, quick to measure.
MAX_ROWS = 4096
_SEED = stream_key(0, "numerics_tables", "fprop", "input")


def drawn() -> dict[str, dict[str, Tensor]]:
    """Drawn distributions, each one or more tensors, by title."""
    shape = (1024, 2048)
    torch.manual_seed(0)
    outliers = torch.randn(shape)
    outliers[:, :: shape[1] // 8] *= 40.0
    return {
        "normal": {"normal": torch.randn(shape)},
        "heavy tails (Student's t, 3 degrees)": {"t3": torch.distributions.StudentT(3.0).sample(shape)},
        "eight outlier channels, 40 times the rest": {"outliers": outliers},
        "half normal (a mean, as after an activation)": {"half": torch.randn(shape).abs()},
    }


def recorded(path: Path) -> dict[str, Tensor]:
    """Arrays of an .npz file as FP32 tensors of at most MAX_ROWS rows; rejects what is not 2-D and floating."""
    tensors = {}
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            array = archive[name]
            if array.ndim != 2 or array.dtype.kind != "f":
                raise SystemExit(
                    f"{path}: '{name}' has shape {array.shape} and dtype {array.dtype}, expected 2-D floats"
                )
            tensors[name] = torch.from_numpy(array[:MAX_ROWS].astype(np.float32))
    if not tensors:
        raise SystemExit(f"{path} holds no arrays")
    return tensors


def sqnr_cell(tensors: dict[str, Tensor], spec: str) -> str:
    """Median SQNR over the tensors in dB; with several tensors the worst one in brackets."""
    values = [measure(x, spec, seed=_SEED).sqnr_db for x in tensors.values()]
    finite = [v for v in values if not math.isnan(v)]
    if not finite:
        return "-"
    median = f"{statistics.median(finite):.1f}"
    return median if len(values) == 1 else f"{median} ({min(finite):.1f})"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows]) + "\n"


def sqnr_section(groups: dict[str, dict[str, Tensor]]) -> str:
    """Plain formats by granularity, one table a distribution; then block formats and modifiers by distribution."""
    parts = ["## Plain formats: format by granularity\n"]
    for title, tensors in groups.items():
        rows = [[f"`{f}`", *(sqnr_cell(tensors, f"{f}/{g}") for g in PLAIN_GRANULARITIES)] for f in PLAIN_FORMATS]
        parts += [f"### {title[0].upper()}{title[1:]}\n", table(["SQNR, dB", *PLAIN_GRANULARITIES], rows)]
    for heading, specs in (("Block-scaled formats", BLOCK_SPECS), ("Modifiers", MODIFIED_SPECS)):
        rows = [[f"`{spec}`", *(sqnr_cell(tensors, spec) for tensors in groups.values())] for spec in specs]
        parts += [f"## {heading}\n", table(["SQNR, dB", *groups], rows)]
    return "\n".join(parts)


def gradient_section(gradients: dict[str, Tensor]) -> str:
    """What underflows, and what is kept of it: one table a question, one row a gradient."""
    smallest = get_format("fp8_e4m3").element.min_subnormal / get_format("fp8_e4m3").element.max
    lost_rows, kept_rows, totals = [], [], {spec: [0.0, 0] for spec in GRADIENT_SPECS}
    for name, g in gradients.items():
        nonzero = g != 0
        small = nonzero & (g.abs() < g.abs().max() * smallest / 2)
        count = int(nonzero.sum())
        lost, kept = [], []
        for spec in GRADIENT_SPECS:
            stored = quantize(g, spec, seed=_SEED).dequantize()
            zeroed = int((nonzero & (stored == 0)).sum())
            totals[spec][0] += zeroed
            totals[spec][1] += count
            lost.append(f"{100 * zeroed / count:.3g} %" if count else "-")
            power = float(g[small].double().square().sum())
            kept.append(f"{float((g[small].double() * stored[small].double()).sum()) / power:.2f}" if power else "-")
        lost_rows.append([f"`{name}`", *lost])
        kept_rows.append([f"`{name}`", f"{100 * float(small.sum()) / max(count, 1):.3g} %", *kept])
    if len(gradients) > 1:
        every = [f"{100 * z / n:.3g} %" if n else "-" for z, n in totals.values()]
        lost_rows.append(["**all elements**", *(f"**{cell}**" for cell in every)])
    specs = [f"`{spec}`" for spec in GRADIENT_SPECS]
    return "\n".join([
        "## Gradients: what underflows\n",
        "Share of the non-zero elements that are stored as zero.\n",
        table(["gradient", *specs], lost_rows),
        "\nOf the elements that `fp8_e4m3` with nearest rounding flushes (below half of its smallest value under the",
        "tensor's scale; their share first), how much of their signal is kept: the regression of what is stored on",
        "what was meant, 1 for an unbiased format however noisy, 0 where all are lost.\n",
        table(["gradient", "share", *specs], kept_rows),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--activations", type=Path, help="recorded activations, .npz of 2-D arrays")
    parser.add_argument("--gradients", type=Path, help="recorded gradients of one step, .npz of 2-D arrays")
    parser.add_argument("--out", type=Path, default=Path("docs/numerics_tables.md"))
    args = parser.parse_args()
    groups = drawn()
    if args.activations:
        groups["recorded activations"] = recorded(args.activations)
    torch.manual_seed(1)
    spread = torch.randn(1024, 1024) * torch.exp(3.0 * torch.randn(1024, 1))
    gradients = (
        recorded(args.gradients) if args.gradients else {"drawn: normal rows, log-normal (3) between them": spread}
    )
    text = "\n".join([
        "# Numerics tables\n",
        "Made by `scripts/numerics_tables.py`; do not edit. How to read them, and the formulas: `numerics.md`.\n",
        f"PyTorch {torch.__version__}, Python {platform.python_version()}. Signal to quantization noise in decibels, "
        "more is better; 6 dB are one bit. With several",
        "tensors: their median, and the worst one in brackets.\n",
        sqnr_section(groups),
        gradient_section(gradients),
    ])  # fmt: skip
    args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
