"""Every matrix product of one step, with its call site: what a recipe reaches, and what it does not.

The model runs once, eagerly and without gradients, under a dispatch mode that sees each operation whoever calls it.
Backward multiplies the same sizes twice more, so shares of the forward's FLOPs are shares of the step's. Products
inside a custom operation (a hand-written kernel) are counted where that told :mod:`torch.utils.flop_counter` its
formula (``register_flop_formula``), and are not seen otherwise.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..precision.errors import NarrowgateError
from .targets import find_targets, named_modules

_TORCH = Path(torch.__file__).parent
_OURS = tuple(Path(__file__).parents[1] / part for part in ("precision", "recipes"))
#: Frames of PyTorch that say nothing about what the user called.
_PLUMBING = frozenset(
    {"_call_impl", "_wrapped_call_impl", "__call__", "forward", "inner", "wrapper", "decorate_context"}
)
_CONVOLUTION, _ATTENTION = "convolutions are not lowered", "fused attention kernels are not lowered"
_OPAQUE = "the products inside this operation are its own"
_EQUAL_ROWS = "; counted as if all rows were equally long, as the meta device knows no lengths"
_FREE = "no module that rules reach multiplies it; narrowgate.precision.MatMul makes a product a target"


@dataclass(frozen=True)
class TracedGemm:
    """The products of one kind at one call site."""

    #: The operation that ran, for example ``bmm``, and what the user called where that differs: ``bmm (einsum)``.
    op: str
    #: Name of the innermost module that was running, without wrapper parts; empty for the model itself.
    module: str
    #: Name of the target that covers it; None where no rule reaches it, with the reason.
    layer: str | None
    reason: str | None
    #: File and line of the nearest code outside of PyTorch and of this package, and the function it is in.
    file: str
    line: int
    function: str
    calls: int
    #: Floating-point operations of the forward, a multiplication and an addition counted as two.
    flops: int

    @property
    def site(self) -> str:
        """``file:line (function)``."""
        return f"{self.file}:{self.line} ({self.function})"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON-ready data."""
        return {
            "op": self.op,
            "module": self.module,
            "layer": self.layer,
            "reason": self.reason,
            "file": self.file,
            "line": self.line,
            "function": self.function,
            "calls": self.calls,
            "flops": self.flops,
        }


@dataclass(frozen=True)
class GemmTrace:
    """All products of one forward, the largest first."""

    gemms: tuple[TracedGemm, ...]

    @property
    def flops(self) -> int:
        """FLOPs of all products."""
        return sum(gemm.flops for gemm in self.gemms)

    @property
    def unreachable(self) -> tuple[TracedGemm, ...]:
        """The products that no rule reaches."""
        return tuple(gemm for gemm in self.gemms if gemm.layer is None)

    @property
    def reachable_share(self) -> float:
        """Share of the FLOPs that rules reach; 0 where nothing was multiplied."""
        return 1 - sum(map(self.share, self.unreachable)) if self.flops else 0.0

    def by_layer(self) -> dict[str, int]:
        """FLOPs of each target that multiplied anything, by its name."""
        flops: dict[str, int] = {}
        for gemm in self.gemms:
            if gemm.layer is not None:
                flops[gemm.layer] = flops.get(gemm.layer, 0) + gemm.flops
        return flops

    def share(self, gemm: TracedGemm) -> float:
        """Share of all FLOPs that ``gemm`` has, from 0 to 1."""
        return gemm.flops / self.flops if self.flops else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as JSON-ready data, with each product's share."""
        return {
            "flops": self.flops,
            "reachable_share": self.reachable_share,
            "gemms": [{**gemm.to_dict(), "share": self.share(gemm)} for gemm in self.gemms],
        }


