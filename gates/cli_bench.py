"""The command ``bench``: kernels, products, modules and optimizer steps against BF16 and installed peers."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..precision.errors import NarrowgateError, did_you_mean
from . import exits
from .files import check_writable, write_together

BENCHMARKS = ("casts", "gemms", "mlp", "optimizer")


@dataclass(frozen=True)
class BenchOptions:
    """What ``bench`` was asked; fields are the options of the command line."""

    benchmarks: tuple[str, ...]
    cases: tuple[str, ...]
    out: str | None
    quick: bool
    device: str
    rounds: int | None
    tune: bool
    json: bool
    quiet: bool

    def command(self, benchmark: str) -> str:
        """Return the command line that measures the same again."""
        words = ["narrowgate", "bench", benchmark]
        for case in self.cases:
            words += ["--case", case]
        words += ["--quick"] * self.quick
        words += ["--device", self.device] if self.device != "auto" else []
        words += ["--rounds", str(self.rounds)] if self.rounds is not None else []
        words += ["--tune"] * self.tune
        return shlex.join(words)


def bench_command(options: BenchOptions) -> int:
    """Measure and print; return the exit code.

    Raises:
        NarrowgateError: an unknown benchmark, no GPU, or an output that cannot be written.
    """
    for name in options.benchmarks:
        if name not in BENCHMARKS:
            raise NarrowgateError(
                f"bench: found '{name}', expected {', '.join(BENCHMARKS)}{did_you_mean(name, BENCHMARKS)}"
            )
    from .cli_gate import pick_device

    device = pick_device(options.device)
    if device == "cpu" and not (options.quick and options.device == "cpu"):
        raise NarrowgateError(
            "bench: needs a GPU; --quick --device cpu runs tiny sizes through the same code and measures nothing"
        )
    out = None if options.out is None else Path(options.out)
    if out is not None:
        if out.exists() and not out.is_file():
            raise NarrowgateError(f"--out {out}: expected the path of a file")
        check_writable(out.parent)
    import torch

    from .bench.suite import Settings, run_benchmark, table

    settings = Settings(
        torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu"),
        _quiet if options.quiet else _progress,
        options.quick,
        options.cases,
        options.rounds,
        options.tune,
    )
    documents: list[dict[str, Any]] = []
    faults: list[str] = []
    for name in dict.fromkeys(options.benchmarks or BENCHMARKS):
        found = run_benchmark(name, settings, options.command(name))
        documents.append(found.document)
        faults += found.faults
        if out is not None:
            # After each, so that an interrupt loses one benchmark, not all.
            write_together(out.parent, {out.name: _text(documents)})
        if not options.json:
            print("\n".join([f"{name} on {found.document['machine']}", *table(found.columns, found.document["rows"])]))
    if options.json:
        print(_text(documents), end="")
    for fault in faults:
        print(f"narrowgate: bench: {fault}", file=sys.stderr)
    return exits.FAILED if faults else 0


def _text(documents: list[dict[str, Any]]) -> str:
    """One document, or the list of several."""
    return json.dumps(documents[0] if len(documents) == 1 else documents, indent=1, allow_nan=False) + "\n"


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _quiet(line: str) -> None:
    """Show no progress."""
