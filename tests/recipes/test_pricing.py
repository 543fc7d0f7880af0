"""Prices: the predicted step time of a layer, what a plan makes of it, and ``when: profitable``."""

from __future__ import annotations

import itertools
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowgate.precision import quantize
from narrowgate.precision.capability import CPU, NAMED_DEVICES
from narrowgate.precision.config import GemmConfig, LinearConfig
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.operands import shared
from narrowgate.precision.spec import Spec
from narrowgate.recipes import (
    Recipe,
    RecipeError,
    Rule,
    apply_recipe,
    load_rates,
    measure_rows,
    rates_schema,
    remove_recipe,
    resolve,
    validate_file,
)
from narrowgate.recipes.pricing import LayerPrice, Unpriced, cast_bytes, price_layer, shares_codes
from narrowgate.recipes.rates import VARIANTS, Rates, device_rates, shipped_rates, variant_of
from scipy.stats import spearmanr
from torch import nn

H200 = NAMED_DEVICES["h200"]
RATES = shipped_rates()[H200.name]


def all_paths(text: str, accumulate: str = "accurate") -> LinearConfig:
    gemm = GemmConfig(Spec.parse(text), Spec.parse(text), accumulate)
    return LinearConfig(gemm, gemm, gemm)


def price(config: LinearConfig, m: int, k: int, n: int, native: dict[str, bool] | None = None) -> LayerPrice:
    found = price_layer(config, m, k, n, RATES, native)
    assert isinstance(found, LayerPrice)
    return found


def rates_file(tmp_path, **changes):
    def gemm(m, k, n, variant, tflops):
        case, arm = f"{m}x{k}x{n}", "bf16" if variant == "bf16" else "narrowgate"
        return {"case": case, "arm": arm, "variant": variant, "m": m, "k": k, "n": n, "tflops": tflops}

    content = {
        "name": "gemm_rates",
        "date": "2026-01-01",
        "command": "by hand",
        "machine": "Test device",
        "versions": {},
        "rows": [
            gemm(1024, 1024, 1024, "bf16", 400.0),
            gemm(1024, 1024, 1024, "fp8_tensor/accurate", 600.0),
            gemm(8192, 8192, 8192, "bf16", 800.0),
            gemm(8192, 8192, 8192, "fp8_tensor/accurate", 1600.0),
            {"case": "copy", "arm": "bf16", "variant": "copy", "tb_per_s": 4.0},
            {"case": "cast", "arm": "narrowgate", "variant": "cast", "tb_per_s": 2.0},
        ],
    }
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({**content, **changes}))
    return path


# Rates between measured shapes.


def predicted(rates: Rates, variant: str, *shape: int) -> float:
    tflops = rates.tflops(variant, *shape)
    assert tflops is not None
    return tflops


def test_a_measured_shape_has_its_measured_rate():
    assert set(RATES.gemms) == set(VARIANTS)
    for variant, shapes in RATES.gemms.items():
        for shape, tflops in shapes.items():
            assert RATES.tflops(variant, *shape) == pytest.approx(tflops)
            assert RATES.within(*shape)


def test_a_rate_lies_between_its_measured_neighbours_and_is_continuous(tmp_path):
    rates = load_rates(rates_file(tmp_path))
    path = [predicted(rates, "bf16", *[round(2**e)] * 3) for e in (9, 10, 10.5, 11, 11.5, 12, 12.5, 13, 14)]
    assert path[1:-1] == sorted(path[1:-1])
    assert path[1] == pytest.approx(400.0)
    assert all(400.0 - 1e-9 <= tflops <= 800.0 + 1e-9 for tflops in path)
    near = predicted(rates, "bf16", 1025, 1024, 1024)
    assert near == pytest.approx(400.0, rel=1e-3)
    middle = predicted(rates, "fp8_tensor/accurate", *[2896] * 3) / predicted(rates, "bf16", *[2896] * 3)
    assert 1.5 < middle < 2.0
    assert rates.tflops("fp8_row/fast", 1024, 1024, 1024) is None
    assert not rates.within(512, 1024, 1024)


