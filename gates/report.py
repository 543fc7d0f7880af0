"""The report: one versioned record, from which every file is made and from which the verdict can be made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from ..precision.errors import NarrowgateError
from .decision import Decision, Gate, Reason
from .measurements import Measurements, Record
from .policy import Policy

#: Raised where a reader of older reports would misread a new one; such reports are refused.
SCHEMA_VERSION = 1
#: Raised where a field is added; every field that came after minor 0 is optional, so older reports stay readable.
SCHEMA_MINOR = 8
#: The first with intervals of speedups that hold what runs differ by.
_RUN_TO_RUN = 7
FILES: tuple[str, ...] = ("report.json", "report.md", "report.html", "junit.xml")
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")


class RecipeFacts(Record):
    """The recipe that was judged."""

    name: str
    description: str
    #: SHA-256 of the recipe after ``extends``, without name, description and backend.
    hash: str
    backend: str
    #: The recipe after ``extends``, as data.
    resolved: dict[str, Any]
    #: What each layer got on each path, and whether this device runs it natively.
    plan: dict[str, Any]


class Statistics(Record):
    """How the bounds were made."""

    method: str
    #: Level of the rejecting side of every one-sided bound, and of the accepting side after Holm's correction.
    alpha: float = Field(gt=0, lt=0.5)
    accept_alpha: float = Field(gt=0, lt=0.5)
    #: Paired seeds, and the looks at the data that were declared ahead.
    n: int
    looks: int
    #: Recipes decided together.
    family: int = Field(ge=1)
    #: Seeds at each declared look, where there are several; the run stopped at the one of ``n``. Since minor 1.
    look_seeds: tuple[int, ...] = ()
    #: Level of a rejecting bound over seeds at the look that the run stopped at; None is ``alpha``. Since minor 1.
    seed_alpha: float | None = None


#: Milliseconds a step that each arm spends in one class of kernels. A dictionary, because ``class`` names no attribute.
ClassTime = TypedDict("ClassTime", {"class": str, "baseline_ms": float, "candidate_ms": float})


class Reuse(Record):
    """Trainings that were found done: by an earlier run that did not end, or as another recipe's baseline."""

    #: Of both arms over all seeds, and how many of each arm's were reused.
    trainings: int
    baseline: int
    candidate: int
    #: What could not be read or kept, and why.
    notes: tuple[str, ...] = ()


class Level(Record):
    """One level of evidence. Levels have baselines and scopes of their own and are never added together."""

    status: Literal["measured", "not_measured"]
    #: Why it was not measured, where it was not.
    why: str | None = None
    baseline: str
    scope: str
    results: dict[str, Any] = Field(default_factory=dict)
    #: Where the time of a step goes, by class of kernels; None where nobody attributed it. Since minor 1.
    attribution: tuple[ClassTime, ...] | None = None


class Evidence(Record):
    """All levels; one that nobody measured is present and says so."""

    kernel: Level
    module: Level
    step: Level
    distributed: Level
    quality: Level


class Report(Record):
    """The whole of ``report.json``."""

    model_config = ConfigDict(title="narrowgate gate report")

    schema_version: Literal[1]
    #: Fields added since ``schema_version``; 0 where a report has none of this name.
    schema_minor: int = Field(default=SCHEMA_MINOR, ge=0)
    verdict: Literal["accept", "reject", "inconclusive"]
    reasons: tuple[Reason, ...]
    recipe: RecipeFacts
    model: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, str | int | None]
    gates: tuple[Gate, ...]
    statistics: Statistics
    evidence: Evidence
    policy: Policy
    #: Seconds the run took, in all and by part.
    wall_seconds: dict[str, float]
    measurements: Measurements
    #: None where nothing says; since minor 1.
    reuse: Reuse | None = None

    def files(self) -> dict[str, str]:
        """Return the text of every file of the report, ``report.json`` first."""
        from .html import render_html
        from .junit import junit_report
        from .render import render_report

        data = json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False)
        texts = (data + "\n", render_report(self), render_html(self), junit_report(self))
        return dict(zip(FILES, texts, strict=True))


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``report.json``; ``report.schema.json`` beside this file holds the same."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Report.model_json_schema(mode="serialization"),
    }


def load_report(path: Path) -> Report:
    """Read a stored report.

    Raises:
        NarrowgateError: no file, no JSON, another schema version, or fields that do not fit; one line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise NarrowgateError(f"{path}: cannot read the report: {why}") from None
    try:
        data = json.loads(text)
    except RecursionError:
        raise NarrowgateError(f"{path}: not a report: found brackets within brackets past all bounds") from None
    except ValueError as error:
        place = f":{error.lineno}:{error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise NarrowgateError(f"{path}{place}: not JSON: {getattr(error, 'msg', error)}") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version is None:
        raise NarrowgateError(f"{path}: found no schema_version, expected a report that narrowgate wrote")
    if "recipes" in data and "measurements" not in data:
        entries = data["recipes"] if isinstance(data["recipes"], list) else []
        names = ", ".join(
            str(entry.get("report")) for entry in entries if isinstance(entry, dict) and entry.get("report")
        )
        raise NarrowgateError(
            f"{path}: found a summary of several gates, expected the report of one: {names or 'none'}"
        )
    if version != SCHEMA_VERSION:
        raise NarrowgateError(
            f"{path}: schema_version: found {version!r}, this version of narrowgate reads {SCHEMA_VERSION};"
            f" {_remedy(data, version)}"
        )
    minor = data.get("schema_minor", 0)
    if not isinstance(minor, int) or minor > SCHEMA_MINOR:
        raise NarrowgateError(
            f"{path}: schema_minor: found {minor!r}, this version of narrowgate reads up to {SCHEMA_MINOR} of"
            f" schema_version {SCHEMA_VERSION}; {_remedy(data, SCHEMA_VERSION + 1)}"
        )
    if minor < _RUN_TO_RUN and isinstance(policy := data.get("policy"), dict) and isinstance(policy.get("speed"), dict):
        # Its intervals are of quartets alone, and so they stay.
        policy["speed"].setdefault("run_to_run", {"sd": 0})
        text = json.dumps(data)
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"])
        what = "the field is missing" if fault["type"] == "missing" else fault["msg"]
        raise NarrowgateError(f"{path}: {field}: {what}") from None


def _remedy(data: dict[str, Any], version: Any) -> str:
    """Say what helps with a report of another version: an older one cannot be brought forward, a newer one can wait."""
    if not isinstance(version, int) or version < SCHEMA_VERSION:
        return "measure again"
    facts = data.get("environment")
    writer = facts.get("narrowgate") if isinstance(facts, dict) else None
    return (
        f"read it with narrowgate {writer} or later" if isinstance(writer, str) else "read it with a later narrowgate"
    )


def decided(report: Report, decision: Decision, policy: Policy) -> Report:
    """Return ``report`` with another decision on the same measurements, and evidence as this version states it."""
    from .evidence import evidence_of, statistics_of

    return report.model_copy(
        update={
            "schema_minor": SCHEMA_MINOR,
            "verdict": decision.verdict,
            "reasons": decision.reasons,
            "gates": decision.gates,
            "policy": policy,
            "statistics": statistics_of(report.measurements, decision),
            "evidence": evidence_of(report.measurements, policy, report.evidence.quality.baseline),
        }
    )
