"""Models and recipe texts that the recipe tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from narrowgate.recipes import Recipe, RecipeError
from torch import Tensor, nn

#: The example of the language's contract.
CONTRACT = """\
recipe: gem-fp8
description: FP8 towers; the last quarter keeps BF16 weight gradients
extends: fp8-tensor                  # optional: that recipe's rules come first
defaults: bf16                       # whatever no rule sets
rules:                               # read in order; a later rule overrides only the fields it sets
  - layers: "interaction.**"         # glob, or a list of globs (any), or re:REGEX (full match)
    where: in_features >= 1024 and out_features >= 1024 and type == "Linear"
    fprop: fp8_e4m3/row              # both operands
    dgrad: {grad: fp8_e5m2/row+sr, weight: fp8_e4m3/row, accumulate: fast}   # or accurate, the default
    wgrad: {grad: fp8_e5m2+clip(p=99.99), input: fp8_e4m3}
    when: always                     # or profitable: BF16 where the measured price says it does not pay
  - layers: "interaction.**"
    where: depth >= 0.75
    wgrad: bf16
  - layers: "heads.**"
    all: bf16
shards: {all_gather: fp8_e4m3/128x128, reduce_scatter: bf16}
activations: {save: operand}         # what backward keeps
optimizer: {state: bf16+sr}
backend: native                      # native | torchao | transformer_engine
"""


class Tower(nn.Module):
    """Four square layers under ``interaction``, two heads, an embedding and a norm."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.norm = nn.LayerNorm(width)
        self.interaction = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        for layer in self.interaction:
            x = torch.relu(layer(x)) + x
        return torch.cat([head(x) for head in self.heads], -1)


@pytest.fixture
def tower() -> Tower:
    return Tower()


@pytest.fixture
def make_tower() -> Callable[..., Tower]:
    return Tower


@pytest.fixture
def tower_class() -> type[Tower]:
    return Tower


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(40).remainder(10).reshape(8, 5)


@pytest.fixture
def contract_text() -> str:
    return CONTRACT


@pytest.fixture
def faults() -> Callable[[str], list[str]]:
    """The lines of the error that reading a recipe text ends in."""

    def read(text: str) -> list[str]:
        with pytest.raises(RecipeError) as caught:
            Recipe.from_yaml(text, file="r.yaml")
        return str(caught.value).split("\n")

    return read
