"""Judges of quality: ``ne`` and ``auc``, one gate a task, from paired seeds with a row interval beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from . import statistics
from .judgement import Gate, Judgement, Levels, Reason, Status, percent
from .measurements import Measurements, RowEstimate, RowIntervals, SliceQuality, SliceRows, TaskQuality
from .policy import Policy


@dataclass(frozen=True)
class _Loss:
    """A quality loss to be judged: positive is worse."""

    gate: Literal["ne", "auc", "gauc"]
    task: str
    #: The slice of the rows, None for all.
    part: str | None
    #: How a sentence calls it, and how a gate does.
    name: str
    metric: str
    margin: float
    differences: list[float]
    row: RowEstimate | None

    def show(self, value: float) -> str:
        return percent(value) if self.gate == "ne" else f"{value:+.6f}"


def judge_ne(m: Measurements, task: str, policy: Policy, levels: Levels, part: str | None = None) -> Judgement:
    """Judge the relative NE increase on one task, or on a slice of it, against the policy's margin."""
    pairs, faults = _pairs(m, task, "ne", part)
    margin, rows = policy.margin("max_ne_increase", task, part), _rows(m, part)
    assert margin is not None
    differences = [c / b - 1 for b, c in pairs if b > 0]
    row = rows.ne.get(task) if rows else None
    loss = _Loss("ne", task, part, "NE", "relative NE increase", margin, differences, row)
    return _judge(loss, faults, m, policy, levels)


def judge_auc(m: Measurements, task: str, policy: Policy, levels: Levels, part: str | None = None) -> Judgement:
    """Judge the absolute AUC loss on one task, or on a slice of it, against the policy's margin."""
    pairs, faults = _pairs(m, task, "auc", part)
    margin, rows = policy.margin("max_auc_loss", task, part), _rows(m, part)
    assert margin is not None
    row = rows.auc.get(task) if rows else None
    loss = _Loss("auc", task, part, "AUC", "AUC loss", margin, [b - c for b, c in pairs], row)
    return _judge(loss, faults, m, policy, levels)


def judge_gauc(m: Measurements, task: str, policy: Policy, levels: Levels) -> Judgement | None:
    """Judge the absolute loss of AUC within groups on one task; None where the policy has no margin for it."""
    margin = policy.margin("max_gauc_loss", task)
    if margin is None:
        return None
    pairs, faults = _pairs(m, task, "gauc", None)
    row = m.rows.gauc.get(task) if m.rows else None
    loss = _Loss("gauc", task, None, "GAUC", "GAUC loss", margin, [b - c for b, c in pairs], row)
    return _judge(loss, faults, m, policy, levels)


def _rows(m: Measurements, part: str | None) -> RowIntervals | SliceRows | None:
    return m.rows if m.rows is None or part is None else m.rows.slices.get(part)


def _pairs(
    m: Measurements, task: str, metric: str, part: str | None
) -> tuple[list[tuple[float, float]], list[tuple[int, str, bool]]]:
    """Return the complete pairs (baseline, candidate), and (seed, why, candidate's own fault) of the others."""
    pairs, faults = [], []
    for seed in m.seeds:
        whole = [seed.baseline.quality.get(task), seed.candidate.quality.get(task)]
        arms: list[SliceQuality | None] = [
            q if q is None or part is None else q.slices.get(part, _unsliced(q)) for q in whole
        ]
        values = [getattr(q, metric) if q is not None else None for q in arms]
        if values[0] is not None and values[1] is not None:
            pairs.append((values[0], values[1]))
            continue
        absent = "no group of held-out rows holds both classes" if metric == "gauc" else "not measured"
        note = next((q.note for q, v in zip(arms, values, strict=True) if v is None and q and q.note), absent)
        faults.append((seed.seed, note, values[0] is not None))
    return pairs, faults


def _unsliced(quality: TaskQuality) -> SliceQuality:
    """Return what stands for a slice of a training that has no predictions: only why."""
    return SliceQuality(log_loss=None, ne=None, auc=None, calibration=None, note=quality.note)


