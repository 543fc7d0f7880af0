"""Regions of a model that are timed alone: a layer, what is fused into its operands, and the shapes of a real step.

One training batch runs once, eagerly, while every call of a layer and every pointwise operation around it is noted.
A layer's **region** then holds

- its *producers*: operations and norms whose results nothing but layers and their producers read. A compiler writes
  them as the layer's operand at once, in BF16 or in a smaller format, so they cannot be told from its cast;
- the layers that read the same producers (gate and up projection behind one norm);
- its *followers*: operations that alone read the layer's output. Their backward makes the gradient that the layer
  multiplies, so the gradient's cast is fused with it.

Where the producer cannot be told (the output of attention, of a product, of a function of its own), or is read by
others as well (a residual stream), the region begins at the layer. An operation between two layers belongs to both
regions, in both arms alike. Values are not kept: regions run on random tensors of the same layouts, and on the integers
and booleans that were there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from ..recipes.targets import named_modules
from .region_recorder import Leaf, Operation, Product, Recorder, Value

if TYPE_CHECKING:
    from ..recipes.plan import Plan

#: Operations that follow a layer within its region, at most.
_MOST_FOLLOWERS = 8


@dataclass(frozen=True)
class Region:
    """A piece of the step that can be run alone, in any arm's model."""

    operations: tuple[Operation, ...]
    #: By value.
    leaves: Mapping[int, Leaf]
    outputs: tuple[int, ...]
    products: tuple[Product, ...]
    #: Equal for regions that do the same on the same shapes in the same formats.
    key: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The names of its layers."""
        return ", ".join(dict.fromkeys(product.name for product in self.products))

    @property
    def around(self) -> tuple[str, ...]:
        """What is fused around the layers, in order."""
        return tuple(operation.label for operation in self.operations if not operation.products)

    @property
    def flops(self) -> int:
        """Floating-point operations of the layers' forward."""
        return sum(product.flops for product in self.products)

    def build(self, model: nn.Module) -> fx.GraphModule:
        """Return the region as a module of its leaves that shares its layers and Parameters with ``model``."""
        modules = {name: module for name, module, _ in named_modules(model)}
        graph, root, env = fx.Graph(), {}, {}
        for i, value in enumerate(self.leaves):
            env[value] = graph.placeholder(f"x{i}")
        for i, operation in enumerate(self.operations):
            target = operation.target
            if operation.kind == "call_module":
                root[f"m{i}"], target = modules[target], f"m{i}"
            args, kwargs = tree_map(
                lambda part: env[part.index] if isinstance(part, Value) else part, (operation.args, operation.kwargs)
            )
            node = graph.create_node(operation.kind, target, args, kwargs)
            for j, value in enumerate(operation.out):
                env[value] = graph.call_function(_item, (node, j)) if operation.several else node
        graph.output(tuple(env[value] for value in self.outputs))
        return fx.GraphModule(root, graph)


@dataclass(frozen=True)
class Found:
    """A region with what a step does with it."""

    region: Region
    #: How often a step runs it, and the layers of all these calls.
    calls: int
    layers: tuple[str, ...]

    @property
    def flops(self) -> int:
        """Floating-point operations of a step's calls, forward."""
        return self.calls * self.region.flops


def find_regions(model: nn.Module, step: Callable[[], Any], plan: Plan) -> list[Found]:
    """Return the regions that hold a lowered layer, once each, heaviest first.

    Args:
        model: the baseline, on the device of its batches; it runs once in training mode and uncompiled. Torch's
            generators are afterwards what they were, buffers are not.
        step: computes the loss of one batch with ``model``.
        plan: which layers the candidate lowers, and to what.
    """
    recorder = Recorder(model)
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    model.train()
    # Nothing runs backward, so nothing needs to be kept for it; only which tensors would have a gradient matters.
    dropped = torch.autograd.graph.saved_tensors_hooks(lambda t: None, lambda t: t)
    with recorder.watching(), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), dropped:
        step()
    lowered = {layer.name: repr(layer.config) for layer in plan.lowered}
    alike: dict[tuple[Any, ...], list[Region]] = defaultdict(list)
    for region in _regions(recorder, lowered):
        alike[region.key].append(region)
    found = [
        Found(same[0], len(same), tuple(dict.fromkeys(product.name for region in same for product in region.products)))
        for same in alike.values()
    ]
    return sorted(found, key=lambda entry: -entry.flops)


