"""A recipe's formats for the embeddings that torchrec sends: what its ``qcomm_codecs_registry`` takes.

torchrec shards tables in its own ways and asks codecs what to send of pooled and of sequence embeddings, forward and
backward. These send rows as ``shards.tables`` says, as :mod:`narrowgate.models.embedding_exchange` does those of the
built-in models: codes and a scale for each ``width`` elements::

    codecs = torchrec_codecs("recipe.yaml", width=128)
    sharders = [EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)]
    model = DistributedModelParallel(model, sharders=sharders)

Rows of tables that torchrec splits by rows are summed on their way, by a reduce-scatter, which codes cannot be: those
travel as they do without codecs, unless ``shards.tables`` has no codes either way. Codes have no gradient, so they are
refused where torchrec differentiates what it sends: with synchronous collectives, and in models that it compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..precision.errors import NarrowgateError
from ..precision.spec import Spec
from ..precision.stochastic import call_key, stream_key
from ..recipes import load_recipe
from ..recipes.load import flatten
from .row_wire import RowWire

if TYPE_CHECKING:
    from pathlib import Path

    from ..recipes import Recipe

#: torchrec's names of its operations that only move rows, and of the one that adds them up.
_MOVED = ("POOLED_EMBEDDINGS_ALL_TO_ALL", "SEQUENCE_EMBEDDINGS_ALL_TO_ALL")
_SUMMED = "POOLED_EMBEDDINGS_REDUCE_SCATTER"
#: Its own type hides that it takes methods.
_uncompiled: Any = torch.compiler.disable


class RowCodec:
    """What torchrec asks of a codec (``QuantizedCommCodec``), for rows in one format.

    Args:
        spec: ``fp32``, ``bf16``, or FP8 with ``/row``, with ``sr`` or without.
        width: elements that share a scale.
        stream: what its random bits are for; every codec of a rank has its own.
        seed: of stochastic rounding.

    Raises:
        NarrowgateError: a format that cannot travel.
    """

    def __init__(self, spec: Spec | str, width: int, *, stream: str = "", seed: int = 0) -> None:
        self._wire = RowWire(spec, stream or "format")
        self.width = width
        self._stream, self._seed = stream, seed
        #: Times that it drew random bits. A resumed training sets it.
        self.draws = 0

    @property
    def quantized_dtype(self) -> torch.dtype:
        """Of what is sent."""
        return self._wire.sent_as

    def encode(self, input_tensor: Tensor, ctx: None = None) -> Tensor:
        """Rows one after another, of any shape -> what is sent of them: codes flat, other formats in that shape.

        Raises:
            NarrowgateError: not a whole number of rows, or codes that gradients would have to pass.
        """
        self._rows(input_tensor.numel())
        spec = self._wire.spec
        if spec.high_precision and not spec.sr:
            return input_tensor.to(self._wire.dtype)
        if input_tensor.requires_grad and torch.is_grad_enabled():
            # What torchrec sends asynchronously it encodes within an autograd function of its own.
            raise NarrowgateError(
                f"found torchrec to differentiate what is sent, as it does with synchronous collectives and in compiled"
                f" models, and {spec} has no gradient: expected set_use_sync_collectives(False), or fp32 or"
                " bf16 in shards.tables"
            )
        rows = input_tensor.reshape(-1, self.width)
        packed = self._wire.pack(rows, self._key() if spec.sr else None).reshape(-1).view(self._wire.sent_as)
        return packed.view(input_tensor.shape) if spec.high_precision else packed

    def decode(self, input_grad: Tensor, ctx: None = None) -> Tensor:
        """What was sent -> rows one after another, FP32: of codes flat, else in the shape that was sent."""
        if self._wire.spec.high_precision:
            return input_grad.float()
        payload = input_grad.reshape(-1).view(torch.uint8)
        return self._wire.unpack(payload.view(-1, self._wire.row_bytes(self.width)), self.width).reshape(-1)

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        """Elements of :attr:`quantized_dtype` that are sent of ``input_len`` elements.

        Raises:
            NarrowgateError: not a whole number of rows.
        """
        return self._rows(input_len) * (self._wire.row_bytes(self.width) // self._wire.sent_as.itemsize)

    def create_context(self) -> None:
        """None: there is nothing that encoding and decoding share."""
        return

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: None
    ) -> tuple[int, int]:
        """(elements of this rank's tables in a row of the batch, 0): nothing is padded.

        Raises:
            NarrowgateError: tables of widths that ``width`` does not divide.
        """
        for elements in dim_per_rank:
            self._rows(elements)
        return dim_per_rank[my_rank], 0

    def _rows(self, elements: int) -> int:
        if elements % self.width:
            raise NarrowgateError(
                f"found {elements} elements of embeddings to send, expected a multiple of width {self.width}: "
                "give torchrec_codecs the tables' width, or what divides the widths of all of them"
            )
        return elements // self.width

    @_uncompiled  # a count within a graph would stand still
    def _key(self) -> int | Tensor:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.draws += 1
        return call_key(stream_key(self._seed, f"{self._stream}.{rank}", "exchange", "rows"), self.draws - 1)


def torchrec_codecs(recipe: str | Path | Recipe, *, width: int, seed: int = 0) -> Mapping[str, Any]:
    """Return the codecs of a recipe's ``shards.tables`` by torchrec's operations.

    Args:
        recipe: a built-in name, a path, or a :class:`Recipe`, with ``shards.tables``.
        width: elements of an embedding that share a scale: the tables' width, or what divides that of each.
        seed: of stochastic rounding, the same on every rank.

    Returns:
        What sharders of torchrec take as ``qcomm_codecs_registry``.

    Raises:
        RecipeError: the recipe has faults.
        NarrowgateError: it says nothing of tables, a format that cannot travel, a width below 1, or torchrec is not
            installed.
    """
    shards = flatten(load_recipe(recipe)).shards
    if shards is None or shards.tables is None:
        raise NarrowgateError("found a recipe without shards.tables, expected formats for rows of embedding tables")
    if not isinstance(width, int) or isinstance(width, bool) or not 1 <= width < 2**31:
        raise NarrowgateError(f"width: found {width!r}, expected the elements of an embedding, 1 or more")
    try:
        from torchrec.distributed.types import QuantizedCommCodecs  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NarrowgateError(f"torchrec_codecs needs torchrec, which cannot be imported: {error}") from None
    ways = {"forward": shards.tables.forward, "backward": shards.tables.backward}
    plain = all(spec.high_precision for spec in ways.values())
    return {
        operation: QuantizedCommCodecs(
            **{way: RowCodec(spec, width, stream=f"{operation}.{way}", seed=seed) for way, spec in ways.items()}
        )
        for operation in (*_MOVED, *((_SUMMED,) if plain else ()))
    }
