"""Clocks, power, temperature and throttle reasons of the GPU in use; read, never set."""

from __future__ import annotations

from typing import Any

from .measurements import Clocks

#: Throttle reasons that mean clocks are held down (NVML's nvmlClocksThrottleReason*; idle and user settings are not).
_REASONS = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "thermal_software",
    0x40: "thermal_hardware",
    0x80: "power_brake",
}


def driver_version() -> str | None:
    """Return the driver's version, None where NVML cannot be read."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # NVML raises its own family of errors, ImportError where it is absent
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


class ClockReader:
    """Reads the current CUDA device's state; ``note`` says why it cannot, where it cannot."""

    def __init__(self) -> None:
        self.note: str | None = None
        self._handle: Any = None
        try:
            import pynvml
            import torch

            pynvml.nvmlInit()
            # CUDA and NVML number devices differently; the UUID is common to both.
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml: Any = pynvml
        except Exception as error:  # as above: several families of errors, none of which may stop a run
            self.note = f"not recorded: {' '.join(str(error).split()) or type(error).__name__}"

    def memory_tb_per_s(self) -> float | None:
        """What the memory can move at most, in 1e12 bytes a second: two transfers a clock over its whole width.

        None where it cannot be read.
        """
        if self._handle is None:
            return None
        nvml, handle = self._nvml, self._handle
        try:
            megahertz = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
            return 2 * megahertz * nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8 / 1e6
        except Exception:  # as above; a GPU that shares its memory with the host has no width of its own
            return None

    def read(self) -> Clocks | None:
        """Return the state now, None (with ``note`` set) where it cannot be read."""
        if self._handle is None:
            return None
        nvml, handle = self._nvml, self._handle
        try:
            mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            return Clocks(
                sm_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                celsius=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                throttle=tuple(name for bit, name in _REASONS.items() if mask & bit),
            )
        except Exception as error:
            self.note = f"not recorded: {' '.join(str(error).split()) or type(error).__name__}"
            return None
