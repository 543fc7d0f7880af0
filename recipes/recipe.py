"""Recipes as values: what a file says, and what Python code can say without one.

>>> from narrowgate.recipes import Path, Recipe, Rule
>>> recipe = Recipe(
...     name="towers",
...     rules=[
...         Rule(layers="**", where="in_features >= 16", fprop="fp8_e4m3/row", dgrad="fp8_e4m3/row"),
...         Rule(layers="heads.**", all="bf16"),
...     ],
... )
>>> recipe.rules[0].fprop
Path(input='fp8_e4m3/row', weight='fp8_e4m3/row')
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..precision.config import ACCUMULATES, OPERANDS
from ..precision.errors import NarrowgateError, SpecError, did_you_mean
from ..precision.spec import Spec, as_spec
from .errors import Diagnostic, ExpressionError, found
from .globs import Pattern, parse_pattern
from .where import Where, parse_where

if TYPE_CHECKING:
    from pathlib import Path as FilePath

BACKENDS = ("native", "torchao", "transformer_engine")
WHENS = ("always", "profitable")
#: What a rule can set, in the order of the three GEMMs.
FIELDS = (*(f"{path}.{part}" for path, operands in OPERANDS.items() for part in (*operands, "accumulate")), "when")

_BF16, _FP32 = Spec(format="bf16"), Spec(format="fp32")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Source:
    """Where a recipe or a rule was written: what provenance and errors point at."""

    file: str
    #: 1-based line and column of the whole, and of what stands under each key (``fprop.input``, ``layers``).
    line: int
    column: int
    fields: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def locate(self, name: str) -> tuple[int, int]:
        """Return line and column of what set the field ``name``, else of the whole.

        An operand may stand in its path's mapping, in one expression for the whole path, or in ``all``.
        """
        path = name.partition(".")[0]
        whole_path = not any(key.startswith(f"{path}.") for key in self.fields)
        for key in (name, path if whole_path else "all", "all"):
            if key in self.fields:
                return self.fields[key]
        return self.line, self.column


@dataclass(frozen=True, kw_only=True, repr=False)
class Path:
    """What one rule sets on one GEMM path; None leaves a field as earlier rules had it.

    Operands are given as :class:`Spec` or as a format expression. fprop has ``input`` and ``weight``, dgrad
    ``grad`` and ``weight``, wgrad ``grad`` and ``input``.
    """

    input: Spec | None = None
    weight: Spec | None = None
    grad: Spec | None = None
    #: ``fast`` or ``accurate``.
    accumulate: str | None = None

    if TYPE_CHECKING:  # texts are parsed on construction

        def __init__(
            self,
            *,
            input: Spec | str | None = None,
            weight: Spec | str | None = None,
            grad: Spec | str | None = None,
            accumulate: str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for operand in ("input", "weight", "grad"):
            _set_spec(self, operand)
        _check_choice("accumulate", self.accumulate, ACCUMULATES)

    def items(self) -> Iterator[tuple[str, Spec | str]]:
        """Yield (operand or ``accumulate``, value) of what is set."""
        for name in ("input", "weight", "grad", "accumulate"):
            value = getattr(self, name)
            if value is not None:
                yield name, value

    def __repr__(self) -> str:
        return f"Path({', '.join(f'{name}={str(value)!r}' for name, value in self.items())})"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which layers, and what they get. Texts are parsed on construction; a bad one raises at once.

    Raises:
        NarrowgateError: a pattern, condition or format expression that does not parse, an operand that the
            path does not have, or a rule that sets nothing.
    """

    # Keys: which layers.
    #: Globs or ``re:REGEX`` over module names; any of them may match. One text stands for a list of one.
    layers: tuple[str, ...]
    #: Condition over the attributes of :data:`narrowgate.recipes.where.ATTRIBUTES`.
    where: str | None = None
    #: A rule that matches no layer is an error unless this is True.
    optional: bool = False

    # Configs: what they get.
    #: All six operands; applied before the paths.
    all: Spec | None = None
    fprop: Path | None = None
    dgrad: Path | None = None
    wgrad: Path | None = None
    #: ``always`` (the default) or ``profitable``: BF16 where the measured price says it does not pay.
    when: str | None = None

    source: Source | None = field(default=None, compare=False, repr=False)

    if TYPE_CHECKING:  # texts are parsed on construction

        def __init__(
            self,
            *,
            layers: str | Iterable[str],
            where: str | None = None,
            optional: bool = False,
            all: Spec | str | None = None,
            fprop: Path | Spec | str | Mapping[str, Any] | None = None,
            dgrad: Path | Spec | str | Mapping[str, Any] | None = None,
            wgrad: Path | Spec | str | Mapping[str, Any] | None = None,
            when: str | None = None,
            source: Source | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _layers(self.layers))
        if self.where is not None:
            _expression(parse_where, "where", self.where)
        _set_spec(self, "all")
        for path, operands in OPERANDS.items():
            object.__setattr__(self, path, _path(path, operands, getattr(self, path)))
        _check_choice("when", self.when, WHENS)
        if not self.settings():
            raise NarrowgateError("a rule sets nothing, expected one of all, fprop, dgrad, wgrad, when")

    def patterns(self) -> tuple[Pattern, ...]:
        """Return the compiled entries of ``layers``."""
        return tuple(parse_pattern(text) for text in self.layers)

    def condition(self) -> Where | None:
        """Return the parsed ``where``."""
        return None if self.where is None else parse_where(self.where)

    def settings(self) -> dict[str, Spec | str]:
        """Return what the rule sets, keyed by :data:`FIELDS`: ``all`` first, then the paths over it."""
        values: dict[str, Spec | str] = {}
        for path, operands in OPERANDS.items():
            if self.all is not None:
                values.update({f"{path}.{operand}": self.all for operand in operands})
            own: Path | None = getattr(self, path)
            values.update({f"{path}.{name}": value for name, value in own.items()} if own is not None else {})
        if self.when is not None:
            values["when"] = self.when
        return values


