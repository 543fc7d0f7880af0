"""Count what the cast kernels take an element: instructions, registers and spills, compiled for Hopper without a GPU.

    python scripts/count_instructions.py                    # a table; needs Triton, which CUDA builds of PyTorch bring
    python scripts/count_instructions.py --out benchmarks/cast_instructions.json

Instructions are those of the loop over tiles, over the elements that a thread has of a tile: without what a program
does once. Where there is no such loop, a program is one tile, and all of it counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton
from narrowgate.precision.kernels import launch
from narrowgate.precision.kernels.operands import Operand
from narrowgate.precision.kernels.program import IDENTITY, Program
from narrowgate.precision.spec import as_spec
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TARGET = "sm_90"
TOKENS = 548_864
NORM = "mn,m,n;mul 0 1;mul 3 2|4"
SWIGLU = "mn,mn;neg 0;exp 2;add 3 #1.0;div 0 4;mul 5 1|6"
GATE = (
    "mn,mn,mn;mul 0 1;sigmoid 2;mul 3 4;sub #1.0 4;mul 2 6;add 7 #1.0;mul 5 8;neg 2;exp 10;add 11 #1.0;div 2 12;"
    "mul 0 13|9,14"
)
SILU = "mn,mn;sigmoid 1;sub #1.0 2;mul 1 3;add 4 #1.0;mul 2 5;mul 0 6|7"
WIDE = [((16_384, 8192), torch.bfloat16)]
#: What is computed, its program, its leaves, and the operands contracted over columns and over rows ("=": the first).
CASES: list[tuple[str, str, list[Any], str, str]] = [
    ("norm", NORM, [((TOKENS, 512), torch.bfloat16), ((TOKENS, 1), torch.float32), ((512,), torch.float32)],
     "fp8_e4m3+delayed(16)", "="),
    ("gradient of silu", SILU, [((TOKENS, 2048), torch.bfloat16)] * 2, "fp8_e5m2+delayed(16)", "="),
    ("gate's gradient", GATE, WIDE * 3, "fp8_e5m2+delayed(16)", "="),
    ("swiglu", SWIGLU, WIDE * 2, "fp8_e4m3+delayed(16)", "="),
    ("BF16", IDENTITY, WIDE, "fp8_e5m2+delayed(16)", "="),
    ("FP32", IDENTITY, [((8192, 8192), torch.float32)], "fp8_e4m3+delayed(16)", "="),
    ("BF16", IDENTITY, WIDE, "fp8_e4m3/128x128", "="),
    ("gate's gradient", GATE, WIDE * 3, "fp8_e4m3/128x128", "="),
    ("BF16", IDENTITY, WIDE, "fp8_e4m3/1x128", "fp8_e4m3/1x128"),
    ("BF16", IDENTITY, WIDE, "fp8_e4m3/1x128+sr", "fp8_e4m3/1x128+sr"),
    ("BF16", IDENTITY, WIDE, "fp8_e4m3/128x128+sr", "fp8_e4m3/128x128+sr"),
    ("BF16", IDENTITY, WIDE, "fp8_e4m3/row+sr", "fp8_e4m3/row+sr"),
    ("BF16", IDENTITY, WIDE, "fp8_e4m3/row", "fp8_e4m3/row"),
    ("BF16", IDENTITY, WIDE, "fp8_e4m3", "="),
    ("BF16", IDENTITY, WIDE, "fp8_e4m3+sr", "="),
    ("BF16", IDENTITY, WIDE, "fp8_e4m3+delayed(16)+sr", ""),
    ("BF16", IDENTITY, WIDE, "fp8_e4m3+clip(rms=4)", "="),
    ("BF16", IDENTITY, WIDE, "fp8_e4m3+clip(rms=4)+sr", "fp8_e4m3+clip(rms=4)+sr"),
]  # fmt: skip
#: Of them, those that are counted with the sums of columns, too: a bias' gradient.
SUMMED = {
    ("gradient of silu", "fp8_e5m2+delayed(16)"), ("gate's gradient", "fp8_e5m2+delayed(16)"),
    ("BF16", "fp8_e5m2+delayed(16)"), ("FP32", "fp8_e4m3+delayed(16)"), ("BF16", "fp8_e4m3/128x128"),
    ("BF16", "fp8_e4m3/1x128"), ("BF16", "fp8_e4m3/row"), ("BF16", "fp8_e4m3"),
}  # fmt: skip


class _NoDevice:
    """What Triton asks a driver for before it compiles, for a device that is not here."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the result there, as JSON")
    options = parser.parse_args()
    driver.set_active(_NoDevice())
    compiled: list[tuple[Any, Any]] = []

    def compile_only(self: Any, keep: bool, *arguments: Any) -> None:
        kernel = self.kernel.warmup(*arguments, grid=self.grid, **self.constants, **self.options)
        compiled.append((kernel, self))

    launch.Launch.first = compile_only
    rows = []
    cases = [(*case, False) for case in CASES] + [(*case, True) for case in CASES if (case[0], case[3]) in SUMMED]
    for name, program, leaves, first, second, summed in cases:
        compiled.clear()
        compile_case(program, leaves, first, second, summed=summed)
        for kernel, launched in compiled:
            if launched.kernel.__name__ in ("scale_kernel", "quantized_sums_kernel"):
                continue
            variant = f"{first}, {second or 'rows alone'}{', sums' * summed}"
            rows.append({"case": name, "variant": variant, **counted(kernel, launched)})
            print("{case:18} {variant:40} {kernel:17} {registers:4} {spilled:5} {instructions:7.2f}".format(**rows[-1]))
    if options.out is not None:
        result = {
            "name": "cast_instructions",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "command": "python scripts/count_instructions.py",
            "machine": f"none: compiled for {TARGET}",
            "versions": {package: version(package) for package in ("torch", "triton")},
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written: {options.out}")


def compile_case(program: str, leaves: list[Any], first: str, second: str, *, summed: bool = False) -> None:
    """Compile what a cast would launch first."""
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in leaves]
    operands = [Operand(as_spec(text)) if text not in ("", "=") else None for text in (first, second)]
    length = 16 if "delayed" in first else None
    parsed = Program.parse(program)
    cast = launch._Cast(parsed, tensors, operands[0], operands[1], second == "=", length, True, None, summed)
    keys = [torch.empty((), dtype=torch.int64, device="meta") if o and o.spec.sr else None for o in operands]
    kinds = [((16,), torch.float32), ((), torch.float32), ((), torch.int64), ((2,), torch.int32)]
    state = None if length is None else [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]
    cast.run(tensors, (None, None), keys, (None, None), state)