def test_leaving_a_shape_out_predicts_it_within_the_documented_error():
    from dataclasses import replace

    errors = []
    for shape in RATES.gemms["bf16"]:
        gemms = {v: {s: r for s, r in rows.items() if s != shape} for v, rows in RATES.gemms.items() if len(rows) > 1}
        without = replace(RATES, gemms=gemms)
        errors += [abs(predicted(without, v, *shape) / RATES.gemms[v][shape] - 1) for v in gemms]
    assert sorted(errors)[len(errors) // 2] < 0.055
    assert max(errors) < 0.6


def test_prices_tell_the_losers_that_a_gate_measured_in_a_whole_model():
    """What docs/pricing.md says of them; the report is of another run than the rates."""
    path = Path(__file__).parents[2] / "benchmarks" / "reports" / "gem-fp8-rows_gem-small_ml-1m" / "report.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    layers = {layer["name"]: layer["paths"] for layer in report["recipe"]["plan"]["layers"]}
    operands = {"fprop": ("input", "weight"), "dgrad": ("grad", "weight"), "wgrad": ("grad", "input")}
    foreseen, measured = [], []
    for module in report["evidence"]["module"]["results"]["modules"]:
        paths = layers[module["layers"][0]]
        gemms = {}
        for path, pair in operands.items():
            first, second = (Spec.parse(paths[path][operand]) for operand in pair)
            gemms[path] = GemmConfig(first, second, paths[path]["accumulate"])
        foreseen.append(price(LinearConfig(**gemms), *module["mkn"][0]).ratio)
        measured.append(module["baseline_ms"] / module["candidate_ms"])
    apart = sorted(max(a / b, b / a) - 1 for a, b in zip(foreseen, measured, strict=True))
    assert len(apart) == 17
    assert all(ratio < 1 for ratio in measured)
    assert sum(ratio < 1 for ratio in foreseen) == 14
    assert max(foreseen) < 1.17
    assert apart[8] < 0.2
    assert apart[-1] < 0.35
    order: Any = spearmanr(foreseen, measured)
    assert order.statistic > 0.75


# Bytes of casts.


@pytest.mark.parametrize(
    ("spec", "source", "expected"),
    [
        ("bf16", 2, 0),
        ("bf16", 4, 6),
        ("bf16+sr", 2, 4),
        ("fp8_e4m3", 2, 2 + 2 + 1),
        ("fp8_e4m3", 4, 4 + 4 + 1),
        ("fp8_e4m3+delayed(16)", 2, 2 + 1),
        ("fp8_e4m3/row", 2, 2 + 2 + 1),
        ("fp8_e4m3/1x128", 2, 2 + 1),
        ("fp8_e4m3/128x128", 4, 4 + 1),
        ("fp8_e5m2+clip(rms=8)", 2, 2 + 2 + 1),
        ("fp8_e5m2/1x128+clip(rms=8)", 2, 2 + 2 + 1),
        ("nvfp4+clip(rms=8)", 2, 2 + 2 + 2 + 0.5),
        ("mxfp8/32x32", 2, 2 + 1),
        ("mxfp4", 2, 2 + 0.5),
        ("nvfp4", 2, 2 + 2 + 0.5),
        ("mxfp4+hadamard(16)", 2, 2 + 4 + 4 + 0.5),
    ],
)
def test_a_cast_moves_what_its_scale_makes_it_read(spec, source, expected):
    assert cast_bytes(Spec.parse(spec), 1000, source) == expected * 1000


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        *((text, text) for text in ("bf16", "fp8_e4m3", "fp8_e4m3/row", "fp8_e4m3/1x128", "fp8_e4m3/128x128")),
        *((text, text) for text in ("mxfp8", "mxfp8/32x32", "nvfp4/16x16", "fp4_e2m1", "fp8_e4m3+sr")),
        ("fp8_e4m3+hadamard(16)", "fp8_e4m3+hadamard(16)"),
        ("fp8_e4m3", "fp8_e5m2"),
    ],
)
def test_prices_share_codes_exactly_where_the_layer_does(spec, wanted):
    first, second = Spec.parse(spec), Spec.parse(wanted)
    x = torch.randn(128, 128)
    operand = x if first.high_precision else quantize(x, first, dim=1, seed=0)
    assert shares_codes(first, second) == (shared(operand, first, second) is not None)


