"""A linear layer whose three GEMMs each multiply the formats that a recipe chose.

y [M,N] = x [M,K] · Wᵀ, W [N,K], and per path one GEMM over its own contraction:

=====  ==========================  ==============  =========
path   product                     operands        contracts
=====  ==========================  ==============  =========
fprop  y  [M,N] = x  · Wᵀ          input, weight   K
dgrad  dx [M,K] = dy · W           grad, weight    N
wgrad  dW [N,K] = dyᵀ · x          grad, input     M
=====  ==========================  ==============  =========

An operand is quantized along its path's contraction. Where two paths ask for the same codes (same spec, a scale that
survives a transpose, nearest rounding) the tensor is quantized once. Backward keeps the wgrad operand itself, one byte
an element where it is FP8, not the activation it came from. Weights are quantized straight from their master dtype.

An existing module is lowered by swapping its class, so its Parameters, hooks, name and ``isinstance(m, nn.Linear)``
stay what they were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .capability import current_device, gemm_support
from .config import OPERANDS, LinearConfig
from .errors import NarrowgateError
from .gemm import dense_gemm, scaled_gemm
from .quantization import QuantizedTensor, quantize
from .rounding import torch_dtype
from .spec import Spec
from .stochastic import call_key, stream_key

#: Where a lowered module keeps its :class:`LinearState`; a plain attribute, so never in ``state_dict()``.
_STATE = "_narrowgate"


def unsupported(config: LinearConfig) -> str | None:
    """Say what of ``config`` a linear layer cannot run yet; None where it can run all of it."""
    for path, gemm in config.gemms():
        for operand, spec in zip(OPERANDS[path], (gemm.first, gemm.second), strict=True):
            if spec.delayed is not None:
                return f"{path}.{operand}: delayed scaling in a linear layer is not built yet"
    return None


class LinearState:
    """What a lowered layer carries besides its Parameters."""

    def __init__(self, config: LinearConfig, name: str, seed: int, original: type[nn.Linear], device: torch.device):
        self.config = config
        self.name = name
        self.seed = seed
        self.original = original
        #: Draws of this layer so far: forward calls in training, over optimizer steps and micro-batches.
        self.calls = torch.zeros((), dtype=torch.int64)
        #: Which paths run natively where the layer lies; decided here, as a compiler cannot ask the device.
        self.native: dict[str, bool] = {}
        self.place(device)
        # Draws whose backward may still recompute them, newest last. A checkpointed region is recomputed in the
        # reverse order of its forward, so the newest is the one that a recompute repeats.
        self._outstanding: deque[Tensor] = deque(maxlen=64)
        self.stochastic = any(s.sr for _, g in config.gemms() for s in (g.first, g.second))

        self._keys = {(p, o): stream_key(seed, name, p, o) for p, operands in OPERANDS.items() for o in operands}

    def place(self, device: torch.device) -> None:
        """Follow the layer's weight to ``device``."""
        if device.type == "meta":
            return
        self.calls = self.calls.to(device)
        here = current_device(device)
        self.native = {path: gemm_support(gemm, here).native for path, gemm in self.config.gemms()}

    def key(self, path: str, operand: str) -> int:
        """The random stream of one operand on one path of this layer."""
        return self._keys[path, operand]

    def draw(self, training: bool) -> Tensor | None:
        """The number of this forward call, int64 scalar; None where nothing is rounded stochastically.

        Calls are counted in training only, so that evaluating more often changes nothing. A recompute inside backward
        repeats the number of the forward it stands for.
        """
        if not self.stochastic:
            return None
        recomputing = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if recomputing and self._outstanding:
            return self._outstanding.pop()
        draw = self.calls
        if training:
            # A new tensor, not an update in place: a compiled backward may recompute from the tensor it was given.
            self.calls = draw + 1
            if not recomputing and not torch.compiler.is_compiling():
                self._outstanding.append(draw)
        return draw


