"""The command ``plan``. As in :mod:`narrowgate.gates.cli`, what the work needs is imported when it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .cli_options import Backend, Json, Model, Recipe, Task, device_names

if TYPE_CHECKING:
    from torch import nn

    from ..precision.exchanged_rows import Exchanged
    from ..recipes.plan import Plan
    from ..recipes.topology import Topology
    from ..recipes.wire_plan import Wire
    from ..recipes.wire_units import Sharding


def plan(
    recipe: Recipe,
    links: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="LINKS", help="With --shards: a file of bandwidths and latencies between GPUs."),
    ] = None,
    model: Model = None,
    data: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Its input: synthetic, ml-100k:DIR, ml-1m:DIR, criteo:FILE or table:FILE; also traces one batch of it."
        ),
    ] = None,
    task: Task = None,
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
    casts: Annotated[
        bool, typer.Option("--casts", help="Trace a compiled step to see which casts fuse with what made their tensor.")
    ] = False,
    rates: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="Price by these measured rates, as scripts/bench_gemm_rates writes them."),
    ] = None,
    shards: Annotated[
        bool, typer.Option("--shards", help="Plan the wire of FSDP2 instead, over the links of LINKS or an example's.")
    ] = False,
    gpus: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(min=1, help="GPUs to plan the wire for; may be repeated [default: 8, 64, 4096]."),
    ] = None,
    shard_group: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="GPUs that share each weight where others hold replicas [default: an NVLink domain]."),
    ] = None,
    unit: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="GLOB", help="Modules that fully_shard takes one by one [default: entries of lists of blocks]."
        ),
    ] = None,
    ignore: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="GLOB", help="Modules that FSDP2 leaves alone, such as tables that are sharded by table."),
    ] = None,
    param_dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What weights without codes travel as, of FSDP2's policy [default: bf16]."),
    ] = None,
    reduce_dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What gradients travel as, of FSDP2's policy [default: as weights]."),
    ] = None,
    keep_gathered: Annotated[
        bool, typer.Option("--keep-gathered", help="Units stay gathered until backward: reshard_after_forward=False.")
    ] = False,
    joint_amaxes: Annotated[
        bool, typer.Option("--joint-amaxes", help="reduce_amaxes(model) runs once a step.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what each layer and GEMM path gets, which rule says so, whether the device runs it natively, and its price.

    Prices, the predicted gain or loss of each layer, need the rows that it multiplies: --rows, --trace or --data.

    Example: narrowgate plan gem-fp8 --model gem-small --device h200 --rows 8192

    Example: narrowgate plan mine.yaml --model gem-base --shards links.yaml --device h200 --rows 4096
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
            casts=casts,
            rates=rates,
            json=json,
            wire=WireOptions(
                shards=shards,
                links=links,
                gpus=tuple(gpus or ()),
                shard_group=shard_group,
                units=tuple(unit or ()),
                ignored=tuple(ignore or ()),
                param_dtype=param_dtype,
                reduce_dtype=reduce_dtype,
                keep_gathered=keep_gathered,
                joint_amaxes=joint_amaxes,
            ),
        )
    )


@dataclass(frozen=True)
class WireOptions:
    """What ``plan --shards`` was asked beside the plan itself."""

    shards: bool = False
    links: str | None = None
    gpus: tuple[int, ...] = ()
    shard_group: int | None = None
    units: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    keep_gathered: bool = False
    joint_amaxes: bool = False

    def stray(self) -> str | None:
        """Return an option that means nothing without ``--shards``; None where there is none."""
        told = {
            f"LINKS '{self.links}'": self.links, "--gpus": self.gpus, "--shard-group": self.shard_group,
            "--unit": self.units, "--ignore": self.ignored, "--param-dtype": self.param_dtype,
            "--reduce-dtype": self.reduce_dtype, "--keep-gathered": self.keep_gathered,
            "--joint-amaxes": self.joint_amaxes,
        }  # fmt: skip
        return None if self.shards else next((name for name, value in told.items() if value), None)


@dataclass(frozen=True)
class PlanOptions:
    """What ``plan`` was asked; fields are the options of the command line."""

    recipe: str
    model: str | None
    data: str | None
    task: str | None
    device: str
    backend: str | None
    rows: int | None
    trace: bool
    casts: bool
    rates: str | None
    json: bool
    wire: WireOptions


def plan_command(options: PlanOptions) -> None:
    """Print the resolved plan, with prices where rows are given or traced."""
    from ..precision.capability import named_device
    from ..precision.errors import NarrowgateError
    from ..recipes import load_rates, load_recipe, resolve
    from ..recipes.saved_activations import save_format
    from .progress import prints_aside
    from .rows import trace_casts, trace_lookups, trace_rows, trace_saved, trace_step
    from .task import TaskSource

    traced = options.trace or options.data is not None
    if traced and options.rows is not None:
        other = "--trace" if options.trace else "--data, which traces a batch"
        raise NarrowgateError(f"found --rows and {other}, expected one of them")
    if options.task is not None and options.model is not None:
        raise NarrowgateError("plan: --task brings its own model; leave out --model")
    stray = options.wire.stray()
    if stray is not None:
        raise NarrowgateError(f"found {stray} without --shards, expected both or neither")
    if options.casts and options.wire.shards:
        raise NarrowgateError("found --casts and --shards, which plans the wire instead, expected one of them")
    loaded, target = load_recipe(options.recipe), named_device(options.device)
    rates = None if options.rates is None else load_rates(options.rates)
    # Shapes are all that a plan needs, traced or not: a built-in model needs no weights.
    device = "meta" if options.task is None else "cpu"
    source = TaskSource(
        task=options.task, model=options.model or "gem-tiny", data=options.data or "synthetic", device=device
    )
    with prints_aside():
        task = source.open()
        built = task.build_model()
        rows = trace_rows(task, built) if traced else options.rows
        plan = resolve(loaded, built, device=target, backend=options.backend, rows=rows, rates=rates)
        if traced:
            plan = plan.with_trace(trace_step(task, built))
            if plan.backend == "native" and save_format(loaded) is not None:
                plan = plan.with_saved(trace_saved(task, built, plan))
        if options.casts:
            # In memory, not on the meta device: autocast, which knows no such device, decides what is BF16.
            plan = plan.with_casts(trace_casts(replace(source, device="cpu").open(), built, plan))
    if options.wire.shards:
        _print_wire(built, plan, options, None if plan.tables is None else trace_lookups(task, built))
    elif options.json:
        sys.stdout.write(plan.to_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(plan.render())
    else:
        sys.stdout.write(plan.to_text())


#: GPUs to plan the wire for where nobody says: one host, a rack or two, and GEM's "several thousand".
_GPUS = (8, 64, 4096)


def _print_wire(model: nn.Module, plan: Plan, options: PlanOptions, exchanged: Exchanged | None) -> None:
    """Print what a sharded step puts on the wire, in every layout that was asked for.

    ``exchanged`` is what every rank asks of embedding tables, where the recipe has them exchange rows.
    """
    from ..precision.errors import NarrowgateError
    from ..recipes.topology import example_topology, load_topology
    from ..recipes.wire_plan import Layout, predict_wire
    from ..recipes.wire_units import Sharding

    asked = options.wire
    most = max(asked.gpus or _GPUS)
    if asked.shard_group is not None and asked.shard_group > most:
        raise NarrowgateError(
            f"--shard-group: found {asked.shard_group}, expected at most {most}, the GPUs planned for"
        )
    topology = example_topology() if asked.links is None else load_topology(asked.links)
    sharding = Sharding(
        units=asked.units or None,
        ignored=asked.ignored,
        param_dtype=asked.param_dtype or "bf16",
        reduce_dtype=asked.reduce_dtype,
        reshard=not asked.keep_gathered,
        joint_amaxes=asked.joint_amaxes,
    )
    group = asked.shard_group or topology.domain.gpus
    layouts = dict.fromkeys(
        Layout(gpus, shard) for gpus in asked.gpus or _GPUS for shard in (gpus, group) if shard <= gpus
    )
    wires = [predict_wire(model, plan, layout, topology, sharding, exchanged) for layout in layouts]
    if options.json:
        facts = {"topology": topology.model_dump(), "layouts": [wire.to_dict() for wire in wires]}
        print(json.dumps({**plan.to_dict(), "wire": facts}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(wire_lines(plan, topology, sharding, wires)))


def wire_lines(plan: Plan, topology: Topology, sharding: Sharding, wires: Sequence[Wire]) -> list[str]:
    """Return the plan of the wire as lines of text.

    Args:
        plan: what the wire was predicted for.
        topology: over which links.
        sharding: how.
        wires: one a layout.
    """
    own = f"gathers {plan.gather} for {len(plan.gathered)} of {len(plan.layers)} layers"
    if not plan.gathered:
        own = f"gathers no layer in low precision (shards.all_gather: {plan.gather})"
    units = [name or "the root" for name in wires[0].units]
    shown = ", ".join(units) if len(units) <= _UNITS_SHOWN else f"{', '.join(units[:3])}, ..., {units[-1]}"
    lines = [
        f"{plan.recipe.name} ({plan.recipe.hash()[:12]}): {own}, of FSDP2 units {shown} ({len(units)})",
        _links_told(topology),
        "",
        *_table(_traffic(wires, sharding.param_dtype or "stored")),
        "",
        "MB (1e6 bytes) leave one GPU in a step; ms are predicted from the links, one collective after another.",
    ]
    padded = max((entry.padding / entry.total for wire in wires for entry in wire.recipe.traffic), default=0.0)
    if round(padded, 4):
        lines.append(f"Padding of uneven shards is counted: up to {padded:.2%} of a collective.")
    if plan.tables is not None:
        lines.append(
            f"Rows of embedding tables travel as {plan.tables}, beside BF16; each GPU asks for those of one training"
            " batch, and the figures are of the GPU that hands over most."
        )
    lines += _bounds(plan, wires)
    return lines


_UNITS_SHOWN = 6


def _links_told(topology: Topology) -> str:
    tiers = [f"domains of {topology.domain.gpus} GPUs {topology.domain.gb_per_s:g} GB/s"]
    if topology.zone is not None:
        tiers.append(f"zones of {topology.zone.gpus} {topology.zone.gb_per_s:g} GB/s")
    if topology.across is not None:
        tiers.append(f"across zones {topology.across.gb_per_s:g} GB/s")
    kind = "measured" if topology.measured else "example figures, not measured"
    return f"links of '{topology.topology}' ({kind}): {', '.join(tiers)} a GPU and direction; {topology.algorithm}"


def _traffic(wires: Sequence[Wire], dtype: str) -> list[list[str]]:
    from ..recipes.wire_plan import ORDER

    rows = [["layout", "collective", "calls", f"{dtype} MB", "MB", "ratio", f"{dtype} ms", "ms"]]
    for wire in wires:
        plain, recipe = ({entry.what: entry for entry in payload.traffic} for payload in (wire.plain, wire.recipe))
        for what in (what for what in ORDER if what in plain or what in recipe):
            sides = [side.get(what) for side in (plain, recipe)]
            calls = max(entry.calls for entry in sides if entry is not None)
            figures = [None if entry is None else (entry.sent, entry.us) for entry in sides]
            rows.append(_row(str(wire.layout), what, str(calls), *figures))
        totals = (wire.plain.sent, wire.plain.us), (wire.recipe.sent, wire.recipe.us)
        rows.append(_row(str(wire.layout), "all", "", *totals))
    return rows


def _row(
    layout: str, what: str, calls: str, plain: tuple[float, float] | None, recipe: tuple[float, float] | None
) -> list[str]:
    """A row of :func:`_traffic`: bytes and microseconds of both sides, None where one has no such collective."""
    ratio = f"{recipe[0] / plain[0]:.2f}" if plain and recipe and plain[0] else ""
    sent = ["-" if side is None else f"{side[0] / 1e6:.1f}" for side in (plain, recipe)]
    ms = ["-" if side is None else f"{side[1] / 1e3:.2f}" for side in (plain, recipe)]
    return [layout, what, calls, *sent, ratio, *ms]


def _bounds(plan: Plan, wires: Sequence[Wire]) -> list[str]:
    """Say how long compute and communication take together, between all and nothing of it hidden."""
    if wires[0].plain.compute_us is None:
        return [f"No bounds of a step: no compute to hide it behind: {plan.no_prices or 'no layer has a price'}."]
    rows = [["layout", "bf16: compute", "all hidden", "all exposed", "recipe: compute", "all hidden", "all exposed"]]
    for wire in wires:
        row = [str(wire.layout)]
        for payload in (wire.plain, wire.recipe):
            assert payload.compute_us is not None
            assert payload.hidden_us is not None
            assert payload.exposed_us is not None
            row += [f"{us / 1e3:.2f} ms" for us in (payload.compute_us, payload.hidden_us, payload.exposed_us)]
        rows.append(row)
    return [
        "",
        *_table(rows),
        "",
        "Bounds, no measurement: compute is the predicted time of the linear layers alone, and whatever else a step "
        "computes hides more.",
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines: the first two columns to the left where they are names, figures to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    named = 2 if rows[0][1] == "collective" else 1
    return [
        "  ".join(
            cell.ljust(width) if i < named else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
