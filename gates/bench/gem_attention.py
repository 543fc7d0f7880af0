"""The three attentions of a GEM-like model alone: jagged, padded, and libraries', in turns.

Lengths are drawn evenly from 1 to the model's ``max_tokens``, as GDPA's benchmark has sparsity 0.5: padded attention
then works on twice the tokens that there are, so half of its time is what jagged attention promises to save. Each use
is timed forward and backward under ``torch.compile`` at the model's batch.

Every use has a row for each arm that can run it; arms that can run all of them have a row for the whole step too,
weighted by calls. ``ratio`` is the padded version's time over the arm's. ``saved_of_promised`` is
(padded - jagged) / (padded · (1 - fill)); causal and windowed tiles that are never visited can lift it above 1.

``tflops`` counts six products over the pairs of a query and a key that the arm's mask shows, two forward and four
backward: 12 · d · pairs FLOPs, d being all heads together. Nothing computed twice and no padding counts, so arms of
one mask compare by it as by their times.

Libraries' arms are those of :mod:`narrowgate.gates.bench.attention_peers`. Where ``same_function`` is false an arm is a
reference for speed and nothing else. Where it is true, ``relative_error`` and ``max_error`` are what it differs by from
the padded version in BF16: the worst of output and gradients, by norm, and by the largest element.
"""

from __future__ import annotations

import math
import statistics as plain
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...models.attention import attend_in_rows, attention_rules, pointwise_attention, sequence_mask
from ...models.config import GemConfig
from ...models.functional import ACTIVATION_FUNCTIONS
from ...models.jagged import Jagged, Rows, even_rows
from ...models.jagged_operator import seen_pairs
from ...models.kernels.reference import Rules
from ...precision.errors import NarrowgateError
from .. import statistics
from ..compilation import honest_compilation
from . import attention_peers
from .attention_peers import Peer
from .gem import GemResult, GemSettings, Row
from .timing import in_turns

_ALPHA = 0.05


@dataclass(frozen=True)
class Use:
    """One place of attention in the model."""

    name: str
    #: Calls in one step.
    calls: int
    #: Tokens of a row that ask and that are asked, where they are few; None for the row's own.
    queries: int | None = None
    keys: int | None = None


def uses(config: GemConfig) -> tuple[Use, ...]:
    """Return the model's attentions: self-attention, personalized feed-forward, pooling."""
    return (
        Use("self", config.layers),
        Use("feed_forward", config.layers, keys=config.pffn_tokens),
        Use("pooling", config.layers + 1, queries=config.n_pma),
    )


