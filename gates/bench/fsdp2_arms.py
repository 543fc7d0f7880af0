"""The arms of the FSDP2 benchmark: the same model and products, with BF16 payload and with FP8 payload.

An arm is a recipe (or a peer's conversion) and what its shards gather as. Beside every FP8 payload stands the same
recipe without ``shards``: the same products, from weights that were gathered in BF16. The difference is the payload's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...models.optimizers import table_parameters
from ...models.task import GemTask
from ...precision.errors import NarrowgateError, did_you_mean
from ...precision.spec import as_spec
from ...recipes import apply_recipe
from ...recipes.plan import Plan
from ...recipes.recipe import Recipe
from ...recipes.wire_units import default_units
from ..arithmetic import Arithmetic
from ..speed import stage
from .mlp_arms import Block

#: Variant -> the operands of the input, the weight and the gradient, and what else its shards say.
VARIANTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "fp8_tensor": ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2", {}),
    # A row's scale does not serve dgrad, which contracts over rows: that operand is quantized anew.
    "fp8_row": ("fp8_e4m3/row", "fp8_e4m3/row", "fp8_e5m2/row", {"requantize": True}),
    "fp8_128x128": ("fp8_e4m3/1x128", "fp8_e4m3/128x128", "fp8_e4m3/1x128", {}),
}
ARMS = ("narrowgate", "torchao")
#: Rows of the step in which bytes are counted.
_PROBE = 64
#: What a variant is called whose weights are gathered in BF16.
BF16_PAYLOAD = ", bf16 payload"


@dataclass(frozen=True)
class ShardedArm:
    """One way to run the sharded step."""

    #: ``bf16``, ``narrowgate`` or ``torchao``.
    arm: str
    #: ``bf16``, or one of :data:`VARIANTS`.
    variant: str
    #: Whether the weights travel in the variant's format.
    coded: bool
    #: How gradients travel (``shards.reduce_scatter``); None: FSDP2 reduces them in BF16.
    reduce: str | None = None

    @property
    def name(self) -> str:
        """As progress and skipped arms are told."""
        return self.arm if self.arm == "bf16" else f"{self.arm} {self.told}"

    @property
    def told(self) -> str:
        """The variant as a result's row has it."""
        gradients = "" if self.reduce is None else f", {self.reduce} gradients"
        return self.variant + ("" if self.coded or self.arm == "bf16" else BF16_PAYLOAD) + gradients

    @property
    def twin(self) -> ShardedArm:
        """The same products with BF16 payload."""
        return ShardedArm(self.arm, self.variant, coded=False)

    def recipe(self, where: str) -> Recipe:
        """Return the recipe that :meth:`prepare` applies; BF16's gathers and lowers nothing that anyone multiplies."""
        variant = "fp8_tensor" if self.arm == "bf16" else self.variant
        return recipe(variant, where, coded=self.coded, reduce=self.reduce)

    def prepare(self, model: nn.Module, where: str, device: torch.device) -> Plan | None:
        """Change a fresh model in place; return the plan of a recipe."""
        if self.arm == "narrowgate":
            return apply_recipe(model, self.recipe(where))
        if self.arm == "torchao":
            _torchao(model, where, coded=self.coded, emulate=device.type != "cuda")
        return None

    def after_step(self, model: nn.Module) -> Callable[[], Any]:
        """Return what the arm's user calls after each optimizer step: one all-reduce for all scales that span ranks."""
        if not self.coded:
            return lambda: None
        if self.arm == "torchao":
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            return lambda: precompute_float8_dynamic_scale_for_fsdp(model)
        from ...precision.joint_amaxes import reduce_amaxes

        return lambda: reduce_amaxes(model)


def pick_groups(
    variants: Sequence[str], arms: Sequence[str], reduce: str | None = None
) -> list[tuple[ShardedArm, ...]]:
    """Return (FP8 payload, the same with BF16 payload) of everything asked for.

    Args:
        variants: of :data:`VARIANTS`.
        arms: of :data:`ARMS`.
        reduce: adds an arm of ours to each group whose gradients travel like this too, for example ``fp8_e5m2+sr``.

    Raises:
        NarrowgateError: an unknown name, or no format.
    """
    if reduce is not None:
        reduce = str(as_spec(reduce))
    for asked, known, option in ((variants, VARIANTS, "--variants"), (arms, ARMS, "--arms")):
        for name in asked:
            if name not in known:
                raise NarrowgateError(
                    f"{option}: found '{name}'{did_you_mean(name, list(known))}, expected some of {', '.join(known)}"
                )
    wanted = [ShardedArm("narrowgate", name, coded=True) for name in variants if "narrowgate" in arms]
    # torchao's gather has a scale a tensor and no other.
    wanted += [ShardedArm("torchao", "fp8_tensor", coded=True)] * ("torchao" in arms)
    return [
        (arm, arm.twin, *([replace(arm, reduce=reduce)] if reduce is not None and arm.arm == "narrowgate" else []))
        for arm in wanted
    ]