class LowPrecisionLinear(nn.Linear):
    """An ``nn.Linear`` that runs a :class:`LinearConfig`; made by :func:`lower_linear`, never constructed."""

    def forward(self, input: Tensor) -> Tensor:
        """Return x Wᵀ + bias: [..., N] for an input of [..., K] (or [K]).

        The output has the autocast dtype where autocast is on, else the input's.

        Raises:
            NarrowgateError: the last dimension of ``input`` is not ``in_features``.
        """
        if input.shape[-1] != self.in_features:
            raise NarrowgateError(
                f"{_state(self).name or 'linear'}: expected an input of [..., {self.in_features}], "
                f"found {list(input.shape)}"
            )
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        flat = input.reshape(-1, self.in_features)
        state = _state(self)
        draw = state.draw(self.training and torch.is_grad_enabled())
        # Autocast must not touch the GEMMs inside: their dtypes are the recipe's.
        with torch.autocast(device, enabled=False):
            out = _LinearFunction.apply(flat, self.weight, draw, state, dtype)
            if self.bias is not None:
                out = out + self.bias.to(dtype)
        return out.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """The shape and, per path, the two formats."""
        config = _state(self).config
        paths = (f"{path}={gemm.first}·{gemm.second}" for path, gemm in config.gemms())
        return ", ".join([super().extra_repr(), *paths])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowPrecisionLinear:
        module = super()._apply(fn, recurse)  # type: ignore[call-arg]
        _state(self).place(self.weight.device)
        return module  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A lowered subclass has a class made at run time, which pickle cannot find by name.
        return _rebuild, (_state(self).original,), self.__getstate__()


def lower_linear(module: nn.Linear, config: LinearConfig, *, name: str = "", seed: int = 0) -> None:
    """Make ``module`` run ``config``, in place.

    Args:
        module: an ``nn.Linear``, or a subclass that keeps its ``forward``.
        config: formats per path and operand.
        name: the module's name in its model; part of the key of its random streams and of its error messages.
        seed: seed of the random streams.

    Raises:
        NarrowgateError: the module is lowered already, or has a forward of its own.
    """
    if isinstance(module, LowPrecisionLinear):
        raise NarrowgateError(f"layer '{name}' is low-precision already: remove_recipe first")
    if type(module).forward is not nn.Linear.forward:
        raise NarrowgateError(f"layer '{name}': {type(module).__name__} has a forward of its own and cannot be swapped")
    original = type(module)
    object.__setattr__(module, _STATE, LinearState(config, name, seed, original, module.weight.device))
    module.__class__ = _lowered_class(original)


def restore_linear(module: LowPrecisionLinear) -> None:
    """Undo :func:`lower_linear`: the module is what it was, with the Parameters it has now."""
    original = _state(module).original
    object.__delattr__(module, _STATE)
    object.__setattr__(module, "__class__", original)


def linear_state(module: LowPrecisionLinear) -> dict[str, Tensor]:
    """The layer's recipe state for a checkpoint: its counter of stochastic draws."""
    return {"calls": _state(module).calls.clone()}


def load_linear_state(module: LowPrecisionLinear, state: dict[str, Tensor]) -> None:
    """Restore what :func:`linear_state` returned."""
    layer = _state(module)
    layer.calls = state["calls"].to(layer.calls.device).clone()


def original_type(module: nn.Module) -> type[nn.Module]:
    """The module's class before lowering."""
    return _state(module).original if isinstance(module, LowPrecisionLinear) else type(module)


def _state(module: nn.Module) -> LinearState:
    return module.__dict__[_STATE]


@cache
def _lowered_class(original: type[nn.Linear]) -> type[LowPrecisionLinear]:
    if original is nn.Linear:
        return LowPrecisionLinear
    return type(f"LowPrecision{original.__name__}", (LowPrecisionLinear, original), {"__doc__": original.__doc__})


def _rebuild(original: type[nn.Linear]) -> LowPrecisionLinear:
    lowered = _lowered_class(original)
    return lowered.__new__(lowered)


#: An operand ready to multiply: quantized, or dense with its contraction last.
_Operand = Tensor | QuantizedTensor


