"""What takes a step in the optimizer benchmark: Adam in several ways on the same parameters, and rowwise Adagrad.

Bytes are those that a step must move, of each element: FP32 parameter and gradient read and the parameter written (12),
two moments read and written (16 in FP32, 8 in BF16, 4 and a little in 8-bit blocks), two FP8 codes written where there
are any, and with a cast of its own the FP32 weight read once more.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from ...models.optimizers import AdamWithRowwiseAdagrad
from ...precision.config import GemmConfig, LinearConfig
from ...precision.delayed import AmaxHistory
from ...precision.kept_weights import keep_weights
from ...precision.kernels.program import IDENTITY
from ...precision.layer import layer_state
from ...precision.linear import lower_linear
from ...precision.moment_storage import storage_of
from ...precision.moments import MOMENTS
from ...precision.one_pass import in_one_pass
from ...precision.optimizer_state import lower_state
from ...precision.spec import Spec
from ...precision.step_codes import StepCodes
from ...precision.weight_codes import WeightCodes
from .timing import Say

STATE = "bf16+sr"
WEIGHT = "fp8_e4m3+delayed(16)"
_LR, _TABLE_LR, _BETAS, _EPS = 1e-4, 0.02, (0.9, 0.999), 1e-8
#: Bytes an element of a step without codes, by what moments are stored in; FP8 codes [N, K] and [K, N]; a cast's read.
STEP_BYTES = {"fp32": 28.0, "bf16": 20.0, "blocks of 256": 12 + 4 * (1 + 4 / 256)}
CODE_BYTES, READ_BYTES = 2, 4
_TORCHAO = ("AdamW8bit", "AdamWFp8")
_BLOCK = 256


@dataclass
class Problem:
    """What all arms of a case start from."""

    #: FP32, left as they are.
    start: list[Tensor]
    #: FP32, of the same shapes; one set for all arms, which only read it.
    grads: list[Tensor]
    #: Of tables: which rows have a gradient, bool [rows] each.
    touched: list[Tensor] = field(default_factory=list)

    @property
    def elements(self) -> int:
        """How many there are to update."""
        return sum(x.numel() for x in self.start)

    @property
    def device(self) -> torch.device:
        """Where."""
        return self.start[0].device


def has_codes(shape: Sequence[int]) -> bool:
    """Whether a parameter of that shape stands for a linear layer's weight whose products are in FP8."""
    return len(shape) == 2 and all(size % 16 == 0 for size in shape)


class Arm:
    """One way to take the step, with parameters and state of its own."""

    arm = "pytorch"
    variant = "Adam, fp32"
    #: Whether a CPU runs something else than what is measured on a GPU.
    own = False
    #: Bytes an element that a step without codes moves.
    step_bytes = STEP_BYTES["fp32"]

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.parameters = [nn.Parameter(x.clone()) for x in problem.start]
        for parameter, grad in zip(self.parameters, problem.grads, strict=True):
            parameter.grad = grad
        #: How many steps it has taken.
        self.steps = 0
        self.optimizer = self.make()

    @property
    def name(self) -> str:
        """As lines of progress have it."""
        return f"{self.arm} {self.variant}"

    def make(self) -> Optimizer:
        """Return the optimizer."""
        return Adam(self.parameters, lr=_LR, betas=_BETAS, eps=_EPS, fused=True)

    def step(self) -> None:
        """Take a step, with all that belongs to it."""
        self.steps += 1
        self.optimizer.step()

    def bytes(self) -> float:
        """Bytes that a step must move."""
        return self.step_bytes * self.problem.elements

    def moments(self) -> list[Tensor]:
        """The stored moments of all parameters."""
        return [self.optimizer.state[p][name] for p in self.parameters for name in MOMENTS]

    def codes(self) -> list[Tensor]:
        """FP8 codes, codes transposed and scale of each weight, as the last step left them."""
        return []

    def expect(self) -> None:
        """Fill amax histories, so that a scale is known before the next step."""

    def one_pass(self) -> bool | None:
        """Whether a step takes every parameter as its moments are stored, where that is what is measured."""
        return None

    def written(self) -> tuple[int, int] | None:
        """Of how many weights the codes were written in the pass of every step, and of how many they should be."""
        return None


