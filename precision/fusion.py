"""Casts that happen where the data already is: a pass over compiled graphs that moves producers into cast kernels.

In eager mode a cast reads what a norm, an activation or a gate has just written. Under ``torch.compile`` it need not
be written at all: this pass runs on each graph after decomposition, where ``silu(g) * u`` or the scaling half of a norm
is a handful of pointwise operations, and turns those that only casts read into the casts' own
:class:`~narrowgate.precision.kernels.program.Program`. What remains are *leaves*, tensors in memory anyway: outputs of
GEMMs, sums that a residual carries on, a norm's row statistics, weights. Nobody rewrites a model for it, and a value
that an unquantized consumer reads as well stays in memory and is read from there.

Rounding between fused operations is dropped, as Inductor does: a program computes in FP32 from its leaves on.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.immutable_collections import immutable_list

from . import fusion_builder, fusion_scales
from .fusion_builder import LEAF_DTYPES, POINTWISE, Builder, UnsupportedError, same_sizes
from .fusion_scales import REDUCTIONS, VIEWS, move_scales
from .kernels import program
from .kernels.program import IDENTITY, Program

aten = torch.ops.aten


#: In the ``meta`` of a node that stays out of casts: what it reads no program could, and it is smaller in memory.
STANDS = "narrowgate_stands"


def fuse_casts(graph: fx.Graph) -> int:
    """Move what only casts read into the casts, in place; return how many casts got a producer.

    Args:
        graph: a decomposed graph with fake tensors in ``meta["val"]``, as Inductor's post-grad passes see it.
    """
    casts = list(casts_of(graph))
    scales = move_scales(graph, set(casts))
    if not casts and not scales:
        return 0
    inputs = {node: source_of(node) for node in casts}
    owned = _read_by_casts_alone(graph, inputs)
    fused = sum(_fuse(node, x, owned) for node, x in inputs.items())
    dropped = sum(_drop(node) for node in casts)
    if fused or dropped or scales:
        graph.eliminate_dead_code()
    return fused


def _drop(node: fx.Node) -> bool:
    """Remove a write of what lies in memory as BF16 already: a product reads it from there."""
    if node.target is not torch.ops.narrowgate.write_bf16.default or _argument(node, 1) != IDENTITY:
        return False
    (x,) = _leaves(node)
    if x.meta["val"].dtype is not torch.bfloat16:
        return False
    node.replace_all_uses_with(x)
    return True


def casts_of(graph: fx.Graph) -> Iterator[fx.Node]:
    """Stand-alone casts: plain operators, or in the wrapper that makes a mutating operator functional."""
    for node in graph.nodes:
        if node.op == "call_function" and _operator(node) in _cast_operators() and _argument(node, 1) == IDENTITY:
            yield node


@cache
def _cast_operators() -> frozenset[Any]:
    from . import cast_operators  # noqa: F401 - registers the operators

    ops = torch.ops.narrowgate
    casts = (ops.cast_fp8, ops.cast_fp8_summed, ops.cast_fp8_delayed, ops.cast_fp8_delayed_summed, ops.write_bf16)
    return frozenset(cast.default for cast in casts)


def _operator(node: fx.Node) -> Any:
    wrapped = node.target in (
        torch.ops.higher_order.auto_functionalized,
        torch.ops.higher_order.auto_functionalized_v2,
    )
    return node.args[0] if wrapped else node.target


def source_of(cast: fx.Node) -> fx.Node:
    """Return the tensor that a stand-alone cast reads."""
    return _leaves(cast)[0]


def program_of(cast: fx.Node) -> str:
    """Return the text of the program that a cast computes."""
    return _argument(cast, 1)


_NAMES = ("leaves", "program")


def _argument(node: fx.Node, position: int) -> Any:
    if _NAMES[position] in node.kwargs:
        return node.kwargs[_NAMES[position]]
    return node.args[position]


def _leaves(node: fx.Node) -> list[fx.Node]:
    return list(_argument(node, 0))


def _set(node: fx.Node, leaves: list[fx.Node], program: str) -> None:
    by_name = "leaves" in node.kwargs
    if by_name:
        node.kwargs = {**node.kwargs, "leaves": leaves, "program": program}
    else:
        node.args = (leaves, program, *node.args[2:])
    # What Inductor takes an operator's layouts from is kept beside its arguments, and must follow them.
    if "eager_input_vals" in node.meta:
        args, kwargs = node.meta["eager_input_vals"]
        fakes = immutable_list(leaf.meta["val"] for leaf in leaves)
        if by_name:
            kwargs = {**kwargs, "leaves": fakes, "program": program}
        else:
            args = (fakes, program, *args[2:])
        node.meta["eager_input_vals"] = (args, kwargs)


def _read_by_casts_alone(graph: fx.Graph, inputs: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Nodes whose every reader is a cast's input or such a node itself."""
    owned: set[fx.Node] = set()
    movable = (*POINTWISE, *VIEWS, aten.cat.default)
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target not in movable or not node.users or STANDS in node.meta:
            continue
        if all(user in owned or inputs.get(user) is node for user in node.users) and _is_float(node):
            owned.add(node)
    return owned


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in LEAF_DTYPES


