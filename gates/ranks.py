"""The ranks of a job that ``torchrun`` (or whoever sets ``RANK``, ``WORLD_SIZE`` and ``MASTER_*``) started.

:func:`meet` finds the others and begins to watch them (:class:`~narrowgate.gates.rank_watch.RankWatch`), so that
whatever ends one rank ends all. :func:`join` gives a process its device, collectives with a time limit, and a group of
the hosts for what is no tensor.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ..precision.errors import NarrowgateError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from .rank_watch import RankWatch

T = TypeVar("T")
#: Seconds that ranks wait for each other where nobody says.
DEFAULT_LIMIT = 600.0
#: Seconds in which who connects says who it is.
_HANDSHAKE = 10.0
_KEY, _DEVICE = "narrowgate/watch", "narrowgate/device"


@dataclass(frozen=True)
class Place:
    """Where a process stands in its job."""

    rank: int
    ranks: int
    #: Among the processes of its host, where the launcher says so.
    local_rank: int

    @classmethod
    def of_environment(cls) -> Place | None:
        """Return this process's place; None where it is no job of several processes.

        Raises:
            NarrowgateError: the environment's numbers contradict each other.
        """
        try:
            ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
            local = int(os.environ.get("LOCAL_RANK", rank))
        except KeyError:
            return None
        except ValueError:
            raise NarrowgateError("RANK, WORLD_SIZE and LOCAL_RANK: expected whole numbers, as torchrun sets") from None
        if not 0 <= rank < ranks:
            raise NarrowgateError(f"RANK: found {rank}, expected 0 to {ranks - 1}, as WORLD_SIZE is {ranks}")
        return cls(rank, ranks, local) if ranks > 1 else None


class Ranks:
    """What a rank says to the others. Every method is called by all ranks, in one order."""

    def __init__(self, place: Place, mesh: DeviceMesh, host: Any, watch: RankWatch, limit: float) -> None:
        self.rank, self.count = place.rank, place.ranks
        #: All ranks, on the device's backend: of one dimension, or replicas of shards.
        self.mesh = mesh
        #: Groups of ranks that hold a whole model each, in shards.
        self.replicas = mesh.size(0) if mesh.ndim == 2 else 1
        self.watch = watch
        #: Seconds that a collective may take.
        self.limit = limit
        self._host = host

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    @property
    def transport(self) -> str:
        """``nccl`` or ``gloo``: what carries the model's collectives."""
        return "nccl" if self.mesh.device_type == "cuda" else "gloo"

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank. Values travel as pickles between processes of one job."""
        import torch.distributed as dist

        self.watch.tick()
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._host)
        self.watch.tick()
        return found

    def from_first(self, value: T | Callable[[], T]) -> T:
        """Return rank 0's value on every rank; what can be called is called there only."""
        import torch.distributed as dist

        self.watch.tick()
        told: list[Any] = [(value() if callable(value) else value) if self.first else None]
        dist.broadcast_object_list(told, src=0, group=self._host)
        self.watch.tick()
        return told[0]

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor up over the ranks, in place, on the device's backend."""
        import torch.distributed as dist

        dist.all_reduce(values)
        self.watch.tick()
        return values

    def together(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def leave(self) -> None:
        """End the job, on every rank."""
        import torch.distributed as dist

        self.together()
        dist.destroy_process_group()
        self.watch.close()


def meet(place: Place, limit: float, failed: Callable[[str, int], None]) -> tuple[RankWatch, Any]:
    """Find the other ranks; return this one's watch and the store that they share. From then on failures end all.

    Args:
        place: of the environment.
        limit: seconds that any rank may wait for another.
        failed: as :class:`~narrowgate.gates.rank_watch.RankWatch` takes it.

    Raises:
        NarrowgateError: this PyTorch has no torch.distributed, or the launcher left something out.
        RunError: a rank did not come.
    """
    import torch.distributed as dist

    from .model_state import RunError
    from .rank_watch import RankWatch

    if not dist.is_available():
        raise NarrowgateError("this PyTorch has no torch.distributed, expected one to gate on several ranks")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise NarrowgateError(f"found no {' and '.join(missing)} in the environment, expected what torchrun sets")
    from torch.distributed.rendezvous import rendezvous

    patience = timedelta(seconds=limit)
    try:
        store, _, _ = next(iter(rendezvous("env://", place.rank, place.ranks, timeout=patience)))
        store.set_timeout(patience)
        peers = _connect(place, store, limit)
    except Exception as error:
        who = "the other ranks" if place.rank == 0 else "rank 0"
        raise RunError(f"rank {place.rank} waited up to {limit:g} s for {who} in vain: {_short(error)}") from error
    return RankWatch(place.rank, peers, place.ranks, limit, failed), store


def join(place: Place, device: str, limit: float, watch: RankWatch, store: Any, replicas: int = 1) -> Ranks:
    """Give this process its device and its collectives.

    Args:
        place: of the environment.
        device: ``cpu`` or ``cuda``; a rank takes the GPU of its number on the host.
        limit: seconds that a collective may take.
        watch: of :func:`meet`.
        store: of :func:`meet`.
        replicas: groups of ranks, of neighbours each, that hold a whole model in shards; divides the ranks.

    Raises:
        NarrowgateError: another device than rank 0's, or fewer GPUs than ranks on this host.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import PrefixStore

    if place.rank == 0:
        store.set(_DEVICE, device)
    elif (first := store.get(_DEVICE).decode()) != device:
        raise NarrowgateError(f"found device {device} here, and {first} on rank 0; --device says it for all ranks")
    patience, own = timedelta(seconds=limit), None
    if device == "cuda":
        own = _take_gpu(place, torch)
        # An abort by NCCL would end the process its own way: the watch ends it with the job's code.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    dist.init_process_group(
        "gloo" if own is None else "nccl",
        store=PrefixStore("narrowgate", store),
        rank=place.rank,
        world_size=place.ranks,
        timeout=patience,
        device_id=own,
    )
    if replicas == 1:
        mesh = init_device_mesh(device, (place.ranks,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device, (replicas, place.ranks // replicas), mesh_dim_names=("replica", "shard"))
    # What is no tensor travels between hosts, where a wait can be broken off.
    host = dist.new_group(backend="gloo", timeout=patience)
    return Ranks(place, mesh, host, watch, limit)


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _take_gpu(place: Place, torch: Any) -> Any:
    count = torch.cuda.device_count()
    if place.local_rank >= count:
        raise NarrowgateError(
            f"found {count} GPU{'s' * (count != 1)} for local rank {place.local_rank}, expected one a rank: start fewer"
            " processes, or use --device cpu"
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def _connect(place: Place, store: Any, limit: float) -> dict[int, socket.socket]:
    """Return the connections of the watch. Rank 0 tells where it listens, and a word that others cannot know."""
    if place.rank:
        port, word = store.get(_KEY).decode().split()
        connection = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), timeout=limit)
        connection.sendall(f"{word} {place.rank}\n".encode())
        return {0: _patient(connection)}
    peers: dict[int, socket.socket] = {}
    word = secrets.token_hex(16)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=place.ranks, dualstack_ipv6=both) as server:
        server.settimeout(limit)
        store.set(_KEY, f"{server.getsockname()[1]} {word}")
        while len(peers) < place.ranks - 1:
            connection, _ = server.accept()
            connection.settimeout(min(limit, _HANDSHAKE))
            said, _, rank = _line(connection).partition(" ")
            if secrets.compare_digest(said, word) and rank.isdecimal() and 0 < int(rank) < place.ranks:
                peers[int(rank)] = _patient(connection)
            else:
                connection.close()
    return peers


def _line(connection: socket.socket) -> str:
    """Read a short line; what is none, or comes too late, is empty."""
    said = b""
    with contextlib.suppress(OSError):
        while not said.endswith(b"\n") and len(said) < 100:
            part = connection.recv(1)
            if not part:
                break
            said += part
    return said.decode(errors="replace").strip()


def _patient(connection: socket.socket) -> socket.socket:
    """A connection that may be silent, but not for long once its other end's host is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
