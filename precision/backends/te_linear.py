"""The layer that Transformer Engine's products run in: a swapped ``nn.Linear`` with a ``te.Linear`` behind it.

The ``te.Linear`` is not a submodule. It is made on the first forward, on no device and without values, and is lent the
module's own Parameters before each use, so there is one weight, under the user's name, and nothing of Transformer
Engine (its ``_extra_state`` above all) in ``state_dict()``. It is dropped by ``deepcopy`` and pickling and made again.

Each call runs inside the layer's own ``autocast``, so that a model needs no context around its forward, and outside
``torch.compile``: a compiled model breaks its graph here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..config import LinearConfig
from ..errors import NarrowgateError
from ..spec import Spec
from .swap import SwappedLinear, SwappedState, outside_compile, swap
from .transformer_engine import DIRECTIONS, delayed_steps, row_multiple, spec_at


class TransformerEngineState(SwappedState):
    """A layer's configuration, and the ``te.Linear`` and recipe made of it on first use."""

    def __init__(self, config: LinearConfig, name: str, original: type[nn.Module]) -> None:
        super().__init__(config, name, original)
        self.row_multiple = row_multiple(config)
        self.delayed = delayed_steps(config) is not None
        self.layer: Any = None
        self.recipe: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # Neither survives a copy: the te.Linear borrows Parameters of another module, recipes close over functions.
        return {**self.__dict__, "layer": None, "recipe": None}


class TransformerEngineLinear(SwappedLinear):
    """An ``nn.Linear`` whose products are Transformer Engine's."""

    def multiply(self, flat: Tensor, state: TransformerEngineState) -> Tensor:
        """See :meth:`SwappedLinear.multiply`.

        Raises:
            NarrowgateError: the input is not on a GPU, or a layer with delayed scales is called outside its model.
        """
        return _multiply(self, flat, state)


def lower(module: nn.Module, config: LinearConfig, name: str) -> None:
    """Make ``module`` run ``config`` through Transformer Engine, in place."""
    swap(module, TransformerEngineLinear, TransformerEngineState(config, name, type(module)))


@outside_compile
def _multiply(module: nn.Linear, flat: Tensor, state: TransformerEngineState) -> Tensor:
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]

    if not _on_gpu(flat):
        raise NarrowgateError(f"layer '{state.name}': Transformer Engine needs CUDA, found an input on {flat.device}")
    if state.layer is None:
        state.layer = _engine_layer(module, state.name)
        state.recipe = engine_recipe(state.config)
    layer = state.layer
    layer._parameters["weight"] = module.weight
    if module.bias is not None:
        layer._parameters["bias"] = module.bias
    if not torch.is_autocast_enabled("cuda"):
        # te.Linear refuses a weight of another dtype than its input's unless it has seen that input dtype before.
        layer.activation_dtype = flat.dtype
    if state.delayed:
        from .te_region import check_open

        check_open(state.name)
        return layer(flat)
    with te.autocast(enabled=True, recipe=state.recipe):
        return layer(flat)


def engine_recipe(config: LinearConfig) -> Any:
    """Return the recipe object of one layer: a built-in one where it says the same, else a ``CustomRecipe``."""
    from transformer_engine.common import recipe as recipes  # type: ignore[import-not-found]

    def product(path: str) -> Any:
        return recipes.MMParams(use_split_accumulator=getattr(config, path).accumulate == "accurate")

    formats = _builtin_format(config)
    steps = delayed_steps(config)
    row = {tensor: spec_at(config, places[0]) for tensor, places in DIRECTIONS.items()}
    if steps is not None:
        assert formats is not None, config
        made = recipes.DelayedScaling(
            fp8_format=recipes.Format[formats], amax_history_len=steps, amax_compute_algo="max", margin=0
        )
    elif formats is not None and all(spec.granularity == "tensor" for spec in row.values()):
        made = recipes.Float8CurrentScaling(fp8_format=recipes.Format[formats])
    elif formats is not None and [row[t].granularity for t in DIRECTIONS] == ["1x128", "128x128", "1x128"]:
        made = recipes.Float8BlockScaling(fp8_format=recipes.Format[formats])
    else:
        made = recipes.CustomRecipe(qfactory=quantizer_factory(config))
    if formats is not None and steps is None and not isinstance(made, recipes.CustomRecipe):
        for field, tensor in (
            ("fp8_quant_fwd_inp", "input"), ("fp8_quant_fwd_weight", "weight"), ("fp8_quant_bwd_grad", "grad"),
        ):  # fmt: skip
            setattr(made, field, recipes.QParams(power_2_scale=row[tensor].pow2, amax_epsilon=0.0))
    for path in ("fprop", "dgrad", "wgrad"):
        setattr(made, f"fp8_gemm_{path}", product(path))
    return made