@dataclass
class _Found:
    """What a cast may compute: a program and its leaves."""

    program: Program
    leaves: list[fx.Node]
    #: How leaves that lie over the whole shape are viewed as the cast's rows; None where they are.
    rows: fx.Node | None = None


def _fuse(cast: fx.Node, x: fx.Node, owned: set[fx.Node]) -> bool:
    """Move into a cast what makes ``x``: what only casts read, and what moves less computed once more than read."""
    found = _expressed(cast, x, owned)
    roots = [x] if found is None else _over_all(found)
    again = _expressed(cast, x, owned | _inlined(cast, roots))
    if again is not None and _bytes(cast, _over_all(again)) < _bytes(cast, roots):
        found = again
    if found is None:
        return False
    leaves: list[fx.Node] = []
    for leaf, kind in zip(found.leaves, found.program.leaves, strict=True):
        viewed = leaf
        if found.rows is not None and kind == "mn":
            with cast.graph.inserting_before(cast):
                viewed = cast.graph.call_function(aten.reshape.default, (leaf, found.rows.args[1]))
            viewed.meta["val"] = leaf.meta["val"].reshape(found.rows.meta["val"].shape)
        leaves.append(viewed)
    _set(cast, leaves, str(found.program))
    return True


def _expressed(cast: fx.Node, x: fx.Node, owned: set[fx.Node]) -> _Found | None:
    top = x
    # A layer flattens the leading axes of its input, which does not change what a row is.
    while top.target in VIEWS and top in owned:
        source = top.args[0]
        if not isinstance(source, fx.Node) or not _same_rows(top, source):
            break
        top = source
    if top.target in VIEWS and top in owned and (flat := _expressed_flat(x, owned)) is not None:
        return flat
    parts = _parts(top, owned, _blocked(cast))
    builder = Builder(parts[0].meta["val"].shape, owned)
    try:
        results = [builder.value(part) for part in parts]
        if any(isinstance(result, float) for result in results) or "mn" not in builder.kinds:
            return None
        found = builder.program(results)
    except UnsupportedError:
        return None
    return None if builder.leaves == [x] else _Found(found, builder.leaves)


def _expressed_flat(x: fx.Node, owned: set[fx.Node]) -> _Found | None:
    """Look past views that make other rows of the same elements, where each leaf has an element for each of them."""
    below = x
    while below.target in VIEWS and below in owned:
        if not isinstance(below.args[0], fx.Node):
            return None
        below = below.args[0]
    if not isinstance(below.meta.get("val"), Tensor):
        return None
    builder = Builder(below.meta["val"].shape, owned, flat=True)
    try:
        result = builder.value(below)
        if isinstance(result, float) or "mn" not in builder.kinds:
            return None
        found = builder.program([result])
    except UnsupportedError:
        return None
    return _Found(found, builder.leaves, rows=x) if found.instructions else None


def _over_all(found: _Found) -> list[fx.Node]:
    """Leaves with an element for each of the result; the others count nothing."""
    return [leaf for leaf, kind in zip(found.leaves, found.program.leaves, strict=True) if kind == "mn"]


