"""Writing a set of files so that a kill, a crash or a full disk never leaves halves or a mixture of two runs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..precision.errors import NarrowgateError

#: Bytes that a run needs at least: its reports together. A full disk takes an empty file and shows at the first byte.
ROOM = 2**19


def write_together(folder: Path, texts: Mapping[str, str], *, stale: tuple[str, ...] = ()) -> None:
    """Write several files of ``folder`` as one set.

    All texts are first written beside their targets, where a full disk shows. Then old files other than the first
    are removed, the first is replaced, and the others follow: whoever looks in between finds the old first file, or
    the new one, and never a derived file of the other run.

    Args:
        folder: made where it is missing.
        texts: file name to text; the first is the one that the others are derived from.
        stale: names of an older run's files that this set replaces though it does not have them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staged: list[tuple[Path, Path]] = []
    try:
        for name, text in texts.items():
            handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
            staged.append((Path(temporary), folder / name))
            # A path that is no UTF-8 has half characters, which no reader takes: they become question marks.
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
        for name in (*stale, *list(texts)[1:]):
            (folder / name).unlink(missing_ok=True)
        while staged:
            temporary_path, target = staged[0]
            temporary_path.replace(target)
            staged.pop(0)
    finally:
        for temporary_path, _ in staged:
            with contextlib.suppress(OSError):
                temporary_path.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Make ``folder`` and try to write in it, before hours of work would be lost.

    Raises:
        NarrowgateError: it cannot be made or written to, or has no room for a report.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".narrowgate.", dir=folder) as file:
            file.write(b"\0" * ROOM)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise NarrowgateError(f"{folder}: cannot write reports there: {error.strerror}") from None
