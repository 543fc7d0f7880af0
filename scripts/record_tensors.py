"""Train a built-in model and record what its linears multiply: inputs and output gradients of one further step.

    python scripts/record_tensors.py --model gem-small --data ml-1m:DIR --out DIR

Writes OUT/activations.npz and OUT/gradients.npz, each with one 2-D array [rows, features] a layer, named after it, in
FP16 after division by a power of two that keeps the largest element in range (scales do not change what a dynamic
scale sees). They are the inputs of scripts/numerics_tables.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from narrowgate.models import GemTask
from torch import Tensor, nn

#: Rows that are kept of each tensor, taken at equal distances.
_ROWS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="gem-small")
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="training steps before the recording; the model's own by default")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    task = GemTask.open(args.model, args.data, device=args.device, steps=args.steps)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.optimizer(model)
    batch = None
    for batch in task.train_batches(0):
        _backward(task, model, batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    inputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        # Task heads stay in BF16 in the recipes that are meant to be used, and narrow layers pay for no format.
        wide = isinstance(module, nn.Linear) and min(module.in_features, module.out_features) >= 16
        if wide and not name.startswith("heads."):
            module.register_forward_hook(_recorder(name, inputs, gradients))
    _backward(task, model, batch)

    args.out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out / "activations.npz", **{name: _portable(x) for name, x in inputs.items()})
    np.savez_compressed(args.out / "gradients.npz", **{name: _portable(g) for name, g in gradients.items()})


def _backward(task: GemTask, model: nn.Module, batch: object) -> None:
    with torch.autocast(task.device.type, torch.bfloat16):
        loss = task.loss(model, batch)  # type: ignore[arg-type]
    loss.backward()


def _recorder(name: str, inputs: dict[str, Tensor], gradients: dict[str, Tensor]):
    def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        inputs[name] = _sample(args[0])
        output.register_hook(lambda grad: gradients.__setitem__(name, _sample(grad)))

    return hook


def _sample(x: Tensor) -> Tensor:
    rows = x.detach().reshape(-1, x.shape[-1])
    return rows[:: max(1, rows.shape[0] // _ROWS)][:_ROWS].float().cpu()


def _portable(x: Tensor) -> np.ndarray:
    """FP16 keeps every bit of a BF16 value's mantissa; the shift keeps its largest element near 2**15.

    What falls below FP16's subnormals lies 2**39 under the largest element: no format here tells it from zero.
    """
    largest = float(x.abs().max())
    exponent = np.frexp(largest)[1] if largest > 0 else 0
    return np.ldexp(x.numpy(), 15 - exponent).astype(np.float16)


if __name__ == "__main__":
    main()
