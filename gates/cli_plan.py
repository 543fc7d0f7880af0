"""The command ``plan``. As in :mod:`narrowgate.gates.cli`, what the work needs is imported when it runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Optional

import typer

from .cli_options import Backend, Json, Model, device_names, recipe_names


def plan(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A built-in name or a file.", autocompletion=recipe_names)
    ],
    model: Model = "gem-tiny",
    data: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Its input: synthetic, ml-100k:DIR, ml-1m:DIR, criteo:FILE or table:FILE; also traces one batch of it."
        ),
    ] = None,
    task: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Your own model instead: package.module:factory. Runs that module's code."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Plan for h100, h200, b200, cpu, or auto: the one here.", autocompletion=device_names),
    ] = "auto",
    backend: Backend = None,
    rows: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Price every layer at so many rows, for example those of a batch."),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Run one training batch to see the rows of each layer, and price by them.")
    ] = False,
    rates: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="Price by these measured rates, as scripts/bench_gemm_rates writes them."),
    ] = None,
    json: Json = False,
) -> None:
    """Show what each layer and GEMM path gets, which rule says so, whether the device runs it natively, and its price.

    Prices, the predicted gain or loss of each layer, need the rows that it multiplies: --rows, --trace or --data.

    Example: narrowgate plan gem-fp8 --model gem-small --device h200 --rows 8192
    """
    plan_command(
        PlanOptions(
            recipe=recipe,
            model=model,
            data=data,
            task=task,
            device=device,
            backend=backend,
            rows=rows,
            trace=trace,
            rates=rates,
            json=json,
        )
    )


@dataclass(frozen=True)
class PlanOptions:
    """What ``plan`` was asked; fields are the options of the command line."""

    recipe: str
    model: str
    data: str | None
    task: str | None
    device: str
    backend: str | None
    rows: int | None
    trace: bool
    rates: str | None
    json: bool


def plan_command(options: PlanOptions) -> None:
    """Print the resolved plan, with prices where rows are given or traced."""
    from ..precision.capability import named_device
    from ..precision.errors import NarrowgateError
    from ..recipes import load_rates, load_recipe, resolve
    from .rows import trace_rows, trace_step
    from .task import TaskSource

    traced = options.trace or options.data is not None
    if traced and options.rows is not None:
        other = "--trace" if options.trace else "--data, which traces a batch"
        raise NarrowgateError(f"found --rows and {other}, expected one of them")
    loaded, target = load_recipe(options.recipe), named_device(options.device)
    rates = None if options.rates is None else load_rates(options.rates)
    # Shapes are all that a plan needs, traced or not: a built-in model needs no weights.
    device = "meta" if options.task is None else "cpu"
    source = TaskSource(task=options.task, model=options.model, data=options.data or "synthetic", device=device)
    task = source.open()
    built = task.build_model()
    rows = trace_rows(task, built) if traced else options.rows
    plan = resolve(loaded, built, device=target, backend=options.backend, rows=rows, rates=rates)
    if traced:
        plan = plan.with_trace(trace_step(task, built))
    if options.json:
        sys.stdout.write(plan.to_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(plan.render())
    else:
        sys.stdout.write(plan.to_text())
