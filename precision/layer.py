"""What every lowered module has beside its Parameters: random streams, amax histories, and when a step ends.

A module is lowered by swapping its class for one that mixes :class:`LowPrecisionLayer` in, so its Parameters, hooks,
name and type stay what they were. Its state is a plain attribute, never in ``state_dict()``.

**Steps.** A global post-step hook of ``torch.optim`` ends a layer's step whenever an optimizer that holds its weight
has stepped; a layer that trains no Parameter of its own follows every optimizer. A layer that saw no training forward
since its last step is left alone, so an optimizer inside another ends nothing twice. Optimizers that are no
``torch.optim.Optimizer``, or that step copies of the Parameters, need a call of :func:`end_step`.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack

from .capability import CPU, Device, current_device, gemm_support
from .config import OPERANDS, LinearConfig
from .delayed import AmaxHistory, roll
from .errors import NarrowgateError
from .stochastic import call_key, stream_key

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .weight_codes import WeightCodes

#: Where a lowered module keeps its :class:`LayerState`.
_STATE = "_narrowgate"
#: Bits of a draw below the optimizer step: micro-batch and call, as in :func:`narrowgate.precision.call_key`.
_STEP_SHIFT = 32

#: In the order in which layers were lowered: the same on every rank that builds the same model.
_LIVE: weakref.WeakValueDictionary[int, LowPrecisionLayer] = weakref.WeakValueDictionary()
_LOWERED = itertools.count()


class LayerState:
    """What a lowered layer carries besides its Parameters."""

    def __init__(
        self,
        config: LinearConfig,
        name: str,
        seed: int,
        kind: type[LowPrecisionLayer],
        original: type[nn.Module],
        device: torch.device,
    ):
        self.config = config
        self.name = name
        #: Classes of the module: what mixed low precision in, and what it was before.
        self.kind, self.original = kind, original
        specs = {(p, o): s for p, g in config.gemms() for o, s in zip(OPERANDS[p], (g.first, g.second), strict=True)}
        self.stochastic = any(spec.sr for spec in specs.values())
        #: The next training forward's number, int64: optimizer step * 2**32 + forward within the step, over all its
        #: micro-batches.
        self.draw = torch.zeros((), dtype=torch.int64)
        # The tensor from which a step's first forward draws, always the same one: a CUDA graph reads it at each replay.
        self._first_draw = self.draw
        # What the last counted forward left; a replay writes it again, and no Python sees that.
        self._last_draw = self.draw
        #: By (path, operand), for delayed scales.
        self.histories = {key: AmaxHistory(spec.delayed) for key, spec in specs.items() if spec.delayed is not None}
        #: Data-parallel ranks that share this layer's amaxes; see :func:`share_amaxes`.
        self.group: ProcessGroup | None = None
        #: Codes of the weight that outlive a forward; see :func:`narrowgate.precision.linear.keep_weight_codes`.
        self.kept: WeightCodes | None = None
        self._frozen: dict[tuple[str, str], AmaxHistory] = {}
        #: Where the layer lies, and which paths run natively there; kept here, as a compiler cannot ask the device.
        #: Empty on the meta device, where none does.
        self.here: Device = CPU
        self.native: dict[str, bool] = {}
        self.place(device)
        # Draws whose backward may still recompute them, newest last. A checkpointed region is recomputed in the
        # reverse order of its forward, so the newest is the one that a recompute repeats.
        self._outstanding: deque[Tensor] = deque(maxlen=64)
        self._keys = {key: stream_key(seed, name, *key) for key in specs}

    def place(self, device: torch.device) -> None:
        """Follow the layer's weight to ``device``."""
        if device.type == "meta":
            return
        self._restart(self.draw.to(device))
        for history in self.histories.values():
            history.to(device)
        self._frozen = {key: history.frozen() for key, history in self.histories.items()}
        self.run_on(current_device(device))

    def run_on(self, device: Device) -> None:
        """Decide what runs natively as on ``device``, which need not be here while a step is only traced."""
        self.here = device
        self.native = {path: gemm_support(gemm, device).native for path, gemm in self.config.gemms()}

    def _restart(self, first_draw: Tensor) -> None:
        self.draw = self._first_draw = self._last_draw = first_draw

    def seed(self, path: str, operand: str, draw: Tensor) -> Tensor:
        """The 64-bit key, [], of one operand on one path in the forward numbered ``draw``."""
        # call_key packs (step, micro-batch, call) into one word and mixes it in by XOR; a draw is that word.
        key = call_key(self._keys[path, operand] ^ draw)
        assert isinstance(key, Tensor)
        return key

    def history(self, path: str, operand: str, recording: bool) -> AmaxHistory | None:
        """The amax history of one operand, recording or only read; None where the scale is dynamic."""
        return (self.histories if recording else self._frozen).get((path, operand))

    def enter(self, training: bool) -> tuple[Tensor, bool]:
        """Begin a forward: its draw, int64 [], and whether its amaxes are recorded.

        Forwards are counted and recorded in training only, so that evaluating more often changes nothing. A recompute
        inside backward repeats the draw of the forward it stands for, whose amaxes are recorded already.
        """
        if not self.stochastic and not self.histories:
            return self.draw, False
        recomputing = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if recomputing and self._outstanding:
            return self._outstanding.pop(), False
        draw = self.draw
        if training:
            if self.stochastic:
                # A new tensor, not an update in place: a compiled backward may recompute from the tensor it was given.
                self.draw = draw + 1
                if not torch.compiler.is_compiling() and draw is self._first_draw:
                    draw = draw.clone()  # its backward may come after the step that moves the original on
            if not recomputing and not torch.compiler.is_compiling():
                self._outstanding.append(draw)
        return draw, training

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the tensors that a resumed run needs; resuming within a step is exact."""
        state = {"draw": self.draw.clone()}
        for (path, operand), history in self.histories.items():
            state |= {f"{path}.{operand}.{name}": value for name, value in history.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            NarrowgateError: an entry is missing or has another shape.
        """
        if "draw" not in state:
            raise NarrowgateError(f"layer '{self.name}': 'draw' is missing, found {sorted(state)}")
        for (path, operand), history in self.histories.items():
            prefix = f"{path}.{operand}."
            history.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        self._first_draw.copy_(state["draw"])
        self._restart(self._first_draw)
        self._outstanding.clear()

    def __getstate__(self) -> dict[str, Any]:
        # What is read without recording shares tensors with the histories; a copy makes its own.
        # A process group belongs to this process, and kept codes to an optimizer that steps this very weight.
        return {**self.__dict__, "_frozen": {}, "_outstanding": deque(maxlen=64), "group": None, "kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._frozen = {key: history.frozen() for key, history in self.histories.items()}


class LowPrecisionLayer(nn.Module):
    """A module whose products a :class:`LinearConfig` decides; made by lowering, never constructed."""

    def extra_repr(self) -> str:
        """The module's own and, per path, the two formats."""
        config = layer_state(self).config
        paths = (f"{path}={gemm.first}·{gemm.second}" for path, gemm in config.gemms())
        return ", ".join([part for part in (super().extra_repr(), *paths) if part])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowPrecisionLayer:
        module = super()._apply(fn, recurse)  # type: ignore[call-arg]
        state = layer_state(self)
        parameter = next(self.parameters(recurse=False), None)
        # A module without Parameters is moved all the same: ask what would have become of a tensor of its.
        moved = parameter if parameter is not None else fn(torch.zeros_like(state.draw))
        state.place(moved.device)
        weight = self._parameters.get("weight")
        if state.kept is not None and weight is not None:
            state.kept = state.kept.following(weight)
        return module

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        before = next((x.device for x in self.parameters(recurse=False)), None)
        super()._load_from_state_dict(*args, **kwargs)
        # ``load_state_dict(assign=True)`` puts other Parameters in place, of a layer on the meta device above all.
        # Parameters that stay may lie elsewhere than the layer computes: FSDP2 can keep its shards on the CPU.
        device = next((x.device for x in self.parameters(recurse=False)), None)
        if device is not None and device != before:
            layer_state(self).place(device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A lowered class is made at run time, where pickle cannot find it by name.
        state = layer_state(self)
        return _rebuild, (state.kind, state.original), self.__getstate__()


def autocast_device(x: Tensor) -> str:
    """The device type whose autocast governs ``x``; the meta device, on which steps are only traced, knows none."""
    return "cpu" if x.device.type == "meta" else x.device.type


def swap(
    module: nn.Module,
    kind: type[LowPrecisionLayer],
    config: LinearConfig,
    *,
    name: str,
    seed: int,
    device: torch.device,
) -> None:
    """Make ``module`` a ``kind`` that runs ``config``, in place.

    Raises:
        NarrowgateError: the module is lowered already.
    """
    if isinstance(module, LowPrecisionLayer):
        raise NarrowgateError(f"layer '{name}' is low-precision already: remove_recipe first")
    original = type(module)
    object.__setattr__(module, _STATE, LayerState(config, name, seed, kind, original, device))
    object.__setattr__(module, "__class__", _lowered_class(kind, original))
    _watch(module)  # type: ignore[arg-type]


def restore_layer(module: LowPrecisionLayer) -> None:
    """Undo lowering: the module is what it was, with the Parameters it has now."""
    original = layer_state(module).original
    for key, layer in list(_LIVE.items()):
        if layer is module:
            del _LIVE[key]
    object.__delattr__(module, _STATE)
    object.__setattr__(module, "__class__", original)


def layer_state(module: nn.Module) -> LayerState:
    """The state of a lowered module."""
    return module.__dict__[_STATE]


def placed_state(module: nn.Module, argument: Tensor | None = None) -> LayerState:
    """The state of a lowered module about to run, also where it was lowered on the meta device.

    Whoever materialises a module attribute by attribute tells nobody; the state then follows the Parameters, or the
    ``argument`` of a module that has none.

    Raises:
        NarrowgateError: it runs within ``torch.jit.trace``, the ONNX export by it, or a transform of ``torch.func``.
    """
    state = layer_state(module)
    if not torch.compiler.is_compiling():
        tracing = torch._C._get_tracing_state() is not None
        if tracing or peek_interpreter_stack() is not None:
            # PyTorch fails on its own there, of an internal map or a method that its user cannot write.
            raise NarrowgateError(
                f"layer '{state.name}': low-precision layers do not run within "
                f"{'torch.jit.trace; torch.export takes them' if tracing else 'transforms of torch.func'}; "
                "remove_recipe(model) goes back to the model's own layers"
            )
    if not state.native:
        tensor = next(module.parameters(), argument)
        if tensor is not None:
            state.place(tensor.device)
    return state


def original_type(module: nn.Module) -> type[nn.Module]:
    """The module's class before lowering."""
    return layer_state(module).original if isinstance(module, LowPrecisionLayer) else type(module)


def end_step(layers: Iterable[LowPrecisionLayer] | nn.Module) -> None:
    """End the optimizer step of lowered layers: the next forward is number 0 of a new step, amaxes enter histories.

    Called by itself after every step of a ``torch.optim.Optimizer``.

    Args:
        layers: lowered layers, or a model that has some. Where ranks share amaxes (:func:`share_amaxes`), the same
            layers in the same order on all of them.
    """
    if isinstance(layers, nn.Module):
        layers = [module for module in layers.modules() if isinstance(module, LowPrecisionLayer)]
    draws: dict[torch.device, list[LayerState]] = {}
    histories: dict[tuple[torch.device, ProcessGroup | None], list[AmaxHistory]] = {}
    for layer in layers:
        state = layer_state(layer)
        state._outstanding.clear()
        if state.stochastic:
            draws.setdefault(state.draw.device, []).append(state)
        for history in state.histories.values():
            histories.setdefault((history.history.device, state.group), []).append(history)
    for states in draws.values():
        # Up to the next multiple of 2**32: the next step's forward 0, or itself where no forward was counted.
        below = (1 << _STEP_SHIFT) - 1
        for state in states:
            if state.draw is not state._first_draw:
                state._last_draw = state.draw
            state.draw = state._first_draw
        first = [state._first_draw for state in states]
        counted = torch.maximum(torch.stack(first), torch.stack([state._last_draw for state in states]))
        following = (counted + below) & ~below
        torch._foreach_copy_(first, list(following.unbind()))  # type: ignore[attr-defined]
    for (_, group), alike in histories.items():
        roll(alike, group)


def live_layers() -> list[LowPrecisionLayer]:
    """All lowered layers, in the order in which they were lowered."""
    return list(_LIVE.values())


def forget_weight_codes(parameters: Iterable[Tensor] | None = None) -> None:
    """Have the next use of each of these weights (by default of all) quantize it anew, where its codes are kept."""
    written = None if parameters is None else {id(parameter) for parameter in parameters}
    for layer in _LIVE.values():
        kept, weight = layer_state(layer).kept, layer._parameters.get("weight")
        if kept is not None and weight is not None and (written is None or id(weight) in written):
            kept.forget(weight)


def share_amaxes(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Join the amaxes of delayed scales over data-parallel ranks, so that all of them scale alike.

    From now on each step's end takes the largest amax of the ranks: one all-reduce for all layers. Every rank must
    lower the same model and step the same optimizers, as data parallelism does anyway.

    Args:
        model: its lowered layers share theirs.
        group: the ranks; all of them by default.

    Raises:
        NarrowgateError: there is no process group yet.
    """
    if not torch.distributed.is_initialized():
        raise NarrowgateError("share_amaxes needs torch.distributed.init_process_group first")
    group = group or torch.distributed.group.WORLD
    for module in model.modules():
        if isinstance(module, LowPrecisionLayer):
            layer_state(module).group = group


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _LIVE:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    forget_weight_codes(parameters)
    stepped = set(map(id, parameters))
    layers = [layer for layer in _LIVE.values() if layer_state(layer).stochastic or layer_state(layer).histories]
    ended: list[LowPrecisionLayer] = []
    for layer in layers:
        # The first trainable Parameter, its weight, stands for a layer: weight and bias may have an optimizer each.
        leader = next((p for p in layer.parameters() if p.requires_grad), None)
        if leader is None or id(leader) in stepped:
            ended.append(layer)
    with torch.no_grad():
        end_step(ended)


@cache
def _install_hook() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    # A compiled optimizer step breaks its graph here rather than trace what only eager state needs.
    register_optimizer_step_post_hook(torch.compiler.disable(_after_optimizer_step))  # type: ignore[arg-type]
    if torch.cuda.is_available():
        from .fusion import install

        install()


def _watch(layer: LowPrecisionLayer) -> None:
    _install_hook()
    _LIVE[next(_LOWERED)] = layer


@cache
def _lowered_class(kind: type[LowPrecisionLayer], original: type[nn.Module]) -> type[LowPrecisionLayer]:
    if kind.__bases__[-1] is original:
        return kind
    namespace = {"__doc__": original.__doc__, "__module__": kind.__module__}
    return type(f"LowPrecision{original.__name__}", (kind, original), namespace)


def _rebuild(kind: type[LowPrecisionLayer], original: type[nn.Module]) -> LowPrecisionLayer:
    lowered = _lowered_class(kind, original)
    layer = lowered.__new__(lowered)
    _watch(layer)
    return layer
