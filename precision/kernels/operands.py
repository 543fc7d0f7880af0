"""What an operand of a cast asks of the kernels, and the tensors that it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cast_operators import operand_sizes
from ..rounding import torch_dtype
from ..spec import Spec

_empty_strided_cuda: Any = torch._C._dynamo.guards._empty_strided_cuda  # pyright: ignore[reportAttributeAccessIssue]

#: How kernels know at what magnitude to clip.
NO_LIMIT, GIVEN_LIMIT, RMS_LIMIT = 0, 1, 2


@dataclass(frozen=True)
class Operand:
    """What one operand is cast to, and which of its optional inputs there are."""

    spec: Spec
    given_bits: bool = False
    #: The magnitude at which values are clipped is given: a percentile must be, a multiple of the RMS need not.
    given_limit: bool = False

    @property
    def clip(self) -> tuple[int, float]:
        """How a kernel finds that magnitude, and the multiple of the RMS."""
        if self.given_limit:
            return GIVEN_LIMIT, 0.0
        assert self.spec.clip_p is None, "a percentile is given"
        return (NO_LIMIT, 0.0) if self.spec.clip_rms is None else (RMS_LIMIT, float(self.spec.clip_rms))

    def __str__(self) -> str:
        """Return the format expression, and which inputs are given."""
        return f"{self.spec}{' bits' * self.given_bits}{' limit' * self.given_limit}"

    def blocked(self, dim: int, contracted: int) -> bool:
        """Whether a scale is of 128 elements along ``dim`` of the matrix, contracted over its ``contracted``."""
        return self.spec.block is not None and self.spec.block[dim == contracted] == 128


def sizes(operand: Operand | None, shape: tuple[int, int], dim: int) -> Any:
    """(size and dtype of the codes, size of the scales) of an operand, None where there is none."""
    if operand is None:
        return None
    return operand_sizes(operand.spec, shape, dim), torch_dtype(operand.spec.fmt.element)


def allocate_codes(device: torch.device, wanted: Any, nothing: Tensor | None) -> Tensor:
    """Return empty codes of ``wanted`` sizes; for None ``nothing``, an empty tensor."""
    if wanted is None:
        assert nothing is not None
        return nothing
    (codes, _), dtype = wanted
    return empty(codes, dtype, device)


def allocate(
    device: torch.device, wanted: Any, nothing: Tensor | None, *, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    """Return empty codes and scales of ``wanted`` sizes; for None ``nothing`` and an empty tensor.

    Without ``scaled`` the second is empty, too.
    """
    size = wanted[0][1] if scaled and wanted is not None else (0,)
    return allocate_codes(device, wanted, nothing), empty(size, torch.float32, device)


def empty(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized contiguous tensor of up to two dimensions; on a GPU it has to be the current one.

    It is what compiled code allocates with: parsing the arguments of ``torch.empty`` costs the host more.
    """
    stride = (size[1], 1) if len(size) == 2 else (1,) * len(size)
    if device.type == "cuda":
        return _empty_strided_cuda(size, stride, dtype)
    return torch.empty(size, dtype=dtype, device=device)
