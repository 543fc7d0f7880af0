"""The way through the candidates of one start: relax what costs quality until it passes, then win back what it can.

A loss is told by gate in margins: 1 is a loss at the margin. What a layer costs adds up only roughly (errors interact),
so predicted losses order the moves, and measured ones decide. A setting **passes** where no gate lost more than
``target`` margins: below 1, because a candidate at the margin itself passes the full gate once in twenty.

1. The start as it is.
2. While nothing has passed: units move up their ladders, the moves first that save most of what is lost past the target
   for what they give up, until the prediction is within the target. Settings only ever get safer.
3. From the best that passed: one unit moves back down, the move first that gains most for what it may cost. A unit that
   was refused is split in halves, so that one sensitive layer does not hold its whole group back.

Deterministic: the same losses lead through the same settings, which is what makes a search resumable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .search import DENSE, LOW, WGRAD, WIDE, Setting, Unit, total_worth

#: Losses by gate, in margins.
Losses = Mapping[str, float]

#: Margins that a candidate may lose in a screen: at half a margin eight seeds pass four times in five.
TARGET = 0.5
#: What eight bits leave of the loss of fewer; only orders moves.
_WIDER_LEAVES = 0.25
#: The weight gradient's part of a loss where nobody measured it: one path of three.
_ONE_PATH = 1 / 3
#: Worth that counts as none, against division by zero.
_NOTHING = 1e-12

_Key = tuple[tuple[str, str], ...]


class Descent:
    """Proposes settings of a start's units one by one, from the losses of those before.

    Attributes:
        units: what is decided; splitting one puts its halves in its place.
        target: margins that a setting may lose.
        best: the setting worth most of those that passed; None before one has.
    """

    def __init__(self, units: Sequence[Unit], target: float = TARGET) -> None:
        self.units = list(units)
        self.target = target
        self.best: Setting | None = None
        self._last: Setting | None = None
        #: By unit's name, what its low precision costs; None before that was told.
        self._risks: dict[str, Losses] | None = None
        self._wgrad_share = _ONE_PATH
        #: Losses of every setting that was measured, by what each layer got.
        self._measured: dict[_Key, Losses] = {}

    @property
    def wants_risks(self) -> bool:
        """Whether a setting failed and nobody has told yet what each unit costs."""
        return self._risks is None and self.best is None and self._last is not None and len(self.units) > 1

    def tell_risks(self, risks: Mapping[str, Losses], wgrad_share: float | None = None) -> None:
        """Hear what each unit's low precision costs.

        Args:
            risks: by unit's name; units that are not in it share what the others leave of the first setting's loss.
            wgrad_share: the weight gradients' part of it, 0 to 1; None where unknown.
        """
        self._risks = dict(risks)
        if wgrad_share is not None:
            self._wgrad_share = min(max(wgrad_share, 0.0), 1.0)

    def propose(self) -> Setting | None:
        """Return the next setting to measure, the same until :meth:`learn` hears of it; None where none is left."""
        if self._last is None:
            return tuple(LOW for _ in self.units)
        return self._relax(self._last) if self.best is None else self._win_back(self.best)

    def learn(self, setting: Setting, losses: Losses, *, probe: bool = False) -> bool:
        """Hear what a setting lost; return whether it passes.

        Args:
            setting: what was proposed, or any other of these units as a ``probe``, from which nothing is relaxed.
            losses: by gate, in margins.
            probe: whether it was measured to learn what units cost.
        """
        self._measured[self._key(setting)] = dict(losses)
        if not probe:
            self._last = setting
        passes = max(losses.values(), default=0.0) <= self.target
        if passes and (self.best is None or total_worth(self.units, setting) > total_worth(self.units, self.best)):
            self.best = setting
        return passes

    # Safer.

    def _relax(self, setting: Setting) -> Setting | None:
        left = dict(self._measured[self._key(setting)])
        now, moved = list(setting), False
        while not moved or max(left.values(), default=0.0) > self.target:
            moves = [
                (index, level)
                for index, unit in enumerate(self.units)
                for level in unit.levels[unit.levels.index(now[index]) + 1 :]
                # A candidate in BF16 altogether is the baseline.
                if level != DENSE or any(other != DENSE for i, other in enumerate(now) if i != index)
            ]
            if not moves:
                break
            relief, index, level = max((self._relief(now, left, *move), *move) for move in moves)
            if moved and relief[0] <= 0:
                break  # nothing is known to help further: measure before more is given up
            for gate, saved in self._saved(self.units[index], now[index], level).items():
                left[gate] = left.get(gate, 0.0) - saved
            now[index], moved = level, True
        return tuple(now) if moved else None

    def _relief(self, now: Sequence[str], left: Losses, index: int, level: str) -> tuple[float, ...]:
        """Return what orders the moves that relax: excess saved for worth given up, then the least given up."""
        unit = self.units[index]
        lost = unit.total(now[index]) - unit.total(level)
        saved = self._saved(unit, now[index], level)
        past = {gate: loss - self.target for gate, loss in left.items() if loss > self.target}
        relief = sum(min(max(saved.get(gate, 0.0), 0.0), excess) for gate, excess in past.items())
        return relief / max(lost, _NOTHING), relief, -lost, -index

    # Worth more.

    def _win_back(self, best: Setting) -> Setting | None:
        while True:
            moves = [
                (index, level)
                for index, unit in enumerate(self.units)
                for level in unit.levels[: unit.levels.index(best[index])]
                if unit.total(level) > unit.total(best[index]) and not self._known(_moved(best, index, level))
            ]
            if moves:
                index, level = max(moves, key=lambda move: self._promise(best, *move))
                return _moved(best, index, level)
            refused = [
                index
                for index, unit in enumerate(self.units)
                if len(unit.clusters) > 1 and best[index] != LOW and unit.total(LOW) > unit.total(best[index])
            ]
            if not refused:
                return None
            best = self._split(refused[0], best)

    def _promise(self, best: Setting, index: int, level: str) -> tuple[float, ...]:
        """Return what orders the moves back: worth gained for loss added, then the most gained."""
        unit = self.units[index]
        gained = unit.total(level) - unit.total(best[index])
        added = max(self._saved(unit, level, best[index]).values(), default=0.0)
        return gained / max(added, _NOTHING), gained, -index

    def _split(self, index: int, best: Setting) -> Setting:
        """Put a unit's halves in its place; settings follow."""
        unit = self.units[index]
        halves = unit.halves()
        risk = self._risk(unit)
        self._risks = dict(self._risks or {})
        for half in halves:
            share = len(half.clusters) / len(unit.clusters)
            self._risks[half.name] = {gate: share * loss for gate, loss in risk.items()}
        self.units[index : index + 1] = halves
        self.best = (*best[:index], best[index], *best[index:])
        return self.best

    # What is known.

    def _risk(self, unit: Unit) -> Losses:
        """What the whole of a unit's low precision costs; an even share of the first loss where nobody told."""
        if self._risks is not None and unit.name in self._risks:
            return self._risks[unit.name]
        whole = next(iter(self._measured.values()), {})
        told = list((self._risks or {}).values())
        others = sum(len(u.clusters) for u in self.units if u.name not in (self._risks or {}))
        share = len(unit.clusters) / max(others, 1)
        return {gate: share * (loss - sum(risk.get(gate, 0.0) for risk in told)) for gate, loss in whole.items()}

    def _saved(self, unit: Unit, low: str, high: str) -> dict[str, float]:
        """What moving a unit up from one level to another is predicted to save, by gate."""
        share = self._left(unit, low) - self._left(unit, high)
        return {gate: share * loss for gate, loss in self._risk(unit).items()}

    def _left(self, unit: Unit, level: str) -> float:
        """The part of a unit's cost that a level leaves."""
        if level == DENSE:
            return 0.0
        wider = _WIDER_LEAVES if level == WIDE or (level == WGRAD and WIDE in unit.levels) else 1.0
        return wider * (1 - self._wgrad_share if level == WGRAD else 1.0)

    def _known(self, setting: Setting) -> bool:
        return self._key(setting) in self._measured

    def _key(self, setting: Setting) -> _Key:
        return tuple(
            sorted((name, level) for unit, level in zip(self.units, setting, strict=True) for name in unit.layers)
        )


def _moved(setting: Setting, index: int, level: str) -> Setting:
    return (*setting[:index], level, *setting[index + 1 :])
