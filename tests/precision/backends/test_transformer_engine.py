"""Transformer Engine as a backend, against a stand-in of its classes: recipes, Parameters, contexts and refusals."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from narrowgate.precision import NAMED_DEVICES, NarrowgateError
from narrowgate.precision.backends import LayerFacts, backend_of, get_backend
from narrowgate.precision.capability import CPU
from narrowgate.recipes import Recipe, RecipeError, Rule, apply_recipe, remove_recipe
from torch import nn

FACTS = LayerFacts("x", 64, 96)
H200 = NAMED_DEVICES["h200"]


@pytest.fixture
def backend():
    return get_backend("transformer_engine")


@pytest.fixture
def linear():
    return nn.Linear(64, 96)


def test_without_the_library_lowering_says_what_to_install(backend, linear, configs):
    if backend.available()[0]:
        pytest.skip("Transformer Engine is here")
    with pytest.raises(NarrowgateError, match="backend transformer_engine: transformer-engine"):
        backend.lower(linear, configs["tensor"])


@pytest.mark.parametrize("name", ["tensor", "tensor_pow2", "tensor_bf16_wgrad", "fprop_only", "block", "delayed"])
def test_what_hopper_runs_is_expressible_and_native(backend, configs, name):
    facts = LayerFacts("x", 256, 256)
    assert backend.inexpressible(configs[name], facts, H200) == {}
    assert all(backend.support(gemm, H200).native for _, gemm in configs[name].gemms())
    assert "CUDA only" in str(backend.support(configs[name].fprop, CPU).reason)


def test_current_scaling_where_the_layer_maps_onto_it(engine, configs):
    from narrowgate.precision.backends.te_linear import engine_recipe

    made = engine_recipe(configs["tensor"])
    assert type(made) is engine.recipe.Float8CurrentScaling
    assert made.fp8_format.name == "HYBRID"
    split = [getattr(made, f"fp8_gemm_{path}").use_split_accumulator for path in ("fprop", "dgrad", "wgrad")]
    assert split == [False, True, True]
    pow2 = engine_recipe(configs["tensor_pow2"])
    assert pow2.fp8_format.name == "E4M3"
    assert [q.power_2_scale for q in (made.fp8_quant_fwd_inp, pow2.fp8_quant_fwd_inp)] == [False, True]
    assert pow2.fp8_quant_bwd_grad.power_2_scale


def test_block_and_delayed_scaling_where_the_layer_maps_onto_them(engine, configs):
    from narrowgate.precision.backends.te_linear import engine_recipe

    block = engine_recipe(configs["block"])
    assert type(block) is engine.recipe.Float8BlockScaling
    assert not block.fp8_quant_fwd_weight.power_2_scale
    delayed = engine_recipe(configs["delayed"])
    assert type(delayed) is engine.recipe.DelayedScaling
    assert (delayed.amax_history_len, delayed.amax_compute_algo, delayed.margin) == (8, "max", 0)


def test_a_bf16_wgrad_is_a_hybrid_of_fp8_rows_and_dense_columns(engine, configs):
    from narrowgate.precision.backends.te_linear import engine_recipe

    made = engine_recipe(configs["tensor_bf16_wgrad"])
    assert type(made) is engine.recipe.CustomRecipe

    def role(tensor: str) -> SimpleNamespace:
        return SimpleNamespace(tensor_type=tensor)

    source = made.qfactory(role("input")).options
    assert source["row"].options["fp8_dtype"] is engine.dtype.kFloat8E4M3
    assert source["column"].options == {"dtype": torch.bfloat16}
    assert made.qfactory(role("grad_output")).options["row"].options["fp8_dtype"] is engine.dtype.kFloat8E5M2
    assert isinstance(made.qfactory(role("weight")), engine.pytorch.Float8CurrentScalingQuantizer)
    assert isinstance(made.qfactory(None), engine.pytorch.IdentityQuantizer)


def test_quantizers_say_what_the_specs_say(engine, layer_config):
    from narrowgate.precision.backends.te_linear import quantizer
    from narrowgate.precision.spec import Spec

    options = {text: quantizer(Spec.parse(text)).options for text in (
        "fp8_e4m3/1x128+pow2", "fp8_e4m3/128x128", "mxfp8_e5m2+rceil", "mxfp8/32x32+rceil", "nvfp4/16x16", "fp32",
    )}  # fmt: skip
    assert options["fp8_e4m3/1x128+pow2"]["block_scaling_dim"] == 1
    assert options["fp8_e4m3/1x128+pow2"]["force_pow_2_scales"]
    assert options["fp8_e4m3/128x128"]["block_scaling_dim"] == 2
    assert options["mxfp8_e5m2+rceil"] == {"fp8_dtype": engine.dtype.kFloat8E5M2, "with_2d_quantization": False}
    assert options["mxfp8/32x32+rceil"]["with_2d_quantization"]
    assert options["nvfp4/16x16"]["with_2d_quantization"]
    assert options["fp32"] == {"dtype": torch.float32}


def test_parameters_are_lent_and_the_state_dict_is_clean(engine, backend, linear, configs, run_layer):
    before, parameters = copy.deepcopy(linear.state_dict()), list(linear.parameters())
    backend.lower(linear, configs["tensor"], name="tower.up")
    run_layer(linear)
    assert list(linear.state_dict()) == ["weight", "bias"]
    assert [a is b for a, b in zip(linear.parameters(), parameters, strict=True)] == [True, True]
    assert dict(linear.named_modules()) == {"": linear}
    linear.load_state_dict(before, strict=True)
    nn.Linear(64, 96).load_state_dict(linear.state_dict(), strict=True)
    assert engine.calls[-1].name == "tower.up"


def test_a_replaced_parameter_is_followed(engine, backend, linear, configs):
    backend.lower(linear, configs["tensor"])
    x = torch.randn(16, 64)
    linear(x)
    linear.weight = nn.Parameter(torch.zeros(96, 64))
    assert torch.equal(linear(x), linear.bias.expand(16, 96))


def test_each_layer_opens_its_own_context_and_closes_it(engine, backend, linear, configs):
    other = nn.Linear(96, 64)
    backend.lower(linear, configs["tensor"], name="a")
    backend.lower(other, configs["tensor_bf16_wgrad"], name="b")
    other(linear(torch.randn(16, 64)))
    assert [type(call.recipe) for call in engine.calls] == [
        engine.recipe.Float8CurrentScaling, engine.recipe.CustomRecipe,
    ]  # fmt: skip
    assert engine.manager.active == []
    linear(torch.randn(16, 64))
    assert engine.calls[0].recipe is engine.calls[2].recipe, "one recipe object a layer: quantizers are made once"


@pytest.mark.parametrize("rows", [(), (1,), (17,), (2, 3, 5)])
def test_rows_are_padded_to_what_the_kernels_take(engine, backend, linear, configs, rows):
    expected = copy.deepcopy(linear)
    backend.lower(linear, configs["tensor"])
    x = torch.randn(*rows, 64)
    torch.testing.assert_close(linear(x), expected(x))
    assert engine.calls[-1].rows % 16 == 0


def test_an_empty_batch_never_reaches_the_library(engine, backend, linear, configs):
    backend.lower(linear, configs["tensor"])
    y = linear(torch.empty(0, 64))
    y.sum().backward()
    assert y.shape == (0, 96)
    assert engine.calls == []
    assert not linear.weight.grad.any()


def test_an_input_of_another_dtype_than_the_weight(engine, backend, linear, configs):
    backend.lower(linear, configs["tensor"])
    assert linear(torch.randn(16, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_copies_and_pickles_make_their_own(engine, backend, linear, configs):
    backend.lower(linear, configs["tensor"], name="x")
    x = torch.randn(16, 64)
    expected = linear(x)
    for twin in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert backend_of(twin) is backend
        with torch.no_grad():
            twin.weight.zero_()
        assert torch.equal(twin(x), twin.bias.expand(16, 96))
    assert torch.equal(linear(x), expected)


def test_an_input_on_the_cpu_is_one_clear_line(engine, backend, linear, configs, monkeypatch):
    from narrowgate.precision.backends import te_linear

    backend.lower(linear, configs["tensor"], name="x")
    monkeypatch.setattr(te_linear, "_on_gpu", lambda x: False)
    with pytest.raises(NarrowgateError, match="layer 'x': Transformer Engine needs CUDA, found an input on cpu"):
        linear(torch.randn(16, 64))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


DELAYED = Recipe(
    name="d",
    rules=[
        Rule(
            layers="layers.*",
            fprop="fp8_e4m3+delayed(8)",
            dgrad={"grad": "fp8_e5m2+delayed(8)", "weight": "fp8_e4m3+delayed(8)"},
            wgrad={"grad": "fp8_e5m2+delayed(8)", "input": "fp8_e4m3+delayed(8)"},
        )
    ],
)


def test_delayed_scales_advance_once_a_forward_of_the_model(engine):
    model = Tower()
    apply_recipe(model, DELAYED, backend="transformer_engine", device=H200)
    for steps in (1, 2):
        model(torch.randn(16, 64))
        assert engine.manager.updates == steps
    assert len({id(call.recipe) for call in engine.calls}) == 1
    with pytest.raises(NarrowgateError, match=r"layer 'layers.0': found a call outside the forward of the model"):
        model.layers[0](torch.randn(16, 64))
    with pytest.raises(NarrowgateError, match=r"layers\.0: expected an input"):
        model(torch.randn(16, 65))
    assert engine.manager.active == [], "the region closes where the forward raised"
    twin = copy.deepcopy(model)
    twin(torch.randn(16, 64))
    remove_recipe(model)
    count = len(engine.calls)
    model(torch.randn(16, 64))
    assert len(engine.calls) == count
    assert engine.manager.active == []


def test_two_delayed_recipes_in_one_model_are_refused(engine):
    recipe = Recipe(name="d", rules=[*DELAYED.rules, Rule(layers="layers.1", all="fp8_e4m3+delayed(8)")])
    with pytest.raises(RecipeError, match="updates the delayed scales of a model by one recipe, found 2"):
        apply_recipe(Tower(), recipe, backend="transformer_engine", device=H200)


E4 = "fp8_e4m3"
REFUSED = {
    "sr": ({"dgrad": ("fp8_e5m2+sr", E4)}, "dgrad.grad", "keyed and repeatable"),
    "clip": ({"wgrad": ("fp8_e5m2+clip(rms=8)", E4)}, "wgrad.grad", "clips nothing"),
    "hadamard": ({"wgrad": ("nvfp4+hadamard(16)",) * 2}, "wgrad.grad", "random signs"),
    "row": ({"fprop": (f"{E4}/row", f"{E4}/row")}, "fprop.input", "tensor, 1x128 and 128x128, found row"),
    "fp6": ({"fprop": ("fp6_e2m3", "fp6_e2m3")}, "fprop.input", "found fp6_e2m3"),
    "mx on hopper": ({"fprop": ("mxfp8+rceil",) * 2}, "fprop.input", "Blackwell only, and emulates nothing"),
    "mixed scalings": ({"fprop": (E4, f"{E4}/128x128")}, "fprop.weight", "two operands of one scaling"),
    "block pair": ({"fprop": (f"{E4}/128x128",) * 2}, "fprop.weight", "128x128 by 128x128"),
    "block fast": ({"fprop": (f"{E4}/1x128", f"{E4}/128x128", "fast")}, "fprop.accumulate", "no fast accumulation"),
    "e5m2 pair": ({"dgrad": ("fp8_e5m2", "fp8_e5m2")}, "dgrad.weight", "E5M2 by E5M2"),
    "columns only": ({"wgrad": (E4, E4)}, "wgrad.input", "only along with row-wise data of the same format"),
    "delayed once": ({"fprop": (f"{E4}+delayed(4)",) * 2, "wgrad": (E4, E4)}, "wgrad.input", "delayed tensor once"),
    "delayed e5m2": ({"fprop": ("fp8_e5m2+delayed(4)", f"{E4}+delayed(4)")}, "fprop.input", "fp8_e4m3 forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_express_is_named(backend, layer_config, name):
    paths, field, why = REFUSED[name]
    assert why in backend.inexpressible(layer_config(**paths), FACTS, H200)[field]


def test_mx_scales_round_up_and_blackwell_has_them(backend, layer_config):
    b200, facts = NAMED_DEVICES["b200"], LayerFacts("x", 64, 64)
    every = ("fprop", "dgrad", "wgrad")
    assert backend.inexpressible(layer_config(**dict.fromkeys(every, ("mxfp8+rceil",) * 2)), facts, b200) == {}
    assert (
        "say rceil"
        in backend.inexpressible(layer_config(**dict.fromkeys(every, ("mxfp8",) * 2)), facts, b200)["fprop.input"]
    )
    nvfp4 = layer_config(fprop=("nvfp4", "nvfp4/16x16"), dgrad=("nvfp4", "nvfp4/16x16"), wgrad=("nvfp4", "nvfp4"))
    assert backend.inexpressible(nvfp4, facts, b200) == {}
    assert backend.support(nvfp4.fprop, b200).native


def test_odd_shapes_are_named_by_their_dimension(backend, configs):
    assert "in_features 60" in backend.inexpressible(configs["tensor"], LayerFacts("x", 60, 96), H200)["layers"]
