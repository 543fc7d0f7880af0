from __future__ import annotations

import pytest
import torch
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.fused_bf16 import FusedBF16Linear
from narrowgate.recipes import Recipe, Rule, apply_fused_bf16, apply_recipe, remove_recipe, resolve


@pytest.fixture
def fp8() -> Recipe:
    return Recipe(name="r", rules=[Rule(layers="interaction.*", all="fp8_e4m3/row")])


def test_it_lowers_the_layers_that_the_recipe_would_and_comes_off_again(tower, fp8, ids):
    before, keys = tower(ids), list(tower.state_dict())
    expected = [layer.name for layer in resolve(fp8, tower).lowered]
    assert apply_fused_bf16(tower, fp8) == expected
    assert [name for name, module in tower.named_modules() if isinstance(module, FusedBF16Linear)] == expected
    assert list(tower.state_dict()) == keys
    torch.testing.assert_close(tower(ids), before, rtol=0.05, atol=0.05)
    with pytest.raises(NarrowgateError, match="already"):
        apply_recipe(tower, fp8)
    remove_recipe(tower)
    assert torch.equal(tower(ids), before)
    apply_recipe(tower, fp8)
    with pytest.raises(NarrowgateError, match="already"):
        apply_fused_bf16(tower, fp8)
