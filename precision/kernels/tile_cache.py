"""Chosen tiles beyond the process: files that the package ships, and the user's cache.

One format: a file is of one device, and its choices lie in sections, each of one Triton and one source of the kernels,
so that a kernel that changed never takes what was measured before. The user's files lie in ``$NARROWGATE_CACHE_DIR``,
else ``$XDG_CACHE_HOME/narrowgate``, else ``~/.cache/narrowgate``. What cannot be read or written costs one warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..stochastic import ROUNDS

#: Rows and columns of a tile, the most tiles a program takes, and warps.
Tile = tuple[int, int, int, int]

#: Sections that a cache keeps.
_SECTIONS = 8
#: Files that the speed of a kernel does not depend on.
_NOT_KERNELS = (
    "__init__.py",
    "adam.py",
    "adam_codes.py",
    "adam_together.py",
    "cast_tiles.py",
    "launch.py",
    "leaves.py",
    "operands.py",
    "reference.py",
    "roll.py",
    "sum_codes.py",
    "tile_cache.py",
    "tuning.py",
    "turn.py",
    "write.py",
)
_KERNELS = Path(__file__).resolve().parent

_warned = False


def cache_dir() -> Path:
    """Return the folder of the user's cache; it need not exist."""
    own, shared = os.environ.get("NARROWGATE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(shared) if shared else Path.home() / ".cache") / "narrowgate"


def section() -> str:
    """Return what choices hold for: this Triton, and the kernels' source as it is."""
    return f"triton {version('triton')}, kernels {_source()}"


@lru_cache(maxsize=1)
def _source() -> str:
    digest = hashlib.sha256(f"{ROUNDS} rounds".encode())
    for path in sorted(_KERNELS.glob("*.py")):
        if path.name not in _NOT_KERNELS:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """Return a device as files name it: its name and compute capability."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} {major}.{minor}"


class Choices:
    """What is known of one device: key of a question -> tile."""

    def __init__(self, device: str, folder: Path, shipped: Path = _KERNELS / "choices") -> None:
        """Read what is shipped in ``shipped`` for ``device``, then what ``folder`` keeps."""
        self.device = device
        self.path = folder / f"casts-{re.sub(r'[^a-z0-9.]+', '-', device.lower())}.json"
        self.section = section()
        self.known: dict[str, Any] = {}
        for path in (*sorted(shipped.glob("*.json")), self.path):
            self.known |= _read(path, device).get(self.section, {})

    def find(self, key: str, candidates: Sequence[Tile]) -> Tile | None:
        """Return the choice that is kept for ``key``; None where there is none, or it is no candidate."""
        entry = self.known.get(key)
        tile = entry.get("tile") if isinstance(entry, dict) else None
        return next((candidate for candidate in candidates if list(candidate) == tile), None)

    def keep(self, key: str, tile: Tile, times: Mapping[Tile, float]) -> None:
        """Keep a choice here and, with what others have written meanwhile, in the file.

        Args:
            key: what was asked.
            tile: what answers it.
            times: microseconds of each candidate that ran.
        """
        us = {" ".join(map(str, candidate)): round(found, 2) for candidate, found in times.items()}
        self.known[key] = entry = {"tile": list(tile), "us": us}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                sections = _read(self.path, self.device)
                # The section written last is the last to go.
                own = sections.pop(self.section, {})
                sections[self.section] = own | {key: entry}
                kept = dict(list(sections.items())[-_SECTIONS:])
                _write(self.path, {"device": self.device, "sections": kept})
        except OSError as error:
            _warn(f"tuned tiles are not kept: {self.path}: {error.strerror or error}")


def ship_choices(device: torch.device, folder: Path) -> Path:
    """Write what is known of ``device`` for the kernels as they are to a file of ``folder``, and return its path.

    A choice keeps no times: they are those of one machine on one day.
    """
    choices = Choices(device_name(device), cache_dir())
    path = folder / choices.path.name
    known = {key: {"tile": entry["tile"]} for key, entry in sorted(choices.known.items())}
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, {"device": choices.device, "sections": {choices.section: known}})
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path, device: str) -> dict[str, dict[str, Any]]:
    """Sections of a file; none where it is not there, of another device, or broken."""
    try:
        found = json.loads(path.read_bytes())
        sections = found["sections"] if found["device"] == device else {}
        if all(isinstance(section, dict) for section in sections.values()):
            return sections
        reason = "a section is no mapping"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = repr(error)
    _warn(f"tuned tiles are not read: {path}: {reason}")
    return {}


def _write(path: Path, content: Any) -> None:
    """Write whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _warn(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"{message}; casts run as before (said once)", RuntimeWarning, stacklevel=3)
