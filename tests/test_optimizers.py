"""Any torch.optim optimizer; and what the clip norm is worth under each (A, theorems 1 and 2), on seeded runs."""

from __future__ import annotations

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import clipwise as cw

RULES = [cw.PSAC(), cw.AutoS(), cw.AutoV()]  # of the form C·φ(n)
SCALED = {  # the step is proportional to the gradient: C and the learning rate are one number
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "heavy ball": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "NAG": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
}
ADAPTIVE = {  # the step does not change with the gradient's scale: C is worth nothing
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-30),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-30, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-30),
    "AdaGrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-30),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-30),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-30),
    "LAMB": lambda p: pytorch_optimizer.Lamb(p, lr=0.01, eps=1e-30, max_grad_norm=0.0, pre_norm=False),
}
OTHERS = {
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),  # adaptive from its sixth step on
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "LARS": lambda p: pytorch_optimizer.LARS(p, lr=0.1),
    "Adam, AMSGrad": lambda p: torch.optim.Adam(p, amsgrad=True),
}


def losses(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trained(make, rule=cw.PSAC(), clip_norm=1.0, steps=6, dtype=torch.float64, after=None):  # noqa: B008
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x, y = torch.randn(40, 6, dtype=dtype), torch.randint(0, 3, (40,))
    threshold = cw.FixedThreshold(clip_norm)
    numbers = {"delta": 1e-5, "sampling_prob": 0.3, "steps": steps, "expected_batch_size": 12}
    plan = cw.Plan(noise_multiplier=1.0, rule=rule, threshold=threshold, **numbers)
    optimizer = make(model.parameters())
    training = cw.privatize(model, optimizer, plan, losses, seed=1)
    for batch in training.batches((x, y)):
        training.step(batch)
        if after is not None:
            after(model, optimizer)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("name", SCALED)
def test_theorem_1_clip_norm_and_learning_rate_are_one_number(name, rule):
    one = trained(lambda p: SCALED[name](p, 0.5), rule, clip_norm=0.1)
    other = trained(lambda p: SCALED[name](p, 0.05), rule, clip_norm=1.0)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert (one - trained(lambda p: SCALED[name](p, 0.5), rule, clip_norm=1.0)).norm() > 1e-3


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("name", ADAPTIVE)
def test_theorem_2_adaptive_optimizers_do_not_see_the_clip_norm(name, rule):
    found = [trained(ADAPTIVE[name], rule, clip_norm=c) for c in (0.01, 1.0, 50.0)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(found[2], found[1], rtol=1e-7, atol=1e-9)


def test_under_abadi_the_clip_norm_is_seen_by_adaptive_optimizers_too():
    found = [trained(ADAPTIVE["Adam"], cw.Abadi(), clip_norm=c) for c in (0.01, 50.0)]
    assert (found[0] - found[1]).norm() > 1e-3


@pytest.mark.parametrize("name", [*OTHERS, *ADAPTIVE])
def test_every_optimizer_trains(name):
    make = (OTHERS | ADAPTIVE)[name]
    found = trained(make, dtype=torch.float32)
    assert torch.isfinite(found).all()
    assert (found - trained(make, dtype=torch.float32, steps=1)).norm() > 0


def test_schedulers_and_averages_are_after_the_release():
    rates, averages, schedulers = [], [], []

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6))
        return optimizer

    def after(model, optimizer):
        if not averages:
            averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)))
        averages[0].update_parameters(model)
        schedulers[0].step()
        rates.append(optimizer.param_groups[0]["lr"])

    last = trained(make, after=after)
    mean = torch.cat([p.detach().flatten() for p in averages[0].module.parameters()])
    assert rates == sorted(rates, reverse=True)
    assert 0 < (mean - last).norm() < 5
