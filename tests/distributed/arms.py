"""What two ranks do for the tests of arms whose embedding tables lie on one rank each. Run by path."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from narrowgate.gates.checked_task import CheckedTask
from narrowgate.gates.rank_arm import RankArm
from narrowgate.gates.rank_data import RankTask
from narrowgate.gates.ranks import Place, Ranks, join, meet
from narrowgate.gates.sharded import switch_collectives, without_wire
from narrowgate.models import GemConfig, GemTask, Preset, TrainingConfig
from narrowgate.models.embedding_exchange import shard_tables
from narrowgate.models.presets import SyntheticConfig
from narrowgate.precision.wire import WireCount
from narrowgate.recipes import Recipe, Tables
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

RANKS, STEPS, LIMIT = 2, 3, 20.0
RECIPE = """
recipe: r
rules:
  - {layers: "layers.**", fprop: fp8_e4m3/row}
"""
GATHERED = """
recipe: g
rules:
  - {layers: "layers.**", fprop: fp8_e4m3, dgrad: fp8_e4m3}
shards: {all_gather: fp8_e4m3}
"""
TABLES = Tables(forward="fp8_e4m3/row+sr", backward="fp8_e5m2/row+sr")
TRAINING = TrainingConfig(batch_size=32, eval_batch_size=50, steps=8, epochs=10, lr=5e-3)
PRESET = Preset(
    name="small",
    model=GemConfig(d=16, heads=2, layers=1, max_tokens=8, fm_hidden=(32,), cross_rank=8, pffn_tokens=3,
                    head_hidden=16, dropout=0.0),
    training=TRAINING,
    synthetic=SyntheticConfig(users=40, items=25, impressions=15),
)  # fmt: skip


def task(table_lr: float | None) -> CheckedTask:
    """Adam on everything, or with rowwise Adagrad on tables."""
    return CheckedTask(GemTask.open(replace(PRESET, training=replace(TRAINING, table_lr=table_lr)), "synthetic"))


def small() -> GemTask:
    """A task for gates."""
    return GemTask.open(PRESET, "synthetic", steps=40)


def ignoring() -> GemTask:
    """What some layer on the way might do: it takes the formats, and sends rows as before."""
    import narrowgate.gates.rank_arm as rank_arm

    rank_arm.shard_tables = lambda model, **formats: shard_tables(model, forward="bf16", backward="bf16")
    return small()


def arm(ranks: Ranks, tables: Tables | None, *, table_lr: float | None = None, recipe: bool = True) -> RankArm:
    view = RankTask.of(task(table_lr), ranks.rank, ranks.count)
    return RankArm(
        view.task, torch.device("cpu"), Recipe.from_yaml(RECIPE) if recipe else None, None, STEPS, observe_every=1,
        ranks=ranks, view=view, tables=tables,
    )  # fmt: skip


def trained(one: RankArm, seed: int) -> dict[str, Any]:
    """Losses, norms, weights (of tables those that are here) and what an exchange drew."""
    result = one.train(seed, lambda step, steps, loss: None)
    weights = {name: getattr(p, "full_tensor", p.detach)().detach().clone() for name, p in
               one.module_in_place().named_parameters()}  # fmt: skip
    return {
        "losses": result.losses.tolist(), "norms": result.gradient_norms.tolist(), "logits": result.logits,
        "weights": weights, "idle": result.observed.without_gradient,
        "draws": None if one.exchange is None else dict(one.exchange.draws),
    }  # fmt: skip


def stepped(ranks: Ranks) -> dict[str, Any]:
    """What steps send, with the wire, without it, and with it again; and what the optimizer of tables holds."""
    one = arm(ranks, TABLES, table_lr=0.05)
    one.steady = True
    held: list[Any] = []
    made = one._made_optimizer
    one._made_optimizer = lambda: held.append(made()) or held[-1]  # type: ignore[method-assign]
    step, batch = one.stepper(0), next(iter(one.batches(0)[0]))
    assert one.exchange is not None
    switches = (*switch_collectives(one.module_in_place()), one.exchange)
    sent = {}
    for name, run in (("first", lambda i: step(batch)), ("local", without_wire(lambda i: step(batch), switches)),
                      ("again", lambda i: step(batch))):  # fmt: skip
        with WireCount() as wire:
            run(0)
        sent[name] = {f"{collective} {dtype}": count for (collective, dtype), count in wire.bytes.items() if count}
    with one.eagerly():
        before = dict(one.exchange.draws)
        step(batch)
        within = dict(one.exchange.draws)
    names = {id(p): name for name, p in one.module_in_place().named_parameters()}
    rowwise = [names[id(p)] for p, state in held[0].state.items() if "sum" in state]
    kinds = [{type(p).__name__ for p in group["params"]} for group in held[0].param_groups]
    return {"sent": sent, "rowwise": rowwise, "kinds": kinds, "draws": (before, within, dict(one.exchange.draws)),
            "owners": one.exchange.owners}  # fmt: skip


def gathered(ranks: Ranks, recipe: str) -> dict[str, Any]:
    """Calls of steps whose gathers have scales that span ranks: with the wire, without it, and with it again."""
    view = RankTask.of(task(None), ranks.rank, ranks.count)
    one = RankArm(view.task, torch.device("cpu"), Recipe.from_yaml(recipe), None, STEPS, observe_every=1,
                  ranks=ranks, view=view)  # fmt: skip
    one.steady = True
    step, batch = one.stepper(0), next(iter(one.batches(0)[0]))
    switches = switch_collectives(one.module_in_place())
    step(batch)
    sent = {}
    for name, run in (("first", lambda i: step(batch)), ("local", without_wire(lambda i: step(batch), switches)),
                      ("again", lambda i: step(batch))):  # fmt: skip
        with WireCount() as wire:
            run(0)
        sent[name] = {collective: count for collective, count in wire.calls.items() if count}
    return sent


def rank(rank: int, folder: Path, port: str) -> None:
    """Run everything as one of the ranks, and leave what it found."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place = Place.of_environment()
    assert place is not None
    watch, store = meet(place, LIMIT, lambda why, code: os._exit(4))
    ranks = join(place, "cpu", LIMIT, watch, store)
    coded = arm(ranks, TABLES)
    found: dict[str, Any] = {"coded": [trained(coded, seed) for seed in (0, 1, 0)]}
    found["plain"] = trained(arm(ranks, Tables(), recipe=False), 0)
    found["whole"] = trained(arm(ranks, None, recipe=False), 0)
    for name, tables in (("rowwise", Tables()), ("rowwise whole", None)):
        found[name] = trained(arm(ranks, tables, table_lr=0.05, recipe=False), 0)
    found["stepped"] = stepped(ranks)
    found["gathered"] = [gathered(ranks, GATHERED + more) for more in ("", "optimizer: {keep_weights: true}\n")]
    # Two replicas of one shard each.
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replica", "shard"))
    replicas = Ranks(place, mesh, ranks._host, watch, LIMIT)
    found["replicas"] = trained(arm(replicas, Tables(), recipe=False), 0)
    torch.save(found, folder / f"rank{rank}.pt")
    ranks.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    start_processes(rank, (Path(sys.argv[1]), sys.argv[2]), nprocs=RANKS, start_method="fork")
