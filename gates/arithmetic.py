"""In which arithmetic both arms run around what a recipe changes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arithmetic:
    """The baseline's arithmetic on one device, which the candidate shares outside its low-precision products."""

    device: torch.device
    bf16: bool

    @classmethod
    def of(cls, device: torch.device) -> Arithmetic:
        """Return BF16 autocast where the device multiplies BF16, else FP32.

        A CPU without BF16 instructions runs BF16 products in scalar loops, ten times slower than FP32 and to no one's
        gain. There both arms run in FP32: a slightly stricter comparison for the candidate, and the report says so.
        """
        bf16 = device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        # On the meta device nothing is computed, and it knows no autocast.
        return cls(device, bf16 and device.type != "meta")

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which losses and predictions are computed."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext()

    def __str__(self) -> str:
        mode = "under torch.compile" if self.device.type == "cuda" else "eager"
        return f"BF16 autocast, {mode}" if self.bf16 else f"FP32 (this CPU has no BF16 arithmetic), {mode}"
