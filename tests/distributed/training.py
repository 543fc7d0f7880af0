"""What the ranks of the distributed tests run: a small model, trained with quantized shards. Run by path.

``training.py FOLDER`` runs on the CPU over Gloo; ``training.py FOLDER cuda`` runs :data:`ON_GPUS` over NCCL.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from narrowgate.precision import QuantizedTensor, Spec, operands, quantize
from narrowgate.precision.gathered import CodedWeight, GatheredWeight
from narrowgate.precision.joint_amaxes import reduce_amaxes
from narrowgate.precision.reduction import reduction_errors
from narrowgate.precision.wire import WireCount
from narrowgate.recipes import Recipe, apply_recipe, recipe_state
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing.spawn import start_processes

#: By case: how weights are multiplied and gathered, what else the recipe says of shards, and the layers' widths.
#: Four ranks leave one without rows of a layer of three; 300 and 257 split 128-row blocks and shard unevenly, 57 splits
#: those of 32 and 16.
CASES: dict[str, tuple[str, str, dict[str, Any], tuple[int, int, int]]] = {
    "tensor": ("fp8_e4m3", "fp8_e4m3", {}, (64, 96, 32)),
    "tensor_uneven": ("fp8_e4m3", "fp8_e4m3", {}, (40, 257, 3)),
    "tensor_for_rows": ("fp8_e4m3/row", "fp8_e4m3", {}, (64, 50, 32)),
    "row": ("fp8_e4m3/row", "fp8_e4m3/row", {"requantize": True}, (64, 96, 32)),
    "row_uneven": ("fp8_e4m3/row", "fp8_e4m3/row", {"requantize": True}, (40, 57, 3)),
    "row_blocks": ("fp8_e4m3/1x128", "fp8_e4m3/1x128", {"requantize": True}, (200, 57, 3)),
    "block": ("fp8_e4m3/128x128", "fp8_e4m3/128x128", {}, (130, 512, 512)),
    "block_split": ("fp8_e4m3/128x128", "fp8_e4m3/128x128", {}, (130, 300, 257)),
    "smaller_than_the_mesh": ("fp8_e4m3/128x128", "fp8_e4m3/128x128", {}, (16, 1, 3)),
    "bf16": ("fp8_e4m3", "bf16", {}, (64, 96, 32)),
    "mx": ("mxfp8/32x32", "mxfp8/32x32", {}, (40, 128, 64)),
    "mx_split": ("mxfp4/32x32+rceil", "mxfp4/32x32+rceil", {}, (41, 57, 3)),
    "mx_fp6": ("mxfp6_e2m3", "mxfp6_e2m3", {"requantize": True}, (40, 57, 3)),
    "nvfp4": ("nvfp4/16x16", "nvfp4/16x16", {}, (41, 96, 64)),
    "nvfp4_split": ("nvfp4/16x16", "nvfp4/16x16", {}, (41, 57, 3)),
}
#: By case of a low-precision reduction: its format, the layers' widths, the policy's reduce_dtype, a factor in place of
#: the mean, and what each of a step's two micro-batches does (``once``: there is one).
REDUCED: dict[str, tuple[str, tuple[int, int, int], torch.dtype | None, float | None, str]] = {
    "reduce_tensor": ("fp8_e5m2", (40, 57, 3), None, None, "once"),
    "reduce_row": ("fp8_e4m3/row+sr", (40, 57, 3), None, None, "once"),
    "reduce_row_blocks": ("fp8_e5m2/1x128+sr", (200, 33, 16), None, None, "accumulate"),
    "reduce_block": ("fp8_e4m3/128x128+sr", (130, 300, 9), None, None, "once"),
    "reduce_bf16": ("bf16", (40, 57, 3), None, 3.0, "once"),
    "reduce_bf16_sr": ("bf16+sr", (40, 57, 3), None, None, "each"),
    "reduce_into_bf16": ("fp8_e5m2/row", (40, 57, 3), torch.bfloat16, None, "once"),
    "reduce_into_fp16": ("fp8_e4m3/1x16+sr", (40, 57, 3), torch.float16, None, "once"),
}
STEPS, ROWS = 3, 32
_LOWERED = ("0.weight", "2.weight")


def build(case: str, device: str = "cpu") -> nn.Sequential:
    """The case's model with its recipe, the same on every rank and in the test's own process."""
    model = _layers(CASES[case][3], device)
    apply_recipe(model, Recipe.from_dict(recipe(case)))
    return model


def _layers(widths: tuple[int, int, int], device: str) -> nn.Sequential:
    width, hidden, out = widths
    torch.manual_seed(0)
    with torch.device("meta" if device == "meta" else "cpu"):  # the CPU's values on every device
        model = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, out), nn.Linear(out, 8))
    return model.to(device)


def recipe(case: str) -> dict[str, Any]:
    """The case's recipe: the first and third layer multiply and gather as it says."""
    weight, gather, shards, _ = CASES[case]
    own_blocks = weight.startswith(("mx", "nvfp4"))
    other = weight.partition("/")[0] if own_blocks else "fp8_e4m3/1x128" if "128" in weight else "fp8_e4m3/row"
    rule = {
        "layers": ["0", "2"],
        "fprop": {"input": other, "weight": weight},
        "dgrad": {"grad": other, "weight": weight},
        "wgrad": {"grad": "fp8_e5m2/row", "input": "fp8_e4m3/row"},
    }
    return {"recipe": case, "rules": [rule], "shards": {"all_gather": gather, **shards}}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that works element by element, so that sharding changes no bit.

    Not left to PyTorch: on a GPU it takes the fused loops for DTensors and not for the subclass that an unsharded
    weight is, and these two divide by a bias correction in other ways.
    """
    return torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)


def batch(width: int, step: int) -> tuple[Tensor, Tensor]:
    """Rows that all ranks share: the mean of equal gradients over 2 or 4 ranks is exact."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, width, generator=generator), torch.randn(ROWS, 8, generator=generator)


