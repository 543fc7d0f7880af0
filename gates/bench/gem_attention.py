"""The three attentions of a GEM-like model alone, jagged and padded in turns: how much of padding's share is saved.

Lengths are drawn evenly from 1 to the model's ``max_tokens``, as GDPA's benchmark has sparsity 0.5: padded attention
then works on twice the tokens that there are, so half of its time is what jagged attention promises to save. Each use
is timed forward and backward under ``torch.compile`` at the model's batch and weighted by its calls in one step.
``saved_of_promised`` is (padded - jagged) / (padded · (1 - fill)); causal and windowed tiles that are never visited
can lift it above 1.
"""

from __future__ import annotations

import math
import statistics as plain
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...models.attention import pointwise_attention, pointwise_attention_in_rows, sequence_mask
from ...models.config import GemConfig
from ...models.functional import ACTIVATION_FUNCTIONS
from ...models.jagged import Jagged, Rows, even_rows
from .. import statistics
from ..train import honest_compilation
from .gem import GemResult, GemSettings
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
        self.config, self.use = config, use
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        owners = torch.repeat_interleave(torch.arange(rows), lengths)
        self.layout = Jagged(owners.to(device), offsets.to(device))
        counts = [int(offsets[-1]) if few is None else rows * few for few in (use.queries, use.keys, use.keys)]
        self.inputs = [torch.randn(n, config.d, device=device, dtype=dtype, requires_grad=True) for n in counts]
        self.grad = torch.randn(counts[0], config.d, device=device, dtype=dtype)

    @property
    def causal(self) -> bool:
        """Queries and keys are the same tokens."""
        return self.use.queries is None and self.use.keys is None

    def jagged(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the model has it with ``attention="jagged"``."""
        own = self.layout.last(self.config.max_tokens)

        def side(few: int | None) -> Rows:
            return own if few is None else even_rows(own.batch, few, q.device)

        return pointwise_attention_in_rows(
            q, k, v, side(self.use.queries), side(self.use.keys), self.config, causal=self.causal
        )

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


def measure_attention(config: GemConfig, batch: int, settings: GemSettings, case: str) -> GemResult:
    """Measure both ways at the shapes of ``config`` and ``batch`` rows; return a row for each."""
    lengths = even_lengths(batch, config.max_tokens)
    fill = float(lengths.sum()) / (batch * config.max_tokens)
    dtype = torch.bfloat16 if settings.gpu else torch.float32
    total: dict[str, list[float]] = {"padded": [0.0] * settings.rounds, "jagged": [0.0] * settings.rounds}
    by_use: dict[str, dict[str, float]] = {"padded": {}, "jagged": {}}
    apart: dict[str, float] = {}
    with honest_compilation():
        for use in uses(config):
            one = Case(config, use, lengths, settings.device, dtype)
            arms = {}
            results = {}
            for name, function in (("padded", one.padded), ("jagged", one.jagged)):
                ready = compiled(function) if settings.gpu else function
                results[name] = one.step(ready)
                arms[name] = lambda ready=ready, one=one: one.step(ready)
            apart[use.name] = max(map(_relative, results["jagged"], results["padded"]))
            del results
            times = in_turns(arms, settings.rounds, 2 if settings.gpu else 1, settings.device)
            for name, found in times.items():
                by_use[name][use.name] = round(plain.median(found), 4)
                total[name] = [sum_ + use.calls * ms for sum_, ms in zip(total[name], found, strict=True)]
            said = "  ".join(f"{name} {ms[use.name]:.3f} ms" for name, ms in by_use.items())
            settings.say(f"  {use.name:12} x {use.calls}: {said}, apart by {apart[use.name]:.1e}")
            del one, arms
    result = GemResult(
        f"{case} attention, sparsity {1 - fill:.2f}", facts={"fill": round(fill, 4), "relative_error": apart}
    )
    padded = plain.median(total["padded"])
    for name, times in total.items():
        estimate = statistics.paired([math.log(p / t) for p, t in zip(total["padded"], times, strict=True)])
        ms = plain.median(times)
        row: dict[str, Any] = {
            "case": result.case,
            "arm": "bf16",
            "variant": name,
            "ms": round(ms, 4),
            "by_use": by_use[name],
            "calls": {use.name: use.calls for use in uses(config)},
            "rounds": settings.rounds,
            "ratio": round(math.exp(estimate.mean), 4) if settings.gpu else None,
            "ci": [round(math.exp(b), 4) for b in (estimate.lower(_ALPHA), estimate.upper(_ALPHA))]
            if settings.gpu
            else None,
        }
        if name == "jagged":
            row["saved_of_promised"] = round((padded - ms) / (padded * (1 - fill)), 4) if settings.gpu else None
        result.rows.append(row if settings.gpu else row | {"dry_run": True})
        shown = f"  {row['saved_of_promised']:.2f} of the promised saving" if row.get("saved_of_promised") else ""
        settings.say(f"  {name:12} {ms:.3f} ms a step{shown}")
    return result


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile one way of one use for its shapes alone, as the whole model is.

    The uses share their code: left to itself, PyTorch would take what differs between them for dynamic and compile the
    later ones for any shape.
    """
    return torch.compile(function, fullgraph=True, dynamic=False)


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
