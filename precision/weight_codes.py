"""Weights quantized once for each optimizer step, however many micro-batches and recomputed forwards read them.

A layer that keeps its codes (:func:`keep_weight_codes`) owns buffers for the operands of fprop and dgrad. Its products
go through ``narrowgate::weight_product``, which looks at run time, in eager mode and in compiled graphs alike, whether
the buffers hold the codes of the weight as it is now, and casts it anew where they do not. They do as long as

- no optimizer has stepped the weight since (a post-step hook of ``torch.optim`` says so),
- the weight lies where it lay, and its version counter stands where it stood: ``load_state_dict``, an average of the
  weights swapped in and any other write that autograd would know of move one of the two,
- with a delayed scale, no history was loaded or rolled since,
- the same stream asks.

**In the optimizer's pass.** A fused step may write the codes of a weight with a delayed scale itself
(:mod:`narrowgate.precision.step_codes`). They count where the step is then ended as its hook does, and nothing above
has changed; the amax that the step found enters the history with their first use. So what is written past the version
counter is not seen any more from the step on, where codes that are made at their first use would still show it.

Within the capture of a CUDA graph the cast is always launched, so that each replay sees the weight of its time. Nobody
counts replays, so codes that were ever captured are not trusted again, nor are those of a weight whose optimizer's step
was. What no check can see is a write between two micro-batches of one step (or, of codes that a step wrote, any later
one) that leaves the version counter alone: through ``weight.data``, by a collective of ``torch.distributed``, in a
replay. ``plan.refresh()`` after it.

**Evaluation.** Only training forwards, of modules in training and with gradients, read and fill the buffers: all others
cast the weight as it is. So whatever lies in the weight's place for an evaluation, written there by any means, is what
is evaluated, and once the weight is back the codes are right again.

The operator writes to its buffers though its schema does not say so. They are a cache: nothing reads them but this
operator, which checks first, so no order of calls can show the difference; and a compiler that knew of the writes would
copy the buffers to keep what backward saved. (An amax history among them is read when a step ends, outside of graphs.)
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .capability import has_cast_kernel, same_codes
from .cast_operators import SAME, cast_into, kernels_on_cpu, operand_sizes
from .casting import as_stored, has_kernel, limit_of
from .config import GemmConfig, LinearConfig
from .delayed import AmaxHistory
from .gemm import scaled_gemm
from .kernels.program import IDENTITY
from .layer import layer_state, live_layers
from .quantization import QuantizedTensor
from .rounding import torch_dtype
from .spec import Spec

if TYPE_CHECKING:
    from .kernels.adam_codes import CodesOut


@dataclass
class _Stamp:
    """What a layer's buffers hold."""

    #: Address of the layer's Parameter. Another tensor in its place, as functional_call has it, is never trusted: it
    #: may lie where yet another one lay before.
    home: int
    filled: bool = False
    version: int = 0
    stream: int = 0
    #: These, or the weight, are written within a CUDA graph, whose replays nobody counts.
    captured: bool = False
    #: At which version of the amax history, 0 without one.
    history: int = 0
    #: An optimizer's step wrote them; its hook, which forgets what is older, comes next.
    stepped: bool = False
    #: What that step found of the weight is not in its amax history yet.
    due: bool = False

    def holds(self, weight: Tensor, buffers: list[Tensor]) -> bool:
        """Whether the weight, its history and the stream are those of the codes."""
        return (self.version, self.stream, self.history) == _now(weight, buffers)


#: Buffers without those of a history.
_PLAIN = 4
#: By the address of the codes; buffers that are not here are written at each use.
_STAMPS: dict[int, _Stamp] = {}


