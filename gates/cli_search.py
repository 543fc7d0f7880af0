"""The command ``search``. As in :mod:`narrowgate.gates.cli`, what the work needs is imported when it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from . import exits
from .cli_options import Backend, Data, Json, Model, Policy, Quiet, Task, device_names, recipe_names

if TYPE_CHECKING:
    from ..precision.capability import Device
    from ..recipes.recipe import Recipe
    from ..recipes.search import Start
    from .search import Found
    from .search_measure import TaskMeasurer

#: What is planned for where no GPU is here and nobody says.
_PLANNED_FOR = "h200"
_TRAINED_ON = ("auto", "cpu", "cuda")
_RANK_BY = ("time", "flops")
DEFAULT_OUT = "search"


def search(
    model: Model = None,
    data: Data = None,
    task: Task = None,
    from_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--from",
            metavar="RECIPE",
            help="Begin with this recipe, a built-in or a file; may be repeated [default: every built-in that pays].",
            autocompletion=recipe_names,
        ),
    ] = None,
    policy: Policy = None,
    out: Annotated[str, typer.Option(metavar="DIR", help="Where reports and recipes go.")] = DEFAULT_OUT,
    seeds: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=1000, help="Paired seeds of the full gate; the policy's number otherwise."),
    ] = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Training steps a seed of the full gate; the model's own number otherwise."),
    ] = None,
    screen_seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Paired seeds of a screen, never seeds of the full gate.")
    ] = 3,
    screen_steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Training steps of a screen [default: half of the full gate's]."),
    ] = None,
    max_candidates: Annotated[int, typer.Option(min=1, help="Candidates to screen at most.")] = 12,
    finalists: Annotated[int, typer.Option(min=1, help="Candidates to put through the full gate at most.")] = 2,
    minutes: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            min=0, max=525_600, help="Stop screening so that the full gate's trainings fit into so many minutes."
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="auto, cpu or cuda: where it trains; h100, h200 or b200: train here and plan for that one.",
            autocompletion=device_names,
        ),
    ] = "auto",
    backend: Backend = None,
    rates: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="Predict times from these rates, as scripts/bench_gemm_rates writes them."),
    ] = None,
    rank_by: Annotated[
        str,
        typer.Option(
            help="time (predicted; layers that lose stay BF16) or flops (in low precision), where that is not known."
        ),
    ] = "time",
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier screens and trainings in DIR.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find recipes that pass the gates: screen candidates on few seeds, then gate the best on other seeds.

    Candidates are recipe files in DIR/recipes: what is predicted to pay in low precision, less what costs quality.

    Exit code: 0 a recipe is accepted, 1 all that were gated are rejected, 2 bad input, 3 inconclusive (as always
    without a GPU), 4 the run failed.

    Example: narrowgate search --model gem-small --data ml-1m:data/ml-1m --minutes 60

    Example: narrowgate search --model gem-tiny --from gem-fp8 --device h200 --rank-by flops
    """
    raise typer.Exit(
        search_command(
            SearchOptions(
                model=model,
                data=data,
                task=task,
                bases=tuple(from_ or ()),
                policy=policy,
                out=out,
                seeds=seeds,
                steps=steps,
                screen_seeds=screen_seeds,
                screen_steps=screen_steps,
                max_candidates=max_candidates,
                finalists=finalists,
                minutes=minutes,
                device=device,
                backend=backend,
                rates=rates,
                rank_by=rank_by,
                fresh=fresh,
                json=json,
                quiet=quiet,
            )
        )
    )


@dataclass(frozen=True)
class SearchOptions:
    """What ``search`` was asked; fields are the options of the command line."""

    model: str | None = None
    data: str | None = None
    task: str | None = None
    bases: tuple[str, ...] = ()
    policy: str | None = None
    out: str = DEFAULT_OUT
    seeds: int | None = None
    steps: int | None = None
    screen_seeds: int = 3
    screen_steps: int | None = None
    max_candidates: int = 12
    finalists: int = 2
    minutes: float | None = None
    device: str = "auto"
    backend: str | None = None
    rates: str | None = None
    rank_by: str = "time"
    fresh: bool = False
    json: bool = False
    quiet: bool = False