def quantizer_factory(config: LinearConfig) -> Any:
    """Return the ``qfactory`` of a ``CustomRecipe`` for one linear layer."""
    tensors = {"input": "input", "weight": "weight", "grad_output": "grad"}

    def qfactory(role: Any) -> Any:
        import transformer_engine.pytorch as te  # type: ignore[import-not-found]

        tensor = tensors.get("" if role is None else role.tensor_type)
        if tensor is None:  # the layer's output and the gradient of its input, which stay as they are
            return te.IdentityQuantizer()
        row, column = (spec_at(config, place) for place in DIRECTIONS[tensor])
        if row == column:
            return quantizer(row)
        return te.HybridQuantizer(rowwise_quantizer=quantizer(row), columnwise_quantizer=quantizer(column))

    return qfactory


def quantizer(spec: Spec) -> Any:
    """Return a new quantizer of Transformer Engine that stores a tensor as ``spec`` says, in both directions."""
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]
    from transformer_engine.pytorch.constants import DType  # type: ignore[import-not-found]

    if spec.high_precision:
        return te.IdentityQuantizer(dtype=torch.bfloat16 if spec.format == "bf16" else torch.float32)
    if spec.format == "nvfp4":
        return te.NVFP4Quantizer(
            fp4_dtype=DType.kFloat4E2M1,
            with_rht=False,
            with_post_rht_amax=False,
            with_2d_quantization=spec.granularity == "16x16",
            stochastic_rounding=False,
        )
    dtype = DType.kFloat8E4M3 if spec.format.endswith("e4m3") else DType.kFloat8E5M2
    if spec.mx_scale is not None:
        return te.MXFP8Quantizer(fp8_dtype=dtype, with_2d_quantization=spec.granularity == "32x32")
    if spec.granularity == "tensor":
        return te.Float8CurrentScalingQuantizer(
            fp8_dtype=dtype, device=torch.device("cuda"), force_pow_2_scales=spec.pow2, amax_epsilon=0.0
        )
    return te.Float8BlockQuantizer(
        fp8_dtype=dtype,
        rowwise=True,
        columnwise=True,
        amax_epsilon=0.0,
        force_pow_2_scales=spec.pow2,
        block_scaling_dim=1 if spec.granularity == "1x128" else 2,
    )


def _builtin_format(config: LinearConfig) -> str | None:
    """Return the ``Format`` of a built-in recipe: E4M3 forward and both directions alike; None where none fits."""
    for row, column in DIRECTIONS.values():
        if spec_at(config, row) != spec_at(config, column):
            return None
    forward = {spec_at(config, "fprop.input").format, spec_at(config, "fprop.weight").format}
    grad = spec_at(config, "dgrad.grad").format
    if forward != {"fp8_e4m3"}:
        return None
    return {"fp8_e4m3": "E4M3", "fp8_e5m2": "HYBRID"}.get(grad)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _engine_layer(module: nn.Linear, name: str) -> Any:
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]

    return te.Linear(
        module.in_features,
        module.out_features,
        bias=module.bias is not None,
        params_dtype=module.weight.dtype,
        device="meta",
        name=name or None,
    )
