"""The command ``narrowgate``. Only what ``--help`` needs is imported here; each command imports its own work."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, NoReturn, Optional

import typer

from . import exits
from .cli_options import (
    Backend,
    Data,
    Json,
    Model,
    Policy,
    Quiet,
    Recipe,
    Task,
    benchmark_names,
    recipe_names,
    schema_names,
)
from .cli_plan import plan
from .cli_search import search

app = typer.Typer(
    name="narrowgate",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every command takes --debug for the traceback of an error.",
)


@app.callback()
def program(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Low-precision training recipes, accepted only by measured speed and quality."""
    if version:
        from importlib.metadata import version as installed

        print(installed("narrowgate"))
        raise typer.Exit


@app.command()
def gate(
    recipes: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="RECIPE...",
            help="Built-in names or files; `narrowgate recipes` lists the built-ins.",
            autocompletion=recipe_names,
        ),
    ] = None,
    model: Model = None,
    data: Data = None,
    task: Task = None,
    policy: Policy = None,
    out: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="DIR", help="Where reports go; several recipes: DIR/RECIPE [default: reports]."),
    ] = None,
    seeds: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1, max=1000, help="Paired seeds; the policy's number otherwise, and fewer than 5 decide nothing."
        ),
    ] = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Training steps a seed; the model's own number otherwise."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Backend = None,
    from_: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--from", metavar="REPORT", help="Decide again from the measurements of a report.json; trains nothing."
        ),
    ] = None,
    config: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="Run the gates that a gates.yaml lists; reports in DIR/NAME and a summary."),
    ] = None,
    attribute_quality: Annotated[
        bool,
        typer.Option(
            "--attribute-quality",
            help="Also train with the recipe on one group of layers or path at a time, to say where quality is lost.",
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train anew what an interrupted run into the same folder left finished.")
    ] = False,
    collective_timeout: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--collective-timeout",
            min=1,
            max=604_800,
            metavar="SECONDS",
            help="On several ranks: how long one may wait for another [default: 600].",
        ),
    ] = None,
    replicas: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1, metavar="N", help="On several ranks: shard over groups of RANKS / N, each a replica [default: 1]."
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train baseline and candidate as pairs, decide, and write reports.

    Exit code: 0 accept, 1 reject, 2 bad input, 3 inconclusive, 4 the run failed.

    On several GPUs: torchrun --nproc-per-node 2 -m narrowgate.gates gate mine.yaml --model gem-base

    Example: narrowgate gate gem-fp8 --model gem-tiny --data ml-100k:data/ml-100k

    Example: narrowgate gate mine.yaml --task mypackage.ranker:make_task --policy strict

    Example: narrowgate gate --config gates.yaml

    Example: narrowgate gate --from reports/report.json --policy loose
    """
    from .cli_gate import GateOptions, gate_command

    raise typer.Exit(
        gate_command(
            GateOptions(
                recipes=tuple(recipes or ()),
                model=model,
                data=data,
                task=task,
                policy=policy,
                out=out,
                seeds=seeds,
                steps=steps,
                device=device,
                backend=backend,
                source=from_,
                config=config,
                fresh=fresh,
                attribute_quality=attribute_quality,
                json=json,
                quiet=quiet,
                collective_timeout=collective_timeout,
                replicas=replicas,
            )
        )
    )


app.command()(plan)
app.command()(search)


@app.command()
def inspect(
    recipe: Recipe,
    model: Model = None,
    data: Data = None,
    task: Task = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to watch.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, batches and dropout.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a few steps and show what each format does to each tensor: amax, saturation, underflow, clips, SQNR.

    Example: narrowgate inspect gem-fp8 --model gem-tiny --steps 10
    """
    from .cli_inspect import InspectOptions, inspect_command

    inspect_command(
        InspectOptions(
            recipe=recipe,
            model=model,
            data=data,
            task=task,
            steps=steps,
            seed=seed,
            device=device,
            json=json,
            quiet=quiet,
        )
    )


