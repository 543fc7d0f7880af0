"""The report: one versioned record, from which every file is made and from which the verdict can be made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from ..precision.errors import NarrowgateError
from .decision import Decision, Gate, Reason
from .measurements import Measurements, Record
from .policy import Policy

SCHEMA_VERSION = 1
FILES: tuple[str, ...] = ("report.json", "report.md", "junit.xml")
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
    alpha: float
    accept_alpha: float
    #: Paired seeds, and the looks at the data that were declared ahead.
    n: int
    looks: int
    #: Recipes decided together.
    family: int


class Level(Record):
    """One level of evidence. Levels have baselines and scopes of their own and are never added together."""

    status: Literal["measured", "not_measured"]
    #: Why it was not measured, where it was not.
    why: str | None = None
    baseline: str
    scope: str
    results: dict[str, Any] = Field(default_factory=dict)


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

    def files(self) -> dict[str, str]:
        """Return the text of every file of the report, ``report.json`` first."""
        from .junit import junit_report
        from .render import render_report

        data = json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False)
        texts = dict(zip(FILES, (data + "\n", render_report(self), junit_report(self)), strict=True))
        assert len(texts["report.md"]) < 2**20, "a GitHub step summary takes at most 1 MiB"
        return texts


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
    except ValueError as error:
        place = f":{error.lineno}:{error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise NarrowgateError(f"{path}{place}: not JSON: {getattr(error, 'msg', error)}") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version is None:
        raise NarrowgateError(f"{path}: found no schema_version, expected a report that narrowgate wrote")
    if version != SCHEMA_VERSION:
        raise NarrowgateError(
            f"{path}: schema_version: found {version!r}, this version of narrowgate reads {SCHEMA_VERSION};"
            " measure again"
        )
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"])
        raise NarrowgateError(f"{path}: {field}: {fault['msg']}") from None


def decided(report: Report, decision: Decision, policy: Policy) -> Report:
    """Return ``report`` with another decision on the same measurements."""
    from .evidence import statistics_of

    return report.model_copy(
        update={
            "verdict": decision.verdict,
            "reasons": decision.reasons,
            "gates": decision.gates,
            "policy": policy,
            "statistics": statistics_of(report.measurements, decision),
        }
    )
