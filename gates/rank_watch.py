"""Watching the ranks of a job, so that whatever ends one of them ends all: at once, with one line and one exit code.

Every rank keeps a connection to rank 0. A process that dies, however suddenly, has its connections closed by the
kernel: rank 0 sees that before any collective gives up, says which rank it was, and tells the others to stop. A rank
that raises reports its error and waits to be told; one that makes no progress within the time limit reports that. A
collective that lacks a rank blocks the thread that runs the training, so all this happens in a thread of its own,
which ends the process.

Faults of one moment are often one fault: a rank that dies breaks the collectives of all others. So rank 0 listens a
little longer after the first report, and tells the cause alone: a death before an error, an error before a silence,
and among equals the first. Where rank 0 itself dies, rank 1 says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from . import exits

Kind = Literal["died", "error", "waited", "silent", "signal"]
#: The cause is among the reports of the first of these kinds; one that waited for others in vain is none itself.
_CAUSES: tuple[Kind, ...] = ("died", "error", "waited", "silent", "signal")
#: Seconds in which reports count as those of one fault, between two looks at the clock, and until a rank that was not
#: told to stop ends by itself.
_GRACE, _LOOK, _LAST = 1.0, 0.25, 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Fault:
    """What ended a rank."""

    rank: int
    kind: Kind
    #: One line; of a death none.
    text: str = ""
    code: int = exits.FAILED

    def line(self, ranks: int, told_alike: int = 1) -> str:
        """Return the one line that is printed; ``told_alike`` ranks reported the same."""
        if self.code == exits.INTERRUPTED:
            return "narrowgate: interrupted; no report was written of unfinished gates"
        if self.kind == "died":
            told = "its process ended without a word, as when it is killed or memory runs out"
            return f"narrowgate: the run failed: rank {self.rank} died ({told})"
        if self.code == exits.USAGE:
            # What all ranks found is nobody's own fault; it stands as one process would have said it.
            text = self.text.removeprefix("narrowgate: ")
            return self.text if told_alike == ranks else f"narrowgate: rank {self.rank}: {text}"
        return f"narrowgate: the run failed: rank {self.rank}: {self.text}"


def cause_of(faults: list[Fault], ranks: int) -> Fault:
    """Return the fault that the others follow from, of those in the order of their reports; of so many ranks.

    Where ranks waited for others it names those that did not: they hang, whether they can say so or not.
    """
    cause = min(faults, key=lambda fault: _CAUSES.index(fault.kind))
    absent = sorted(set(range(ranks)) - {fault.rank for fault in faults if fault.kind == "waited"})
    if cause.kind != "waited" or not absent:
        return cause
    named = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    return replace(cause, text=f"{cause.text}; {named} did not come to one")


class RankWatch:
    """One rank's part. Made and closed in the main thread, with all others.

    Args:
        rank: this one.
        peers: of rank 0, the connection to each other rank; of the others, ``{0: the connection to rank 0}``.
        ranks: of the job.
        limit: seconds without a :meth:`tick` that count as no progress.
        failed: called on rank 0 with the cause's text and exit code before it is told and all stop.
    """

    def __init__(
        self,
        rank: int,
        peers: dict[int, socket.socket],
        ranks: int,
        limit: float,
        failed: Callable[[str, int], None] = lambda text, code: None,
    ) -> None:
        self.rank, self.ranks, self.limit, self.failed = rank, ranks, limit, failed
        self._peers = peers
        self._ticked = time.monotonic()
        self._faults: list[Fault] = []
        self._until: float | None = None
        self._finished: set[int] = set()
        self._inbox, self._outbox = socket.socketpair()
        self._inbox.setblocking(False)
        self._outbox.setblocking(False)
        self._own: list[Fault] = []
        self._buffers: dict[int, bytes] = dict.fromkeys(peers, b"")
        self._closing = threading.Event()
        # A signal's number arrives in the inbox even while the main thread waits within a collective.
        self._before = signal.signal(signal.SIGTERM, lambda *_: None)
        self._wakeup = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="narrowgate-ranks", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """Note that this rank makes progress."""
        self._ticked = time.monotonic()

    def fail(self, text: str, code: int, *, waited: bool = False) -> NoReturn:
        """Report what ended this rank, and end with all others; ``waited`` in vain for some of them."""
        kind: Kind = "signal" if code == exits.INTERRUPTED else "waited" if waited else "error"
        self._own.append(Fault(self.rank, kind, text, code))
        self._wake()
        self._thread.join(_LAST + _GRACE)
        end(code)

    def close(self) -> None:
        """End watching: on every rank, when each has what it needs of the others."""
        self._closing.set()
        self._wake()
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGTERM, self._before)
        for connection in (*self._peers.values(), self._inbox, self._outbox):
            connection.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._outbox.send(b"\0")

    # The thread.

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._inbox, selectors.EVENT_READ, None)
            for rank, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while not self._over():
                for key, _ in selector.select(_LOOK):
                    if key.data is None:
                        self._own_news(self._inbox.recv(4096))
                    elif not self._listen(key.data):
                        selector.unregister(key.fileobj)
                if time.monotonic() - self._ticked > self.limit and not self._faults:
                    text = f"nothing happened for {self.limit:g} s, the time limit: it waits for another rank, or hangs"
                    self._note(Fault(self.rank, "silent", text))

    def _over(self) -> bool:
        """Whether there is nothing left to watch; ends the process where a fault is due."""
        if self._until is not None and time.monotonic() >= self._until:
            self._stop() if self.rank == 0 else self._unanswered()
        if self._closing.is_set() and self._until is None:
            if self.rank:
                self._send(0, {"done": True})
                return True
            return self._finished >= set(self._peers)
        return False

    def _own_news(self, data: bytes) -> None:
        for fault in self._own:
            self._note(fault)
        self._own.clear()
        for number in _SIGNALS:
            if bytes([number]) in data and not self._faults:
                code = exits.INTERRUPTED if number == signal.SIGINT else exits.FAILED
                self._note(Fault(self.rank, "signal", f"it was told to stop ({signal.Signals(number).name})", code))

    def _note(self, fault: Fault) -> None:
        """Take a fault into account: on rank 0 as one of the job, on others to be told of it."""
        self._faults.append(fault)
        if self.rank:
            told = {"kind": fault.kind, "text": fault.text, "code": fault.code}
            if self._send(0, told):
                self._until = self._until or time.monotonic() + _LAST
            else:
                self._lost_first()
        elif self._until is None:
            self._until = time.monotonic() + _GRACE

    def _listen(self, rank: int) -> bool:
        """Read what a peer says; return whether it may say more."""
        try:
            data = self._peers[rank].recv(65536)
        except OSError:
            data = b""
        if not data:
            if self.rank:
                self._lost_first()
            elif rank not in self._finished:
                self._note(Fault(rank, "died"))
            return False
        *lines, self._buffers[rank] = (self._buffers[rank] + data).split(b"\n")
        for line in lines:
            self._hear(rank, json.loads(line))
        return True

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        if "stop" in message:
            end(message["stop"])
        elif "done" in message:
            self._finished.add(rank)
        else:
            self._note(Fault(rank, message["kind"], message["text"], message["code"]))

    def _lost_first(self) -> NoReturn:
        """Stop without rank 0, which is gone."""
        if self.rank == 1:
            print(Fault(0, "died").line(self.ranks), file=sys.stderr, flush=True)
        end(exits.FAILED)

    def _unanswered(self) -> NoReturn:
        """Stop though rank 0 was told and says nothing: its whole process stands still."""
        if self.rank == 1:
            text = f"its process does not answer, as when it is stopped; rank 1: {self._faults[0].text}"
            print(Fault(0, "silent", text).line(self.ranks), file=sys.stderr, flush=True)
        end(self._faults[0].code)

    def _stop(self) -> NoReturn:
        cause = cause_of(self._faults, self.ranks)
        alike = len({fault.rank for fault in self._faults if (fault.text, fault.code) == (cause.text, cause.code)})
        with contextlib.suppress(Exception):
            self.failed(cause.line(self.ranks).removeprefix("narrowgate: the run failed: "), cause.code)
        print(cause.line(self.ranks, alike), file=sys.stderr, flush=True)
        for rank in self._peers:
            self._send(rank, {"stop": cause.code})
        end(cause.code)

    def _send(self, rank: int, message: dict[str, Any]) -> bool:
        try:
            self._peers[rank].sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True


def end(code: int) -> NoReturn:
    """End the process from any thread, whatever the main one waits for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
