"""A step of Adam or AdamW in one pass over a parameter whose moments are stored in BF16, or whose codes it writes.

The optimizer's own ``step`` runs as it is, and hands its lists of tensors to ``torch._fused_adam_`` or
``torch._fused_adamw_``. In place of moments brought to FP32 it finds :class:`StoredMoment` there: a tensor that says it
is FP32 and holds what is stored. The call meets it, and one kernel reads, updates and stores the parameter with its
moments (:mod:`narrowgate.precision.kernels.adam`). Anything else that is done to such a tensor is done to the FP32
values, which it then brings back, so an optimizer whose step is another one computes what it computes without this.

Of a weight whose FP8 codes are kept with a delayed scale the kernel writes the codes, too
(:mod:`narrowgate.precision.kernels.adam_codes`); there moments may be stored in FP32 as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .cast_operators import kernels_on_cpu
from .moments import MOMENTS, ORDINARY, Place, distributed_like, local
from .step_codes import StepCodes

#: The calls that are met, and whether what decays in them is the parameter.
_FUSED = {"_fused_adam_": False, "_fused_adamw_": True}


class StoredMoment(Tensor):
    """Stands for a parameter's moment within one step, as FP32.

    Attributes:
        parameter: whose moment it is.
        moment: which, of :data:`~narrowgate.precision.moments.MOMENTS`.
        stored: local tensor, BF16 or FP32.
        place: where that lies in the unsharded moment.
        opened: the FP32 moment, distributed as the parameter is, once something but a fused step asked for it.
    """

    parameter: Tensor
    moment: str
    stored: Tensor
    place: Place
    opened: Tensor | None
    _take: Callable[..., bool]

    @staticmethod
    def __new__(
        cls: type[StoredMoment], parameter: Tensor, moment: str, stored: Tensor, place: Place, take: Callable[..., bool]
    ) -> StoredMoment:
        """Make a stand-in; ``take`` is asked to take a :class:`FusedStep` that it is in."""
        device = local(parameter).device
        like: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, parameter.shape, dtype=torch.float32, device=device
        )
        like.parameter, like.moment, like.stored, like.place = parameter, moment, stored, place
        like.opened, like._take = None, take
        return like

    def open(self) -> Tensor:
        """The FP32 moment, which from now on counts in place of the stored one."""
        if self.opened is None:
            self.opened = distributed_like(self.parameter, self.stored.to(torch.float32))  # itself, where it is FP32
        return self.opened

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        decoupled = _FUSED.get(getattr(func, "__name__", ""))
        if decoupled is not None:
            step = _read(args, kwargs, decoupled)
            if step is not None and step.first._take(step):
                return None
        return _opened(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _opened(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"StoredMoment({self.stored})"


def _opened(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    opened: Any = tree_map_only(StoredMoment, StoredMoment.open, (tuple(args), kwargs))
    return func(*opened[0], **opened[1])


@dataclass(frozen=True)
class FusedStep:
    """The arguments of one call, of parameters whose moments are both stored."""

    parameters: list[Tensor]
    grads: list[Tensor]
    moments: list[tuple[StoredMoment, StoredMoment]]
    steps: list[Tensor]
    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    grad_scale: Tensor | None
    found_inf: Tensor | None

    @property
    def first(self) -> StoredMoment:
        """One of the stand-ins; they all take the same step."""
        return self.moments[0][0]


def can_take(parameter: Tensor, stored: Sequence[Any], place: Place, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether a kernel updates ``parameter``, of FP32, with its gradient and both its moments, stored in ``dtype``."""
    mine, grad = local(parameter), parameter.grad
    if grad is None or not _distributed_alike(parameter, grad):
        return False
    if not (mine.is_cuda or (mine.device.type == "cpu" and kernels_on_cpu())):
        return False
    where = place.shard
    # Of shards of columns the elements do not follow each other in the unsharded parameter.
    if where is not None and where.shape[1:] != place.shape[1:]:
        return False
    device, shape = mine.device, mine.shape
    for x, wanted in ((mine, torch.float32), (local(grad), torch.float32), *((local(x), dtype) for x in stored)):
        if not isinstance(x, Tensor) or x.dtype != wanted or x.device != device or x.shape != shape or not _plain(x):
            return False
    return len(stored) == len(MOMENTS)


