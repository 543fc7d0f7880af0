"""The ``where`` language: a comparison over a layer's attributes, parsed by Python's grammar, run by ours.

``ast`` only parses; what it returns is checked node by node against a short list and turned into closures over
columns (one numpy array an attribute, one entry a layer), so nothing of the text is ever executed and a rule
costs a few array operations however many layers there are.

Numbers are float64. A missing attribute is NaN or None, arithmetic that leaves the finite numbers counts as
missing, and a comparison with something missing is false.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from ..precision.errors import did_you_mean
from .errors import ExpressionError, found

NUMBERS = ("in_features", "out_features", "params", "index", "depth")
STRINGS = ("type", "name")
ATTRIBUTES = NUMBERS + STRINGS

MAX_LENGTH = 500
MAX_NODES = 200

Columns = Mapping[str, Any]
_Evaluate = Callable[[Columns], Any]

_ARITHMETIC: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
}
_ORDER: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
}
_MEMBER: dict[type[ast.cmpop], str] = {ast.In: "in", ast.NotIn: "not in"}


@dataclass(frozen=True)
class Where:
    """A parsed condition."""

    text: str
    #: One spelling for every way to write the same expression (spaces, quotes, redundant brackets).
    canonical: str
    _evaluate: _Evaluate

    def __call__(self, columns: Columns) -> Any:
        """Return a boolean array, one entry a layer.

        ``columns`` maps each of :data:`ATTRIBUTES` to an array: float64 with NaN, or objects with None.
        """
        with np.errstate(all="ignore"):
            return self._evaluate(columns)


@dataclass(frozen=True)
class _Term:
    kind: str  # "number", "text", "truth" or "list"
    canonical: str
    evaluate: _Evaluate


@lru_cache(maxsize=4096)
def parse_where(text: str) -> Where:
    """Parse a condition such as ``in_features >= 1024 and type == "Linear"``.

    Raises:
        ExpressionError: with the offset of the fault.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"found a condition of {len(text)} characters, expected at most {MAX_LENGTH}")
    if not text.strip():
        raise ExpressionError(f"found an empty condition, expected a comparison over {', '.join(ATTRIBUTES)}")
    source = "".join(" " if c in "\r\n\t\f" else c for c in text)
    lead = len(source) - len(source.lstrip(" "))
    source = source.strip(" ")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of `1 is 1` and of stray backslashes; we refuse or read them
            tree = ast.parse(source, mode="eval")
    except SyntaxError as error:
        offset = lead + max((error.offset or 1) - 1, 0)
        raise ExpressionError(f"found {found(text)}, expected a condition: {error.msg}", offset) from None
    except (ValueError, RecursionError, MemoryError):
        raise ExpressionError("found a condition that cannot be parsed (too deep, or a NUL character)") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ExpressionError(f"found a condition of more than {MAX_NODES} parts, expected a shorter one")
    parser = _Parser(source, lead)
    term = parser.term(tree.body)
    if term.kind != "truth":
        parser.fail(tree.body, f"found {_noun(term)}, expected a comparison such as in_features >= 1024")
    return Where(text, term.canonical, term.evaluate)