def test_casts_of_a_layer_add_up_operand_by_operand():
    m, k, n = 256, 512, 1024
    x, w, g = m * k, n * k, m * n
    paths = price(all_paths("fp8_e4m3"), m, k, n).paths
    cast, copy = RATES.cast_tb_s * 1e6, RATES.copy_tb_s * 1e6
    # A tensor scale: amax, cast, codes for the first use; the kernel writes a byte more for the second. dW is FP32.
    assert paths["fprop"].cast_us == pytest.approx((5 * x + 9 * w) / cast)
    assert paths["dgrad"].cast_us == pytest.approx((5 * g + w) / cast)
    assert paths["wgrad"].cast_us == pytest.approx((g + x) / cast + 2 * w / copy)
    # A scale a row does not survive the transpose, but the same kernel makes both operands in the same reads.
    rows = price(all_paths("fp8_e4m3/row"), m, k, n).paths
    assert [rows[path].cast_us for path in paths] == [paths[path].cast_us for path in paths]
    # MX codes come from no such kernel: each use is quantized from the tensor, and emulated besides.
    mx = price(all_paths("mxfp8"), m, k, n, native=dict.fromkeys(paths, False)).paths
    assert mx["dgrad"].cast_us == pytest.approx(((2 + 1 + 3) * g + (4 + 1 + 3) * w) / cast)


# Prices.


def test_bf16_costs_what_it_costs():
    for shape in ((4096, 1024, 1024), (100, 13, 1)):
        found = price(LinearConfig(), *shape)
        assert found.us == pytest.approx(found.bf16_us)
        assert found.gain_us == pytest.approx(0)
        assert not found.pays


