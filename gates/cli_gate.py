"""The command ``gate``: options to a run, reports to files and to the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..precision.errors import NarrowgateError, did_you_mean
from . import exits
from .files import check_writable, write_together
from .policy import load_policy

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe
    from .report import Report

DEFAULT_OUT = "reports"
_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class GateOptions:
    """What the command line said; None where it said nothing."""

    recipes: tuple[str, ...] = ()
    model: str | None = None
    data: str | None = None
    task: str | None = None
    policy: str | None = None
    out: str | None = None
    seeds: int | None = None
    steps: int | None = None
    device: str = "auto"
    backend: str | None = None
    source: str | None = None
    json: bool = False
    quiet: bool = False


def gate_command(options: GateOptions) -> int:
    """Run the command and return its exit code."""
    if options.source is not None:
        return _decide_again(options, options.source)
    if not options.recipes:
        raise NarrowgateError("gate: expected a recipe: a built-in name or a file (`narrowgate recipes` lists them)")
    if options.task is not None and (options.model or options.data):
        raise NarrowgateError("gate: --task brings its own model and data; leave out --model and --data")
    from ..recipes import load_recipe

    recipes = tuple(load_recipe(name) for name in options.recipes)
    policy = load_policy(options.policy or "standard")
    _check_backend(options.backend)
    out = Path(options.out or DEFAULT_OUT)
    check_writable(out)
    device = pick_device(options.device)
    from .progress import make_progress
    from .run import Run, run_gate
    from .task import TaskSource

    source = TaskSource(
        task=options.task,
        model=options.model or "gem-tiny",
        data=options.data or "synthetic",
        device=device,
        steps=options.steps,
    )
    run = Run(source, recipes, policy, options.backend, options.seeds)
    try:
        with make_progress(options.quiet) as progress:
            reports = run_gate(run, progress)
    except NarrowgateError:
        raise
    except Exception as error:
        _write_failure(out, recipes, f"{type(error).__name__}: {error}")
        raise
    if len(reports) == 1:
        write_report(reports[0], out)
        _print(reports[0], out, options)
    else:
        write_summary(reports, out)
        _print_summary(reports, out, options)
    return exits.exit_code(report.verdict for report in reports)


def pick_device(name: str) -> str:
    """Return ``cpu`` or ``cuda`` for what the user said.

    Raises:
        NarrowgateError: an unknown name, or a GPU that is not there.
    """
    if name not in _DEVICES:
        raise NarrowgateError(f"--device: found '{name}', expected {', '.join(_DEVICES)}{did_you_mean(name, _DEVICES)}")
    if name == "cpu":
        return name
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise NarrowgateError("--device cuda: PyTorch finds no CUDA device here; use --device cpu")
    return "cpu"


def write_report(report: Report, folder: Path) -> None:
    """Write a report's files into ``folder``, all or none."""
    write_together(folder, report.files())


def summary_of(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the data of ``summary.json``."""
    return {
        "schema_version": 1,
        "exit_code": exits.exit_code(report.verdict for report in reports),
        "family": len(reports),
        "recipes": [
            {
                "name": report.recipe.name,
                "hash": report.recipe.hash,
                "verdict": report.verdict,
                "reasons": [reason.model_dump() for reason in report.reasons],
                "gates": [gate.model_dump() for gate in report.gates],
                "report": f"{report.recipe.name}/report.json",
            }
            for report in reports
        ],
    }


def write_summary(reports: Sequence[Report], out: Path) -> None:
    """Write each recipe's report into a folder of its own, and the summary over them."""
    from .render import render_summary

    for report in reports:
        write_report(report, out / report.recipe.name)
    data = json.dumps(summary_of(reports), indent=1, allow_nan=False) + "\n"
    write_together(out, {"summary.json": data, "summary.md": render_summary(reports)})


def _decide_again(options: GateOptions, source: str) -> int:
    given = {
        "recipes": options.recipes, "--model": options.model, "--data": options.data, "--task": options.task,
        "--seeds": options.seeds, "--steps": options.steps, "--backend": options.backend,
    }  # fmt: skip
    for name, value in given.items():
        if value:
            raise NarrowgateError(f"gate --from decides from stored measurements and takes no {name}")
    from .decision import decide
    from .report import decided, load_report

    report = load_report(Path(source))
    policy = report.policy if options.policy is None else load_policy(options.policy)
    out = None if options.out is None else Path(options.out)
    if out is not None:
        check_writable(out)
    family = report.statistics.family
    # Holm's level belongs to the p values under that policy; under another one Bonferroni's holds without them.
    level = report.statistics.accept_alpha if policy == report.policy else policy.alpha / family
    again = decided(report, decide(report.measurements, policy, accept_alpha=level, family=family), policy)
    if out is not None:
        write_report(again, out)
    _print(again, out, options)
    return exits.exit_code([again.verdict])


def _check_backend(backend: str | None) -> None:
    from ..recipes.recipe import BACKENDS

    if backend is not None and backend not in BACKENDS:
        hint = did_you_mean(backend, BACKENDS)
        raise NarrowgateError(f"--backend: found '{backend}', expected {', '.join(BACKENDS)}{hint}")


def _write_failure(out: Path, recipes: Sequence[Recipe], message: str) -> None:
    """Leave a JUnit error in place of an older run's files, which would read as this run's."""
    from .junit import junit_failed_run
    from .report import FILES

    text = " ".join(message.split())
    for recipe in recipes:
        folder = out if len(recipes) == 1 else out / recipe.name
        write_together(
            folder,
            {"junit.xml": junit_failed_run(recipe.name, text)},
            stale=tuple(name for name in FILES if name != "junit.xml"),
        )


def _print(report: Report, out: Path | None, options: GateOptions) -> None:
    if options.json:
        sys.stdout.write(report.files()["report.json"])
        return
    from .render import terminal_text
    from .report import FILES

    print(terminal_text(report))
    if out is not None:
        print(f"Reports: {out / 'report.json'}, {', '.join(FILES[1:])}")


def _print_summary(reports: Sequence[Report], out: Path, options: GateOptions) -> None:
    if options.json:
        print(json.dumps(summary_of(reports), indent=1, allow_nan=False))
        return
    from .render import terminal_text

    for report in reports:
        print(terminal_text(report))
    print(f"Reports: {out / 'summary.json'}, summary.md and a folder for each recipe")
