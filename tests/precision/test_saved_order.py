"""Values of saved tensors wait for a gradient: which one, and that nothing else is left to be made ahead of it."""

from __future__ import annotations

import pytest
import torch
from narrowgate.precision import saved_graph
from narrowgate.precision.saved import keep_saved
from narrowgate.precision.saved_order import after, dependent, gradient_to_await
from narrowgate.precision.spec import Spec
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
D, H, ROWS, DEPTH = 64, 256, 96, 3


def bytes_made_early(graph: fx.Graph) -> int:
    """Bytes alive if all that needs no gradient is computed before anything that does; weights apart."""
    late = dependent(graph)
    total = 0
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or node in late or not isinstance(value, Tensor) or value.shape[:1] != (ROWS,):
            continue
        # Read only by the choice that waits, in the kernel of which it is computed.
        waits = all(u.target is aten.where.self and u.args[1] is node and u.args[2] is node for u in node.users)
        if any(user in late for user in node.users) and not waits:
            total += value.numel() * value.element_size()
    return total


@pytest.mark.parametrize("text", ["fp8_e4m3/row", "fp8_e4m3/128x128", "fp8_e5m2", "mxfp8"])
def test_no_layers_values_but_the_last_ones_can_be_made_before_its_gradient(text, monkeypatch, swiglu_block) -> None:
    made: list[fx.Graph] = []
    original = saved_graph.quantize_saved

    def quantize_saved(*args, **kwargs):
        forward, backward = original(*args, **kwargs)
        made.append(backward.graph)
        return forward, backward

    monkeypatch.setattr(saved_graph, "quantize_saved", quantize_saved)
    torch._dynamo.reset()
    model = nn.Sequential(*(swiglu_block(D, H) for _ in range(DEPTH)))
    keep_saved(model, text)
    step = torch.compile(lambda model, x: model(x).square().mean(), fullgraph=True)
    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(fx_graph_cache=False):
        step(model, torch.randn(ROWS, D)).backward()
    (backward,) = made
    # What the last product multiplied meets the loss's gradient, and does not wait; the first norm reads the input.
    assert bytes_made_early(backward) < 4 * ROWS * (H + 2 * D)
    waiting = [node for node in backward.find_nodes(op="call_function", target=aten.where.self)
               if node.args[1] is node.args[2]]  # fmt: skip
    assert len(waiting) >= 3 * DEPTH


def test_the_choice_is_of_the_same_values_whatever_the_gradient_is() -> None:
    values = torch.tensor([[1.0, -0.0], [float("nan"), float("inf")]])
    for first in (1.0, -1.0, 0.0, float("nan"), float("inf")):
        gradient = torch.full((3, 5), first, dtype=torch.bfloat16)
        assert torch.equal(after(values, gradient).view(torch.int32), values.view(torch.int32))


def traced(function, *shapes: tuple[int, ...]) -> fx.Graph:
    graph = make_fx(function, tracing_mode="fake")(*(torch.empty(shape) for shape in shapes)).graph
    for node in graph.find_nodes(op="placeholder"):
        if node.name.startswith("tangent"):
            node.name = "tangents_1"
    return graph


def awaited(graph: fx.Graph) -> fx.Node | None:
    read = next(node for node in graph.find_nodes(op="placeholder") if node.name.startswith("saved"))
    return gradient_to_await(graph, read, dependent(graph))


def test_it_is_the_last_product_before_the_first_reader_not_what_lies_between() -> None:
    def backward(saved_1: Tensor, weight_1: Tensor, tangent_1: Tensor):
        made_again = saved_1.sigmoid()
        first = tangent_1.mm(weight_1)
        second = first.mm(weight_1)
        on_the_way = (second * 2).view(8, 4).neg()
        met = on_the_way * made_again
        return met, met.mm(weight_1) * saved_1

    products = (graph := traced(backward, (8, 4), (4, 4), (8, 4))).find_nodes(
        op="call_function", target=aten.mm.default
    )
    assert awaited(graph) is products[1]


def test_what_meets_the_loss_or_no_gradient_waits_for_nothing() -> None:
    assert awaited(traced(lambda saved_1, tangent_1: saved_1 * tangent_1 * 2, (8, 4), (8, 4))) is None
    assert awaited(traced(lambda saved_1, tangent_1: (saved_1 * 2, tangent_1 * 2), (8, 4), (8, 4))) is None


def test_an_empty_gradient_has_no_element_to_read() -> None:
    def backward(saved_1: Tensor, weight_1: Tensor, tangent_1: Tensor) -> Tensor:
        return saved_1 * tangent_1.mm(weight_1).sum()

    assert awaited(traced(backward, (8, 4), (4, 4), (0, 4))) is None
    assert awaited(traced(backward, (8, 4), (4, 4), (2, 4))) is not None


def test_what_backward_makes_again_before_the_gradient_is_moved_behind_it() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x * 2

    def backward(mul: Tensor, weight_1: Tensor, tangent_1: Tensor) -> Tensor:
        made_again = mul.sigmoid()
        return tangent_1.mm(weight_1) * made_again

    fake = torch._subclasses.FakeTensorMode()
    with fake:
        x, dy, weight = torch.empty(64, 32), torch.empty(64, 32), torch.empty(32, 32)
    forward_graph, graph = make_fx(forward)(x).graph, make_fx(backward)(x, weight, dy).graph
    names = ("mul", "weight_1", "tangents_1")
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = name
    (node,) = forward_graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    saved_graph._replace(forward_graph, graph, node, Spec.parse("fp8_e4m3/row"), 1)
    graph.lint()
    nodes = list(graph.nodes)
    (product,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    (again,) = graph.find_nodes(op="call_function", target=aten.sigmoid.default)
    assert nodes.index(product) < nodes.index(again)
