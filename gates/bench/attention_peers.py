"""Libraries' attentions over the jagged rows of one use: what our kernels' speed stands beside.

Two of them compute another function, softmax for the activation, out of the same products: their time is a reference,
and no model can have them in our attention's place.

- ``pytorch_varlen``: ``torch.nn.attention.varlen.varlen_attn``, FlashAttention on the same offsets.
- ``flex_attention``: FlexAttention over all rows as one sequence, whose mask says which tokens share a row. Changing
  scores cannot make it ours: its kernels weight values by ``exp2(score - max)`` and divide by the weights' sum
  (``torch/_inductor/kernel/flex/templates``, PyTorch 2.11 and 2.13), so no weight is below zero, as SiLU's are, and
  every row of weights sums to 1.
- ``fbgemm_hstu``: ``fbgemm_gpu.experimental.hstu`` computes ``silu(alpha · q kᵀ) v / scaling_seqlen``
  (``hstu/cuda_hstu_attention.py``), which is ours where the mask is and where no row has more queries than keys.

Queries and keys are normalized in front of all of them, as in front of our kernels.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.functional import unit_rms
from ...models.kernels.reference import Rules
from ...precision.errors import NarrowgateError

if TYPE_CHECKING:
    from .gem_attention import Case

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Tokens of a block of FlexAttention's mask, its own default.
BLOCK = 128
#: Blocks of queries whose mask is made at once: dense masks of a few thousand tokens a side, whatever the batch.
_SLICE = 32
#: Widths of a head that FBGEMM's kernels are built for.
HSTU_HEADS = (32, 64, 128, 256)
HSTU = "fbgemm_gpu.experimental.hstu"


@dataclass(frozen=True)
class Peer:
    """One library's attention, for one use."""

    #: What it puts in the place of ``activation(scores) / norm``.
    variant: str
    #: Of q [Tq, d], k and v [Tk, d]; returns [Tq, d].
    function: Function
    #: The pairs that it sees.
    rules: Rules
    #: It computes what our kernels do.
    same_function: bool
    #: Whether it can be compiled as a whole.
    one_graph: bool = True
    #: What else sets it apart.
    note: str | None = None


def peer(name: str, case: Case) -> Peer:
    """Return the library's attention ``name`` for a case.

    Args:
        name: of :data:`PEERS`.
        case: inputs on a GPU.

    Raises:
        NarrowgateError: it cannot run this case; says why.
        ImportError: it is not installed.
    """
    if case.device.type != "cuda":
        raise NarrowgateError(f"runs forward and backward on CUDA only, found {case.device.type}")
    return PEERS[name](case)


def varlen(case: Case) -> Peer:
    """PyTorch's softmax attention on the same offsets."""
    from torch.nn.attention.varlen import varlen_attn

    queries, keys = case.queries.offsets.int(), case.keys.offsets.int()
    rules = replace(case.rules, n_summary=0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = _heads(case, q, k, v)
        found = varlen_attn(
            query, key, value, queries, keys, rules.max_q, rules.max_kv, scale=rules.scale, window_size=_sides(rules)
        )
        assert isinstance(found, Tensor)
        return found.flatten(1)

    return Peer("softmax", attend, rules, same_function=False, note=_unlike(case))


def flex(case: Case) -> Peer:
    """FlexAttention over all rows as one sequence, with the mask of the case."""
    from torch.nn.attention.flex_attention import flex_attention

    mask, rules = block_mask(case), case.rules

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in _heads(case, q[None], k[None], v[None]))
        found = flex_attention(query, key, value, block_mask=mask, scale=rules.scale)
        assert isinstance(found, Tensor)
        return found.transpose(1, 2).flatten(2).squeeze(0)

    return Peer("softmax", attend, rules, same_function=False)


