"""A user's task that knows nothing of ranks; tests of gates copy it to where they run."""

from __future__ import annotations

import os
import time

import torch
from narrowgate.gates import Prediction
from torch import nn


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 33), nn.ReLU())
        self.head = nn.Linear(33, 1)

    def forward(self, x):
        return self.head(self.tower(x))


def rows(seed, count):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=g)
    return x, (torch.rand(count, generator=g) < torch.sigmoid(2 * x[:, 0] - 1)).float()


class Task:
    task_names = ("click",)

    def __init__(self, fault=None):
        self.fault, self.calls = fault, 0

    def base_rates(self):
        return [0.35]

    def build_model(self):
        return Ranker()

    def train_batches(self, seed):
        x, y = rows(100 + seed, 64 * 81)
        return [(x[64 * i : 64 * i + 64], y[64 * i : 64 * i + 64]) for i in range(81)]

    def eval_batches(self):
        x, y = rows(7, 500)
        return [(x[i : i + 100], y[i : i + 100], torch.arange(i, i + 100) // 4) for i in range(0, 500, 100)]

    def loss(self, model, batch):
        x, y = batch
        if self.fault is not None:
            self.calls += 1
            self.fault(self.calls)
        return nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(-1).float(), y)

    def predict(self, model, batch):
        x, y, users = batch
        return Prediction(model(x).float(), y.unsqueeze(1), groups=users)

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=1e-2)


def good():
    return Task()


def paced():
    return Task(lambda calls: time.sleep(0.02))


def burning():
    def fault(calls):
        if calls == 4 and os.environ["RANK"] == "1":
            raise RuntimeError("matrix on fire")

    return Task(fault)


def ignoring():
    """What some layer on the way might do: it takes the recipe, and gathers as before."""
    import narrowgate.recipes.apply as apply

    apply.gather_low = lambda targets, plan: []
    return Task()
