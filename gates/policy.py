"""Policies: the margins and limits that a verdict is measured against, built in or read from YAML."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..precision.errors import NarrowgateError, did_you_mean
from ..recipes.document import Node, parse_document
from ..recipes.errors import Diagnostic, RecipeError, found
from .policy_goals import GOALS, as_margins


def _percent(value: Any) -> Any:
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            raise ValueError(f"expected a percentage such as 0.05%, found '{value}'") from None
    return value


#: A share, written as a number (0.0005) or as a percentage ("0.05%").
Share = Annotated[float, BeforeValidator(_percent)]


def no_flags(value: Any) -> Any:
    """Refuse ``true`` and ``false`` for a number, which they would pass as: 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("flag", "a number")
    if isinstance(value, list | tuple) and any(isinstance(part, bool) for part in value):
        raise PydanticCustomError("flag", "numbers")
    return value


#: What fields of numbers are annotated with.
_NUMBERS = (int, float, float | None, tuple[int, ...])


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flags(cls, value: Any, info: ValidationInfo) -> Any:
        # Of texts and sections pydantic says itself what they are not.
        assert info.field_name is not None
        kind = cls.model_fields[info.field_name].annotation
        return no_flags(value) if kind in _NUMBERS else value


class StabilityLimits(_Section):
    """When a training counts as unstable."""

    #: A step spikes where its loss exceeds this multiple of the median loss of the window before it.
    spike_factor: float = Field(default=2.0, gt=1)
    spike_window: int = Field(default=20, ge=5)
    #: Spikes a seed that the candidate may have beyond the baseline's own.
    max_spikes: int = Field(default=0, ge=0)
    #: A candidate diverged where its last tenth's mean loss exceeds this multiple of the baseline's, and what the
    #: baseline's own seeds spread over.
    divergence_ratio: float = Field(default=1.1, gt=1)
    #: Largest share of saturated elements, and of non-zero elements turned into zeros, of any quantized tensor. MX's
    #: floor rule saturates 2 % to 3 % of a Gaussian tensor by construction (measured: 2.2 % of mxfp4's gradients).
    max_saturation: Share = Field(default=0.05, ge=0, le=1)
    max_underflow: Share = Field(default=0.5, ge=0, le=1)
    #: Quantized tensors are counted in the first step of a training and in every so manieth.
    observe_every: int = Field(default=25, ge=1)


class RunToRun(_Section):
    """What a speedup varies by from one process or GPU to another, which no interval within one run sees.

    The defaults are measured (``benchmarks/run_to_run.json``), rounded up.
    """

    #: Standard deviation of a speedup, as a share of it; 0 says only what the run itself varied by.
    sd: Share = Field(default=0.01, ge=0, lt=0.5)
    #: Degrees of freedom it was measured with: the runs, less one for each thing that was run.
    df: int = Field(default=3, ge=1)


class SpeedPlan(_Section):
    """How long step time is measured, and how far one run can be trusted."""

    min_quartets: int = Field(default=20, ge=3)
    max_quartets: int = Field(default=100, ge=3)
    steps_per_block: int = Field(default=10, ge=3)
    #: Stop once the half-width of the interval on the log speedup is at most this.
    half_width: Share = Field(default=0.005, gt=0)
    budget_seconds: float = Field(default=90, gt=0)
    #: How long the candidate is timed against the same fusion in BF16, beside the compilation of that arm; 0 leaves the
    #: arm out. Nothing is decided by it.
    bf16_fused_seconds: float = Field(default=20, ge=0)
    #: How long modules alone are compiled and timed, the heaviest first; what is left then is listed with its share.
    module_budget_seconds: float = Field(default=60, gt=0)
    run_to_run: RunToRun = RunToRun()

    @model_validator(mode="after")
    def _ordered(self) -> SpeedPlan:
        if self.max_quartets < self.min_quartets:
            raise ValueError(f"max_quartets {self.max_quartets} is below min_quartets {self.min_quartets}")
        return self


def matches(pattern: str, part: str) -> bool:
    """Whether a slice's name or pattern in a policy means the slice ``part``, whose name may look like a pattern."""
    return pattern == part or fnmatchcase(part, pattern)


class SliceMargins(_Section):
    """Margins of one slice; what it leaves out is the task's or the policy's own."""

    max_ne_increase: Share | None = Field(default=None, gt=0, lt=1)
    max_auc_loss: float | None = Field(default=None, gt=0, lt=0.5)