def trace_gemms(model: nn.Module, call: Callable[[], Any]) -> GemmTrace:
    """Run ``call()``, which runs ``model`` on one batch, and list every matrix product.

    The model runs in eval mode without gradients, uncompiled and without PyTorch's fused inference paths; modes,
    hooks and torch's generators are afterwards what they were.

    Args:
        model: the model, or what wraps it; already lowered or not.
        call: runs it on one batch, for example ``lambda: model(batch)``.

    Raises:
        NarrowgateError: ``call`` multiplied nothing inside ``model``.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    fast_path = torch.backends.mha.get_fastpath_enabled()
    recorder = _Recorder(model)
    handles = [
        global_hooks.register_module_forward_pre_hook(recorder.enter),
        global_hooks.register_module_forward_hook(recorder.leave, always_call=True),
    ]
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.random.fork_rng(devices), torch.no_grad(), torch.compiler.set_stance("force_eager"), recorder:
            call()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    if not recorder.inside:
        raise NarrowgateError("the step that was traced multiplied nothing in the model, expected a forward of it")
    return recorder.trace()


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module, _ in named_modules(model)}
        targets, unreachable = find_targets(model)
        self.layers = {id(target.module): target.name for target in targets}
        self.reasons = {entry.name: entry.reason for entry in unreachable}
        self.stack: list[nn.Module] = []
        self.found: dict[tuple[Any, ...], list[int]] = {}
        self.inside = False

    def enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack and self.stack[-1] is module:
            self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        flops, formula = _flops(name, args, out), None
        if flops is None:
            formula = flop_registry.get(func._overloadpacket)
            flops = None if formula is None else int(formula(*args, **(kwargs or {}), out_val=out))
        if flops is not None:
            known = [module for module in self.stack if id(module) in self.names]
            self.inside = self.inside or bool(known)
            module = known[-1] if known else None
            place = self._place(name, module) if formula is None else self._inside(name, module, args)
            key = (*place, *_call_site(name, _defined_in(formula)))
            entry = self.found.setdefault(key, [0, 0])
            entry[0] += 1
            entry[1] += flops
        return out

    def _inside(self, op: str, module: nn.Module | None, args: Any) -> tuple[str, None, str]:
        """As :meth:`_place`, of an operation that multiplies inside of itself."""
        unknown = any(isinstance(x, Tensor) and x.is_meta and not x.is_floating_point() for x in args)
        reason = (_ATTENTION if "attention" in op else _OPAQUE) + _EQUAL_ROWS * unknown
        return self.names[id(module)] if module is not None else "", None, reason

    def _place(self, op: str, module: nn.Module | None) -> tuple[str, str | None, str | None]:
        """(name of the module, name of the layer that covers it or None, why none does)."""
        name = self.names[id(module)] if module is not None else ""
        fused = _ATTENTION if "scaled_dot_product" in op else _CONVOLUTION if "conv" in op else None
        # Attention's module multiplies two things: its projections, which are targets, and scores.
        within = isinstance(module, nn.MultiheadAttention) and op not in ("mm", "addmm", "linear")
        if module is not None and id(module) in self.layers and not within and fused is None:
            if isinstance(module, nn.MultiheadAttention) and not _below("_in_projection_packed", "_project"):
                module = module.out_proj
            return name, self.layers[id(module)], None
        return name, None, fused or (None if within else self.reasons.get(name)) or _FREE

    def trace(self) -> GemmTrace:
        gemms = [
            TracedGemm(op, module, layer, reason, file, line, function, calls, flops)
            for (module, layer, reason, op, file, line, function), (calls, flops) in self.found.items()
        ]
        return GemmTrace(tuple(sorted(gemms, key=lambda gemm: -gemm.flops)))


def _flops(op: str, args: tuple[Any, ...], out: Any) -> int | None:
    """FLOPs of one operation; None where it multiplies no matrices."""
    if op in ("mm", "bmm", "_scaled_mm", "matmul"):
        return _product(args[0], args[1])
    if op in ("addmm", "baddbmm", "addbmm"):
        return _product(args[1], args[2])
    if op == "linear":
        return 2 * args[0].numel() * args[1].shape[0]
    if op.lstrip("_") in ("grouped_mm", "scaled_grouped_mm"):  # rows [T, K] by matrices [E, K, N]; both 2-D, over rows
        a, b = args[0], args[1]
        return 2 * (a.shape[0] if a.dim() == 2 else prod(a.shape[:2])) * a.shape[-1] * b.shape[-1]
    if "scaled_dot_product" in op and "backward" not in op:
        q, k, v = args[:3]
        return 2 * prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    if op in ("convolution", "_convolution"):
        weight, transposed = args[1], args[6]
        positions = args[0] if transposed else out
        # Each output (or, transposed, input) element meets one filter, whose channels are those of its own group.
        return 2 * (positions.numel() // positions.shape[1]) * weight.numel() if isinstance(positions, Tensor) else None
    return None


def _product(a: Tensor, b: Tensor) -> int:
    return 2 * prod(a.shape) * b.shape[-1]


def _below(*functions: str) -> bool:
    """Whether one of ``functions`` is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in functions:
            return True
        frame = frame.f_back
    return False


def _defined_in(formula: Callable[..., Any] | None) -> str | None:
    """The file that told an operation's formula: the operation's own, whose functions around it are no call site."""
    return None if formula is None else inspect.getsourcefile(inspect.unwrap(formula))


def _call_site(op: str, own: str | None = None) -> tuple[str, str, int, str]:
    """(operation with what the user called, file, line, function) of the nearest frame outside of PyTorch and us.

    Of frames in the file ``own`` that called each other, who called the first of them; that one itself where PyTorch
    did, as it does with a module's forward.
    """
    frame = sys._getframe(2)
    called = ""
    within = None
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        inside = path.is_relative_to(_TORCH)
        if inside or any(path.is_relative_to(part) for part in _OURS) or frame.f_code.co_filename.startswith("<"):
            if within is not None:
                frame = within
                break
            called = frame.f_code.co_name if inside else called
        elif frame.f_code.co_filename == own:
            within = frame
        else:
            break
        frame = frame.f_back
    shown = op if called in _PLUMBING or called.strip("_") in (op.strip("_"), "torch_dispatch") else f"{op} ({called})"
    return shown if called else op, _relative(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name


def _relative(file: str) -> str:
    """``file`` below the working directory or the import path it comes from, whichever is nearer."""
    path = Path(file)
    roots = [root for root in map(Path, (".", *sys.path)) if path.is_relative_to(root.absolute())]
    if not roots:
        return path.name
    return str(path.relative_to(max((root.absolute() for root in roots), key=lambda root: len(root.parts))))
