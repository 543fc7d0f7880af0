"""Candidates of a search, and the way through them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from narrowgate.precision.capability import NAMED_DEVICES
from narrowgate.precision.errors import NarrowgateError
from narrowgate.recipes import Recipe, Rule, Shards, load_recipe, resolve
from narrowgate.recipes.descent import Descent
from narrowgate.recipes.globs import parse_pattern
from narrowgate.recipes.search import DENSE, LEVELS, LOW, WGRAD, WIDE, Start, Unit, open_start, patterns_of, total_worth
from torch import nn

H200 = NAMED_DEVICES["h200"]
CPU = NAMED_DEVICES["cpu"]


class Ranker(nn.Module):
    """Wide layers that FP8 makes faster on an H200, beside a narrow one that it makes slower, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(4096, 8192, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(8192, 4096, bias=False) for _ in range(2))
        self.narrow = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(4096, 16, bias=False)


@pytest.fixture
def ranker() -> Ranker:
    import torch

    with torch.device("meta"):
        return Ranker()


def by_prefix(start: Start) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in start.lowered:
        groups.setdefault(name.partition(".")[0], []).append(name)
    return groups


def configs(recipe: Recipe, model: nn.Module, **where: object) -> dict[str, object]:
    return {layer.name: layer.config for layer in resolve(recipe, model, **where).layers}  # type: ignore[arg-type]


def test_what_is_predicted_to_lose_time_is_bf16_from_the_outset(ranker: Ranker) -> None:
    base = load_recipe("fp8-row")
    start = open_start(base, ranker, device=H200, rows=16384)
    prices = {layer.name: layer.price for layer in resolve(base, ranker, device=H200, rows=16384).lowered}
    assert set(start.lowered) == {name for name, price in prices.items() if price.gain_us > 0}  # type: ignore[union-attr]
    assert set(start.dense) == prices.keys() - set(start.lowered)
    assert "up.0" in start.lowered
    assert "narrow" in start.dense


def test_a_weight_gradient_that_does_not_pay_is_bf16_from_the_outset() -> None:
    """The shape of gem-small's ``pffn_kv``: in 128-blocks it loses 4.6 us, and gains with a BF16 weight gradient."""
    model = nn.ModuleDict({"kv": nn.Linear(1024, 8192, bias=False), "up": nn.Linear(4096, 8192, bias=False)})
    rows = {"kv": 2048, "up": 16384}
    base = load_recipe("fp8-block")
    prices = {layer.name: layer.price for layer in resolve(base, model, device=H200, rows=rows).layers}
    assert prices["kv"].gain_us < 0 < prices["up"].gain_us  # type: ignore[union-attr]
    start = open_start(base, model, device=H200, rows=rows)
    assert (start.lowered, start.dense, start.wgrad) == (("kv", "up"), (), ("kv",))
    units = start.units({"kv": ["kv"], "up": ["up"]})
    assert units[0].levels == (LOW, DENSE)
    for setting in itertools.product(*(unit.levels for unit in units)):
        plan = resolve(start.candidate(units, setting), model, device=H200, rows=rows)
        config = {layer.name: layer.config for layer in plan.layers}["kv"]
        assert config.wgrad.high_precision
        assert config.fprop.high_precision == (setting[0] == DENSE)
        totals = plan.totals()
        assert totals is not None
        assert total_worth(units, setting) == pytest.approx(totals.gain_us)


def test_what_only_weight_gradients_lower_has_two_levels(ranker: Ranker) -> None:
    base = Recipe(name="only-wgrad", rules=(Rule(layers="up.*", wgrad="fp8_e4m3"),))
    start = open_start(base, ranker, device=CPU, rows=512, by="flops")
    assert [unit.levels for unit in start.units({"up": start.lowered})] == [(LOW, DENSE)]


def test_without_prices_time_cannot_rank_and_flops_can(ranker: Ranker) -> None:
    with pytest.raises(NarrowgateError, match="no predicted times: no measured rates for cpu"):
        open_start(load_recipe("fp8-row"), ranker, device=CPU, rows=512)
    start = open_start(load_recipe("fp8-row"), ranker, device=CPU, rows=512, by="flops")
    sizes = {"up.0": 4096 * 8192, "up.1": 4096 * 8192, "down.0": 4096 * 8192, "down.1": 4096 * 8192, "narrow": 32 * 32}
    expected = sum(3 * 2 * 512 * size for size in (*sizes.values(), 4096 * 16) if size)
    assert start.dense == ()
    assert start.worth == pytest.approx(expected)


@pytest.mark.parametrize("name", ["fp8-row", "gem-fp8", "fp8-block"])
def test_a_candidates_worth_is_what_its_plan_says(ranker: Ranker, name: str) -> None:
    start = open_start(load_recipe(name), ranker, device=H200, rows=16384)
    units = start.units(by_prefix(start))
    for setting in itertools.product(*(unit.levels for unit in units)):
        plan = resolve(start.candidate(units, setting), ranker, device=H200, rows=16384)
        totals = plan.totals()
        assert totals is not None
        assert total_worth(units, setting) == pytest.approx(totals.gain_us)
        assert total_worth(units, setting) <= start.worth + 1e-9


