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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.immutable_collections import immutable_list

from .kernels.program import IDENTITY, Argument, Instruction, Program

aten, prims = torch.ops.aten, torch.ops.prims

#: A kernel with more inputs than this spills registers rather than saves traffic.
_MOST_LEAVES = 8
_MOST_INSTRUCTIONS = 48
_LEAF_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.bool)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)

#: In the ``meta`` of a node that stays out of casts: what it reads no program could, and it is smaller in memory.
STANDS = "narrowgate_stands"

#: Build a value from (program under construction, arguments as values or constants).
_Emit = Callable[["_Builder", list[Any]], Any]


def _op(name: str) -> _Emit:
    return lambda build, args: build.emit(name, *args)


def _scaled_second(name: str) -> _Emit:
    """``add`` and ``sub`` with an optional ``alpha`` last."""

    def emit(build: _Builder, args: list[Any]) -> Any:
        first, second, alpha = (*args, 1.0)[:3]
        return build.emit(name, first, second if alpha == 1.0 else build.emit("mul", second, alpha))

    return emit


def _clamp(build: _Builder, args: list[Any]) -> Any:
    value, low, high = (*args, None, None)[:3]
    value = value if low is None else build.emit("maximum", value, low)
    return value if high is None else build.emit("minimum", value, high)


def _power(build: _Builder, args: list[Any]) -> Any:
    value, exponent = args
    if exponent == 2:
        return build.emit("mul", value, value)
    if exponent == 3:
        return build.emit("mul", build.emit("mul", value, value), value)
    if exponent == -0.5:
        return build.emit("rsqrt", value)
    raise _UnsupportedError


#: Pointwise operations as they stand in a decomposed graph.
_POINTWISE: dict[Any, _Emit] = {
    aten.mul.Tensor: _op("mul"), aten.mul.Scalar: _op("mul"), aten.div.Tensor: _op("div"), aten.neg.default: _op("neg"),
    aten.add.Tensor: _scaled_second("add"), aten.add.Scalar: _scaled_second("add"),
    aten.sub.Tensor: _scaled_second("sub"), aten.sub.Scalar: _scaled_second("sub"),
    aten.abs.default: _op("abs"), aten.exp.default: _op("exp"), aten.log.default: _op("log"),
    aten.sqrt.default: _op("sqrt"), aten.rsqrt.default: _op("rsqrt"), aten.erf.default: _op("erf"),
    aten.sigmoid.default: _op("sigmoid"), aten.tanh.default: _op("tanh"),
    aten.maximum.default: _op("maximum"), aten.minimum.default: _op("minimum"),
    aten.relu.default: lambda build, args: build.emit("maximum", args[0], 0.0),
    aten.clamp_min.default: _op("maximum"), aten.clamp_max.default: _op("minimum"), aten.clamp.default: _clamp,
    aten.log1p.default: lambda build, args: build.emit("log", build.emit("add", args[0], 1.0)),
    aten.expm1.default: lambda build, args: build.emit("sub", build.emit("exp", args[0]), 1.0),
    aten.reciprocal.default: lambda build, args: build.emit("div", 1.0, args[0]),
    aten.square.default: lambda build, args: build.emit("mul", args[0], args[0]),
    aten.pow.Tensor_Scalar: _power, aten.where.self: _op("where"),
    aten.gt.Scalar: _op("gt"), aten.gt.Tensor: _op("gt"), aten.ge.Scalar: _op("ge"), aten.ge.Tensor: _op("ge"),
    aten.lt.Scalar: _op("lt"), aten.lt.Tensor: _op("lt"), aten.le.Scalar: _op("le"), aten.le.Tensor: _op("le"),
    aten.eq.Scalar: _op("eq"), aten.eq.Tensor: _op("eq"), aten.ne.Scalar: _op("ne"), aten.ne.Tensor: _op("ne"),
    # Of a floating-point value: no more than how it would have been rounded in memory.
    prims.convert_element_type.default: lambda build, args: args[0],
    aten.expand.default: lambda build, args: args[0],
}  # fmt: skip
#: Arguments after these many say nothing about the value (a dtype, a shape).
_VALUE_ARGUMENTS: dict[Any, int] = {prims.convert_element_type.default: 1, aten.expand.default: 1}


