from __future__ import annotations

import copy
import functools
import inspect
import pickle

import pytest
import torch
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.linear import LowPrecisionLinear
from narrowgate.recipes import Recipe, RecipeError, Rule, apply_recipe, disabled, low_precision, remove_recipe
from torch import nn


def lowered(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, LowPrecisionLinear)]


@low_precision("fp8-row")
class Ranker(nn.Module):
    """A ranker."""

    def __init__(self, width: int = 32, *, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Larger(Ranker):
    def __init__(self) -> None:
        super().__init__(16)
        self.extra = nn.Linear(16, 16)


class Silent(Ranker):
    pass


@low_precision(Recipe(name="only-extra", rules=[Rule(layers="extra", all="fp8_e4m3")]))
class Redecorated(Larger):
    pass


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(16, 16)


class Mixed(Plain, Ranker):
    """The decorated class is not the first base, and Plain adds a layer after Ranker is done."""


@low_precision("fp8-row")
def build(width: int = 32) -> nn.Module:
    """Build one."""
    return nn.Sequential(nn.Linear(width, width))


def test_a_decorated_class_builds_low_precision_models_and_stays_itself():
    model = Ranker(depth=3)
    assert lowered(model) == ["layers.0", "layers.1", "layers.2"]
    assert type(model) is Ranker
    assert Ranker.__name__ == "Ranker"
    assert Ranker.__doc__ == "A ranker."
    assert str(inspect.signature(Ranker)) == "(width: 'int' = 32, *, depth: 'int' = 2) -> 'None'"
    model(torch.randn(4, 32)).sum().backward()


def test_a_subclass_gets_the_recipe_once_after_its_own_init():
    model = Larger()
    assert isinstance(model, Ranker)
    assert lowered(model) == ["layers.0", "layers.1", "extra"]
    assert lowered(Silent()) == ["layers.0", "layers.1"]


def test_a_subclass_may_be_decorated_with_another_recipe():
    assert lowered(Redecorated()) == ["extra"]
    assert lowered(Larger()) == ["layers.0", "layers.1", "extra"]


def test_the_most_derived_class_counts_under_multiple_inheritance():
    assert sorted(lowered(Mixed())) == ["late", "layers.0", "layers.1"]


def test_an_own_init_subclass_still_runs():
    seen = []

    @low_precision("fp8-row")
    class Base(nn.Module):
        def __init_subclass__(cls, tag: str = "", **kwargs) -> None:
            super().__init_subclass__(**kwargs)
            seen.append((cls.__name__, tag))

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

    class Child(Base, tag="t"):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Linear(16, 16)

    assert seen == [("Child", "t")]
    assert lowered(Child()) == ["a", "b"]


def test_copies_and_pickles_are_not_applied_to_twice():
    model = Larger()
    x = torch.randn(2, 16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is Larger
        assert lowered(twin) == lowered(model)
        assert torch.equal(twin(x), model(x))
    assert not any(key.startswith("_narrowgate_init") for key in vars(model))


def test_disabled_builds_the_baseline_with_the_same_parameters():
    torch.manual_seed(3)
    model = Ranker()
    with disabled():
        torch.manual_seed(3)
        baseline = Ranker()
        assert lowered(build()) == []
        explicit = nn.Sequential(nn.Linear(16, 16))
        apply_recipe(explicit, "fp8-row")
        assert lowered(explicit) == ["0"]
    assert lowered(baseline) == []
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), baseline.parameters(), strict=True))
    assert lowered(Ranker()) == ["layers.0", "layers.1"]


def test_disabled_ends_with_its_block_also_on_an_error():
    with pytest.raises(KeyError), disabled():
        raise KeyError
    assert lowered(build()) == ["0"]


def test_a_function_that_returns_a_module_is_decorated_with_its_signature_and_doc():
    assert lowered(build(16)) == ["0"]
    assert build.__doc__ == "Build one."
    assert str(inspect.signature(build)) == "(width: 'int' = 32) -> 'nn.Module'"
    assert pickle.loads(pickle.dumps(build)) is build


def test_a_partial_is_decorated():
    def make(width: int, depth: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    decorated = low_precision("fp8-row")(functools.partial(make, 16))
    assert lowered(decorated(2)) == ["0", "1"]
    of_class = low_precision("fp8-row")(functools.partial(nn.Linear, 16, bias=False))
    assert lowered(of_class(16)) == [""]


def test_a_recipe_fault_shows_where_the_decorator_stands():
    with pytest.raises(RecipeError, match="did you mean 'fp8-row'"):
        low_precision("fp8-rwo")
    with pytest.raises(RecipeError, match="backend"):
        low_precision("fp8-row", backend="cuda")


def test_what_cannot_be_decorated_is_refused():
    with pytest.raises(NarrowgateError, match=r"expected @low_precision\('NAME'\)"):
        low_precision(Ranker)  # type: ignore[arg-type]
    with pytest.raises(NarrowgateError, match=r"expected a subclass of torch\.nn\.Module"):
        low_precision("bf16")(int)
    with pytest.raises(NarrowgateError, match="expected a class or a function"):
        low_precision("bf16")(3)  # type: ignore[type-var]
    with pytest.raises(NarrowgateError, match=r"found a Linear that is built already.*apply_recipe\(model, recipe\)"):
        low_precision("bf16")(nn.Linear(16, 16))
    with pytest.raises(NarrowgateError, match=r"returned 3, expected a torch\.nn\.Module"):
        low_precision("bf16")(lambda: 3)()


def test_an_error_in_init_is_the_users_own():
    @low_precision("fp8-row")
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        Broken()


def test_a_decorated_part_inside_a_second_recipe_is_a_clear_error():
    outer = nn.ModuleDict({"part": Ranker()})
    with pytest.raises(NarrowgateError, match="'part' of this model carries recipe 'fp8-row' already"):
        apply_recipe(outer, "fp8-tensor")
    remove_recipe(outer)
    apply_recipe(outer, "fp8-tensor")


def test_a_meta_device_model_is_decorated_too():
    with torch.device("meta"):
        model = Ranker()
    assert lowered(model) == ["layers.0", "layers.1"]
