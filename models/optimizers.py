"""Adam for the dense parameters and rowwise Adagrad for the embedding tables, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.adam import adam

from ..precision.cast_operators import launches_on
from .first_order import first_order_parameters
from .presets import TrainingConfig
from .schedule import learning_rate, scheduled_adam

_EPS_TABLES = 1e-8


def table_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of the embedding tables of ``model``, each once."""
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return list({id(p): p for m in tables for p in m.parameters()}.values())


class AdamWithRowwiseAdagrad(Optimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980) on one group, rowwise Adagrad on the other.

    Rowwise Adagrad keeps one accumulator a table row instead of one an element:

        s_r <- s_r + mean_j g_rj²        w_r <- w_r - lr · g_r / (sqrt(s_r) + eps)

    as FBGEMM and TorchRec have it. A row without a gradient stays as it is, whether gradients are dense or sparse.
    Parameter groups carry ``rowwise``, and those of Adam may carry ``weight_decay``, decoupled as AdamW's; state is
    ``step``, ``exp_avg``, ``exp_avg_sq`` or, for tables, ``sum`` [rows].

    Args:
        dense: parameters for Adam.
        tables: [rows, width] parameters for rowwise Adagrad.
        lr: rate of Adam.
        table_lr: rate of rowwise Adagrad.
        betas: of Adam.
        eps: of Adam.
        table_eps: of rowwise Adagrad.
    """

    def __init__(
        self,
        dense: list[nn.Parameter],
        tables: list[nn.Parameter],
        *,
        lr: float,
        table_lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        table_eps: float = _EPS_TABLES,
    ) -> None:
        assert all(table.dim() == 2 for table in tables), "a table has rows and a width"
        groups = [
            {"params": dense, "rowwise": False, "fused": True, "lr": lr, "betas": betas, "eps": eps},
            {"params": tables, "rowwise": True, "fused": True, "lr": table_lr, "betas": betas, "eps": table_eps},
        ]
        super().__init__([group for group in groups if group["params"]], {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if group["rowwise"]:
                for parameter in self._in_one_launch(parameters, group):
                    self._rowwise(parameter, group)
            else:
                self._adam(parameters, group)
        return loss

    def _adam(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), device=p.device)
                self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adam(
            list(parameters),
            [_gradient(p) for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group.get("weight_decay", 0.0),
            decoupled_weight_decay="weight_decay" in group,
            eps=group["eps"],
            maximize=False,
        )

    def _in_one_launch(self, tables: list[nn.Parameter], group: dict[str, Any]) -> list[nn.Parameter]:
        """Step the tables that a kernel can take, in a launch for each device; returns the others."""
        if isinstance(group["lr"], Tensor):
            return tables
        devices = {p.device for p in tables if launches_on(p.data)}
        if not devices:
            return tables
        if any(device.type == "cuda" for device in devices) and torch.cuda.is_current_stream_capturing():
            return tables  # a replay would read this step's addresses of gradients
        from .kernels.rowwise_adagrad import step_tables, takes

        done: set[int] = set()
        for device in devices:
            taken = [p for p in tables if p.device == device and takes(p, _gradient(p), self._total(p))]
            if taken:
                grads, totals = [_gradient(p) for p in taken], [self._total(p) for p in taken]
                step_tables(taken, grads, totals, float(group["lr"]), float(group["eps"]))
            done.update(map(id, taken))
        return [p for p in tables if id(p) not in done]

    def _total(self, parameter: nn.Parameter) -> Tensor:
        """The accumulators of a table, FP32 [rows]."""
        state = self.state[parameter]
        if not state:
            # By rows as the table is, also where ranks have some each.
            state["sum"] = torch.zeros_like(parameter.detach()[:, 0], dtype=torch.float32)
        return state["sum"]

    def _rowwise(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        grad, total = _gradient(parameter), self._total(parameter)
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            summed = total[rows] + _mean_square(values)
            total[rows] = summed
            parameter.index_add_(0, rows, values * _rates(summed, group).to(values.dtype), alpha=-1)
        else:
            total += _mean_square(grad)
            # In one pass over the table: the tables' traffic is what this optimizer costs.
            parameter.addcmul_(grad, _rates(total, group).to(grad.dtype), value=-1)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _mean_square(grad: Tensor) -> Tensor:
    """[rows, width] -> [rows], FP32, without a copy of the gradient."""
    return torch.linalg.vector_norm(grad, dim=1, dtype=torch.float32).square() / grad.shape[1]


def _rates(summed: Tensor, group: dict[str, Any]) -> Tensor:
    """[rows] -> [rows, 1]: each row's own rate."""
    return (group["lr"] / (summed.sqrt() + group["eps"])).unsqueeze(1)


class _Schedule:
    """Post-step hook: every group's rate follows the run's schedule; the count travels in the groups."""

    def __init__(self, steps: int, training: TrainingConfig) -> None:
        self.steps = steps
        self.training = training

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        for group in optimizer.param_groups:
            group["step_index"] += 1
            rate = learning_rate(group["step_index"], self.steps, self.training)
            group["lr"] = group["peak_lr"] * rate / self.training.lr


def scheduled_optimizer(model: nn.Module, steps: int, training: TrainingConfig) -> Optimizer:
    """Return the optimizer of a preset, whose rates follow its own steps.

    Adam on everything, or with rowwise Adagrad on the embedding tables where ``training.table_lr`` says so. A
    first-order part has a rate of its own, and its weights decay (AdamW, arXiv:1711.05101).
    """
    first_order = [p for p in first_order_parameters(model) if p.requires_grad]
    if training.table_lr is None and not first_order:
        return scheduled_adam(model, steps, training)
    tables = [] if training.table_lr is None else [p for p in table_parameters(model) if p.requires_grad]
    inside = {id(p) for p in (*tables, *first_order)}
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
    usual: dict[str, Any] = {"lr": training.lr, "betas": training.betas, "eps": training.eps}
    decaying = {
        **usual,
        "params": first_order,
        "lr": training.first_order_lr,
        "weight_decay": training.first_order_decay,
    }
    optimizer: Optimizer
    if training.table_lr is None:
        optimizer = AdamW([{"params": dense, "weight_decay": 0.0}, decaying], **usual, fused=True)
    else:
        optimizer = AdamWithRowwiseAdagrad(dense, tables, table_lr=training.table_lr, **usual)
        if first_order:
            optimizer.add_param_group({**decaying, "rowwise": False, "fused": True})
    first = learning_rate(0, steps, training) / training.lr
    for group in optimizer.param_groups:
        group["step_index"], group["peak_lr"] = 0, group["lr"]
        group["lr"] *= first
    optimizer.register_step_post_hook(_Schedule(steps, training))
    return optimizer
