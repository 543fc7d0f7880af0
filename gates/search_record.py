"""``search.json`` as a record: what a search writes, and the JSON Schema of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from .record import Record
from .search import Screened

SCHEMA_FILE = Path(__file__).with_name("search.schema.json")


class ScreenPlan(Record):
    """How candidates are screened."""

    seeds: tuple[int, ...]
    steps: int | None
    #: The largest loss of a promising candidate, in margins of the policy.
    target_margins: float
    note: str


class GatePlan(Record):
    """How the full gate judges finalists."""

    seeds: tuple[int, ...]
    steps: int | None


class Budget(Record):
    """How far the search may go, and why screening ended; None while it goes on."""

    max_candidates: int
    finalists: int
    minutes: float | None
    ended: str | None


class Family(Record):
    """The recipes over which the finalists' levels are corrected; 0 before the full gate."""

    size: int
    correction: Literal["holm"]
    #: Recipes that earlier searches into the same folder had judged on this task.
    judged_before: tuple[str, ...]


class Skipped(Record):
    """A recipe to begin with that was left out."""

    recipe: str
    why: str


class ScreenResult(Screened):
    """What a screen measured of one candidate, and what follows."""

    promising: bool
    worst_margins: float
    #: Mean losses by gate and task, in margins of the policy.
    losses_margins: dict[str, float]


class CandidateRecord(Record):
    """A recipe that was screened."""

    name: str
    hash: str
    #: Where its recipe lies, within the folder of the search.
    file: str
    #: The recipe that it was made from.
    base: str = Field(alias="from")
    #: Levels of groups of layers that left the recipe's own formats.
    levels: dict[str, str]
    #: In ``worth_unit``.
    worth: float
    #: Predicted speedup of the linear layers; None without predicted times.
    predicted_ratio: float | None
    #: Screened to tell what a part of a recipe costs.
    probe: bool
    screen: ScreenResult
    #: The full gate's, and its report within the folder of the search; None where it did not judge.
    verdict: Literal["accept", "reject", "inconclusive"] | None
    report: str | None


class SearchRecord(Record):
    """The whole of ``search.json``."""

    model_config = ConfigDict(title="narrowgate search")

    schema_version: Literal[1]
    #: Whether the search ended; the file is written anew after each screen.
    finished: bool
    verdict: Literal["accept", "reject", "inconclusive", "failed"]
    exit_code: int
    #: Why the run failed, where it did.
    failure: str | None
    accepted: tuple[str, ...]
    reasons: tuple[str, ...]
    model: str
    data: str
    policy: str
    #: Where it trained, and the device that prices are of.
    device: str
    planned_for: str
    rank_by: Literal["time", "flops"]
    worth_unit: Literal["us", "weighted FLOPs"]
    screen: ScreenPlan
    gate: GatePlan
    budget: Budget
    family: Family
    skipped: tuple[Skipped, ...]
    candidates: tuple[CandidateRecord, ...]
    #: By name, the best first.
    finalists: tuple[str, ...]


def search_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``search.json``; ``search.schema.json`` beside this file holds the same."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **SearchRecord.model_json_schema(mode="serialization"),
    }
