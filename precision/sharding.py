"""Quantize before the all-gather: what FSDP2 sends of a weight is its codes and scales, not its BF16 values.

:func:`shard_weight` puts a :class:`ShardedWeight` around a layer's weight before ``fully_shard``. FSDP2 then asks each
rank's shard what to send (``fsdp_pre_all_gather``) and makes the unsharded weight of what arrives
(``fsdp_post_all_gather``): a :class:`~narrowgate.precision.gathered.GatheredWeight`, whose codes are the GEMM operand.
The codes are those of one process that quantizes the whole weight, bit for bit.

**Scales.** FSDP2 shards whole rows, so every scale that reaches over one row or less is known to the rank that holds
it and travels behind the codes in the same all-gather; so do the scales of square blocks where no shard ends within a
block. A scale of the whole tensor, NVFP4's tensor level, or a block that shards split takes the largest amax over all
ranks: one small all-reduce before the gather, or one for all weights of a step by
:func:`narrowgate.precision.reduce_amaxes`. Which of the two it is follows from the weight's shape and the number of
ranks alone, the same on every rank. See :mod:`narrowgate.precision.shard_codes`.

**Padding.** An all-gather takes as much from every rank, so each sends ceil(N / ranks) rows, the last ones padded
with zeros. The hook has the signature without FSDP2's own check of padded shapes, which would refuse scales and only
on the ranks that are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .errors import NarrowgateError
from .gathered import CodedWeight, GatheredWeight, asked_part, written
from .quantization import QuantizedTensor
from .rounding import torch_dtype
from .shard_codes import block_rows, own_amax, quantize_rows, reach
from .spec import Spec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_ATEN, _FP32 = torch.ops.aten, torch.float32
#: What looks at all of a shard, and at its memory in another form.
_ALIASES = frozenset({_ATEN.detach.default, _ATEN.alias.default})
_VIEWS = frozenset(
    {
        _ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.slice.Tensor, _ATEN.view.default,
        _ATEN.as_strided.default,
    }
)  # fmt: skip
#: What makes or moves one: its result gathers as the weight did, like a view. All else computes with plain tensors.
_COPIES = frozenset(
    {
        _ATEN.clone.default, _ATEN._to_copy.default, _ATEN._pin_memory.default, _ATEN.empty_like.default,
        _ATEN.new_empty.default, _ATEN.new_zeros.default,
    }
)  # fmt: skip
#: Where a module keeps what :func:`shard_weight` gave it.
_WIRE = "_narrowgate_wire"


class AmaxReduction:
    """All-reduces of maxima; none is made, and each rank's own count, where :attr:`local` is set."""

    local: bool = False


AMAX_REDUCTION = AmaxReduction()


