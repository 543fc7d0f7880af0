from __future__ import annotations

import random
import re
import time

import pytest
from narrowgate.recipes.errors import ExpressionError
from narrowgate.recipes.globs import parse_pattern


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a.*", ["a.b", "a.0"], ["a", "a.b.c", "b.a", ""]),
        ("a.**", ["a", "a.b", "a.b.c"], ["ab", "b.a", ""]),
        ("**", ["", "a", "a.b"], []),
        ("**.b", ["b", "a.b", "a.c.b"], ["ab", "b.a"]),
        ("a.**.b", ["a.b", "a.x.b", "a.x.y.b"], ["a", "ab", "a.b.c"]),
        ("**.b.**", ["b", "a.b", "b.c", "a.b.c"], ["abc", "a.bc"]),
        ("layer*.q_*", ["layer0.q_proj", "layer.q_"], ["layer0.k_proj", "layer0.x.q_a"]),
        ("a.*.c", ["a.b.c"], ["a.c", "a.b.b.c"]),
        ("lm_head", ["lm_head"], ["lm_heads", "x.lm_head", "lmxhead"]),
        ("a.b+c", ["a.b+c"], ["a.bbc"]),
        (r"re:a\.[0-4]\..*", ["a.0.x", "a.4.y.z"], ["a.5.x", "xa.0.x", "a.0"]),
        ("re:", [""], ["a"]),
    ],
)
def test_a_pattern_matches_these_names_and_not_those(pattern, matching, others):
    parsed = parse_pattern(pattern)
    assert [name for name in matching if not parsed.matches(name)] == []
    assert [name for name in others if parsed.matches(name)] == []


def test_globs_agree_with_a_naive_matcher():
    def naive(pattern: list[str], name: list[str]) -> bool:
        if not pattern:
            return not name
        head, *tail = pattern
        if head == "**":
            return any(naive(tail, name[i:]) for i in range(len(name) + 1))
        level = re.escape(head).replace(r"\*", "[^.]*")
        return bool(name) and re.fullmatch(level, name[0]) is not None and naive(tail, name[1:])

    rng = random.Random(0)
    levels = ["**", "*", "a", "b", "a*", "*b", "a*b", "*a*b*", "ab", "*a*a*"]
    hits = 0
    for _ in range(5000):
        pattern = ".".join(rng.choice(levels) for _ in range(rng.randint(1, 5)))
        name = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 5))]
        expected = naive(pattern.split("."), name)
        hits += expected
        assert parse_pattern(pattern).matches(".".join(name)) == expected, (pattern, name)
    assert hits > 100


def test_a_hostile_glob_stays_fast():
    start = time.process_time()
    assert not parse_pattern("*a" * 200 + "b").matches("a" * 2000)
    assert not parse_pattern(".".join(["**", "*a"] * 60) + ".b").matches(".".join(["a"] * 200))
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("pattern", "offset", "message"),
    [
        ("", 0, "empty pattern"),
        ("a..b", 2, "empty level"),
        ("a.", 2, "empty level"),
        (".a", 0, "empty level"),
        ("a.b**", 3, "expected '\\*\\*' alone"),
        ("re:a(", 4, "expected a regular expression"),
        ("a" * 600, 0, "expected at most"),
    ],
)
def test_a_bad_pattern_names_the_place(pattern, offset, message):
    with pytest.raises(ExpressionError, match=message) as caught:
        parse_pattern(pattern)
    assert caught.value.offset == offset
