"""A resolved recipe: for every layer and GEMM path what it runs, which rule said so, and where it runs natively."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

from ..precision.capability import Device, Support
from ..precision.config import OPERANDS, PATHS, GemmConfig, LinearConfig
from ..precision.errors import NarrowgateError
from ..precision.spec import Spec
from .errors import Diagnostic
from .pricing import LayerPrice, Unpriced
from .rates import Rates, shipped_rates
from .recipe import OptimizerState, Recipe, Shards, Tables

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn
    from torch.optim import Optimizer

    from .fused_casts import CastPlan
    from .saved_activations import SavedModule
    from .targets import Unreachable
    from .tracing import GemmTrace

PLAN_VERSION = 1
#: Native FP8 GEMMs take multiples of this many elements.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Origin:
    """Which rule set a field; ``rule`` is None where the recipe's ``defaults`` (or the language's) hold."""

    #: 0-based among the rules with those of ``extends`` first.
    rule: int | None
    file: str
    #: 1-based; None for recipes built in Python.
    line: int | None

    def __str__(self) -> str:
        if self.rule is None:
            return "defaults"
        place = self.file.rpartition("/")[2] if self.file else ""
        return f"rules[{self.rule}]" if self.line is None else f"{place}:{self.line}"

    def to_dict(self) -> dict[str, Any]:
        """Return the origin as JSON-ready data."""
        return {"rule": self.rule, "file": self.file, "line": self.line}


@dataclass(frozen=True)
class LayerPlan:
    """One layer: its shape, its three GEMMs, and where each of their fields comes from."""

    name: str
    type: str
    #: K and N; 0 where unknown, as for a product of two tensors.
    in_features: int
    out_features: int
    params: int
    config: LinearConfig
    #: ``always`` or ``profitable``.
    when: str
    #: By field of :data:`narrowgate.recipes.recipe.FIELDS`.
    origin: Mapping[str, Origin]
    #: By path; a BF16 path is native everywhere.
    support: Mapping[str, Support]
    #: Predicted step time, or why there is none; None where the plan has no prices at all.
    price: LayerPrice | Unpriced | None = None
    #: Why ``when: profitable`` left the layer in BF16, which its rules did not ask for.
    kept: str | None = None
    #: ``linear``, ``attention`` (a projection), ``grouped`` (experts) or ``product`` (of two tensors).
    kind: str = "linear"
    #: Why a low-precision ``grouped`` layer multiplies one expert after another; None where one GEMM takes them all.
    in_turns: str | None = None

    @property
    def pays(self) -> bool:
        """False where low precision is predicted to lose time."""
        return self.config.high_precision or not isinstance(self.price, LayerPrice) or self.price.pays

    @property
    def flops_per_row(self) -> int:
        """Floating-point operations of one path for one row of the input: 2 K N."""
        return 2 * self.in_features * self.out_features

    def to_dict(self) -> dict[str, Any]:
        """Return the layer as JSON-ready data."""
        paths: dict[str, Any] = {}
        for path, gemm in self.config.gemms():
            operands = OPERANDS[path]
            paths[path] = {
                operands[0]: str(gemm.first),
                operands[1]: str(gemm.second),
                "accumulate": gemm.accumulate,
                "native": self.support[path].native,
                "reason": self.support[path].reason,
                "set_by": {part: self.origin[f"{path}.{part}"].to_dict() for part in (*operands, "accumulate")},
            }
        return {
            "name": self.name,
            "type": self.type,
            "kind": self.kind,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "params": self.params,
            "when": self.when,
            "kept": self.kept,
            "in_turns": self.in_turns,
            "price": self.price.to_dict() if isinstance(self.price, LayerPrice) else None,
            "paths": paths,
        }


@dataclass(frozen=True)
class Totals:
    """Predicted time of all priced layers in one step, in microseconds; the rest of the step is not in it."""

    layers: int
    bf16_us: float
    us: float
    cast_us: float

    @property
    def gain_us(self) -> float:
        """Microseconds saved over BF16; negative where the recipe loses time."""
        return self.bf16_us - self.us

    @property
    def ratio(self) -> float:
        """Speedup of the linear layers over BF16."""
        return self.bf16_us / self.us

    def to_dict(self) -> dict[str, Any]:
        """Return the totals as JSON-ready data."""
        return {
            "layers": self.layers,
            "bf16_us": self.bf16_us,
            "us": self.us,
            "cast_us": self.cast_us,
            "gain_us": self.gain_us,
            "ratio": self.ratio,
        }


@dataclass(frozen=True)
class Plan:
    """What a recipe means for one model on one device."""

    #: The recipe without ``extends``.
    recipe: Recipe
    layers: tuple[LayerPlan, ...]
    device: Device
    backend: str = "native"
    #: Shadowed rules, patterns that match nothing beside others that do.
    warnings: tuple[Diagnostic, ...] = ()
    #: Modules with a GEMM that no rule reaches.
    unreachable: tuple[Unreachable, ...] = field(default=())
    #: M: rows that each layer multiplies in one step, by name; None where unknown.
    rows: Mapping[str, int] | None = None
    #: What prices were predicted from; None where nothing was measured on the device.
    rates: Rates | None = None
    #: Every product of one step (:func:`narrowgate.recipes.trace_gemms`); None where no step was traced.
    trace: GemmTrace | None = None
    #: Casts of a compiled step (:func:`narrowgate.recipes.plan_casts`); None where none was traced.
    casts: tuple[CastPlan, ...] | None = None
    #: What modules save for backward (:func:`narrowgate.recipes.plan_saved`); None where no step was run.
    saved: tuple[SavedModule, ...] | None = None
    #: The model that :func:`narrowgate.recipes.apply_recipe` changed; None where it was only resolved.
    model: ReferenceType[nn.Module] | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "model": None}  # a reference to an object of this process

    def with_trace(self, trace: GemmTrace) -> Plan:
        """Return this plan with a traced step: shares are of its FLOPs, and products out of reach are listed."""
        return replace(self, trace=trace)

    def with_casts(self, casts: Sequence[CastPlan]) -> Plan:
        """Return this plan with the casts of a compiled step: which compute what they cast, and which read it."""
        return replace(self, casts=tuple(casts))

    def with_saved(self, saved: Sequence[SavedModule]) -> Plan:
        """Return this plan with what the modules of one eager step save for backward."""
        return replace(self, saved=tuple(saved))

    @property
    def no_prices(self) -> str | None:
        """Why the plan has no prices; None where it has."""
        if self.backend != "native":
            return f"only the native backend's layers are priced, not {self.backend}'s"
        if self.rates is None:
            return f"no measured rates for {self.device.name} (measured: {', '.join(shipped_rates())})"
        return "rows are unknown" if self.rows is None else None

    def totals(self) -> Totals | None:
        """Return the predicted time of all priced layers; None where there is none."""
        prices = [layer.price for layer in self.layers if isinstance(layer.price, LayerPrice)]
        if not prices:
            return None
        return Totals(
            layers=len(prices),
            bf16_us=sum(price.bf16_us for price in prices),
            us=sum(price.us for price in prices),
            cast_us=sum(price.cast_us for price in prices),
        )

    @property
    def lowered(self) -> tuple[LayerPlan, ...]:
        """The layers in which at least one path is low-precision."""
        return tuple(layer for layer in self.layers if not layer.config.high_precision)

    @property
    def gather(self) -> Spec:
        """How the weights of :attr:`gathered` travel; all others as FSDP2's own policy says."""
        return (self.recipe.shards or Shards()).all_gather

    @property
    def reduce(self) -> Spec | None:
        """How the gradients of a sharded model travel to be summed in FP32; None leaves that to FSDP2."""
        return (self.recipe.shards or Shards()).reduce_scatter

    @property
    def tables(self) -> Tables | None:
        """How ranks exchange rows of embedding tables; None: tables are sharded as other weights."""
        return (self.recipe.shards or Shards()).tables

    @property
    def gathered(self) -> tuple[LayerPlan, ...]:
        """The layers whose weights travel as :attr:`gather`: fprop and dgrad are both low-precision."""
        if self.gather.high_precision:
            return ()
        return tuple(
            layer
            for layer in self.layers
            if layer.kind != "product"
            and not layer.config.fprop.high_precision
            and not layer.config.dgrad.high_precision
        )

    @property
    def once_a_step(self) -> tuple[LayerPlan, ...]:
        """The layers whose weights the recipe has quantized once an optimizer step, where kernels cast."""
        if self.backend != "native" or not (self.recipe.optimizer or OptimizerState()).keep_weights:
            return ()
        from ..precision.kept_weights import can_keep

        return tuple(layer for layer in self.lowered if layer.kind == "linear" and can_keep(layer.config))

    @property
    def native(self) -> bool:
        """True where the device multiplies every planned pair itself."""
        return not self.emulated()

    def emulated(self) -> list[tuple[LayerPlan, str]]:
        """Return (layer, path) of every GEMM that this device can only emulate."""
        return [(layer, path) for layer in self.layers for path in PATHS if not layer.support[path].native]

    def emulated_reasons(self) -> list[str]:
        """Return why GEMMs are emulated, one line a reason with how many GEMMs it concerns."""
        counts: Counter[str] = Counter()
        first: dict[str, str] = {}
        for layer, path in self.emulated():
            reason = layer.support[path].reason or "unknown"
            counts[reason] += 1
            first.setdefault(reason, f"{layer.name or '(root)'}.{path}")
        return [f"{reason} ({n} GEMM{'s' if n > 1 else ''}, first {first[reason]})" for reason, n in counts.items()]

    def padded(self) -> list[LayerPlan]:
        """Return the layers whose native low-precision GEMMs pad K or N up to a multiple of 16."""
        return [
            layer
            for layer in self.lowered
            if (layer.in_features % _ALIGNMENT or layer.out_features % _ALIGNMENT)
            and any(layer.support[path].native for path, gemm in layer.config.gemms() if not gemm.high_precision)
        ]

    @property
    def weighted(self) -> bool:
        """Whether a step was traced, or the rows of every layer are known and some layer has any."""
        if self.trace is not None:
            return True
        rows = self.rows or {}
        return all(layer.name in rows for layer in self.layers) and any(rows.values())

    def flops_share(self) -> dict[str, float]:
        """Return the share of the targets' GEMM FLOPs in each pair of formats, largest first; sums to 1.

        Of the FLOPs that a traced step had, else weighted by the rows that each layer multiplies, where they are known
        for all, else for one row a layer. Without a trace products of two tensors count for nothing: their size is
        unknown.
        """
        flops: Counter[str] = Counter()
        weighted = self.weighted
        traced = self.trace.by_layer() if self.trace is not None else None
        for layer in self.layers:
            rows = self.rows[layer.name] if weighted and self.rows is not None else 1
            own = traced.get(layer.name, 0) if traced is not None else layer.flops_per_row * rows
            for _, gemm in layer.config.gemms():
                flops[format_pair(gemm)] += own
        total = sum(flops.values())
        return {pair: count / total for pair, count in flops.most_common()} if total else {}

    def wrap_optimizer(self, optimizer: Optimizer, *, keep_weights: bool | None = None) -> Optimizer:
        """Make ``optimizer`` do what the recipe's ``optimizer`` part says, in place, and return it.

        Its state is kept in the recipe's format, where FP32 leaves it as it is, and weights are quantized once a step.

        See :func:`narrowgate.precision.lower_state`. Call it after ``fully_shard``, before
        ``torch.distributed.checkpoint`` asks for the state.

        Args:
            optimizer: a ``torch.optim.Optimizer`` over the model's Parameters.
            keep_weights: quantize each weight that it steps once a step, for all micro-batches and recomputed forwards,
                instead of at each use; None does as the recipe says. Costs up to two bytes an element of the weights
                between forwards. Warns of layers where it is not possible, with the reason; where only the recipe asks
                for it, not of what lies on a CPU or is sharded, where there is nothing to save. A fused Adam or AdamW
                on a GPU, with BF16 or FP32 state, writes the codes of weights with delayed scales in its own step;
                from then on a write through ``weight.data`` that a training forward shall see needs :meth:`refresh`,
                also before the first one. See :mod:`narrowgate.precision.weight_codes`.

        Raises:
            NotBuiltError: the recipe wants a format that is not built for optimizer state.
            NarrowgateError: the optimizer's state is not known, its parameters are not FP32, or the plan was only
                resolved.
        """
        from .optimizer import keep_weights_of, wrap_optimizer

        wanted = self.recipe.optimizer or OptimizerState()
        if wanted.state.format != "fp32" or wanted.keep_weights:
            model = None if self.model is None else self.model()
            if model is None:
                raise NarrowgateError(
                    "wrap_optimizer: found a plan without its model, expected what apply_recipe returned"
                )
            return wrap_optimizer(model, optimizer, keep_weights=keep_weights)
        if keep_weights:
            keep_weights_of(optimizer)
        return optimizer

    def refresh(self) -> None:
        """Quantize weights anew at their next use, after writes that nothing could see.

        Those leave a tensor's version counter alone: through ``weight.data``, or by a collective; of shards of FSDP2,
        through the DTensors of a ``state_dict()``. With shards it is called on every rank.

        Only training forwards over weights that :meth:`wrap_optimizer` keeps need it; all others are quantized at each
        use, as is every weight in evaluation, and every use that a CUDA graph captured quantizes too.
        """
        from ..precision.kept_shards import forget_shard_codes
        from ..precision.layer import forget_weight_codes

        forget_weight_codes()
        forget_shard_codes()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        from .saved_activations import activations_dict

        optimizer = self.recipe.optimizer or OptimizerState()
        return {
            "version": PLAN_VERSION,
            "recipe": self.recipe.name,
            "hash": self.recipe.hash(),
            "device": self.device.name,
            "backend": self.backend,
            "native": self.native,
            "emulated": self.emulated_reasons(),
            "padded": [layer.name for layer in self.padded()],
            "gather": str(self.gather),
            "gathered": [layer.name for layer in self.gathered],
            "reduce": str(self.reduce) if self.reduce is not None else None,
            "tables": self.tables.to_dict() if self.tables is not None else None,
            "optimizer": {"state": str(optimizer.state), "keep_weights": optimizer.keep_weights},
            "once_a_step": [layer.name for layer in self.once_a_step],
            "flops_share": self.flops_share(),
            "flops_share_by_rows": self.weighted,
            "rows": dict(self.rows) if self.rows is not None else None,
            "rates": self.rates.to_dict() if self.rates is not None else None,
            "no_prices": self.no_prices,
            "totals": totals.to_dict() if (totals := self.totals()) is not None else None,
            "layers": [layer.to_dict() for layer in self.layers],
            "trace": self.trace.to_dict() if self.trace is not None else None,
            "casts": [cast.to_dict() for cast in self.casts] if self.casts is not None else None,
            "activations": activations_dict(self),
            "unreachable": [entry.to_dict() for entry in self.unreachable],
            "warnings": [warning.to_dict() for warning in self.warnings],
        }

    def to_json(self) -> str:
        """Return :meth:`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def to_text(self) -> str:
        """Return the plan as plain aligned text, the same everywhere."""
        from .render import plan_text

        return plan_text(self)

    def render(self) -> RenderableType:
        """Return the plan as a rich renderable for a terminal."""
        from .render import plan_renderable

        return plan_renderable(self)

    def __str__(self) -> str:
        return self.to_text()


def format_pair(gemm: GemmConfig) -> str:
    """Return the formats that a GEMM multiplies: ``fp8_e5m2·fp8_e4m3``, or one name where both are the same."""
    first, second = gemm.first.format, gemm.second.format
    return first if first == second else f"{first}·{second}"
