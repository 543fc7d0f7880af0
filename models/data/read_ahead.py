"""Rows that are read while the device computes: a thread stays a few items ahead of whoever takes them."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def read_ahead(items: Iterator[T], ahead: int = 4) -> Generator[T, None, None]:
    """Yield what ``items`` does, in its order, made by a thread of its own.

    Reading, unpacking and parsing leave Python's lock to others most of the time. The thread ends with the items, at
    their first error, or with the item that it makes when nobody takes more of them; then it closes ``items``. Nobody
    waits for it: neither an interrupt, nor the garbage collector, which may close this in any thread, this one's own
    among them, and hold any lock.

    Args:
        items: what takes the host time to make; nobody else may take from it.
        ahead: so many are made before they are asked for, and held in memory.

    Raises: what ``items`` raises, after the items before it.
    """
    reader = _Reader(items)
    for _ in range(ahead):
        reader.asked.put(None)
    # A daemon: a stream that is still held when the interpreter ends must not keep it waiting.
    threading.Thread(target=reader.run, name="narrowgate-read", daemon=True).start()
    try:
        while True:
            item, error = reader.made.get()
            if error is not None:
                raise error
            if item is _END:
                return
            reader.asked.put(None)
            yield item
    finally:
        reader.stopped = True
        reader.asked.put(None)


_END: Any = object()


class _Reader(Generic[T]):
    """What the thread and the taker share. A ``SimpleQueue`` may be put into from within its own methods."""

    def __init__(self, items: Iterator[T]) -> None:
        self.items = items
        self.asked: SimpleQueue[None] = SimpleQueue()
        self.made: SimpleQueue[tuple[T, BaseException | None]] = SimpleQueue()
        self.stopped = False

    def run(self) -> None:
        """Make an item each time that one is asked for."""
        try:
            while self.asked.get() is None and not self.stopped:
                item = next(self.items, _END)
                self.made.put((item, None))
                if item is _END:
                    return
        except BaseException as error:  # the taker's to handle
            self.made.put((_END, error))
        finally:
            close = getattr(self.items, "close", None)
            if close is not None:
                close()
