"""torchao as a backend: the same numbers as our own layers, the user's Parameters, and every refusal by name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from narrowgate.precision import NAMED_DEVICES, NarrowgateError, sqnr_db
from narrowgate.precision.backends import LayerFacts, backend_of, get_backend, original_type
from narrowgate.precision.capability import CPU
from torch import nn

pytest.importorskip("torchao")

FACTS = LayerFacts("x", 64, 96)
EXPRESSIBLE = [
    "tensor", "tensor_pow2", "tensor_bf16_wgrad", "fprop_only", "row", "row_with_gw_hp", "mxfp8", "mxfp8_bf16_wgrad",
]  # fmt: skip


@pytest.fixture
def backend():
    return get_backend("torchao")


@pytest.fixture
def linear():
    return nn.Linear(64, 96, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_output_and_gradients_equal_our_own_layers(backend, linear, run_layer, configs, name):
    native = copy.deepcopy(linear)
    get_backend("native").lower(native, configs[name], name="x")
    backend.lower(linear, configs[name], name="x")
    assert backend.inexpressible(configs[name], FACTS, CPU) == {}
    for (what, expected), (_, actual) in zip(run_layer(native).tensors(), run_layer(linear).tensors(), strict=True):
        assert actual.dtype == expected.dtype
        # Scales are rounded once more here or there: one code in many may fall on the other side.
        assert sqnr_db(expected.float(), actual.float()) > 50, what


@pytest.mark.parametrize("name", ["tensor", "row", "mxfp8"])
def test_fp32_models_agree_too(backend, run_layer, configs, name):
    linear = nn.Linear(64, 96)
    native = copy.deepcopy(linear)
    get_backend("native").lower(native, configs[name])
    backend.lower(linear, configs[name])
    for (_, expected), (_, actual) in zip(run_layer(native).tensors(), run_layer(linear).tensors(), strict=True):
        assert actual.dtype == torch.float32
        assert sqnr_db(expected, actual) > 50


@pytest.mark.parametrize("name", ["tensor", "tensor_bf16_wgrad", "fprop_only", "row_with_gw_hp"])
def test_autocast_of_an_fp32_model_answers_in_bf16_and_trains_fp32_weights(backend, run_layer, configs, name):
    linear = nn.Linear(64, 96)
    native = copy.deepcopy(linear)
    get_backend("native").lower(native, configs[name])
    backend.lower(linear, configs[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = run_layer(native), run_layer(linear)
    assert actual.y.dtype == torch.bfloat16
    assert actual.dw.dtype == torch.float32
    for (what, a), (_, b) in zip(expected.tensors(), actual.tensors(), strict=True):
        assert sqnr_db(a.float(), b.float()) > 28, what  # inputs are rounded to BF16 before they are quantized


def test_parameters_state_dict_and_optimizer_stay(backend, linear, run_layer, configs):
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    before, parameters = copy.deepcopy(linear.state_dict()), list(linear.parameters())
    backend.lower(linear, configs["tensor"])
    assert isinstance(linear, nn.Linear)
    assert [a is b for a, b in zip(linear.parameters(), parameters, strict=True)] == [True, True]
    assert linear.state_dict().keys() == before.keys()
    run_layer(linear)
    optimizer.step()
    assert not torch.equal(linear.weight, before["weight"])
    linear.load_state_dict(before, strict=True)
    nn.Linear(64, 96, dtype=torch.bfloat16).load_state_dict(linear.state_dict(), strict=True)


def test_restoring_gives_back_the_class_and_the_current_values(backend, linear, configs):
    class Mine(nn.Linear):
        pass

    mine = Mine(64, 96)
    x = torch.randn(4, 64)
    expected = mine(x)
    backend.lower(mine, configs["tensor"])
    assert isinstance(mine, Mine)
    assert type(mine).__name__ == "TorchaoMine"
    assert backend_of(mine) is backend
    assert original_type(mine) is Mine
    assert not torch.equal(mine(x), expected)
    backend.restore(mine)
    assert type(mine) is Mine
    assert backend_of(mine) is None
    assert torch.equal(mine(x), expected)


def test_copies_and_pickles_run_the_same(backend, linear, configs):
    backend.lower(linear, configs["tensor"], name="x")
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    for twin in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert backend_of(twin) is backend
        assert torch.equal(twin(x), linear(x))
        assert twin.weight is not linear.weight


@pytest.mark.parametrize("rows", [(), (1,), (17,), (2, 3, 5)])
def test_any_number_of_rows(backend, linear, run_layer, configs, rows):
    native = copy.deepcopy(linear)
    get_backend("native").lower(native, configs["tensor"])
    backend.lower(linear, configs["tensor"])
    expected, actual = run_layer(native, rows=rows), run_layer(linear, rows=rows)
    assert actual.y.shape == (*rows, 96)
    assert sqnr_db(expected.dw.float(), actual.dw.float()) > 50


def test_an_empty_batch_has_an_empty_output_and_zero_gradients(backend, linear, configs):
    backend.lower(linear, configs["tensor"])
    y = linear(torch.empty(0, 64, dtype=torch.bfloat16))
    y.sum().backward()
    assert y.shape == (0, 96)
    assert not linear.weight.grad.any()


def test_a_meta_layer_runs_once_it_has_values(backend, configs):
    with torch.device("meta"):
        linear = nn.Linear(64, 96)
    backend.lower(linear, configs["tensor"])
    linear.load_state_dict(nn.Linear(64, 96).state_dict(), assign=True)
    assert linear(torch.randn(16, 64)).isfinite().all()


def test_a_wrong_width_is_one_clear_line(backend, linear, configs):
    backend.lower(linear, configs["tensor"], name="tower.up")
    with pytest.raises(NarrowgateError, match=r"tower.up: expected an input of \[..., 64\], found \[2, 65\]"):
        linear(torch.randn(2, 65))


def test_hooks_stay_and_a_second_lowering_is_refused(backend, linear, configs):
    seen = []
    linear.register_forward_hook(lambda *_: seen.append(1))
    backend.lower(linear, configs["tensor"], name="x")
    linear(torch.randn(16, 64, dtype=torch.bfloat16))
    assert seen == [1]
    with pytest.raises(NarrowgateError, match="layer 'x' is low-precision already"):
        backend.lower(linear, configs["tensor"], name="x")
    with pytest.raises(NarrowgateError, match=r"expected an nn\.Linear"):
        backend.lower(nn.Bilinear(2, 2, 2), configs["tensor"], name="x")


def test_torchaos_own_recipes_come_out_field_by_field(layer_config):
    from narrowgate.precision.backends.torchao_linear import float8_settings
    from torchao.float8 import Float8LinearConfig

    row, tensor = "fp8_e4m3/row+pow2", ("fp8_e5m2", "fp8_e4m3")
    ours = {
        "tensorwise": layer_config(fprop=("fp8_e4m3", "fp8_e4m3", "fast"), dgrad=tensor, wgrad=tensor),
        "rowwise": layer_config(fprop=(row, row, "fast"), dgrad=(row, row), wgrad=(row, row)),
        "rowwise_with_gw_hp": layer_config(fprop=(row, row, "fast"), dgrad=(row, "fp8_e4m3+pow2")),
    }
    for name, config in ours.items():
        settings, products = float8_settings(config, False)
        theirs = Float8LinearConfig.from_recipe_name(name)
        for field in vars(theirs):
            assert getattr(settings, field) == getattr(theirs, field), f"{name}.{field}"
        assert [p.use_fast_accum for p in products] == [True, False, False]


E4 = "fp8_e4m3"
REFUSED = {
    "sr": ({"dgrad": ("fp8_e5m2+sr", E4)}, "dgrad.grad", "stochastic rounding"),
    "clip": ({"wgrad": ("fp8_e5m2+clip(p=99.9)", E4)}, "wgrad.grad", "clips nothing"),
    "hadamard": ({"wgrad": (f"{E4}+hadamard(16)",) * 2}, "wgrad.input", "Hadamard"),
    "delayed": ({"fprop": (f"{E4}+delayed(4)", E4)}, "fprop.input", "deleted delayed scaling"),
    "block": ({"fprop": (f"{E4}/1x128", f"{E4}/128x128")}, "fprop.weight", "tensor and row, found 128x128"),
    "fp6": ({"fprop": ("fp6_e2m3", "fp6_e2m3")}, "fprop.input", "found fp6_e2m3"),
    "fp32": ({"fprop": (E4, E4), "wgrad": ("fp32", "fp32")}, "wgrad.grad", "fp32 cannot be asked for"),
    "e5m2 pair": ({"dgrad": ("fp8_e5m2", "fp8_e5m2")}, "dgrad.weight", "E5M2 by E5M2"),
    "formats": ({"fprop": (E4, E4), "wgrad": (E4, "fp8_e5m2")}, "wgrad.input", "one format for both its products"),
    "pow2": ({"fprop": (E4, E4), "dgrad": (f"{E4}+pow2", E4)}, "dgrad.grad", "found pow2 here only"),
    "mx square": ({"fprop": ("mxfp8", "mxfp8/32x32")}, "fprop.weight", "no square MX blocks"),
    "mx e5m2": ({"dgrad": ("mxfp8_e5m2", "mxfp8")}, "dgrad.grad", "mxfp8 only"),
    "mx forward only": ({"fprop": ("mxfp8", "mxfp8")}, "dgrad.grad", "fprop and dgrad alike"),
    "mx modes": ({"fprop": ("mxfp8", "mxfp8"), "dgrad": ("mxfp8+rceil", "mxfp8")}, "dgrad.grad", "one way"),
    "mx fast": (
        {"fprop": ("mxfp8", "mxfp8", "fast"), "dgrad": ("mxfp8", "mxfp8")}, "fprop.accumulate", "no fast accumulation",
    ),
    "nvfp4": ({"fprop": ("nvfp4", "nvfp4/16x16")}, "fprop.input", "global generator"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_express_is_named(backend, layer_config, name):
    paths, field, why = REFUSED[name]
    reasons = backend.inexpressible(layer_config(**paths), FACTS, CPU)
    assert why in reasons[field]


def test_odd_shapes_are_named_by_their_dimension(backend, configs):
    assert (
        "in_features 60 is no multiple of 16"
        in backend.inexpressible(configs["row"], LayerFacts("x", 60, 96), None)["layers"]
    )
    assert (
        "out_features 48 is no multiple of 32"
        in backend.inexpressible(configs["mxfp8"], LayerFacts("x", 64, 48), None)["layers"]
    )
    assert (
        "nn.Linear only" in backend.inexpressible(configs["row"], LayerFacts("x", 64, 64, linear=False), None)["layers"]
    )


def test_native_and_emulated_by_device(backend, configs):
    h200, b200 = NAMED_DEVICES["h200"], NAMED_DEVICES["b200"]
    assert backend.support(configs["row"].fprop, h200).native
    assert not backend.support(configs["row"].fprop, CPU).native
    assert backend.support(configs["mxfp8"].fprop, b200).native
    assert "Blackwell only" in str(backend.support(configs["mxfp8"].fprop, h200).reason)
