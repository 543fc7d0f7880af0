"""Noting a forward: which layer, pointwise operation or norm made every tensor, and which of them read it.

Functions are seen by a mode, modules by hooks. A layer, and the outermost module without a layer in it, is noted as a
whole. What no region may hold (a product outside of layers, a lookup, a function with a backward of its own) is noted
as an unknown reader or maker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ..recipes.targets import Target, find_targets, named_modules

#: Names of the operations that compilers fuse into what reads them, as functions and as methods.
_FUSABLE = frozenset(
    {
        *("silu", "gelu", "relu", "hardswish", "sigmoid", "tanh", "softplus", "leaky_relu", "elu", "mish", "relu6"),
        *("mul", "add", "sub", "div", "rsub", "true_divide", "neg", "pow", "exp", "sqrt", "rsqrt", "square", "abs"),
        *("__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__rsub__", "__truediv__", "__neg__", "__pow__"),
        *("clamp", "dropout", "rms_norm", "layer_norm"),
        *("to", "float", "bfloat16", "half", "type_as"),
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "chunk", "split", "cat"),
    }
)
#: Of these, what may hand back the tensor that it was given.
_UNCHANGED = frozenset({"to", "float", "bfloat16", "half", "type_as", "view", "reshape", "flatten"})
#: A module that calls one of these is no producer: it multiplies, looks up, or mixes rows.
_NOT_POINTWISE = (
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "bmm", "baddbmm", "einsum", "bilinear", "conv",
    "attention", "embedding", "index", "gather", "scatter", "cumsum", "sort", "softmax",
)  # fmt: skip


@dataclass(frozen=True)
class Leaf:
    """A tensor that a region is given: its layout, and the values themselves where they are no floating point."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    values: Tensor | None = field(default=None, repr=False, compare=False)

    def make(self, device: torch.device) -> Tensor:
        """Return a random tensor of this layout, or the values that were kept."""
        if self.values is not None:
            return self.values
        if any(stride == 0 and size > 1 for size, stride in zip(self.shape, self.stride, strict=True)):
            made = torch.empty(self.shape, dtype=self.dtype, device=device)  # expanded: it has no memory of its own
        else:
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.normal_().requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Product:
    """One layer's product within a region: y [M, N] = x [M, K] · Wᵀ, or what comes closest to it."""

    name: str
    type: str
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """Floating-point operations of its forward, backward twice that."""
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True)
class Value:
    """Stands for a tensor among an operation's arguments."""

    index: int


@dataclass(frozen=True)
class Operation:
    """One call: of a function or method by its name, or of a module by its path."""

    kind: str
    target: Any
    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: One value, or several where it returned a tuple or list.
    out: tuple[int, ...]
    several: bool = False
    products: tuple[Product, ...] = ()

    def reads(self) -> list[int]:
        """Return the values among the arguments."""
        return [leaf.index for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)]


