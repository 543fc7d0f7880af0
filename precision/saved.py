"""What backward keeps outside the products: formats for the tensors that norms, activations and gates save.

A lowered layer keeps the codes that its backward multiplies. Everything else that autograd saves on the way, the input
of a norm, the two halves of a gate, what a layer in BF16 multiplies, stays as it was computed unless a format is given
for it. Then it is quantized when it is saved and dequantized when backward wants it; the forward is not changed.

Two ways lead there, by the same rules and the same numbers (:func:`encode_saved`, :func:`decode_saved`):

- in eager mode ``torch.autograd.graph.saved_tensors_hooks`` around the model's forward;
- under ``torch.compile``, which does not trace such hooks, a pass over the two graphs of each compiled region
  (:mod:`narrowgate.precision.saved_graph`), where Inductor fuses both directions with their neighbours.

**Left alone**: parameters and what is only a cast or a view of one, buffers and inputs without a gradient, integers and
masks, the row statistics of norms and of attention, what is too small to pay
(:func:`narrowgate.precision.saved_formats.pays`), the output of a log-softmax (backward exponentiates it, and an error
of the exponent multiplies), and everything inside of a hand-written ``autograd.Function`` that is none of its inputs:
the codes and scales of our own layers above all. Nor is what ``torch.utils.checkpoint`` runs a region again from, so
that a recompute repeats the forward.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.fx.traceback
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint

from .casting import Request, quantize_both
from .errors import NarrowgateError
from .grouped import GroupedLinear
from .layer import LowPrecisionLayer
from .matmul import MatMul
from .quantization import QuantizedTensor, quantize
from .saved_formats import pays, unsupported_save
from .spec import Spec, as_spec

__all__ = ["decode_saved", "encode_saved", "is_activation", "keep_saved", "release_saved", "within"]

#: Key of the annotation under which a compiler's nodes know the format; see :class:`SavedForward`.
ANNOTATION = "narrowgate_saved"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def encode_saved(x: Tensor, spec: Spec, *, kernels: bool = True) -> tuple[Tensor, ...]:
    """Return what is kept of ``x`` [..., K]: its codes in the shape of ``x``, and their scales where there are any.

    Args:
        x: BF16, FP16 or FP32.
        spec: the format; scales reach along the last axis, blocks of several rows over all leading axes together.
        kernels: use the fused cast kernels where they exist, in the same numbers; a compiler fuses the reference.
    """
    if spec.high_precision:
        return (x.to(torch.bfloat16),)
    flat = x.reshape(-1, x.shape[-1]) if kernels or _spans_rows(spec) else x
    if kernels:
        found, _ = quantize_both(flat, Request(spec), None)
        assert found is not None
    else:
        found = quantize(flat, spec, dim=-1)
    scale = found.scale
    assert scale is not None
    return found.data.view(x.shape), scale.reshape(-1, scale.shape[-1]) if scale.dim() > 2 else scale


def decode_saved(kept: tuple[Tensor, ...], spec: Spec, dtype: torch.dtype) -> Tensor:
    """Return the values that :func:`encode_saved` kept: code * scale in FP32, rounded once to ``dtype``."""
    codes = kept[0]
    if spec.high_precision:
        return codes.to(dtype)
    scale, shape = kept[1], codes.shape
    if _spans_rows(spec):
        codes = codes.reshape(-1, shape[-1])
    elif spec.granularity != "tensor":
        scale = scale.view(*shape[:-1], scale.shape[-1])
    whole = QuantizedTensor(codes, scale, None, spec, codes.dim() - 1, tuple(codes.shape))
    return whole.dequantize(dtype).view(shape)


def _spans_rows(spec: Spec) -> bool:
    return spec.block is not None and spec.block[0] > 1


# Eager mode.


@dataclass(frozen=True, eq=False)
class _Kept:
    """A saved tensor in its format; shared by all operations that saved the same values."""

    parts: tuple[Tensor, ...]
    dtype: torch.dtype
    #: Where the values lay. As long as it is held no other storage has the same address.
    storage: StorageWeakRef


@dataclass(frozen=True)
class _Saved:
    """What one operation gets back: the values, in the shape and the strides in which it saved them."""

    kept: _Kept
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Hooks:
    """Pack and unpack of one format."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._known: WeakValueDictionary[tuple[Any, ...], _Kept] = WeakValueDictionary()

    def pack(self, x: Tensor) -> Any:
        """Return ``x`` itself where it is left alone, else what is kept of it."""
        if not is_activation(x) or not pays(x.shape, x.element_size(), self.spec) or _repeats():
            return x
        storage = StorageWeakRef(x.untyped_storage())
        # The same values are told by where they lie, whatever their leading axes are called.
        layout = (x.numel(), x.shape[-1]) if x.is_contiguous() else (tuple(x.shape), tuple(x.stride()))
        key = (storage.cdata, x.storage_offset(), *layout, x.dtype, x._version)
        kept = self._known.get(key)
        if kept is None:
            kept = self._known[key] = _Kept(encode_saved(x.detach(), self.spec), x.dtype, storage)
        return _Saved(kept, tuple(x.shape), tuple(x.stride()))

    def unpack(self, saved: Any) -> Tensor:
        """Return the values for backward.

        Raises:
            NarrowgateError: in a backward that is itself differentiated.
        """
        if not isinstance(saved, _Saved):
            return saved
        if torch.is_grad_enabled():
            raise NarrowgateError(
                f"activations are saved as {self.spec}, which has no second derivative; "
                "take activations.save out of the recipe, or take the gradient without create_graph"
            )
        values = decode_saved(saved.kept.parts, self.spec, saved.kept.dtype).view(saved.shape)
        if values.stride() == saved.stride:
            return values
        return torch.empty_strided(saved.shape, saved.stride, dtype=values.dtype, device=values.device).copy_(values)


