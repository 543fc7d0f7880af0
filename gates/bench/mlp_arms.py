"""The arms of the module benchmark, of the same values: BF16, the same on our kernels, narrowgate, installed peers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from ...precision.config import GemmConfig, LinearConfig
from ...precision.fused_bf16 import lower_fused_bf16
from ...precision.linear import lower_linear
from ...precision.spec import Spec
from .timing import Say

ARMS = ("bf16", "bf16_fused", "narrowgate", "transformer_engine", "torchao")
#: Variant -> input or grad of fprop, weight, grad of dgrad, grad of wgrad, input of wgrad. As Transformer Engine's
#: recipes are: E5M2 gradients with tensor scales, fast accumulation in fprop alone (never with blocks).
VARIANTS = {
    "delayed": ("fp8_e4m3+delayed(16)", "fp8_e4m3+delayed(16)", "fp8_e5m2+delayed(16)", "fp8_e5m2+delayed(16)",
                "fp8_e4m3+delayed(16)", "fast"),
    "current": ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2", "fp8_e5m2", "fp8_e4m3", "fast"),
    "row": ("fp8_e4m3/row", "fp8_e4m3/row", "fp8_e4m3/row", "fp8_e4m3/row", "fp8_e4m3/row", "fast"),
    "block": ("fp8_e4m3/1x128", "fp8_e4m3/128x128", "fp8_e4m3/1x128", "fp8_e4m3/1x128", "fp8_e4m3/1x128", "accurate"),
}  # fmt: skip

#: (name, the model, context of its forward or None); a name is the arm's, and the variant's after a space.
Arm = tuple[str, nn.Module, "Callable[[], Any] | None"]


class Block(nn.Module):
    """down(silu(gate) * up), [gate, up] = gate_up(RMSNorm(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, width] for ``x`` of the same shape."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Stack(nn.ModuleList):
    """Blocks one behind the other, as a model has them.

    With a forward of its own it is compiled as a whole: Dynamo does not enter ``nn.Sequential``, and would make a graph
    of each block.
    """

    def __init__(self, width: int, hidden: int, blocks: int) -> None:
        super().__init__(Block(width, hidden) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, width] for ``x`` of the same shape."""
        for block in self:
            x = block(x)
        return x


def mlp_arms(
    base: Stack, wanted: Collection[str], width: int, hidden: int, say: Say, *, compiled: bool
) -> Iterator[Arm]:
    """Yield every arm that can run here; BF16, which the others are compared with, always and first.

    Args:
        base: blocks whose values every arm takes.
        wanted: which of :data:`ARMS`.
        width: of the blocks.
        hidden: of the blocks.
        say: is told which peer is not installed.
        compiled: run under torch.compile (Transformer Engine never does). False leaves peers out: it is for a CPU.
    """
    bf16 = copy.deepcopy(base)
    if compiled:
        bf16.compile()
    yield "bf16", bf16, None
    if "bf16_fused" in wanted:
        model = copy.deepcopy(base)
        for layer, name in _layers(model):
            lower_fused_bf16(layer, name=name)
        if compiled:
            model.compile(fullgraph=True)
        yield "bf16_fused", model, None
    if "narrowgate" in wanted:
        for variant in VARIANTS:
            model = copy.deepcopy(base)
            for layer, name in _layers(model):
                lower_linear(layer, config(variant), name=name)
            if compiled:
                model.compile(fullgraph=True)
            yield f"narrowgate {variant}", model, None
    if compiled and "torchao" in wanted:
        yield from _torchao(base, say)
    if compiled and "transformer_engine" in wanted:
        yield from _transformer_engine(base, width, hidden, say)


def _layers(model: nn.Module) -> list[tuple[nn.Linear, str]]:
    return [(module, name) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def config(variant: str) -> LinearConfig:
    """Return the three products of a layer in one of :data:`VARIANTS`."""
    x, w, dy_dgrad, dy_wgrad, x_wgrad, accumulate = VARIANTS[variant]
    x, w, dy_dgrad, dy_wgrad, x_wgrad = map(Spec.parse, (x, w, dy_dgrad, dy_wgrad, x_wgrad))
    return LinearConfig(
        GemmConfig(x, w, accumulate), GemmConfig(dy_dgrad, w, "accurate"), GemmConfig(dy_wgrad, x_wgrad, "accurate")
    )


def accumulate(arm: str, variant: str) -> dict[str, str] | None:
    """Return how each product of an arm accumulates; None for BF16."""
    if arm.startswith("bf16"):
        return None
    if arm == "narrowgate":
        return {path: gemm.accumulate for path, gemm in config(variant).gemms()}
    if arm == "transformer_engine":
        fprop = "accurate" if variant == "block" else "fast"
        return {"fprop": fprop, "dgrad": "accurate", "wgrad": "accurate"}
    # torchao's defaults: fast in the forward, and in its rowwise recipes everywhere.
    row = variant.startswith("row")
    return {"fprop": "fast", "dgrad": "fast" if row else "accurate", "wgrad": "fast" if row else "accurate"}


def _torchao(base: Stack, say: Say) -> Iterator[Arm]:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        say(f"skipped: torchao: {error}")
        return
    for recipe, variant in (("tensorwise", "current"), ("rowwise", "row"), ("rowwise_with_gw_hp", "row_gw_hp")):
        model = copy.deepcopy(base)
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
        model.compile()
        yield f"torchao {variant}", model, None


def _transformer_engine(base: Stack, width: int, hidden: int, say: Say) -> Iterator[Arm]:
    try:
        import transformer_engine.pytorch as te  # type: ignore[import-not-found]
        from transformer_engine.common import recipe as recipes  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:
        say(f"skipped: transformer_engine: {error}")
        return
    made = {
        "delayed": recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID, amax_history_len=16),
        "current": recipes.Float8CurrentScaling(fp8_format=recipes.Format.HYBRID),
        "block": recipes.Float8BlockScaling(),
    }
    for variant, recipe in made.items():
        model = nn.Sequential(*(
            te.LayerNormMLP(width, hidden, eps=1e-5, bias=False, normalization="RMSNorm", activation="swiglu",
                            params_dtype=torch.bfloat16, device="cuda")
            for _ in base
        ))  # fmt: skip
        with torch.no_grad():
            for block, theirs in zip(base, model, strict=True):
                ours, peer = cast(Block, block), cast(Any, theirs)
                peer.layer_norm_weight.copy_(ours.norm.weight)
                peer.fc1_weight.copy_(ours.gate_up.weight)
                peer.fc2_weight.copy_(ours.down.weight)

        def context(recipe: Any = recipe) -> Any:
            return te.autocast(enabled=True, recipe=recipe)

        yield f"transformer_engine {variant}", model, context
