"""Linear layers of many experts in one weight: rows of one input, sorted by expert, each group with its own matrix.

y[t] = x[t] · W[e]ᵀ for the rows t of group e, W [E, N, K]. Every expert is a linear layer of its own to the recipe:
``tensor`` and every other granularity reach over one expert's operand, never over two experts; a delayed scale has one
history for all of them.

The products run in one of two ways, with the same codes and scales:

- **grouped**, all experts in one launch for each path (:mod:`narrowgate.precision.grouped_gemm`): BF16, and E4M3 by
  E4M3 with tensor or row scales on Hopper. The host never waits for the groups' sizes, and a compiled model has no
  break here. Results are rounded to BF16.
- **in turns**, one expert after another, natively or emulated as a linear layer of that format: everything else, and
  everything on a CPU. The host reads the offsets, and a compiled model breaks its graph.

:func:`narrowgate.precision.capability.grouped_obstacle` decides, and a plan says which and why.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .capability import MOST_GROUPS, grouped_obstacle
from .config import GemmConfig, LinearConfig
from .errors import NarrowgateError
from .gemm import as_dtype
from .grouped_gemm import columns_product, dense_columns_product, rows_product
from .grouped_operands import Forward, GroupedOperand, prepare_matrices, prepare_rows
from .grouped_rows import Groups, check_offsets, host_sizes
from .layer import LayerState, LowPrecisionLayer, autocast_device, placed_state, swap
from .linear import linear_product
from .spec import Spec


class GroupedLinear(nn.Module):
    """``experts`` linear layers of one shape over one input whose rows are sorted by expert: a target of recipes."""

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialise each expert as ``nn.Linear`` does.

        Args:
            experts: number of groups E.
            in_features: K.
            out_features: N.
            bias: learn a bias [E, N].
            device: of the Parameters.
            dtype: of the Parameters.
        """
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        #: [E, N, K]
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty(experts, out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias uniformly within 1 / sqrt(K), as ``nn.Linear`` does."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return [T, N]: each row times its expert's matrix, plus its bias.

        Args:
            x: [T, K], the rows of expert 0 first.
            offsets: int [E], where each expert's rows end; the last one is T. Empty groups are fine.

        Raises:
            NarrowgateError: the shapes do not fit, or the offsets do not rise from 0 to T. Where the products are
                grouped, the offsets are checked on the device: those that do not fit end its use by the process.
        """
        _check_shapes(self, x, offsets)
        dtype = _output_dtype(x)
        if x.is_cuda and dtype == torch.bfloat16 and self.experts <= MOST_GROUPS and self.weight.numel():
            return dense_grouped_linear(x, self.weight, self.bias, offsets)
        return torch.cat([F.linear(*operands) for operands in _experts(self, x, offsets)])

    def extra_repr(self) -> str:
        """The sizes."""
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"


class LowPrecisionGroupedLinear(LowPrecisionLayer, GroupedLinear):
    """A :class:`GroupedLinear` that runs a :class:`LinearConfig`; made by :func:`lower_grouped`, never constructed."""

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return [T, N] as :meth:`GroupedLinear.forward`, each expert's products as the recipe says."""
        state = placed_state(self)
        _check_shapes(self, x, offsets)
        grouped = grouped_obstacle(state.config, state.here, self.experts) is None and self.weight.numel() > 0
        draw, recording = state.enter(self.training and torch.is_grad_enabled())
        if grouped:
            ends, dtype = check_offsets(offsets, x), _output_dtype(x)
            # Autocast must not touch the GEMMs inside: their dtypes are the recipe's.
            with torch.autocast(autocast_device(x), enabled=False):
                out = _GroupedFunction.apply(
                    x, self.weight, ends, draw if state.stochastic else None, state, dtype, recording
                )
                return out if self.bias is None else _AddBias.apply(out, self.bias, ends)
        outputs = [
            # The expert takes the micro-batch's place in the random key, so that no two draw the same bits.
            linear_product(rows, weight, bias, state, draw + (expert << 16), recording)
            for expert, (rows, weight, bias) in enumerate(_experts(self, x, offsets))
        ]
        return torch.cat(outputs)


def dense_grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """:meth:`GroupedLinear.forward` in BF16, grouped: x [T, K], weight [E, N, K], bias [E, N] -> BF16 [T, N]."""
    ends = check_offsets(offsets, x)
    with torch.autocast(autocast_device(x), enabled=False):
        out = _DenseFunction.apply(x, weight, ends)
        return out if bias is None else _AddBias.apply(out, bias, ends)


def lower_grouped(module: GroupedLinear, config: LinearConfig, *, name: str = "", seed: int = 0) -> None:
    """Make ``module`` run ``config``, in place.

    Args:
        module: the experts.
        config: formats per path and operand.
        name: the module's name in its model; part of the key of its random streams and of its error messages.
        seed: seed of the random streams.

    Raises:
        NarrowgateError: the module is lowered already, or has a forward of its own.
    """
    if not isinstance(module, LowPrecisionLayer) and type(module).forward is not GroupedLinear.forward:
        raise NarrowgateError(f"layer '{name}': {type(module).__name__} has a forward of its own and cannot be swapped")
    swap(module, LowPrecisionGroupedLinear, config, name=name, seed=seed, device=module.weight.device)


class _GroupedFunction(torch.autograd.Function):
    """x [T, K], weight [E, N, K] -> y [T, N] of ``dtype``; three grouped products by ``state.config``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        draw: Tensor | None,
        state: LayerState,
        dtype: torch.dtype,
        recording: bool,
    ) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        groups = Groups(ends, x.shape[0])
        forward = Forward(state, groups, draw, recording)
        x_fprop, x_wgrad = prepare_rows(x, ("fprop", 0), ("wgrad", 1) if needs_dw else None, forward)
        # A dense dgrad weight is the weight itself, which lives anyway.
        dense_weight = needs_dx and state.config.dgrad.second.high_precision
        w_fprop, w_dgrad = prepare_matrices(
            weight, ("fprop", 1), ("dgrad", 1) if needs_dx and not dense_weight else None, forward
        )
        ctx.state, ctx.rows, ctx.recording = state, x.shape[0], recording
        ctx.x_dtype, ctx.weight_dtype, ctx.dense_weight = x.dtype, weight.dtype, dense_weight
        kept = [w_dgrad, x_wgrad]
        ctx.layout = [None if operand is None else (operand.layout, operand.scale is not None) for operand in kept]
        tensors = [t for operand in kept if operand is not None for t in (operand.data, operand.scale)]
        ctx.save_for_backward(ends, draw, weight if dense_weight else None, *(t for t in tensors if t is not None))
        assert x_fprop is not None
        assert w_fprop is not None
        return rows_product(x_fprop, w_fprop, groups, fast=_fast(state.config.fprop), out_dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        state: LayerState = ctx.state
        _refuse_second_derivative(f"layer '{state.name}': a low-precision layer has no second derivative")
        (dy,) = grads
        config = state.config
        ends, draw, weight = ctx.saved_tensors[:3]
        tensors = list(ctx.saved_tensors[3:])
        w_dgrad, x_wgrad = [
            None
            if entry is None
            else GroupedOperand(entry[0], tensors.pop(0), tensors.pop(0) if entry[1] else None, spec)
            for entry, spec in zip(ctx.layout, (config.dgrad.second, config.wgrad.second), strict=True)
        ]
        forward = Forward(state, Groups(ends, ctx.rows), draw, ctx.recording)
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = dw = None
        with torch.autocast(autocast_device(dy), enabled=False):
            dy_dgrad, dy_wgrad = prepare_rows(
                dy, ("dgrad", 0) if needs_dx else None, ("wgrad", 0) if needs_dw else None, forward
            )
            if dy_dgrad is not None:
                if ctx.dense_weight:
                    _, w_dgrad = prepare_matrices(weight, None, ("dgrad", 1), forward)
                assert w_dgrad is not None
                dx = rows_product(dy_dgrad, w_dgrad, forward.groups, fast=_fast(config.dgrad), out_dtype=ctx.x_dtype)
            if dy_wgrad is not None:
                assert x_wgrad is not None
                dw = columns_product(
                    dy_wgrad, x_wgrad, forward.groups, fast=_fast(config.wgrad), out_dtype=ctx.weight_dtype
                )
        return dx, dw, None, None, None, None, None


class _DenseFunction(torch.autograd.Function):
    """x [T, K], weight [E, N, K] -> BF16 [T, N]; three grouped BF16 products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        rows, matrices = _dense("rows", x), _dense("matrices", weight)
        ctx.save_for_backward(rows.data, weight, ends)
        ctx.x_dtype = x.dtype
        return rows_product(rows, matrices, Groups(ends, x.shape[0]), fast=False, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative("grouped linear: a grouped BF16 product has no second derivative")
        (dy,) = grads
        x, weight, ends = ctx.saved_tensors
        groups = Groups(ends, x.shape[0])
        dx = dw = None
        with torch.autocast(autocast_device(dy), enabled=False):
            rows = _dense("rows", dy)
            if ctx.needs_input_grad[0]:
                dx = rows_product(rows, _dense("matrices", weight.mT), groups, fast=False, out_dtype=ctx.x_dtype)
            if ctx.needs_input_grad[1]:
                dw = as_dtype(dense_columns_product(rows.data, x, groups), weight.dtype)
        return dx, dw, None


class _AddBias(torch.autograd.Function):
    """out [T, N] plus each row's expert's bias, of [E, N]."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        ctx.bias_dtype = bias.dtype
        return out + bias.to(out.dtype)[Groups(ends, out.shape[0]).group]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (ends,) = ctx.saved_tensors
        dbias = None
        if ctx.needs_input_grad[1]:
            with torch.autocast(autocast_device(dy), enabled=False):
                # A sum over each group is a product with ones: in one order, where adding by index has none.
                rows = dy.to(torch.bfloat16)
                dbias = dense_columns_product(rows.new_ones(rows.shape[0], 1), rows, Groups(ends, rows.shape[0]))
                dbias = as_dtype(dbias.squeeze(1), ctx.bias_dtype)
        return dy, dbias, None


def _dense(layout: str, x: Tensor) -> GroupedOperand:
    return GroupedOperand(layout, x.detach().to(torch.bfloat16), None, Spec(format="bf16"))


def _fast(gemm: GemmConfig) -> bool:
    return gemm.accumulate == "fast"


def _output_dtype(x: Tensor) -> torch.dtype:
    device = autocast_device(x)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _refuse_second_derivative(message: str) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NarrowgateError(f"{message}: take the gradient without create_graph")


def _check_shapes(module: GroupedLinear, x: Tensor, offsets: Tensor) -> None:
    if x.dim() != 2 or x.shape[1] != module.in_features or offsets.shape != (module.experts,):
        raise NarrowgateError(
            f"grouped linear: expected rows [T, {module.in_features}] and offsets [{module.experts}], "
            f"found {list(x.shape)} and {list(offsets.shape)}"
        )


def _experts(module: GroupedLinear, x: Tensor, offsets: Tensor) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """(rows [T_e, K], weight [N, K], bias [N] or None) of every expert."""
    # unbind and split, not indexing: their backward puts the gradients together once, not once an expert.
    biases = module.bias.unbind() if module.bias is not None else [None] * module.experts
    return list(zip(x.split(host_sizes(offsets, x.shape[0])), module.weight.unbind(), biases, strict=True))
