"""Finished trainings kept on disk, so that a run that was killed goes on where it stopped.

One file holds one training of one arm under one seed. Its key is a hash of everything that the training follows from:
the task (its names, what it says of itself, the source of its modules, its initial weights and first batches), the
recipe and backend, the seed and number of steps, narrowgate's own source, the versions of what computes, and the
device. Whatever differs gives another key. What a task takes from files or the environment is in no key: before a kept
training is used, its first steps are run again, and where their losses or gradient norms are others it is trained anew.
Step times are never kept: they belong to the moment.

Baselines do not depend on the recipe, so a later run of another recipe into the same folder reuses them. Candidates
are kept only until their report is written.

Files appear whole or not at all, hold no code (no pickles), and carry checksums: a damaged one is ignored, and the
report says so. A disk that is full costs only what would have been kept: room for the report is left.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..precision.observer import OperandNumerics
from . import task as tasks
from .arithmetic import Arithmetic
from .batches import fingerprint, tensors
from .environment import environment, package_version
from .files import ROOM, write_together
from .stability import Observed
from .train import Arm, Trained, Watch

if TYPE_CHECKING:
    from .task import Task, TaskSource

#: The folder among a run's reports.
FOLDER = ".seeds"
#: Baselines kept after a run; older ones go.
_KEPT_BASELINES = 64
#: Begins the names of files that remember how many seeds were looked at; starting afresh forgets no look.
_LOOKED = "looked-"
#: Raised where the files' layout changes.
_LAYOUT = 4
#: Batches of each kind that stand for the data, beside what the task says of it.
_BATCHES = 2
#: Steps that are run again before a kept training is used, and how far their losses and gradient norms may be from the
#: kept ones: on a GPU the order of sums is not the same from run to run.
_REPEATED = 3
_SAME = {"cpu": 1e-6}
_NEAR = 2e-3
#: What no two runs share, or what no result follows from.
_IRRELEVANT = ("date", "cores")
_OWN = Path(__file__).parent


@dataclass(frozen=True)
class SeedStore:
    """Keeps and finds finished trainings of one task; small enough to be sent to workers.

    Attributes:
        folder: where files lie; made when the first is written.
        content: hash of what all trainings of the task have in common.
    """

    folder: Path
    content: str

    def train(self, arm: Arm, seed: int, watch: Watch) -> Trained:
        """Return the kept training of ``arm`` under ``seed``, or train and keep it."""
        found, note = self.find(arm, seed)
        if found is not None:
            note = stale(found, arm)
            if note is None:
                watch(len(found.losses), len(found.losses), float(found.losses[-1]))
                return found
        return self.keep(arm, arm.train(seed, watch), note)

    def find(self, arm: Arm, seed: int) -> tuple[Trained | None, str | None]:
        """Return the kept training of ``arm`` under ``seed``; without one, why a file was not taken where there is."""
        found, note = _read(*self._place(arm, seed))
        return None if found is None else replace(found, reused=True), note

    def keep(self, arm: Arm, trained: Trained, note: str | None = None) -> Trained:
        """Keep a training that :meth:`find` did not find; return it with ``note`` and why it could not be kept."""
        notes = [note] if note else []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self.folder).free < ROOM + _size(trained):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _write(*self._place(arm, trained.seed), trained)
        except OSError as error:
            notes.append(f"finished trainings could not be kept: {error.strerror}")
        return replace(trained, notes=tuple(notes))

    def earlier_looks(self, arm: Arm, seeds: int) -> list[int]:
        """Note that a decision looked at ``seeds`` seeds of ``arm``; return the other numbers looked at before.

        Seeds are always the first ones, so a run of more seeds after one that could not decide pools them, and a run of
        fewer chooses among them: looks that its bounds do not count.
        """
        path, key = self._place(arm, None)
        path = path.with_name(f"{_LOOKED}{key[:16]}.json")
        try:
            before = {int(n) for n in json.loads(path.read_text())}
        except (OSError, ValueError, TypeError):
            before = set()
        with contextlib.suppress(OSError):
            write_together(self.folder, {path.name: json.dumps(sorted(before | {seeds}))})
        return sorted(before - {seeds})

    def _place(self, arm: Arm, seed: int | None) -> tuple[Path, str]:
        recipe = None if arm.recipe is None else arm.recipe.hash()
        # The backend that runs: one in the recipe is not part of the recipe's hash.
        backend = None if arm.recipe is None else arm.backend or arm.recipe.backend
        parts = [_LAYOUT, self.content, recipe, backend, arm.steps, arm.compiled, arm.observe_every, seed]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        kind = "baseline" if recipe is None else "candidate"
        return self.folder / f"{kind}-{seed}-{key[:16]}.npz", key


def stale(found: Trained, arm: Arm) -> str | None:
    """Run the first steps of a kept training of ``arm`` again; return why it is none of today's, None where it is."""
    begun = arm.begin(found.seed, _REPEATED)
    kept = np.stack([found.losses, found.gradient_norms])[:, : begun.shape[1]]
    apart = _SAME.get(arm.device.type, _NEAR)
    if kept.shape == begun.shape and np.allclose(kept, begun, rtol=apart, atol=0.0, equal_nan=True):
        return None
    whose = "baseline" if arm.recipe is None else f"candidate {arm.recipe.name}"
    return (
        f"a kept training of the {whose} under seed {found.seed} was not used: its first losses and gradients do not "
        "come out again, so something changed that no key knows of (say it in the task's describe())"
    )


