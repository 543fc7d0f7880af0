"""Batches of any shape: tensors inside tuples, lists, dictionaries, dataclasses and plain objects."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``; what holds no tensor is returned as it is."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return batch.to(device)
    if isinstance(batch, tuple):
        parts = [to_device(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [to_device(part, device) for part in batch]
    if isinstance(batch, Mapping):
        return {key: to_device(part, device) for key, part in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [f.name for f in dataclasses.fields(batch) if f.init]
        return dataclasses.replace(batch, **{name: to_device(getattr(batch, name), device) for name in names})
    return batch


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield what a batch holds in a fixed order: tensors, arrays, and in containers numbers and texts, as tensors.

    Of an object's attributes only tensors and arrays count, however deep: the rest may be counters, names, and what was
    computed on the first use.
    """
    yield from _held(batch, plain=True)


def _held(batch: Any, *, plain: bool) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, np.ndarray):
        yield from _of_array(batch)
    elif isinstance(batch, tuple | list):
        yield from _of_parts(batch, plain)
    elif isinstance(batch, Mapping):
        yield from _of_parts(batch.values(), plain)
    elif hasattr(batch, "__dict__") and not isinstance(batch, type):
        yield from _of_parts(vars(batch).values(), False)
    elif dataclasses.is_dataclass(batch):
        yield from _of_parts([getattr(batch, field.name) for field in dataclasses.fields(batch)], False)


def _of_parts(parts: Iterable[Any], plain: bool) -> Iterator[Tensor]:
    """Yield what the parts hold; numbers and texts in a row as one tensor, where they are ``plain`` data."""
    texts: list[bytes] = []
    for part in parts:
        if isinstance(part, str | bytes | bool | int | float | complex | np.generic):
            if plain:
                text = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
                texts += [f"{type(part).__name__} {len(text)} ".encode(), text]
            continue
        if texts:
            yield _of_bytes(b"".join(texts))
            texts = []
        yield from _held(part, plain=plain)
    if texts:
        yield _of_bytes(b"".join(texts))


def _of_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _of_array(array: np.ndarray[Any, Any]) -> Iterator[Tensor]:
    # PyTorch lacks some of NumPy's dtypes: bytes, and before them what they mean.
    yield _of_bytes(f"{array.shape}{array.dtype.str}".encode())
    if array.dtype.names is not None:  # between fields lies what nobody wrote
        for name in array.dtype.names:
            yield from _of_array(array[name])
    elif array.dtype.hasobject:
        yield from _of_parts(array.ravel().tolist(), True)
    elif array.size:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        yield torch.from_numpy(flat if flat.flags.writeable else flat.copy())


#: Words that are mixed at once on a device.
_CHUNK = 2**24
#: The increment and multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) as signed words.
_INCREMENT, _MIX_1, _MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fingerprint(values: Iterable[Tensor]) -> str:
    """Return a hash of tensors' shapes, dtypes and bytes: of a GPU's, of 64 bits of each that are mixed there.

    Copying a model's weights to the host and hashing them there takes longer than many a training step, for every arm
    and seed.
    """
    digest = hashlib.sha256()
    for value in values:
        for flat in _bytes(value, digest):
            digest.update((mixed_words(flat) if flat.is_cuda else flat).cpu().numpy().tobytes())
    return digest.hexdigest()


def _bytes(value: Tensor, digest: Any) -> Iterator[Tensor]:
    """Yield the bytes of a tensor and of what says how it lies, each [n] uint8; ``digest`` takes shapes and dtypes."""
    value = value.detach()
    if value.is_nested:
        lies: Any = value
        parts = [lies.values(), lies.offsets() if value.layout == torch.jagged else lies._nested_tensor_size()]
    else:
        parts = [value.to_dense() if value.layout != torch.strided else value]
    for part in parts:
        digest.update(f"{tuple(part.shape)}{part.dtype}".encode())
        yield part.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


#: Sums of a GPU's tensors that are kept before they are summed themselves.
_WAITING = 256


class Checksum:
    """A sum over batches, which costs a step little: it tells changes, and forgeries it does not.

    Of what lies on a GPU nothing is waited for before :meth:`result`.
    """

    def __init__(self) -> None:
        """Begin without a batch."""
        self._digest = hashlib.sha256()
        self._waiting: list[Tensor] = []

    def add(self, values: Iterable[Tensor]) -> None:
        """Add a batch's tensors."""
        for value in values:
            for flat in _bytes(value, self._digest):
                if flat.is_cuda:
                    self._waiting.append(mixed_words(flat))
                else:
                    self._digest.update(zlib.crc32(flat.cpu().numpy().data).to_bytes(4, "little"))
        if len(self._waiting) > _WAITING:
            self._waiting = [mixed_words(torch.cat(self._waiting))]

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield ``batches``, each of which is added."""
        for batch in batches:
            self.add(tensors(batch))
            yield batch

    def result(self) -> str:
        """Return the sum of what was added."""
        if self._waiting:
            self._digest.update(torch.cat(self._waiting).cpu().numpy().tobytes())
            self._waiting.clear()
        return self._digest.hexdigest()


def mixed_words(data: Tensor) -> Tensor:
    """Return 64 bits of ``data`` [n] uint8, where it lies, and the up to 7 bytes behind its last whole word.

    Sums SplitMix64's mix of every word and its place, modulo 2^64: bits that differ or words that changed places give
    another sum but for one chance in 2^64. No defence against who looks for a collision.
    """
    count = data.numel() // 8
    body, rest = data[: 8 * count], data[8 * count :]
    words = (body if body.storage_offset() % 8 == 0 else body.clone()).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, count, _CHUNK):
        part = words[start : start + _CHUNK]
        mixed = torch.arange(start, start + part.numel(), device=data.device).mul_(_INCREMENT).add_(part)
        # Shifts of signed words copy the sign; as a mix that is as good.
        mixed ^= mixed >> 30
        mixed *= _MIX_1
        mixed ^= mixed >> 27
        mixed *= _MIX_2
        mixed ^= mixed >> 31
        total += mixed.sum()
    return torch.cat([total.reshape(1).view(torch.uint8), rest])


def weights_fingerprint(model: nn.Module) -> str:
    """Return a hash of a model's parameters and buffers under their names."""
    named = sorted([*model.named_parameters(), *model.named_buffers()])
    names = hashlib.sha256("\0".join(name for name, _ in named).encode()).hexdigest()
    return names + fingerprint(value for _, value in named)


def length(batches: Iterable[Any]) -> int | None:
    """Return how many batches there are, None where they do not say."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None
