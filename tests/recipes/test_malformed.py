"""Recipes from anywhere: whatever the bytes are, the answer is a recipe or a readable error."""

from __future__ import annotations

import random

import pytest
from narrowgate.recipes import Recipe, RecipeError, load_recipe

_JUNK = [
    "\t", "\0", "\x01", "{", "}", "[", "]", ":", "- ", "&a ", "*a", "!!python/object:os.system ", "|", ">", '"', "'",
    "#", "\n", "é", "9" * 30, "null", "true", "~", "%YAML 1.1\n", "---\n", "...", "<<: ", "? ", "🙂", "\x85", "\u2028",
    "\ufeff", "\\ud800", "re:(", "**", "((", "fp8", "+", "/", "clip(p=", "hadamard(0)", "1e999", "where: ", "-" * 50,
]  # fmt: skip


def _mutant(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.randint(1, 40))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:at] + rng.choice(_JUNK) + text[at:]
        elif kind == 1:
            text = text[:at] + text[end:]
        elif kind == 2:
            to = rng.randrange(len(text) + 1)
            text = text[:to] + text[at:end] + text[to:]
        elif kind == 3:
            lines = text.split("\n")
            lines.pop(rng.randrange(len(lines)))
            text = "\n".join(lines)
        else:
            text = text[:at]
    return text


def _wrong_values() -> list[str]:
    """Each field of the language with each kind of wrong value."""
    values = [
        "3",
        "-1.5",
        "true",
        "[]",
        "[1]",
        "{}",
        "{a: b}",
        "null",
        "''",
        "'\\x'",
        "9" * 400,
        "[[[[a]]]]",
        "fp8",
        "🙂",
    ]
    rule = "recipe: x\nrules:\n- layers: '**'\n  all: bf16\n  {}: {}\n"
    path = "recipe: x\nrules:\n- layers: '**'\n  {}: {{{}: {}}}\n"
    top = "recipe: x\n{}: {}\n"
    texts = [rule.format(f, v) for f in ("layers", "where", "optional", "fprop", "when", "colour") for v in values]
    texts += [
        path.format(p, f, v) for p in ("fprop", "wgrad") for f in ("input", "accumulate", "weight") for v in values
    ]
    keys = ("recipe", "description", "extends", "defaults", "rules", "shards", "activations", "optimizer", "backend")
    return texts + [top.format(f, v) for f in keys for v in values]


@pytest.fixture(scope="module")
def malformed(request) -> list[bytes]:
    rng = random.Random(20261129)
    from pathlib import Path

    contract = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8").split('"""\\\n')[1].split('"""')[0]
    mutants = [_mutant(contract, rng).encode() for _ in range(300)]
    noise = [rng.randbytes(rng.randrange(1, 200)) for _ in range(60)]
    return mutants + noise + [text.encode() for text in _wrong_values()]


def test_no_malformed_file_gives_a_traceback(malformed, tmp_path):
    refused = 0
    for number, data in enumerate(malformed):
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(data)
        try:
            recipe = load_recipe(path)
        except RecipeError as error:
            refused += 1
            for diagnostic in error.diagnostics:
                line = str(diagnostic)
                assert line.startswith((str(path), "<builtin>")), line
                assert line.isprintable(), line
                assert diagnostic.github().startswith("::error file=")
        else:
            recipe.hash()
            assert Recipe.from_yaml(recipe.to_yaml()).hash() == recipe.hash()
    assert refused >= 300
