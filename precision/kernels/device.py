"""On which device a kernel is launched."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

_AS_IT_IS = contextlib.nullcontext()


def current_for(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the device of ``x`` is the current one, which is where Triton launches.

    Where it is that already, nothing is asked of the driver: that would cost the host more than the rest of a launch.
    """
    if not x.is_cuda or x.device.index == torch._C._cuda_getDevice():
        return _AS_IT_IS
    return torch.cuda.device(x.device)
