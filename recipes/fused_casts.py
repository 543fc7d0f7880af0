"""Which casts a compiled step will fuse with what made their tensor, and which stand alone: known before any GPU is.

One step is traced as ``torch.compile`` would on the planned device, forward and backward, up to the pass that moves
producers into casts (:mod:`narrowgate.precision.fusion`); nothing is computed. What Inductor does besides, before that
pass, is mostly not repeated here, so a compiled step may differ in single casts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..precision.capability import Device
from ..precision.casting import kernels_assumed
from ..precision.errors import NarrowgateError
from ..precision.layer import LowPrecisionLayer, layer_state
from .apply import apply_recipe
from .rates import Rates
from .recipe import Recipe
from .targets import named_modules, unwrap


@dataclass(frozen=True)
class CastPlan:
    """One cast of one layer in a compiled step."""

    layer: str
    #: ``input``, ``weight`` or ``grad``; each is cast for both of its paths at once.
    tensor: str
    #: What is computed within the cast, in order; empty where it stands alone and reads its tensor from memory.
    operations: tuple[str, ...]

    @property
    def fused(self) -> bool:
        """Whether a producer moved in."""
        return bool(self.operations)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON-ready data."""
        return {"layer": self.layer, "tensor": self.tensor, "fused": self.fused, "operations": list(self.operations)}


def plan_casts(
    model: nn.Module,
    recipe: Recipe,
    run: Callable[[nn.Module], Tensor],
    *,
    device: Device,
    rows: Mapping[str, int] | int | None = None,
    rates: Rates | None = None,
    instead_of_meta: str | None = None,
) -> tuple[CastPlan, ...]:
    """Trace one training step of a copy of ``model`` and return its casts, in the order of the layers.

    Args:
        model: without a recipe; on any device, the meta device included.
        recipe: for the native backend; the other backends cast on their own.
        run: calls the model that it is given on one batch, under autocast where training does, and returns a loss.
        device: what the step is planned for. Casts of products that it cannot multiply natively have kernels too.
        rows: as for :func:`narrowgate.recipes.apply_recipe`: what ``when: profitable`` is decided by.
        rates: likewise.
        instead_of_meta: device on which a model of meta tensors is traced; its memory is asked for and never written.

    Raises:
        RecipeError: as for :func:`narrowgate.recipes.apply_recipe`.
        NarrowgateError: the step cannot be traced; says why.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    traced = copy.deepcopy(unwrap(model)).train()
    if instead_of_meta is not None and any(parameter.is_meta for parameter in traced.parameters()):
        traced.to_empty(device=instead_of_meta)
    apply_recipe(traced, recipe, backend="native", device=device, rows=rows, rates=rates)
    names: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module, _ in named_modules(traced):
        if isinstance(module, LowPrecisionLayer):
            layer_state(module).run_on(device)
            names[str(id(module))] = name
            weight = module._parameters.get("weight")
            if weight is not None:
                shapes[name] = tuple(weight.shape)
    found: list[CastPlan] = []

    def collect(backward: bool) -> Callable[..., Any]:
        def compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            results = _results(module.graph)
            found.extend(_casts(module.graph, backward, names, shapes))
            return results

        return compiler

    backend = aot_autograd(
        fw_compiler=collect(backward=False),
        bw_compiler=collect(backward=True),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    try:
        with kernels_assumed():
            forward = traced.forward

            def whole(*args: Any, **kwargs: Any) -> Any:
                # A frame of its own, or a container's blocks would be compiled one by one and share a graph.
                return forward(*args, **kwargs)

            traced.forward = torch.compile(whole, backend=backend)  # type: ignore[method-assign]
            run(traced).backward()
    except NarrowgateError:
        raise
    except Exception as error:
        # Dynamo wraps what went wrong; the innermost error is the model's own.
        cause: BaseException = error
        while (within := cause.__cause__ or cause.__context__) is not None:
            cause = within
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise NarrowgateError(f"the step cannot be traced to plan its casts: {reason}") from error
    finally:
        torch._dynamo.reset()
    order = {name: i for i, name in enumerate(names.values())}
    return tuple(sorted(found, key=lambda cast: order[cast.layer]))


def _casts(
    graph: fx.Graph, backward: bool, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[CastPlan]:
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    from ..precision.fusion import casts_of, fuse_casts, program_of, source_of
    from ..precision.kernels.program import Program

    remove_noop_ops(graph)
    casts = [(node, _unviewed(source_of(node))) for node in casts_of(graph)]
    fuse_casts(graph)
    for node, source in casts:
        name = _layer(node, names)
        if name is None:
            continue
        weight = source.op == "placeholder" and tuple(source.meta["val"].shape) == shapes.get(name)
        tensor = "weight" if weight else "grad" if backward else "input"
        program = Program.parse(program_of(node))
        operations = tuple(step.op for step in program.instructions)
        yield CastPlan(name, tensor, operations + ("cat",) * (program.pieces > 1))


def _unviewed(node: fx.Node) -> fx.Node:
    """What a node looks at: the matrices of experts are cast as the rows of one."""
    aten = torch.ops.aten
    while node.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _layer(node: fx.Node, names: Mapping[str, str]) -> str | None:
    """The layer that a node was traced in: Dynamo notes the modules that were running, by their id."""
    return next((names[key] for key in node.meta.get("nn_module_stack", {}) if key in names), None)


def _results(graph: fx.Graph) -> Callable[[list[Any]], list[Any]]:
    """What stands in for a compiled graph: results of the right kind, of no value."""
    (output,) = graph.find_nodes(op="output")
    metas = [value.meta["val"] if isinstance(value, fx.Node) else value for value in output.args[0]]

    def run(inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return [_blank(meta) for meta in metas]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _blank(meta: Any) -> Any:
    if isinstance(meta, Tensor):
        sizes = [int(size) for size in meta.shape]
        return torch.empty_strided(sizes, [int(s) for s in meta.stride()], dtype=meta.dtype, device=meta.device)
    return int(meta) if isinstance(meta, torch.SymInt) else meta
