from __future__ import annotations

import numpy as np
import pytest
from narrowgate.recipes.errors import ExpressionError
from narrowgate.recipes.where import parse_where


@pytest.fixture
def columns():
    return {
        "in_features": np.array([16.0, 1024.0, np.nan]),
        "out_features": np.array([1.0, 2.0, 3.0]),
        "params": np.array([16.0, 2048.0, 5.0]),
        "index": np.array([0.0, 1.0, 2.0]),
        "depth": np.array([0.0, 0.5, 1.0]),
        "type": np.array(["Linear", "LoRA", None], dtype=object),
        "name": np.array(["a.gate", "mlp.b", "c"], dtype=object),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("in_features >= 1024", [False, True, False]),
        ("in_features < 9999", [True, True, False]),
        ("in_features != 16", [False, True, False]),  # missing: false, even for !=
        ("not in_features != 16", [True, False, True]),
        ("16 <= in_features < 1000", [True, False, False]),
        ('type == "Linear"', [True, False, False]),
        ("type != 'Linear'", [False, True, False]),
        ('type in ("Linear", "LoRA")', [True, True, False]),
        ('type not in ["Linear"]', [False, True, False]),
        ('"gate" in name or depth == 1', [True, False, True]),
        ('"gate" not in name', [False, True, True]),
        ("params == in_features * out_features", [True, True, False]),
        ("in_features % 16 == 0 and out_features // 2 == 1", [False, True, False]),
        ("1 / index > 0", [False, True, True]),  # division by zero counts as missing
        ("-depth <= -0.5", [False, True, True]),
        ("index in (0, 2)", [True, False, True]),
        ("depth > 0.2 and depth < 0.7 or index == 0", [True, True, False]),
        ("name == type", [False, False, False]),
        ("  depth\n >= 0.5 ", [False, True, True]),
        ("1 == 1", True),
    ],
)
def test_a_condition_selects(text, expected, columns):
    assert np.array_equal(parse_where(text)(columns), expected)


@pytest.mark.parametrize(
    ("text", "offset", "message"),
    [
        ("", 0, "empty condition"),
        ("in_feature > 1", 0, "did you mean 'in_features'"),
        ('"ü" == nam', 7, "did you mean 'name'"),
        ("depth", 0, "found depth .a number., expected a comparison"),
        ('depth > "x"', 8, "expected two numbers or two texts"),
        ('name + "x" == name', 0, "found name .a text., expected a number"),
        ('name * 9 == "a"', 0, "expected a number"),
        ("2 ** 99 > 1", 0, "operator '\\*\\*'"),
        ("index << 3 > 1", 0, "expected one of"),
        ("print(1)", 0, "a function call"),
        ("(1).__class__ == 1", 0, "an attribute access"),
        ("name[0] == 'a'", 0, "a subscript"),
        ("f'{name}' == 'a'", 0, "an f-string"),
        ("lambda: 1", 0, "a lambda"),
        ("1 if depth else 2", 0, "an if expression"),
        ("depth > 1j", 8, "expected a number or a quoted text"),
        ("True", 0, "expected a number or a quoted text"),
        ("name > 'a'", 0, "expected == or !="),
        ("1 is 1", 0, "operator 'is'"),
        ("depth > > 1", 8, "invalid syntax"),
        ("depth = 1", None, "expected a condition"),
        ("import os", 0, "expected a condition"),
        ("depth and index > 1", 0, "expected a comparison"),
        ("depth in name", 9, "expected text in text"),
        ("9" * 400 + " > 1", 0, "too large"),
        ("(" * 300, None, "found"),
        ("-" * 400 + "1 > 0", 0, "more than"),
        ("x" * 600, 0, "expected at most"),
        ("depth > \0", None, "condition"),
        ("depth > \ud800", 0, "cannot be parsed"),
    ],
)
def test_a_bad_condition_names_the_place(text, offset, message):
    with pytest.raises(ExpressionError, match=message) as caught:
        parse_where(text)
    assert offset is None or caught.value.offset == offset


def test_spellings_of_one_condition_share_a_canonical_form():
    spellings = ("depth>=0.5 and type=='Linear'", '(depth >= .5)  and (type == "Linear")')
    assert len({parse_where(text).canonical for text in spellings}) == 1
    assert parse_where("depth >= 0.5").canonical != parse_where("depth > 0.5").canonical