class Known:
    """What ``reduce_amaxes`` found out about a shard, until that is written to; shared by all its views."""

    amax: Tensor | None = None
    #: Of the plain tensor, which somebody may write to directly.
    version: int = 0
    #: Codes that a gather made, for those that follow, and at which version.
    codes: tuple[QuantizedTensor, int] | None = None
    #: Whether they last until the weight is written to: :func:`keep_shard_codes`.
    lasting: bool = False

    def last(self) -> None:
        """Have the codes last until the weight is written to, or ``forget_shard_codes`` is called."""
        self.lasting = True
        LASTING.add(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy, and a file, need no codes, and have no optimizer that ends what they hold for.
        return {name: value for name, value in vars(self).items() if name not in ("codes", "lasting")}


LASTING: WeakSet[Known] = WeakSet()


class ShardedWeight(CodedWeight):
    """A weight [N, K], or one rank's rows of it, in its master dtype; gathered as ``spec``.

    Unsharded, as in a model that runs on one device without FSDP2, it multiplies by the codes that a gather would give.
    """

    _rows: Tensor
    _full: tuple[int, int]
    _name: str
    _known: Known

    @staticmethod
    def __new__(
        cls, values: Tensor, spec: Spec, full: tuple[int, int], name: str, known: Known | None = None
    ) -> ShardedWeight:
        """Wrap ``values``, rows of a weight of shape ``full``; ``name`` is the layer's, for errors."""
        weight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=values.device,
            requires_grad=values.requires_grad,
        )
        weight._rows, weight._spec, weight._full, weight._name = values, spec, full, name
        weight._known = known or Known()
        return weight

    def source(self) -> Tensor:
        """The values as an ordinary tensor that shares their memory; of a shard, its rows."""
        return self._rows

    # FSDP2's hooks.

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, Tensor | None]]:
        """Return what this rank sends, and what every rank has all of: scales, and NVFP4's scale of the tensor.

        Codes are uint8 [ceil(N / ranks), K], since Gloo knows no FP8; two FP4 a byte. Scales are FP32, or uint8 for
        those of one byte, padded likewise.
        """
        rows, first = self._place(mesh)
        reaches = reach(self._spec, self._full[0], mesh.size())
        amax = None if reaches is None else self._amax(mesh, first, reaches)
        quantized = self._quantized(first, reaches, amax)
        codes, scale = _padded(_bytes(quantized.data), rows), quantized.scale
        assert scale is not None
        # Of a mesh of one FSDP2 gathers nothing, and hands on the first tensor only.
        if mesh.size() == 1 or reaches == "blocks" or self._spec.granularity == "tensor":
            return (codes,), (scale, quantized.tensor_scale)
        return (codes, _padded(_bytes(scale), self._scale_rows(rows))), (None, quantized.tensor_scale)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        known: tuple[Tensor | None, Tensor | None],
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Make the unsharded weight of what arrived, or bring ``out``, made so before, up to date."""
        count = self._full[0]
        scale, tensor_scale = known
        for tensor in known:
            if tensor is not None and tensor.is_cuda:
                # Made on FSDP2's copy stream, read on this one.
                tensor.record_stream(torch.cuda.current_stream())
        if scale is None:
            scale = gathered[1][: self._scale_rows(count)]
        stored = None if self._spec.fmt.scale is None else torch_dtype(self._spec.fmt.scale)
        if stored is not None:
            scale = scale.view(torch.uint8 if stored == torch.float8_e8m0fnu else stored)
        if out is not None:
            assert isinstance(out, GatheredWeight)  # its codes lie in the buffer that was just filled
            out.rescale(scale, tensor_scale)
            return None
        codes, element = gathered[0][:count], torch_dtype(self._spec.fmt.element)
        # No inner tensors to free: all that is large lies in FSDP2's own buffers.
        weight = GatheredWeight(
            codes if element is None else codes.view(element), scale, tensor_scale, self._spec, self._full, dtype
        )
        return weight, ()

    def _scale_rows(self, rows: int) -> int:
        return -(-rows // block_rows(self._spec))

    def _place(self, mesh: DeviceMesh) -> tuple[int, int]:
        """(rows that every rank sends, the first row of this one)."""
        count, width = self._full
        rows = -(-count // mesh.size())
        first = min(mesh.get_local_rank() * rows, count)
        expected = (min(rows, count - first), width)
        if tuple(self.shape) != expected:
            raise NarrowgateError(
                f"layer '{self._name}': expected rows {first} to {first + expected[0]} of {count} x {width} "
                f"on this rank, found a shard of {list(self.shape)}: gathering {self._spec} needs FSDP2's own sharding "
                "over rows"
            )
        return rows, first

    def _quantized(self, first: int, reaches: str | None, amax: Tensor | None) -> QuantizedTensor:
        """This rank's codes: made in a forward, kept until the backward that gathers them again, then let go of.

        With :func:`keep_shard_codes` they last until the weight is written to. Under a scale that other ranks share
        they are kept only where ``reduce_amaxes`` found it for all of them: of what is written to one rank's rows in
        between only that rank knows, and all must send codes of one scale.
        """
        known = self._known
        # Nobody tells a hook whether it gathers for a training: FSDP2 calls it without gradients in any case.
        backward = torch._C._current_graph_task_id() != -1
        kept, capturing = known.codes, self._rows.is_cuda and torch.cuda.is_current_stream_capturing()
        if kept is not None and kept[1] == self._rows._version and (backward or known.lasting) and not capturing:
            known.codes = kept if known.lasting else None
            _used_here(kept[0])
            return kept[0]
        made = quantize_rows(self._rows.detach(), self._spec, self._full, first, reaches, amax)
        certain = (reaches is None or known.amax is not None) and not capturing
        wanted = (known.lasting or not backward) and not torch.is_inference_mode_enabled()
        known.codes = (made, self._rows._version) if certain and wanted else None
        return made

    def _amax(self, mesh: DeviceMesh, first: int, reaches: str) -> Tensor:
        # Whether it is known is alike on all ranks: every write to a shard comes by __torch_dispatch__, on ranks
        # without rows too. Behind its back, as by loading into a state_dict's tensors, only ranks with rows can tell.
        amax = self._known.amax
        if amax is None:
            amax = own_amax(self._rows.detach(), self._spec, self._full, first, reaches)
            reduce_amax(amax, mesh.get_group())
        elif self._rows.numel() and self._known.version != self._rows._version:
            raise NarrowgateError(
                f"layer '{self._name}': its weight was written to since reduce_amaxes: call it once more after that"
            )
        return amax

    # A tensor.

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedWeight({self._rows}, spec={self._spec})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_rows"], (self._spec, self._full, self._name)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> ShardedWeight:
        return ShardedWeight(inner["_rows"], *context)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        part = asked_part(func, args)
        if part is not None:
            return part
        leader = next((arg for arg in args if isinstance(arg, ShardedWeight)), None)
        if leader is not None and func in _ALIASES:
            # The very same tensor: within a dispatch PyTorch would give its alias a version of its own.
            return ShardedWeight(leader._rows, leader._spec, leader._full, leader._name, leader._known)
        plain_args, plain_kwargs = tree_map_only(ShardedWeight, lambda w: w._rows, (tuple(args), kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            for shard in written(func, args):
                if isinstance(shard, ShardedWeight):
                    shard._known.amax = shard._known.codes = None
            if func is _ATEN.copy_.default and _same_rows(*args[:2]):
                # FSDP2 moves rows that it pads into another tensor, on ranks that it pads alone.
                to, source = args[0], args[1]
                to._known.amax, to._known.version = source._known.amax, to._rows._version
                if source._known.lasting:
                    to._known.last()
        if leader is None:
            return out
        if out is leader._rows:  # in place
            return leader
        if func not in _VIEWS and func not in _COPIES:
            return out
        known = leader._known if func in _VIEWS else None
        context = (leader._spec, leader._full, leader._name)
        return tree_map_only(Tensor, lambda t: ShardedWeight(t, *context, known), out)


def shard_weight(modules: Sequence[nn.Module], spec: Spec, *, name: str = "") -> None:
    """Make FSDP2 gather the weight of ``modules`` as ``spec``; called before ``fully_shard`` and the optimizer.

    The weight becomes another Parameter, of the same name, values, dtype and ``state_dict`` entry.

    Args:
        modules: a linear layer, or several that share one weight [N, K].
        spec: any low-precision format, with dynamic scales of unclipped values, rounded to nearest.
        name: the layer's name, for errors.
    """
    old = modules[0]._parameters["weight"]
    assert old is not None
    shape = (old.shape[0], old.shape[1])
    weight = nn.Parameter(ShardedWeight(old.detach(), spec, shape, name), requires_grad=old.requires_grad)
    for module in modules:
        module._parameters["weight"] = weight
        handles = (
            module.register_state_dict_post_hook(_plain_entry),
            module.register_load_state_dict_post_hook(_still_sharded),
            module.register_forward_pre_hook(_check_coded),
        )
        module.__dict__[_WIRE] = (spec, shape, name, handles)


def gathered_as(module: nn.Module) -> Spec | None:
    """How FSDP2 gathers the module's weight; None where it sends the values themselves."""
    wire = module.__dict__.get(_WIRE)
    return None if wire is None else wire[0]