def test_large_layers_pay_and_small_ones_lose():
    config = all_paths("fp8_e4m3", "fast")
    ratios = [price(config, 4096, size, size).ratio for size in (64, 256, 1024, 4096, 8192)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 1 < ratios[-1] < 2
    assert price(config, 16384, 4096, 4096).pays


@pytest.mark.parametrize(("case", "size", "hidden"), [("d2048", 2048, 8192), ("d4096", 4096, 8192)])
def test_the_prediction_for_mlp_blocks_is_of_the_size_of_what_was_measured(case, size, hidden):
    """Dynamic tensor scales on four SwiGLU blocks; prices know of no fusion, so they promise less than was saved."""
    rows = json.loads((Path(__file__).parents[2] / "benchmarks" / "mlp_blocks.json").read_text())["rows"]
    ms = {(row["case"], row["arm"], row["variant"]): row["ms"] for row in rows}
    saved = ms[case, "bf16", "bf16"] - ms[case, "narrowgate", "current"]
    config = all_paths("fp8_e4m3", "fast")
    shapes = ((size, hidden), (size, hidden), (hidden, size))
    gain = 4 * sum(price(config, 16384, k, n).gain_us for k, n in shapes) / 1e3
    assert 0.5 * saved < gain < 1.1 * saved


def test_an_emulated_path_never_pays():
    config = all_paths("fp8_e4m3", "fast")
    native = price(config, 16384, 8192, 8192)
    emulated = price(config, 16384, 8192, 8192, native=dict.fromkeys(("fprop", "dgrad", "wgrad"), False))
    assert native.pays
    assert not emulated.pays
    assert emulated.paths["fprop"].gemm_us > native.paths["fprop"].gemm_us


def test_padding_costs_a_copy():
    config = all_paths("fp8_e4m3")
    assert price(config, 4096, 1000, 1024).cast_us > price(config, 4096, 1008, 1024).cast_us


def test_an_unmeasured_pair_has_no_price(tmp_path):
    rates = load_rates(rates_file(tmp_path))
    found = price_layer(all_paths("fp8_e4m3/row"), 64, 64, 64, rates)
    assert isinstance(found, Unpriced)
    assert "fp8_row/accurate" in found.reason


def test_every_pair_that_hopper_multiplies_has_a_measured_variant():
    from narrowgate.precision.capability import gemm_support

    specs = [Spec.parse(f"{f}/{g}") for f in ("fp8_e4m3", "fp8_e5m2") for g in ("tensor", "row", "1x128", "128x128")]
    for first, second, accumulate in itertools.product(specs, specs, ("fast", "accurate")):
        gemm = GemmConfig(first, second, accumulate)
        if gemm_support(gemm, H200).native:
            assert variant_of(gemm) in RATES.gemms


# Files of rates.


def test_a_device_without_measurements_has_no_rates(tower):
    for name in ("h100", "b200"):
        device = NAMED_DEVICES[name]
        assert device_rates(device) is None
        plan = resolve("fp4-naive", tower, device=device, rows=64)
        assert f"no prices: no measured rates for {device.name} (measured: NVIDIA H200)" in plan.to_text()
        assert plan.to_dict()["totals"] is None


def test_the_users_own_file_prices_any_device(tower, tmp_path):
    plan = resolve("fp4-naive", tower, device=NAMED_DEVICES["b200"], rows=64, rates=rates_file(tmp_path))
    assert "rates measured on Test device, 2026-01-01" in plan.to_text()
    totals = plan.totals()
    assert totals is not None
    assert totals.layers == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "casts"}, "rates.json: name: Input should be 'gemm_rates'"),
        ({"rows": []}, "rates.json: rows: found none of variant copy, expected one"),
        ({"rows": [{"case": "a"}]}, "rates.json: rows.0"),
        ({"machine": None}, "rates.json: machine"),
    ],
)
def test_a_bad_file_of_rates_is_one_line_with_its_place(tmp_path, changes, message):
    with pytest.raises(NarrowgateError) as caught:
        load_rates(rates_file(tmp_path, **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(NarrowgateError, match="expected a file of measured rates"):
        load_rates(tmp_path / "none.json")


def test_the_shipped_files_fit_the_schema():
    jsonschema = pytest.importorskip("jsonschema")
    for entry in (resources.files("narrowgate.recipes") / "devices").iterdir():
        if entry.name.endswith(".json"):
            jsonschema.validate(json.loads(entry.read_text()), rates_schema())


# Plans.

PROFITABLE = Recipe(
    name="p",
    rules=[
        Rule(layers="**", where="in_features % 16 == 0 and out_features % 16 == 0", all="fp8_e4m3", when="profitable")
    ],
)


class Mixed(nn.Module):
    """A layer that pays at 16384 rows, one that does not, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(4096, 4096, bias=False)
        self.small = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 64)

    def forward(self, x):
        return self.small(x)


@pytest.fixture
def mixed():
    with torch.device("meta"):
        return Mixed()


def test_a_profitable_layer_that_does_not_pay_stays_in_bf16_and_the_plan_says_why(mixed):
    plan = resolve(PROFITABLE, mixed, device=H200, rows={"large": 16384, "small": 4096, "unused": 0})
    assert [layer.name for layer in plan.lowered] == ["large"]
    small = plan.layers[1]
    assert small.kept is not None
    assert small.kept.startswith("predicted ")
    assert small.kept.endswith(" us slower at M=4096")
    assert plan.layers[2].kept == "the batch never reached it"
    assert plan.native
    text = plan.to_text()
    assert f"kept in bf16: small: {small.kept}" in text
    assert "(profitable)" in text
    assert plan.to_dict()["layers"][1]["kept"] == small.kept
    totals = plan.totals()
    large = plan.layers[0].price
    assert isinstance(large, LayerPrice)
    assert totals is not None
    assert totals.gain_us == pytest.approx(large.gain_us)
    assert json.loads(plan.to_json())["totals"]["ratio"] == pytest.approx(totals.ratio)


def test_a_layer_that_loses_time_is_warned_about(mixed):
    recipe = Recipe(name="r", rules=[Rule(layers=["large", "small"], all="fp8_e4m3")])
    plan = resolve(recipe, mixed, device=H200, rows=16384)
    assert next(str(w) for w in plan.warnings if "lose time" in w.message).startswith(
        "<python>: warning: rules[0].fprop.input: layer 'small' is predicted to lose time: "
    )
    assert len(plan.warnings) == 1


def test_shares_of_flops_follow_the_rows(mixed):
    recipe = Recipe(name="r", rules=[Rule(layers="large", all="fp8_e4m3")])
    alone = resolve(recipe, mixed, device=H200, rows={"large": 16, "small": 0, "unused": 0})
    assert alone.flops_share() == {"fp8_e4m3": 1.0, "bf16": 0.0}
    assert resolve(recipe, mixed, device=H200, rows={"large": 16}).weighted is False


def test_tied_weights_are_decided_together():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to("meta")
    model[1].weight = model[0].weight
    plan = resolve(PROFITABLE, model, device=H200, rows={"0": 64, "1": 0})
    assert not plan.lowered
    forced = Recipe(name="f", extends=None, rules=[*PROFITABLE.rules, Rule(layers="0", when="always")])
    assert len(resolve(forced, model, device=H200, rows=64).lowered) == 2


def test_applying_without_rows_or_rates_says_what_is_missing(tower):
    recipe = Recipe.from_yaml(
        "recipe: r\nrules:\n- {layers: 'interaction.*', all: fp8_e4m3, when: profitable}\n", file="r.yaml"
    )
    assert validate_file("fp8-row").ok
    with pytest.raises(RecipeError) as caught:
        apply_recipe(tower, recipe)
    assert str(caught.value).startswith("r.yaml:3:50: rules[0].when: profitable needs the rows of each layer: give ")
    assert "measured rates, and cpu has none (measured: NVIDIA H200)" in str(caught.value)
    with pytest.raises(RecipeError, match="needs the rows of each layer") as caught:
        apply_recipe(tower, recipe, device=H200)
    assert "measured rates" not in str(caught.value)
    with pytest.raises(RecipeError, match=r"a price for layer 'interaction\.1': its rows are not given"):
        apply_recipe(tower, recipe, device=H200, rows={"interaction.0": 4})
    with pytest.raises(RecipeError, match="has none for torchao"):
        apply_recipe(tower, recipe, backend="torchao", rows=4, device=H200)


def test_applying_decides_by_rows_given_or_seen(tower, ids):
    recipe = Recipe(name="r", rules=[Rule(layers="interaction.*", all="fp8_e4m3", when="profitable")])
    before = torch.get_rng_state()
    plan = apply_recipe(tower, recipe, device=H200, sample=lambda: tower(ids))
    assert torch.equal(before, torch.get_rng_state())
    assert plan.rows == measure_rows(tower, lambda: tower(ids)) == {layer.name: 40 for layer in plan.layers}
    assert plan.lowered == ()
    remove_recipe(tower)
    with pytest.raises(NarrowgateError, match="both rows and sample"):
        apply_recipe(tower, recipe, rows=1, sample=lambda: None)


def test_a_layer_that_pays_is_lowered():
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False))
    plan = apply_recipe(model, PROFITABLE, device=H200, rows=16384)
    assert [layer.name for layer in plan.lowered] == ["0"]
    assert model(torch.randn(2, 2048)).shape == (2, 2048)


def test_rows_are_summed_over_calls_and_leave_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[1].eval()
    x = torch.randn(3, 5, 4)
    assert measure_rows(model, lambda: (model(x), model[0](x[0]))) == {"0": 20, "2": 15}
    assert [module.training for module in model] == [True, False, True]
    assert not model[0]._forward_pre_hooks
    with pytest.raises(NarrowgateError, match="reached none of the model's layers"):
        measure_rows(model, lambda: None)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"larg": 1}, "rows: found layer 'larg', which the model lacks; did you mean 'large'?"),
        ({"large": -1}, "rows: found -1 for layer 'large', expected a whole number from 0"),
        ("many", "rows: found 'many', expected a number, or numbers by layer name"),
    ],
)
def test_bad_rows_are_one_clear_line(mixed, rows, message):
    with pytest.raises(NarrowgateError) as caught:
        resolve("bf16", mixed, device=CPU, rows=rows)
    assert message in str(caught.value)
