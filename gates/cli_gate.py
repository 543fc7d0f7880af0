"""The command ``gate``: options to a run or to those of a gates file, reports to files and to the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..precision.errors import NarrowgateError, did_you_mean
from . import exits
from .files import check_writable
from .outputs import (
    SUMMARY_FILES,
    Outcome,
    forget_summary,
    summary_of,
    write_failure,
    write_outcome,
    write_report,
    write_summary,
)
from .policy import load_policy
from .ranks import Place
from .report import FILES, Report

if TYPE_CHECKING:
    from .run import Run

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
    config: str | None = None
    fresh: bool = False
    attribute_quality: bool = False
    json: bool = False
    quiet: bool = False
    collective_timeout: float | None = None
    replicas: int | None = None


def gate_command(options: GateOptions) -> int:
    """Run the command and return its exit code; of several ranks, as one of them."""
    place = Place.of_environment()
    if place is not None:
        from .cli_ranks import gate_on_ranks

        gate_on_ranks(options, place)
    if options.replicas is not None:
        raise NarrowgateError("gate --replicas divides the ranks of a job: start it with torchrun, or leave it out")
    if options.source is not None:
        return _decide_again(options, options.source)
    if options.config is not None:
        return _gates_of_file(options, options.config)
    run = prepared(options, pick_device(options.device))
    out = Path(options.out or DEFAULT_OUT)
    _store(out, options.fresh)  # before asking for room, which what is kept may take
    check_writable(out)
    from .progress import make_progress, prints_aside
    from .run import run_gate

    try:
        with make_progress(options.quiet) as progress, prints_aside():
            reports = run_gate(run, progress)
    except NarrowgateError:
        raise
    except Exception as error:
        write_failures(out, [recipe.name for recipe in run.recipes], exits.failure_text(error))
        raise
    return finish(reports, out, options)


def prepared(options: GateOptions, device: str) -> Run:
    """Return what a command line that names recipes asks for.

    Raises:
        NarrowgateError: options that contradict each other, a recipe or policy that does not read.
    """
    if not options.recipes:
        raise NarrowgateError("gate: expected a recipe: a built-in name or a file (`narrowgate recipes` lists them)")
    if options.task is not None and (options.model or options.data):
        raise NarrowgateError("gate: --task brings its own model and data; leave out --model and --data")
    from ..recipes import load_recipe

    recipes = tuple(load_recipe(name) for name in options.recipes)
    policy = load_policy(options.policy or "standard")
    check_backend(options.backend)
    from .resume import FOLDER
    from .run import Run
    from .task import TaskSource

    source = TaskSource(
        task=options.task,
        model=options.model or "gem-tiny",
        data=options.data or "synthetic",
        device=device,
        steps=options.steps,
    )
    store = Path(options.out or DEFAULT_OUT) / FOLDER
    return Run(source, recipes, policy, options.backend, options.seeds, store, options.attribute_quality)


def finish(reports: Sequence[Report], out: Path, options: GateOptions) -> int:
    """Write and print a run's reports, forget the trainings that nobody needs any more, and return the exit code."""
    from .resume import FOLDER, settle

    if len(reports) == 1:
        write_report(reports[0], out)
        settle(out / FOLDER)
        _print(reports[0], out, options)
        return exits.exit_code([reports[0].verdict])
    code = _finish([Outcome(report.recipe.name, report.recipe.name, report) for report in reports], out, options)
    settle(out / FOLDER)
    return code


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


def _gates_of_file(options: GateOptions, config: str) -> int:
    given = _task_options(options) | {
        "--from": options.source,
        "--policy": options.policy,
        "--attribute-quality": options.attribute_quality,
    }
    _refuse(given, "gate --config takes its gates from the file")
    from .gate_set import run_gates
    from .gates_file import load_gates
    from .progress import make_progress, prints_aside
    from .resume import settle

    specs = load_gates(Path(config), pick_device(options.device))
    out = Path(options.out or DEFAULT_OUT)
    store = _store(out, options.fresh)
    check_writable(out)
    forget_summary(out)
    with make_progress(options.quiet) as progress, prints_aside():
        outcomes = run_gates(specs, progress, lambda outcome: write_outcome(outcome, out), store)
    for outcome in outcomes:
        if outcome.failure is not None:
            print(f"narrowgate: {outcome.name}: the run failed: {outcome.failure}", file=sys.stderr)
    write_summary(outcomes, out)
    if all(outcome.failure is None for outcome in outcomes):
        settle(store)
    _print_summary(outcomes, out, options)
    return exits.exit_code(outcome.verdict for outcome in outcomes)


def _finish(outcomes: Sequence[Outcome], out: Path, options: GateOptions) -> int:
    forget_summary(out)
    for outcome in outcomes:
        write_outcome(outcome, out)
    write_summary(outcomes, out)
    _print_summary(outcomes, out, options)
    return exits.exit_code(outcome.verdict for outcome in outcomes)


def _store(out: Path, fresh: bool) -> Path:
    """Return the folder of finished trainings, emptied where the run is to start afresh."""
    from .resume import FOLDER, forget

    if fresh:
        forget(out / FOLDER)
    return out / FOLDER


def write_failures(out: Path, recipes: Sequence[str], text: str) -> None:
    """Leave in ``out`` that the run of ``recipes`` failed, and why."""
    if len(recipes) == 1:
        write_failure(recipes[0], text, out)
        return
    outcomes = [Outcome(name, name, None, text) for name in recipes]
    forget_summary(out)
    for outcome in outcomes:
        write_outcome(outcome, out)
    write_summary(outcomes, out)


def _task_options(options: GateOptions) -> dict[str, Any]:
    return {
        "recipes": options.recipes, "--model": options.model, "--data": options.data, "--task": options.task,
        "--seeds": options.seeds, "--steps": options.steps, "--backend": options.backend,
    }  # fmt: skip


def _refuse(given: dict[str, Any], because: str) -> None:
    for name, value in given.items():
        if value:
            raise NarrowgateError(f"{because} and takes no {name}")


def _decide_again(options: GateOptions, source: str) -> int:
    _refuse(
        _task_options(options)
        | {
            "--config": options.config,
            "--fresh": options.fresh,
            "--attribute-quality": options.attribute_quality,
        },
        "gate --from decides from stored measurements",
    )
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


def check_backend(backend: str | None) -> None:
    """Refuse a backend that nobody knows.

    Raises:
        NarrowgateError: names those that are.
    """
    from ..recipes.recipe import BACKENDS

    if backend is not None and backend not in BACKENDS:
        hint = did_you_mean(backend, BACKENDS)
        raise NarrowgateError(f"--backend: found '{backend}', expected {', '.join(BACKENDS)}{hint}")


def _print(report: Report, out: Path | None, options: GateOptions) -> None:
    if options.json:
        sys.stdout.write(report.files()["report.json"])
        return
    from .render import terminal_text

    print(terminal_text(report))
    if out is not None:
        print(f"Reports: {out / 'report.json'}, {', '.join(FILES[1:])}")


def _print_summary(outcomes: Sequence[Outcome], out: Path, options: GateOptions) -> None:
    if options.json:
        print(json.dumps(summary_of(outcomes), indent=1, allow_nan=False))
        return
    from .render import terminal_summary, terminal_text

    for outcome in outcomes:
        print(
            f"FAILED: {outcome.name}\n  - {outcome.failure}\n"
            if outcome.report is None
            else terminal_text(outcome.report)
        )
    print(terminal_summary(outcomes))
    print(f"Reports: {out / SUMMARY_FILES[0]}, {SUMMARY_FILES[1]} and a folder for each recipe")
