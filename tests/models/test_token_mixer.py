"""Token mixers: one product a sample that reads tokens where they lie, eagerly and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from narrowgate.models import get_preset
from narrowgate.models.functional import TokenMixer
from narrowgate.models.interaction import Interaction
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

ROWS, N_IN, N_OUT, WIDTH = 6, 10, 7, 16
AROUND: dict[str, Callable[[TokenMixer], Callable[[Tensor], Tensor]]] = {
    "eager": lambda mixer: mixer,
    "compiled": lambda mixer: torch.compile(mixer, fullgraph=True),
    "checkpointed": lambda mixer: lambda x: checkpoint(mixer, x, use_reentrant=False),
}


class Copies(TorchDispatchMode):
    """Numbers of elements of whatever is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("clone", "copy_", "_to_copy"):
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("around", AROUND)
def test_mixes_as_an_einsum_does_into_contiguous_tensors(around: str) -> None:
    torch.manual_seed(0)
    mixer = TokenMixer(N_IN, N_OUT)
    x, grad = torch.randn(ROWS, N_IN, WIDTH, requires_grad=True), torch.randn(ROWS, N_OUT, WIDTH)
    out = AROUND[around](mixer)(x)
    found = torch.autograd.grad(out, [x, mixer.weight], grad)
    expected = torch.einsum("oi,bid->bod", mixer.weight, x)
    wanted = torch.autograd.grad(expected, [x, mixer.weight], grad)
    assert out.is_contiguous()
    assert all(part.is_contiguous() for part in found)
    for here, there in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "expanded"])
def test_copies_nothing_of_the_tokens_size(kind: str) -> None:
    mixer = TokenMixer(N_IN, N_OUT)
    x = torch.randn(ROWS, N_IN, WIDTH, requires_grad=True)
    grad = torch.randn(ROWS, N_OUT, WIDTH) if kind == "contiguous" else torch.randn(ROWS, WIDTH, N_OUT).mT
    if kind == "expanded":
        grad = grad[:, :1].expand(-1, N_OUT, -1)
    with Copies() as copies:
        torch.autograd.grad(mixer(x), [x, mixer.weight], grad)
    assert max(copies.sizes) <= mixer.weight.numel() < min(x.numel(), grad.numel())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_gradient_is_not_rounded_under_autocast(dtype: torch.dtype, compiled: bool) -> None:
    torch.manual_seed(0)
    mixer = TokenMixer(N_IN, N_OUT)
    run = torch.compile(mixer, fullgraph=True, backend="aot_eager") if compiled else mixer
    x = torch.randn(200, N_IN, WIDTH).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = run(x)
    grad = torch.randn_like(out)
    of_x, of_weight = torch.autograd.grad(out, [x, mixer.weight], grad)
    assert (out.dtype, of_x.dtype, of_weight.dtype) == (torch.bfloat16, dtype, torch.float32)
    exact = torch.einsum("bod,bid->oi", grad.double(), x.detach().bfloat16().double())
    assert (of_weight - exact).norm() < 1e-6 * exact.norm()
    rounded = torch.einsum("oi,bid->bod", mixer.weight.bfloat16().double(), x.detach().bfloat16().double())
    torch.testing.assert_close(out.double(), rounded, rtol=2**-8, atol=1e-6)


def test_types_that_differ_are_refused_without_autocast() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        TokenMixer(N_IN, N_OUT)(torch.randn(ROWS, N_IN, WIDTH, dtype=torch.bfloat16))


def test_a_compiled_interaction_keeps_its_tokens_as_they_are_and_no_second_copy() -> None:
    config = get_preset("gem-tiny").model
    interaction = Interaction(N_IN, config)
    x = torch.randn(ROWS, N_IN, config.d, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        out = torch.compile(interaction, fullgraph=True)(x)
    found = torch.autograd.grad(out.square().sum(), [x, *interaction.parameters()])
    assert [saved.data_ptr() for saved in kept if saved.numel() == x.numel()] == [x.data_ptr()]
    assert all(saved.is_contiguous() for saved in kept if saved.dim() == 3)
    assert out.is_contiguous()
    assert found[0].is_contiguous()
    assert all(part.isfinite().all() for part in found)
