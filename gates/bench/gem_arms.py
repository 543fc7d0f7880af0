"""The arms of the whole-step benchmark: one entry each, the same model, data, optimizer and compilation for all.

Peers get what their own recipes say, field by field (torchao 0.18 ``Float8LinearConfig.from_recipe_name``; Transformer
Engine's current and delayed scaling with E4M3 forward and E5M2 gradients), on every layer whose dimensions they take,
or on the large ones alone, where they lose least: a user of theirs would choose that, so it is the arm to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...models.task import GemTask
from ...precision.errors import NarrowgateError, did_you_mean
from ...recipes import apply_fused_bf16, apply_recipe, load_recipe
from ...recipes.recipe import Recipe
from ..rows import rows_for

if TYPE_CHECKING:
    from torch import nn

    from ...recipes.plan import Plan

#: Changes a fresh model in place, before it is compiled; returns the plan of what it applied, if anything.
Prepare = Callable[[GemTask, "nn.Module"], "Plan | None"]
#: Arms that every other one is compared with, where they run: the names of their ratios' suffixes.
REFERENCES = {"bf16": "", "bf16-fused": "_to_fused"}


def _as_it_is(task: GemTask, model: nn.Module) -> Plan | None:
    return None


@dataclass(frozen=True)
class GemArm:
    """One way to run the step."""

    #: As the command line has it.
    name: str
    #: As a result's row has it.
    arm: str
    variant: str
    prepare: Prepare = _as_it_is
    #: Where it cannot run, that is its result and no fault of this run: a peer's, or padding that does not fit.
    may_fail: bool = False
    #: Fields of the model's configuration that differ.
    model: Mapping[str, Any] = field(default_factory=dict)
    #: Under ``torch.use_deterministic_algorithms``.
    deterministic: bool = False
    #: What layers recompute in backward: see :func:`narrowgate.models.checkpointing.checkpoint_activations`.
    checkpoint: Mapping[str, str] = field(default_factory=dict)
    #: Share of the activations that compiled code may keep (``torch.compile``'s own budget).
    memory_budget: float = 1.0
    #: Overrides whether the recipe has weights quantized once a step (``plan.wrap_optimizer(keep_weights=...)``).
    keep_weights: bool | None = None

    def task(self, task: GemTask) -> GemTask:
        """Return ``task`` with this arm's model; data and training stay."""
        if not self.model:
            return task
        return GemTask(replace(task.preset, model=replace(task.preset.model, **self.model)), task.data)


def _recipe(name: str, backend: str, **changes: Any) -> Prepare:
    """A built-in recipe, or one that extends it by ``changes``."""

    def prepare(task: GemTask, model: nn.Module) -> Plan:
        loaded = load_recipe(name)
        if changes:
            loaded = Recipe.from_dict({"recipe": f"{name}-changed", "extends": name, **changes})
        return apply_recipe(model, loaded, backend=backend, rows=rows_for(loaded, task, model))

    return prepare


def _eligible(task: GemTask) -> str:
    return "in_features % 16 == 0 and out_features % 16 == 0"


def _large(task: GemTask) -> str:
    """Both dimensions at least twice a token's width: the interaction's layers, not the sequence's projections."""
    least = 2 * task.preset.model.d
    return f"in_features >= {least} and out_features >= {least} and {_eligible(task)}"


def _peer(backend: str, where: Callable[[GemTask], str], x: str, grad: str, **paths: Any) -> Prepare:
    """``x`` forward, accumulated fast, and ``grad`` backward, accurately, on the layers ``where``; or as ``paths``."""

    def prepare(task: GemTask, model: nn.Module) -> Plan:
        rule = {
            "layers": "**",
            "where": where(task),
            "fprop": {"input": x, "weight": x, "accumulate": "fast"},
            "dgrad": {"grad": grad, "weight": x},
            "wgrad": {"grad": grad, "input": x},
        }
        recipe = Recipe.from_dict({"recipe": f"{backend}-bench", "rules": [rule | paths]})
        return apply_recipe(model, recipe, backend=backend)

    return prepare


#: What is cheap to repeat: all of a region but, in the interaction, its products.
_CHECKPOINT = {"cross": "all", "sequence": "all", "interaction": "pointwise"}
_SAVE = {"save": "fp8_e4m3/row"}
_TENSOR, _ROW = ("fp8_e4m3", "fp8_e5m2"), ("fp8_e4m3/row+pow2", "fp8_e4m3/row+pow2")
_DELAYED = ("fp8_e4m3+delayed(16)", "fp8_e5m2+delayed(16)")
_GW_HP: dict[str, Any] = {"dgrad": {"grad": _ROW[1], "weight": "fp8_e4m3+pow2"}, "wgrad": "bf16"}