class LoweredArm(Arm):
    """The same optimizer on BF16 moments, in one pass after its first step."""

    arm = "narrowgate"
    variant = "bf16"
    own = True
    step_bytes = STEP_BYTES["bf16"]

    def make(self) -> Optimizer:
        """Return the optimizer, lowered; parameters have the same names, so the same random bits, in all arms."""
        names: dict[Tensor, str] = {p: str(i) for i, p in enumerate(self.parameters)}
        return lower_state(super().make(), STATE, names=names)

    def one_pass(self) -> bool:
        """Whether the next step does, as every one but the first did."""
        codes = StepCodes(())
        groups = self.optimizer.param_groups
        return all(in_one_pass(self.optimizer, group, p, codes) for group in groups for p in group["params"])


class ApartArm(LoweredArm):
    """Moments brought to FP32, PyTorch's fused step, and stored again: what one pass must equal to the bit."""

    variant = "bf16, apart"

    def make(self) -> Optimizer:
        """Return the optimizer, of which no parameter is updated in one pass."""
        optimizer = super().make()
        storage_of(optimizer).apart.update(self.parameters)
        return optimizer


class _LayersArm(LoweredArm):
    """Weights are those of lowered linear layers, with delayed scales that fprop and dgrad share."""

    #: Of an element of these weights, beside the step's.
    code_bytes: int

    def make(self) -> Optimizer:
        spec, other = Spec.parse(WEIGHT), Spec.parse("fp8_e4m3")
        forward, backward = GemmConfig(other, spec), GemmConfig(Spec.parse("fp8_e5m2"), spec)
        self.layers: list[nn.Linear] = []
        for index, parameter in enumerate(self.parameters):
            if has_codes(parameter.shape):
                layer = nn.Linear(parameter.shape[1], parameter.shape[0], bias=False, device="meta")
                layer.weight = parameter
                lower_linear(layer, LinearConfig(forward, backward), name=str(index))
                self.layers.append(layer)
        #: The hook of a step ends theirs, too.
        self.histories: list[AmaxHistory] = [layer_state(x).histories["fprop", "weight"] for x in self.layers]
        return super().make()

    def expect(self) -> None:
        for layer, history in zip(self.layers, self.histories, strict=True):
            history.history[0] = layer.weight.detach().abs().amax()

    def bytes(self) -> float:
        return super().bytes() + self.code_bytes * sum(layer.weight.numel() for layer in self.layers)


class CodesArm(_LayersArm):
    """The pass writes the codes of weights, too; what it finds is entered as the first use of a step's codes does."""

    variant = "bf16, codes"
    code_bytes = CODE_BYTES

    def make(self) -> Optimizer:
        """Return the optimizer, whose weights keep their codes where they are (not on a CPU)."""
        optimizer = super().make()
        keep_weights(layer.weight for layer in self.layers)
        kept = (layer_state(layer).kept for layer in self.layers)
        self.kept: list[WeightCodes] = [x for x in kept if x is not None]
        outs = [x.out() for x in self.kept]
        self._amaxes, self._past = [out.amax for out in outs], [out.past[0] for out in outs]
        return optimizer

    @torch.no_grad()
    def step(self) -> None:
        """Take a step, and enter what it found in the amax histories."""
        super().step()
        if self.kept:
            histories = [kept.history for kept in self.kept if kept.history is not None]
            torch._foreach_maximum_([history.pending for history in histories], self._amaxes)  # type: ignore[attr-defined]
            torch._foreach_add_([history.saturated for history in histories], self._past)  # type: ignore[attr-defined]

    def codes(self) -> list[Tensor]:
        """What the weights keep."""
        return [kept.buffers[i] for kept in self.kept for i in (0, 2, 1)]

    def written(self) -> tuple[int, int]:
        """Of all weights, those whose codes every step but the first wrote."""
        # The first step makes the optimizer's state, and goes the long way.
        every = sum(kept.passes == self.steps - 1 for kept in self.kept)
        return every, len(self.layers)


