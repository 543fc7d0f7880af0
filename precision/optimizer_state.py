"""Optimizers that keep their moments in few bits: BF16 with stochastic rounding, or blocks of eight bits.

:func:`lower_state` swaps the class of an optimizer, so that it stays the object that schedulers and hooks know, and an
instance of its class. Its arithmetic is its own: a step takes the parameters a few at a time, brings their moments back
to FP32, lets the optimizer's own ``step`` update these parameters, and stores the moments again
(:mod:`narrowgate.precision.moments`). Beside what is stored, the FP32 moments of ``BUCKET`` elements, or of the largest
parameter, exist at a time.

Where the step is PyTorch's fused Adam or AdamW on a GPU and the moments are BF16, the parameter and its moments are
updated as they are stored, in one pass and all parameters at once (:mod:`narrowgate.precision.fused_adam`). With kept
weights (:mod:`narrowgate.precision.weight_codes`) that pass writes their codes; :func:`write_codes` has it do so on
FP32 moments, which stay what they are.

Which optimizers that is right for is found out, not listed (:mod:`narrowgate.precision.optimizer_trial`). State that
is smaller than its parameter (``step``, a row's accumulator) is kept as it is.

**Random bits** have the key (seed, parameter's name, moment's name, ``step`` of the parameter) and the element's index
in the unsharded parameter: the same however a model is sharded, and no generator is consumed.

**Checkpoints** are those of the optimizer without this: the same keys, BF16 or FP32 values in the shapes of parameters.
Eight-bit codes are saved as the FP32 values that they stand for, and come back as the same codes. FP32 moments are
rounded to nearest when they are loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from .errors import NarrowgateError, NotBuiltError
from .moment_storage import STORAGE, Storage, keys_of_steps, storage_of
from .moments import (
    MOMENTS,
    distributed_like,
    local,
    restore,
    scale_name,
    store,
)
from .one_pass import in_one_pass, standing_in
from .optimizer_trial import check_state, own_step, try_out
from .spec import Spec, as_spec
from .state_formats import unsupported_state
from .step_codes import StepCodes

#: Elements whose moments are brought to FP32 at a time: 64 MiB a moment.
BUCKET = 1 << 24
#: By what ``torch.optim.lr_scheduler`` knows a step that tells it of being called.
_SCHEDULED = "_wrapped_by_lr_sched"


class LowPrecisionOptimizer(Optimizer):
    """An optimizer whose moments are stored as a :class:`Spec` says; made by :func:`lower_state`.

    Or by :func:`write_codes`: then moments are FP32, and all but the weights with codes are updated as ever.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, update = self.param_groups, own_step(_original(self))
        storage_of(self).learn(groups, {})  # of groups that were added since
        codes = StepCodes(_fused_parameters(groups))
        with torch.no_grad():
            for group in groups:
                whole = [parameter for parameter in group["params"] if in_one_pass(self, group, parameter, codes)]
                if whole:
                    with standing_in(self, whole, codes) as opened, _only(self, group, whole):
                        update(self)
                    _put_back(self, opened)
                passed = set(whole)
                rest = [parameter for parameter in group["params"] if parameter not in passed]
                # FP32 moments need no memory beside them.
                for bucket in _buckets(self, rest, None if storage_of(self).spec.format == "fp32" else BUCKET):
                    stored = {parameter: _fetch(self, parameter) for parameter in bucket}
                    with _only(self, group, bucket):
                        update(self)
                    _put_back(self, stored)
        codes.finish()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, without codes: moments are BF16 or FP32."""
        handle = self.register_state_dict_post_hook(_without_codes, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of one whose moments are FP32."""
        handle = self.register_load_state_dict_post_hook(_store_all, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), STORAGE: storage_of(self)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A lowered class is made at run time, where pickle cannot find it by name.
        return _rebuild, (_original(self), type(self).__name__), self.__getstate__()


