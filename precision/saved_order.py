"""When backward turns what was saved in few bits into values: no sooner than a gradient is there to meet them.

Nothing that is computed from saved tensors alone waits for anything in a graph, so a compiler is free to do it first,
for all of a model's layers at once: then the values of all of them are alive when backward's memory is at its peak, and
nothing was gained by saving codes. So the values are made to read one element of a gradient, and to ignore it. Which
one: of what the first reader that depends on a gradient waits for, the last that lies in memory anyway, as the result
of a product. A gradient that is only on its way to a cast or a kernel is not written for it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

#: What a kernel can compare with zero.
_READABLE = (torch.bfloat16, torch.float16, torch.float32)
_PRODUCTS = frozenset({
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm, aten._grouped_mm, aten._scaled_grouped_mm,
    aten.convolution, aten.convolution_backward,
})  # fmt: skip


def after(values: Tensor, gradient: Tensor) -> Tensor:
    """Return ``values`` to the bit, computed after ``gradient`` is; both branches are the same, NaN or not."""
    while gradient.dim() > 0:
        gradient = aten.select.int(gradient, 0, 0)
    return torch.where(gradient > 0, values, values)


def dependent(graph: fx.Graph) -> set[fx.Node]:
    """What a gradient leads to."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in node.name
        if tangent or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def gradient_to_await(backward: fx.Graph, read: fx.Node, late: set[fx.Node]) -> fx.Node | None:
    """Return what the values of ``read`` wait for; None where its first reader needs nothing that was computed.

    Args:
        backward: the graph of the backward.
        read: a saved tensor, an input of the graph.
        late: :func:`dependent` of the graph.
    """
    place = {node: position for position, node in enumerate(backward.nodes)}
    readers = _late_readers(read, late)
    if not readers:
        return None
    first = min(readers, key=place.__getitem__)
    found = _in_memory((source for source in first.all_input_nodes if source in late), late)
    return max(found, key=place.__getitem__, default=None)


def first_reader(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return the first node of ``graph`` that reads ``node``, which has one."""
    return next(reader for reader in graph.nodes if reader in node.users)


def _late_readers(read: fx.Node, late: set[fx.Node]) -> set[fx.Node]:
    """What depends on a gradient and reads ``read``, or what backward computes from it without one."""
    found: set[fx.Node] = set()
    waiting, seen = [read], {read}
    while waiting:
        for user in waiting.pop().users:
            if user in late:
                found.add(user)
            elif user not in seen:
                seen.add(user)
                waiting.append(user)
    return found


def _in_memory(nodes: Iterable[fx.Node], late: set[fx.Node]) -> set[fx.Node]:
    """What ``nodes`` are computed from on the way to a kernel, and that lies in memory itself."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if _is_written(node):
            found.add(node)
            continue
        for source in node.all_input_nodes:
            if source in late and source not in seen:
                seen.add(source)
                waiting.append(source)
    return found


def _is_written(node: fx.Node) -> bool:
    """Whether a node is the result of a kernel of its own, and has an element to read."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or value.dtype not in _READABLE:
        return False
    if not statically_known_true(prod(value.shape) > 0):
        return False
    maker = node.args[0] if node.target is operator.getitem else node
    target = maker.target if isinstance(maker, fx.Node) else None
    if not isinstance(target, torch._ops.OpOverload) or any(a.alias_info for a in target._schema.arguments):
        return False
    if target.namespace in ("aten", "prims"):
        return target.overloadpacket in _PRODUCTS or (maker is not node and "attention" in target.name())
    return True
