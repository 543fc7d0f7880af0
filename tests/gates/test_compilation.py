"""Arms of one model under torch.compile: each is compiled whole, whatever another one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from narrowgate.gates.compilation import Compiler, compile_model, honest_compilation
from torch import Tensor, fx, nn

X = torch.ones(4, 8)


class Stack(nn.Module):
    """Layers in a loop, as most models have them."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Untraced(nn.Linear):
    """A library's layer at which graphs break."""

    def forward(self, input: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(input)


def stack() -> Stack:
    return Stack([nn.Linear(8, 8) for _ in range(3)])


def broken() -> Stack:
    return Stack([nn.Linear(8, 8), Untraced(8, 8), nn.Linear(8, 8)])


@pytest.fixture
def ran(compile_by: Callable[..., None]) -> list[int]:
    """Operations of each graph, whenever it runs."""
    sizes: list[int] = []

    def backend(module: Any, _: Any) -> Any:
        size = sum(node.op in ("call_function", "call_module") for node in module.graph.nodes)

        def run(*arguments: Any) -> Any:
            sizes.append(size)
            return module(*arguments)

        return run

    compile_by(backend)
    return sizes


def told(ran: list[int], model: Any) -> list[int]:
    """What runs of a compiled model."""
    ran.clear()
    model(X)
    return list(ran)


def test_a_graph_that_breaks_in_one_arm_leaves_the_others_whole(ran) -> None:
    baseline = compile_model(stack())
    expected = baseline(X)
    assert told(ran, baseline) == [3]
    assert told(ran, compile_model(broken())) != [3]
    assert told(ran, baseline) == [3]
    assert torch.equal(baseline(X), expected)
    assert told(ran, compile_model(stack())) == [3]


def test_hooks_of_the_model_itself_run_outside_of_its_graph(ran) -> None:
    def hooked(model: Stack) -> Any:
        def before(module: Any, _: Any) -> None:
            module.steps += 1
            torch._dynamo.graph_break()

        model.register_forward_pre_hook(before)
        model.register_forward_hook(lambda *_: torch._dynamo.graph_break(), always_call=True)
        return compile_model(model)

    first = hooked(broken())
    first(X)
    model = hooked(stack())
    with honest_compilation():
        for _ in range(70):
            assert told(ran, model) == [3]
    assert model.steps == 70


def test_a_hook_sees_what_the_model_takes_and_may_change_what_it_gives(ran) -> None:
    model = stack()
    expected = model(2 * X) + 1
    model.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    model.register_forward_hook(lambda _, args, out: out + 1)
    compiled = compile_model(model)
    assert torch.equal(compiled(X), expected)
    assert told(ran, compiled) == [3]
    assert "forward" not in vars(model)
    ran.clear()
    assert torch.equal(model(X), expected), "itself, it is not compiled"
    assert ran == []


def test_a_model_that_fails_is_as_it_was(ran) -> None:
    model = stack()
    with pytest.raises(Exception, match="5"):
        compile_model(model)(torch.ones(4, 5))
    assert "forward" not in vars(model)


def test_units_of_one_arm_share_their_graphs(ran) -> None:
    graphs = torch._dynamo.utils.counters["stats"]
    compile_unit = Compiler()
    units = [compile_unit(stack()) for _ in range(3)]
    graphs.clear()
    for unit in units:
        assert told(ran, unit) == [3]
    assert graphs["unique_graphs"] == 1


def test_sizes_of_another_models_inputs_make_none_dynamic(compile_by: Callable[..., None]) -> None:
    sizes: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        values = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
        sizes.append([size for value in values for size in getattr(value, "shape", (value,))])
        return module.forward

    compile_by(backend)
    for width in (8, 16, 32):
        # As regions of a model are: of one class, each with a forward of its own.
        region = fx.symbolic_trace(nn.Sequential(nn.Linear(width, 8), nn.ReLU()))
        compile_model(region)(torch.ones(4, width))
    assert len(sizes) == 3
    assert all(isinstance(size, int) for graph in sizes for size in graph)


def test_a_compiled_model_keeps_its_names_and_modes() -> None:
    model = stack()
    compiled = compile_model(model)
    assert {name.removeprefix("_orig_mod.") for name in compiled.state_dict()} == set(model.state_dict())
    compiled.eval()
    assert not model.training