class _Parser:
    def __init__(self, source: str, lead: int) -> None:
        self.bytes = source.encode()
        self.lead = lead

    def fail(self, node: ast.AST, message: str) -> NoReturn:
        # ast counts UTF-8 bytes
        column = len(self.bytes[: getattr(node, "col_offset", 0)].decode(errors="ignore"))
        raise ExpressionError(message, self.lead + column)

    def term(self, node: ast.expr) -> _Term:
        if isinstance(node, ast.BoolOp):
            return self._logic(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node)
        if isinstance(node, ast.Name):
            return self._attribute(node)
        if isinstance(node, ast.Constant):
            return self._constant(node)
        return self.fail(node, f"found {_describe(node)}, expected comparison, and/or/not, arithmetic or text")

    def _logic(self, node: ast.BoolOp) -> _Term:
        parts = [self._of_kind(value, "truth", "a comparison") for value in node.values]
        word, join = ("and", np.logical_and) if isinstance(node.op, ast.And) else ("or", np.logical_or)
        evaluates = [part.evaluate for part in parts]

        def evaluate(columns: Columns) -> Any:
            result = evaluates[0](columns)
            for other in evaluates[1:]:
                result = join(result, other(columns))
            return result

        return _Term("truth", "(" + f" {word} ".join(part.canonical for part in parts) + ")", evaluate)

    def _unary(self, node: ast.UnaryOp) -> _Term:
        if isinstance(node.op, ast.Not):
            inner = self._of_kind(node.operand, "truth", "a comparison")
            return _Term("truth", f"(not {inner.canonical})", lambda c: np.logical_not(inner.evaluate(c)))
        if isinstance(node.op, ast.Invert):
            self.fail(node, "found operator '~', expected 'not'")
        inner = self._of_kind(node.operand, "number", "a number")
        if isinstance(node.op, ast.UAdd):
            return inner
        return _Term("number", f"(-{inner.canonical})", lambda c: -inner.evaluate(c))

    def _arithmetic(self, node: ast.BinOp) -> _Term:
        known = _ARITHMETIC.get(type(node.op))
        if known is None:
            self.fail(node, f"found {_describe(node.op)}, expected one of + - * / // %")
        sign, apply = known
        left = self._of_kind(node.left, "number", "a number")
        right = self._of_kind(node.right, "number", "a number")
        return _Term(
            "number",
            f"({left.canonical} {sign} {right.canonical})",
            lambda c: apply(left.evaluate(c), right.evaluate(c)),
        )

    def _compare(self, node: ast.Compare) -> _Term:
        evaluates: list[_Evaluate] = []
        canonical: list[str] = []
        left_node = node.left
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            term = self._one_comparison(left_node, op, right_node)
            evaluates.append(term.evaluate)
            canonical.append(term.canonical)
            left_node = right_node

        def evaluate(columns: Columns) -> Any:
            result = evaluates[0](columns)
            for other in evaluates[1:]:
                result = np.logical_and(result, other(columns))
            return result

        text = canonical[0] if len(canonical) == 1 else "(" + " and ".join(canonical) + ")"
        return _Term("truth", text, evaluate)

    def _one_comparison(self, left_node: ast.expr, op: ast.cmpop, right_node: ast.expr) -> _Term:
        left = self.term(left_node)
        if type(op) in _MEMBER:
            return self._membership(left, left_node, op, right_node)
        if type(op) not in _ORDER:
            self.fail(left_node, f"found {_describe(op)}, expected one of == != < <= > >= in, not in")
        sign, apply = _ORDER[type(op)]
        right = self.term(right_node)
        if left.kind != right.kind or left.kind not in ("number", "text"):
            self.fail(right_node, f"found {_noun(left)} {sign} {_noun(right)}, expected two numbers or two texts")
        if left.kind == "text" and sign not in ("==", "!="):
            self.fail(left_node, f"found text {sign} text, expected == or != (or in) between texts")
        present = _both_finite if left.kind == "number" else _both_text

        def evaluate(columns: Columns) -> Any:
            a, b = left.evaluate(columns), right.evaluate(columns)
            return np.logical_and(apply(a, b), present(a, b))

        return _Term("truth", f"({left.canonical} {sign} {right.canonical})", evaluate)

    def _membership(self, left: _Term, left_node: ast.expr, op: ast.cmpop, right_node: ast.expr) -> _Term:
        word = _MEMBER[type(op)]
        wanted = isinstance(op, ast.In)
        if left.kind not in ("number", "text"):
            self.fail(left_node, f"found {_noun(left)} {word} .., expected a number or a text before '{word}'")
        if isinstance(right_node, ast.List | ast.Tuple):
            items = [self._of_kind(item, left.kind, _NOUNS[left.kind]) for item in right_node.elts]
            canonical = "(" + ", ".join(item.canonical for item in items) + ")"
            present = _both_finite if left.kind == "number" else _both_text

            def evaluate(columns: Columns) -> Any:
                a = left.evaluate(columns)
                hit: Any = np.False_
                for item in items:
                    hit = np.logical_or(hit, a == item.evaluate(columns))
                return np.logical_and(hit if wanted else np.logical_not(hit), present(a, a))

            return _Term("truth", f"({left.canonical} {word} {canonical})", evaluate)
        right = self.term(right_node)
        if left.kind != "text" or right.kind != "text":
            self.fail(right_node, f"found {_noun(left)} {word} {_noun(right)}, expected text in text, or a list")

        def contains(columns: Columns) -> Any:
            return _contains(left.evaluate(columns), right.evaluate(columns), wanted)

        return _Term("truth", f"({left.canonical} {word} {right.canonical})", contains)

    def _attribute(self, node: ast.Name) -> _Term:
        name = node.id
        if name not in ATTRIBUTES:
            hint = did_you_mean(name, ATTRIBUTES)
            self.fail(node, f"unknown attribute '{name}'{hint} (known: {', '.join(ATTRIBUTES)})")
        return _Term("number" if name in NUMBERS else "text", name, lambda c: c[name])

    def _constant(self, node: ast.Constant) -> _Term:
        value = node.value
        if isinstance(value, str):
            return _Term("text", _quote(value), lambda c: value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(node, f"found {_describe(node)}, expected a number or a quoted text")
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        if number == float("inf"):
            self.fail(node, "found a number too large, expected at most 1.8e308")
        return _Term("number", repr(number), lambda c: number)

    def _of_kind(self, node: ast.expr, kind: str, expected: str) -> _Term:
        term = self.term(node)
        if term.kind != kind:
            self.fail(node, f"found {_noun(term)}, expected {expected}")
        return term


_NOUNS = {"number": "a number", "text": "a text", "truth": "a comparison", "list": "a list"}


def _noun(term: _Term) -> str:
    if term.canonical in ATTRIBUTES:
        return f"{term.canonical} ({_NOUNS[term.kind]})"
    return _NOUNS[term.kind]


def _describe(node: ast.AST) -> str:
    names = {
        "Call": "a function call",
        "Attribute": "an attribute access",
        "Subscript": "a subscript",
        "Lambda": "a lambda",
        "List": "a list (which stands only after 'in')",
        "Tuple": "a list (which stands only after 'in')",
        "IfExp": "an if expression",
        "JoinedStr": "an f-string",
        "Pow": "operator '**'",
        "Is": "operator 'is'",
        "IsNot": "operator 'is not'",
        "Constant": f"constant {found(str(getattr(node, 'value', '')))}",
    }
    return names.get(type(node).__name__, f"Python's {type(node).__name__}")


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _both_finite(a: Any, b: Any) -> Any:
    return np.logical_and(np.isfinite(a), np.isfinite(b))


def _present(a: Any) -> Any:
    return np.array([x is not None for x in a.tolist()]) if isinstance(a, np.ndarray) else np.bool_(a is not None)


def _both_text(a: Any, b: Any) -> Any:
    return np.logical_and(_present(a), _present(b))


def _contains(needles: Any, haystacks: Any, wanted: bool) -> Any:
    if isinstance(needles, str) and isinstance(haystacks, np.ndarray):
        return np.array([h is not None and (needles in h) == wanted for h in haystacks.tolist()], dtype=bool)
    if isinstance(needles, str) and isinstance(haystacks, str):
        return np.bool_((needles in haystacks) == wanted)
    pairs = zip(*(a.tolist() for a in np.broadcast_arrays(needles, haystacks)), strict=True)
    return np.array([n is not None and h is not None and (n in h) == wanted for n, h in pairs], dtype=bool)
