"""Saved activations under torch.compile: the two graphs of a region, and gradients against rounded by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from narrowgate.precision import saved_graph, saved_marks
from narrowgate.precision.config import GemmConfig, LinearConfig
from narrowgate.precision.linear import lower_linear
from narrowgate.precision.saved import keep_saved
from narrowgate.precision.spec import Spec
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

ROW = "fp8_e4m3/row+pow2"
D, H, ROWS = 64, 128, 96


@pytest.fixture
def block(swiglu_block) -> Callable[[], nn.Module]:
    """Make one of the blocks, with a norm that has a bias."""
    return lambda: swiglu_block(D, H, nn.LayerNorm)


@pytest.fixture
def blocks(block) -> Callable[[], nn.Sequential]:
    """Make a layer and two blocks, the same at each call."""

    def make() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(D, D, bias=False), block(), block())

    return make


def low_precision(model: nn.Module, text: str = "fp8_e4m3/row") -> nn.Module:
    spec = Spec.parse(text)
    gemm = GemmConfig(spec, spec)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            lower_linear(module, LinearConfig(fprop=gemm, dgrad=gemm, wgrad=gemm), name=name)
    return model


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(9))


def loss(model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    y = model(x)
    return y.float().pow(3).mean(), y.detach()


def train(model: nn.Module, step: Callable, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    value, y = step(model, x)
    value.backward()
    return y, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_graph_is_known() -> Iterator[None]:
    """Compilers keep graphs on disk; these tests look on while they are made."""
    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(fx_graph_cache=False):
        yield


@pytest.fixture
def replaced(monkeypatch) -> list[fx.Node]:
    """The forward's nodes that are kept in a format, in every graph that is compiled from here on."""
    found: list[fx.Node] = []
    original = saved_graph._replace

    def replace(forward, backward, node, spec, outputs):
        found.append(node)
        original(forward, backward, node, spec, outputs)

    monkeypatch.setattr(saved_graph, "_replace", replace)
    return found


@contextmanager
def counting() -> Iterator[list[int]]:
    """Bytes of what compiled regions save, parameters and inputs apart."""
    found: list[int] = []

    def pack(x: Tensor) -> Tensor:
        if not x.is_leaf or not isinstance(x, nn.Parameter):
            found.append(x.numel() * x.element_size())
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield found