def open_store(folder: Path, source: TaskSource, task: Task, weights: str) -> SeedStore:
    """Return the store of a task's trainings in ``folder``.

    Args:
        folder: where files lie.
        source: how the task was opened.
        task: the opened task.
        weights: hash of its model's initial weights under seed 0.
    """
    return SeedStore(folder, content_hash(source, task, weights))


def content_hash(source: TaskSource, task: Task, weights: str) -> str:
    """Return a hash of all that a training follows from beside recipe, backend, steps and seed."""
    facts = {k: v for k, v in environment(source.device).items() if k not in _IRRELEVANT}
    parts = [
        source.task or [source.model, source.data],
        tasks.describe(task),
        weights,
        [fingerprint(tensors(batch)) for batch in itertools.islice(iter(task.train_batches(0)), _BATCHES)],
        [fingerprint(tensors(batch)) for batch in itertools.islice(iter(task.eval_batches()), _BATCHES)],
        facts | {"numpy": package_version("numpy"), "arithmetic": str(Arithmetic.of(torch.device(source.device)))},
        _source_hash(_own_files()),
        _source_hash(_task_files(source.task)),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def forget(folder: Path) -> None:
    """Remove every training that is kept in ``folder``."""
    for path in _files(folder):
        _remove(path)
    with contextlib.suppress(OSError):
        folder.rmdir()


def settle(folder: Path) -> None:
    """Remove what a finished run no longer needs: candidates, unfinished files, and all but the newest baselines."""
    baselines = []
    for path in _files(folder):
        if path.name.startswith("baseline-") and path.suffix == ".npz":
            baselines.append(path)
        else:
            _remove(path)

    def age(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    for path in sorted(baselines, key=age)[:-_KEPT_BASELINES]:
        _remove(path)


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.glob("*") if path.is_file() and not path.name.startswith(_LOOKED)]
    except OSError:  # no folder that could be read: whoever writes there says so
        return []


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _write(path: Path, key: str, trained: Trained) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays, plain = {}, {}
    for field in fields(Trained):
        value = getattr(trained, field.name)
        if isinstance(value, np.ndarray):
            arrays[field.name] = value
        elif field.name == "slices":
            arrays |= {f"slice {name}": mask for name, mask in value.items()}
        elif field.name not in ("reused", "notes"):
            plain[field.name] = asdict(value) if isinstance(value, Observed) else value
    header = np.frombuffer(json.dumps({"key": key, "trained": plain}).encode(), dtype=np.uint8)
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, header=header, **arrays)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        _remove(Path(temporary))
        raise