def _judge(
    loss: _Loss, faults: list[tuple[int, str, bool]], m: Measurements, policy: Policy, levels: Levels
) -> Judgement:
    n, seeds = len(loss.differences), len(m.seeds)
    estimate = statistics.paired(loss.differences) if n >= 2 else None
    measured = math.fsum(loss.differences) / n if n else None
    low = estimate.lower(levels.reject) if estimate else None
    high = estimate.upper(levels.accept) if estimate else None
    accept_p = None

    def result(status: Status, *reasons: tuple[str, str]) -> Judgement:
        gate = Gate(
            name=loss.gate,
            status=status,
            task=loss.task,
            slice=loss.part,
            metric=loss.metric,
            measured=measured,
            ci_low=low,
            ci_high=high,
            threshold=loss.margin,
            direction="below",
            sign_flip_p=statistics.sign_flip_p(loss.differences, loss.margin) if estimate else None,
        )
        told = tuple(
            Reason(code=code, text=text, gate=loss.gate, task=loss.task, slice=loss.part) for code, text in reasons
        )
        return Judgement(gate, told, accept_p)

    name = f"{loss.name} on task {loss.task}" + (f", slice {loss.part}" if loss.part else "")
    own = [f"seed {seed}" for seed, _, candidate in faults if candidate]
    if own:
        note = next(note for _, note, candidate in faults if candidate)
        return result("fail", ("candidate_not_evaluable", f"{name}: the candidate failed in {', '.join(own)}: {note}."))
    if faults:
        why = sorted({note for _, note, _ in faults})
        text = f"{name} cannot be judged: {'; '.join(why)}. Bring held-out rows on which it exists."
        return result("undecided", ("metric_undefined", text))
    if estimate is None or n < policy.min_seeds:
        text = f"{name}: {seeds} paired seed{'s' * (seeds != 1)} cannot decide; run at least {policy.min_seeds}."
        return result("undecided", ("too_few_seeds", text))
    # Parts are measured over all rows: of a slice they say nothing.
    owner = f" {told}" if loss.part is None and (told := _owner(m, loss.task)) else ""
    bound = f"{loss.show(estimate.mean)} with bounds [{loss.show(low or 0)}, {loss.show(high or 0)}]"
    against = f"margin {loss.show(loss.margin)}"
    if loss.gate == "ne" and estimate.upper(levels.reject) < -policy.anomaly_factor * loss.margin:
        text = (
            f"{name} changed by {bound}: better by more than {policy.anomaly_factor:g} margins, which precision does"
            " not explain. Look for a leak or a difference between the arms."
        )
        return result("undecided", ("anomaly", text))
    if estimate.lower(levels.reject) > loss.margin:
        return result("fail", (f"{loss.gate}_loss", f"{name} is worse by {bound}: past the {against}.{owner}"))
    if not estimate.upper(levels.accept) < loss.margin:
        more = _more_seeds(loss, n, levels) + _rows_beside(loss, estimate, levels)
        text = f"{name} changed by {bound}: the interval holds the {against}. {more}{owner}"
        return result("undecided", (f"{loss.gate}_interval", text))
    if loss.row is None:
        text = f"{name} passes over seeds, but no row interval was measured beside it. Run the gate again."
        return result("undecided", ("row_interval_missing", text))
    row = loss.row.estimate()
    if not row.upper(levels.accept) < loss.margin:
        text = (
            f"{name} passes over seeds, but with other held-out rows it could be {loss.show(row.upper(levels.accept))},"
            f" at or past the {against}. {_more_rows(row, loss.margin, levels.accept)}"
            if math.isfinite(row.error)
            else f"{name} passes over seeds, but all held-out rows belong to one group. Hold out more groups."
        )
        return result("undecided", ("row_interval", text))
    accept_p = max(estimate.p_below(loss.margin), row.p_below(loss.margin))
    return result("pass")


def _owner(m: Measurements, task: str) -> str:
    """Name the group of layers and the path that lose most NE by themselves, where that was measured."""
    told = []
    for kind, called in (("layers", "layers"), ("path", "path")):
        costs = {
            part.name: cost
            for part in m.parts
            if part.kind == kind and task in part.only and (cost := part.only[task].mean_ne_increase()) is not None
        }
        if costs:
            worst = max(costs, key=lambda name: costs[name])
            told.append(f"{called} {worst} ({percent(costs[worst])} NE by itself)")
    return f"Most is lost by {' and '.join(told)}." if told else ""


def _more_seeds(loss: _Loss, n: int, levels: Levels) -> str:
    estimate = statistics.paired(loss.differences)
    alpha = levels.accept if estimate.mean < loss.margin else levels.reject
    needed = statistics.seeds_needed(estimate.mean, estimate.error * math.sqrt(n), loss.margin, alpha)
    if needed is None:
        return "The loss is so close to the margin that more seeds are unlikely to decide it."
    more = max(needed - n, 1)
    return (
        f"About {more} more seed{'s' * (more > 1)} would decide it (in 4 runs of 5, were mean and spread as measured):"
        f" declare --seeds {n + more}."
    )


def _rows_beside(loss: _Loss, estimate: statistics.Estimate, levels: Levels) -> str:
    """Say so where more seeds that pass would leave the rows' interval at or past the margin, as it is now."""
    row = loss.row.estimate() if loss.row else None
    if row is None or estimate.mean >= loss.margin or row.upper(levels.accept) < loss.margin:
        return ""
    if not math.isfinite(row.error):
        return " A pass needs more groups of held-out rows too: all belong to one."
    upper = loss.show(row.upper(levels.accept))
    return f" A pass may need more held-out rows too: with others it could be {upper}."


def _more_rows(row: statistics.Estimate, margin: float, alpha: float) -> str:
    room = margin - row.mean
    if room <= 0:
        return "The rows as a whole show a loss at the margin; more rows are unlikely to decide it."
    factor = ((row.upper(alpha) - row.mean) / room) ** 2
    return f"About {max(factor, 1.1):.1f} times as many held-out rows would decide it."