class Margins(SliceMargins):
    """Margins of one task; what it leaves out is the policy's own."""

    max_gauc_loss: float | None = Field(default=None, gt=0, lt=0.5)


class Policy(_Section):
    """Margins, limits and sample sizes. Shares may be written as percentages."""

    policy: str = Field(min_length=1)
    description: str = ""
    #: Largest relative increase of normalised entropy that is still no loss.
    max_ne_increase: Share = Field(gt=0, lt=1)
    #: Largest absolute loss of AUC that is still no loss.
    max_auc_loss: float = Field(gt=0, lt=0.5)
    #: Largest absolute loss of GAUC (AUC within groups); None does not judge it.
    max_gauc_loss: float | None = Field(default=None, gt=0, lt=0.5)
    #: Other margins for some tasks, by name; and gates on slices, by name or pattern (``market=*``), each with the
    #: margins that it names or, where it names none, the task's.
    tasks: dict[str, Margins] = {}
    slices: dict[str, SliceMargins] = {}
    #: Smallest speedup of the whole step worth having; 1 asks only for "not slower".
    min_speedup: float = Field(default=1.05, ge=0.5, le=10)
    #: Smallest speedup of the lowered modules alone, all of a step's calls together; None is ``min_speedup``, which a
    #: step that gains it through its modules has passed in them by more.
    min_module_speedup: float | None = Field(default=None, ge=0.5, le=10)
    #: Largest candidate over baseline peak memory.
    max_memory_ratio: float = Field(default=1.1, gt=0)
    #: Paired seeds trained, and the fewest that can decide quality.
    seeds: int = Field(default=8, ge=1)
    min_seeds: int = Field(default=5, ge=5)
    #: Numbers of seeds after which a run may already stop, declared ahead: ``[5, 8, 12]`` with 12 seeds. The level is
    #: spent over the looks (:mod:`narrowgate.gates.looks`). Empty: one look, after all seeds.
    looks: tuple[int, ...] = ()
    #: Level of every one-sided bound.
    alpha: Share = Field(default=0.05, gt=0, lt=0.5)
    #: An NE improvement of more than this many margins is too good to be true.
    anomaly_factor: float = Field(default=5, gt=1)
    stability: StabilityLimits = StabilityLimits()
    speed: SpeedPlan = SpeedPlan()

    @model_validator(mode="after")
    def _declared(self) -> Policy:
        looks = self.looks
        if looks and (list(looks) != sorted(set(looks)) or looks[0] < self.min_seeds or looks[-1] != self.seeds):
            raise ValueError(
                f"looks: found {list(looks)}, expected increasing numbers of seeds from min_seeds {self.min_seeds} on,"
                f" the last of them seeds {self.seeds}"
            )
        return self

    def margin(self, field: str, task: str, part: str | None = None) -> float | None:
        """Return the margin ``field`` of a task, or of a slice of it; None where the policy sets none.

        For a slice the last pattern that matches and names the field decides, then the task, then the policy.
        """
        found = [margins for pattern, margins in self.slices.items() if part is not None and matches(pattern, part)]
        for margins in (*reversed(found), self.tasks.get(task)):
            value = getattr(margins, field, None)
            if value is not None:
                return value
        return getattr(self, field)

    def judges(self, part: str) -> bool:
        """Return whether a slice has gates."""
        return any(matches(pattern, part) for pattern in self.slices)


#: What ships. Sources of the margins: Wukong (arXiv:2403.02545) and LoKA (arXiv:2605.10886) call 0.02 % significant
#: for recommenders; 0.25 % is the band of language-model FP8 training (DeepSeek-V3).
BUILTIN_POLICIES: dict[str, Policy] = {
    policy.policy: policy
    for policy in (
        Policy(
            policy="strict",
            description="the bar that recommender papers call significant",
            max_ne_increase=0.0002,
            max_auc_loss=0.0002,
            seeds=12,
        ),
        Policy(
            policy="standard", description="the default for recommenders", max_ne_increase=0.0005, max_auc_loss=0.0005
        ),
        Policy(
            policy="loose",
            description="not recommender-grade: the band of language-model training",
            max_ne_increase=0.0025,
            max_auc_loss=0.0025,
        ),
    )
}


