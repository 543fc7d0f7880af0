"""``open_data``: a source's name and place, as the command line takes it, to a dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ...precision.errors import NarrowgateError, NotBuiltError, did_you_mean
from ..presets import Preset, get_preset
from . import movielens, synthetic
from .loader import BatchSource, Dataset
from .rows import RowData
from .stream import StreamDataset
from .stream_config import StreamConfig

#: The source that is generated, streamed or at once as the preset says.
_GENERATED = "synthetic"
#: Sources that are read from a folder.
_FOLDERS: dict[str, Callable[[Path], RowData]] = {
    "ml-100k": movielens.read_ml_100k,
    "ml-1m": movielens.read_ml_1m,
}
#: Named by the contract, not readable yet.
_PLANNED = ("criteo", "table")


def open_data(
    uri: str, preset: str | Preset = "gem-tiny", *, device: str | torch.device = "cpu", steps: int | None = None
) -> BatchSource:
    """Open ``synthetic``, ``ml-100k:DIR`` or ``ml-1m:DIR`` for a preset.

    Args:
        uri: the source's name and, behind a colon, its folder.
        preset: a built-in size or a :class:`Preset`: batch sizes, steps, history length, amount of generated data.
        device: where the batches shall be.
        steps: training batches of a run; the preset's number by default.

    Raises:
        NarrowgateError: unknown source, missing folder or files, a corrupt line (with file and line number), too few
            rows.
        NotBuiltError: a source that this version does not read.
    """
    settings = get_preset(preset) if isinstance(preset, str) else preset
    name, colon, place = uri.partition(":")
    if name == _GENERATED:
        if colon:
            raise NarrowgateError(f"data source '{name}' takes no place, found '{uri}'")
        if isinstance(settings.synthetic, StreamConfig):
            return StreamDataset(
                settings.synthetic,
                settings.training,
                max_events=settings.model.max_events,
                device=device,
                steps=steps,
            )
        rows = synthetic.generate(settings.synthetic)
    elif name in _FOLDERS:
        if not place:
            raise NarrowgateError(f"data source '{name}' needs its folder: {name}:DIR, found '{uri}'")
        rows = _FOLDERS[name](_folder(name, place))
    elif name in _PLANNED:
        raise NotBuiltError(f"data source '{name}' is not built in this version (built: {', '.join(_known())})")
    else:
        hint = did_you_mean(name, [_GENERATED, *_FOLDERS])
        raise NarrowgateError(f"unknown data source '{name}'{hint} (known: {', '.join(_known())})")
    return Dataset(rows, settings.training, max_events=settings.model.max_events, device=device, steps=steps)


def _known() -> list[str]:
    return [_GENERATED, *(f"{name}:DIR" for name in _FOLDERS)]


def _folder(name: str, place: str) -> Path:
    folder = Path(place).expanduser()
    if not folder.exists():
        hint = "; `scripts/get_data ml-100k` brings it" if name == "ml-100k" else ""
        raise NarrowgateError(f"{name}: folder '{place}' does not exist{hint}")
    if not folder.is_dir():
        raise NarrowgateError(f"{name}: '{place}' is a file, expected the folder that holds the data files")
    return folder
