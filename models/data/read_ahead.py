"""Rows that are read while the device computes: a thread stays a few items ahead of whoever takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def read_ahead(items: Iterator[T], ahead: int = 4) -> Generator[T, None, None]:
    """Yield what ``items`` does, in its order, made by a thread of its own.

    Reading, unpacking and parsing leave Python's lock to others most of the time. The thread ends with the items, at
    their first error, or when nobody takes more of them.

    Args:
        items: what takes the host time to make; nobody else may take from it.
        ahead: so many are made before they are asked for, and held in memory.

    Raises: what ``items`` raises, after the items before it.
    """
    end = object()
    reader = ThreadPoolExecutor(1, thread_name_prefix="narrowgate-read")
    waiting = deque(reader.submit(next, items, end) for _ in range(ahead))
    try:
        while (item := waiting.popleft().result()) is not end:
            waiting.append(reader.submit(next, items, end))
            yield item  # type: ignore[misc]
    finally:
        reader.shutdown(cancel_futures=True)
