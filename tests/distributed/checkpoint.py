"""What the ranks of the checkpoint tests run: training, saving and resuming on other numbers of ranks. Run by path."""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from narrowgate.precision import share_amaxes
from narrowgate.recipes import Recipe, RecipeState, apply_recipe, recipe_state
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

#: How the optimizer's moments are stored.
STATES = ("bf16+sr", "fp8_e4m3/1x128+sr")
STEPS = 2


def recipe(state: str, *, name: str = "saved", grad: str = "fp8_e5m2+delayed(3)+sr", gather: str = "bf16") -> Recipe:
    """Delayed scales and stochastic rounding, so that every kind of state decides on the bits of a step."""
    rule = {
        "layers": ["0", "2"],
        "fprop": {"input": "fp8_e4m3+delayed(3)", "weight": "fp8_e4m3"},
        "dgrad": {"grad": grad, "weight": "fp8_e4m3"},
        "wgrad": {"grad": grad, "input": "fp8_e4m3+delayed(3)"},
    }
    parts = {"shards": {"all_gather": gather}, "optimizer": {"state": state}}
    return Recipe.from_dict({"recipe": name, "rules": [rule], **parts})


def plain() -> nn.Sequential:
    """A model without recipe: 97 rows shard unevenly, and end in the middle of a block's draws."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(130, 97), nn.GELU(), nn.Linear(97, 64), nn.Linear(64, 8))


def build(state: str, mesh: Any = None, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """The model with its recipe, sharded where there is a mesh, and its optimizer."""
    model: Any = plain()
    plan = apply_recipe(model, recipe(state, **options), seed=5)
    if mesh is not None:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        share_amaxes(model)
    return model, plan.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, steps: int = STEPS) -> list[Tensor]:
    """Losses of steps ``first`` and on; all ranks see the same rows, whose mean over ranks is exact."""
    losses: list[Tensor] = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(32, 130, generator=generator), torch.randn(32, 8, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def everything(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that decides on the next step, put together from all ranks."""
    numbered = optimizer.state_dict()["state"]
    return {
        "model": {name: whole(value) for name, value in model.state_dict().items()},
        "optimizer": {number: {k: whole(v) for k, v in state.items()} for number, state in numbered.items()},
        "recipe": recipe_state(model),
    }


def whole(x: Tensor) -> Tensor:
    """A DTensor put together, or a tensor itself."""
    full = getattr(x, "full_tensor", None)
    return (x if full is None else full()).detach().clone()


def save(model: Any, optimizer: torch.optim.Optimizer, path: Path, **options: Any) -> None:
    """Model, optimizer and, where it has one, the recipe's state."""
    weights, states = get_state_dict(model, optimizer)
    parts: dict[str, Any] = {"model": weights, "optimizer": states}
    if options.pop("with_recipe", True):
        parts["recipe"] = RecipeState(model)
    state_dict_saver.save(parts, checkpoint_id=str(path), **options)


def load(model: Any, optimizer: torch.optim.Optimizer, path: Path, **options: Any) -> None:
    """What :func:`save` saved, onto these ranks."""
    weights, states = get_state_dict(model, optimizer)
    parts: dict[str, Any] = {"model": weights, "optimizer": states}
    if options.pop("with_recipe", True):
        parts["recipe"] = RecipeState(model)
    state_dict_loader.load(parts, checkpoint_id=str(path), **options)
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])


def _stage(number: int, mesh: Any, folder: Path) -> dict[str, Any]:
    """Stage 0 starts; stages 1 and 2 take up what the one before saved, on another number of ranks."""
    found: dict[str, Any] = {}
    for index, state in enumerate(STATES):
        model, optimizer = build(state, mesh)
        if number > 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            load(model, optimizer, folder / f"{number - 1}.{index}")
        losses = train(model, optimizer, number * STEPS)
        save(model, optimizer, folder / f"{number}.{index}")
        found[state] = {"losses": losses, **everything(model, optimizer)}
    if number == 2:
        found |= _elsewhere(folder)
        model, optimizer = build(STATES[0], mesh)
        load(model, optimizer, folder / "plain", with_recipe=False)
        found["from_plain"] = everything(model, optimizer)
        other, optimizer = build(STATES[0], mesh, name="here", grad="fp8_e4m3+delayed(3)+sr")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load(other, optimizer, folder / "0.0")
        found["warnings"] = [str(entry.message) for entry in caught if entry.category is UserWarning]
    return found


def _elsewhere(folder: Path) -> dict[str, Any]:
    """Replicas of shards, and weights that travel as codes: stepped, saved, and taken up by another such model."""
    found: dict[str, Any] = {}
    for case, shape, gather in (("replicas", (2, 1), "bf16"), ("codes", (1, 2), "fp8_e4m3")):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
        model, optimizer = build(STATES[1], mesh, gather=gather)
        train(model, optimizer, 0)
        save(model, optimizer, folder / case)
        model, optimizer = build(STATES[1], mesh, gather=gather)
        load(model, optimizer, folder / case)
        losses = train(model, optimizer, STEPS)
        found[case] = {"losses": losses, **everything(model, optimizer)}
    return found


def rank(rank: int, number: int, ranks: int, folder: Path) -> None:
    """Run one stage; rank 0 leaves what it found."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=ranks, timeout=timedelta(seconds=20)
    )
    found = _stage(number, init_device_mesh("cpu", (ranks,)), folder)
    if rank == 0:
        torch.save(found, folder / f"stage{number}.pt")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    """Two ranks, then one, then two, in processes forked from this one, which has imported what they need."""
    torch.set_num_threads(1)
    import_module("torch._dynamo")  # FSDP2 imports it, for more than a second in every rank
    model = plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, 0)
    save(model, optimizer, folder / "plain", with_recipe=False, no_dist=True)
    build(STATES[0])
    for number, ranks in enumerate((2, 1, 2)):
        start_processes(rank, (number, ranks, folder), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
