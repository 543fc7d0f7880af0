"""Saved activations beside the fused cast kernels: graphs as on a GPU, traced without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from narrowgate.precision import casting, fusion, saved_graph
from narrowgate.precision.capability import named_device
from narrowgate.precision.config import GemmConfig, LinearConfig
from narrowgate.precision.kernels.program import Program
from narrowgate.precision.layer import layer_state
from narrowgate.precision.linear import lower_linear
from narrowgate.precision.saved import keep_saved
from narrowgate.precision.spec import Spec
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import remove_noop_ops

ROWS, D, H = 256, 128, 384


def traced(block: Callable[[int, int], nn.Module], text: str | None) -> tuple[fx.Graph, fx.Graph]:
    """Forward and backward of two blocks in FP8, partitioned and with their casts fused."""
    row = Spec.parse("fp8_e4m3/row")
    gemm = GemmConfig(row, row)
    model = nn.Sequential(block(D, H), block(D, H)).bfloat16()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            lower_linear(module, LinearConfig(fprop=gemm, dgrad=gemm, wgrad=gemm), name=name)
            layer_state(module).run_on(named_device("h200"))
    saved_graph.install()
    if text is not None:
        keep_saved(model, text)
    graphs: list[fx.Graph] = []

    def compiler(module: fx.GraphModule, inputs):
        (output,) = module.graph.find_nodes(op="output")
        metas = [value.meta["val"] if isinstance(value, fx.Node) else value for value in output.args[0]]
        remove_noop_ops(module.graph)
        fusion.fuse_casts(module.graph)
        module.graph.lint()
        graphs.append(module.graph)

        def run(values):
            values.clear()
            return [torch.empty_strided(m.shape, m.stride(), dtype=m.dtype) if m is not None else None for m in metas]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    partitioner = saved_graph.SavedPartitioner()
    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table(),
        partition_fn=lambda *args, **kwargs: partitioner(*args, compiler="inductor", **kwargs),
    )  # fmt: skip
    with casting.kernels_assumed():
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(ROWS, D).bfloat16()).sum().backward()
    return graphs[0], graphs[1]


def casts(graph: fx.Graph) -> list[tuple[Program, list[torch.dtype]]]:
    nodes = graph.find_nodes(op="call_function", target=torch.ops.narrowgate.cast_fp8.default)
    return [(Program.parse(n.args[1]), [leaf.meta["val"].dtype for leaf in n.args[0]]) for n in nodes]


def activations(graph: fx.Graph, dtype: torch.dtype) -> list[tuple[int, ...]]:
    (output,) = graph.find_nodes(op="output")
    values = [n.meta["val"] for n in output.args[0] if isinstance(n, fx.Node) and n.op != "placeholder"]
    return sorted(tuple(v.shape) for v in values if v.dtype == dtype and ROWS in v.shape and min(v.shape) > 1)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_forward_casts_are_the_same_and_codes_that_products_need_are_saved_once(swiglu_block):
    plain, _ = traced(swiglu_block, None)
    torch._dynamo.reset()
    kept, _ = traced(swiglu_block, "fp8_e4m3/row")
    assert [str(program) for program, _ in casts(plain)] == [str(program) for program, _ in casts(kept)]
    operands = activations(plain, torch.float8_e4m3fn)
    wide = activations(plain, torch.bfloat16)
    assert len(operands) == 4, "x and the product of each block, shared by gate and up"
    assert len(wide) == 6, "the output, and gate, up of each block and down of the first"
    assert activations(kept, torch.float8_e4m3fn) == sorted(operands + wide[1:])
    assert activations(kept, torch.bfloat16) == [(ROWS, D)], "the output"


def test_backward_casts_read_what_was_dequantized_once_in_bf16(swiglu_block):
    _, plain = traced(swiglu_block, None)
    torch._dynamo.reset()
    _, kept = traced(swiglu_block, "fp8_e4m3/row")
    assert [str(program) for program, _ in casts(plain)] == [str(program) for program, _ in casts(kept)]
    # The gate's gradient reads the gradient and both halves, the up projection's the gradient and one.
    gates = [dtypes for _, dtypes in casts(kept) if len(dtypes) in (2, 3)]
    assert sorted(map(len, gates)) == [2, 2, 3, 3]
    assert all(dtype is torch.bfloat16 for dtypes in gates for dtype in dtypes)