class Case:
    """Inputs of one use, and both ways to compute it; functions of q, k and v that return [tokens, d]."""

    def __init__(self, config: GemConfig, use: Use, lengths: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        rows = len(lengths)
        self.config, self.use, self.device = config, use, device
        #: [rows] int64 on the host: the queries and the keys of each row.
        self.lengths = _counts(lengths, use.queries), _counts(lengths, use.keys)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        owners = torch.repeat_interleave(torch.arange(rows), lengths)
        self.layout = Jagged(owners.to(device), offsets.to(device))
        counts = [int(self.lengths[side].sum()) for side in (0, 1, 1)]
        self.inputs = [torch.randn(n, config.d, device=device, dtype=dtype, requires_grad=True) for n in counts]
        self.grad = torch.randn(counts[0], config.d, device=device, dtype=dtype)

    @property
    def causal(self) -> bool:
        """Queries and keys are the same tokens."""
        return self.use.queries is None and self.use.keys is None

    @property
    def head(self) -> int:
        """Elements of one head."""
        return self.config.d // self.config.heads

    @property
    def queries(self) -> Rows:
        """Where the queries of each row lie."""
        return self._rows(self.use.queries)

    @property
    def keys(self) -> Rows:
        """Where the keys and values of each row lie."""
        return self._rows(self.use.keys)

    def _rows(self, few: int | None) -> Rows:
        own = self.layout.last(self.config.max_tokens)
        return own if few is None else even_rows(own.batch, few, self.device)

    @property
    def rules(self) -> Rules:
        """What the model's attention computes here, and what it sees."""
        return attention_rules(self.queries, self.keys, self.config, causal=self.causal)

    def flops(self, rules: Rules) -> int:
        """FLOPs of one call, forward and backward, over the pairs that ``rules`` show."""
        return 12 * self.config.d * int(seen_pairs(*self.lengths, rules).sum())

    def jagged(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the model has it with ``attention="jagged"``."""
        return attend_in_rows([q, k, v], "q|k|v", self.queries, self.keys, self.config, causal=self.causal)

    def padded(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the model has it with ``attention="padded"``."""
        config, window = self.config, self.layout.window(self.config.max_tokens)

        def pad(x: Tensor, few: int | None) -> Tensor:
            return window.pad(x) if few is None else x.view(window.batch, few, -1)

        mask = sequence_mask(config.max_tokens, config.n_summary, config.window, q.device) if self.causal else None
        out = pointwise_attention(
            pad(q, self.use.queries), pad(k, self.use.keys), pad(v, self.use.keys), heads=config.heads,
            activation=ACTIVATION_FUNCTIONS[config.activation], mask=mask,
        )  # fmt: skip
        return window.flatten(out) if self.use.queries is None else out.flatten(0, 1)

    def step(self, function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """Return the output and the gradients of q, k and v."""
        out = function(*self.inputs)
        return out.detach(), *torch.autograd.grad(out, self.inputs, self.grad)


def even_lengths(rows: int, longest: int) -> Tensor:
    """Return [rows] lengths drawn evenly from 1 to ``longest``, always the same."""
    return torch.randint(1, longest + 1, (rows,), generator=torch.Generator().manual_seed(0))


@dataclass
class Found:
    """What one arm showed of one use; no tensors, which would stay on the device."""

    variant: str
    same_function: bool
    note: str | None
    #: Of one call, forward and backward.
    flops: int
    #: By norm and by the largest element, where the function is the same.
    errors: tuple[float, float] | None
    #: Milliseconds of one call, an entry a round.
    times: list[float] = field(default_factory=list)


def measure_attention(config: GemConfig, batch: int, settings: GemSettings, case: str) -> GemResult:
    """Measure all arms at the shapes of ``config`` and ``batch`` rows; return a row for each use and the whole step.

    Libraries that cannot run are among what was skipped, with the reason. The padded version and ours must run.
    """
    lengths = even_lengths(batch, config.max_tokens)
    fill = float(lengths.sum()) / (batch * config.max_tokens)
    dtype = torch.bfloat16 if settings.gpu else torch.float32
    found: dict[str, dict[str, Found]] = {}
    result = GemResult(f"{case} attention, sparsity {1 - fill:.2f}", facts={"fill": round(fill, 4)})
    with honest_compilation():
        for use in uses(config):
            one = Case(config, use, lengths, settings.device, dtype)
            ready, found[use.name] = _ready(one, settings, result)
            works = {name: lambda work=work, one=one: one.step(work) for name, work in ready.items()}
            times = in_turns(works, settings.rounds, 2 if settings.gpu else 1, settings.device)
            for name, measured in times.items():
                found[use.name][name].times = measured
            del one, ready, works
    calls = {use.name: use.calls for use in uses(config)}
    for use in calls:
        result.rows += _rows({use: 1}, found, f"{result.case}, {use}", settings)
    whole = _rows(calls, found, result.case, settings)
    ours, padded = (next(row for row in whole if row["arm"] == name) for name in ("narrowgate", "padded"))
    saved = (padded["ms"] - ours["ms"]) / (padded["ms"] * (1 - fill))
    ours["saved_of_promised"] = round(saved, 4) if settings.gpu else None
    result.rows += whole
    for row in result.rows:
        settings.say(_describe(row))
    if settings.gpu:
        settings.say(f"  {saved:.2f} of the promised saving")
    return result


def _ready(
    case: Case, settings: GemSettings, result: GemResult
) -> tuple[dict[str, Callable[..., Tensor]], dict[str, Found]]:
    """Run every arm once, compiled on a GPU; return those that ran and what is known of them so far."""
    ready: dict[str, Callable[..., Tensor]] = {}
    found: dict[str, Found] = {}

    def prepare(name: str, arm: Peer, expected: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        function = compiled(arm.function, whole=arm.one_graph) if settings.gpu else arm.function
        out = case.step(function)
        errors = _errors(out, expected) if arm.same_function and expected else None
        ready[name] = function
        found[name] = Found(arm.variant, arm.same_function, arm.note, case.flops(arm.rules), errors)
        return out

    activation, rules = case.config.activation, case.rules
    expected = prepare("padded", Peer(activation, case.padded, rules, same_function=True), None)
    prepare("narrowgate", Peer(activation, case.jagged, rules, same_function=True), expected)
    for name in attention_peers.PEERS:
        try:
            prepare(name, attention_peers.peer(name, case), expected)
        except Exception as error:  # whatever a library raises while it is imported, compiled or run
            text = (str(error).strip().splitlines() or [""])[0][:300]
            reason = text if isinstance(error, NarrowgateError) else f"{type(error).__name__}: {text}"
            result.skipped.append({"name": f"{name}, {case.use.name}", "reason": reason, "fault": False})
            settings.say(f"  skipped: {name}, {case.use.name}: {reason}")
    return ready, found


def _rows(
    calls: Mapping[str, int], found: Mapping[str, Mapping[str, Found]], case: str, settings: GemSettings
) -> list[Row]:
    """Return a row for each arm that ran all uses of ``calls``: their times together, each as often as it is called."""

    def together(name: str) -> list[float]:
        turns = zip(*(found[use][name].times for use in calls), strict=True)
        return [sum(number * ms for number, ms in zip(calls.values(), turn, strict=True)) for turn in turns]

    reference = together("padded")
    rows: list[Row] = []
    for name in dict.fromkeys(name for use in calls for name in found[use]):
        parts = [found[use][name] for use in calls if name in found[use]]
        if len(parts) < len(calls):
            continue
        times = together(name)
        estimate = statistics.paired([math.log(a / b) for a, b in zip(reference, times, strict=True)])
        bounds = [round(math.exp(bound), 4) for bound in (estimate.lower(_ALPHA), estimate.upper(_ALPHA))]
        ms, flops = plain.median(times), sum(calls[use] * found[use][name].flops for use in calls)
        errors = [part.errors for part in parts if part.errors is not None]
        compared = len(errors) == len(parts)
        row: Row = {
            "case": case,
            "arm": name,
            "variant": parts[0].variant,
            "ms": round(ms, 4),
            "tflops": round(flops / ms / 1e9, 2) if settings.gpu else None,
            "ratio": round(math.exp(estimate.mean), 4) if settings.gpu else None,
            "ci": bounds if settings.gpu else None,
            "rounds": settings.rounds,
            "calls": dict(calls),
            "flops": flops,
            "same_function": all(part.same_function for part in parts),
            "relative_error": max(norm for norm, _ in errors) if compared else None,
            "max_error": max(largest for _, largest in errors) if compared else None,
            "note": "; ".join(dict.fromkeys(part.note for part in parts if part.note)) or None,
        }
        rows.append(row if settings.gpu else row | {"dry_run": True})
    return rows


def _describe(row: Row) -> str:
    use = row["case"].rpartition(", ")[2] if len(row["calls"]) == 1 else "a step"
    parts = [f"  {use:12} {row['arm']:14} {row['variant']:9} {row['ms']:9.3f} ms"]
    if row["ratio"] is not None:
        parts.append(f"{row['ratio']:.3f}x [{row['ci'][0]:.3f}, {row['ci'][1]:.3f}]  {row['tflops']:.0f} TFLOP/s")
    if row["relative_error"] is not None:
        parts.append(f"apart by {row['relative_error']:.1e}")
    if not row["same_function"]:
        parts.append("another function")
    return "  ".join(parts)


def compiled(function: Callable[..., Tensor], *, whole: bool = True) -> Callable[..., Tensor]:
    """Compile one way of one use for its shapes alone, as the whole model is; in parts where not ``whole``.

    The uses share their code: left to itself, PyTorch would take what differs between them for dynamic and compile the
    later ones for any shape.
    """
    return torch.compile(function, fullgraph=whole, dynamic=False)


def _counts(lengths: Tensor, few: int | None) -> Tensor:
    return lengths if few is None else torch.full_like(lengths, few)


def _errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """What output and gradients are apart by at most, relative to what is expected: by norm, by the largest element."""
    apart = [(a.float() - b.float(), b.float()) for a, b in zip(found, expected, strict=True)]
    return (
        max(float(difference.norm() / right.norm()) for difference, right in apart),
        max(float(difference.abs().max() / right.abs().max()) for difference, right in apart),
    )