def search_command(options: SearchOptions) -> int:
    """Search, write reports and recipes, print; return the exit code."""
    from ..precision.errors import NarrowgateError, did_you_mean

    if options.task is not None and (options.model or options.data):
        raise NarrowgateError("search: --task brings its own model and data; leave out --model and --data")
    if options.rank_by not in _RANK_BY:
        hint = did_you_mean(options.rank_by, _RANK_BY)
        raise NarrowgateError(f"--rank-by: found '{options.rank_by}', expected {' or '.join(_RANK_BY)}{hint}")
    from .ranks import Place

    place = Place.of_environment()
    if place is not None:
        if place.rank:  # the first says it
            return exits.USAGE
        raise NarrowgateError(
            "search: found the ranks of a job (torchrun), expected one process; gate its finds on ranks"
        )
    trained_on, planned_for = _devices(options.device)
    from ..recipes import load_recipe
    from .cli_gate import check_backend
    from .files import check_writable
    from .policy import load_policy
    from .progress import make_progress, prints_aside
    from .resume import FOLDER as TRAININGS
    from .resume import forget, settle
    from .search import Found, Limits, search
    from .search_measure import TaskMeasurer
    from .search_report import search_text, write_finalists
    from .search_store import FOLDER, SearchStore
    from .task import TaskSource

    check_backend(options.backend)
    policy, bases = load_policy(options.policy or "standard"), [load_recipe(name) for name in options.bases]
    repeated = next((b.name for i, b in enumerate(bases) if b.name in {other.name for other in bases[:i]}), None)
    if repeated is not None:
        raise NarrowgateError(f"--from: recipe '{repeated}' is given twice; candidates are named after it")
    out = Path(options.out)
    kept, trainings = SearchStore(out / FOLDER), out / TRAININGS
    if options.fresh:
        kept.forget_screens()
        forget(trainings)
    check_writable(out)
    source = TaskSource(
        task=options.task,
        model=options.model or "gem-tiny",
        data=options.data or "synthetic",
        device=trained_on,
        steps=options.steps,
    )
    found = Found()
    with make_progress(options.quiet) as progress, prints_aside():
        progress.phase(f"planning for {planned_for.name}")
        starts = _starts(options, source, bases, planned_for, found)
        progress.phase(f"opening {source.task or f'{source.model} on {source.data}'}")
        measurer = TaskMeasurer(
            source,
            policy,
            progress,
            kept=kept,
            trainings=trainings,
            backend=options.backend,
            seeds=options.seeds,
            screen_seeds=options.screen_seeds,
            screen_steps=options.screen_steps,
        )
        found.earlier = tuple(member.name for member in measurer.earlier)
        notes = _Notes(options, measurer, planned_for.name, starts, out, progress)
        seconds = None if options.minutes is None else 60 * options.minutes
        limits = Limits(options.max_candidates, seconds, options.finalists)
        try:
            if starts:
                search(starts, measurer, policy, limits, found=found, told=notes)
            write_finalists(found, out)
        except NarrowgateError:
            raise
        except Exception as error:
            notes.failed(found, error)
            raise
    settle(trainings)
    data = notes.write(found, finished=True)
    if options.json:
        sys.stdout.write(json.dumps(data, indent=1, allow_nan=False) + "\n")
    else:
        print(search_text(found, data, out))
    return data["exit_code"]


