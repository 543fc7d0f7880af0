"""What a thread makes before it is asked for: the same items, no more than so many early, and errors in their place."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Generator, Iterator

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


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("narrowgate-read")]


def none_is_left() -> bool:
    for thread in readers():
        thread.join(timeout=20)
    return not readers()


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_the_same_items_in_the_same_order(count):
    assert list(read_ahead(Numbers(count)())) == list(range(count))
    assert none_is_left()


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
    assert none_is_left()


def test_whoever_stops_early_leaves_no_thread_and_nothing_open():
    numbers = Numbers(50)
    for _ in read_ahead(numbers()):
        break
    assert none_is_left()
    assert numbers.closed.is_set()


def freed_by(held: list[Iterator[int]]) -> None:
    """Let go of a stream that only a cycle holds, as that of a frame in a kept exception, and collect it here."""
    cycle: list[object] = [held.pop()]
    cycle.append(cycle)
    del cycle
    gc.collect()


def plain(numbers: Iterator[int]) -> Generator[int, None, None]:
    return read_ahead(numbers)


def nested(numbers: Iterator[int]) -> Generator[int, None, None]:
    """As streams of a table: what is read ahead takes from what is read ahead."""
    return read_ahead(x for x in read_ahead(numbers, 2))


Stream = Callable[[Iterator[int]], Generator[int, None, None]]


@pytest.mark.parametrize("stream", [plain, nested])
def test_a_stream_may_be_freed_in_any_thread_its_own_among_them(stream: Stream):
    held: list[Iterator[int]] = []
    numbers, free = Numbers(50), threading.Event()

    def watched() -> Iterator[int]:
        for number in numbers():
            if number == 3:
                assert free.wait(timeout=20)
                freed_by(held)
            yield number

    held.append(stream(watched()))
    assert next(held[0]) == 0
    free.set()
    assert none_is_left()
    assert numbers.closed.is_set()


@pytest.mark.parametrize("stream", [plain, nested])
def test_who_stops_does_not_wait_for_what_is_being_made(stream: Stream):
    going_on, closed = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        try:
            yield 0
            going_on.wait(timeout=20)
            yield 1
        finally:
            closed.set()

    taken = stream(slow())
    assert next(taken) == 0
    began = time.monotonic()
    taken.close()
    assert time.monotonic() - began < 10
    assert not closed.is_set()
    going_on.set()
    assert none_is_left()
    assert closed.is_set()
