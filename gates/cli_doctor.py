"""The command ``doctor``: what this machine runs natively, emulates, or lacks, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .environment import environment

if TYPE_CHECKING:
    from ..precision.backends import Backend
    from ..precision.capability import Device

#: Operand pairs that recipes use, each as (first, second, accumulate).
_PAIRS = (
    ("bf16", "bf16", "accurate"),
    ("fp8_e4m3", "fp8_e4m3", "accurate"),
    ("fp8_e4m3", "fp8_e4m3", "fast"),
    ("fp8_e4m3/row", "fp8_e4m3/row", "accurate"),
    ("fp8_e5m2", "fp8_e4m3", "accurate"),
    ("fp8_e5m2", "fp8_e5m2", "accurate"),
    ("fp8_e4m3/1x128", "fp8_e4m3/128x128", "accurate"),
    ("fp8_e4m3/1x128", "fp8_e4m3/1x128", "accurate"),
    ("fp8_e4m3/128x128", "fp8_e4m3/128x128", "accurate"),
    ("fp8_e4m3/1x32", "fp8_e4m3/1x32", "accurate"),
    ("fp6_e2m3", "fp6_e2m3", "accurate"),
    ("fp6_e3m2", "fp6_e3m2", "accurate"),
    ("fp4_e2m1", "fp4_e2m1", "accurate"),
    ("mxfp8", "mxfp8", "accurate"),
    ("mxfp6_e2m3", "mxfp6_e2m3", "accurate"),
    ("mxfp4", "mxfp4", "accurate"),
    ("nvfp4", "nvfp4", "accurate"),
)
#: What a backend is asked about besides: whole layers, as (name, fprop, dgrad, wgrad), each first · second operand.
_LAYERS = (
    ("fp8 tensor", "fp8_e4m3 fp8_e4m3", "fp8_e5m2 fp8_e4m3", "fp8_e5m2 fp8_e4m3"),
    ("fp8 tensor, delayed(16)", *("fp8_e4m3+delayed(16) fp8_e4m3+delayed(16)",) * 3),
    ("fp8 row", *("fp8_e4m3/row fp8_e4m3/row",) * 3),
    ("fp8 row, BF16 wgrad", "fp8_e4m3/row fp8_e4m3/row", "fp8_e4m3/row fp8_e4m3", "bf16 bf16"),
    ("fp8 tensor, BF16 wgrad", "fp8_e4m3 fp8_e4m3", "fp8_e5m2 fp8_e4m3", "bf16 bf16"),
    ("fp8 block", *("fp8_e4m3/1x128 fp8_e4m3/128x128",) * 2, "fp8_e4m3/1x128 fp8_e4m3/1x128"),
    ("mxfp8", *("mxfp8+rceil mxfp8+rceil",) * 3),
    ("nvfp4", *("nvfp4 nvfp4/16x16",) * 2, "nvfp4 nvfp4"),
    ("nvfp4, Hadamard and sr", "nvfp4 nvfp4/16x16", "nvfp4+sr nvfp4/16x16",
     "nvfp4+hadamard(16)+sr nvfp4+hadamard(16)"),
)  # fmt: skip


def doctor_command(as_json: bool) -> None:
    """Print versions, the device, formats and backends."""
    facts = doctor()
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    print("environment")
    for name, value in facts["environment"].items():
        print(f"  {name:20} {'absent' if value is None else value}")
    print(f"\nformats on {facts['device']}")
    width = max(len(entry["pair"]) for entry in facts["formats"])
    for entry in facts["formats"]:
        print(f"  {entry['pair']:{width}}  {entry['status']:8}  {entry['reason'] or ''}".rstrip())
    print("\nbackends")
    for entry in facts["backends"]:
        print(f"  {entry['name']:20} {entry['status']:12} {entry['reason'] or ''}".rstrip())
        for row in entry["formats"]:
            print(f"    {row['layer']:24} {row['status']:14} {row['reason'] or ''}".rstrip())


def doctor() -> dict[str, Any]:
    """Return what the command prints, as data."""
    from ..precision.backends import BACKENDS
    from ..precision.capability import current_device, gemm_support
    from ..precision.config import GemmConfig
    from ..precision.spec import Spec

    device = current_device()
    formats = []
    for first, second, accumulate in _PAIRS:
        support = gemm_support(GemmConfig(Spec.parse(first), Spec.parse(second), accumulate), device)
        name = first if first == second else f"{first} · {second}"
        formats.append(
            {
                "pair": f"{name} fast" if accumulate == "fast" else name,
                "status": "native" if support.native else "emulated",
                "reason": support.reason,
            }
        )
    return {
        "environment": environment(device.kind),
        "device": device.name,
        "formats": formats,
        "backends": [_backend(backend, device) for backend in BACKENDS.values()],
    }


def _backend(backend: Backend, device: Device) -> dict[str, Any]:
    there, reason = backend.available()
    return {
        "name": backend.name,
        "status": "available" if there else "absent",
        "reason": reason,
        "version": backend.version(),
        "formats": [{"layer": name, **_layer(backend, paths, there, device)} for name, *paths in _LAYERS],
    }


def _layer(backend: Backend, paths: Sequence[str], there: bool, device: Device) -> dict[str, str | None]:
    """Say how one whole layer runs on a backend: native, emulated, absent with its library, or inexpressible."""
    from ..precision.config import GemmConfig, LinearConfig
    from ..precision.spec import Spec

    pairs = (operands.split() for operands in paths)
    config = LinearConfig(*(GemmConfig(Spec.parse(first), Spec.parse(second)) for first, second in pairs))
    for field, reason in backend.inexpressible(config, None, device).items():
        return {"status": "inexpressible", "reason": f"{field}: {reason}"}
    if not there:
        return {"status": "absent", "reason": None}
    for path, gemm in config.gemms():
        support = backend.support(gemm, device)
        if not support.native:
            return {"status": "emulated", "reason": f"{path}: {support.reason}"}
    return {"status": "native", "reason": None}