class WeightCodes:
    """Buffers for the codes of one weight [N, K] as the operands of fprop and of dgrad."""

    def __init__(self, config: LinearConfig, weight: Tensor, history: AmaxHistory | None = None) -> None:
        """Allocate.

        Args:
            config: of the layer, with no :func:`keep_obstacle`.
            weight: its Parameter, which is not held on to.
            history: of the weight's delayed scale, see :func:`kept_history`; on the weight's device.
        """
        self._config, shape, device = config, (weight.shape[0], weight.shape[1]), weight.device
        self.history, self._out = history, None
        if history is not None:
            # Where a step leaves what it finds; filled now, as a fill within a capture would only be recorded.
            self._amax = torch.full((), -1.0, device=device)
            self._past = torch.zeros(2, dtype=torch.int64, device=device)
            self._workspace = torch.zeros(2, dtype=torch.int32, device=device)
        #: How many optimizer steps wrote the codes in their own pass.
        self.passes = 0
        rows, columns = config.fprop.second, config.dgrad.second
        #: Whether dgrad multiplies codes too, or the weight itself.
        self.dgrad = not columns.high_precision
        same = self.dgrad and same_codes(rows, columns)
        self.rows, self.columns = str(rows), (SAME if same else str(columns)) if self.dgrad else ""
        sizes = operand_sizes(rows, shape, 1), operand_sizes(columns if self.dgrad else rows, shape, 0)
        #: Codes [N, K] and their scales; codes [K, N] and theirs, empty where there are none; a history's four tensors.
        self.buffers = [
            torch.empty(size, dtype=dtype, device=device)
            for size, dtype in (
                (sizes[0][0], torch_dtype(rows.fmt.element)),
                (sizes[0][1], torch.float32),
                (sizes[1][0] if self.dgrad else 0, torch_dtype((columns if self.dgrad else rows).fmt.element)),
                (sizes[1][1] if self.dgrad and not same else 0, torch.float32),
            )
        ]
        if history is not None:
            self.buffers += [history.history, history.pending, history.saturated, history.workspace]
        for buffer in self.buffers:
            # Their addresses stay, so a compiler's CUDA graph need not copy them.
            torch._dynamo.mark_static_address(buffer)
        address = self.buffers[0].data_ptr()
        # Held here as well: on the meta device all have one address.
        self._stamp = _STAMPS[address] = _Stamp(weight.data_ptr())
        weakref.finalize(self, _STAMPS.pop, address, None)

    def following(self, weight: Tensor) -> WeightCodes:
        """Return buffers for the weight where it lies now: these, emptied, or others on its device."""
        if weight.device == self.buffers[0].device:
            self.forget(weight)
            return self
        return WeightCodes(self._config, weight, self.history)

    def forget(self, weight: Tensor) -> None:
        """Have the next use cast anew; from now on of the Parameter ``weight``.

        The first call after :meth:`stepped`, which the step's hook makes, forgets only what the step did not write.
        """
        stamp = self._stamp
        stamp.filled &= stamp.stepped and stamp.home == weight.data_ptr()
        stamp.home, stamp.stepped = weight.data_ptr(), False
        stamp.captured |= _capturing(weight)

    @property
    def trusted(self) -> bool:
        """Whether codes that a step writes now will be gone by."""
        return not self._stamp.captured

    def out(self) -> CodesOut:
        """Where a step writes; of codes with a history."""
        if self._out is None:
            from .kernels.adam_codes import CodesOut

            assert self.history is not None
            codes, scale, turned, _, history, pending, *_ = self.buffers
            self._out = CodesOut(
                self._config.fprop.second, codes, scale, turned, history, pending, self._amax, self._past,
                self._workspace,
            )  # fmt: skip
        return self._out

    def stepped(self, weight: Tensor, version: int) -> None:
        """Say that a step wrote the codes of ``weight`` as it was at ``version``, for once its amaxes are entered."""
        stamp = self._stamp
        if weight.data_ptr() != stamp.home or stamp.captured or _capturing(weight) or version < 0:
            return
        self.passes += 1
        stamp.filled = stamp.stepped = stamp.due = True
        stamp.version, stamp.stream, stamp.history = version, _stream(weight), _history_version(self.buffers) + 1

    def is_due(self, weight: Tensor) -> bool:
        """Whether a step left the weight and its history as they are, and what it found is not entered yet."""
        stamp = self._stamp
        return stamp.due and stamp.filled and weight.data_ptr() == stamp.home and stamp.holds(weight, self.buffers)