def take(
    step: FusedStep, keys: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor] | None, codes: StepCodes | None = None
) -> bool:
    """Take a step in one pass a parameter; False, and nothing is done, where it cannot be.

    Args:
        step: the call.
        keys: of parameters and the numbers of their steps: int64 [n, 2], the keys of their moments' random bits; None
            rounds to nearest.
        codes: what may be written of the parameters; those whose moments are FP32 are all among them.
    """
    from .kernels.adam import AdamRule, AdamTensors, coefficients, is_ready, launch_adam
    from .kernels.adam_codes import CodesOut, launch_adam_codes
    from .kernels.adam_codes import is_ready as codes_are_ready
    from .kernels.adam_together import MOST, launch_adam_together

    device = local(step.parameters[0]).device
    scalars = [*step.steps, *(x for x in (step.grad_scale, step.found_inf) if x is not None)]
    if not all(local(x).device == device and local(x).dtype == torch.float32 for x in scalars):
        return False
    rule = AdamRule(*step.betas, step.eps, step.weight_decay, step.decoupled, step.maximize, keys is not None)
    optional = (step.grad_scale, step.found_inf)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    found: list[tuple[AdamTensors, CodesOut | None]] = []
    for parameter, grad, (first, second) in zip(step.parameters, step.grads, step.moments, strict=True):
        mine, gradient = local(parameter), local(grad)
        same = gradient.dtype == torch.float32 and gradient.shape == mine.shape and _distributed_alike(parameter, grad)
        if not same or not _plain(gradient):
            return False
        where = first.place.shard
        offset = 0 if where is None or not where.start else where.start[0] * first.place.rows[1]
        tensors = AdamTensors(mine, gradient, first.stored, second.stored, offset)
        kept = None if codes is None else codes.of(parameter)
        out = None if kept is None else kept.out()
        if kept is not None and first.stored.dtype == torch.bfloat16 and (capturing or not kept.trusted):
            # Nobody goes by these codes. In a capture they are written where that is the kernel that is compiled.
            out = None if not capturing or is_ready(rule, tensors, *optional) else out
        ready = not capturing or not mine.numel()
        if not ready and not (
            is_ready(rule, tensors, *optional) if out is None else codes_are_ready(rule, tensors, out, *optional)
        ):
            return False
        found.append((tensors, out))
    counted = torch.stack([local(x).reshape(()) for x in step.steps])
    rows = coefficients(step.lr, counted, rule)
    drawn = None if keys is None else keys(step.parameters, step.steps)
    together: list[tuple[int, AdamTensors]] = []
    if not capturing:
        # At first each is launched alone, so that a capture, in which all are, finds its kernel compiled.
        small = ((index, x) for index, (x, out) in enumerate(found) if out is None and x.parameter.numel() <= MOST)
        together = [(index, tensors) for index, tensors in small if is_ready(rule, tensors, *optional)]
    if together:
        launch_adam_together(rule, together, rows, drawn, *optional)
    stepped = {index for index, _ in together}
    for index, (tensors, out) in enumerate(found):
        if index in stepped:
            continue
        inputs = rows[index], None if drawn is None else drawn[index], *optional
        if out is None:
            launch_adam(rule, tensors, *inputs)
        else:
            launch_adam_codes(rule, tensors, out, *inputs)
    written = [x for tensors, _ in found for x in (tensors.parameter, tensors.exp_avg, tensors.exp_avg_sq)]
    written += [x for x in step.parameters if x is not local(x)]
    if step.grad_scale is not None:
        written += [tensors.grad for tensors, _ in found]
    # What is kept of a weight (its codes, its amax) is known to be old by the weight's version.
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])
    for parameter, (_, out) in zip(step.parameters, found, strict=True):
        if out is not None and codes is not None:
            codes.wrote(parameter)
    return True


def _read(args: Sequence[Any], kwargs: dict[str, Any], decoupled: bool) -> FusedStep | None:
    """The call's arguments; None where it is not of stored moments alone, each parameter's two in their places."""
    if len(args) != 6 or kwargs.get("amsgrad"):
        return None
    parameters, grads, firsts, seconds, _, steps = args
    pairs = list(zip(firsts, seconds, strict=True))
    numbers = [kwargs[name] for name in ("beta1", "beta2", "eps", "weight_decay")]
    stand = all(
        isinstance(x, StoredMoment) and x.opened is None and x.parameter is parameter and x.moment == name
        for parameter, pair in zip(parameters, pairs, strict=True)
        for name, x in zip(MOMENTS, pair, strict=True)
    )
    if not pairs or not stand or not all(isinstance(x, (int, float)) for x in numbers):
        return None
    beta1, beta2, eps, weight_decay = numbers
    return FusedStep(
        list(parameters), list(grads), pairs, list(steps), kwargs["lr"], (beta1, beta2), eps, weight_decay, decoupled,
        kwargs["maximize"], kwargs.get("grad_scale"), kwargs.get("found_inf"),
    )  # fmt: skip


def _plain(x: Tensor) -> bool:
    return type(x) in ORDINARY and x.is_contiguous()


def _distributed_alike(parameter: Tensor, grad: Tensor) -> bool:
    if type(parameter) in ORDINARY and type(grad) in ORDINARY:
        return True
    found = [(getattr(x, "device_mesh", None), getattr(x, "placements", None)) for x in (parameter, grad)]
    return found[0] == found[1]
