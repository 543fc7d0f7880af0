"""Which kept weights an optimizer's step may write the codes of, and when those count."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .layer import layer_state, live_layers
from .weight_codes import WeightCodes, version_of


class StepCodes:
    """What one optimizer step writes of the weights that it updates."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """Find those of ``parameters`` whose kept codes have a scale that is known before the step."""
        wanted = {id(parameter) for parameter in parameters}
        found: dict[Tensor, list[WeightCodes]] = {}
        for layer in live_layers():
            weight, state = layer._parameters.get("weight"), layer_state(layer)
            if weight is None or id(weight) not in wanted or state.kept is None:
                continue
            found.setdefault(weight, []).append(state.kept)
            # Ranks that share amaxes do not know the scale before they have talked.
            if state.kept.history is None or state.group is not None or weight.shape[1] % 8:
                wanted.discard(id(weight))
        # Layers that share a weight have codes and a history each.
        self._kept = {w: kept[0] for w, kept in found.items() if len(kept) == 1 and id(w) in wanted}
        self._written: list[tuple[Tensor, int]] = []

    def __len__(self) -> int:
        """How many weights' codes the step may write."""
        return len(self._kept)

    def of(self, parameter: Tensor) -> WeightCodes | None:
        """The parameter's codes, where the step may write them."""
        return self._kept.get(parameter)

    def wrote(self, parameter: Tensor) -> None:
        """Note that the codes are those of the parameter as it is now."""
        self._written.append((parameter, version_of(parameter)))

    def finish(self) -> None:
        """Let what was written count, when the step is done and its hooks come next."""
        for parameter, version in self._written:
            self._kept[parameter].stepped(parameter, version)
