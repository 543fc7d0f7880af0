"""What a thread makes before it is asked for: the same items, no more than so many early, and errors in their place."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from narrowgate.models.data.read_ahead import read_ahead


class Numbers:
    """0, 1, ... up to ``count``, then ``error`` where there is one; says how many were made, and when it was closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.made = threading.Semaphore(0)
        self.closed = threading.Event()
        self._count, self._error = count, error

    def __call__(self) -> Iterator[int]:
        try:
            for number in range(self._count):
                self.made.release()
                yield number
            if self._error is not None:
                raise self._error
        finally:
            self.closed.set()

    def wait_for(self, count: int) -> bool:
        return all(self.made.acquire(timeout=20) for _ in range(count))


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("narrowgate-read")]


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_the_same_items_in_the_same_order(count):
    assert list(read_ahead(Numbers(count)())) == list(range(count))
    assert not readers()


def test_items_are_made_while_nobody_asks_but_no_more_than_so_many():
    numbers = Numbers(50)
    taken = read_ahead(numbers(), ahead=3)
    assert next(taken) == 0
    assert numbers.wait_for(1 + 3)  # the one that was taken, and those that wait
    assert not numbers.made.acquire(timeout=0.2)
    assert next(taken) == 1
    assert numbers.wait_for(1)
    taken.close()


def test_an_error_comes_after_the_items_before_it():
    taken = read_ahead(Numbers(5, ValueError("row 5"))())
    assert [next(taken) for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="row 5"):
        next(taken)
    assert not readers()


def test_whoever_stops_early_leaves_no_thread_and_nothing_open():
    numbers = Numbers(50)
    for _ in read_ahead(numbers()):
        break
    assert not readers()
    assert numbers.closed.is_set()
