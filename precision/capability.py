"""Which operand pairs a device's matrix units multiply natively, and why not where they do not.

Sources: PyTorch's checks in aten/src/ATen/native/cuda/ScaledBlas.cpp (compute capability by scale recipe),
GroupedBlas.cpp, GroupMM.cu and ScaledGroupMM.cu (products of groups), and measurements of ``torch._scaled_mm`` on
Hopper, kept in docs/backends.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .config import GemmConfig, LinearConfig
from .errors import NarrowgateError, did_you_mean
from .spec import Spec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Device:
    """The device that a plan is made for; need not be present."""

    #: What a report calls it, for example ``NVIDIA H200``.
    name: str
    #: ``cuda`` or ``cpu``.
    kind: str
    #: CUDA compute capability, None on a CPU.
    capability: tuple[int, int] | None = None


CPU = Device(name="cpu", kind="cpu")
#: Devices that a plan can be made for without having one.
NAMED_DEVICES: dict[str, Device] = {
    "cpu": CPU,
    "h100": Device(name="NVIDIA H100", kind="cuda", capability=(9, 0)),
    "h200": Device(name="NVIDIA H200", kind="cuda", capability=(9, 0)),
    "b200": Device(name="NVIDIA B200", kind="cuda", capability=(10, 0)),
}


@dataclass(frozen=True)
class Support:
    """Whether a GEMM runs natively; ``reason`` says why it is emulated (None where it is native)."""

    native: bool
    reason: str | None = None


_NATIVE = Support(native=True)


def named_device(name: str) -> Device:
    """Return the device called ``name`` (``h100``, ``h200``, ``b200``, ``cpu``; ``auto`` is the present one).

    Raises:
        NarrowgateError: no such name.
    """
    if name == "auto":
        return current_device()
    if name not in NAMED_DEVICES:
        known = ["auto", *NAMED_DEVICES]
        raise NarrowgateError(f"unknown device '{name}'{did_you_mean(name, known)} (known: {', '.join(known)})")
    return NAMED_DEVICES[name]


def current_device(device: torch.device | str | None = None) -> Device:
    """Return the :class:`Device` behind a torch device; without one, the first GPU or else the CPU."""
    import torch

    found = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if found.type != "cuda":
        return CPU
    return _cuda_device(found.index if found.index is not None else torch.cuda.current_device())


@lru_cache(maxsize=16)
def _cuda_device(index: int) -> Device:
    import torch

    return Device(
        name=torch.cuda.get_device_name(index), kind="cuda", capability=torch.cuda.get_device_capability(index)
    )


#: Granularities that the fused cast kernels know.
CAST_GRANULARITIES = ("tensor", "row", "1x128", "128x128")


def has_cast_kernel(spec: Spec) -> bool:
    """Whether the fused kernels of :mod:`narrowgate.precision.casting` cast to ``spec`` on a GPU."""
    plain = spec.fmt.element.bits == 8 and not spec.fmt.block_scaled
    return plain and spec.granularity in CAST_GRANULARITIES and spec.hadamard is None


def same_codes(spec: Spec, other: Spec) -> bool:
    """True where a contraction over the other axis takes the very same codes: a transpose changes nothing.

    FP4 codes are packed along the contraction, and would have to be unpacked to turn.
    """
    if spec != other or spec.sr or spec.hadamard is not None or spec.high_precision:
        return False
    square = spec.block is not None and spec.block[0] == spec.block[1]
    return (spec.granularity == "tensor" or square) and spec.fmt.element.bits != 4


@lru_cache(maxsize=4096)
def gemm_support(gemm: GemmConfig, device: Device) -> Support:
    """Say whether ``device`` multiplies the two operands of ``gemm`` natively.

    High-precision GEMMs are native everywhere. The result depends on formats, granularities and accumulation only:
    dimensions are padded where the hardware wants multiples of 16.
    """
    if gemm.high_precision:
        return _NATIVE
    if device.kind != "cuda" or device.capability is None:
        return Support(native=False, reason=f"{device.name} has no low-precision matrix units")
    return _cuda_support(gemm.first, gemm.second, gemm.accumulate, device)


def _cuda_support(first: Spec, second: Spec, accumulate: str, device: Device) -> Support:
    def emulated(reason: str) -> Support:
        return Support(native=False, reason=reason)

    assert device.capability is not None
    major, minor = device.capability
    for spec in (first, second):
        if spec.fmt.block_scaled:
            if major < 10:
                return emulated(f"{device.name} has no {spec.format} matrix units (Blackwell has)")
            return emulated(f"this version has no native {spec.format} product; Blackwell's is not wired up")
        if spec.fmt.element.bits != 8:
            return emulated(f"no matrix unit multiplies {spec.format} with FP32 scales")
    if (major, minor) < (8, 9):
        return emulated(f"{device.name} (compute capability {major}.{minor}) has no FP8 matrix units; 8.9 has")
    if first.format == second.format == "fp8_e5m2":
        return emulated("no matrix unit multiplies E5M2 by E5M2")
    granularities = {first.granularity, second.granularity}
    if granularities <= {"tensor", "row"}:
        return _NATIVE
    if granularities <= {"1x128", "128x128"}:
        if major != 9:
            return emulated(f"PyTorch multiplies 128-blocks with FP32 scales on Hopper only, not on {device.name}")
        if granularities == {"128x128"}:
            return emulated("no library GEMM multiplies 128x128 by 128x128 blocks")
        if accumulate == "fast":
            return emulated("block scales have no fast accumulation; say accumulate: accurate")
        return _NATIVE
    return emulated(f"no library GEMM multiplies {first.granularity} by {second.granularity} scales")


#: Groups that one launch of PyTorch's grouped GEMM takes.
MOST_GROUPS = 1023


def grouped_obstacle(config: LinearConfig, device: Device, groups: int) -> str | None:
    """Say why a layer of ``groups`` experts multiplies one expert after another; None where one GEMM takes them all.

    A grouped layer runs its three paths alike, all grouped or all in turns, since the host has to know the groups'
    sizes as soon as one path runs in turns. What runs in turns is native or emulated as :func:`gemm_support` says; what
    is grouped is always native.
    """
    if device.kind != "cuda" or device.capability is None:
        return "a CPU runs the reference, an expert at a time"
    major = device.capability[0]
    if major not in (9, 10):
        return f"PyTorch has a grouped GEMM for compute capability 9 and 10, not for {device.name}"
    if groups > MOST_GROUPS:
        return f"one grouped GEMM takes at most {MOST_GROUPS} experts"
    for path, gemm in config.gemms():
        reason = _not_grouped(gemm, major, device)
        if reason is not None:
            return f"{path}: {reason}"
    return None


def _not_grouped(gemm: GemmConfig, major: int, device: Device) -> str | None:
    for spec in (gemm.first, gemm.second):
        if spec.high_precision:
            if spec.format != "bf16":
                return f"no grouped GEMM multiplies {spec.format}"
            continue
        if spec.format != "fp8_e4m3":
            return f"the grouped GEMM multiplies E4M3 by E4M3, not {spec.format}"
        if spec.granularity not in ("tensor", "row"):
            return f"the grouped GEMM knows row scales, not {spec.granularity}"
        if spec.clip_p is not None or spec.clip_rms is not None or spec.hadamard is not None:
            return f"clip and hadamard of each expert's rows need to know how many there are, found {spec}"
    if not gemm.high_precision and major != 9:
        return f"PyTorch's grouped GEMM with row scales runs on Hopper only, not on {device.name}"
    return None
