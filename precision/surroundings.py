"""What lowered layers need of the modules around them, which run some of them without calling them."""

from __future__ import annotations

from typing import Any

from torch import nn

from .attention import lower_attention
from .config import LinearConfig
from .layer import LowPrecisionLayer, restore_layer

#: Parts that wrappers put into module names, each an attribute that no model calls its own.
WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def prepare_model(model: nn.Module) -> None:
    """See to what lowered layers of ``model`` cannot from inside.

    - Attention multiplies its output projection without calling it: where only that is lowered, attention is swapped
      too, with its input projection left as it is.
    - ``nn.TransformerEncoderLayer`` multiplies all its weights itself in evaluation: a hook that does nothing makes it
      call its layers, as for any module with hooks.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, LowPrecisionLayer):
            if isinstance(module.out_proj, LowPrecisionLayer):
                lower_attention(module, LinearConfig(), name=f"{name}.in_proj" if name else "in_proj")
        elif isinstance(module, nn.TransformerEncoderLayer):
            lowered = any(isinstance(inner, LowPrecisionLayer) for inner in module.modules())
            if lowered and _call_layers not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_call_layers)


def release_model(model: nn.Module) -> None:
    """Undo :func:`prepare_model`."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and isinstance(module, LowPrecisionLayer):
            restore_layer(module)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _call_layers:
                del module._forward_pre_hooks[key]


def _call_layers(module: nn.Module, args: Any) -> None:
    """Nothing: that it is there keeps PyTorch from taking its fused path around the layers inside."""
