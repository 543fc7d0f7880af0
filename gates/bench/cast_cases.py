"""The casts that are measured: what is cast, at which scale, and how many bytes that must move.

Programs are those that :mod:`narrowgate.precision.fusion` makes of Inductor's graphs of these modules under PyTorch
2.13; other versions write a sigmoid in a few more instructions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...precision.capability import same_codes
from ...precision.delayed import AmaxHistory
from ...precision.kernels.program import IDENTITY, Program
from ...precision.kernels.reference import values
from ...precision.spec import Spec

#: Scale -> format expression.
SCALES = {
    "delayed": "fp8_e4m3+delayed(16)",
    "tensor": "fp8_e4m3",
    "clipped": "fp8_e4m3+clip(rms=1024)",
    "row": "fp8_e4m3/row",
    "1x128": "fp8_e4m3/1x128",
    "128x128": "fp8_e4m3/128x128",
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Rows and columns of what a producer reads; each of its inputs is 268 MB in BF16.
SHAPE = (16384, 8192)
QUICK_SHAPE = (160, 256)
_SEEDS = (17, 23)


@dataclass(frozen=True)
class Producer:
    """What a cast computes before it quantizes: a program, and in what order it takes its inputs."""

    name: str
    program: str
    #: ``gate`` and ``up`` lie side by side in one tensor, as a packed layer leaves them; ``square`` is a row's mean
    #: square and ``weight`` one value a column.
    leaves: tuple[str, ...]

    def make(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return fresh random inputs of [M, N]."""
        rows, columns = shape
        x = torch.randn(rows, columns, device=device, dtype=dtype)
        if "gate" in self.leaves:
            gate, up = torch.randn(rows, 2 * columns, device=device, dtype=dtype).chunk(2, -1)
        else:
            gate = up = x
        made = {
            "x": x,
            "gate": gate,
            "up": up,
            "square": x.float().square().mean(-1, keepdim=True) if "square" in self.leaves else x,
            "weight": 1 + torch.randn(columns, device=device, dtype=dtype) / 8,
        }
        return [made[name] for name in self.leaves]


PRODUCERS = (
    Producer("cast", IDENTITY, ("x",)),
    Producer("rms_norm", "mn,m,n;rsqrt 1;mul 0 3;mul 4 2|5", ("x", "square", "weight")),
    Producer("swiglu", "mn,mn;neg 0;exp 2;add 3 #1.0;div 0 4;mul 5 1|6", ("gate", "up")),
    # d_gate and d_up, side by side; x is the gradient of silu(gate) * up.
    Producer(
        "d_swiglu",
        "mn,mn,mn;mul 0 1;sigmoid 2;mul 3 4;sub #1.0 4;mul 2 6;add 7 #1.0;mul 5 8;neg 2;exp 10;add 11 #1.0;div 2 12;"
        "mul 0 13|9,14",
        ("x", "up", "gate"),
    ),
)


@dataclass(frozen=True)
class CastCase:
    """One cast: of a producer, at a scale."""

    producer: Producer
    scale: str
    stochastic: bool
    dtype: str
    shape: tuple[int, int]

    @property
    def name(self) -> str:
        """What is cast: producer, shape of an input, dtype."""
        return case_name(self.producer, self.shape, self.dtype)

    @property
    def variant(self) -> str:
        """How: the scale, ``+sr`` where it rounds stochastically."""
        return self.scale + ("+sr" if self.stochastic else "")

    @property
    def spec(self) -> Spec:
        """The format expression of the cast."""
        return Spec.parse(SCALES[self.scale] + ("+sr" if self.stochastic else ""))

    @property
    def columns(self) -> str:
        """The second operand as the operator takes it: the first's codes transposed, codes of its own, or none.

        A history belongs to one set of codes, and two operands that round stochastically have two: with both, the
        cast is launched for each, so one of them is measured.
        """
        if same_codes(self.spec, self.spec):
            return "="
        return "" if self.spec.delayed is not None else str(self.spec)

    @property
    def passes(self) -> int:
        """How often the inputs must be read: twice where what may be the last value decides the scale or the clip."""
        return 2 if self.scale in ("tensor", "clipped", "row") else 1

    def bytes(self, leaves: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        """Bytes that must move: passes x inputs read, and codes and scales written."""
        return self.passes * sum(map(size_of, leaves)) + sum(map(size_of, outputs))


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's own elements."""
    return tensor.numel() * tensor.element_size()


def case_name(producer: Producer, shape: tuple[int, int], dtype: str) -> str:
    """Name a case; the shape is that of one input."""
    return f"{producer.name} {shape[0]}x{shape[1]} {dtype}"


def cast_cases(*, shape: tuple[int, int] = SHAPE, full: bool = True) -> list[CastCase]:
    """Return every case, those of one producer and dtype together; without ``full``, of BF16 rounded to nearest."""
    dtypes, roundings = (DTYPES, (False, True)) if full else (("bf16",), (False,))
    return [
        CastCase(producer, scale, stochastic, dtype, shape)
        for producer in PRODUCERS
        for dtype in dtypes
        for scale in SCALES
        for stochastic in roundings
    ]


class Cast:
    """A case with its state: launched by the operator, or computed by the reference."""

    def __init__(self, case: CastCase, leaves: Sequence[Tensor]) -> None:
        """Take the device, and with a delayed scale a history of one step, from ``leaves``."""
        self.case = case
        device = leaves[0].device
        self.keys = [torch.tensor(seed, device=device) if case.stochastic else None for seed in _SEEDS]
        self.history: AmaxHistory | None = None
        if case.spec.delayed is not None:
            self.history = AmaxHistory(case.spec.delayed, device)
            self.history.history[0] = values(leaves, Program.parse(case.producer.program)).abs().amax()

    def launch(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the operator: kernels on a GPU, the reference elsewhere. Empty tensors stand for what was not asked."""
        case, text = self.case, str(self.case.spec)
        if self.history is not None:
            h = self.history
            return torch.ops.narrowgate.cast_fp8_delayed(
                leaves, case.producer.program, text, True, case.columns == "=", self.keys[0], None,
                h.history, h.pending, h.saturated, h.workspace, True,
            )  # fmt: skip
        return torch.ops.narrowgate.cast_fp8(
            leaves, case.producer.program, text, case.columns, self.keys[0], None, None,
            self.keys[1] if case.columns not in ("", "=") else None, None, None,
        )  # fmt: skip

    def expected(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what :meth:`launch` should, by plain PyTorch on any device."""
        from ...precision.kernels.reference import reference_cast, reference_delayed_cast

        case, program = self.case, Program.parse(self.case.producer.program)
        if self.history is not None:
            h = self.history
            state = (h.history, h.pending.clone(), h.saturated.clone(), h.workspace)
            return reference_delayed_cast(
                leaves, program, case.spec, True, case.columns == "=", self.keys[0], state, True
            )
        random = [(key, None) for key in self.keys]
        return reference_cast(leaves, program, str(case.spec), case.columns, *random)


def groups(cases: Sequence[CastCase]) -> Iterator[tuple[Producer, str, list[CastCase]]]:
    """Yield (producer, dtype, its cases), which share their inputs and take turns."""
    found: dict[tuple[Producer, str], list[CastCase]] = {}
    for case in cases:
        found.setdefault((case.producer, case.dtype), []).append(case)
    for (producer, dtype), members in found.items():
        yield producer, dtype, members