def release_weights(modules: Sequence[nn.Module]) -> None:
    """Undo :func:`shard_weight` on those of ``modules`` that it was called for.

    Raises:
        NarrowgateError: ``fully_shard`` was called since.
    """
    wired = [module for module in modules if _WIRE in module.__dict__]
    for module in wired:
        if not isinstance(module._parameters["weight"], ShardedWeight):
            name = module.__dict__[_WIRE][2]
            raise NarrowgateError(
                f"layer '{name}': FSDP2 holds its low-precision shards; expected to be called before it"
            )
    plain: dict[int, nn.Parameter] = {}
    for module in wired:
        weight = module._parameters["weight"]
        assert isinstance(weight, ShardedWeight)
        fresh = plain.get(id(weight))
        if fresh is None:
            fresh = plain[id(weight)] = nn.Parameter(weight.source().detach(), requires_grad=weight.requires_grad)
        module._parameters["weight"] = fresh
        for handle in module.__dict__.pop(_WIRE)[3]:
            handle.remove()


def _same_rows(to: Any, source: Any) -> bool:
    """Whether one rank's rows are copied whole to where the same rows will lie."""
    if not isinstance(to, ShardedWeight) or not isinstance(source, ShardedWeight):
        return False
    alike = (to._spec, to._full, to._name, to.shape, to.dtype)
    return alike == (source._spec, source._full, source._name, source.shape, source.dtype)