def rounded(x: Tensor) -> Tensor:
    """FP8 E4M3 in rows, scales the next power of two over amax / 448, by ml_dtypes."""
    values = x.detach().float().numpy()
    scale = np.exp2(np.ceil(np.log2(np.abs(values).max(-1, keepdims=True) / np.float32(448))))
    codes = (values / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return torch.from_numpy(codes * scale).float().to(x.dtype)


def by_partition(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients where backward gets rounded activations: the plain graphs, run one after the other by hand."""
    parameters = {tuple(p.shape) for p in model.parameters()}

    def forward(graph: fx.GraphModule, inputs):
        return graph

    def between(graph: fx.GraphModule, inputs):
        def run(*values: Tensor):
            kept = [
                rounded(v) if v.dim() > 1 and v.shape[-1] > 1 and tuple(v.shape) not in parameters
                and v.is_floating_point() and not torch.equal(v, x) and v.numel() > 1024 and i < len(values) - 1 else v
                for i, v in enumerate(values)
            ]  # fmt: skip
            return graph(*kept)

        return run

    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=between, decompositions=select_decomp_table(),
        partition_fn=lambda *args, **kwargs: min_cut_rematerialization_partition(*args, compiler="inductor", **kwargs),
    )  # fmt: skip
    model.zero_grad()
    # The model alone: what its output's cube saves is the output, which lives anyway.
    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    y.float().pow(3).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_gradients_are_those_of_a_backward_that_gets_rounded_tensors(replaced, blocks):
    model, x = blocks(), batch()
    expected = by_partition(copy.deepcopy(model), x)
    before, exact = train(model, torch.compile(loss, fullgraph=True), x)
    keep_saved(model, ROW)
    torch._dynamo.reset()
    after, grads = train(model, torch.compile(loss, fullgraph=True), x)
    assert torch.equal(before, after)
    assert len(replaced) >= 6
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=2e-4, atol=1e-6)
        assert (grad - exact[name]).norm() > 1e-3 * exact[name].norm()


@pytest.mark.parametrize("text", ["bf16", "fp8_e5m2", "fp8_e4m3/128x128", "mxfp8"])
def test_every_format_compiles_and_saves_what_it_says(text, replaced, blocks):
    model, x = blocks(), batch()
    with counting() as plain:
        _, exact = train(model, torch.compile(loss, fullgraph=True), x)
    keep_saved(model, text)
    torch._dynamo.reset()
    with counting() as kept:
        _, grads = train(model, torch.compile(loss, fullgraph=True), x)
    shrunk = sum(node.meta["val"].numel() * 4 for node in replaced)
    assert shrunk > 0.7 * sum(plain)
    left = sum(plain) - shrunk
    ratio = (sum(kept) - left) / shrunk
    assert (0.5 <= ratio < 0.51) if text == "bf16" else (0.25 <= ratio < 0.27)
    for name, grad in grads.items():
        assert (grad - exact[name]).norm() < 0.12 * exact[name].norm()


def test_parameters_casts_of_them_inputs_and_outputs_are_left_alone(replaced, blocks):
    model, x = blocks(), batch().requires_grad_()
    keep_saved(model, ROW)

    def step(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x).sigmoid()  # backward reads the output, which lives anyway
        return y.float().mean(), y

    train(model, torch.compile(step, fullgraph=True), x)
    assert replaced
    weights = {tuple(shape) for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    for node in replaced:
        assert tuple(node.meta["val"].shape) not in weights
        assert node.op == "call_function"
        assert node.target is not torch.ops.aten.sigmoid.default


def test_statistics_exponents_and_a_loss_around_the_model_are_left_alone(replaced):
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(D, 3 * D)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(2, ROWS // 2, 3, 1, D).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v).reshape(ROWS, D)
            return F.log_softmax(y, -1) * y

    def step(model, x):
        z = torch.tanh(model(x) * 3) * 2
        return (z * z.exp()).mean(), z.detach()

    model = Attend()
    keep_saved(model, ROW)
    train(model, torch.compile(step, fullgraph=True), batch())
    assert replaced
    for node in replaced:
        assert node.meta["val"].shape[-1] in (D, 3 * D), "not the log-sum-exp of attention, [2, 1, rows]"
        assert node.target is not torch.ops.aten.tanh.default
        assert node.target is not torch.ops.aten.sub.Tensor, "not a log-softmax"


def test_operands_of_low_precision_layers_are_kept_as_forward_made_them(replaced, block):
    torch.manual_seed(5)
    model, x = low_precision(nn.Sequential(nn.Linear(D, D, bias=False), block())), batch()
    _, exact = train(model, torch.compile(loss, fullgraph=True), x)
    keep_saved(model, "fp8_e4m3/row")
    torch._dynamo.reset()
    with counting() as kept:
        _, grads = train(model, torch.compile(loss, fullgraph=True), x)
    assert replaced
    assert not any(node.meta["val"].dtype in saved_graph._CODES for node in replaced)
    # The last layer's gradient: its operand's codes are exact, and nothing that was rounded is on the way.
    torch.testing.assert_close(grads["1.down.weight"], exact["1.down.weight"], rtol=0, atol=0)
    assert not torch.equal(grads["1.norm.weight"], exact["1.norm.weight"])
    wide = [size for size in kept if size >= ROWS * D * 2]
    assert len(wide) <= 1 + sum(p.numel() * p.element_size() >= ROWS * D * 2 for p in model.parameters())


def test_a_checkpointed_region_repeats_its_forward_from_what_it_was(block):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(D, D), low_precision(block())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=False)

    torch.manual_seed(0)
    model, x = Outer(), batch()
    exact = train(model, torch.compile(loss, fullgraph=True), x)[1]
    keep_saved(model, "fp8_e4m3/row")
    torch._dynamo.reset()
    grads = train(model, torch.compile(loss, fullgraph=True), x)[1]
    # What its layers multiply is made again, to the bit. PyTorch 2.11 saves some of its other values all the same.
    for name in ("inner.up.weight", "inner.down.weight"):
        torch.testing.assert_close(grads[name], exact[name], rtol=1e-5, atol=1e-7)
    for name, grad in grads.items():
        assert (grad - exact[name]).norm() < 0.05 * exact[name].norm()


def test_one_format_is_never_taken_for_another_by_a_compilers_cache(tmp_path, monkeypatch, blocks):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found: list[int] = []
    for text in (None, ROW, "bf16", ROW, None):
        torch._dynamo.reset()
        model = blocks()
        if text is not None:
            keep_saved(model, text)
        cached = functorch_config.patch(enable_autograd_cache=True), inductor_config.patch(fx_graph_cache=True)
        with cached[0], cached[1], counting() as kept:
            train(model, torch.compile(loss, fullgraph=True), batch())
        found.append(sum(kept))
    assert found[0] == found[4] > found[2] > found[1] == found[3]


def test_a_block_compiled_on_its_own_saves_in_the_format_too(replaced, blocks):
    model, x = blocks(), batch()
    keep_saved(model, ROW)
    for block in (model[1], model[2]):
        block.compile(fullgraph=True)
    train(model, loss, x)
    assert len(replaced) >= 4
    names = {node.name for node in replaced}
    assert not any(name.startswith("primals") for name in names)


def test_a_function_compiled_within_an_eager_model_is_warned_about():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)
            self.gate = torch.compile(lambda x: F.silu(x) * x.tanh(), fullgraph=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(self.layer(x))

    model = Outer()
    keep_saved(model, ROW)
    with pytest.warns(UserWarning, match=r"compiled by itself within a model that saves as fp8_e4m3/row\+pow2"):
        train(model, loss, batch())


def test_a_batch_of_another_size_needs_no_other_graph(replaced, blocks):
    model = blocks()
    keep_saved(model, ROW)
    step = torch.compile(loss, fullgraph=True, dynamic=True)
    exact = blocks()
    for rows in (96, 160, 80):
        _, grads = train(model, step, batch(rows))
        _, expected = train(exact, loss, batch(rows))
        for name, grad in grads.items():
            assert (grad - expected[name]).norm() < 0.08 * expected[name].norm()
    assert replaced
    assert len({node.graph for node in replaced}) == 1


@pytest.mark.gpu
def test_blocks_of_norm_and_gate_take_less_memory_at_their_peak(swiglu_block):
    """Four RMSNorm + SwiGLU blocks in FP8: what they save beside codes is halved, and the peak follows."""
    rows, width, hidden = 8192, 2048, 8192

    def peak(text: str | None) -> int:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = low_precision(nn.Sequential(*(swiglu_block(width, hidden) for _ in range(4)))).bfloat16()
            x = torch.randn(rows, width, dtype=torch.bfloat16)
        if text is not None:
            keep_saved(model, text)
        step = torch.compile(lambda model, x: model(x).float().square().mean(), fullgraph=True)
        for _ in range(2):  # the first compiles and tunes
            model.zero_grad(set_to_none=False)
            step(model, x).backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.zero_grad(set_to_none=False)
        step(model, x).backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    plain, kept = peak(None), peak("fp8_e4m3/row")
    # The peak is in the last block's backward, the first to run. Alive are then, in units of rows * hidden bytes: of
    # each block gate and up (4), the sum that it adds to (0.5), codes of what its products multiply (0.25 and 1) and of
    # its weights (0.75); of that backward the gradient in the gate (2), its codes (2), and two products (1): 31 in all.
    # Codes of gate and up save 8 of them; those of the last block are values again by then (2).
    saved = 4 * 2 * rows * hidden
    assert kept < plain - 0.5 * saved


def test_a_model_that_saves_in_a_format_leaves_graphs_compiled_before_as_they_are(monkeypatch):
    graphs = []

    def backend(module, _):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return module

    def product(x):
        return saved_marks.marked(x) * 2

    monkeypatch.setattr(saved_marks, "installed", False)
    torch._dynamo.reset()
    compiled, x = torch.compile(product, backend=backend), torch.ones(3)
    compiled(x)
    monkeypatch.setattr(saved_marks, "installed", True)
    compiled(x)
    assert len(graphs) == 1
    torch.compile(lambda x: saved_marks.marked(x) * 3, backend=backend)(x)
    assert any("kept_operand" in target for target in graphs[1])
    torch._dynamo.reset()