def lower_state(
    optimizer: Optimizer, spec: Spec | str, *, names: Mapping[Tensor, str] | None = None, seed: int = 0
) -> Optimizer:
    """Make ``optimizer`` store its moments as ``spec``, in place; what it has by now is rounded to nearest.

    Args:
        optimizer: of FP32 parameters.
        spec: ``bf16`` or blocks of eight bits, with ``+sr`` or without; ``fp32`` changes nothing.
        names: of parameters, the same in every process and in a run that resumes.
        seed: of the stochastic rounding, the same on every rank.

    Returns:
        ``optimizer`` itself.

    Warns:
        RuntimeWarning: its step gets slower, as BF16 moments make one on a GPU that is not fused.

    Raises:
        NotBuiltError: ``spec`` is not built for optimizer state.
        NarrowgateError: the optimizer is lowered already, has parameters that are not FP32, keeps per element what has
            another name than :data:`~narrowgate.precision.moments.MOMENTS`, or updates parameters together.
    """
    spec = as_spec(spec)
    instead = unsupported_state(spec)
    if instead is not None:
        raise NotBuiltError(f"optimizer state in {spec} is not built yet, only {instead}")
    if not isinstance(optimizer, Optimizer):
        raise NarrowgateError(f"found a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    if state_spec(optimizer).format != "fp32":
        raise NarrowgateError(f"this optimizer's state is stored as {state_spec(optimizer)} already")
    if spec.format == "fp32":
        return optimizer
    kind, storage = type(optimizer), optimizer.__dict__.get(STORAGE)
    if storage is not None:  # of :func:`write_codes`, which the new step does as well
        optimizer.__class__ = _original(optimizer)
    try:
        _swap(optimizer, spec, names or {}, seed)
    except NarrowgateError:
        if storage is not None:
            optimizer.__class__, optimizer.__dict__[STORAGE] = kind, storage
        raise
    _warn_if_slower(optimizer, spec)
    return optimizer


def write_codes(optimizer: Optimizer) -> None:
    """Have fused steps on FP32 moments write the codes of kept weights, in place, where there are any to write.

    Its class gets another step and keeps its name. An optimizer whose state is lowered writes them anyway; one whose
    parameters must be updated together stays as it is.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LowPrecisionOptimizer):
        return
    if StepCodes(_fused_parameters(optimizer.param_groups)):
        with suppress(NarrowgateError):
            _swap(optimizer, Spec(format="fp32"), {}, 0)


def _swap(optimizer: Optimizer, spec: Spec, names: Mapping[Tensor, str], seed: int) -> None:
    kind, scheduled = type(optimizer), hasattr(optimizer.__dict__.get("step"), _SCHEDULED)
    if "step" in optimizer.__dict__ and not scheduled:
        raise NarrowgateError(f"found a {kind.__name__} whose step was replaced on the instance, expected its class's")
    storage = Storage(spec, seed)
    storage.learn(optimizer.param_groups, names)
    for group in optimizer.param_groups:
        for leader in {parameter.dim(): parameter for parameter in group["params"]}.values():
            try_out(optimizer, group, leader, spec)
    optimizer.__dict__[STORAGE] = storage
    optimizer.__class__ = _lowered(kind, kind.__name__ if spec.format == "fp32" else f"LowPrecision{kind.__name__}")
    if scheduled:
        _tell_schedules(optimizer)
    _store_all(optimizer)


def _warn_if_slower(optimizer: Optimizer, spec: Spec) -> None:
    """BF16 moments take fewer bytes where the step is fused, and more where it is not."""
    unfused = (group["params"] for group in optimizer.param_groups if not group.get("fused"))
    slow = any(_on_gpu(parameter) for parameters in unfused for parameter in parameters)
    if spec.format != "fp32" and spec.high_precision and slow:
        warnings.warn(
            f"{_original(optimizer).__name__} is not fused: with moments in {spec} its step moves 60 bytes an element"
            " or more, where fused=True moves 20 and FP32 moments 28",
            RuntimeWarning,
            stacklevel=3,
        )


def _on_gpu(parameter: Tensor) -> bool:
    return local(parameter).is_cuda


def _fused_parameters(groups: Sequence[Mapping[str, Any]]) -> Iterator[Tensor]:
    for group in groups:
        if group.get("fused"):
            yield from group["params"]


def state_spec(optimizer: Optimizer) -> Spec:
    """How the moments of ``optimizer`` are stored: FP32 unless :func:`lower_state` took it."""
    return storage_of(optimizer).spec if isinstance(optimizer, LowPrecisionOptimizer) else Spec(format="fp32")


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors that ``optimizer`` keeps between steps on this rank."""
    tensors = (local(x) for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
    return sum(x.numel() * x.element_size() for x in tensors)


def _original(optimizer: Optimizer) -> type[Optimizer]:
    return type(optimizer).__bases__[-1]


@cache
def _lowered(original: type[Optimizer], name: str) -> type[Optimizer]:
    # Hooks run once a step; a compiler runs all of it as it is.
    step: Any = torch.compiler.disable(Optimizer.profile_hook_step(LowPrecisionOptimizer.step))
    step.hooked = True  # or torch.optim would hook it once more
    namespace = {"__doc__": original.__doc__, "__module__": LowPrecisionOptimizer.__module__, "step": step}
    return type(name, (LowPrecisionOptimizer, original), namespace)


def _rebuild(original: type[Optimizer], name: str) -> Optimizer:
    kind = _lowered(original, name)
    return kind.__new__(kind)


def _tell_schedules(optimizer: Optimizer) -> None:
    """Replace the step that a learning-rate scheduler put on the instance, which is bound to the class before."""
    reference = ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        assert optimizer is not None
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return type(optimizer).step(optimizer, *args, **kwargs)

    setattr(step, _SCHEDULED, True)
    optimizer.__dict__["step"] = step


def _buckets(optimizer: Optimizer, parameters: Sequence[Tensor], most: int | None) -> Iterator[list[Tensor]]:
    """Parameters with a gradient, in order, up to ``most`` local elements at a time; those without moments are free."""
    bucket: list[Tensor] = []
    elements = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        state = optimizer.state.get(parameter)
        free = bool(state) and not any(name in state for name in MOMENTS)
        size = 0 if free else local(parameter).numel()
        if bucket and most is not None and elements + size > most:
            yield bucket
            bucket, elements = [], 0
        bucket.append(parameter)
        elements += size
    if bucket:
        yield bucket


@contextmanager
def _only(optimizer: Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> Iterator[None]:
    """Within, the optimizer has one group of these parameters."""
    groups, everything = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], parameters
    try:
        yield
    finally:
        optimizer.param_groups, group["params"] = groups, everything


def _fetch(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Bring a parameter's moments to FP32 in the optimizer's state; returns what was stored."""
    storage, state = storage_of(optimizer), optimizer.state.get(parameter)
    spec = storage.stored(parameter)
    if spec is None or state is None:
        return {}
    stored: dict[str, Tensor] = {}
    for name in MOMENTS:
        if name in state and state[name].dtype != torch.float32:
            values, mine = restore(name, state, spec, storage.place(parameter)), local(parameter)
            if values.stride() != mine.stride():  # fused steps want moments to lie as their parameter does
                values = torch.empty_like(mine, dtype=torch.float32).copy_(values)
            for entry in (name, scale_name(name)):
                if entry in state:
                    stored[entry] = state.pop(entry)
            state[name] = distributed_like(parameter, values)
    return stored


def _put_back(optimizer: Optimizer, stored: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Store the FP32 moments of parameters that were just updated, where possible in the memory they came from."""
    storage = storage_of(optimizer)
    if storage.spec.format == "fp32":
        return
    lowered = [parameter for parameter in stored if any(name in optimizer.state[parameter] for name in MOMENTS)]
    for parameter in lowered:
        check_state(optimizer, parameter, storage.spec)
    keys = keys_of_steps(optimizer, lowered) if storage.spec.sr else {}
    for parameter in lowered:
        spec, state, before = storage.stored(parameter), optimizer.state[parameter], stored[parameter]
        if spec is None:
            continue
        for index, name in enumerate(MOMENTS):
            if name not in state:
                continue
            key = keys[parameter][index] if spec.sr else None
            for entry, value in store(name, local(state[name]), spec, storage.place(parameter), key).items():
                if entry in before:  # a captured step is replayed on the same memory
                    local(before[entry]).copy_(value)
                    state[entry] = before[entry]
                else:
                    state[entry] = distributed_like(parameter, value) if entry == name else value


def _store_all(optimizer: Optimizer) -> None:
    """Store every FP32 moment: of a state that was loaded, or of an optimizer that has stepped before."""
    storage = storage_of(optimizer)
    storage.learn(optimizer.param_groups, {})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state, spec = optimizer.state.get(parameter), storage.stored(parameter)
            if state is None or spec is None:
                continue
            check_state(optimizer, parameter, spec)
            for name in MOMENTS:
                if name in state:
                    entries = store(name, local(state[name]), spec, storage.place(parameter), None)
                    for entry, value in entries.items():
                        state[entry] = distributed_like(parameter, value) if entry == name else value


def _without_codes(optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """A state dict in which moments are values; the optimizer's own state stays as it is."""
    storage = storage_of(optimizer)
    numbers = (number for group in packed["param_groups"] for number in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    by_number = dict(zip(numbers, parameters, strict=True))
    states: dict[Any, Any] = {}
    for number, state in packed["state"].items():
        parameter = by_number.get(number)
        if parameter is None:  # what an optimizer keeps for no parameter
            states[number] = state
            continue
        plain = states[number] = dict(state)
        for name in MOMENTS:
            if plain.pop(scale_name(name), None) is not None:
                spec = storage.stored(parameter)
                assert spec is not None
                plain[name] = distributed_like(parameter, restore(name, state, spec, storage.place(parameter)))
    return {**packed, "state": states}