def _inlined(cast: fx.Node, roots: Sequence[fx.Node]) -> set[fx.Node]:
    """What makes ``roots`` and could be computed once more: back to what lies in memory whoever reads it.

    The roots are among them wherever they lie: one may be larger than what it is made of.
    """
    movable = (*POINTWISE, *VIEWS, aten.cat.default)
    found: set[fx.Node] = set()
    left = list(roots)
    while left:
        node = left.pop()
        known = node.op == "call_function" and node.target in movable and STANDS not in node.meta
        if node not in found and known and _is_float(node) and (node in roots or not _in_memory(node, cast)):
            found.add(node)
            left += node.all_input_nodes
    return found


def _in_memory(node: fx.Node, cast: fx.Node) -> bool:
    """Whether ``node`` is written for another reader than ``cast``: pointwise readers and sums compute it anew."""
    if node.op != "call_function" or node.target not in (*POINTWISE, *VIEWS, aten.cat.default):
        return True
    for user in node.users:
        if user.target in VIEWS or user.target is aten.cat.default:
            if _in_memory(user, cast):
                return True
        elif user is not cast and user.target not in POINTWISE and user.target not in REDUCTIONS:
            return True
    return False


def _bytes(cast: fx.Node, leaves: Sequence[fx.Node]) -> int:
    """Bytes that ``cast`` moves for each element of a leaf: read in every pass, and written where only it has it so."""
    sizes = [(leaf.meta["val"].element_size(), _in_memory(leaf, cast)) for leaf in leaves]
    return sum(size * (_passes(cast) + (not there)) for size, there in sizes)


def _passes(cast: fx.Node) -> int:
    """How often a cast reads its leaves: twice where a scale, or a magnitude to clip at, must be found first."""
    ops = torch.ops.narrowgate
    if _operator(cast) not in (ops.cast_fp8.default, ops.cast_fp8_summed.default):
        return 1
    texts = [a for a in (*cast.args, *cast.kwargs.values()) if isinstance(a, str) and a.startswith("fp8")]
    return 1 if all("x128" in text and "clip" not in text for text in texts) else 2


def _parts(top: fx.Node, owned: set[fx.Node], blocked: bool) -> list[fx.Node]:
    """What lies side by side in ``top``: the inputs of a concatenation along the last axis, of one shape."""
    if top.target is not aten.cat.default or top not in owned:
        return [top]
    tensors: list[fx.Node] = [*top.args[0]]  # type: ignore[misc]
    dim = top.args[1] if len(top.args) > 1 else 0
    shapes = [t.meta["val"].shape for t in tensors]
    last = dim in (-1, len(shapes[0]) - 1)
    alike = all(same_sizes(shape, shapes[0]) for shape in shapes)
    # A block must not reach over two parts.
    alike = alike and not (blocked and not statically_known_true(shapes[0][-1] % 128 == 0))
    return tensors if last and alike and len(set(tensors)) == len(tensors) else [top]


def _blocked(cast: fx.Node) -> bool:
    """Whether a scale of the cast reaches over a block of columns."""
    given = (*cast.args, *cast.kwargs.values())
    return any(isinstance(argument, str) and "x128" in argument for argument in given)


def _same_rows(view: fx.Node, source: fx.Node) -> bool:
    if not isinstance(source.meta.get("val"), Tensor):
        return False
    old, new = source.meta["val"].shape, view.meta["val"].shape
    return len(old) > 0 and len(new) > 0 and statically_known_true(operator.eq(old[-1], new[-1]))


class CastFusion(CustomGraphPass):
    """:func:`fuse_casts` as Inductor takes it, after a pass that was set before."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        """Run the earlier pass, if any, then fuse."""
        if self.before is not None:
            self.before(graph)
        fuse_casts(graph)

    def uuid(self) -> Any:
        """Key of Inductor's cache: what this pass does is decided by its sources."""
        earlier = self.before.uuid() if isinstance(self.before, CustomGraphPass) else None
        sources = (__file__, fusion_builder.__file__, fusion_scales.__file__, program.__file__)
        return (get_hash_for_files(sources), fusion_scales.enabled, earlier)


@cache
def install() -> None:
    """Have Inductor run the pass on every graph that it compiles from now on."""
    from torch._inductor import config

    config.post_grad_custom_pre_pass = CastFusion(config.post_grad_custom_pre_pass)
