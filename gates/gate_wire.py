"""What the wire says of a recipe's ``shards``: a setting that was asked for and did not travel is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .judgement import Reason
from .measurements import Measurements
from .measurements_distributed import DistributedRun, Wire

#: By setting: the collectives whose bytes follow from it.
_SETTINGS = {
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter", "all_to_all"),
    "tables": ("all_to_all",),
}


def wire_faults(m: Measurements) -> list[Reason]:
    """Return a reason for each of the recipe's ``shards`` that the candidate's collectives do not show.

    What was trained and timed is then another recipe than the one that is judged, so nothing is concluded.
    """
    if m.distributed is None:
        return []
    return [Reason(code="wire_ignored", text=text) for text in _ignored(m.distributed)]


def _ignored(run: DistributedRun) -> Iterator[str]:
    wire, base = run.candidate.wire, run.baseline.wire
    counted, planned, plain = wire.counted_bytes(), wire.planned_bytes(), base.counted_bytes()
    # A model whose BF16 payload is another than planned, say because a step runs a unit twice, is not described by
    # the plan; then only less than the baseline sends can be asked for.
    exact = plain == base.planned_bytes()
    for setting, collectives in _SETTINGS.items():
        asked = getattr(wire, setting)
        if asked is None:
            continue
        sent, due, bf16 = (_bytes(found, collectives) for found in (counted, planned, plain))
        head = f"The recipe asks for shards.{setting} {asked}, and the wire does not show it"
        if setting == "all_gather" and not wire.gathered:
            yield (
                f"{head}: no layer of this model gathers its weight like that, since none has both fprop and dgrad in"
                " low precision. Take it out of the recipe, or lower layers on both paths."
            )
        elif exact and any(counted.get(name, 0) != planned.get(name, 0) for name in collectives):
            as_bf16 = ", as much as BF16" if sent == bf16 else ""
            yield (
                f"{head}: a rank handed over {sent} bytes a step{as_bf16}, where {due} are planned (BF16: {bf16})."
                " Something on the way ignored the setting, so another recipe was measured."
            )
        elif (
            not exact
            and setting != "reduce_scatter"
            and due < _bytes(base.planned_bytes(), collectives)
            and sent >= bf16
        ):
            yield (
                f"{head}: a rank handed over {sent} bytes a step, and the baseline in BF16 {bf16}."
                " Something on the way ignored the setting, so another recipe was measured."
            )
        elif not exact and setting == "reduce_scatter" and _summed_plainly(wire, counted):
            yield (
                f"{head}: gradients went through a reduce-scatter of {counted.get('reduce_scatter', 0)} bytes a step,"
                " not as codes."
                " Something on the way ignored the setting, so another recipe was measured."
            )


def _bytes(found: Mapping[str, int], collectives: Sequence[str]) -> int:
    return sum(found.get(name, 0) for name in collectives)


def _summed_plainly(wire: Wire, counted: Mapping[str, int]) -> bool:
    """Whether no gradient went to an all-to-all; where rows of tables do too, it is a reduce-scatter that tells."""
    return not counted.get("all_to_all") if wire.tables is None else bool(counted.get("reduce_scatter"))