def train(model: nn.Module, case: str, optimizer: torch.optim.Optimizer, *, reduce: bool = False) -> dict[str, Any]:
    """Losses of all steps, the gradients of the last, and what the first multiplied and sent.

    Of what was multiplied: the weights' gathered codes, in the order of their use.
    """
    losses: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    multiplied: list[Codes] = []
    sent = WireCount()
    for step in range(STEPS):
        x, y = (part.to(_device(model)) for part in batch(CASES[case][3][0], step))
        with sent if step == 0 else nullcontext(), noted_codes(multiplied) if step == 0 else nullcontext():
            loss = (model(x) - y).square().mean()
            loss.backward()
        losses.append(loss.detach())
        if step == STEPS - 1:
            gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        if reduce:
            reduce_amaxes(model)
    collectives = ("all_gather", "reduce_scatter", "all_reduce")
    wire = {"calls": dict(sent.calls), **{name: sent.total(name) for name in collectives}}
    return {"losses": losses, "gradients": gradients, "wire": wire, "multiplied": multiplied}


#: A weight's operand: its contraction axis, codes as bytes, scales, and NVFP4's scale of the tensor.
Codes = tuple[int, Tensor, Tensor, Tensor | None]


def codes_of(operand: QuantizedTensor) -> Codes:
    """An operand as the tensors that it is made of."""
    assert operand.scale is not None
    return operand.dim, operand.data.clone().view(torch.uint8), operand.scale.clone(), operand.tensor_scale


@contextmanager
def noted_codes(found: list[Codes]) -> Iterator[None]:
    """Note each operand that a layer takes from a gathered weight as it is."""
    taken = operands.operand_of

    def operand_of(weight: CodedWeight, spec: Spec, dim: int, after: Tensor | None = None) -> QuantizedTensor | None:
        codes = taken(weight, spec, dim, after)
        if codes is not None and isinstance(weight, GatheredWeight):
            found.append(codes_of(codes))
        return codes

    operands.operand_of = operand_of
    try:
        yield
    finally:
        operands.operand_of = taken


def whole_codes(case: str, device: str = "cpu") -> list[Codes]:
    """What :func:`train` should note of a case's first step, each weight quantized whole by the reference."""
    _, gather, shards, widths = CASES[case]
    spec = Spec.parse(gather)
    values = [value.detach() for name, value in _layers(widths, device).named_parameters() if name in _LOWERED]
    # Forward both; backward the later one alone: the model's input takes no gradient.
    uses = [(value, 1) for value in values] + ([] if "requantize" in shards else [(values[1], 0)])
    return [codes_of(quantize(value, spec, dim=dim)) for value, dim in uses]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def whole(x: Tensor) -> Tensor:
    """A DTensor put together, or a tensor itself."""
    full = getattr(x, "full_tensor", None)
    return (x if full is None else full()).detach().clone()


def sharded(case: str, mesh: Any) -> Any:
    """The case's model after ``fully_shard``: the first and third layer gather by themselves."""
    model: Any = build(case, mesh.device_type)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def build_reduced(case: str, device: str = "cpu") -> nn.Sequential:
    """A model whose gradients are reduced as the case says once it is sharded."""
    model = _layers(REDUCED[case][1], device)
    apply_recipe(model, reduced_recipe(case))
    return model


