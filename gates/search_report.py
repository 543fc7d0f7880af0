"""A search as files and text: ``search.json``, ``search.md``, the recipes found, and what the terminal shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recipes.descent import TARGET
from . import exits
from .files import write_together
from .outputs import Outcome, write_outcome, write_summary
from .render import terminal_text
from .report import FILES, Report
from .search import SCREEN_SEEDS, Candidate, Found
from .search_record import SearchRecord

SCHEMA_VERSION = 1
SEARCH_FILES: tuple[str, ...] = ("search.json", "search.md")
#: The folder of the recipes that were screened.
RECIPES = "recipes"
_SCREEN_NOTE = (
    "a screen, not a test: few seeds, means without a level, and the best of several flatters itself; the full gate"
    " measured the finalists anew, on other seeds"
)


@dataclass(frozen=True)
class Facts:
    """What a search was asked, for its report."""

    model: str
    data: str
    policy: str
    device: str
    planned_for: str
    by: str
    seeds: int
    steps: int | None
    screen_seeds: int
    screen_steps: int | None
    max_candidates: int
    finalists: int
    minutes: float | None

    @property
    def unit(self) -> str:
        """What a candidate's worth is counted in."""
        return "us" if self.by == "time" else "weighted FLOPs"


def reasons_of(found: Found) -> list[str]:
    """Say why a search ended as it did, the most telling first."""
    if not found.candidates:
        return ["No recipe to begin with is worth anything here.", *(f"{n}: {why}" for n, why in found.skipped.items())]
    told = [f"{r.recipe.name}: {r.verdict.upper()}: {r.reasons[0].text}" for r in found.reports]
    if found.finalists and not found.finalists[0].promising:
        name, worst = found.finalists[0].recipe.name, found.finalists[0].worst
        told.append(
            f"No screen stayed within {TARGET:g} margins; {name}, which lost least ({worst:.2f} margins), was gated"
        )
    return told


def search_dict(found: Found, facts: Facts, *, finished: bool, failure: str | None = None) -> dict[str, Any]:
    """Return the data of ``search.json``, which fit its schema."""
    verdict = exits.FAILED_RUN if failure is not None else found.verdict
    verdicts = {report.recipe.name: report for report in found.reports}
    accepted = [r.recipe.name for r in found.reports if r.verdict == "accept"]
    data = {
        "schema_version": SCHEMA_VERSION,
        "finished": finished,
        "verdict": verdict,
        "exit_code": exits.exit_code([verdict]),
        "failure": failure,
        "accepted": accepted,
        "reasons": reasons_of(found),
        "model": facts.model,
        "data": facts.data,
        "policy": facts.policy,
        "device": facts.device,
        "planned_for": facts.planned_for,
        "rank_by": facts.by,
        "worth_unit": facts.unit,
        "screen": {
            "seeds": list(range(SCREEN_SEEDS, SCREEN_SEEDS + facts.screen_seeds)),
            "steps": facts.screen_steps,
            "target_margins": TARGET,
            "note": _SCREEN_NOTE,
        },
        "gate": {"seeds": list(range(facts.seeds)), "steps": facts.steps},
        "budget": {
            "max_candidates": facts.max_candidates,
            "finalists": facts.finalists,
            "minutes": facts.minutes,
            "ended": found.ended,
        },
        "family": {
            "size": max((report.statistics.family for report in found.reports), default=0),
            "correction": "holm",
            "judged_before": list(found.earlier),
        },
        "skipped": [{"recipe": name, "why": why} for name, why in found.skipped.items()],
        "candidates": [_candidate(candidate, verdicts) for candidate in found.candidates],
        "finalists": [candidate.recipe.name for candidate in found.finalists],
    }
    return SearchRecord.model_validate(data).model_dump(mode="json", by_alias=True)


def _candidate(candidate: Candidate, verdicts: dict[str, Report]) -> dict[str, Any]:
    name = candidate.recipe.name
    report = verdicts.get(name)
    return {
        "name": name,
        "hash": candidate.recipe.hash(),
        "file": f"{RECIPES}/{name}.yaml",
        "from": candidate.base,
        "levels": dict(candidate.levels),
        "worth": candidate.worth,
        "predicted_ratio": candidate.ratio,
        "probe": candidate.probe,
        "screen": {
            "promising": candidate.promising,
            "worst_margins": candidate.worst,
            "losses_margins": dict(candidate.losses),
            **candidate.screened.model_dump(mode="json"),
        },
        "verdict": None if report is None else report.verdict,
        "report": None if report is None else f"{name}/{FILES[0]}",
    }


