"""Shape and switches of a GEM-like model, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from ..precision.errors import NarrowgateError, did_you_mean

#: Pointwise activations, each zero at zero: padded attention slots then contribute exactly nothing.
ACTIVATIONS = ("silu", "gelu", "hardswish")
RESIDUALS = ("fp32", "autocast")
ATTENTIONS = ("padded", "jagged")
#: The widest head that the kernels of jagged attention take.
MAX_JAGGED_HEAD = 128
#: Bit lengths that a difference of times can have.
MAX_TIME_BUCKETS = 64


@dataclass(frozen=True, kw_only=True)
class GemConfig:
    """One configuration type for every size; :mod:`narrowgate.models.presets` holds the named ones.

    Widths count elements, ``n_*`` count tokens. ``bias``, ``norm_affine``, ``norm_block`` and ``activation`` are the
    precision-friendly *model* changes of LoKA (arXiv:2605.10886): they change the baseline too and are therefore no
    part of a recipe.

    Raises:
        NarrowgateError: a value out of range, or values that contradict each other.
    """

    #: Embedding width, also the width of every token.
    d: int
    heads: int
    layers: int
    #: Sequence length a row is cut to, summary tokens included.
    max_tokens: int
    #: Summary tokens of the non-sequence features; as many CLS tokens close each sequence.
    n_summary: int = 2
    #: Learned queries that pool the whole sequence.
    n_pma: int = 2
    #: Latest events that enter the interaction as they are.
    n_recent: int = 2
    #: Output tokens of the linear compression block and of the factorization-machine block.
    n_lcb: int = 4
    n_fmb: int = 4
    #: Columns the pairwise products are compressed to.
    fm_rank: int = 8
    #: Hidden widths of the factorization-machine block's MLP.
    fm_hidden: tuple[int, ...] = (256,)
    #: Rank of the DCN gate on the interaction's output.
    cross_rank: int = 32
    #: Key/value tokens that a row's summary is expanded to for the personalized feed-forward.
    pffn_tokens: int = 16
    #: Events that self-attention looks back on; None for all. CLS tokens always see the whole row.
    window: int | None = None
    #: Distances that self-attention has a learned bias for, one a head, added to scores; further ones share the last. A
    #: power of two, or 0 for no bias.
    bias_reach: int = 0
    #: Buckets of the time between two events that self-attention has a learned bias for, one a head, added to scores:
    #: the bit length of the difference in seconds, longer ones sharing the last. A power of two up to 64, or 0 for no
    #: such bias; needs a data source with times.
    time_buckets: int = 0
    head_hidden: int = 128
    #: Whether log odds have a linear part in the row's ids, values and numbers, beside the network's.
    first_order: bool = False
    #: Feed-forward networks that each layer's feature tokens are spread over; 0 for none.
    experts: int = 0
    #: Experts that one token goes to, and their hidden width.
    expert_top: int = 2
    expert_hidden: int = 512
    #: Weight of the loss that keeps experts evenly used.
    expert_balance: float = 0.01
    activation: str = "silu"
    #: Dropout of the factorization-machine block's hidden features, and of what self-attention adds.
    dropout: float = 0.1
    sequence_dropout: float = 0.0
    #: Biases on hidden linears; the last linear of a head always has one.
    bias: bool = False
    #: Learned scale in norms.
    norm_affine: bool = True
    #: Features that share one root mean square; None for all of them (so too where a norm's width is no multiple).
    norm_block: int | None = None
    #: Type of the sequence's residual stream under autocast: FP32, or the autocast type, which halves its traffic.
    residual: str = "fp32"
    #: How attention lays out rows: padded to ``max_tokens``, or as they lie in memory, by kernels of its own on a GPU.
    attention: str = "padded"

    def __post_init__(self) -> None:
        counts = ("d", "heads", "layers", "max_tokens", "n_summary", "n_pma", "n_recent", "n_lcb", "n_fmb", "fm_rank",
                  "cross_rank", "pffn_tokens", "head_hidden", "expert_top", "expert_hidden")  # fmt: skip
        for name in counts:
            if getattr(self, name) < 1:
                raise NarrowgateError(f"model field '{name}' must be at least 1, found {getattr(self, name)}")
        if self.d % self.heads:
            raise NarrowgateError(f"model field 'd' must be a multiple of heads ({self.heads}), found {self.d}")
        if self.max_events < self.n_recent:
            raise NarrowgateError(
                f"model field 'max_tokens' must leave room for n_summary + n_recent = {self.n_summary + self.n_recent}"
                f" tokens, found {self.max_tokens}"
            )
        if self.window is not None and self.window < 1:
            raise NarrowgateError(f"model field 'window' must be at least 1 or none, found {self.window}")
        if self.bias_reach < 0 or self.bias_reach & (self.bias_reach - 1):
            raise NarrowgateError(f"model field 'bias_reach' must be a power of two or 0, found {self.bias_reach}")
        if not 0 <= self.time_buckets <= MAX_TIME_BUCKETS or self.time_buckets & (self.time_buckets - 1):
            raise NarrowgateError(
                f"model field 'time_buckets' must be a power of two up to {MAX_TIME_BUCKETS} or 0, found"
                f" {self.time_buckets}"
            )
        if self.norm_block is not None and (self.norm_block < 1 or self.d % self.norm_block):
            raise NarrowgateError(f"model field 'norm_block' must divide d = {self.d}, found {self.norm_block}")
        if self.experts < 0:
            raise NarrowgateError(f"model field 'experts' must be at least 0, found {self.experts}")
        if self.experts and self.experts < self.expert_top:
            raise NarrowgateError(
                f"model field 'experts' must be 0 or at least expert_top = {self.expert_top}, found {self.experts}"
            )
        for name in ("dropout", "sequence_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise NarrowgateError(f"model field '{name}' must lie in [0, 1), found {getattr(self, name)}")
        _one_of("activation", self.activation, ACTIVATIONS)
        _one_of("residual", self.residual, RESIDUALS)
        _one_of("attention", self.attention, ATTENTIONS)
        if self.attention == "jagged" and self.d // self.heads > MAX_JAGGED_HEAD:
            raise NarrowgateError(
                f"model field 'heads' must leave heads at most {MAX_JAGGED_HEAD} wide with jagged attention, found"
                f" {self.d} / {self.heads} = {self.d // self.heads}"
            )

    @property
    def max_events(self) -> int:
        """Events that a row keeps, the latest first to stay."""
        return self.max_tokens - self.n_summary

    @property
    def n_sequence_summary(self) -> int:
        """Tokens that stand for the sequence in the interaction: CLS, pooled, and latest events."""
        return self.n_summary + self.n_pma + self.n_recent

    @property
    def n_interaction(self) -> int:
        """Tokens that an interaction block puts out."""
        return self.n_lcb + self.n_fmb


def _one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise NarrowgateError(
            f"model field '{field}' is one of {', '.join(known)}, found '{value}'{did_you_mean(value, known)}"
        )