def hstu(case: Case) -> Peer:
    """FBGEMM's HSTU attention, called between compiled graphs: not every version tells compilers its shapes."""
    attention = importlib.import_module(HSTU).hstu_attn_varlen_func
    rules = replace(case.rules, n_summary=0)
    if rules.activation != "silu":
        raise NarrowgateError(f"computes SiLU, the model has {rules.activation}")
    if case.head not in HSTU_HEADS:
        raise NarrowgateError(f"takes heads of {', '.join(map(str, HSTU_HEADS))} elements, found {case.head}")
    queries, keys = case.lengths
    if bool((queries > keys).any()):
        row = int((queries > keys).nonzero()[0])
        raise NarrowgateError(
            f"takes no row of more queries than keys, row {row} has {int(queries[row])} and {int(keys[row])}"
        )
    named: dict[str, Any] = {
        "cu_seqlens_q": case.queries.offsets.int(), "cu_seqlens_k": case.keys.offsets.int(),
        "max_seqlen_q": rules.max_q, "max_seqlen_k": rules.max_kv,
        "num_contexts": None, "num_targets": None, "window_size": _sides(rules), "alpha": rules.scale,
    }  # fmt: skip
    taken = inspect.signature(attention).parameters
    later = {"seqused_q": None, "seqused_k": None, "scaling_seqlen": int(rules.norm)}
    named |= {name: value for name, value in later.items() if name in taken}
    if missing := named.keys() - taken.keys():
        raise NarrowgateError(f"hstu_attn_varlen_func of this version takes no {', '.join(sorted(missing))}")
    # Without a scale of its own it divides by the longest row of queries that there may be.
    if "scaling_seqlen" not in taken and rules.norm != rules.max_q:
        raise NarrowgateError(f"divides by max_seqlen_q, {rules.max_q}, expected a divisor of {rules.norm:g}")
    call: Any = torch.compiler.disable(attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(*_heads(case, q, k, v), **named).flatten(1)

    notes = [note for note in (_unlike(case), _versions("fbgemm_gpu")) if note]
    return Peer(
        "silu", attend, rules, same_function=_unlike(case) is None, one_graph=False, note="; ".join(notes) or None
    )


#: By the name that a row has for its arm.
PEERS: dict[str, Callable[[Case], Peer]] = {"pytorch_varlen": varlen, "flex_attention": flex, "fbgemm_hstu": hstu}


def block_mask(case: Case) -> Any:
    """Return FlexAttention's ``BlockMask`` of a case, as ``create_block_mask`` would make it of the whole batch.

    That would hold the mask of every token with every other one, 277 GB at 4,096 rows of 128 tokens. So it makes a few
    thousand queries' masks at a time here, with the keys of their rows only: outside of those nothing is seen.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    offsets = [torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) for lengths in case.lengths]
    queries, keys = (int(ends[-1]) for ends in offsets)
    seen = mask_function(case)
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    counts = [torch.zeros(1, 1, rows, dtype=torch.int32, device=case.device) for _ in range(2)]
    places = [torch.zeros(1, 1, rows, columns, dtype=torch.int32, device=case.device) for _ in range(2)]
    for start in range(0, queries, _SLICE * BLOCK):
        end = min(start + _SLICE * BLOCK, queries)
        first, last = torch.searchsorted(offsets[0], torch.tensor([start, end - 1]), right=True).tolist()
        left = int(offsets[1][first - 1]) // BLOCK * BLOCK
        part = create_block_mask(
            _moved(seen, start, left), None, None, end - start, int(offsets[1][last]) - left, device=case.device
        )
        at = slice(start // BLOCK, -(-end // BLOCK))
        found = (part.kv_num_blocks, part.kv_indices), (part.full_kv_num_blocks, part.full_kv_indices)
        for count, place, (number, index) in zip(counts, places, found, strict=True):
            assert number is not None
            assert index is not None
            count[..., at] = number
            place[..., at, : index.shape[-1]] = index + left // BLOCK
    return BlockMask.from_kv_blocks(
        counts[0], places[0], counts[1], places[1], BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(queries, keys)
    )


def mask_function(case: Case) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return what says of a query's and a key's place among all tokens whether one sees the other (``mask_mod``)."""
    rules = case.rules
    of_query, of_key = (
        torch.repeat_interleave(torch.arange(len(lengths)), lengths).int().to(case.device) for lengths in case.lengths
    )
    # Queries from here on have no window.
    free = (case.lengths[0].cumsum(0) - rules.n_summary).to(case.device)[of_query].int()

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = of_query[query] == of_key[key]
        if rules.causal:
            # The same tokens ask and are asked.
            found = found & (query >= key)
        if rules.window:
            found = found & ((query - key < rules.window) | (query >= free[query]))
        return found

    return seen


def _moved(seen: Callable[..., Tensor], query: int, key: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def moved(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen(b, h, q + query, k + key)

    return moved


def _heads(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (x.unflatten(-1, (case.config.heads, -1)) for x in (q, k, v))
    return unit_rms(query), unit_rms(key), value


def _sides(rules: Rules) -> tuple[int, int]:
    """How many keys to the left and right of its own a query sees, -1 for all; both libraries count alike."""
    return (rules.window - 1 if rules.window else -1, 0) if rules.causal else (-1, -1)


def _unlike(case: Case) -> str | None:
    return "the closing summary tokens have the window too" if case.rules.window else None


def _versions(package: str) -> str:
    """Names and versions of the installed distributions that hold a package."""
    names = metadata.packages_distributions().get(package, ())
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names)))