@app.command()
def bench(
    benchmarks: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[casts|gemms|mlp|optimizer]...",
            help="What to measure [default: all].",
            autocompletion=benchmark_names,
        ),
    ] = None,
    case: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="GLOB", help="Only cases of this name, for example 'swiglu*' or d2048; may be repeated."),
    ] = None,
    out: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="Also write the JSON there."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases and turns; with --device cpu tiny ones, to try the code.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu (with --quick only) or cuda.")] = "auto",
    rounds: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="How often every arm takes its turn."),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="First choose the tiles of cast kernels by measurement, and keep the choices."),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time cast kernels, products, MLP blocks and optimizer steps against BF16 or FP32 and installed peers, in turns.

    Exit code 4: results are not what they must equal, or a row moves more bytes than the memory can.

    Example: narrowgate bench casts --case 'swiglu*' --out casts.json
    """
    from .cli_bench import BenchOptions, bench_command

    raise typer.Exit(
        bench_command(
            BenchOptions(
                benchmarks=tuple(benchmarks or ()),
                cases=tuple(case or ()),
                out=out,
                quick=quick,
                device=device,
                rounds=rounds,
                tune=tune,
                json=json,
                quiet=quiet,
            )
        )
    )


@app.command()
def recipes(json: Json = False) -> None:
    """List the built-in recipes.

    Example: narrowgate recipes
    """
    from .cli_recipes import recipes_command

    recipes_command(json)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A built-in recipe.", autocompletion=recipe_names)],
    json: Json = False,
) -> None:
    """Print a built-in recipe's text.

    Example: narrowgate show gem-fp8 > mine.yaml
    """
    from .cli_recipes import show_command

    show_command(name, json)


@app.command()
def validate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A recipe file, or a built-in name.")],
    output_format: Annotated[str, typer.Option(help="text, github (annotations) or json.")] = "text",
    require_native: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="DEVICE", help="Also refuse what h100, h200, b200 or auto (the one here) would emulate."),
    ] = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Also resolve the recipe against this built-in model: patterns that match nothing, mixed GEMMs."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check a recipe without running it.

    Example: narrowgate validate mine.yaml --require-native h200 --output-format github
    """
    from .cli_recipes import validate_command

    raise typer.Exit(validate_command(file, "json" if json else output_format, require_native, model))


@app.command("compare")
def compare_reports(
    a: Annotated[str, typer.Argument(metavar="A", help="A report.json.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    json: Json = False,
) -> None:
    """Show two reports side by side: verdicts, every gate with its interval, and what differs in how they were made.

    Example: narrowgate compare before/report.json after/report.json
    """
    from .cli_compare import compare_command

    compare_command(a, b, json)


@app.command()
def schema(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="recipe, policy, gates, report, search, rates or topology.",
            autocompletion=schema_names,
        ),
    ],
) -> None:
    """Print the JSON Schema of a kind of file, for editors and other tools.

    Example: narrowgate schema recipe > recipe.schema.json
    """
    from .cli_recipes import schema_command

    schema_command(name)


@app.command()
def doctor(json: Json = False) -> None:
    """Show versions and devices, and which formats and backends are native, emulated or absent, and why.

    Example: narrowgate doctor --json
    """
    from .cli_doctor import doctor_command

    doctor_command(json)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the program and exit: bad input is one line on standard error and code 2, never a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As standard error does: a name that the terminal's encoding lacks must not cost a verdict.
        sys.stdout.reconfigure(errors="backslashreplace")
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"] or ["--help"]
    try:
        code = app(arguments, prog_name="narrowgate", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        code = _unread()
    except (KeyboardInterrupt, typer.Abort):
        code = exits.INTERRUPTED
    except SystemExit as error:
        if _completes(arguments):  # the parser's own way to end there
            raise
        code = _unread() if isinstance(error.__context__, BrokenPipeError) else _ended_by_task(error)
    except Exception as error:
        if debug:
            raise
        code = _explain(error)
    if code == exits.INTERRUPTED:  # some versions of the parser turn the interrupt into this code themselves
        _say("interrupted; no report was written of unfinished gates")
    sys.exit(code if isinstance(code, int) else exits.ACCEPT)


def _completes(arguments: list[str]) -> bool:
    """Return whether a shell asks for completions, or for the script that asks."""
    return "_NARROWGATE_COMPLETE" in os.environ or bool({"--install-completion", "--show-completion"} & {*arguments})


def _unread() -> int:
    """Stop writing to whoever closed the pipe (`| head`); return the exit code: nobody has been told the verdict."""
    # The parser answers a closed pipe with 1, and so does an exception on the way out: that would read as a reject.
    sys.stdout = None  # type: ignore[assignment]
    return exits.FAILED


def _ended_by_task(error: SystemExit) -> int:
    """Explain the exit of a model that ends the process: its code 0 would read as an acceptance."""
    from .model_state import RunError

    return _explain(RunError(f"the task's code ended the process by sys.exit({error.code!r})"))


def _explain(error: Exception) -> int:
    """Say in one line what went wrong; return the exit code."""
    format_message = getattr(error, "format_message", None)
    if format_message is not None:  # a usage error of the command line parser
        if os.environ.get("RANK", "0") == "0":  # every rank of a job has the same command line
            _say(" ".join(str(format_message()).split()))
        return exits.USAGE
    from ..precision.errors import NarrowgateError

    if isinstance(error, NarrowgateError):
        from ..recipes.errors import RecipeError

        # A recipe's faults begin with file and line, as compilers write them.
        _say(str(error), prefix="" if isinstance(error, RecipeError) else "narrowgate: ")
        return exits.USAGE
    _say(f"the run failed: {exits.failure_text(error)} (--debug shows the traceback)")
    return exits.FAILED


def _say(text: str, prefix: str = "narrowgate: ") -> None:
    try:
        for line in text.splitlines():
            print(f"{prefix}{line}", file=sys.stderr)
    except BrokenPipeError:
        sys.stderr = None  # type: ignore[assignment]