class _LinearFunction(torch.autograd.Function):
    """x [M,K], weight [N,K] -> y [M,N] of ``dtype``; three GEMMs by ``state.config``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, draw: Tensor | None, state: LinearState, dtype: torch.dtype
    ) -> Tensor:
        config = state.config
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        x_fprop = _prepare(x, 1, "fprop", 0, state, draw)
        w_fprop = _prepare(weight, 1, "fprop", 1, state, draw)
        # Backward multiplies the wgrad input, made now while x is at hand, and the dgrad weight: its codes where
        # fprop has them already, else quantized again from the weight, which lives anyway.
        x_wgrad = w_dgrad = None
        if needs_dw:
            x_wgrad = _shared(x_fprop, config.fprop.first, config.wgrad.second)
            if x_wgrad is None:
                x_wgrad = _prepare(x, 0, "wgrad", 1, state, draw)
        if needs_dx:
            w_dgrad = _shared(w_fprop, config.fprop.second, config.dgrad.second)
        ctx.state, ctx.x_dtype, ctx.weight_dtype = state, x.dtype, weight.dtype
        ctx.quantized_weight = w_dgrad is not None
        ctx.layout = _save(ctx, [w_dgrad if w_dgrad is not None else weight if needs_dx else None, x_wgrad, draw])
        return _multiply(x_fprop, w_fprop, state, "fprop", dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        state: LinearState = ctx.state
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NarrowgateError(
                f"layer '{state.name}': a low-precision layer has no second derivative; "
                "leave it out of the recipe, or take the gradient without create_graph"
            )
        (dy,) = grads
        config = state.config
        weight, x_wgrad, draw = _restore(ctx.layout, ctx.saved_tensors)
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = dw = dy_dgrad = dy_wgrad = None
        with torch.autocast(dy.device.type, enabled=False):
            if needs_dx:
                dy_dgrad = _prepare(dy, 1, "dgrad", 0, state, draw)
                if not ctx.quantized_weight:
                    weight = _prepare(weight, 0, "dgrad", 1, state, draw)
                dx = _multiply(dy_dgrad, weight, state, "dgrad", ctx.x_dtype)
            if needs_dw:
                if dy_dgrad is not None:
                    dy_wgrad = _shared(dy_dgrad, config.dgrad.first, config.wgrad.first)
                if dy_wgrad is None:
                    dy_wgrad = _prepare(dy, 0, "wgrad", 0, state, draw)
                dw = _multiply(dy_wgrad, x_wgrad, state, "wgrad", ctx.weight_dtype)
        return dx, dw, None, None, None


def _prepare(x: Tensor, dim: int, path: str, position: int, state: LinearState, draw: Tensor | None) -> _Operand:
    """Bring ``x`` (2-D, contracted over ``dim``) into the format of one operand of one path."""
    gemm = getattr(state.config, path)
    spec: Spec = gemm.second if position else gemm.first
    if spec.high_precision and not spec.sr:
        dense = x.to(torch_dtype(spec.fmt.element))
    else:
        seed = None
        if spec.sr:
            assert draw is not None
            seed = call_key(state.key(path, OPERANDS[path][position]), draw)
        quantized = quantize(x, spec, dim=dim, seed=seed)
        if not spec.high_precision:
            return quantized
        dense = quantized.data
    return dense if dim == 1 else dense.t()


def _shared(operand: _Operand, spec: Spec, wanted: Spec) -> _Operand | None:
    """The same codes seen from the other contraction axis, or None where ``wanted`` asks for others."""
    if spec != wanted or spec.sr or spec.hadamard is not None:
        return None
    if isinstance(operand, Tensor):
        return operand.t()
    square = spec.block is not None and spec.block[0] == spec.block[1]
    if spec.granularity == "tensor" or square:
        # FP4 codes are packed along the contraction: they would have to be unpacked to turn.
        return None if spec.fmt.element.bits == 4 else replace(operand, dim=1 - operand.dim)
    return None


def _multiply(first: _Operand, second: _Operand, state: LinearState, path: str, dtype: torch.dtype) -> Tensor:
    gemm = getattr(state.config, path)
    if isinstance(first, Tensor):
        # Resolution refuses a GEMM of one quantized and one dense operand.
        assert isinstance(second, Tensor)
        return dense_gemm(first, second, out_dtype=dtype)
    assert isinstance(second, QuantizedTensor)
    return scaled_gemm(first, second, gemm, native=state.native[path], out_dtype=dtype)


#: How one saved operand is put together again from saved tensors: None, a plain tensor, or a quantized one.
_Layout = list[str | tuple[Spec, int, tuple[int, ...], bool] | None]


def _save(ctx: Any, operands: list[_Operand | None]) -> _Layout:
    tensors: list[Tensor] = []
    layout: _Layout = []
    for operand in operands:
        if operand is None:
            layout.append(None)
        elif isinstance(operand, Tensor):
            tensors.append(operand)
            layout.append("dense")
        else:
            assert operand.scale is not None
            tensors += [operand.data, operand.scale]
            if operand.tensor_scale is not None:
                tensors.append(operand.tensor_scale)
            layout.append((operand.spec, operand.dim, operand.shape, operand.tensor_scale is not None))
    ctx.save_for_backward(*tensors)
    return layout


def _restore(layout: _Layout, tensors: tuple[Tensor, ...]) -> list[Any]:
    remaining = list(tensors)
    operands: list[Any] = []
    for entry in layout:
        if entry is None:
            operands.append(None)
        elif isinstance(entry, str):
            operands.append(remaining.pop(0))
        else:
            spec, dim, shape, has_tensor_scale = entry
            data, scale = remaining.pop(0), remaining.pop(0)
            tensor_scale = remaining.pop(0) if has_tensor_scale else None
            operands.append(QuantizedTensor(data, scale, tensor_scale, spec, dim, shape))
    return operands