class _UnsupportedError(Exception):
    """Part of a graph that a program cannot express; it stays in memory as a leaf."""


@dataclass
class _Builder:
    """A program under construction over one shape."""

    shape: Sequence[Any]
    owned: set[fx.Node]
    #: Rows will be others than the shape's, so that no leaf may lie along them.
    flat: bool = False
    leaves: list[fx.Node] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    instructions: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    _known: dict[fx.Node, Any] = field(default_factory=dict)

    def value(self, node: Any) -> Any:
        """Return the value of a graph's node: a handle ``("leaf" | "step", number)``, or a constant."""
        if isinstance(node, (int, float)):
            return float(node)
        if not isinstance(node, fx.Node):
            raise _UnsupportedError
        if node not in self._known:
            mark = len(self.leaves), len(self.instructions)
            try:
                self._known[node] = self._compute(node)
            except _UnsupportedError:
                del self.leaves[mark[0] :], self.kinds[mark[0] :], self.instructions[mark[1] :]
                self._known = {n: v for n, v in self._known.items() if self._stands(v, mark)}
                self._known[node] = self._leaf(node)
        return self._known[node]

    def emit(self, op: str, *arguments: Any) -> Any:
        """Append an instruction."""
        if len(self.instructions) >= _MOST_INSTRUCTIONS or any(a is None for a in arguments):
            raise _UnsupportedError
        self.instructions.append((op, tuple(float(a) if isinstance(a, (int, float)) else a for a in arguments)))
        return "step", len(self.instructions) - 1

    def program(self, results: Sequence[Any]) -> Program:
        """Return the program that ends in ``results``."""

        def number(argument: Any) -> Argument:
            if isinstance(argument, float):
                return argument
            kind, index = argument
            return index if kind == "leaf" else len(self.leaves) + index

        steps = tuple(Instruction(op, tuple(map(number, arguments))) for op, arguments in self.instructions)
        return Program(tuple(self.kinds), steps, tuple(int(number(r)) for r in results))

    @staticmethod
    def _stands(value: Any, mark: tuple[int, int]) -> bool:
        return isinstance(value, float) or value[1] < mark[0 if value[0] == "leaf" else 1]

    def _compute(self, node: fx.Node) -> Any:
        if node.target is aten.full.default or node.target is aten.scalar_tensor.default:
            fill = node.args[-1] if node.target is aten.full.default else node.args[0]
            if isinstance(fill, (int, float)):
                return float(fill)
        if node not in self.owned or node.target not in _POINTWISE:
            raise _UnsupportedError
        arguments = node.args[: _VALUE_ARGUMENTS.get(node.target, len(node.args))]
        values = [None if a is None else self.value(a) for a in arguments]
        values += [self.value(alpha) for name, alpha in node.kwargs.items() if name == "alpha"]
        return _POINTWISE[node.target](self, values)

    def _leaf(self, node: fx.Node) -> Any:
        kind = self._kind(node.meta.get("val"))
        if kind is None or len(self.leaves) >= _MOST_LEAVES:
            raise _UnsupportedError
        self.leaves.append(node)
        self.kinds.append(kind)
        return "leaf", len(self.leaves) - 1

    def _kind(self, tensor: Any) -> str | None:
        """How a tensor lies over the shape; None where it lies in no way that a kernel reads."""
        if not isinstance(tensor, Tensor) or tensor.dtype not in _LEAF_DTYPES:
            return None
        if _equal(tensor.shape, self.shape):
            return "mn" if not self.flat or tensor.is_contiguous() else None
        if all(statically_known_true(size == 1) for size in tensor.shape):
            return "s"
        if self.flat:
            return None
        if _equal(tensor.shape, (*self.shape[:-1], 1)):
            return "m"
        *leading, last = tensor.shape
        if statically_known_true(last == self.shape[-1]) and all(statically_known_true(n == 1) for n in leading):
            return "n"
        return None


