"""A user's module: a small ranker on random rows with a planted signal; factories plant one fault each."""

import os
import time

import torch
from narrowgate.gates import Prediction
from torch import nn


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.head = nn.Linear(32, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.head(self.dropout(torch.relu(self.body(x)))).squeeze(-1)


def rows(seed, count):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=g)
    y = (torch.rand(count, generator=g) < torch.sigmoid(2 * x[:, 0] - 1)).float()
    return x, y


class Task:
    """Fault is called with (model, step) and may return a replacement for the loss."""

    task_names = ("click",)

    def __init__(self, fault=None, steps=60):
        self.fault, self.count = fault, steps

    def base_rates(self):
        return [0.35]

    def build_model(self):
        return Ranker()

    def train_batches(self, seed):
        x, y = rows(100 + seed, 64 * self.count)
        return [(i + 1, x[64 * i : 64 * i + 64], y[64 * i : 64 * i + 64]) for i in range(self.count)]

    def eval_batches(self):
        x, y = rows(7, 2000)
        return [
            {"x": x[:1200], "y": y[:1200], "user": torch.arange(1200) // 4},
            {"x": x[1200:], "y": y[1200:], "user": 300 + torch.arange(800) // 4},
        ]

    def loss(self, model, batch):
        step, x, y = batch
        logits = model(x)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), y)
        return loss if self.fault is None else self.fault(model, step, loss)

    def predict(self, model, batch):
        logits = model(batch["x"]).float().unsqueeze(1)
        return Prediction(logits, batch["y"].unsqueeze(1), groups=batch["user"])

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=1e-2)


def lowered(model):
    return "LowPrecision" in type(model.body).__name__


def good():
    return Task()


def nan_at_step_50():
    return Task(lambda model, step, loss: loss * float("nan") if step == 50 and lowered(model) else loss)


def crashing():
    return Task(lambda model, step, loss: os._exit(9) if step == 20 and lowered(model) else loss)


def raising():
    def fault(model, step, loss):
        raise RuntimeError("matrix on fire")

    return Task(fault)


def slow():
    def fault(model, step, loss):
        time.sleep(0.2)
        return loss

    return Task(fault)


def paced():
    def fault(model, step, loss):
        time.sleep(0.02)
        return loss

    return Task(fault)


KEPT = []


def hoarding():
    """Each of the candidate's steps keeps 8 MiB for good: a seed more than compiling takes in the first one."""

    def fault(model, step, loss):
        if lowered(model):
            KEPT.append(torch.zeros(2**21, device=loss.device))
        return loss

    return Task(fault)


def sleepy():
    """Each of the candidate's steps keeps a GPU waiting for some milliseconds."""

    def fault(model, step, loss):
        if lowered(model) and loss.is_cuda:
            torch.cuda._sleep(10_000_000)
        return loss

    return Task(fault)


def worse():
    """The candidate trains on noise: its quality is far below the baseline's."""
    return Task(lambda model, step, loss: loss * 0.01 if lowered(model) and step > 0 else loss, steps=12)


def dropped_wgrad():
    """The candidate's body has no weight gradient."""

    def fault(model, step, loss):
        if step == 1 and lowered(model):
            model.body.weight.register_hook(lambda grad: grad * 0)
        return loss

    return Task(fault)


class OtherRate(Task):
    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=2e-2 if lowered(model) else 1e-2)


def other_rate():
    return OtherRate()


class Leaky(Task):
    """The candidate's scores know the held-out labels."""

    def predict(self, model, batch):
        found = super().predict(model, batch)
        return Prediction(found.logits + (found.labels - 0.5) * lowered(model), found.labels, groups=found.groups)


def leaky():
    return Leaky()


class Sliced(Task):
    def predict(self, model, batch):
        found = super().predict(model, batch)
        x = batch["x"]
        found.slices = {"new": x[:, 1] > 1, "market": (x[:, 2] > 0).long() + (x[:, 2] > 1)}
        return found


def sliced():
    return Sliced()


class Weighed(Task):
    """Where ``all`` is set no row weighs anything, else those of the slice ``cold`` and the positives of another."""

    def __init__(self, all):
        super().__init__()
        self.all = all

    def predict(self, model, batch):
        found = super().predict(model, batch)
        x, y = batch["x"], batch["y"]
        cold, other = x[:, 1] > 1, x[:, 2] > 1
        found.slices = {"cold": cold, "one class": other}
        found.weights = 1.0 - (cold | (other & (y > 0)) | self.all).float()
        return found


def weightless():
    return Weighed(False)


def unweighted():
    return Weighed(True)


class Elsewhere(Task):
    def optimizer(self, model):
        return super().optimizer(Ranker())


def elsewhere():
    return Elsewhere()


class Masters(torch.optim.SGD):
    """Steps copies of the parameters, and writes them back."""

    def __init__(self, params):
        self.own = list(params)
        super().__init__([p.detach().clone() for p in self.own], lr=1e-2)

    def step(self, closure=None):
        copies = self.param_groups[0]["params"]
        for own, copy in zip(self.own, copies, strict=True):
            copy.grad = own.grad
        super().step(closure)
        with torch.no_grad():
            for own, copy in zip(self.own, copies, strict=True):
                own.copy_(copy)

    def zero_grad(self, set_to_none=True):
        for own in self.own:
            own.grad = None


def mastered():
    task = Task()
    vars(task)["optimizer"] = lambda model: Masters(model.parameters())
    return task


class Unlabelled(Task):
    def eval_batches(self):
        batches = super().eval_batches()
        batches[0]["y"][3] = float("nan")
        return batches


def unlabelled():
    return Unlabelled()


class Unpaired(Task):
    def build_model(self):
        torch.seed()
        return Ranker()


def unpaired():
    return Unpaired()


class Shuffled(Task):
    def train_batches(self, seed):
        return super().train_batches(int(time.time_ns() % 10**6))


def shuffled():
    return Shuffled()


class Arrays(Shuffled):
    """Its batches are what NumPy makes; nothing in them is a tensor."""

    def train_batches(self, seed):  # type: ignore[override]
        return [(step, x.numpy(), y.numpy()) for step, x, y in super().train_batches(seed)]

    def loss(self, model, batch):
        step, x, y = batch
        return super().loss(model, (step, torch.from_numpy(x), torch.from_numpy(y)))


def shuffled_arrays():
    return Arrays()


def broken_factory():
    raise KeyError("no such table")


class NoPredict:
    build_model = train_batches = eval_batches = loss = lambda self: None


not_callable = 5
