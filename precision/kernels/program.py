"""Pointwise programs: what a cast kernel computes from its inputs before it quantizes, written down as data.

A program is a short list of FP32 instructions over *leaves* (tensors in memory). It exists three times: as a string,
which a custom op can carry through a compiler's cache; as PyTorch, the reference; and as a Triton function that a
kernel calls for each tile. ``IDENTITY``, the program of a stand-alone cast, returns its only leaf.

Grammar: ``LEAF,...;OP ARGUMENT ARGUMENT ...;...|RESULT,...``. A leaf is named by how it is laid over the [M, N] result:
``mn`` (an element each), ``m`` (one a row), ``n`` (one a column) or ``s`` (one). Arguments are numbers of earlier
values, leaves first, or ``#`` and a constant. Several results lie side by side along the columns of one matrix, as
``torch.cat(results, -1)`` would lay them.
"""

# Triton comes with CUDA builds of PyTorch only.
# pyright: reportMissingImports=false

from __future__ import annotations

import linecache
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

LEAF_KINDS = ("mn", "m", "n", "s")

#: Instruction -> (number of arguments, Triton expression, PyTorch function).
OPS: dict[str, tuple[int, str, Any]] = {
    "add": (2, "{0} + {1}", torch.add),
    "sub": (2, "{0} - {1}", torch.sub),
    "mul": (2, "{0} * {1}", torch.mul),
    "div": (2, "{0} / {1}", torch.div),
    "neg": (1, "-{0}", torch.neg),
    "abs": (1, "tl.abs({0})", torch.abs),
    "exp": (1, "tl.exp({0})", torch.exp),
    "log": (1, "tl.log({0})", torch.log),
    "sqrt": (1, "tl.sqrt({0})", torch.sqrt),
    "rsqrt": (1, "tl.rsqrt({0})", torch.rsqrt),
    "erf": (1, "tl.erf({0})", torch.erf),
    "sigmoid": (1, "sigmoid({0})", torch.sigmoid),
    # tanh x = 2 sigmoid(2 x) - 1, which loses nothing that FP8 would keep.
    "tanh": (1, "2.0 * sigmoid(2.0 * {0}) - 1.0", torch.tanh),
    "maximum": (2, "tl.maximum({0}, {1}, tl.PropagateNan.ALL)", torch.maximum),
    "minimum": (2, "tl.minimum({0}, {1}, tl.PropagateNan.ALL)", torch.minimum),
    "gt": (2, "({0} > {1}).to(tl.float32)", torch.gt),
    "ge": (2, "({0} >= {1}).to(tl.float32)", torch.ge),
    "lt": (2, "({0} < {1}).to(tl.float32)", torch.lt),
    "le": (2, "({0} <= {1}).to(tl.float32)", torch.le),
    "eq": (2, "({0} == {1}).to(tl.float32)", torch.eq),
    "ne": (2, "({0} != {1}).to(tl.float32)", torch.ne),
    "where": (3, "tl.where({0} != 0.0, {1}, {2})", lambda c, a, b: torch.where(c != 0, a, b)),
}

Argument = int | float


