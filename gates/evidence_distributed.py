"""The report's evidence of a distributed run: time and bytes of both arms, on all ranks of one job."""

from __future__ import annotations

import math
from typing import Any

from . import statistics
from .measurements import Measurements
from .measurements_distributed import DistributedArm, DistributedRun
from .policy import RunToRun
from .report import Level

_BASELINE = "the same step in BF16: weights gathered and gradients reduced in BF16"
_TABLES = ", rows of embedding tables and their gradients exchanged in BF16"
#: What a time is called that says nothing.
EMULATED = "emulated over Gloo on a CPU, not judged; bytes are real"


def distributed_level(m: Measurements, alpha: float, apart: RunToRun) -> Level:
    """Return the evidence of all ranks together; the interval holds what runs differ by (``apart``)."""
    run = m.distributed
    if run is None:
        why = "this run had one process; `torchrun --nproc-per-node N -m narrowgate.gates gate ...` has several"
        return Level(status="not_measured", why=why, baseline=_BASELINE, scope="all ranks of one job")
    layout = "" if run.replicas == 1 else f" in {run.replicas} replicas of {run.ranks // run.replicas}"
    scope = (
        f"{run.ranks} ranks of one job{layout} over {run.transport}, FSDP2, each rank on its own rows; a step of the"
        " slowest rank; bytes that one rank hands over in a step, counted at the collectives"
    )
    results: dict[str, Any] = {
        "ranks": run.ranks,
        "replicas": run.replicas,
        "transport": run.transport,
        "times": times_note(m, run),
        "baseline": arm_results(run.baseline),
        "candidate": arm_results(run.candidate),
        "payload_ratio": _ratio(run),
        "why_not_alone": run.why_not_alone,
        "seconds": run.seconds,
    }
    quartets = run.step.quartets
    if len(quartets) >= 2:
        ratios = statistics.log_ratios([q.baseline_ms for q in quartets], [q.candidate_ms for q in quartets])
        ratio = statistics.speedup(ratios, apart.sd, apart.df)
        results |= {
            "quartets": len(quartets),
            "speedup": math.exp(ratio.mean),
            "ci_low": math.exp(ratio.lower(alpha)),
            "ci_high": math.exp(ratio.upper(alpha)),
            "stopped": run.step.stopped,
        }
    if run.baseline.wire.tables is not None:
        scope += ", of the rank that hands over most"
        return Level(status="measured", baseline=_BASELINE + _TABLES, scope=scope, results=results)
    return Level(status="measured", baseline=_BASELINE, scope=scope, results=results)


def times_note(m: Measurements, run: DistributedRun) -> str:
    """Return whether times say anything."""
    if run.transport == "gloo":
        return EMULATED
    return f"not judged: {m.device} emulates part of the recipe" if m.emulated else "measured"


def arm_results(arm: DistributedArm) -> dict[str, Any]:
    """Return one arm's times in milliseconds and bytes by collective, counted and planned."""
    wire, found = arm.wire, arm.time
    counted: dict[str, dict[str, int]] = {}
    for entry in wire.counted:
        if entry.bytes:
            counted.setdefault(entry.collective, {})[entry.dtype] = entry.bytes
    return {
        "payload": {"all_gather": wire.all_gather or "bf16", "reduce_scatter": wire.reduce_scatter or "bf16"}
        | ({} if wire.tables is None else {"tables": wire.tables}),
        "gathered_layers": wire.gathered,
        "step_ms": found.ms,
        "local_ms": found.local_ms,
        "exposed_ms": None if found.local_ms is None else found.ms - found.local_ms,
        "alone_ms": found.alone_ms,
        # As many rows a GPU in both, so a ratio of throughputs a GPU is one of times.
        "scaling_ratio": None if found.alone_ms is None else found.alone_ms / found.ms,
        "bytes": counted,
        "calls": wire.calls,
        "planned_bytes": wire.planned_bytes(),
        "planned": {entry.what: {"calls": entry.calls, **entry.given} for entry in wire.planned},
    }


def _ratio(run: DistributedRun) -> dict[str, float]:
    """Return the candidate's bytes over the baseline's: of gathers, of rows of tables, and of all collectives."""
    own, base = run.candidate.wire.counted_bytes(), run.baseline.wire.counted_bytes()
    found = {}
    if base.get("all_gather"):
        found["all_gather"] = own.get("all_gather", 0) / base["all_gather"]
    if run.baseline.wire.tables is not None and run.candidate.wire.reduce_scatter is None:
        rows = [_rows_bytes(arm) for arm in (run.candidate, run.baseline)]
        if rows[1]:
            found["tables"] = rows[0] / rows[1]
    if base:
        found["all"] = sum(own.values()) / sum(base.values())
    return found


def _rows_bytes(arm: DistributedArm) -> int:
    """Bytes of rows of tables and their gradients, without the ids that ask for them."""
    return sum(e.bytes for e in arm.wire.counted if e.collective == "all_to_all" and e.dtype != "int64")


#: Heads of the columns of :func:`arm_rows`.
ARM_HEAD = (
    "arm",
    "weights gathered in",
    "gradients in",
    "step",
    "local",
    "exposed",
    "alone",
    "scaling",
    "bytes a step",
)


def arm_rows(level: Level) -> list[tuple[str, ...]]:
    """Return both arms' cells under :data:`ARM_HEAD`; none where nothing was measured."""
    rows = []
    for name in ("baseline", "candidate"):
        arm = level.results.get(name)
        if arm is None:
            continue
        times = [arm[key] for key in ("step_ms", "local_ms", "exposed_ms", "alone_ms")]
        ratio = arm["scaling_ratio"]
        sent = ", ".join(
            f"{collective} {count} ({dtype})"
            for collective, by_dtype in arm["bytes"].items()
            for dtype, count in by_dtype.items()
        )
        payload = arm["payload"]
        rows.append(
            (
                name,
                payload["all_gather"],
                payload["reduce_scatter"],
                *("-" if ms is None else f"{ms:.3f} ms" for ms in times),
                "-" if ratio is None else f"{ratio:.3f}",
                sent,
            )
        )
    return rows


def distributed_lines(level: Level) -> list[str]:
    """Return the evidence as lines of text; none where nothing was measured."""
    if not level.results:
        return []
    results = level.results
    gathered = results["payload_ratio"].get("all_gather")
    ratio = "" if gathered is None else f"; the candidate gathers {gathered:.3f} of the baseline's bytes"
    rows = results["candidate"]["payload"].get("tables")
    if rows is not None:
        share = results["payload_ratio"].get("tables")
        ratio += f"; rows of embedding tables are exchanged as {rows}, by the baseline as"
        ratio += f" {results['baseline']['payload']['tables']}"
        ratio += "" if share is None else f": {share:.3f} of the baseline's bytes"
    replicas = results.get("replicas", 1)
    layout = "" if replicas == 1 else f" in {replicas} replicas"
    lines = [f"{results['ranks']} ranks{layout} over {results['transport']}, times {results['times']}{ratio}"]
    for cells in arm_rows(level):
        parts = [f"{head} {cell}" for head, cell in zip(ARM_HEAD[1:], cells[1:], strict=True) if cell != "-"]
        lines.append(f"{cells[0]}: {', '.join(parts)}")
    return lines
