"""What two ranks do for the tests of torchrec's pooled embeddings under a recipe. Run by path."""

# torchrec is no dependency.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from narrowgate.models.torchrec_codecs import torchrec_codecs
from narrowgate.precision.wire import WireCount
from narrowgate.recipes import Recipe
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

RANKS, ROWS, IDS = 2, 6, 20
#: Of each table; the codecs' width divides both.
WIDTHS, WIDTH = (16, 32), 16
#: By case: formats of rows and of gradients; None: torchrec's own FP32.
FORMATS = {
    "torchrec": None,
    "fp32": ("fp32", "fp32"),
    "bf16": ("bf16", "bf16"),
    "fp8": ("fp8_e4m3/row", "fp8_e5m2/row"),
    "fp8_random": ("fp8_e4m3/row", "fp8_e5m2/row+sr"),
}
#: Those whose tables are also split by rows, whose parts torchrec adds up on their way.
SPLIT = ("torchrec", "fp32", "bf16", "fp8")


def weights(rank: int) -> Tensor:
    """What a rank's loss multiplies its embeddings by: their gradients."""
    return torch.randn(ROWS, sum(WIDTHS), generator=torch.Generator().manual_seed(9 + rank))


def train(formats: tuple[str, str] | None, rank: int, *, split: bool = False) -> dict[str, Any]:
    """One step of two tables, each on a rank or ``split`` by rows: pooled rows, and gradients of what this rank has."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    codecs = None
    if formats is not None:
        tables = {"forward": formats[0], "backward": formats[1]}
        rules = [{"layers": "**", "all": "bf16"}]
        codecs = torchrec_codecs(
            Recipe.from_dict({"recipe": "x", "rules": rules, "shards": {"tables": tables}}), width=WIDTH
        )
    torch.manual_seed(0)
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=width, num_embeddings=IDS, feature_names=[f"f{i}"])
            for i, width in enumerate(WIDTHS)
        ]
    )
    model = nn.ModuleDict({"bags": bags})
    sharder: Any = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    where = {f"t{i}": row_wise() if split else table_wise(rank=i) for i in range(RANKS)}
    plan = construct_module_sharding_plan(
        bags, where, sharder, local_size=RANKS, world_size=RANKS, device_type="cpu"
    )  # fmt: skip
    sharded = DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu"),
        plan=ShardingPlan({"bags": plan}), sharders=[sharder],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5 + rank)
    lengths = torch.randint(0, 4, (RANKS * ROWS,), generator=generator)
    ids = torch.randint(0, IDS, (int(lengths.sum()),), generator=generator)
    with WireCount() as wire:
        pooled = sharded.module["bags"](KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], ids, lengths)).values()
        (pooled * weights(rank)).sum().backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in sharded.parameters() if p.grad is not None])
    return {"pooled": pooled.detach(), "gradient": gradient, "bytes": dict(wire.bytes)}


def refused(formats: tuple[str, str], rank: int) -> str:
    """What is said where torchrec differentiates what codecs make of rows."""
    from torchrec.distributed.comm_ops import set_use_sync_collectives

    set_use_sync_collectives(True)
    try:
        train(formats, rank)
    except ValueError as error:
        return str(error)
    finally:
        set_use_sync_collectives(False)
    return ""


def rank(rank: int, folder: Path) -> None:
    """Run every case as one of the ranks, and leave what it found."""
    logging.disable()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=20)
    )
    found: dict[str, Any] = {name: train(formats, rank) for name, formats in FORMATS.items()}
    found["split"] = {name: train(FORMATS[name], rank, split=True) for name in SPLIT}
    found["refused"] = refused(("fp8_e4m3/row", "bf16"), rank)
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    start_processes(rank, (Path(sys.argv[1]),), nprocs=RANKS, start_method="fork")
