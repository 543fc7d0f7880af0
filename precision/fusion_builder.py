"""Programs of cast kernels, built from the pointwise part of a graph: what its operations and its tensors become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .kernels.program import Argument, Instruction, Program

aten, prims = torch.ops.aten, torch.ops.prims

#: A kernel with more inputs than this spills registers rather than saves traffic.
_MOST_LEAVES = 8
_MOST_INSTRUCTIONS = 48
LEAF_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.bool)

#: Build a value from (program under construction, arguments as values or constants).
_Emit = Callable[["Builder", list[Any]], Any]


def _op(name: str) -> _Emit:
    return lambda build, args: build.emit(name, *args)


def _scaled_second(name: str) -> _Emit:
    """``add`` and ``sub`` with an optional ``alpha`` last."""

    def emit(build: Builder, args: list[Any]) -> Any:
        first, second, alpha = (*args, 1.0)[:3]
        return build.emit(name, first, second if alpha == 1.0 else build.emit("mul", second, alpha))

    return emit


def _clamp(build: Builder, args: list[Any]) -> Any:
    value, low, high = (*args, None, None)[:3]
    value = value if low is None else build.emit("maximum", value, low)
    return value if high is None else build.emit("minimum", value, high)


def _power(build: Builder, args: list[Any]) -> Any:
    value, exponent = args
    if exponent == 2:
        return build.emit("mul", value, value)
    if exponent == 3:
        return build.emit("mul", build.emit("mul", value, value), value)
    if exponent == -0.5:
        return build.emit("rsqrt", value)
    raise UnsupportedError


#: Pointwise operations as they stand in a decomposed graph.
POINTWISE: dict[Any, _Emit] = {
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


class UnsupportedError(Exception):
    """Part of a graph that a program cannot express; it stays in memory as a leaf."""


@dataclass
class Builder:
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
            raise UnsupportedError
        if node not in self._known:
            mark = len(self.leaves), len(self.instructions)
            try:
                self._known[node] = self._compute(node)
            except UnsupportedError:
                del self.leaves[mark[0] :], self.kinds[mark[0] :], self.instructions[mark[1] :]
                self._known = {n: v for n, v in self._known.items() if self._stands(v, mark)}
                self._known[node] = self._leaf(node)
        return self._known[node]

    def emit(self, op: str, *arguments: Any) -> Any:
        """Append an instruction."""
        if len(self.instructions) >= _MOST_INSTRUCTIONS or any(a is None for a in arguments):
            raise UnsupportedError
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
        if node not in self.owned or node.target not in POINTWISE:
            raise UnsupportedError
        arguments = node.args[: _VALUE_ARGUMENTS.get(node.target, len(node.args))]
        values = [None if a is None else self.value(a) for a in arguments]
        values += [self.value(alpha) for name, alpha in node.kwargs.items() if name == "alpha"]
        return POINTWISE[node.target](self, values)

    def _leaf(self, node: fx.Node) -> Any:
        kind = self._kind(node.meta.get("val"))
        if kind is None or len(self.leaves) >= _MOST_LEAVES:
            raise UnsupportedError
        self.leaves.append(node)
        self.kinds.append(kind)
        return "leaf", len(self.leaves) - 1

    def _kind(self, tensor: Any) -> str | None:
        """How a tensor lies over the shape; None where it lies in no way that a kernel reads."""
        if not isinstance(tensor, Tensor) or tensor.dtype not in LEAF_DTYPES:
            return None
        if same_sizes(tensor.shape, self.shape):
            return "mn" if not self.flat or tensor.is_contiguous() else None
        if all(statically_known_true(size == 1) for size in tensor.shape):
            return "s"
        if self.flat:
            return None
        if same_sizes(tensor.shape, (*self.shape[:-1], 1)):
            return "m"
        *leading, last = tensor.shape
        if statically_known_true(last == self.shape[-1]) and all(statically_known_true(n == 1) for n in leading):
            return "n"
        return None


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal, for every size that they may have."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))
