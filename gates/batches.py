"""Batches of any shape: tensors inside tuples, lists, dictionaries, dataclasses and plain objects."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
    """Yield the tensors of a batch in a fixed order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, tuple | list):
        for part in batch:
            yield from tensors(part)
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors(part)
    elif hasattr(batch, "__dict__") and not isinstance(batch, type):
        yield from tensors(vars(batch))
    elif dataclasses.is_dataclass(batch):
        for field in dataclasses.fields(batch):
            yield from tensors(getattr(batch, field.name))


def fingerprint(values: Iterable[Tensor]) -> str:
    """Return a hash of tensors' shapes, dtypes and bytes. Copies to the host."""
    digest = hashlib.sha256()
    for value in values:
        value = value.detach()
        if value.is_nested or value.layout != torch.strided:
            value = value.values() if value.is_nested else value.to_dense()
        digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
