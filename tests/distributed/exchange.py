"""What two ranks do for the tests of the embedding exchange, and one process in their place. Run by path."""

from __future__ import annotations

import dataclasses
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from narrowgate.models import GemConfig, GemTask, Preset, TrainingConfig
from narrowgate.models.embedding_exchange import EmbeddingExchange, place_tables, shard_tables
from narrowgate.models.optimizers import scheduled_optimizer
from narrowgate.models.presets import SyntheticConfig
from narrowgate.precision.wire import WireCount
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

RANKS, WIDTH, STEPS = 2, 24, 2
#: By case: formats of rows and of gradients.
FORMATS = {
    "fp32": ("fp32", "fp32"),
    "bf16": ("bf16", "bf16+sr"),
    "fp8": ("fp8_e4m3/row", "bf16"),
    "fp8_both": ("fp8_e4m3/row", "fp8_e5m2/row+sr"),
    "fp8_random": ("fp8_e4m3/row+sr", "fp8_e4m3/row+pow2"),
}
#: Rows of each table. The first alone goes to the first rank, which leaves the second without any.
SIZES = {"item": 60, "user": 20, "tags": 30}
#: Table, ids of a bag or none, and rows that each rank asks for.
REQUESTS = (("item", 0, (9, 4)), ("user", 0, (5, 5)), ("tags", 3, (5, 5)), ("item", 0, (0, 7)))
ALONE = (("item", 0, (3, 6)),)

PRESET = Preset(
    name="small",
    model=GemConfig(d=16, heads=2, layers=1, max_tokens=8, fm_hidden=(32,), cross_rank=8, pffn_tokens=3,
                    head_hidden=16, dropout=0.0),
    training=TrainingConfig(batch_size=32, eval_batch_size=50, steps=8, epochs=10, lr=5e-3, table_lr=0.05),
    synthetic=SyntheticConfig(users=40, items=25, impressions=15),
)  # fmt: skip


def tables() -> dict[str, nn.Module]:
    """The same on every rank; one row holds a NaN."""
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        name: nn.EmbeddingBag(rows, WIDTH, mode="sum", padding_idx=0) if name == "tags" else nn.Embedding(rows, WIDTH)
        for name, rows in SIZES.items()
    }
    made["user"].get_parameter("weight").data[7, 3] = torch.nan
    return made


def ids(request: int, requests: Any, step: int) -> list[Tensor]:
    """Of each rank. User 7 is asked for by the second rank alone."""
    table, bag, counts = requests[request]
    generator = torch.Generator().manual_seed(100 * step + request)
    found = [torch.randint(SIZES[table], (n, bag) if bag else (n,), generator=generator) for n in counts]
    if table == "user":
        found[0][found[0] == 7], found[1][0] = 8, 7
    return found


def gradient(request: int, rows: int, step: int) -> Tensor:
    """Of all ranks' rows of a request: of very different sizes."""
    generator = torch.Generator().manual_seed(1000 + 100 * step + request)
    sizes = torch.exp(4 * torch.randn(rows, 1, generator=generator))
    return torch.randn(rows, WIDTH, generator=generator) * sizes


def exchange(formats: tuple[str, str], requests: Any = REQUESTS, rank: int | None = None) -> dict[str, Any]:
    """Look up and send back gradients; as one process where ``rank`` is None, with the rows of all ranks."""
    every = tables()
    names = dict.fromkeys(name for name, *_ in requests)
    owners = place_tables({name: SIZES[name] * WIDTH for name in names}, RANKS if rank is not None else 1)
    own = {name: every[name] for name in names if owners[name] == (rank or 0)}
    sender = EmbeddingExchange(owners, WIDTH, forward=formats[0], backward=formats[1], seed=3)
    anchor = torch.zeros(0, requires_grad=True)
    found: dict[str, Any] = {"owners": owners, "rows": [], "gradients": []}
    for step in range(STEPS):
        asked, wanted = [], []
        for i, (name, _, counts) in enumerate(requests):
            parts = ids(i, requests, step)
            total = gradient(i, sum(counts), step)
            asked.append((name, torch.cat(parts) if rank is None else parts[rank]))
            # Each rank's mean is over its own rows, a single process's over all.
            wanted.append(total / RANKS if rank is None else total.split(counts)[rank])
        with WireCount() as wire:
            rows = sender.look_up("features", asked, own, anchor)
            torch.autograd.backward(rows, wanted)
        found["rows"].append([x.detach() for x in rows])
        found["gradients"].append({name: table.get_parameter("weight").grad for name, table in own.items()})
        found["wire"] = {"given": {dtype: n for (name, dtype), n in wire.bytes.items() if name == "all_to_all" and n},
                         "all_gather": wire.total("all_gather"), "calls": dict(wire.calls)}  # fmt: skip
        for table in own.values():
            table.zero_grad()
    return found


def train(formats: tuple[str, str] | None, rank: int | None = None, steps: int = 3) -> dict[str, Any]:
    """Train the model; as one process on both ranks' batches where ``rank`` is None, and whole without formats."""
    task = GemTask.open(dataclasses.replace(PRESET), "synthetic")
    torch.manual_seed(0)
    model = task.build_model()
    names = {name for name, _ in model.named_parameters()}
    if formats is not None:
        shard_tables(model, forward=formats[0], backward=formats[1])
    optimizer = scheduled_optimizer(model, 8, PRESET.training)
    ours = {name for name, _ in model.named_parameters()}
    # What every rank has is averaged by DDP, which leaves tables alone.
    forward = model if rank is None else DistributedDataParallel(model)
    batches = [list(task.train_batches(seed))[:steps] for seed in range(RANKS)]
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        mine = [rank] if rank is not None else list(range(RANKS))
        loss = torch.stack([task.loss(forward, batches[r][step]) for r in mine]).mean()
        loss.backward()
        loss = loss.detach()
        if rank is not None:
            dist.all_reduce(loss)
            loss /= RANKS
        losses.append(float(loss))
        optimizer.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "state": state, "missing": names - ours}


def rank(rank: int, folder: Path) -> None:
    """Run everything as one of the ranks, and leave what it found."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=20)
    )
    found: dict[str, Any] = {name: exchange(formats, rank=rank) for name, formats in FORMATS.items()}
    found["alone"] = exchange(FORMATS["fp8_both"], ALONE, rank)
    found["trained"] = {name: train(FORMATS[name], rank) for name in ("fp32", "fp8_both")}
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    start_processes(rank, (Path(sys.argv[1]),), nprocs=RANKS, start_method="fork")
