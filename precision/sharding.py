"""Quantize before the all-gather: what FSDP2 sends of a weight is its codes and scales, not its BF16 values.

:func:`shard_weight` puts a :class:`ShardedWeight` around a layer's weight before ``fully_shard``. FSDP2 then asks each
rank's shard what to send (``fsdp_pre_all_gather``) and makes the unsharded weight of what arrives
(``fsdp_post_all_gather``): a :class:`~narrowgate.precision.gathered.GatheredWeight`, whose codes are the GEMM operand.
The codes are those of one process that quantizes the whole weight, bit for bit.

**Scales.** FSDP2 shards whole rows, so every scale that reaches over one row or less is known to the rank that holds it
and travels behind the codes in the same all-gather; so do the scales of 128x128 blocks where no shard ends within a
block. A scale of the whole tensor, or of a block that shards split, takes the largest amax over all ranks: one small
all-reduce before the gather, or one for all weights of a step by :func:`reduce_amaxes`. Which of the two it is follows
from the weight's shape and the number of ranks alone, the same on every rank.

**Padding.** An all-gather takes as much from every rank, so each sends ceil(N / ranks) rows, the last ones padded
with zeros. The hook has the signature without FSDP2's own check of padded shapes, which would refuse scales and only
on the ranks that are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .casting import Request, quantize_both
from .delayed import AmaxHistory
from .errors import NarrowgateError
from .gathered import CodedWeight, GatheredWeight, written
from .quantization import QuantizedTensor, quantize
from .rounding import torch_dtype
from .scaling import scales_from_amax
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


class _Known:
    """What :func:`reduce_amaxes` found out about a shard, until that is written to; shared by all its views."""

    amax: Tensor | None = None
    #: Of the plain tensor, which somebody may write to directly.
    version: int = 0


class ShardedWeight(CodedWeight):
    """A weight [N, K], or one rank's rows of it, in its master dtype; gathered as ``spec``.

    Unsharded, as in a model that runs on one device without FSDP2, it multiplies by the codes that a gather would give.
    """

    _rows: Tensor
    _spec: Spec
    _full: tuple[int, int]
    _name: str
    _known: _Known

    @staticmethod
    def __new__(
        cls, values: Tensor, spec: Spec, full: tuple[int, int], name: str, known: _Known | None = None
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
        weight._known = known or _Known()
        return weight

    def codes(self) -> QuantizedTensor:
        """The codes of the whole weight, contracted over K."""
        assert tuple(self.shape) == self._full, "a shard is no operand: FSDP2 gathers it first"
        return _quantize(self._rows, Request(self._spec))

    def source(self) -> Tensor:
        """The values as an ordinary tensor that shares their memory; of a shard, its rows."""
        return self._rows

    # FSDP2's hooks.

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return what this rank sends, and the scales where every rank has them all.

        Codes are uint8 [ceil(N / ranks), K], since Gloo knows no FP8; scales FP32, padded likewise.
        """
        rows, first = self._place(mesh)
        if self._spans(mesh.size()):
            codes, scale = self._quantize_across(mesh, first)
            return (_padded(codes.view(torch.uint8), rows),), scale
        quantized = _quantize(self._rows, Request(self._spec))
        assert quantized.scale is not None
        codes = _padded(quantized.data.view(torch.uint8), rows)
        if mesh.size() == 1:  # FSDP2 gathers nothing then, and hands on the first tensor only
            return (codes,), quantized.scale
        return (codes, _padded(quantized.scale, self._scale_rows(rows))), None

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        scale: Tensor | None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Make the unsharded weight of what arrived, or bring ``out``, made so before, up to date."""
        count = self._full[0]
        if scale is None:
            scale = gathered[1][: self._scale_rows(count)]
        elif scale.is_cuda:
            # Made on FSDP2's copy stream, read on this one.
            scale.record_stream(torch.cuda.current_stream())
        if out is not None:
            assert isinstance(out, GatheredWeight)  # its codes lie in the buffer that was just filled
            out.rescale(scale)
            return None
        element = torch_dtype(self._spec.fmt.element)
        assert element is not None
        # No inner tensors to free: all that is large lies in FSDP2's own buffers.
        return GatheredWeight(gathered[0][:count].view(element), scale, self._spec, dtype), ()

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

    # Scales that span ranks.

    def _spans(self, ranks: int) -> bool:
        """Whether some scale reaches over rows of several ranks: by global shapes, so alike on all."""
        if ranks == 1:
            return False
        if self._spec.granularity == "tensor":
            return True
        return -(-self._full[0] // ranks) % self._block_rows() != 0

    def _block_rows(self) -> int:
        """Rows that one scale reaches over; 1 where it lies within a row."""
        block = self._spec.block
        return 1 if block is None else block[0]

    def _scale_rows(self, rows: int) -> int:
        return -(-rows // self._block_rows())

    def _own_amax(self, first: int) -> Tensor:
        """FP32: largest magnitude by scale of the whole weight, as far as this rank's rows tell; infinite for NaN."""
        rows, (count, columns) = self._rows.detach(), self._full
        if self._spec.granularity == "tensor":
            amax = torch.stack(rows.aminmax()).abs().amax().float() if rows.numel() else rows.new_zeros((), dtype=_FP32)
        else:
            assert self._spec.block is not None
            height, width = self._spec.block
            amax = rows.new_zeros(-(-count // height), -(-columns // width), dtype=_FP32)
            if rows.numel():
                top = first % height
                padded = F.pad(rows.abs(), (0, -columns % width, top, -(top + len(rows)) % height))
                blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width)).amax((1, 3))
                amax[first // height :][: len(blocks)] = blocks
        # No library says what its maximum makes of NaN, and all agree on infinity.
        return torch.where(amax < torch.inf, amax, torch.inf)

    def _amax(self, mesh: DeviceMesh, first: int) -> Tensor:
        # Whether it is known is alike on all ranks: every write to a shard comes by __torch_dispatch__, on ranks
        # without rows too. Behind its back, as by loading into a state_dict's tensors, only ranks with rows can tell.
        amax = self._known.amax
        if amax is None:
            amax = self._own_amax(first)
            _reduce(amax, mesh.get_group())
        elif self._rows.numel() and self._known.version != self._rows._version:
            raise NarrowgateError(
                f"layer '{self._name}': its weight was written to since reduce_amaxes: call it once more after that"
            )
        return amax

    def _quantize_across(self, mesh: DeviceMesh, first: int) -> tuple[Tensor, Tensor]:
        """(codes of this rank's rows, the scales of the whole weight)."""
        amax, rows, height = self._amax(mesh, first), self._rows.detach(), self._block_rows()
        scale = scales_from_amax(amax, self._spec).scale
        if self._spec.granularity == "tensor":
            # As a delayed scale, an amax from elsewhere has a kernel that reads the values once.
            history = AmaxHistory(1, rows.device)
            history.history, history.recording = amax.reshape(1), False
            return _quantize(rows, Request(replace(self._spec, delayed=1), history=history)).data, scale
        # Rows above, so that blocks begin where the whole weight's do.
        top = first % height
        rows = F.pad(rows, (0, 0, top, 0))
        amax = amax[first // height :][: self._scale_rows(len(rows))]
        return quantize(rows, self._spec, dim=1, amax=amax).data[top:], scale

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
        leader = next((arg for arg in args if isinstance(arg, ShardedWeight)), None)
        if leader is not None and func in _ALIASES:
            # The very same tensor: within a dispatch PyTorch would give its alias a version of its own.
            return ShardedWeight(leader._rows, leader._spec, leader._full, leader._name, leader._known)
        plain_args, plain_kwargs = tree_map_only(ShardedWeight, lambda w: w._rows, (tuple(args), kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            for shard in written(func, args):
                if isinstance(shard, ShardedWeight):
                    shard._known.amax = None
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
        spec: FP8 with granularity ``tensor``, ``row``, blocks within a row, or 128x128; dynamic, rounded to nearest.
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


def reduce_amaxes(model: nn.Module) -> int:
    """Find all scales that span ranks with one all-reduce for each process group, instead of one for each weight.

    Optional; on every rank, after ``optimizer.step()``. Holds for all gathers until a weight is written to; what writes
    through the tensors of a ``state_dict()`` and not through the Parameters has to call it again.

    Args:
        model: a model after ``fully_shard``, its weights sharded.

    Returns:
        How many weights the next gathers need no all-reduce for.

    Raises:
        NarrowgateError: a weight is gathered at the moment.
    """
    from torch.distributed.tensor import DTensor

    groups: dict[ProcessGroup, list[tuple[ShardedWeight, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, GatheredWeight):
            raise NarrowgateError(f"'{name}' is gathered at the moment: reshard the model first")
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        if not isinstance(local, ShardedWeight) or not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        if mesh.ndim > 1:  # replicas beside shards: FSDP2 gathers over the last dimension
            assert mesh.mesh_dim_names is not None
            mesh = mesh[mesh.mesh_dim_names[-1]]
        _, first = local._place(mesh)
        if local._spans(mesh.size()):
            groups.setdefault(mesh.get_group(), []).append((local, local._own_amax(first)))
    for group, found in groups.items():
        joined = torch.cat([amax.reshape(-1) for _, amax in found])
        _reduce(joined, group)
        parts = joined.split([amax.numel() for _, amax in found])
        for (local, amax), part in zip(found, parts, strict=True):
            local._known.amax, local._known.version = part.view(amax.shape), local._rows._version
    return sum(map(len, groups.values()))


def _quantize(rows: Tensor, request: Request) -> QuantizedTensor:
    if not rows.numel():  # no kernel is launched for nothing
        return quantize(rows, request.spec, dim=1, history=request.history)
    quantized, _ = quantize_both(rows, request, None)
    assert quantized is not None
    return quantized


def _reduce(amax: Tensor, group: ProcessGroup) -> None:
    torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)


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