class Recorder(TorchFunctionMode):
    """Notes which operation made and which read every tensor of a forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        #: Operations that read a value by number; None is whatever is no operation that a region may hold.
        self.readers: dict[int, set[int | None]] = defaultdict(set)
        self.leaves: dict[int, Leaf] = {}
        self._values: Any = WeakTensorKeyDictionary()
        self._count = 0
        #: Within a module that is noted as a whole: how deep, and whether something in it is not pointwise.
        self._depth, self._opaque = 0, False
        self._modules = {name: module for name, module, _ in named_modules(model)}
        names = {id(module): name for name, module in self._modules.items()}
        self._layers: dict[str, list[Target]] = defaultdict(list)
        for target in find_targets(model)[0]:
            self._layers[names[id(target.caller or target.module)]].append(target)
        above = {"", *(name[:i] for name in self._layers for i, c in enumerate(name) if c == ".")}
        #: Layers, and the outermost modules without one: both are noted as a whole.
        self._whole = {
            name
            for name in self._modules
            if name in self._layers or (name not in above and name.rpartition(".")[0] in above - self._layers.keys())
        } - {""}
        if "" in self._layers:
            self._whole = {""}

    def watching(self) -> _Watching:
        """Return a context within which the model's forward is noted."""
        return _Watching(self, [(self._modules[name], name) for name in self._whole])

    def facts(self, operation: Operation) -> Any:
        """Return what tells one operation from another."""
        if operation.kind != "call_module":
            return operation.label
        module = self._modules[operation.target]
        return repr(module), tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self._depth:
            self._opaque |= any(part in name for part in _NOT_POINTWISE)
            return out
        if any(isinstance(part, Tensor) for part in tree_leaves(out)):
            self._function(func, name, args, kwargs, out)
        return out

    def enter(self) -> None:
        """Begin a module that is noted as a whole."""
        if not self._depth:
            self._opaque = False
        self._depth += 1

    def leave(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """End it: a layer, a pointwise module, or something that no region holds."""
        self._depth -= 1
        if self._depth:
            return
        module, tensors = (
            self._modules[name],
            [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)],
        )
        if name in self._layers:
            products = tuple(_product(target, args, kwargs) for target in self._layers[name])
            self._note("call_module", name, type(module).__name__, args, kwargs, out, products)
        elif self._opaque or not (isinstance(out, Tensor) and tensors and out.shape == tensors[0].shape):
            self._unknown(tensors, out)
        else:
            self._note("call_module", name, type(module).__name__, args, kwargs, out)

    def _function(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        same = any(out is tensor for tensor in tensors)
        if same and name in _UNCHANGED:
            return
        # Without gradients this is the inside of a function with a backward of its own, which is no sum of its parts.
        if same or name not in _FUSABLE or not torch.is_grad_enabled():
            self._unknown(tensors, out)
            return
        method = getattr(Tensor, name, None) is func
        kind, target = ("call_method", name) if method else ("call_function", func)
        self._note(kind, target, name.strip("_"), args, kwargs, out)

    def _note(
        self,
        kind: str,
        target: Any,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        products: tuple[Product, ...] = (),
    ) -> None:
        made = [part for part in tree_leaves(out) if isinstance(part, Tensor)]
        plain = isinstance(out, Tensor) or (isinstance(out, tuple | list) and all(isinstance(o, Tensor) for o in out))
        inputs = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        if any(part.layout != torch.strided or part.is_nested for part in (*inputs, *made)) or not (plain or products):
            self._unknown(inputs, out)
            return
        args, kwargs = tree_map(
            lambda part: Value(self._value(part)) if isinstance(part, Tensor) else part, (args, kwargs)
        )
        number = len(self.operations)
        values = tuple(self._new(part) for part in made)
        several = not isinstance(out, Tensor)
        self.operations.append(Operation(kind, target, label, args, kwargs, values, several, products))
        for value in self.operations[-1].reads():
            self.readers[value].add(number)

    def _unknown(self, inputs: Sequence[Tensor], out: Any) -> None:
        for tensor in inputs:
            self.readers[self._value(tensor)].add(None)
        for part in tree_leaves(out):
            if isinstance(part, Tensor):
                self._new(part)

    def _value(self, tensor: Tensor) -> int:
        found = self._values.get(tensor)
        return self._new(tensor) if found is None else found

    def _new(self, tensor: Tensor) -> int:
        self._count += 1
        self._values[tensor] = self._count
        floating = tensor.is_floating_point()
        strided = tensor.layout == torch.strided and not tensor.is_nested
        self.leaves[self._count] = Leaf(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()) if strided else (),
            dtype=tensor.dtype,
            # Within a reentrant checkpoint there is no gradient yet, and there will be.
            requires_grad=floating and (tensor.requires_grad or not torch.is_grad_enabled()),
            values=None if floating else tensor,
        )
        return self._count


class _Watching:
    """Notes a forward: hooks on the modules that are noted as a whole, and the mode that sees everything else."""

    def __init__(self, recorder: Recorder, modules: Sequence[tuple[nn.Module, str]]) -> None:
        self._recorder, self._modules, self._handles = recorder, modules, []

    def __enter__(self) -> None:
        for module, name in self._modules:

            def left(_: nn.Module, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
                with torch._C.DisableTorchFunction():
                    self._recorder.leave(name, args, kwargs, out)

            self._handles += [
                module.register_forward_pre_hook(lambda *_: self._recorder.enter()),
                module.register_forward_hook(left, with_kwargs=True),
            ]
        self._recorder.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recorder.__exit__(*error)
        for handle in self._handles:
            handle.remove()


def _product(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product:
    given = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
    x = given[0]
    k, n = target.in_features, target.out_features
    if target.kind == "product":
        k, n = x.shape[-1], given[1].shape[-1]
    return Product(target.name, target.type, x.numel() // max(x.shape[-1], 1), k, n)