@dataclass(frozen=True)
class Instruction:
    """One operation; an integer argument names an earlier value, a float is a constant."""

    op: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Program:
    """Leaves, instructions, and which values are the results."""

    leaves: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    results: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that every argument names an earlier value."""
        assert set(self.leaves) <= set(LEAF_KINDS), self.leaves
        for place, instruction in enumerate(self.instructions, len(self.leaves)):
            assert len(instruction.arguments) == OPS[instruction.op][0], instruction
            assert all(isinstance(a, float) or 0 <= a < place for a in instruction.arguments), instruction
        assert self.results
        assert all(0 <= r < len(self.leaves) + len(self.instructions) for r in self.results)

    @property
    def pieces(self) -> int:
        """How many results lie side by side."""
        return len(self.results)

    def __str__(self) -> str:
        """Return the program's text: ``Program.parse(str(p)) == p``."""
        parts = [",".join(self.leaves)]
        for instruction in self.instructions:
            parts.append(" ".join([instruction.op, *(_spell(a) for a in instruction.arguments)]))
        return ";".join(parts) + "|" + ",".join(map(str, self.results))

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read a program's text."""
        return _parse(text)

    def reference(self, leaves: Sequence[Tensor]) -> Tensor:
        """Evaluate in FP32: the [M, N * pieces] matrix that the kernel quantizes.

        Args:
            leaves: 2-D, already shaped to broadcast: [M, N], [M, 1], [1, N] or [1, 1].
        """
        values = [leaf.to(torch.float32) for leaf in leaves]
        for instruction in self.instructions:
            arguments = [
                torch.full((), a, device=values[0].device) if isinstance(a, float) else values[a]
                for a in instruction.arguments
            ]
            values.append(OPS[instruction.op][2](*arguments).to(torch.float32))
        shape = torch.broadcast_shapes(*(leaf.shape for leaf in leaves))
        return torch.cat([values[r].expand(shape) for r in self.results], -1)

    def _gate(self, instruction: Instruction) -> int | None:
        """Whose sigmoid ``instruction`` is, or whose it multiplies by: x / (1 + exp(-x)) is how silu is decomposed.

        A sigmoid is the cheaper of the two in a kernel, and a gate's gradient has both.
        """
        if instruction.op == "sigmoid":
            (of,) = instruction.arguments
            return of if isinstance(of, int) else None
        if instruction.op != "div":
            return None
        total = self._step(instruction.arguments[1], "add")
        if total is None:
            return None
        terms = [a for a in total.arguments if isinstance(a, int)]
        if len(terms) != 1 or 1.0 not in [a for a in total.arguments if isinstance(a, float)]:
            return None
        power = self._step(terms[0], "exp")
        negative = power and self._step(power.arguments[0], "neg")
        of = negative.arguments[0] if negative else None
        return of if isinstance(of, int) else None

    def _step(self, value: Argument, op: str) -> Instruction | None:
        """The instruction that computes ``value``, where it is an ``op``."""
        if isinstance(value, float) or value < len(self.leaves):
            return None
        found = self.instructions[value - len(self.leaves)]
        return found if found.op == op else None

    def source(self) -> str:
        """Return the Triton functions of one tile; see :func:`tile_function` and :func:`along_function`."""
        along = {i: place for place, i in enumerate(i for i, kind in enumerate(self.leaves) if kind in ("n", "s"))}
        lines = ["@triton.jit", "def along(leaves, n, inside_n):"]
        for i in along:
            if self.leaves[i] == "n":
                lines.append(f"    v{i} = tl.load(leaves[{i}] + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]")
            else:
                lines.append(f"    v{i} = tl.load(leaves[{i}]).to(tl.float32)")
        lines += [
            f"    return ({''.join(f'v{i}, ' for i in along) or '0.0,'})",
            "",
            "",
            "@triton.jit",
            "def tile(leaves, strides, m, n, inside_m, inside_n, ALIGNED: tl.constexpr, known=None):",
            "    if known is None:",
            "        known = along(leaves, n, inside_n)",
            "    inside = inside_m[:, None] & inside_n[None, :]",
        ]
        for i, kind in enumerate(self.leaves):
            if kind == "mn":
                # The hint is what lets a row's elements be loaded 16 bytes at a time: a stride inside a tuple is not
                # specialized as an argument of its own would be.
                lines += [
                    f"    s{i} = strides[{i}]",
                    "    if ALIGNED:",
                    f"        s{i} = tl.multiple_of(s{i}, 8)",
                    f"    p{i} = leaves[{i}] + m[:, None] * s{i} + n[None, :]",
                    f"    v{i} = widened(tl.load(p{i}, mask=inside, other=0.0))",
                ]
            elif kind == "m":
                lines.append(f"    v{i} = tl.load(leaves[{i}] + m * strides[{i}], mask=inside_m, other=0.0)")
                lines.append(f"    v{i} = v{i}.to(tl.float32)[:, None]")
            else:
                lines.append(f"    v{i} = known[{along[i]}]")
        gates = {}
        for place, instruction in enumerate(self.instructions, len(self.leaves)):
            arguments = [_literal(a) if isinstance(a, float) else f"v{a}" for a in instruction.arguments]
            gate = self._gate(instruction)
            if gate is not None and gate not in gates:
                gates[gate] = f"g{place}"
                lines.append(f"    g{place} = {OPS['sigmoid'][1].format(f'v{gate}')}")
            if gate is None:
                result = OPS[instruction.op][1].format(*arguments)
            else:
                result = gates[gate] if instruction.op == "sigmoid" else f"{arguments[0]} * {gates[gate]}"
            lines.append(f"    v{place} = {result}")
        lines.append("    full = tl.zeros([m.shape[0], n.shape[0]], tl.float32)")
        results = ", ".join(f"tl.broadcast_to(v{r}, full.shape)" for r in self.results)
        lines.append(f"    return ({results},)")
        return "\n".join(lines) + "\n"


IDENTITY = "mn|0"


def _spell(argument: Argument) -> str:
    return f"#{argument!r}" if isinstance(argument, float) else str(argument)


def _literal(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


@lru_cache(maxsize=4096)
def _parse(text: str) -> Program:
    body, _, results = text.partition("|")
    leaves, *instructions = body.split(";")
    parsed = []
    for instruction in instructions:
        op, *arguments = instruction.split(" ")
        parsed.append(Instruction(op, tuple(float(a[1:]) if a[0] == "#" else int(a) for a in arguments)))
    return Program(tuple(leaves.split(",")), tuple(parsed), tuple(map(int, results.split(","))))


def tile_function(text: str) -> Any:
    """Return the program as a Triton function: ``tile(leaves, strides, m, n, inside_m, inside_n, ALIGNED, known)``.

    It loads one tile and returns a tuple of FP32 tiles, one a result. ``leaves`` and ``strides`` are tuples of pointers
    and of row strides in elements; ``m`` (int64) and ``n`` are the tile's rows and columns; what lies outside loads
    as zero. ``ALIGNED`` promises row strides that are multiples of 8. ``known`` is what :func:`along_function` returned
    for these columns; by default they are loaded here.
    """
    return _functions(text)["tile"]


def along_function(text: str) -> Any:
    """Return what loads the leaves that all rows share as a Triton function, ``along(leaves, n, inside_n)``: a tuple.

    A loop over tiles of the same columns calls it once, before.
    """
    return _functions(text)["along"]


@lru_cache(maxsize=4096)
def _functions(text: str) -> dict[str, Any]:
    import triton
    import triton.language as tl

    from .rounding import sigmoid, widened

    source = Program.parse(text).source()
    name = f"<narrowgate program {text}>"
    # Triton reads a function's text through inspect, which finds it here as it would in a file.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    # The module's name is part of what Triton keys its cache by, so it must not vary between processes.
    scope: dict[str, Any] = {
        "triton": triton,
        "tl": tl,
        "sigmoid": sigmoid,
        "widened": widened,
        "__name__": "narrowgate.precision.kernels.generated",
    }
    exec(compile(source, name, "exec"), scope)
    return scope
