"""Where recipes come from: built-in names, files, and the recipes that they extend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from ..precision.errors import NarrowgateError, did_you_mean
from .document import MAX_BYTES
from .errors import Diagnostic, RecipeError, found

if TYPE_CHECKING:
    from .recipe import Recipe

_BUILTIN = "narrowgate.recipes.builtin"
_MAX_EXTENDS = 16


def builtin_names() -> list[str]:
    """Return the names of the recipes that ship with the package, sorted."""
    files = resources.files(_BUILTIN).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def builtin_text(name: str) -> str:
    """Return the YAML text of a built-in recipe.

    Raises:
        RecipeError: no built-in has that name; lists those that exist.
    """
    if name not in builtin_names():
        raise RecipeError([Diagnostic(file=str(name), message=f"unknown built-in recipe{_known(str(name))}")])
    return resources.files(_BUILTIN).joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def load_recipe(recipe: str | FilePath | Recipe) -> Recipe:
    """Return the recipe behind a built-in name, a file path, or a :class:`Recipe` (which is returned as it is).

    A text that is a built-in's name means the built-in, whatever files lie around.

    Raises:
        RecipeError: neither a built-in nor a readable file, or a recipe with faults (all of them are listed).
    """
    from .recipe import Recipe

    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        if recipe in builtin_names():
            return _builtin(recipe)
        return _from_name(recipe)
    if isinstance(recipe, FilePath):
        return _from_file(recipe, str(recipe), ())
    raise NarrowgateError(f"found {found(recipe)} for a recipe, expected a built-in name, a path or a Recipe")


def flatten(recipe: Recipe) -> Recipe:
    """Return ``recipe`` with its base's rules first and without ``extends``.

    Raises:
        RecipeError: the base cannot be read, or leads back to ``recipe``.
    """
    if recipe.extends is None:
        return recipe
    base = recipe.base
    if base is None:
        base = _base_of(recipe, FilePath(), ())
    base = flatten(base)
    inherited = {
        part: getattr(recipe, part) if getattr(recipe, part) is not None else getattr(base, part)
        for part in ("defaults", "shards", "activations", "optimizer", "backend")
    }
    return replace(recipe, extends=None, base=None, rules=(*base.rules, *recipe.rules), **inherited)


@lru_cache(maxsize=64)
def _builtin(name: str) -> Recipe:
    from .parse import parse_recipe

    recipe = parse_recipe(builtin_text(name), f"<builtin>/{name}.yaml")
    assert recipe.name == name, f"built-in {name} calls itself {recipe.name}"
    return _with_base(recipe, None, (f"<builtin>/{name}.yaml",))


def _from_name(name: str) -> Recipe:
    try:
        exists = bool(name) and FilePath(name).exists()
    except (OSError, ValueError):  # a name too long for the file system, or with a NUL
        exists = False
    if not exists:
        looks_like_file = name.endswith((".yaml", ".yml")) or "/" in name
        what = "no such file" if looks_like_file else "neither a built-in recipe nor a file"
        raise RecipeError([Diagnostic(file=found(name).strip("'") or "''", message=f"{what}{_known(name)}")])
    return _from_file(FilePath(name), name, ())


def _known(name: str) -> str:
    names = builtin_names()
    stem = FilePath(name[:200].replace("\0", "")).name.removesuffix(".yaml").removesuffix(".yml")
    return f"{did_you_mean(stem, names)} (built-in: {', '.join(names)})"


def _from_file(path: FilePath, label: str, chain: Sequence[str]) -> Recipe:
    from .parse import parse_recipe

    recipe = parse_recipe(_read(path, label), label)
    return _with_base(recipe, path.parent, (*chain, str(path.resolve())))


def _read(path: FilePath, label: str) -> str:
    def fault(message: str, line: int | None = None) -> RecipeError:
        return RecipeError([Diagnostic(file=label, line=line, message=message)])

    try:
        if path.is_dir():
            raise fault("found a directory, expected a recipe file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except RecipeError:
        raise
    except FileNotFoundError:
        raise fault(f"no such file{_known(path.name)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise fault(f"cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise fault(f"found more than {MAX_BYTES // 1024} KiB, expected a recipe file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise fault(f"found byte 0x{data[error.start]:02x}, expected UTF-8 text", line) from None


def _with_base(recipe: Recipe, folder: FilePath | None, chain: Sequence[str]) -> Recipe:
    if recipe.extends is None:
        return recipe
    return replace(recipe, base=_base_of(recipe, folder, chain))


def _base_of(recipe: Recipe, folder: FilePath | None, chain: Sequence[str]) -> Recipe:
    """Read what ``recipe`` extends; ``chain`` holds the files that led here, ``folder`` is None for built-ins."""
    target = recipe.extends
    assert target is not None
    source = recipe.source
    line, column = source.locate("extends") if source is not None else (None, None)

    def fault(message: str) -> RecipeError:
        file = source.file if source is not None else "<python>"
        return RecipeError([Diagnostic(file=file, line=line, column=column, field="extends", message=message)])

    if target in builtin_names():
        label = f"<builtin>/{target}.yaml"
        if label in chain:
            raise fault(f"found a circle: {' -> '.join([*chain, label])}")
        return _builtin(target)
    path = (folder or FilePath()) / target
    try:
        usable = folder is not None and path.exists()
        resolved = str(path.resolve())
    except (OSError, ValueError, RuntimeError):
        usable, resolved = False, ""
    if not usable:
        raise fault(f"found {found(target)}, expected a built-in recipe or a file beside this one{_known(target)}")
    if resolved in chain:
        raise fault(f"found a circle: {' -> '.join([*chain, resolved])}")
    if len(chain) >= _MAX_EXTENDS:
        raise fault(f"found more than {_MAX_EXTENDS} recipes on top of each other")
    return _from_file(path, str(path), chain)