def fuse_casts(graph: fx.Graph) -> int:
    """Move what only casts read into the casts, in place; return how many casts got a producer.

    Args:
        graph: a decomposed graph with fake tensors in ``meta["val"]``, as Inductor's post-grad passes see it.
    """
    casts = list(casts_of(graph))
    if not casts:
        return 0
    inputs = {node: source_of(node) for node in casts}
    owned = _read_by_casts_alone(graph, inputs)
    fused = sum(_fuse(node, x, owned) for node, x in inputs.items())
    dropped = sum(_drop(node) for node in casts)
    if fused or dropped:
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
    return frozenset({ops.cast_fp8.default, ops.cast_fp8_delayed.default, ops.write_bf16.default})


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
    movable = (*_POINTWISE, *_VIEWS, aten.cat.default)
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target not in movable or not node.users or STANDS in node.meta:
            continue
        if all(user in owned or inputs.get(user) is node for user in node.users) and _is_float(node):
            owned.add(node)
    return owned


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in _LEAF_DTYPES


def _fuse(cast: fx.Node, x: fx.Node, owned: set[fx.Node]) -> bool:
    top = x
    # A layer flattens the leading axes of its input, which does not change what a row is.
    while top.target in _VIEWS and top in owned:
        source = top.args[0]
        if not isinstance(source, fx.Node) or not _same_rows(top, source):
            break
        top = source
    if top.target in _VIEWS and top in owned and _fuse_flat(cast, x, owned):
        return True
    parts = _parts(top, owned, _blocked(cast))
    shape = parts[0].meta["val"].shape
    builder = _Builder(shape, owned)
    try:
        results = [builder.value(part) for part in parts]
        if any(isinstance(result, float) for result in results) or "mn" not in builder.kinds:
            return False
        program = builder.program(results)
    except _UnsupportedError:
        return False
    if builder.leaves == [x]:
        return False
    _set(cast, builder.leaves, str(program))
    return True


def _fuse_flat(cast: fx.Node, x: fx.Node, owned: set[fx.Node]) -> bool:
    """Fuse past views that make other rows of the same elements, where each leaf has an element for each of them."""
    below = x
    while below.target in _VIEWS and below in owned:
        if not isinstance(below.args[0], fx.Node):
            return False
        below = below.args[0]
    if not isinstance(below.meta.get("val"), Tensor):
        return False
    builder = _Builder(below.meta["val"].shape, owned, flat=True)
    try:
        result = builder.value(below)
        if isinstance(result, float) or "mn" not in builder.kinds:
            return False
        program = builder.program([result])
    except _UnsupportedError:
        return False
    if not program.instructions:
        return False
    leaves: list[fx.Node] = []
    for leaf, kind in zip(builder.leaves, builder.kinds, strict=True):
        viewed = leaf
        if kind == "mn":
            with cast.graph.inserting_before(cast):
                viewed = cast.graph.call_function(aten.reshape.default, (leaf, x.args[1]))
            viewed.meta["val"] = leaf.meta["val"].reshape(x.meta["val"].shape)
        leaves.append(viewed)
    _set(cast, leaves, str(program))
    return True


def _parts(top: fx.Node, owned: set[fx.Node], blocked: bool) -> list[fx.Node]:
    """What lies side by side in ``top``: the inputs of a concatenation along the last axis, of one shape."""
    if top.target is not aten.cat.default or top not in owned:
        return [top]
    tensors: list[fx.Node] = [*top.args[0]]  # type: ignore[misc]
    dim = top.args[1] if len(top.args) > 1 else 0
    shapes = [t.meta["val"].shape for t in tensors]
    last = dim in (-1, len(shapes[0]) - 1)
    alike = all(_equal(shape, shapes[0]) for shape in shapes)
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


def _equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


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
        from .kernels import program

        earlier = self.before.uuid() if isinstance(self.before, CustomGraphPass) else None
        return (get_hash_for_files((__file__, program.__file__)), earlier)


@cache
def install() -> None:
    """Have Inductor run the pass on every graph that it compiles from now on."""
    from torch._inductor import config

    config.post_grad_custom_pre_pass = CastFusion(config.post_grad_custom_pre_pass)