def reduced_recipe(case: str) -> Recipe:
    """One low-precision layer, so that its gradients are among those of others."""
    rules = [{"layers": "0", "all": "fp8_e4m3/row"}]
    return Recipe.from_dict({"recipe": case, "rules": rules, "shards": {"reduce_scatter": REDUCED[case][0]}})


def loss_of(model: nn.Module, case: str, step: int, worker: int, part: int) -> Tensor:
    """The loss of one of a worker's micro-batches, which no other worker has."""
    x, y = (half.to(_device(model)) for half in batch(REDUCED[case][1][0], 100 * step + 10 * worker + part))
    return (model(x) - y).square().mean()


def train_reduced(case: str, mesh: Any) -> dict[str, Any]:
    """Gradients of two steps, the state after them, what the first sent, and its errors."""
    _, _, reduce_dtype, factor, parts = REDUCED[case]
    model: Any = build_reduced(case, mesh.device_type)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        if factor is not None:
            layer.set_gradient_divide_factor(factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: list[dict[str, Tensor]] = []
    sent = WireCount()
    for step in range(2):
        for part in range(1 if parts == "once" else 2):
            model.set_requires_gradient_sync(part == 1 or parts != "accumulate")
            with sent if step == 0 else nullcontext():
                loss_of(model, case, step, dist.get_rank(), part).backward()
        gradients.append({name: whole(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    calls = {name: count for name, count in sent.calls.items() if name != "all_gather"}
    found = {"gradients": gradients, "calls": calls, "sent": sent.total("all_to_all")}
    found["state"] = {name: whole(value) for name, value in model.state_dict().items()}
    found["recipe_state"] = recipe_state(model)["reductions"]
    if parts == "once":
        with reduction_errors(model) as errors:
            loss_of(model, case, 2, dist.get_rank(), 0).backward()
        found["errors"] = errors
    return found


class _Half(nn.Module):
    """Of its two layers one gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def _idle(mesh: Any) -> dict[str, Any]:
    """Steps in which some parameters of a group get no gradient: FSDP2 does not say which it reduces."""

    def step(prepare: Any) -> dict[str, Tensor]:
        model: Any = _Half()
        apply_recipe(model, Recipe.from_dict({"recipe": "r", "shards": {"reduce_scatter": "fp8_e5m2"}}))
        fully_shard(model, mesh=mesh)
        prepare(model)
        model(torch.ones(2, 8)).sum().backward()
        return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    found: dict[str, Any] = {"frozen": step(lambda model: model.idle.requires_grad_(False))}
    try:
        step(lambda model: None)
    except ValueError as error:
        found["refused"] = str(error)
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # since PyTorch 2.13
        found["filled"] = step(lambda model: model.set_reduce_scatter_unused_params(True))
    return found


def _case(case: str, mesh: Any) -> dict[str, Any]:
    model = sharded(case, mesh)
    found = train(model, case, optimizer_of(model))
    found["state"] = {name: whole(value) for name, value in model.state_dict().items()}
    return found


def _reduced(mesh: Any) -> dict[str, Any]:
    """One all-reduce for all scales of a step, until the weights are written to."""
    model = sharded("tensor", mesh)
    found = train(model, "tensor", optimizer_of(model), reduce=True)
    with WireCount() as wire:
        found["known"] = reduce_amaxes(model)
    found["reduce"] = dict(wire.calls)
    x, _ = batch(64, 0)
    with WireCount() as wire:
        before = model(x).sum()
        before.backward()
    found["step"] = dict(wire.calls)
    with torch.no_grad():
        model[0].weight.mul_(2)
    with WireCount() as wire:
        found["doubled"] = (before.detach(), model(x).sum().detach())
    found["after"] = dict(wire.calls)
    model.reshard()
    reduce_amaxes(model)
    model.state_dict()["0.weight"].to_local().mul_(2)  # behind the shard's back
    try:
        model(x)
    except ValueError as error:
        found["stale"] = str(error)
    for case in ("block_split", "nvfp4", "nvfp4_split"):
        model = sharded(case, mesh)
        found[case] = train(model, case, optimizer_of(model), reduce=True)
    return found


def _checkpoint(mesh: Any, folder: Path) -> None:
    """Two trained steps, saved by torch.distributed.checkpoint with the optimizer."""
    model = sharded("block_split", mesh)
    optimizer = optimizer_of(model)
    train(model, "block_split", optimizer)
    weights, states = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": states}, checkpoint_id=str(folder / "checkpoint"))


def _resume(mesh: Any, folder: Path) -> dict[str, Any]:
    """The checkpoint loaded onto these ranks and trained on."""
    model = sharded("block_split", mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = optimizer_of(model)
    weights, states = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": states}
    state_dict_loader.load(loaded, checkpoint_id=str(folder / "checkpoint"))
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    return train(model, "block_split", optimizer)


def _meta(mesh: Any) -> dict[str, Any]:
    """A model that never exists whole: made on the meta device, sharded, and filled from a state."""
    model = build("tensor", "meta")
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        values = build("tensor").state_dict()
        for name, parameter in model.named_parameters():
            parameter.copy_(distribute_tensor(values[name], mesh))
    return train(model, "tensor", optimizer_of(model))


def _policy(mesh: Any) -> dict[str, Any]:
    """A step under a policy that would gather BF16: the first layer's output, and dtypes."""
    model: Any = build("tensor")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    x, _ = batch(64, 0)
    model(x).float().square().mean().backward()
    dtypes = {parameter.grad.dtype for parameter in model.parameters()}
    return {"output": model[0](x).detach(), "gradients": dtypes}


def _not_finite(mesh: Any) -> dict[str, Any]:
    """One NaN, in the rows of the second rank."""
    lost = {}
    for case in ("tensor_uneven", "row_uneven", "block_split", "mx_split", "nvfp4_split"):
        model = build(case)
        with torch.no_grad():
            model.state_dict()["0.weight"][-1, 3] = torch.nan
        fully_shard(model[0], mesh=mesh)
        lost[case] = model[0](batch(CASES[case][3][0], 0)[0]).isnan().any(0)
    return lost


#: What each number of ranks does, in this order: the checkpoint of two is read by one and by four.
STAGES = {
    2: [*CASES, "reduced", "kept", "meta", "policy", "not_finite", "checkpoint", *REDUCED, "idle"],
    4: [
        "row_uneven",
        "block_split",
        "smaller_than_the_mesh",
        "mx",
        "nvfp4",
        "nvfp4_split",
        "replicas",
        "resume",
        "reduce_row",
        "reduce_block",
    ],
    1: ["tensor", "row", "block_split", "nvfp4", "resume"],
}


#: What two GPUs do.
ON_GPUS = ["tensor", "row_uneven", "block", "block_split", "mx", "nvfp4", "nvfp4_split", *REDUCED]


def rank(rank: int, ranks: int, folder: Path, device: str) -> None:
    """Run the stage of ``ranks``; rank 0 leaves what it found."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store{ranks}", rank=rank,
        world_size=ranks, timeout=timedelta(seconds=60 if device == "cuda" else 20),
    )  # fmt: skip
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    found: dict[str, Any] = {}
    for task in STAGES[ranks] if device == "cpu" else ON_GPUS:
        if task == "reduced":
            found[task] = _reduced(mesh)
        elif task == "kept":
            found[task] = import_module("kept").kept(mesh)
        elif task == "checkpoint":
            _checkpoint(mesh, folder)
        elif task == "resume":
            found[task] = _resume(mesh, folder)
        elif task == "meta":
            found[task] = _meta(mesh)
        elif task == "policy":
            found[task] = _policy(mesh)
        elif task == "not_finite":
            found[task] = _not_finite(mesh)
        elif task == "replicas":
            grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replica", "shard"))
            found[task] = {case: _case(case, grid) for case in ("tensor_uneven", "row_uneven", "nvfp4_split")}
            model = sharded("nvfp4", grid)
            found[task]["joint"] = train(model, "nvfp4", optimizer_of(model), reduce=True)
            found[task]["reduce_row"] = train_reduced("reduce_row", grid)
        elif task == "idle":
            found[task] = _idle(mesh)
        elif task in REDUCED:
            found[task] = train_reduced(task, mesh)
        else:
            found[task] = _case(task, mesh)
    if rank == 0:
        torch.save(found, folder / f"ranks{ranks}.pt")
    dist.destroy_process_group()


def main(folder: Path, device: str = "cpu") -> None:
    """Run all stages, one after another."""
    if device == "cuda":  # which no forked process could use
        start_processes(rank, (2, folder, device), nprocs=2, start_method="spawn")
        return
    torch.set_num_threads(1)
    import_module("torch._dynamo")  # FSDP2 imports it, for more than a second in every rank
    build("tensor")
    for ranks in STAGES:  # in processes forked from this one, which has imported what they need
        start_processes(rank, (ranks, folder, device), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
