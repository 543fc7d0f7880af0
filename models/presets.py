"""Named sizes: model, training and synthetic data that fit together, as data.

``gem-tiny`` is for continuous integration on a CPU: one training takes seconds on one core. ``gem-small`` is for one
GPU: eight paired seeds of two arms take minutes. ``gem-base`` has the 1.3 billion dense parameters at which precision
matters, ``gem-long`` histories of up to 2,048 tokens in the shapes of GDPA's benchmark. Every hidden width that a GEMM
contracts over or writes is a multiple of 16, which FP8 matrix units ask for.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..precision.errors import NarrowgateError, did_you_mean
from .config import GemConfig
from .data.balance import Balance
from .data.stream_config import StreamConfig


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a preset is trained: the same for both arms of a pair.

    Raises:
        NarrowgateError: a value out of range.
    """

    batch_size: int
    eval_batch_size: int
    #: Optimizer steps, unless ``epochs`` ends sooner.
    steps: int
    #: Passes over the training rows that ``steps`` may not exceed.
    epochs: float
    lr: float
    betas: tuple[float, float] = (0.9, 0.98)
    #: Adam's: gradients well below it move a parameter in proportion to their size, those above it by the rate.
    eps: float = 1e-8
    #: Share of the steps over which the learning rate rises; it falls linearly over the rest.
    warmup: float = 0.1
    #: Peak rate of rowwise Adagrad on the embedding tables; None for Adam on them too.
    table_lr: float | None = None
    #: Of a model's first-order part: the peak rate, and the share of the rate by which its weights shrink each step.
    first_order_lr: float = 0.1
    first_order_decay: float = 0.03
    #: Training batches are filled with dead tokens up to a multiple of this many tokens.
    token_multiple: int = 16
    #: Deals rows into batches of even token counts; None leaves them as shuffled.
    balance: Balance | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "eval_batch_size", "token_multiple"):
            if getattr(self, name) < 1:
                raise NarrowgateError(f"training field '{name}' must be at least 1, found {getattr(self, name)}")
        for name in ("lr", "first_order_lr"):
            if not getattr(self, name) > 0:
                raise NarrowgateError(f"training field '{name}' must be positive, found {getattr(self, name)}")
        if not 0 <= self.first_order_decay < 1:
            raise NarrowgateError(
                f"training field 'first_order_decay' must lie in [0, 1), found {self.first_order_decay}"
            )
        if self.balance is not None:
            self.balance.check(self.batch_size)

    def round_up(self, tokens: int) -> int:
        """Return ``tokens`` up to the next multiple, at least one multiple."""
        return max(1, -(-tokens // self.token_multiple)) * self.token_multiple


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
    #: Held in memory as a whole, or streamed.
    synthetic: SyntheticConfig | StreamConfig


_PRESETS = (
    Preset(
        name="gem-tiny",
        model=GemConfig(
            d=32, heads=2, layers=1, max_tokens=16, fm_rank=16, fm_hidden=(128,), pffn_tokens=4, head_hidden=32
        ),
        # Low precision errs in proportion to a tensor's large gradients. Most here are far smaller (root mean squares
        # from 2e-6 to 2e-4 in tables and wide layers, 1e-2 at the heads): with the usual eps Adam would blow up what
        # is little but that error into whole steps, and pairs would drift apart by chance.
        training=TrainingConfig(batch_size=512, eval_batch_size=4096, steps=72, epochs=1, lr=1e-2, eps=1e-3),
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
    Preset(
        name="gem-base",
        model=GemConfig(
            d=512, heads=4, layers=3, max_tokens=64, n_summary=8, n_pma=8, n_recent=8, n_lcb=32, n_fmb=32, fm_rank=64,
            fm_hidden=(8192, 8192), cross_rank=512, pffn_tokens=32, head_hidden=512, residual="autocast",
            attention="jagged",
        ),
        training=TrainingConfig(
            batch_size=4096, eval_batch_size=4096, steps=2000, epochs=1, lr=5e-4, table_lr=0.02, token_multiple=8192
        ),
        synthetic=StreamConfig(users=200_000, items=100_000, rows=10_000_000, held_out=262_144),
    ),
    Preset(
        name="gem-long",
        model=GemConfig(
            d=512, heads=4, layers=2, max_tokens=2048, n_summary=2, n_pma=8, n_recent=8, n_lcb=32, n_fmb=32, fm_rank=32,
            fm_hidden=(2048, 2048), cross_rank=256, pffn_tokens=256, window=256, head_hidden=512, residual="autocast",
            attention="jagged",
        ),
        training=TrainingConfig(
            batch_size=1152, eval_batch_size=1152, steps=500, epochs=1, lr=5e-4, table_lr=0.02, token_multiple=16384
        ),
        synthetic=StreamConfig(
            users=200_000, items=100_000, rows=1_000_000, held_out=65_536, median_events=820.0, length_spread=0.8
        ),
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
