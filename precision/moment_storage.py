"""What an optimizer with lowered moments knows of them: how they are stored, and the keys of their random bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .errors import NarrowgateError
from .moments import MOMENTS, Place, local, place_of
from .spec import Spec
from .state_formats import stored_format
from .stochastic import call_key, stream_key

#: Where an optimizer keeps its :class:`Storage`.
STORAGE = "_narrowgate_storage"


class Storage:
    """How an optimizer's moments are stored, and under which names their random bits are drawn."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self.spec, self.seed = spec, seed
        self.names: dict[Tensor, str] = {}
        self._keys: dict[Tensor, Tensor] = {}
        self._places: dict[Tensor, Place] = {}
        #: Whose step did something else to moments than one fused call does.
        self.apart: set[Tensor] = set()

    def learn(self, groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str]) -> None:
        """Name the parameters of ``groups``: as ``names`` has it, else the optimizer, else by their place in it.

        Raises:
            NarrowgateError: one is not FP32.
        """
        for number, group in enumerate(groups):
            given = group.get("param_names")
            for index, parameter in enumerate(group["params"]):
                if parameter not in self.names:
                    own = given[index] if given else f"{number}.{index}"
                    self.names[parameter] = names.get(parameter, own)
                if parameter.dtype != torch.float32 and self.spec.format != "fp32":
                    raise NarrowgateError(
                        f"'{self.names[parameter]}': found {parameter.dtype}, expected FP32 parameters for optimizer "
                        f"state in {self.spec}"
                    )

    def stored(self, parameter: Tensor) -> Spec | None:
        """How the parameter's moments are stored; None where they stay FP32."""
        return stored_format(tuple(parameter.shape), self.spec)

    def place(self, parameter: Tensor) -> Place:
        """Which part of the parameter is here."""
        known = self._places.get(parameter)
        if known is None:
            known = self._places[parameter] = place_of(parameter, self.names[parameter], self.spec)
        return known

    def key(self, parameter: Tensor) -> Tensor:
        """int64 [moments], on the parameter's device: keys of the streams of its moments."""
        device = local(parameter).device
        known = self._keys.get(parameter)
        if known is None or known.device != device:
            name = self.names[parameter]
            streams = [stream_key(self.seed, name, "optimizer", moment) for moment in MOMENTS]
            known = self._keys[parameter] = torch.tensor(streams, dtype=torch.int64, device=device)
        return known


def storage_of(optimizer: Optimizer) -> Storage:
    """Return what a lowered optimizer keeps; it has one from :func:`narrowgate.precision.lower_state` on."""
    return optimizer.__dict__[STORAGE]


def keys_of_steps(optimizer: Optimizer, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """int64 [moments] by parameter: the keys of the step that each has just done."""
    devices: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        devices.setdefault(local(parameter).device, []).append(parameter)
    found: dict[Tensor, Tensor] = {}
    for alike in devices.values():
        steps = [torch.as_tensor(optimizer.state[parameter]["step"]) for parameter in alike]
        keys = call_keys(storage_of(optimizer), alike, steps)
        # Each on 16 bytes of its own: kernels launch fast on aligned addresses only.
        keys = torch.stack((keys, keys), -1)[..., 0]
        found |= dict(zip(alike, keys.unbind(), strict=True))
    return found


def call_keys(storage: Storage, parameters: Sequence[Tensor], steps: Sequence[Tensor]) -> Tensor:
    """int64 [n, moments]: keys of n parameters of one device, each with the number of its step, of any shape."""
    device = local(parameters[0]).device
    counted = torch.stack([local(step).reshape(()) for step in steps]).to(device=device, dtype=torch.int64)
    keys = call_key(torch.stack([storage.key(parameter) for parameter in parameters]), counted[:, None])
    assert isinstance(keys, Tensor)
    return keys