def reduce_amax(amax: Tensor, group: ProcessGroup) -> None:
    """Take the largest ``amax`` of the ranks, in place; see :class:`AmaxReduction`."""
    if not AMAX_REDUCTION.local:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)


def _used_here(quantized: QuantizedTensor) -> None:
    """Tell the allocator that this stream reads what another one may have made."""
    for tensor in (quantized.data, quantized.scale, quantized.tensor_scale):
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())


def _bytes(x: Tensor) -> Tensor:
    return x if x.dtype == _FP32 else x.view(torch.uint8)


def _padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - len(x))).contiguous() if len(x) != rows else x.contiguous()


def _check_coded(module: nn.Module, args: Any) -> None:
    """What took the weight's hooks off must not pass for a gather of codes."""
    if not isinstance(module._parameters["weight"], CodedWeight):
        spec, _, name, _ = module.__dict__[_WIRE]
        raise NarrowgateError(
            f"layer '{name}': found an ordinary weight, expected one gathered as {spec}: it was replaced or "
            "distributed since the recipe was applied"
        )


def _plain_entry(module: nn.Module, entries: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A checkpoint holds ordinary tensors, which share memory with the shards."""
    entry = entries.get(f"{prefix}weight")
    if entry is None or isinstance(entry, nn.Parameter):
        return
    if isinstance(entry, ShardedWeight):
        entries[f"{prefix}weight"] = entry.source()
        return
    from torch.distributed.tensor import DTensor

    if isinstance(entry, DTensor) and isinstance(entry._local_tensor, ShardedWeight):
        entries[f"{prefix}weight"] = DTensor.from_local(
            entry._local_tensor.source(), entry.device_mesh, entry.placements, run_check=False, shape=entry.shape,
            stride=entry.stride(),
        )  # fmt: skip


def _still_sharded(module: nn.Module, incompatible: Any) -> None:
    """Loading with ``assign=True`` puts the checkpoint's own tensors in place: they must gather as the weight did."""
    spec, shape, name, _ = module.__dict__[_WIRE]
    weight = module._parameters["weight"]
    if isinstance(weight, CodedWeight) or weight is None:
        return
    from torch.distributed.tensor import DTensor

    if not isinstance(weight, DTensor):
        wrapped = ShardedWeight(weight.detach(), spec, shape, name)
        module._parameters["weight"] = nn.Parameter(wrapped, requires_grad=weight.requires_grad)
    elif not isinstance(weight._local_tensor, ShardedWeight):
        weight._local_tensor = ShardedWeight(weight._local_tensor, spec, shape, name)
