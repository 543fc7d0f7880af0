"""Olive's wording of goals in a policy file, as margins: ``ne: {percent-max-degradation: 0.05}``.

Microsoft Olive states a metric's goal as one of five kinds. Those that say the same as a margin here are read:

===========  ===========================  =================
metric       goal                         margin
===========  ===========================  =================
``ne``       ``percent-max-degradation``  max_ne_increase
``auc``      ``max-degradation``          max_auc_loss
``gauc``     ``max-degradation``          max_gauc_loss
``speedup``  ``percent-min-improvement``  min_speedup
===========  ===========================  =================

NE is judged relative to the baseline and AUC absolutely, so the other kind of degradation is refused rather than
converted by a baseline that is not known yet.
"""

from __future__ import annotations

from typing import Any

from ..precision.errors import did_you_mean
from ..recipes.document import Node
from ..recipes.errors import Diagnostic, RecipeError, found

#: Metric to (its goal, the margin that it is, whether the value is a percentage, what is added to it).
GOALS: dict[str, tuple[str, str, bool, float]] = {
    "ne": ("percent-max-degradation", "max_ne_increase", True, 0.0),
    "auc": ("max-degradation", "max_auc_loss", False, 0.0),
    "gauc": ("max-degradation", "max_gauc_loss", False, 0.0),
    "speedup": ("percent-min-improvement", "min_speedup", True, 1.0),
}

#: Margins that a task or a slice can have of its own.
MARGINS: dict[str, tuple[str, ...]] = {
    "tasks": ("max_ne_increase", "max_auc_loss", "max_gauc_loss"),
    "slices": ("max_ne_increase", "max_auc_loss"),
}


def as_margins(data: dict[str, Any], root: Node, path: str) -> dict[str, Any]:
    """Return a policy file's ``data`` with goals replaced by margins, in itself and in its tasks and slices.

    Raises:
        RecipeError: an unknown goal, a value that is no number, or a goal beside the margin that it is.
    """
    faults: list[Diagnostic] = []
    translated = _section(data, [], root, path, faults)
    for part in ("tasks", "slices"):
        sections = translated.get(part)
        if isinstance(sections, dict):
            translated[part] = {
                name: _section(section, [part, name], root, path, faults) if isinstance(section, dict) else section
                for name, section in sections.items()
            }
    if faults:
        raise RecipeError(faults)
    return translated


def _section(
    data: dict[str, Any], place: list[str | int], root: Node, path: str, faults: list[Diagnostic]
) -> dict[str, Any]:
    translated = {key: value for key, value in data.items() if key not in GOALS}
    for metric in [key for key in data if key in GOALS]:
        goal, margin, percent, added = GOALS[metric]
        here = [*place, metric]
        value = data[metric]

        def fault(message: str, here: list[str | int] = here) -> None:
            node, _ = root.find(here)
            line, column = root.key(here) or (node.line, node.column)
            field = ".".join(map(str, here))
            faults.append(Diagnostic(file=path, line=line, column=column, field=field, message=message))

        if not isinstance(value, dict) or len(value) != 1:
            fault(f"found {found(value)}, expected one goal: {{{goal}: NUMBER}}")
        elif place and margin not in MARGINS[str(place[0])]:
            fault(
                f"found a goal that {place[0]} cannot have: {', '.join(_goals_of(str(place[0])))} can be judged there"
            )
        elif goal not in value:
            fault(f"found goal '{next(iter(value))}'{did_you_mean(next(iter(value)), [goal])}; {metric} takes {goal}")
        elif margin in data:
            fault(f"{goal} and {margin} say the same; write one of them")
        else:
            number = _number(value[goal], percent)
            if number is None:
                fault(f"{goal}: found {found(value[goal])}, expected a {'percentage' if percent else 'number'}")
            else:
                translated[margin] = added + number
    return translated


def _goals_of(part: str) -> list[str]:
    return [metric for metric, (_, margin, _, _) in GOALS.items() if margin in MARGINS[part]]


def _number(value: Any, percent: bool) -> float | None:
    if percent and isinstance(value, str) and value.strip().endswith("%"):
        value = value.strip()[:-1]
    try:
        number = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError):
        return None
    return None if number is None else number / 100 if percent else number
