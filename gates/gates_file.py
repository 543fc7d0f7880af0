"""``gates.yaml``: the gates of a repository in one file, each with its recipe, model, data and policy.

.. code-block:: yaml

    defaults: {model: gem-small, data: "ml-1m:data/ml-1m"}
    gates:
      - recipe: recipes/ranker-fp8.yaml
        policy: strict
      - recipe: gem-fp8
        name: gem-fp8-tiny
        model: gem-tiny
        data: synthetic
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..precision.errors import NarrowgateError, did_you_mean
from ..recipes import load_recipe
from ..recipes.document import Node, parse_document
from ..recipes.errors import Diagnostic, RecipeError, found
from .outputs import OWN_NAMES
from .policy import Policy, load_policy, no_flags
from .task import TaskSource

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class GateDefaults(BaseModel):
    """What a gate may leave unsaid."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("seeds", "steps", mode="before", check_fields=False)
    @classmethod
    def _no_flags(cls, value: Any) -> Any:
        return no_flags(value)

    #: A built-in model and its data, as ``--model`` and ``--data`` take them.
    model: str | None = None
    data: str | None = None
    #: ``package.module:factory`` instead of both.
    task: str | None = None
    #: A built-in policy or a file.
    policy: str | None = None
    #: Paired seeds; the policy's number otherwise.
    seeds: int | None = Field(default=None, ge=1, le=1000)
    #: Training steps a seed; the model's own number otherwise.
    steps: int | None = Field(default=None, ge=1)
    backend: Literal["native", "torchao", "transformer_engine"] | None = None


class GateEntry(GateDefaults):
    """One gate: a recipe on a model."""

    #: A built-in recipe or a file.
    recipe: str
    #: Its folder among the reports; the recipe's own name otherwise.
    name: str | None = Field(default=None, pattern=_NAME)


class GatesFile(BaseModel):
    """The whole file. Paths in it start from its own folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="narrowgate gates")

    defaults: GateDefaults = GateDefaults()
    gates: tuple[GateEntry, ...] = Field(min_length=1)


@dataclass(frozen=True)
class GateSpec:
    """A gate that is ready to run."""

    name: str
    recipe: Recipe
    policy: Policy
    source: TaskSource
    seeds: int | None
    backend: str | None
    #: ``file:line:column: gates[i]``, for what only running it shows.
    place: str


def load_gates(path: Path, device: str) -> tuple[GateSpec, ...]:
    """Read a gates file with the recipes and policies that it names.

    Args:
        path: the file.
        device: ``cpu`` or ``cuda``.

    Raises:
        NarrowgateError: it cannot be read or holds faults; all are told, each with line, column and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise NarrowgateError(f"{path}: cannot read the gates: {why}") from None
    root, faults = parse_document(text, str(path), "list of gates")
    if faults:
        raise RecipeError(faults)
    try:
        parsed = GatesFile.model_validate(root.plain())
    except ValidationError as error:
        # A list of gates that are all at fault counts as too short; each of them is told by itself.
        faults = [f for f in error.errors() if not (f["type"] == "too_short" and f["input"])]
        told = [_diagnostic(fault, root, path) for fault in faults]
        raise RecipeError([*told, *_Reader(root, path, device).files_of(root.plain())]) from None
    return _Reader(root, path, device).read(parsed)