def counted(kernel: Any, launched: Any) -> dict[str, Any]:
    """Return registers, spilled bytes a thread, and instructions an element of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text, usage = (
            subprocess.run([CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    lines = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]
    constants = launched.constants
    elements = constants["BM"] * constants["BN"] * constants["PIECES"] / (launched.warps * 32)
    spilled = re.search(r"STACK:(\d+)", usage)
    registers = re.search(r"REG:(\d+)", usage)
    assert spilled is not None
    assert registers is not None
    name = launched.kernel.__name__
    return {
        "kernel": name,
        "tile": [constants[key] for key in ("BM", "BN", "LOOP")] + [launched.warps],
        "registers": int(registers[1]),
        "spilled": int(spilled[1]),
        # A cast writes codes in its loop, where it has one; maxima are only read for.
        "instructions": round(_loop(lines, "LDG" if name == "amax_kernel" else "STG") / elements, 2),
    }


def _loop(lines: list[tuple[int, str]], moved: str) -> int:
    """Instructions of the longest loop with several of the instruction ``moved``, else all up to the end."""
    places = {address: number for number, (address, _) in enumerate(lines)}
    end, loops = len(lines), []
    for number, (address, what) in enumerate(lines):
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", what)
        if target is None:
            continue
        back = int(target[1], 16)
        if back == address:
            end = min(end, number)
        elif back < address:
            loops.append((places[back], number))

    def moves(first: int, last: int) -> bool:
        return sum(moved in what for _, what in lines[first : last + 1]) > 1

    bodies = [last - first + 1 for first, last in loops if last < end and moves(first, last)]
    return max(bodies, default=end)


if __name__ == "__main__":
    main()