class CastArm(_LayersArm):
    """The step, and then the cast kernel of each weight: what one pass competes with."""

    variant = "bf16 + cast"
    code_bytes = CODE_BYTES + READ_BYTES

    def make(self) -> Optimizer:
        """Return the optimizer, which knows nothing of codes."""
        optimizer = super().make()
        self._codes: list[tuple[Tensor, ...]] = [()] * len(self.layers)
        return optimizer

    @torch.no_grad()
    def step(self) -> None:
        """Take a step, and cast each weight."""
        super().step()
        for index, (layer, h) in enumerate(zip(self.layers, self.histories, strict=True)):
            # One at a time: the next weight's codes may lie where this one's last lay.
            self._codes[index] = torch.ops.narrowgate.cast_fp8_delayed(
                [layer.weight.detach()], IDENTITY, WEIGHT, True, True, None, None,
                h.history, h.pending, h.saturated, h.workspace, True,
            )  # fmt: skip

    def codes(self) -> list[Tensor]:
        """What the casts returned."""
        return [x for found in self._codes for x in found]


class TorchaoArm(Arm):
    """torchao's AdamW on moments in blocks of 256, without weight decay: Adam."""

    arm = "torchao"
    step_bytes = STEP_BYTES["blocks of 256"]

    def __init__(self, problem: Problem, name: str) -> None:
        self.variant = name
        super().__init__(problem)

    def make(self) -> Optimizer:
        """Return the optimizer; it compiles its step for each shape.

        Raises:
            ImportError: torchao is not there, or has no such optimizer.
        """
        kind: Callable[..., Optimizer] = getattr(importlib.import_module("torchao.optim"), self.variant)
        return kind(self.parameters, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=0.0, block_size=_BLOCK)


class PlainTablesArm(Arm):
    """Rowwise Adagrad by plain operations: two passes over a gradient, one over all of the table."""

    arm = "plain"
    variant = "rowwise Adagrad"
    #: Accumulators are left out: four bytes a row.
    step_bytes = 16.0

    def make(self) -> Optimizer:
        """Return the optimizer."""
        optimizer = AdamWithRowwiseAdagrad([], self.parameters, lr=_LR, table_lr=_TABLE_LR)
        # With a rate on the device the launch takes no table.
        optimizer.param_groups[0]["lr"] = torch.tensor(_TABLE_LR, device=self.problem.device)
        return optimizer

    def moments(self) -> list[Tensor]:
        """Its accumulators."""
        return [self.optimizer.state[p]["sum"] for p in self.parameters]


class TablesArm(PlainTablesArm):
    """The same in one launch: a gradient is read once, and only rows that have one are updated."""

    arm = "narrowgate"
    variant = "rowwise Adagrad, one launch"
    own = True

    def make(self) -> Optimizer:
        """Return the optimizer."""
        return AdamWithRowwiseAdagrad([], self.parameters, lr=_LR, table_lr=_TABLE_LR)

    def bytes(self) -> float:
        """Bytes of all gradients, and of the weights and accumulators of rows that have one, read and written."""
        moved = 4.0 * self.problem.elements
        for touched, table in zip(self.problem.touched, self.parameters, strict=True):
            moved += 8.0 * int(touched.sum()) * (table.shape[1] + 1)
        return moved


def adam_arms(problem: Problem, *, peers: bool, say: Say) -> Iterator[Arm]:
    """Yield PyTorch's Adam first, then all that is compared with it; say which peer is not there, and why."""
    yield Arm(problem)
    yield LoweredArm(problem)
    for name in _TORCHAO if peers else ():
        try:
            yield TorchaoArm(problem, name)
        except (ImportError, AttributeError, OSError) as error:
            say(f"skipped: torchao {name}: {first_line(error)}")
    yield CodesArm(problem)
    yield CastArm(problem)


def table_arms(problem: Problem) -> Iterator[Arm]:
    """Yield plain operations first, then the launch."""
    yield PlainTablesArm(problem)
    yield TablesArm(problem)


def first_line(error: Exception) -> str:
    """What an error says first."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def same_bits(found: Sequence[Any], expected: Sequence[Any]) -> int:
    """How many elements are not the same bits."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    differing = 0
    for ours, theirs in zip(found, expected, strict=True):
        kind = integers[ours.element_size()]
        differing += int((ours.detach().view(kind) != theirs.detach().view(kind)).sum())
    return differing
