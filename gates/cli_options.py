"""What several commands of ``narrowgate`` share: options that read alike, and the names that a shell completes."""

from __future__ import annotations

from typing import Annotated, Optional

import typer


def recipe_names(incomplete: str) -> list[str]:
    """Complete the name of a recipe."""
    from ..recipes import builtin_names

    return [name for name in builtin_names() if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Complete the name of a model."""
    from ..models.presets import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def device_names(incomplete: str) -> list[str]:
    """Complete the name of a device."""
    from ..precision.capability import NAMED_DEVICES

    return [name for name in ("auto", *NAMED_DEVICES) if name.startswith(incomplete)]


def benchmark_names(incomplete: str) -> list[str]:
    """Complete the name of a benchmark."""
    from .cli_bench import BENCHMARKS

    return [name for name in BENCHMARKS if name.startswith(incomplete)]


def schema_names(incomplete: str) -> list[str]:
    """Complete the name of a schema."""
    from .cli_recipes import SCHEMAS

    return [name for name in SCHEMAS if name.startswith(incomplete)]


Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON on standard output.")]
# typer evaluates these annotations on Python 3.10 too.
Backend = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Overrides the recipe's backend: native, torchao or transformer_engine."),
]
Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="A built-in model, for example gem-small [default: gem-tiny].", autocompletion=model_names),
]
Task = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Your own model instead: package.module:factory. Runs that module's code."),
]
Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A built-in name or a file.", autocompletion=recipe_names)
]
Data = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Its input: synthetic, ml-100k:DIR, ml-1m:DIR, criteo:FILE or table:FILE [default: synthetic]."),
]
Policy = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="strict, standard or loose, or a YAML file [default: standard]."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