def search_markdown(data: dict[str, Any]) -> str:
    """Return ``search.md`` from the data of ``search.json``."""
    rows = _rows(data)
    lines = [
        f"## narrowgate search: {data['verdict'].upper()}" + ("" if data["finished"] else " so far (not finished)"),
        "",
        f"{data['model']}, {data['data']}; policy {data['policy']}; {_planned(data)}.",
        "",
        *(f"- {_cell(reason)}" for reason in data["reasons"]),
    ]
    if not data["candidates"]:
        return "\n".join(lines) + "\n"
    lines += ["", f"Screens are {data['screen']['note']}."]
    if data["budget"]["ended"]:
        lines.append(f"Screening ended: {data['budget']['ended']}.")
    lines += ["", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows[1:]]
    if data["skipped"]:
        lines += ["", *(f"- left out: `{entry['recipe']}`: {_cell(entry['why'])}" for entry in data["skipped"])]
    if data["family"]["size"] > 1:
        lines += ["", _family(data)]
    return "\n".join(lines) + "\n"


def search_text(found: Found, data: dict[str, Any], out: Path) -> str:
    """Return what the terminal shows: each finalist's report, then all candidates as aligned columns."""
    parts = [terminal_text(report) for report in found.reports]
    rows = _rows(data)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = [f"SEARCH {data['verdict'].upper()}: {data['model']}, {data['data']}; {_planned(data)}"]
    lines += [f"  - {reason}" for reason in data["reasons"]]
    if found.candidates:
        lines += ["", *table, "", f"  Screens are {data['screen']['note']}."]
    if data["budget"]["ended"]:
        lines.append(f"  Screening ended: {data['budget']['ended']}.")
    if found.candidates and data["skipped"]:
        lines += [f"  Left out: {entry['recipe']}: {entry['why']}" for entry in data["skipped"]]
    if data["family"]["size"] > 1:
        lines.append(f"  {_family(data)}")
    places = f"Reports: {out / SEARCH_FILES[0]}, {SEARCH_FILES[1]}"
    lines.append(f"{places}; recipes in {out / RECIPES}" if found.candidates else places)
    return "\n".join([*parts, *lines])


def _planned(data: dict[str, Any]) -> str:
    what = "predicted time" if data["rank_by"] == "time" else "FLOPs in low precision, weighted by bits saved,"
    return f"ranked by {what} on {data['planned_for']}, trained on {data['device']}"


def _family(data: dict[str, Any]) -> str:
    before = data["family"]["judged_before"]
    told = f" ({', '.join(before)} judged into this folder before)" if before else ""
    return f"Holm's correction over the {data['family']['size']} recipes that the full gate judged on this task{told}."


def _rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a head and one row a candidate: finalists, then the rest by worth, without probes that did not pass."""
    order = {name: i for i, name in enumerate(data["finalists"])}
    shown = {c["name"]: c for c in data["candidates"] if not c["probe"] or c["screen"]["promising"]}
    listed = sorted(shown.values(), key=lambda c: (order.get(c["name"], len(order)), -c["worth"], c["name"]))
    unit = data["worth_unit"]
    rows = [("recipe", "from", f"predicted ({unit})", "worst loss in a screen", "screen", "full gate")]
    for c in listed:
        ratio = "" if c["predicted_ratio"] is None else f", layers {c['predicted_ratio']:.3f}x"
        worth = f"{c['worth']:.1f}{ratio}" if unit == "us" else f"{c['worth']:.3g}"
        screen = c["screen"]
        told = "promising" if screen["promising"] else screen["fault"] or "loses too much"
        verdict = (c["verdict"] or ("finalist" if c["name"] in order else "-")).upper()
        rows.append((c["name"], c["from"], worth, f"{screen['worst_margins']:.2f} margins", told, verdict))
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write_recipes(candidates: Sequence[Candidate], bases: dict[str, str], out: Path) -> None:
    """Write candidates, and the files that they extend, into ``out``'s folder of recipes.

    Args:
        candidates: new ones.
        bases: texts of recipe files by name, of recipes that are not built in.
        out: the folder of reports.
    """
    texts = {f"{name}.yaml": text for name, text in bases.items()}
    texts |= {f"{candidate.recipe.name}.yaml": candidate.recipe.to_yaml() for candidate in candidates}
    for name, text in texts.items():
        path = out / RECIPES / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_together(path.parent, {name: text})


def write_search(data: dict[str, Any], out: Path) -> None:
    """Write ``search.json`` and ``search.md``."""
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    write_together(out, dict(zip(SEARCH_FILES, (text, search_markdown(data)), strict=True)))


def write_finalists(found: Found, out: Path) -> None:
    """Write each finalist's reports into its folder of ``out``, and the summary over them."""
    outcomes = [Outcome(report.recipe.name, report.recipe.name, report) for report in found.reports]
    for outcome in outcomes:
        write_outcome(outcome, out)
    if outcomes:
        write_summary(outcomes, out)
