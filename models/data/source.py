"""``open_data``: a source's name and place, as the command line takes it, to a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import torch

from ...precision.errors import NarrowgateError, did_you_mean
from ..presets import Preset, TrainingConfig, get_preset
from . import movielens, next_item, synthetic
from .loader import BatchSource, Dataset
from .rows import RowData
from .stream import StreamDataset
from .stream_config import StreamConfig

#: The source that is generated, streamed or at once as the preset says.
_GENERATED = "synthetic"
#: Sources that are read from a folder, and the options that they take.
_FOLDERS: dict[str, tuple[str, ...]] = {"ml-100k": (), "ml-1m": ("task", "negatives", "latest")}
_TASKS = ("ratings", "next-item")
#: Sources that are read as a stream from one file.
_FILES = ("criteo", "table")


def open_data(
    uri: str, preset: str | Preset = "gem-tiny", *, device: str | torch.device = "cpu", steps: int | None = None
) -> BatchSource:
    """Open a data source for a preset.

    ``synthetic`` · ``ml-100k:DIR`` · ``ml-1m:DIR[?task=next-item&negatives=N&latest=N]`` ·
    ``criteo:FILE[?rows=N&buckets=N]`` · ``table:FILE[?schema=SCHEMA&rows=N]``, whose schema is ``FILE`` with ``.yaml``
    for its suffixes unless named.

    Args:
        uri: the source's name and, behind a colon, its place.
        preset: a built-in size or a :class:`Preset`: batch sizes, steps, history length, amount of generated data;
            with ``time_buckets`` batches carry the times of events.
        device: where the batches shall be.
        steps: training batches of a run; the preset's number by default.

    Raises:
        NarrowgateError: unknown source, missing folder or files, a corrupt line (with file and line number), too few
            rows, no times where the model needs them.
    """
    settings = get_preset(preset) if isinstance(preset, str) else preset
    name, colon, place = uri.partition(":")
    room: _Room = {
        "max_events": settings.model.max_events,
        "device": device,
        "steps": steps,
        "times": settings.model.time_buckets > 0,
    }
    if name == _GENERATED:
        if colon:
            raise NarrowgateError(f"data source '{name}' takes no place, found '{uri}'")
        if isinstance(settings.synthetic, StreamConfig):
            return StreamDataset(settings.synthetic, settings.training, **room)
        return Dataset(synthetic.generate(settings.synthetic), settings.training, **room)
    if name in _FOLDERS:
        if not place:
            raise NarrowgateError(f"data source '{name}' needs its folder: {name}:DIR, found '{uri}'")
        return Dataset(_read_folder(name, place), settings.training, **room)
    if name in _FILES:
        if not place:
            raise NarrowgateError(f"data source '{name}' needs its file: {name}:FILE, found '{uri}'")
        return _open_file(name, place, settings.training, room)
    hint = did_you_mean(name, [_GENERATED, *_FOLDERS, *_FILES])
    raise NarrowgateError(f"unknown data source '{name}'{hint} (known: {', '.join(_known())})")


class _Room(TypedDict):
    max_events: int
    device: str | torch.device
    steps: int | None
    times: bool


def _known() -> list[str]:
    return [_GENERATED, *(f"{name}:DIR" for name in _FOLDERS), *(f"{name}:FILE" for name in _FILES)]


def _read_folder(name: str, place: str) -> RowData:
    where, _, query = place.partition("?")
    options = _options(name, query, _FOLDERS[name])
    if name == "ml-100k":
        return movielens.read_ml_100k(_folder(name, where))
    task = options.get("task", "ratings")
    if task not in _TASKS:
        raise NarrowgateError(
            f"{name}: option 'task' is one of {', '.join(_TASKS)}, found '{task}'{did_you_mean(task, _TASKS)}"
        )
    counts = {key: _count(name, key, options.get(key), 1) for key in ("negatives", "latest")}
    if task == "ratings":
        for key, value in counts.items():
            if value is not None:
                raise NarrowgateError(f"{name}: option '{key}' needs task=next-item")
        return movielens.read_ml_1m(_folder(name, where))
    return next_item.read_ml_1m_next(
        _folder(name, where), negatives=counts["negatives"] or next_item.NEGATIVES, latest=counts["latest"]
    )


def _open_file(name: str, place: str, training: TrainingConfig, room: _Room) -> BatchSource:
    from .table_file import TableFile, need_pyarrow

    need_pyarrow()
    from .criteo import BUCKETS, criteo_schema
    from .table import TableDataset
    from .table_schema import load_schema

    file, _, query = place.partition("?")
    options = _options(name, query, ("rows", "buckets") if name == "criteo" else ("rows", "schema"))
    path = Path(file).expanduser()
    rows = _count(name, "rows", options.get("rows"), 1)
    if name == "criteo":
        schema = criteo_schema(_count(name, "buckets", options.get("buckets"), 2) or BUCKETS)
    else:
        beside = path.with_name(path.name.split(".")[0] + ".yaml")
        schema = load_schema(Path(options["schema"]).expanduser() if "schema" in options else beside)
    return TableDataset(TableFile(path, schema, rows=rows), training, **room)


def _options(name: str, query: str, known: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if key not in known:
            raise NarrowgateError(
                f"{name}: unknown option '{key}'{did_you_mean(key, known)} (known: {', '.join(known) or 'none'})"
            )
        if not (equals and value):
            raise NarrowgateError(f"{name}: option '{key}' has no value: {key}=VALUE")
        options[key] = value
    return options


def _count(name: str, key: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= 2**31):
        raise NarrowgateError(f"{name}: option '{key}' must be a whole number of at least {least}, found '{text}'")
    return int(text)


def _folder(name: str, place: str) -> Path:
    folder = Path(place).expanduser()
    if not folder.exists():
        hint = "; `scripts/get_data ml-100k` brings it" if name == "ml-100k" else ""
        raise NarrowgateError(f"{name}: folder '{place}' does not exist{hint}")
    if not folder.is_dir():
        raise NarrowgateError(f"{name}: '{place}' is a file, expected the folder that holds the data files")
    return folder
