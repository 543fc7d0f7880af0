"""The command ``doctor``: what this machine runs natively, emulates, or lacks, and why."""

from __future__ import annotations

import json
from typing import Any

from .environment import environment, package_version

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
#: Backend, the distribution it comes from, and whether this version can run recipes on it.
_BACKENDS = (
    ("native", "torch", True),
    ("torchao", "torchao", False),
    ("transformer_engine", "transformer-engine", False),
)


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


def doctor() -> dict[str, Any]:
    """Return what the command prints, as data."""
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
        "backends": [_backend(*entry) for entry in _BACKENDS],
    }


def _backend(name: str, distribution: str, built: bool) -> dict[str, str | None]:
    version = package_version(distribution)
    if version is None:
        return {"name": name, "status": "absent", "reason": f"{distribution} is not installed"}
    if not built:
        reason = f"{distribution} {version} is installed; this version of narrowgate runs no recipe on it"
        return {"name": name, "status": "not built", "reason": reason}
    return {"name": name, "status": "available", "reason": f"{distribution} {version}"}
