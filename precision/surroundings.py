"""What lowered layers need of the modules around them, which run some of them without calling them."""

from __future__ import annotations

from typing import Any

from torch import nn

from .attention import lower_attention
from .config import LinearConfig
from .layer import LowPrecisionLayer, restore_layer

#: Marks an encoder that makes nested tensors of padded input once its layers are restored.
_NESTS = "_narrowgate_nests"

#: Parts that wrappers put into module names, each an attribute that no model calls its own.
WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def prepare_model(model: nn.Module) -> None:
    """See to what lowered layers of ``model`` cannot from inside.

    - Attention multiplies its output projection without calling it: where only that is lowered, attention is swapped
      too, with its input projection left as it is.
    - ``nn.TransformerEncoderLayer`` multiplies all its weights itself in evaluation: a hook that does nothing makes it
      call its layers, as for any module with hooks.
    - ``nn.TransformerEncoder`` makes nested tensors of padded input in evaluation, to save work; no lowered layer
      takes them. It goes on with the padded ones, as in training.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, LowPrecisionLayer):
            if isinstance(module.out_proj, LowPrecisionLayer):
                lower_attention(module, LinearConfig(), name=f"{name}.in_proj" if name else "in_proj")
        elif isinstance(module, nn.TransformerEncoderLayer):
            if _has_lowered(module) and _call_layers not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_call_layers)
        elif isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor and _has_lowered(module):
            module.use_nested_tensor = False
            module.__dict__[_NESTS] = True


def release_model(model: nn.Module) -> None:
    """Undo :func:`prepare_model`."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and isinstance(module, LowPrecisionLayer):
            restore_layer(module)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _call_layers:
                del module._forward_pre_hooks[key]
        if module.__dict__.pop(_NESTS, False):
            module.use_nested_tensor = True  # type: ignore[assignment]


def _has_lowered(module: nn.Module) -> bool:
    return any(isinstance(inner, LowPrecisionLayer) for inner in module.modules())


def _call_layers(module: nn.Module, args: Any) -> None:
    """Nothing: that it is there keeps PyTorch from taking its fused path around the layers inside."""