def recipe(variant: str, where: str, *, coded: bool, reduce: str | None = None) -> Recipe:
    """Return the recipe of one of :data:`VARIANTS` on the linear layers ``where``.

    ``coded`` gathers its codes; ``reduce`` is how gradients travel, where not as FSDP2 sends them.
    """
    x, weight, grad, shards = VARIANTS[variant]
    fast = {} if "128" in variant else {"accumulate": "fast"}
    rule = {
        "layers": "**",
        "where": where,
        "fprop": {"input": x, "weight": weight, **fast},
        "dgrad": {"grad": grad, "weight": weight},
        "wgrad": {"grad": grad, "input": x},
    }
    told: dict[str, Any] = {"recipe": f"{variant}-shards", "rules": [rule]}
    travel = ({"all_gather": weight, **shards} if coded else {}) | (
        {} if reduce is None else {"reduce_scatter": reduce}
    )
    return Recipe.from_dict({**told, "shards": travel} if travel else told)


@dataclass(frozen=True)
class ShardedCase:
    """A model with its batch, and how FSDP2 takes it."""

    name: str
    #: Builds it on the device, from torch's generators.
    build: Callable[[], nn.Module]
    #: The same model on the meta device.
    shape: Callable[[], nn.Module]
    #: The loss of one step; the batch is the rank's own.
    loss: Callable[[nn.Module], Tensor]
    #: The same on a few rows: what travels does not depend on them.
    probe: Callable[[nn.Module], Tensor]
    #: Which linear layers a variant is for, as a recipe's ``where``.
    where: str
    facts: dict[str, Any]

    def units(self, model: nn.Module) -> list[str]:
        """Names of the modules that are sharded one by one."""
        return default_units(model)


def tower(name: str, sizes: tuple[int, int, int, int], device: torch.device, rank: int) -> ShardedCase:
    """A dense tower of RMSNorm + SwiGLU blocks on BF16 rows; ``sizes`` are rows, width, hidden width and blocks."""
    rows, width, hidden, blocks = sizes
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, generator=generator)

    def build(where: torch.device = device) -> nn.Module:
        with where:
            return nn.Sequential(*(Block(width, hidden) for _ in range(blocks)))

    def loss(model: nn.Module) -> Tensor:
        return model(x).float().square().mean()

    facts = {"rows": rows, "width": width, "hidden": hidden, "blocks": blocks}
    where = "in_features % 16 == 0 and out_features % 16 == 0"
    probe = lambda model: model(x[:_PROBE]).float().square().mean()  # noqa: E731
    return ShardedCase(name, build, lambda: build(torch.device("meta")), loss, probe, where, facts)


def gem(name: str, device: torch.device, rank: int) -> ShardedCase:
    """A built-in GEM-like model on synthetic rows. Its tables are frozen and no part of the shards."""
    task = GemTask.open(name, device=device)
    preset = task.preset
    few = GemTask.open(replace(preset, training=replace(preset.training, batch_size=_PROBE)), device=device)
    (batch,), (rows,) = (stage(of.train_batches(rank), device, 1) for of in (task, few))
    arithmetic = Arithmetic.of(device)

    def build(task: GemTask = task) -> nn.Module:
        model = task.build_model()
        for table in table_parameters(model):
            table.requires_grad_(False)
        return model

    def loss(model: nn.Module, batch: Any = batch) -> Tensor:
        with arithmetic.context():
            return task.loss(model, batch)

    least = 2 * preset.model.d
    where = f"in_features >= {least} and out_features >= {least} and in_features % 16 == 0 and out_features % 16 == 0"
    facts = {"rows": preset.training.batch_size, "tokens": int(batch.events.shape[0])}
    shape = lambda: build(GemTask.open(name, device="meta"))  # noqa: E731
    return ShardedCase(name, build, shape, loss, lambda model: loss(model, rows), where, facts)


def _torchao(model: nn.Module, where: str, *, coded: bool, emulate: bool) -> None:
    """Torchao's tensorwise recipe on the layers that ours takes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = set(_lowered(model, where))
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: name in layers,
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=coded, emulate=emulate),
    )


def _lowered(model: nn.Module, where: str) -> Iterator[str]:
    """Names of the layers that a recipe takes ``where``."""
    from ...recipes import resolve

    plan = resolve(recipe("fp8_tensor", where, coded=False), model)
    return (layer.name for layer in plan.lowered)