def keep_obstacle(config: LinearConfig, weight: Tensor | None) -> str | None:
    """Say why a layer's weight is quantized at each use all the same; None where it can keep its codes."""
    if type(weight) is not torch.nn.Parameter:
        return "the weight is no plain Parameter: a sharded one is gathered anew for each use anyway"
    obstacle = format_obstacle(config)
    if obstacle is not None:
        return obstacle
    if weight.numel() == 0 or not has_kernel(weight, *_quantized(config)):
        return f"no cast kernel takes a weight of {list(weight.shape)}, {weight.dtype}, on {weight.device.type}"
    return None


def format_obstacle(config: LinearConfig) -> str | None:
    """Say why a weight in a layer's formats is quantized at each use all the same, wherever it lies."""
    if config.fprop.second.high_precision:
        return "fprop does not quantize the weight"
    for spec in _quantized(config):
        if spec.sr:
            return f"{spec} is drawn anew at each use"
        if spec.delayed is not None:
            return f"{spec} records each use"
        if not has_cast_kernel(spec):
            return f"{spec} has no cast kernel"
    return None


def _quantized(config: LinearConfig) -> list[Spec]:
    return [spec for spec in (config.fprop.second, config.dgrad.second) if not spec.high_precision]


def weight_product(
    first: QuantizedTensor,
    weight: Tensor,
    kept: WeightCodes,
    path: str,
    gemm: GemmConfig,
    *,
    native: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply ``first`` by the codes of a weight: [M, N] on ``fprop``, [M, K] on ``dgrad``.

    Args:
        first: the path's other operand, contracted over its columns.
        weight: [N, K], in its master dtype.
        kept: the layer's buffers.
        path: ``fprop`` or ``dgrad``.
        gemm: the path's configuration.
        native: see :func:`narrowgate.precision.gemm.scaled_gemm`.
        out_dtype: float32 or bfloat16.
    """
    assert first.scale is not None
    return torch.ops.narrowgate.weight_product(
        first.data, first.scale, weight, kept.buffers, str(gemm.first), kept.rows, kept.columns, path == "dgrad",
        gemm.accumulate, native, out_dtype,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _parsed(first: str, rows: str, columns: str, accumulate: str) -> tuple[Spec, Spec, Spec | None, GemmConfig]:
    specs = Spec.parse(first), Spec.parse(rows)
    own = specs[1] if columns == SAME else Spec.parse(columns) if columns else None
    return *specs, own, GemmConfig(accumulate=accumulate)


def _product(
    first: Tensor,
    first_scale: Tensor,
    weight: Tensor,
    buffers: list[Tensor],
    first_spec: str,
    rows: str,
    columns: str,
    transposed: bool,
    accumulate: str,
    native: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    spec, rows_spec, columns_spec, gemm = _parsed(first_spec, rows, columns, accumulate)
    _bring_up_to_date(weight, buffers, rows, columns)
    codes, scale, turned, second_scale = buffers[:_PLAIN]
    shape = tuple(weight.shape)
    if transposed:
        assert columns_spec is not None
        scale = as_stored(scale if columns == SAME else second_scale, columns_spec, 0)
        second = QuantizedTensor(turned.t(), scale, None, columns_spec, 0, shape)
    else:
        second = QuantizedTensor(codes, as_stored(scale, rows_spec, 1), None, rows_spec, 1, shape)
    operand = QuantizedTensor(first, first_scale, None, spec, 1, tuple(first.shape))
    # An operator's strides are what its fake says: a width that was padded for the matrix units is closed up.
    return scaled_gemm(operand, second, gemm, native=native, out_dtype=out_dtype).contiguous()


def _product_fake(first: Tensor, first_scale: Tensor, weight: Tensor, *others: Any) -> Tensor:
    transposed, out_dtype = others[4], others[7]
    return first.new_empty((first.shape[0], weight.shape[1 if transposed else 0]), dtype=out_dtype)


def _bring_up_to_date(weight: Tensor, buffers: list[Tensor], rows: str, columns: str) -> None:
    stamp = _STAMPS.get(buffers[0].data_ptr())
    capturing = _capturing(weight)
    at_home = stamp is not None and weight.data_ptr() == stamp.home
    if stamp is not None and stamp.filled and at_home and not capturing and stamp.holds(weight, buffers):
        if stamp.due:
            _record()
        return
    now = _now(weight, buffers)
    _cast_into(weight, buffers, rows, columns)
    if stamp is not None:
        stamp.captured |= capturing
        stamp.filled = at_home and now[0] >= 0 and not stamp.captured
        stamp.version, stamp.stream, stamp.history = now
        stamp.stepped = stamp.due = False


def _record() -> None:
    """Enter what a step found in the histories of all weights that are as it left them, in a few launches."""
    by_device: dict[torch.device, list[tuple[AmaxHistory, CodesOut]]] = {}
    # No reference to a weight is kept for this, not even a weak one: torch.utils.swap_tensors takes none that has some.
    for layer in live_layers():
        weight, kept = layer._parameters.get("weight"), layer_state(layer).kept
        if weight is None or kept is None or kept.history is None or not kept.is_due(weight):
            continue
        kept._stamp.due = False
        by_device.setdefault(weight.device, []).append((kept.history, kept.out()))
    for found in by_device.values():
        pending, saturated = [history.pending for history, _ in found], [history.saturated for history, _ in found]
        torch._foreach_maximum_(pending, [out.amax for _, out in found])  # type: ignore[attr-defined]
        torch._foreach_add_(saturated, [out.past[0] for _, out in found])  # type: ignore[attr-defined]


def _cast_into(weight: Tensor, buffers: list[Tensor], rows: str, columns: str) -> None:
    if len(buffers) > _PLAIN:
        _cast_delayed_into(weight, buffers, rows)
        return
    specs = (rows, "" if columns == SAME else columns)
    cast_into(weight, rows, columns, [limit_of(weight, Spec.parse(text)) if text else None for text in specs], buffers)


def _cast_delayed_into(weight: Tensor, buffers: list[Tensor], spec: str) -> None:
    codes, scale, turned, empty, *state = buffers
    weight = weight.detach()
    if weight.is_cuda or kernels_on_cpu():
        from .kernels.launch import Operand, launch_cast

        nothing = (None, None)
        launch_cast(
            [weight], IDENTITY, Operand(Spec.parse(spec)), None, same=True, limits=nothing, keys=nothing, bits=nothing,
            state=state, recording=True, into=(codes, scale, turned, empty),
        )  # fmt: skip
        return
    cast = torch.ops.narrowgate.cast_fp8_delayed
    found = cast([weight], IDENTITY, spec, True, True, None, None, *state, True)
    for target, result in zip((codes, turned, scale), found, strict=True):
        target.copy_(result)


def _now(weight: Tensor, buffers: list[Tensor]) -> tuple[int, int, int]:
    return version_of(weight), _stream(weight), _history_version(buffers)


def _history_version(buffers: list[Tensor]) -> int:
    return buffers[_PLAIN]._version if len(buffers) > _PLAIN else 0


def _stream(weight: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(weight.device.index) if weight.is_cuda else 0


def _capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def version_of(weight: Tensor) -> int:
    """The weight's version counter; -1 where it has none."""
    return -1 if weight.is_inference() else weight._version


_LIBRARY = torch.library.Library("narrowgate", "FRAGMENT")
_LIBRARY.define(
    "weight_product(Tensor first, Tensor first_scale, Tensor weight, Tensor[] buffers, str first_spec, str rows, "
    "str columns, bool transposed, str accumulate, bool native, ScalarType out_dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("weight_product", _product, _key)
torch.library.register_fake("narrowgate::weight_product", _product_fake, lib=_LIBRARY)
#: Products that are an operator of this project.
OPERATORS = (torch.ops.narrowgate.weight_product.default,)
