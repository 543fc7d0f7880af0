"""Recipe text to :class:`Recipe`: YAML, then types and expressions, then what one file can contradict by itself.

Every stage reports all it finds, each fault at its line and column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from ..precision.config import OPERANDS
from ..precision.errors import did_you_mean
from ..precision.spec import Spec
from .document import Node, parse_document
from .errors import Diagnostic, RecipeError, found
from .recipe import NAME_RULE, Activations, OptimizerState, Path, Recipe, Rule, Shards, Source, Tables
from .schema import EXPRESSION_ERROR, MODELS, ActivationsFile, RecipeFile, RuleFile, ShardsFile

_Loc = tuple[str | int, ...]


def parse_recipe(text: str, file: str) -> Recipe:
    """Read a recipe from YAML text; ``file`` is what errors call it. ``extends`` is not followed here.

    Raises:
        RecipeError: with every fault of the text.
    """
    root, faults = parse_document(text, file)
    data = root.plain()
    if not isinstance(data, dict):
        message = f"found {found(data)}, expected a mapping with the keys recipe and rules"
        raise RecipeError([Diagnostic(file=file, line=root.line, column=root.column, message=message)])
    faults += _empty_values(root, file)
    empty = {fault.field for fault in faults}
    try:
        model = RecipeFile.model_validate(data)
    except ValidationError as error:
        faults += [d for d in _diagnostics(error, root, file) if d.field not in empty]
        raise RecipeError(_in_order(faults)) from None
    faults += _no_effect(model, root, file)
    if faults:
        raise RecipeError(_in_order(faults))
    return _to_recipe(model, root, file)


def recipe_from_data(data: Mapping[str, Any]) -> Recipe:
    """Read a recipe from data shaped like the file; errors name fields instead of lines.

    Raises:
        RecipeError: with every fault of the data.
    """
    if not isinstance(data, Mapping):
        raise RecipeError([Diagnostic(message=f"found {found(data)}, expected a mapping")])
    try:
        model = RecipeFile.model_validate(dict(data))
    except ValidationError as error:
        raise RecipeError(_diagnostics(error, None, "<python>")) from None
    faults = _no_effect(model, None, "<python>")
    if faults:
        raise RecipeError(faults)
    return _to_recipe(model, None, "<python>")


# From the checked model to the value.


def _to_recipe(model: RecipeFile, root: Node | None, file: str) -> Recipe:
    shards, optimizer, activations = model.shards, model.optimizer, model.activations
    return Recipe(
        name=model.recipe,
        description=model.description.strip(),
        extends=model.extends,
        defaults=model.defaults,
        rules=tuple(_to_rule(rule, root, ("rules", i), file) for i, rule in enumerate(model.rules)),
        shards=None if shards is None else _to_shards(shards),
        activations=None if activations is None else Activations(**_set(activations)),
        optimizer=None if optimizer is None else OptimizerState(**_set(optimizer)),
        backend=model.backend,
        source=None if root is None else _source(root, file),
    )


def _to_shards(shards: ShardsFile) -> Shards:
    tables = None if shards.tables is None else Tables(**_set(shards.tables))
    return Shards(**{**_set(shards), "tables": tables})


def _to_rule(rule: RuleFile, root: Node | None, loc: _Loc, file: str) -> Rule:
    paths = {path: getattr(rule, path) for path in OPERANDS}
    return Rule(
        layers=tuple(rule.layers),
        where=rule.where,
        optional=rule.optional,
        all=rule.all,
        when=rule.when,
        source=None if root is None else _source(root.find(loc)[0], file),
        **{path: None if model is None else Path(**_set(model)) for path, model in paths.items()},
    )


def _set(model: BaseModel) -> dict[str, Any]:
    return {name: value for name, value in model if value is not None}


def _source(node: Node, file: str) -> Source:
    fields: dict[str, tuple[int, int]] = {}
    waiting = list(node.value.items())
    for key, child in waiting:
        fields[key] = (child.line, child.column)
        if isinstance(child.value, dict):
            waiting += [(f"{key}.{name}", part) for name, part in child.value.items()]
    return Source(file, node.line, node.column, fields)


# Faults.


def _diagnostics(error: ValidationError, root: Node | None, file: str) -> list[Diagnostic]:
    seen: dict[tuple[object, ...], Diagnostic] = {}
    for fault in error.errors(include_url=False):
        loc = tuple(part for part in fault["loc"] if not _is_label(part))
        diagnostic = _diagnostic(fault, loc, root, file)
        # `fprop: X` stands for both operands and would otherwise be reported twice.
        key = (diagnostic.line, diagnostic.column, diagnostic.message) if root is not None else (diagnostic,)
        seen.setdefault(key, diagnostic)
    return list(seen.values())


def _is_label(part: str | int) -> bool:
    """pydantic puts the names of its validators into locations; no key of a recipe has these brackets."""
    return isinstance(part, str) and ("[" in part or "(" in part) and part.endswith(("]", ")"))


def _diagnostic(fault: Any, loc: _Loc, root: Node | None, file: str) -> Diagnostic:
    context, kind, value = fault.get("ctx", {}), fault["type"], fault["input"]
    offset: int | None = None
    if kind == EXPRESSION_ERROR:
        message, offset = context["text"], context.get("offset", 0)
    elif kind == "extra_forbidden":
        known = sorted(MODELS[_holder(loc)].model_fields)
        name = str(loc[-1])
        message = f"unknown field {found(name)}{did_you_mean(name, known)} (known: {', '.join(known)})"
        return _at_key(loc, root, file, message)
    elif kind == "missing":
        message = f"found no field '{loc[-1]}', expected it{_missing_hint(str(loc[-1]))}"
    elif kind == "literal_error":
        expected = context["expected"].replace("'", "")
        hint = did_you_mean(value, expected.replace(" or ", ", ").split(", ")) if isinstance(value, str) else ""
        message = f"found {found(value)}, expected {expected}{hint}"
    else:
        message = f"found {found(value)}, expected {_expected(kind, loc)}"
    return _place(loc, root, file, message, offset=offset, absent=kind == "missing")


def _expected(kind: str, loc: _Loc) -> str:
    if kind == "string_pattern_mismatch":
        return NAME_RULE
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        last = loc[-1] if loc else None
        if last in OPERANDS:
            return f"a format expression or a mapping of {', '.join([*OPERANDS[str(last)], 'accumulate'])}"
        known = ", ".join(sorted(MODELS[_own(loc)].model_fields))
        return f"a mapping with keys of {known}"
    return {
        "string_type": "a text",
        "string_too_short": "a text that is not empty",
        "list_type": "a list",
        "too_short": "at least one entry",
        "bool_type": "true or false",
    }.get(kind, "another value")


def _missing_hint(name: str) -> str:
    return {"recipe": " (the recipe's name)", "layers": ' (which layers, for example "**")'}.get(name, "")


def _holder(loc: _Loc) -> str | None:
    """Return the key whose model should have known the last part of ``loc``."""
    return _own(loc[:-1])


def _own(loc: _Loc) -> str | None:
    names = [part for part in loc if isinstance(part, str)]
    return names[-1] if names else None


def _at_key(loc: _Loc, root: Node | None, file: str, message: str) -> Diagnostic:
    position = root.key(loc) if root is not None else None
    line, column = position or (None, None)
    return Diagnostic(file=file, line=line, column=column, field=field_name(loc), message=message)


def _place(
    loc: _Loc, root: Node | None, file: str, message: str, *, offset: int | None = None, absent: bool = False
) -> Diagnostic:
    """Point at ``loc``; ``offset`` counts characters into its text, ``absent`` says that the field is missing."""
    if root is None:
        return Diagnostic(file=file, field=field_name(loc), message=message)
    node, depth = root.find(loc)
    column = node.column if offset is None or node.text_column is None else node.text_column + offset
    field = field_name(loc if absent else loc[:depth])
    return Diagnostic(file=file, line=node.line, column=column, field=field, message=message)


def field_name(loc: Sequence[str | int]) -> str:
    """Return a location as people write it: ``rules[1].fprop.input``."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text if len(text) <= 120 else text[:117] + "..."