@pytest.mark.parametrize("name", ["fp8-row", "gem-fp8", "nvfp4", "mxfp4", "fp4-naive", "fp8-delayed"])
def test_every_candidate_is_a_file_that_reads_back_and_resolves_to_its_levels(
    ranker: Ranker, name: str, tmp_path: Path
) -> None:
    base = load_recipe(name)
    start = open_start(base, ranker, device=CPU, rows=512, by="flops")
    units = start.units(by_prefix(start))
    low = configs(base, ranker, device=CPU)
    hashes = set()
    for setting in itertools.product(*(unit.levels for unit in units)):
        recipe = start.candidate(units, setting)
        path = tmp_path / f"{recipe.name}.yaml"
        path.write_text(recipe.to_yaml())
        read = load_recipe(path)
        assert read.hash() == recipe.hash()
        assert recipe.name.endswith(recipe.hash()[:8])
        hashes.add(recipe.hash())
        got = configs(read, ranker, device=CPU)
        at = {layer: level for unit, level in zip(units, setting, strict=True) for layer in unit.layers}
        for layer, config in low.items():
            level = at.get(layer, LOW)
            own = got[layer]
            if level == LOW:
                assert own == config
            elif level == DENSE:
                assert own.high_precision  # type: ignore[attr-defined]
            else:
                assert level in (WIDE, WGRAD)
                assert own.wgrad.high_precision or level == WIDE  # type: ignore[attr-defined]
                assert not own.fprop.high_precision  # type: ignore[attr-defined]
                assert all(g.high_precision or g.first.fmt.element.bits == 8 for _, g in own.gemms())  # type: ignore[attr-defined]
    assert len(hashes) == len(list(itertools.product(*(unit.levels for unit in units))))


def test_only_formats_below_eight_bits_have_a_wider_level(ranker: Ranker) -> None:
    for name, levels in (("nvfp4", {LOW, WIDE, WGRAD, DENSE}), ("fp8-row", {LOW, WGRAD, DENSE})):
        start = open_start(load_recipe(name), ranker, device=CPU, rows=512, by="flops")
        assert {level for own in start.units(by_prefix(start)) for level in own.levels} <= levels
        assert (WIDE in start.plans) == (WIDE in levels)


def test_codes_that_travel_leave_no_wider_level_and_still_resolve(ranker: Ranker) -> None:
    rule = Rule(layers="**", where="in_features >= 1024 and out_features >= 1024", all="nvfp4/16x16")
    base = Recipe(name="sent", rules=(rule,), shards=Shards(all_gather="nvfp4/16x16"))
    start = open_start(base, ranker, device=CPU, rows=512, by="flops")
    units = start.units(by_prefix(start))
    assert all(WIDE not in unit.levels for unit in units)
    resolve(start.candidate(units, tuple(WGRAD for _ in units)), ranker, device=CPU)


def test_tied_layers_are_decided_together() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["c"].weight = model["a"].weight
    start = open_start(load_recipe("fp8-tensor"), model, device=CPU, rows=8, by="flops")
    units = start.units({"first": ["a"], "second": ["b", "c"]})
    assert [unit.clusters for unit in units] == [(("a", "c"),), (("b",),)]
    plan = resolve(start.candidate(units, (DENSE, LOW)), model, device=CPU)
    assert [layer.name for layer in plan.lowered] == ["b"]


def test_candidates_are_the_same_each_time(ranker: Ranker) -> None:
    found = []
    for _ in range(2):
        start = open_start(load_recipe("gem-fp8"), ranker, device=H200, rows=16384)
        units = start.units(by_prefix(start))
        found.append([start.candidate(units, s) for s in itertools.product(*(u.levels for u in units))])
    assert found[0] == found[1]
    assert [recipe.to_yaml() for recipe in found[0]] == [recipe.to_yaml() for recipe in found[1]]


def test_a_group_for_every_lowered_layer_is_asked_for(ranker: Ranker) -> None:
    start = open_start(load_recipe("fp8-row"), ranker, device=H200, rows=16384)
    with pytest.raises(NarrowgateError, match="found none for layer"):
        start.units({"up": ["up.0"]})


def test_patterns_match_what_they_name_and_nothing_that_matters() -> None:
    rng = random.Random(0)
    for _ in range(300):
        names = sorted({".".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 14))})
        wanted = [name for name in names if rng.random() < 0.5] or names[:1]
        neutral = {name for name in names if rng.random() < 0.3}
        patterns = [parse_pattern(text) for text in patterns_of(wanted, names, neutral)]
        hit = {name for name in names if any(pattern.matches(name) for pattern in patterns)}
        assert set(wanted) <= hit <= set(wanted) | neutral
        assert all(any(pattern.matches(name) for name in wanted) for pattern in patterns)


def test_patterns_of_names_that_are_no_globs() -> None:
    assert patterns_of([""], [""]) == ("re:",)
    (pattern,) = patterns_of(["a*"], ["a*", "ab"])
    assert [parse_pattern(pattern).matches(name) for name in ("a*", "ab")] == [True, False]
    assert patterns_of(["x.a", "x.b"], ["x.a", "x.b", "y"]) == ("x.**",)


