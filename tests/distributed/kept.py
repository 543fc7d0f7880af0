"""Codes of shards that are made once a step: what :mod:`training`'s ranks do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from narrowgate.precision.kept_shards import forget_shard_codes, keep_shard_codes
from torch import Tensor, nn
from training import CASES, batch, optimizer_of, sharded, train  # pyright: ignore[reportMissingImports]

#: What puts other tensors into a model's Parameters; FSDP2 then moves rows that it pads, on ranks that it pads alone.
MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "device": lambda model: model.to(next(model.parameters()).device),
    "loading": lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}),
    "dtype": lambda model: model.double().float(),
}


def kept(mesh: Any) -> dict[str, Any]:
    """Codes that are made once a step: of two trainings, and after a write that nothing can see."""
    found: dict[str, Any] = {}
    for case in ("tensor", "row_uneven", "block_split", "nvfp4_split"):
        model = sharded(case, mesh)
        optimizer = optimizer_of(model)
        found["layers"] = sorted(keep_shard_codes(optimizer))
        found[case] = train(model, case, optimizer)
    x, _ = batch(CASES["row_uneven"][3][0], 0)
    outputs = []
    for lasting in (True, False):
        model = sharded("row_uneven", mesh)
        if lasting:
            keep_shard_codes(optimizer_of(model))
        outputs.append(model(x).detach())
        model.reshard()
        with torch.no_grad():  # below autograd, as a collective or a load into a state_dict writes
            model.state_dict()["0.weight"].mul_(2)
        if lasting:
            forget_shard_codes()
        outputs.append(model(x).detach())
    return found | {"outputs": outputs, "moved": {name: _moved(mesh, move) for name, move in MOVES.items()}}


def _moved(mesh: Any, move: Callable[[nn.Module], Any]) -> tuple[Tensor, list[bool]]:
    """What a model computes whose codes are forgotten after a move, and whether a step later they last."""
    model, (x, y) = sharded("tensor_uneven", mesh), batch(CASES["tensor_uneven"][3][0], 0)
    optimizer = optimizer_of(model)
    keep_shard_codes(optimizer)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    move(model)
    forget_shard_codes()
    out = model(x)
    nn.functional.mse_loss(out, y).backward()
    optimizer.step()
    weights = [model.get_parameter(f"{layer}.weight") for layer in (0, 2)]
    return out.detach(), [weight._local_tensor._known.lasting for weight in weights]