class _Reader:
    """Turns entries into gates and gathers the faults of all of them."""

    def __init__(self, root: Node, path: Path, device: str) -> None:
        self.root, self.path, self.device = root, path, device
        self.faults: list[Diagnostic] = []

    def read(self, parsed: GatesFile) -> tuple[GateSpec, ...]:
        self._exclusive(parsed.defaults, ["defaults"])
        specs = [self._entry(i, entry, parsed.defaults) for i, entry in enumerate(parsed.gates)]
        self._unique(specs)
        if self.faults:
            raise RecipeError(self.faults)
        return tuple(spec for spec in specs if spec is not None)

    def files_of(self, data: Any) -> list[Diagnostic]:
        """Return what is wrong with the recipes and policies that a file names whose own fields are at fault."""
        gates = data.get("gates") if isinstance(data, dict) else None
        for i, entry in enumerate(gates if isinstance(gates, list) else ()):
            for field, load in (("recipe", load_recipe), ("policy", load_policy)):
                value = entry.get(field) if isinstance(entry, dict) else None
                if isinstance(value, str):
                    try:
                        load(self._file(value))
                    except NarrowgateError as error:
                        self._blame(error, ["gates", i, field])
        return self.faults

    def _entry(self, i: int, entry: GateEntry, defaults: GateDefaults) -> GateSpec | None:
        at: list[str | int] = ["gates", i]
        self._exclusive(entry, at)
        said = entry.model_dump(exclude_none=True)
        # A gate's own task stands for model and data, and the other way round.
        hidden = {"model", "data"} if "task" in said else {"task"} if {"model", "data"} & said.keys() else set()
        value = {**defaults.model_dump(exclude=hidden, exclude_none=True), **said}

        def where(field: str) -> list[str | int]:
            return [*at, field] if field in said else ["defaults", field]

        recipe = policy = None
        try:
            recipe = load_recipe(self._file(value["recipe"]))
        except NarrowgateError as error:
            self._blame(error, where("recipe"))
        try:
            policy = load_policy(self._file(value.get("policy", "standard")))
        except NarrowgateError as error:
            self._blame(error, where("policy"))
        if recipe is None or policy is None:
            return None
        source = TaskSource(
            task=value.get("task"),
            model=value.get("model", "gem-tiny"),
            data=self._data(value.get("data", "synthetic")),
            device=self.device,
            steps=value.get("steps"),
        )
        place = f"{':'.join(str(part) for part in self._position(at))}: {_field(at)}"
        name = value.get("name", recipe.name)
        return GateSpec(name, recipe, policy, source, value.get("seeds"), value.get("backend"), place)

    def _unique(self, specs: Sequence[GateSpec | None]) -> None:
        # Folders on some systems do not tell cases apart.
        first: dict[str, int] = {}
        for i, spec in enumerate(specs):
            if spec is None:
                continue
            before = first.setdefault(spec.name.lower(), i)
            if before != i:
                message = f"found the name '{spec.name}' twice, first in gates[{before}]; give one of them a `name`"
                self._fault(["gates", i], message)
            if spec.name.lower() in OWN_NAMES:
                named = self.root.key(["gates", i, "name"]) is not None
                message = (
                    f"found '{spec.name}', which a run writes beside its gates' folders; give the gate another name"
                )
                self._fault(["gates", i, *(["name"] if named else [])], message)

    def _exclusive(self, entry: GateDefaults, at: list[str | int]) -> None:
        others = [name for name in ("model", "data") if getattr(entry, name) is not None]
        if entry.task is not None and others:
            self._fault([*at, "task"], f"brings its own model and data; leave out {' and '.join(others)}")

    def _file(self, text: str) -> str:
        """Return a path as seen from here; a built-in's name stays as it is."""
        looks = text.endswith((".yaml", ".yml")) or "/" in text
        return str(self.path.parent / text) if looks and not Path(text).is_absolute() else text

    def _data(self, text: str) -> str:
        kind, _, place = text.partition(":")
        return f"{kind}:{self.path.parent / place}" if place and not place.startswith("~") else text

    def _blame(self, error: NarrowgateError, at: list[str | int]) -> None:
        """Pass on the faults of a file; say where the text stands that names no file or built-in."""
        if isinstance(error, RecipeError) and any(d.line is not None for d in error.diagnostics):
            self.faults += error.diagnostics
            return
        self._fault(at, " ".join(str(error).split()))

    def _fault(self, at: list[str | int], message: str) -> None:
        file, line, column = self._position(at)
        self.faults.append(Diagnostic(file=file, line=line, column=column, field=_field(at), message=message))

    def _position(self, at: list[str | int]) -> tuple[str, int, int]:
        node, _ = self.root.find(at)
        return str(self.path), node.line, node.column


def _field(at: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).removeprefix(".")


def _diagnostic(fault: Any, root: Node, path: Path) -> Diagnostic:
    at = [part for part in fault["loc"] if isinstance(part, str | int)]
    node, _ = root.find(at)
    line, column = root.key(at) or (node.line, node.column)
    if fault["type"] == "extra_forbidden":
        section = GatesFile if len(at) == 1 else GateDefaults if at[0] == "defaults" else GateEntry
        known = section.model_fields
        message = f"unknown field{did_you_mean(str(at[-1]), known)} (known: {', '.join(known)})"
    elif fault["type"] == "missing":
        message = "the field is missing"
    elif fault["type"] == "too_short":
        message = "found an empty list, expected at least one gate"
    elif fault["type"] == "string_pattern_mismatch":
        message = f"found {found(fault['input'])}, expected letters, digits, '.', '_' and '-' (at most 64)"
    elif fault["type"] in ("tuple_type", "list_type"):
        message = f"found {found(fault['input'])}, expected a list of gates"
    elif fault["type"] in ("model_type", "dict_type"):
        message = f"found {found(fault['input'])}, expected a mapping of fields"
    else:
        message = f"found {found(fault['input'])}, expected {fault['msg'].removeprefix('Input should be ')}"
    return Diagnostic(file=str(path), line=line, column=column, field=_field(at), message=message)


def gates_schema() -> dict[str, Any]:
    """Return the JSON Schema of a gates file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **GatesFile.model_json_schema()}