def unit(name: str, layers: int, worth: float = 1.0, levels: tuple[str, ...] = (LOW, WGRAD, DENSE)) -> Unit:
    parts = {LOW: worth, WIDE: worth * 0.8, WGRAD: worth * 0.6, DENSE: 0.0}
    clusters = tuple((f"{name}.{i}",) for i in range(layers))
    # Layers differ in worth, so that halves are told apart.
    return Unit(
        name, clusters, {level: tuple(parts[level] * (1 + 0.01 * i) for i in range(layers)) for level in levels}
    )


def by_layer(descent: Descent, setting: tuple[str, ...]) -> dict[str, str]:
    return {name: level for u, level in zip(descent.units, setting, strict=True) for name in u.layers}


@pytest.mark.parametrize("seed", range(20))
def test_while_nothing_passes_settings_only_get_safer_and_end(seed: int) -> None:
    rng = random.Random(seed)
    levels = [(LOW, DENSE), (LOW, WGRAD, DENSE), (LOW, WIDE, WGRAD, DENSE)]
    descent = Descent([unit(f"u{i}", rng.randint(1, 4), rng.random() + 0.1, rng.choice(levels)) for i in range(6)])
    before: dict[str, str] | None = None
    for _ in range(100):
        if descent.wants_risks:
            descent.tell_risks({u.name: {"ne": rng.uniform(-1, 3)} for u in descent.units}, rng.random())
        setting = descent.propose()
        if setting is None:
            break
        now = by_layer(descent, setting)
        assert set(now.values()) != {DENSE}, "that is the baseline"
        if before is not None:
            assert now != before
            assert all(LEVELS.index(now[name]) >= LEVELS.index(before[name]) for name in now)
        assert not descent.learn(setting, {"ne": rng.uniform(0.6, 12)})
        before = now
    else:
        pytest.fail("it never ends")
    assert descent.best is None


@pytest.mark.parametrize("sensitive", range(8))
def test_one_sensitive_layer_of_a_group_alone_stays_bf16(sensitive: int) -> None:
    """The oracle: a layer costs 4 margins, and 2.8 with a BF16 weight gradient; nothing else costs anything."""
    descent = Descent([unit("a", 4), unit("b", 8), unit("c", 4)])

    def lost(setting: tuple[str, ...]) -> dict[str, float]:
        return {"ne": {LOW: 4.0, WGRAD: 2.8, DENSE: 0.0}[by_layer(descent, setting)[f"b.{sensitive}"]]}

    seen = []
    for _ in range(60):
        if descent.wants_risks:
            descent.tell_risks({u.name: {"ne": 4.0 if u.name == "b" else 0.0} for u in descent.units}, 0.3)
        setting = descent.propose()
        if setting is None:
            break
        seen.append(by_layer(descent, setting))
        descent.learn(setting, lost(setting))
    assert descent.best is not None
    final = by_layer(descent, descent.best)
    assert {name for name, level in final.items() if level != LOW} == {f"b.{sensitive}"}
    assert final[f"b.{sensitive}"] == DENSE
    assert len({tuple(sorted(s.items())) for s in seen}) == len(seen) <= 20


def test_moves_that_save_most_for_what_they_give_up_come_first() -> None:
    descent = Descent([unit("cheap", 1, 1.0, (LOW, DENSE)), unit("dear", 1, 10.0, (LOW, DENSE)), unit("calm", 1)])
    descent.learn((LOW, LOW, LOW), {"ne": 2.0, "auc": 0.1})
    assert descent.wants_risks
    descent.tell_risks({"cheap": {"ne": 1.6}, "dear": {"ne": 1.6}, "calm": {"auc": 0.1}})
    assert descent.propose() == (DENSE, LOW, LOW)


def test_where_no_unit_is_known_to_cost_anything_the_least_is_given_up_and_measured() -> None:
    descent = Descent([unit("dear", 1, 10.0), unit("cheap", 1, 1.0), unit("fair", 1, 5.0)])
    descent.learn((LOW, LOW, LOW), {"ne": 2.0})
    descent.tell_risks({u.name: {"ne": 0.0} for u in descent.units})
    assert descent.propose() == (LOW, WGRAD, LOW)


def test_a_start_that_passes_is_the_best_there_is() -> None:
    descent = Descent([unit("a", 4), unit("b", 4)])
    setting = descent.propose()
    assert setting == (LOW, LOW)
    assert descent.learn(setting, {"ne": 0.4})
    assert not descent.wants_risks
    assert descent.propose() is None


def test_a_probe_that_passes_is_gone_on_from() -> None:
    descent = Descent([unit("a", 1), unit("b", 1)])
    descent.learn((LOW, LOW), {"ne": 3.0})
    descent.learn((DENSE, LOW), {"ne": 0.1}, probe=True)
    assert descent.best == (DENSE, LOW)
    # Only its BF16 weight gradient is left to try.
    assert descent.propose() == (WGRAD, LOW)
    descent.learn((WGRAD, LOW), {"ne": 1.0})
    assert descent.propose() is None