def _empty_values(root: Node, file: str) -> Iterator[Diagnostic]:
    """A key without a value is a slip of the pen or of indentation, never an intention."""
    stack: list[tuple[_Loc, Node]] = [((), root)]
    while stack:
        loc, node = stack.pop()
        if isinstance(node.value, dict):
            children: list[tuple[str | int, Node]] = list(node.value.items())
        elif isinstance(node.value, list):
            children = list(enumerate(node.value))
        else:
            continue
        for key, child in children:
            if child.value is None:
                line, column = node.keys.get(str(key), (child.line, child.column))
                message = "found no value, expected one (or leave the key out)"
                yield Diagnostic(file=file, line=line, column=column, field=field_name((*loc, key)), message=message)
            stack.append(((*loc, key), child))


def _no_effect(model: RecipeFile, root: Node | None, file: str) -> list[Diagnostic]:
    """Rules and mappings that parse and say nothing."""
    faults: list[Diagnostic] = []
    for index, rule in enumerate(model.rules):
        loc: _Loc = ("rules", index)
        for path in OPERANDS:
            own = getattr(rule, path)
            if own is not None and not _set(own):
                faults.append(_place((*loc, path), root, file, "found an empty mapping, expected an operand"))
        if not any(getattr(rule, name) is not None for name in (*OPERANDS, "all", "when")):
            message = "found a rule that sets nothing, expected one of all, fprop, dgrad, wgrad, when"
            faults.append(_place(loc, root, file, message))
    if model.shards is not None and model.shards.tables is not None and not _set(model.shards.tables):
        message = "found an empty mapping, expected forward, backward or both"
        faults.append(_place(("shards", "tables"), root, file, message))
    activations = model.activations
    if isinstance(activations, ActivationsFile) and isinstance(activations.save, Spec) and activations.save.sr:
        loc = ("activations", "save")
        faults.append(_place(loc, root, file, "found sr, expected rounding to nearest for saved tensors"))
    return faults


def _in_order(faults: list[Diagnostic]) -> list[Diagnostic]:
    return sorted(faults, key=lambda d: (d.line or 0, d.column or 0))
