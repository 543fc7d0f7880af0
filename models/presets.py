"""Named sizes: model, training and synthetic data that fit together, as data.

``gem-tiny`` is for continuous integration on a CPU: one training takes seconds on one core. ``gem-small`` is for one
GPU: eight paired seeds of two arms take minutes. Every hidden width that a GEMM contracts over or writes is a multiple
of 16, which FP8 matrix units ask for.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..precision.errors import NarrowgateError, did_you_mean
from .config import GemConfig


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a preset is trained: the same for both arms of a pair."""

    batch_size: int
    eval_batch_size: int
    #: Optimizer steps, unless ``epochs`` ends sooner.
    steps: int
    #: Passes over the training rows that ``steps`` may not exceed.
    epochs: float
    lr: float
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    #: Share of the steps over which the learning rate rises; it falls linearly over the rest.
    warmup: float = 0.1
    #: Training batches are filled with dead tokens up to a multiple of this many tokens.
    token_multiple: int = 16


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Size of the generated data that goes with a preset."""

    users: int
    items: int
    #: Impressions of one user, in time order.
    impressions: int
    seed: int = 20260803


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One named size."""

    name: str
    model: GemConfig
    training: TrainingConfig
    synthetic: SyntheticConfig


_PRESETS = (
    Preset(
        name="gem-tiny",
        model=GemConfig(
            d=32, heads=2, layers=1, max_tokens=16, fm_rank=16, fm_hidden=(128,), pffn_tokens=4, head_hidden=32
        ),
        training=TrainingConfig(batch_size=512, eval_batch_size=4096, steps=72, epochs=1, lr=2.5e-3),
        synthetic=SyntheticConfig(users=2000, items=500, impressions=50),
    ),
    Preset(
        name="gem-small",
        model=GemConfig(
            d=256, heads=4, layers=2, max_tokens=64, n_summary=4, n_pma=4, n_recent=4, n_lcb=16, n_fmb=16, fm_rank=32,
            fm_hidden=(2048, 2048), cross_rank=256, pffn_tokens=16, head_hidden=512, dropout=0.2, residual="autocast",
        ),
        training=TrainingConfig(
            batch_size=2048, eval_batch_size=4096, steps=400, epochs=2, lr=1e-3, token_multiple=4096
        ),
        synthetic=SyntheticConfig(users=10_000, items=4000, impressions=100),
    ),
)  # fmt: skip
_BY_NAME = {entry.name: entry for entry in _PRESETS}


def preset_names() -> list[str]:
    """Names of the built-in sizes."""
    return list(_BY_NAME)


def get_preset(name: str) -> Preset:
    """Return a built-in size.

    Raises:
        NarrowgateError: no preset has that name.
    """
    if name not in _BY_NAME:
        raise NarrowgateError(f"unknown model '{name}'{did_you_mean(name, _BY_NAME)} (built in: {', '.join(_BY_NAME)})")
    return _BY_NAME[name]


def preset(name: str) -> GemConfig:
    """Return the model configuration of a built-in size; raises like :func:`get_preset`."""
    return get_preset(name).model