@dataclass(frozen=True, kw_only=True)
class Tables:
    """How rows of embedding tables travel between the rank that has a table and those that ask."""

    #: Of the rows.
    forward: Spec = _BF16
    #: Of their gradients.
    backward: Spec = _BF16

    if TYPE_CHECKING:  # texts are parsed on construction

        def __init__(self, *, forward: Spec | str = ..., backward: Spec | str = ...) -> None: ...

    def __post_init__(self) -> None:
        _set_spec(self, "forward")
        _set_spec(self, "backward")

    def to_dict(self) -> dict[str, str]:
        """Return the formats as the file has them."""
        return {"forward": str(self.forward), "backward": str(self.backward)}

    def __str__(self) -> str:
        return f"{self.forward}, gradients as {self.backward}"


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What travels between the ranks of a job."""

    all_gather: Spec = _BF16
    #: How gradients travel to be summed in FP32; None leaves their reduction to FSDP2.
    reduce_scatter: Spec | None = None
    #: Allow gathered codes that are not the weight operand, at the price of a second quantization.
    requantize: bool = False
    #: Embedding tables lie on one rank each, and rows are exchanged; None: they are weights as all others.
    tables: Tables | None = None

    if TYPE_CHECKING:  # texts are parsed on construction

        def __init__(
            self,
            *,
            all_gather: Spec | str = ...,
            reduce_scatter: Spec | str | None = ...,
            requantize: bool = False,
            tables: Tables | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        _set_spec(self, "all_gather")
        _set_spec(self, "reduce_scatter")
        if self.tables is not None and not isinstance(self.tables, Tables):
            raise NarrowgateError(f"tables: found {found(self.tables)}, expected a Tables object")


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What backward keeps of the forward pass."""

    #: ``operand`` (exactly the wgrad operand), or a format.
    save: str | Spec = "operand"

    def __post_init__(self) -> None:
        if self.save != "operand":
            _set_spec(self, "save")


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """How the optimizer's moments are stored, and whether its steps are what weights are quantized for.

    Raises:
        NarrowgateError: ``keep_weights`` is no boolean, or a bad expression.
    """

    state: Spec = _FP32
    #: Quantize weights once an optimizer step, not at each use: the same numbers, where kernels cast.
    keep_weights: bool = False

    if TYPE_CHECKING:  # texts are parsed on construction

        def __init__(self, *, state: Spec | str = ..., keep_weights: bool = False) -> None: ...

    def __post_init__(self) -> None:
        _set_spec(self, "state")
        if not isinstance(self.keep_weights, bool):
            raise NarrowgateError(f"keep_weights: found {found(self.keep_weights)}, expected True or False")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe. Parts left None come from the recipe that it extends, else from the language's defaults.

    Raises:
        NarrowgateError: a name that could not name a report folder, an unknown backend, a bad expression.
    """

    name: str
    description: str = ""
    #: A built-in recipe's name, or a path relative to the file (to the working directory for a Python object).
    extends: str | None = None
    #: What no rule sets; BF16 when absent.
    defaults: Spec | None = None
    rules: tuple[Rule, ...] = ()
    shards: Shards | None = None
    activations: Activations | None = None
    optimizer: OptimizerState | None = None
    #: ``native``, ``torchao`` or ``transformer_engine``.
    backend: str | None = None

    source: Source | None = field(default=None, compare=False, repr=False)
    #: The recipe behind ``extends``, once read.
    base: Recipe | None = field(default=None, compare=False, repr=False)

    if TYPE_CHECKING:  # texts are parsed on construction

        def __init__(
            self,
            *,
            name: str,
            description: str = "",
            extends: str | None = None,
            defaults: Spec | str | None = None,
            rules: Iterable[Rule] = (),
            shards: Shards | None = None,
            activations: Activations | None = None,
            optimizer: OptimizerState | None = None,
            backend: str | None = None,
            source: Source | None = None,
            base: Recipe | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise NarrowgateError(f"found recipe name {found(self.name)}, expected {NAME_RULE}")
        _set_spec(self, "defaults")
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise NarrowgateError(f"rules: found {found(rule)}, expected Rule objects")
        _check_choice("backend", self.backend, BACKENDS)

    @classmethod
    def from_yaml(cls, text: str, *, file: str = "<text>") -> Recipe:
        """Read a recipe from YAML text.

        Raises:
            RecipeError: with every fault of the text, each at its line and column.
        """
        from .parse import parse_recipe

        return parse_recipe(text, file)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Read a recipe from data shaped like the YAML file.

        Raises:
            RecipeError: with every fault of the data, each at its field.
        """
        from .parse import recipe_from_data

        return recipe_from_data(data)

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as data shaped like the YAML file; what is not set is left out."""
        from .write import to_dict

        return to_dict(self)

    def to_yaml(self) -> str:
        """Return the recipe as the text of a recipe file that reads back equal."""
        from .write import to_yaml

        return to_yaml(self)

    def flatten(self) -> Recipe:
        """Return the same recipe without ``extends``: the base's rules first, its parts where ours are unset.

        Raises:
            RecipeError: the base is missing, does not parse, or leads back here.
        """
        from .load import flatten

        return flatten(self)

    def resolved_dict(self) -> dict[str, Any]:
        """Return :meth:`flatten` as data, with its ``hash``."""
        return {**self.flatten().to_dict(), "hash": self.hash()}

    def hash(self) -> str:
        """Return the SHA-256 of the flattened recipe in canonical JSON, without name, description and backend."""
        from .write import recipe_hash

        return recipe_hash(self)

    def file_path(self) -> FilePath | None:
        """Return the file that the recipe was read from, None for built-ins and Python objects."""
        from pathlib import Path as FilePath

        return None if self.source is None or self.source.file.startswith("<") else FilePath(self.source.file)


def at_rule(flat: Recipe, index: int | None, name: str, message: str, *, severity: str = "error") -> Diagnostic:
    """Return a finding at field ``name`` of rule ``index`` of a flattened recipe; None is its ``defaults``."""
    source = flat.source if index is None else flat.rules[index].source
    field = "defaults" if index is None else f"rules[{index}].{name}"
    if source is None:
        return Diagnostic(field=field, message=message, severity=severity)
    line, column = source.locate("defaults" if index is None else name)
    return Diagnostic(file=source.file, line=line, column=column, field=field, message=message, severity=severity)


NAME_RULE = "letters, digits, '.', '_' and '-' (at most 64, starting with a letter or digit)"


def _set_spec(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if value is None or isinstance(value, Spec):
        return
    object.__setattr__(owner, name, _expression(as_spec, name, value))


def _expression(parse: Any, name: str, value: object) -> Any:
    if not isinstance(value, str):
        raise NarrowgateError(f"{name}: found {found(value)}, expected a text")
    try:
        return parse(value)
    except (SpecError, ExpressionError) as error:
        raise type(error)(f"{name}: {error}", error.offset) from None


def _layers(layers: str | Iterable[str]) -> tuple[str, ...]:
    entries = (layers,) if not isinstance(layers, Iterable) or isinstance(layers, str) else tuple(layers)
    if not entries:
        raise NarrowgateError("layers: found an empty list, expected at least one pattern")
    for entry in entries:
        _expression(parse_pattern, "layers", entry)
    return entries


def _path(path: str, operands: tuple[str, str], value: object) -> Path | None:
    if isinstance(value, str | Spec):
        spec = _expression(as_spec, path, value) if isinstance(value, str) else value
        both: dict[str, Any] = dict.fromkeys(operands, spec)
        value = Path(**both)
    if value is None:
        return None
    if isinstance(value, Mapping):
        unknown = [str(key) for key in value if key not in (*operands, "accumulate")]
        if unknown:
            raise NarrowgateError(_no_operand(path, operands, unknown[0]))
        value = Path(**{str(key): item for key, item in value.items()})
    if not isinstance(value, Path):
        raise NarrowgateError(f"{path}: found {found(value)}, expected a format expression or a Path")
    for name, _ in value.items():
        if name not in (*operands, "accumulate"):
            raise NarrowgateError(_no_operand(path, operands, name))
    return value


def _no_operand(path: str, operands: tuple[str, str], name: str) -> str:
    return f"{path}: found operand '{name}'{did_you_mean(name, operands)}, expected {' and '.join(operands)}"


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value is None or value in known:
        return
    hint = did_you_mean(value, known) if isinstance(value, str) else ""
    raise NarrowgateError(f"{name}: found {found(value)}, expected {' or '.join(known)}{hint}")