def _regions(recorder: Recorder, lowered: Mapping[str, str]) -> Iterator[Region]:
    """Yield the region of every call of a lowered layer; layers that share producers share one."""
    operations, readers = recorder.operations, recorder.readers
    owned: set[int] = set()
    for i in reversed(range(len(operations))):
        read = {reader for value in operations[i].out for reader in readers.get(value, ())}
        alone = bool(read) and all(r is not None and (operations[r].products or r in owned) for r in read)
        if not operations[i].products and alone:
            owned.add(i)
    joined = _Groups(len(operations))
    for i in owned:
        for value in operations[i].out:
            for reader in readers.get(value, ()):
                assert reader is not None
                joined.join(i, reader)
    for members in joined.groups():
        layers = [i for i in members if operations[i].products]
        if not any(product.name in lowered for i in layers for product in operations[i].products):
            continue
        whole = set(members)
        for i in layers:
            _follow(i, whole, operations, readers)
        yield _cut(sorted(whole), recorder, lowered)


def _follow(
    layer: int, whole: set[int], operations: Sequence[Operation], readers: Mapping[int, set[int | None]]
) -> None:
    """Add the operations that follow ``layer``: each alone reads what the one before made."""
    at = layer
    for _ in range(_MOST_FOLLOWERS):
        if len(operations[at].out) != 1:
            return
        read = readers.get(operations[at].out[0], set())
        if len(read) != 1:
            return
        (following,) = read
        if following is None or operations[following].products:
            return
        whole.add(following)
        at = following


def _cut(members: Sequence[int], recorder: Recorder, lowered: Mapping[str, str]) -> Region:
    operations = [recorder.operations[i] for i in members]
    made = {value for operation in operations for value in operation.out}
    leaves = {value: recorder.leaves[value] for o in operations for value in o.reads() if value not in made}
    inside = set(members)
    outputs = tuple(
        value
        for operation in operations
        for value in operation.out
        # Unread too: a loss that leaves a layer's output aside is no reason to leave the layer's backward aside.
        if not (read := recorder.readers.get(value)) or not read <= inside
    )
    numbers = {value: i for i, value in enumerate([*leaves, *(v for o in operations for v in o.out)])}

    def told(part: Any) -> Any:
        return ("value", numbers[part.index]) if isinstance(part, Value) else repr(part)

    parts = tuple(
        (
            operation.kind,
            recorder.facts(operation),
            repr(tree_map(told, (operation.args, operation.kwargs))),
            tuple(lowered.get(product.name) for product in operation.products),
        )
        for operation in operations
    )
    return Region(
        operations=tuple(operations),
        leaves=leaves,
        outputs=outputs,
        products=tuple(product for operation in operations for product in operation.products),
        key=(tuple(leaves.values()), parts, tuple(numbers[value] for value in outputs)),
    )


class _Groups:
    """Numbers joined into groups (union-find)."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def _top(self, i: int) -> int:
        while self._above[i] != i:
            self._above[i] = self._above[self._above[i]]
            i = self._above[i]
        return i

    def join(self, a: int, b: int) -> None:
        self._above[self._top(a)] = self._top(b)

    def groups(self) -> list[list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for i in range(len(self._above)):
            found[self._top(i)].append(i)
        return list(found.values())


def _item(values: Sequence[Tensor], index: int) -> Tensor:
    return values[index]