def load_policy(name_or_path: str | Path | Policy) -> Policy:
    """Return a built-in policy by name, or one read from a YAML file.

    A file holds the fields of :class:`Policy`; with ``extends: standard`` it changes only those it names, and goes by
    the file's name where it has none of its own.

    Raises:
        NarrowgateError: no such policy or file, or a file that does not hold a policy; the text names file, line,
            column and field.
    """
    if isinstance(name_or_path, Policy):
        return name_or_path
    text = str(name_or_path)
    if text in BUILTIN_POLICIES:
        return BUILTIN_POLICIES[text]
    path = Path(text)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        raise NarrowgateError(
            f"unknown policy '{text}'{did_you_mean(text, BUILTIN_POLICIES)}"
            f" (built in: {', '.join(BUILTIN_POLICIES)}; or the path of a YAML file)"
        )
    return _read(path)


def _read(path: Path) -> Policy:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise NarrowgateError(f"{path}: cannot read the policy: {why}") from None
    if not text.strip():
        raise NarrowgateError(f"{path}: found an empty file, expected a policy")
    root, faults = parse_document(text, str(path))
    if faults:
        raise RecipeError(faults)
    data = root.plain()
    if not isinstance(data, dict):
        raise NarrowgateError(f"{path}:{root.line}:{root.column}: found {found(data)}, expected a mapping of fields")
    data = as_margins(data, root, str(path))
    base_name, faults = data.pop("extends", None), []
    if base_name is not None:
        known = isinstance(base_name, str) and base_name in BUILTIN_POLICIES
        if not known:
            faults.append(_unknown_base(base_name, root, path))
        # Over some base the file's other faults show, too.
        base = BUILTIN_POLICIES[base_name if known else "standard"].model_dump()
        # What a report says of the base is not true of a file that changes it.
        own = {"policy": path.name, "description": f"{base_name}, changed"}
        data = _over(base | own, data)
    try:
        policy = Policy.model_validate(data)
    except ValidationError as error:
        raise RecipeError([*faults, *(_diagnostic(fault, root, path) for fault in error.errors())]) from None
    known = BUILTIN_POLICIES.get(policy.policy)
    if known is not None and _limits(policy) != _limits(known):
        faults.append(_taken(policy.policy, root, path))
    if faults:
        raise RecipeError(faults)
    return policy


def _limits(policy: Policy) -> dict[str, Any]:
    return policy.model_dump(exclude={"description"})


def _taken(name: str, root: Node, path: Path) -> Diagnostic:
    """A report that names a built-in policy must mean it."""
    line, column = root.key(["policy"]) or (root.line, root.column)
    message = f"found '{name}', the name of a built-in policy with other margins or limits; give this one its own"
    return Diagnostic(file=str(path), line=line, column=column, field="policy", message=message)


def _unknown_base(name: Any, root: Node, path: Path) -> Diagnostic:
    node, _ = root.find(["extends"])
    hint = did_you_mean(name, BUILTIN_POLICIES) if isinstance(name, str) else ""
    message = f"found {found(name)}, expected a built-in policy ({', '.join(BUILTIN_POLICIES)}){hint}"
    return Diagnostic(file=str(path), line=node.line, column=node.column, field="extends", message=message)


def _over(base: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in data.items():
        inherited = merged.get(key)
        merged[key] = _over(inherited, value) if isinstance(inherited, dict) and isinstance(value, dict) else value
    return merged


def _diagnostic(fault: Any, root: Node, path: Path) -> Diagnostic:
    location = [part for part in fault["loc"] if isinstance(part, str | int)]
    node, _ = root.find(location)
    line, column = root.key(location) or (node.line, node.column)
    kind, field = fault["type"], ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        sections = {"stability": StabilityLimits, "speed": SpeedPlan, "tasks": Margins, "slices": SliceMargins}
        section = sections.get(str(location[0]), Policy)
        known = section.model_fields if len(location) > 1 else ["extends", *Policy.model_fields, *GOALS]
        message = f"unknown field{did_you_mean(str(location[-1]), known)} (known: {', '.join(known)})"
    elif kind == "missing":
        message = "the field is missing; write it, or extend a built-in policy (extends: standard)"
    elif kind == "value_error":
        message = str(fault["ctx"]["error"])
        head, colon, rest = message.partition(": ")
        if not location and colon and (at := root.key([head])) is not None:
            # What fields say together has no place of its own; the one that is named has.
            (line, column), field, message = at, head, rest
    elif kind in ("model_type", "dict_type", "model_attributes_type"):
        message = f"found {found(fault['input'])}, expected a mapping of fields"
    elif kind == "int_parsing_size":
        message = f"found {found(fault['input'])}, expected a smaller number"
    else:
        message = f"found {found(fault['input'])}, expected {fault['msg'].removeprefix('Input should be ')}"
    return Diagnostic(file=str(path), line=line, column=column, field=field, message=message)
