"""Embedding rows as the bytes that travel between ranks: codes, and behind them the scale of the row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..precision.errors import NarrowgateError
from ..precision.exchanged_rows import code_bytes, row_bytes, unsupported_rows
from ..precision.quantization import QuantizedTensor, quantize
from ..precision.rounding import torch_dtype
from ..precision.spec import Spec, as_spec
from ..precision.stochastic import Shard


class RowWire:
    """How rows [n, d] travel in one format: as bytes [n, :meth:`row_bytes`].

    Raises:
        NarrowgateError: a format without codes of whole bytes, or whose scales reach over more than a row.
    """

    def __init__(self, spec: Spec | str, what: str) -> None:
        self.spec = as_spec(spec)
        expected = unsupported_rows(self.spec)
        if expected is not None:
            raise NarrowgateError(f"{what}: found '{self.spec}', expected {expected}")
        dtype = torch_dtype(self.spec.fmt.element)
        assert dtype is not None
        self.dtype: torch.dtype = dtype

    @property
    def sent_as(self) -> torch.dtype:
        """What collectives are given: values as they are, codes and scales as bytes."""
        return self.dtype if self.spec.high_precision else torch.uint8

    def row_bytes(self, width: int) -> int:
        """Bytes of one row of ``width`` elements."""
        return row_bytes(self.spec, width)

    def pack(self, rows: Tensor, key: int | Tensor | None = None, shard: Shard | None = None) -> Tensor:
        """[n, d] -> uint8 [n, row_bytes(d)].

        Args:
            rows: any float dtype.
            key: of the random bits, where the format rounds stochastically.
            shard: where ``rows`` lie among those of all ranks.
        """
        found = quantize(rows, self.spec, dim=1, seed=key if self.spec.sr else None, shard=shard)
        codes = found.data.contiguous().view(torch.uint8)
        return codes if found.scale is None else torch.cat([codes, found.scale.contiguous().view(torch.uint8)], 1)

    def unpack(self, payload: Tensor, width: int) -> Tensor:
        """Uint8 [n, row_bytes(d)] -> [n, d], FP32."""
        end = code_bytes(self.spec, width)
        codes = payload[:, :end].contiguous().view(self.dtype)
        # A copy always: of a single row the part is contiguous already, at an address that need not be a multiple of 4.
        parts = payload[:, end:].clone(memory_format=torch.contiguous_format)
        scale = None if self.spec.high_precision else parts.view(torch.float32)
        shape = (payload.shape[0], width)
        return QuantizedTensor(codes, scale, None, self.spec, 1, shape).dequantize()
