"""What a run ran on, and when: versions and devices, no host names and no paths."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib import metadata


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, None where it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment(device: str) -> dict[str, str | int | None]:
    """Return the facts that a report states about its machine.

    Args:
        device: ``cpu`` or ``cuda``: what the run used.
    """
    import torch

    facts: dict[str, str | int | None] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "narrowgate": package_version("narrowgate"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "device": device,
        "gpu": None,
        "compute_capability": None,
        "cuda": torch.version.cuda,
        "driver": None,
        "triton": package_version("triton"),
        "torchao": package_version("torchao"),
        "transformer_engine": package_version("transformer-engine"),
    }
    if device == "cuda":
        from .nvml import driver_version

        facts["gpu"] = torch.cuda.get_device_name()
        facts["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        facts["driver"] = driver_version()
    return facts