def _size(trained: Trained) -> int:
    """Bytes that a training takes on a disk, about."""
    arrays = [*(getattr(trained, field.name) for field in fields(Trained)), *trained.slices.values()]
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray)) + 2**14


def _read(path: Path, key: str) -> tuple[Trained | None, str | None]:
    """Return the training, or why it was not taken where there is a file."""
    if not path.exists():
        return None, None
    try:
        # NumPy reads no further than an array needs, and so not what the checksums are compared at.
        with zipfile.ZipFile(path) as stored_files:
            if stored_files.testzip() is not None:
                raise zipfile.BadZipFile("a wrong checksum")
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        header = json.loads(arrays.pop("header").tobytes())
        if header["key"] != key:
            raise ValueError("another key")
        plain: dict[str, Any] = header["trained"]
        seen = plain.pop("observed")
        operands = tuple(OperandNumerics(**operand) for operand in seen.pop("operands"))
        still = tuple(seen.pop("without_gradient"))
        observed = Observed(**seen, operands=operands, without_gradient=still)
        plain["optimizer"] = tuple(plain["optimizer"])
        slices = {name.removeprefix("slice "): arrays.pop(name) for name in list(arrays) if name.startswith("slice ")}
        return Trained(**plain, **arrays, slices=slices, observed=observed), None
    except Exception:  # a flipped bit makes NumPy, zipfile and the parser of headers raise nearly anything
        _remove(path)
        return None, f"ignored a damaged file of a finished training: {path.name}"


def _own_files() -> list[Path]:
    import narrowgate.models
    import narrowgate.precision
    import narrowgate.recipes

    packages = (narrowgate.models, narrowgate.precision, narrowgate.recipes)
    roots = [_OWN, *(Path(package.__file__).parent for package in packages if package.__file__)]
    return [path for root in roots for path in root.rglob("*.py")]


def _task_files(task: str | None) -> list[Path]:
    """Return the sources of a user's task: its module, what lies beside it, and what it has from elsewhere.

    That is what the names of a module stand for, and so on, and the rest of these modules' packages as far as it is
    loaded. What is installed is known by its version.
    """
    if task is None:
        return []
    begin = task.partition(":")[0]
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = {path.resolve() for path in _own_files()}

    def source(module: Any) -> Path | None:
        file = getattr(module, "__file__", None)
        # Some modules name files that are nowhere.
        path = Path(file).resolve() if isinstance(file, str) and Path(file).is_file() else None
        if path is None or path.suffix != ".py" or path in own or installed.intersection(path.parents):
            return None
        return None if {"site-packages", "dist-packages"}.intersection(path.parts) else path

    # Not the program itself, which differs between a command and its workers.
    loaded = {name: path for name, module in list(sys.modules.items()) if (path := source(module)) is not None}
    loaded = {name: path for name, path in loaded.items() if name not in ("__main__", "__mp_main__")}
    reached, todo = set[str](), [begin, begin.partition(".")[0]]
    while todo:
        name = todo.pop()
        if name not in loaded or name in reached:
            continue
        reached.add(name)
        for value in list(vars(sys.modules[name]).values()):
            # Whatever a user's object does when it is asked.
            with contextlib.suppress(Exception):
                todo.append(value.__name__ if isinstance(value, ModuleType) else value.__module__)
        todo.extend(_imports(loaded[name], name))
    packages = {name.partition(".")[0] for name in reached}
    roots = {loaded[name].parent for name in (begin, begin.partition(".")[0]) if name in loaded}
    return list({
        path
        for name, path in loaded.items()
        if name.partition(".")[0] in packages or roots.intersection(path.parents)
    })  # fmt: skip


def _imports(path: Path, name: str) -> Iterator[str]:
    """Yield the names that the module ``name`` imports anywhere: of constants no value says where it is from."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            kept = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*kept, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _source_hash(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
