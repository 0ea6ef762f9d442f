"""Small runs for the tests of training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make_plan(**change):
    numbers = {"noise_multiplier": 1.0, "delta": 1e-5, "sampling_prob": 0.25, "steps": 6, "expected_batch_size": 10}
    return cw.Plan(**(numbers | change))


def make(plan=None, loss_fn=losses, make_optimizer=None, model=None, **options):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    return cw.privatize(model, optimizer, plan or make_plan(), loss_fn, **options)


def weights(training):
    return torch.cat([p.detach().flatten().clone() for p in training.model.parameters()])


def released(training, batch):
    """The noised gradient of one step, through the optimizer, with learning rate 1 and no noise to speak of."""
    before = weights(training)
    training.step(batch)
    return (before - weights(training)) * training.plan.expected_batch_size


def quiet(**options):
    """A run whose noise is negligible against the clipped sum, to look at the sum itself."""
    plan = make_plan(noise_multiplier=1e-9, delta=0.5, accountant="rdp", expected_batch_size=10)
    loud = {"sampling": "asserted", "noise": "fast"}  # certified noise would refuse to be so small
    return make(plan, make_optimizer=lambda p: torch.optim.SGD(p, lr=1.0), **(loud | options))
