"""Linear layers of many experts in one weight: rows of one input, sorted by expert, each group with its own matrix.

y[t] = x[t] · W[e]ᵀ for the rows t of group e, W [E, N, K]. Every expert is a linear layer of its own to the recipe:
``tensor`` and every other granularity reach over one expert's operand, never over two experts; a delayed scale has one
history for all of them. In low precision the products run one expert after another; a fused grouped FP8 product is not
wired up.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import LinearConfig
from .errors import NarrowgateError
from .layer import LowPrecisionLayer, layer_state, swap
from .linear import linear_product


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
            NarrowgateError: the shapes do not fit, or the offsets do not rise from 0 to T.
        """
        return torch.cat([F.linear(*operands) for operands in _groups(self, x, offsets)])

    def extra_repr(self) -> str:
        """The sizes."""
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"


class LowPrecisionGroupedLinear(LowPrecisionLayer, GroupedLinear):
    """A :class:`GroupedLinear` that runs a :class:`LinearConfig`; made by :func:`lower_grouped`, never constructed."""

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return [T, N] as :meth:`GroupedLinear.forward`, each expert's products as the recipe says."""
        state = layer_state(self)
        draw, recording = state.enter(self.training and torch.is_grad_enabled())
        outputs = [
            # The expert takes the micro-batch's place in the random key, so that no two draw the same bits.
            linear_product(rows, weight, bias, state, draw + (expert << 16), recording)
            for expert, (rows, weight, bias) in enumerate(_groups(self, x, offsets))
        ]
        return torch.cat(outputs)


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


def _groups(module: GroupedLinear, x: Tensor, offsets: Tensor) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """(rows [T_e, K], weight [N, K], bias [N] or None) of every expert."""
    if x.dim() != 2 or x.shape[1] != module.in_features or offsets.shape != (module.experts,):
        raise NarrowgateError(
            f"grouped linear: expected rows [T, {module.in_features}] and offsets [{module.experts}], "
            f"found {list(x.shape)} and {list(offsets.shape)}"
        )
    ends = offsets.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if any(size < 0 for size in sizes) or sum(sizes) != x.shape[0]:
        raise NarrowgateError(f"grouped linear: expected offsets that rise from 0 to {x.shape[0]}, found {ends}")
    # unbind and split, not indexing: their backward puts the gradients together once, not once an expert.
    biases = module.bias.unbind() if module.bias is not None else [None] * module.experts
    return list(zip(x.split(sizes), module.weight.unbind(), biases, strict=True))
