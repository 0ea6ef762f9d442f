"""Small runs that the fault tests share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise as cw

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(48) % 3
RULES = [cw.PSAC(), cw.AutoS(), cw.AutoV(), cw.Abadi(), cw.Reparam(), cw.Global(), cw.PerLayer(cw.PSAC())]


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def plan(**change: Any) -> cw.Plan:
    numbers = {"noise_multiplier": 1.0, "delta": 1e-5, "sampling_prob": 0.25, "steps": 6, "expected_batch_size": 12}
    return cw.Plan(**(numbers | change))


def run(model: nn.Module | None = None, loss_fn: Any = losses, lr: float = 0.1, **options: Any) -> cw.PrivateTraining:
    """Options of the plan and of privatize alike."""
    names = {"rule", "threshold", "accountant", "adjacency", "evaluations", "epsilon"}
    chosen = {k: v for k, v in options.items() if k in names or k in plan().__dataclass_fields__}
    others = {k: v for k, v in options.items() if k not in chosen}
    model = network() if model is None else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    return cw.privatize(model, optimizer, plan(**chosen), loss_fn, **others)


def weights(training: cw.PrivateTraining) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in training.model.parameters()])


def summed(model: nn.Module, data: Any, loss_fn: Any = losses, rule: Any = None, clip_norm: float = 1.0) -> Tensor:
    out = cw.clipped_sum(model, loss_fn, data, rule, clip_norm)
    return torch.cat([g.double().flatten() for g in out.grads.values()])