def _fused(task: GemTask, model: nn.Module) -> None:
    """The layers that our recipe lowers write BF16 from the same fused kernels."""
    apply_fused_bf16(model, "gem-fp8")


_ARMS = (
    GemArm("bf16", "bf16", "bf16"),
    GemArm("bf16-fused", "bf16_fused", "bf16", _fused),
    GemArm("gem-fp8", "narrowgate", "gem-fp8", _recipe("gem-fp8", "native")),
    GemArm("gem-fp8-kept", "narrowgate", "gem-fp8, weights kept", _recipe("gem-fp8", "native"), keep_weights=True),
    GemArm("gem-fp8-lean", "narrowgate", "gem-fp8, activations and optimizer state in 8 bits",
           _recipe("gem-fp8", "native", activations=_SAVE, optimizer={"state": "fp8_e4m3/1x128+sr"})),
    GemArm("gem-fp8-saved", "narrowgate", "gem-fp8, activations in 8 bits",
           _recipe("gem-fp8", "native", activations=_SAVE)),
    GemArm("bf16-checkpointed", "bf16", "checkpointed", checkpoint=_CHECKPOINT),
    GemArm("bf16-budget", "bf16", "half the activations", memory_budget=0.5),
    # What is run again in backward needs the same weights: they are quantized once for both, as by gem-fp8-kept.
    GemArm("gem-fp8-checkpointed", "narrowgate", "gem-fp8, weights kept, checkpointed", _recipe("gem-fp8", "native"),
           checkpoint=_CHECKPOINT, keep_weights=True),
    GemArm("gem-fp8-saved-checkpointed", "narrowgate", "gem-fp8, weights kept, activations in 8 bits, checkpointed",
           _recipe("gem-fp8", "native", activations=_SAVE), checkpoint=_CHECKPOINT, keep_weights=True),
    GemArm("torchao-tensorwise", "torchao", "tensorwise", _peer("torchao", _eligible, *_TENSOR), may_fail=True),
    GemArm("torchao-tensorwise-large", "torchao", "tensorwise, large layers",
           _peer("torchao", _large, *_TENSOR), may_fail=True),
    GemArm("torchao-rowwise", "torchao", "rowwise", _peer("torchao", _eligible, *_ROW), may_fail=True),
    GemArm("torchao-rowwise-large", "torchao", "rowwise, large layers", _peer("torchao", _large, *_ROW), may_fail=True),
    GemArm("torchao-gw-hp-large", "torchao", "rowwise_with_gw_hp, large layers",
           _peer("torchao", _large, *_ROW, **_GW_HP), may_fail=True),
    GemArm("te-current-large", "transformer_engine", "current, large layers",
           _peer("transformer_engine", _large, *_TENSOR), may_fail=True),
    GemArm("te-delayed-large", "transformer_engine", "delayed, large layers",
           _peer("transformer_engine", _large, *_DELAYED), may_fail=True),
    GemArm("bf16-padded", "bf16", "padded attention", model={"attention": "padded"}, may_fail=True),
    GemArm("bf16-deterministic", "bf16", "deterministic", deterministic=True),
    GemArm("gem-fp8-deterministic", "narrowgate", "gem-fp8, deterministic",
           _recipe("gem-fp8", "native"), deterministic=True),
)  # fmt: skip
ARMS = {arm.name: arm for arm in _ARMS}
#: What one run takes unless told: our recipe, the same fusion in BF16, and each peer at its best.
USUAL = ("bf16", "bf16-fused", "gem-fp8", "torchao-tensorwise-large", "torchao-rowwise-large", "te-current-large")


def pick_arms(names: Sequence[str]) -> list[GemArm]:
    """Return the arms of these names, each once, BF16 always and first.

    Raises:
        NarrowgateError: no arm has that name.
    """
    for name in names:
        if name not in ARMS:
            raise NarrowgateError(
                f"--arms: found '{name}'{did_you_mean(name, list(ARMS))}, expected some of {', '.join(ARMS)}"
            )
    return [ARMS[name] for name in dict.fromkeys(("bf16", *names))]
