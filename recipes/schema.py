"""The recipe file at its boundary: pydantic models that say which keys exist and what type each value has.

They check shape and expressions one value at a time and hand over plain values; what fits together across
rules is checked where rules are resolved. The JSON Schema for editors comes from the same models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..precision.config import OPERANDS
from ..precision.errors import SpecError
from ..precision.spec import Spec
from .errors import ExpressionError, found
from .globs import parse_pattern
from .recipe import NAME_RULE
from .where import parse_where

SCHEMA_FILE = "recipe.schema.json"
#: Type of the errors raised here; their text is already what the user reads.
EXPRESSION_ERROR = "recipe_expression"


def _parse(parse: Callable[[str], Any], expected: str, keep: bool, value: object) -> Any:
    """Parse a text; return the text again where ``keep``, else what was parsed."""
    if not isinstance(value, str):
        raise PydanticCustomError(EXPRESSION_ERROR, "{text}", {"text": f"found {found(value)}, expected {expected}"})
    try:
        parsed = parse(value)
    except (SpecError, ExpressionError) as error:
        context = {"text": str(error), "offset": error.offset}
        raise PydanticCustomError(EXPRESSION_ERROR, "{text}", context) from None
    return value if keep else parsed


def _spec_schema(example: str, *words: str) -> WithJsonSchema:
    text = {"type": "string", "description": "FORMAT[/GRANULARITY][+MODIFIER...]", "examples": [example]}
    return WithJsonSchema({"anyOf": [{"enum": list(words)}, text]} if words else text)


_parse_spec = partial(_parse, Spec.parse, "a format expression such as fp8_e4m3/row", False)
SpecText = Annotated[Spec, BeforeValidator(_parse_spec), _spec_schema("fp8_e4m3/row")]
PatternText = Annotated[str, BeforeValidator(partial(_parse, parse_pattern, "a glob or re:REGEX", True))]
WhereText = Annotated[str, BeforeValidator(partial(_parse, parse_where, "a condition", True))]


def _save(value: object) -> Any:
    return value if value == "operand" else _parse(Spec.parse, "operand or a format expression", False, value)


def _one_or_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _both(operands: tuple[str, str], value: object) -> object:
    return dict.fromkeys(operands, value) if isinstance(value, str) else value


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)


class FpropFile(_File):
    """y = x Wᵀ, contracting in_features."""

    input: SpecText | None = None
    weight: SpecText | None = None
    accumulate: Literal["fast", "accurate"] | None = None


class DgradFile(_File):
    """dx = g W, contracting out_features."""

    grad: SpecText | None = None
    weight: SpecText | None = None
    accumulate: Literal["fast", "accurate"] | None = None


class WgradFile(_File):
    """dW = gᵀ x, contracting rows."""

    grad: SpecText | None = None
    input: SpecText | None = None
    accumulate: Literal["fast", "accurate"] | None = None


class RuleFile(_File):
    """Which layers, and what they get; a later rule overrides only the fields it sets."""

    layers: Annotated[
        list[PatternText],
        BeforeValidator(_one_or_list),
        Field(min_length=1),
        WithJsonSchema(
            {
                "description": "Glob (* one level, ** zero or more), re:REGEX, or a list of them.",
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
            }
        ),
    ]
    where: WhereText | None = Field(
        None, description="Condition over in_features, out_features, params, index, depth, type, name."
    )
    optional: bool = Field(False, description="Allow the rule to match no layer.")
    all: SpecText | None = Field(None, description="All six operands; applied before the paths.")
    fprop: Annotated[FpropFile, BeforeValidator(partial(_both, ("input", "weight")))] | None = None
    dgrad: Annotated[DgradFile, BeforeValidator(partial(_both, ("grad", "weight")))] | None = None
    wgrad: Annotated[WgradFile, BeforeValidator(partial(_both, ("grad", "input")))] | None = None
    when: Literal["always", "profitable"] | None = Field(
        None, description="profitable: BF16 where the measured price says low precision does not pay."
    )


class TablesFile(_File):
    """How rows of embedding tables travel between the rank that has a table and those that ask."""

    forward: SpecText | None = Field(None, description="Of the rows; bf16 when absent.")
    backward: SpecText | None = Field(None, description="Of their gradients; bf16 when absent.")


class ShardsFile(_File):
    """What travels between the ranks of a job."""

    all_gather: SpecText | None = None
    reduce_scatter: SpecText | None = None
    requantize: bool = Field(False, description="Allow gathered codes that are not the weight operand.")
    tables: TablesFile | None = Field(
        None, description="Embedding tables lie on one rank each, and ranks exchange rows; else as other weights."
    )


class ActivationsFile(_File):
    """What backward keeps of the forward pass."""

    save: Annotated[str | Spec, BeforeValidator(_save), _spec_schema("bf16", "operand")] = "operand"


class OptimizerFile(_File):
    """How the optimizer's moments are stored, and what is quantized once for each of its steps."""

    state: SpecText | None = None
    keep_weights: bool = Field(False, description="Quantize weights once an optimizer step, not at each use.")


class RecipeFile(_File):
    """A low-precision training recipe."""

    recipe: str = Field(description=f"The recipe's name: {NAME_RULE}.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    description: str = ""
    extends: str | None = Field(
        None, min_length=1, description="Built-in name or path relative to this file; its rules come first."
    )
    defaults: SpecText | None = Field(None, description="What no rule sets; bf16 when absent.")
    rules: list[RuleFile] = Field(default_factory=list)
    shards: ShardsFile | None = None
    activations: ActivationsFile | None = None
    optimizer: OptimizerFile | None = None
    backend: Literal["native", "torchao", "transformer_engine"] | None = None


#: The model behind each key that holds a mapping; None is the file itself.
MODELS: dict[str | None, type[BaseModel]] = {
    None: RecipeFile,
    "rules": RuleFile,
    "fprop": FpropFile,
    "dgrad": DgradFile,
    "wgrad": WgradFile,
    "shards": ShardsFile,
    "tables": TablesFile,
    "activations": ActivationsFile,
    "optimizer": OptimizerFile,
}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of recipe files, for editors."""
    schema = RecipeFile.model_json_schema()
    _drop_nulls(schema)
    for path in OPERANDS:  # pydantic sees only the mapping that one expression is turned into
        mapping = schema["$defs"]["RuleFile"]["properties"][path]
        expression = {"type": "string", "description": "Format expression of both operands."}
        schema["$defs"]["RuleFile"]["properties"][path] = {"anyOf": [expression, mapping]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:narrowgate:recipe",
        **schema,
        "title": "narrowgate recipe",
    }


def recipe_schema_text() -> str:
    """Return the shipped form of :func:`recipe_schema`."""
    return json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n"


def shipped_schema_text() -> str:
    """Return the schema file that the package carries."""
    return resources.files("narrowgate.recipes").joinpath(SCHEMA_FILE).read_text(encoding="utf-8")


def _drop_nulls(value: Any) -> None:
    """Remove ``null`` alternatives: a key is left out, never written as null."""
    if isinstance(value, list):
        for item in value:
            _drop_nulls(item)
    if not isinstance(value, dict):
        return
    options = value.get("anyOf")
    if isinstance(options, list) and {"type": "null"} in options:
        rest = [option for option in options if option != {"type": "null"}]
        value.pop("anyOf")
        value.pop("default", None)
        value.update({"anyOf": rest} if len(rest) > 1 else rest[0])
    for child in value.values():
        _drop_nulls(child)
