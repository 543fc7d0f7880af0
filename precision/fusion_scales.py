"""Scales of rows taken out of products, where what reads the product can multiply by them on the way.

On Hopper the library multiplies operands with one scale each by other kernels than operands with a scale a row, and
those are faster: by a tenth where both sides are thousands and the product accumulates accurately, by a quarter to a
half where the contraction is short, more than twice where the result has few tiles, whose contraction they split
(``benchmarks/gemm_rates_h200.json``). A scale a row is constant along the contraction, so it can as well be applied to
the result: this pass over compiled graphs has such a product multiply codes alone, and puts the two scales before its
readers. Pointwise readers, sums and casts compute that on the way; where the result must be written anyway, it pays for
long contractions only.

The result is rounded to its dtype before it is scaled, and once more after: in BF16 by up to 2^-9 more.

What it gains in a step has not been measured, so it is done only where ``NARROWGATE_MOVE_ROW_SCALES=1`` stands in the
environment.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import fx

from .fusion_builder import POINTWISE

aten, prims = torch.ops.aten, torch.ops.prims

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
#: What Inductor computes together with the pointwise operations before it.
REDUCTIONS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default)
#: Results of fewer elements have fewer tiles of 128 x 128 than the device has multiprocessors.
_FEW = 132 * 128 * 128
#: Contractions up to the first, in products that accumulate fast; and those from which a pass over the result costs
#: less than is gained, with few tiles and with many.
_SHORT, _LONG_OF_FEW, _LONG = 512, 8192, 32768
#: Whether row scales are moved at all; part of the key of compilers' caches.
enabled = os.environ.get("NARROWGATE_MOVE_ROW_SCALES") == "1"


def move_scales(graph: fx.Graph, casts: set[fx.Node]) -> int:
    """Take row scales out of products, in place; return out of how many.

    Args:
        graph: a decomposed graph with fake tensors in ``meta["val"]``, as Inductor's post-grad passes see it.
        casts: its stand-alone casts, which compute what makes their tensor.
    """
    if not enabled:
        return 0
    products = [node for node in graph.find_nodes(op="call_function", target=aten._scaled_mm.default) if _by_row(node)]
    moved = [node for node in products if _worth_it(node, _on_the_way(node, casts))]
    one: fx.Node | None = None
    for node in moved:
        one = _move(graph, node, one)
    return len(moved)


def rows_are_slow(device: torch.device) -> bool:
    """Whether products with a scale a row are multiplied by slower kernels on ``device``: measured on Hopper alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _by_row(node: fx.Node) -> bool:
    first, _, rows, columns = (_traced(argument) for argument in node.args[:4])
    if first is None or rows is None or columns is None or node.kwargs or node.args[4:6] not in ((), (None, None)):
        return False
    by_row = rows.dim() == columns.dim() == 2 and rows.shape[1] == columns.shape[0] == 1
    return by_row and rows_are_slow(first.device)


def _traced(argument: Any) -> torch.Tensor | None:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _on_the_way(node: fx.Node, casts: set[fx.Node]) -> bool:
    """Whether all that read ``node`` multiply by its scales as they read it."""
    for user in node.users:
        if user.target in VIEWS and _same_columns(node, user):
            if not _on_the_way(user, casts):
                return False
        elif user not in casts and user.target not in POINTWISE and user.target not in REDUCTIONS:
            return False
    return bool(node.users)


def _same_columns(node: fx.Node, view: fx.Node) -> bool:
    return bool(view.meta["val"].shape) and view.meta["val"].shape[-1] == node.meta["val"].shape[-1]


def _worth_it(node: fx.Node, on_the_way: bool) -> bool:
    (m, k), n = (_size(s) for s in node.args[0].meta["val"].shape), _size(node.meta["val"].shape[1])  # type: ignore[union-attr]
    fast = len(node.args) > 7 and bool(node.args[7])
    few = m * n < _FEW
    if on_the_way:
        return not fast or few or k <= _SHORT
    return k >= _LONG_OF_FEW if few else k >= _LONG and not fast


def _size(size: Any) -> int:
    """A size; of one that is not known before it runs, that of the batch it was traced with."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def _move(graph: fx.Graph, node: fx.Node, one: fx.Node | None) -> fx.Node:
    """Replace a product; return the scale of 1 that all share."""
    first, second, rows, columns, *_, dtype, fast = (*node.args, *(None, None, None, False)[len(node.args) - 4 :])
    assert isinstance(rows, fx.Node)
    assert isinstance(columns, fx.Node)
    value = node.meta["val"]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        with value.fake_mode:
            fakes = fx.map_arg(args, lambda argument: argument.meta["val"])
            made.meta["val"] = target(*fakes, **kwargs)
        return made

    def scaled(product: fx.Node, by_row: fx.Node) -> fx.Node:
        """Multiply a view of the product, with the product's columns, by its scales."""
        wide = call(prims.convert_element_type.default, product, torch.float32)
        both = call(aten.mul.Tensor, call(aten.mul.Tensor, wide, by_row), columns)
        return call(prims.convert_element_type.default, both, value.dtype)

    with graph.inserting_before(node):
        one = one or call(aten.full.default, [], 1.0, dtype=torch.float32, device=value.device)
        product = graph.call_function(aten._scaled_mm.default, (first, second, one, one, None, None, dtype, fast))
        product.meta = {**node.meta, "val": value}
        if "eager_input_vals" in node.meta:
            # What Inductor takes an operator's layouts from is kept beside its arguments, and must follow them.
            product.meta["eager_input_vals"] = (fx.map_arg(product.args, lambda argument: argument.meta["val"]), {})
    readers = list(node.users)
    views = [user for user in readers if user.target in VIEWS and _same_columns(node, user)]
    for view in views:
        with graph.inserting_before(view):
            # Sizes as they stand in the graph, where one that is not known before it runs is a node.
            sizes: Any = view.args[1]
            by_row = call(aten.reshape.default, rows, [*sizes[:-1], 1])
            view.replace_all_uses_with(scaled(call(view.target, product, sizes), by_row))
        graph.erase_node(view)
    others = [user for user in readers if user not in views]
    if others:
        with graph.inserting_before(node):
            result = scaled(product, rows)
        for user in others:
            user.replace_input_with(node, result)
    graph.erase_node(node)
    return one
