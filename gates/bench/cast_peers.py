"""Installed peers' casts of a BF16 matrix for both contractions: codes, and codes of the transposed matrix.

Sources: Transformer Engine 2.20.2, ``transformer_engine/pytorch/tensor/float8_tensor.py``; torchao 0.18,
``torchao/float8/float8_scaling_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...precision.backends.te_linear import quantizer
from ...precision.spec import Spec
from .cast_cases import SCALES
from .timing import Say

#: (peer, scale as our cases name it, what makes the cast of one matrix).
Peer = tuple[str, str, Callable[[], Callable[[Tensor], Any]]]


def cast_peers(say: Say) -> Iterator[Peer]:
    """Yield the casts of every peer that is installed; say which is not, and why."""
    yield from _transformer_engine(say)
    yield from _torchao(say)


def _transformer_engine(say: Say) -> Iterator[Peer]:
    try:
        import transformer_engine.pytorch as te  # type: ignore[import-not-found]
        from transformer_engine.pytorch.constants import DType  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:
        say(f"skipped: transformer_engine: {error}")
        return

    def delayed() -> Any:
        scale, amax = (torch.ones(1, device="cuda") for _ in range(2))
        return te.Float8Quantizer(scale=scale, amax=amax, fp8_dtype=DType.kFloat8E4M3, rowwise=True, columnwise=True)

    yield "transformer_engine", "delayed", delayed
    for name in ("tensor", "1x128", "128x128"):
        yield "transformer_engine", name, partial(quantizer, Spec.parse(SCALES[name]))


def _torchao(say: Say) -> Iterator[Peer]:
    try:
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig
    except ImportError as error:
        say(f"skipped: torchao: {error}")
        return
    config, e4m3 = LinearMMConfig(), torch.float8_e4m3fn

    def tensor(x: Tensor) -> tuple[Tensor, Tensor]:
        codes = hp_tensor_to_float8_dynamic(x, e4m3, config)._data
        return codes, codes.t().contiguous()

    def row(x: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = (
            hp_tensor_to_float8_dynamic(
                x, e4m3, config, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=dim
            )._data
            for dim in (-1, 0)
        )
        return rows, columns.t().contiguous()

    for name, cast in (("tensor", tensor), ("row", row)):
        yield "torchao", name, partial(torch.compile, cast, dynamic=False)