class _Notes:
    """Writes what was found so far, whenever it changed, and tells of new candidates."""

    def __init__(
        self,
        options: SearchOptions,
        measurer: TaskMeasurer,
        planned_for: str,
        starts: list[Start],
        out: Path,
        progress: Any,
    ) -> None:
        from . import task as tasks
        from .search_report import Facts

        model, data = tasks.describe(measurer.task)
        self.out, self.progress, self.said = out, progress, 0
        self.bases = {
            start.base.name: start.base.flatten().to_yaml() for start in starts if start.extends != start.base.name
        }
        policy = measurer.policy
        self.facts = Facts(
            model=str(model.get("name", "the task's model")),
            data=str(data.get("name", "the task's data")),
            policy=policy.policy,
            device=measurer.source.device,
            planned_for=planned_for,
            by=options.rank_by,
            seeds=policy.seeds if options.seeds is None else options.seeds,
            steps=measurer.steps,
            screen_seeds=measurer.screen_seeds,
            screen_steps=measurer.screen_steps,
            max_candidates=options.max_candidates,
            finalists=options.finalists,
            minutes=options.minutes,
        )

    def __call__(self, found: Found) -> None:
        """Write and tell."""
        from .search_report import write_recipes

        new = found.candidates[self.said :]
        write_recipes(new, self.bases, self.out)
        for candidate in new:
            if not candidate.probe:
                told = "promising" if candidate.promising else "loses too much"
                self.progress.phase(f"{candidate.recipe.name}: worst loss {candidate.worst:.2f} margins, {told}")
        self.said = len(found.candidates)
        self.write(found, finished=False)

    def write(self, found: Found, *, finished: bool, failure: str | None = None) -> dict[str, Any]:
        """Write ``search.json`` and ``search.md``; return the data."""
        from .search_report import search_dict, write_search

        data = search_dict(found, self.facts, finished=finished, failure=failure)
        write_search(data, self.out)
        return data

    def failed(self, found: Found, error: Exception) -> None:
        """Write that the run failed."""
        self.write(found, finished=False, failure=exits.failure_text(error))


def _devices(name: str) -> tuple[str, Device]:
    """Return where to train, and what to plan for."""
    from ..precision.capability import NAMED_DEVICES, current_device, named_device
    from ..precision.errors import NarrowgateError, did_you_mean
    from .cli_gate import pick_device

    known = (*_TRAINED_ON, *(other for other in NAMED_DEVICES if other not in _TRAINED_ON))
    if name not in known:
        raise NarrowgateError(f"--device: found '{name}', expected {', '.join(known)}{did_you_mean(name, known)}")
    trained_on = pick_device(name if name in _TRAINED_ON else "auto")
    if name not in _TRAINED_ON:
        return trained_on, named_device(name)
    return trained_on, current_device("cuda") if trained_on == "cuda" else named_device(_PLANNED_FOR)


def _starts(options: SearchOptions, source: Any, bases: list[Recipe], planned_for: Device, found: Found) -> list[Start]:
    """Plan every recipe to begin with; what is worth nothing is noted with why and left out."""
    from dataclasses import replace

    from ..precision.errors import NarrowgateError
    from ..recipes import builtin_names, load_rates, load_recipe
    from ..recipes.errors import RecipeError
    from ..recipes.search import open_start
    from .rows import trace_rows

    rates = None if options.rates is None else load_rates(options.rates)
    # Shapes are all that a plan needs: a built-in model needs no weights.
    task = replace(source, device="meta" if options.task is None else "cpu").open()
    model = task.build_model()
    rows = trace_rows(task, model)
    starts = []
    for base in bases or [load_recipe(name) for name in builtin_names()]:
        built_in = base.source is not None and base.source.file.startswith("<builtin>/")
        try:
            start = open_start(
                base,
                model,
                device=planned_for,
                rows=rows,
                rates=rates,
                backend=options.backend,
                by="time" if options.rank_by == "time" else "flops",
                extends=base.name if built_in else f"{base.name}.yaml",
            )
        except RecipeError as error:
            if bases:
                raise
            found.skipped[base.name] = str(error).splitlines()[0]
            continue
        except NarrowgateError as error:
            raise NarrowgateError(f"search: {error}; give --rates FILE, or --rank-by flops") from None
        # What is only emulated never passes a speed gate; whoever names such a recipe wants to know its quality.
        if start.lowered and (bases or start.plan.native):
            starts.append(start)
        else:
            found.skipped[base.name] = _why_nothing(start, planned_for)
    return starts


def _why_nothing(start: Start, device: Device) -> str:
    count = len(start.dense) + len(start.lowered)
    if not count:
        return "lowers no layer of this model"
    layers = f"{count} layer{'s' * (count > 1)} in low precision"
    emulated = next(iter(start.plan.emulated_reasons()), None)
    if emulated is not None:
        return f"{layers}, emulated on {device.name}: {emulated}"
    return f"none of its {layers} is predicted to gain on {device.name}; --rank-by flops searches them all the same"