@cache
def _hooks(spec: Spec) -> _Hooks:
    return _Hooks(spec)


#: Autograd's nodes that change neither values nor what a tensor is: a parameter behind them is still a parameter.
_SAME_VALUES = frozenset(
    f"{name}Backward{number}"
    for name in ("Alias", "Expand", "Permute", "ReshapeAlias", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze",
                 "View", "Slice", "Select", "Squeeze")
    for number in range(3)
)  # fmt: skip
#: Operations whose later outputs are as good as their first: parts of one tensor.
_PARTS = ("Split", "Unbind", "Chunk", "UnsafeSplit")


def is_activation(x: Tensor) -> bool:
    """Whether a saved tensor is a value that flows through the model, by what autograd knows of it."""
    if not x.requires_grad or x.is_leaf or x.dtype not in DTYPES:
        return False
    node = x.grad_fn
    assert node is not None
    if type(x) is not Tensor:
        _warn_once(type(x).__name__)
        return False
    name = node.name()
    # The further outputs of an operation are its statistics, as the log-sum-exp of attention.
    if name.startswith("LogSoftmax") or (x.output_nr > 0 and not name.startswith(_PARTS)):
        return False
    while node is not None and node.name() in _SAME_VALUES:
        node = node.next_functions[0][0]
    return node is not None and node.name() != "torch::autograd::AccumulateGrad"


@cache
def _warn_once(kind: str) -> None:
    warnings.warn(
        f"activations.save: saved tensors of type {kind} keep their own format, expected plain tensors", stacklevel=2
    )


def _repeats() -> bool:
    """Whether ``torch.utils.checkpoint`` is saving what it will run a region again from.

    It does so through an ``autograd.Function``, whose frame may stand between.
    """
    callers = (sys._getframe(2), sys._getframe(3))
    return any(frame.f_code.co_filename == checkpoint.__file__ for frame in callers)


class SavedForward:
    """A module's ``forward`` within which autograd saves in a format; an attribute of the module itself.

    Of nested ones the outermost counts. Nothing is done where hooks are set already, as by
    ``torch.utils.checkpoint``, which keeps nothing of the inside of a region, nor in a recompute.
    """

    def __init__(self, module: nn.Module, spec: Spec) -> None:
        self.module, self.spec, self.text = module, spec, str(spec)
        #: The forward that was set on the module itself before.
        self.before: Callable[..., Any] | None = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if torch.compiler.is_compiling():
            torch.ops.narrowgate.keep_saved(self.text)
            with torch.fx.traceback.annotate({ANNOTATION: self.text}):
                return self._run(*args, **kwargs)
        if not torch.is_grad_enabled() or _hooks_here() is not None or torch._C._current_graph_task_id() != -1:
            return self._run(*args, **kwargs)
        hooks = _hooks(self.spec)
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def _hooks_here() -> Any:
    """The hooks (pack, unpack) by which autograd saves now; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]


def within() -> Spec | None:
    """The format in which a model that is running eagerly saves; None outside of one."""
    hooks = _hooks_here()
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner.spec if isinstance(owner, _Hooks) else None


def keep_saved(model: nn.Module, spec: Spec | str) -> None:
    """Have autograd save in ``spec`` what ``model`` saves outside its low-precision products, in place.

    Every module but those with a product of their own gets a :class:`SavedForward`, so that each can be compiled alone.

    Raises:
        NarrowgateError: the format is not built for saved tensors.
    """
    from .saved_graph import install

    spec = as_spec(spec)
    instead = unsupported_save(spec)
    if instead is not None:
        raise NarrowgateError(f"saved tensors: found {spec}, expected {instead}")
    install()
    for module in model.modules():
        if _is_scope(module):
            module.__dict__["forward"] = SavedForward(module, spec)


def release_saved(model: nn.Module) -> None:
    """Undo :func:`keep_saved`."""
    for module in model.modules():
        own = module.__dict__.get("forward")
        if isinstance(own, SavedForward):
            if own.before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own.before


def _is_scope(module: nn.Module) -> bool:
    if isinstance(module, (LowPrecisionLayer, nn.Linear, nn.MultiheadAttention, GroupedLinear, MatMul)):
        return False  # what they save is decided where they are called
    return type(module).forward is not nn.Module.forward  # not a mere container
