"""Audits of real runs: the very code that trains makes the draws that are judged."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._check import count
from ._types import LossFn
from .accounting.accountants import gaussian_epsilon
from .audit import Audit, audit_draws, audit_run
from .batch import batch_size, map_tensors, tensors
from .clipping import trainable
from .noise import Mode
from .plan import Plan
from .privatize import privatize
from .rules import PSAC, Rule
from .sampling import Coins
from .training import PrivateTraining


def audit_step(
    model: nn.Module,
    loss_fn: LossFn,
    plan: Plan,
    batch: Any,
    record: Any,
    *,
    draws: int = 100_000,
    alpha: float = 1e-6,
    noise: Mode = "secure",
) -> Audit:
    """Audit one step of `plan` on your own model, white-box: a batch without and with one more `record`.

    Both clipped sums are made by the engine and noised by the training step's own code, `draws` times; the attacker
    knows everything but the noise and the answer. The claim is that of one step without sampling, the Gaussian
    mechanism with σ = plan.noise_multiplier. Use public or made-up records: nothing is charged.

    >>> from clipwise import Plan
    >>> plan = Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=1.0, steps=1, expected_batch_size=2)
    >>> found = audit_step(nn.Linear(3, 1), lambda m, x: m(x)[:, 0], plan, torch.ones(2, 3), torch.ones(1, 3))
    >>> found.refuted
    False
    """
    count(draws=draws)
    runs = [_fresh(model, loss_fn, plan, noise) for _ in range(2)]
    worlds = [_clipped(run, data) for run, data in zip(runs, (batch, _joined(batch, record)), strict=True)]
    ratio = _LikelihoodRatio(runs[0], worlds)
    out, into = (ratio.draws(step, draws) for step in worlds)
    claimed = gaussian_epsilon(1 / plan.noise_multiplier, plan.delta)
    return audit_draws(out, into, ratio.cut, claimed=claimed, delta=plan.delta, alpha=alpha)


def _joined(batch: Any, record: Any) -> Any:
    """The batch with one more record at its end."""
    if batch_size(record) != 1:
        raise ValueError("record must be a batch of one record, such as x[:1].")
    rows = iter(tensors(record))
    return map_tensors(batch, lambda x: torch.cat([x, next(rows)]))


def _fresh(model: nn.Module, loss_fn: LossFn, plan: Plan, noise: Mode) -> PrivateTraining:
    """A run of its own, with a ledger in memory: nothing of the user's is touched."""
    twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=1.0)
    return privatize(twin, optimizer, plan, loss_fn, sampling="asserted", preflight=False, noise=noise)


def _clipped(training: PrivateTraining, data: Any) -> Any:
    """A step's own clipped sum and observation, before noise; taken out of the run, which then forgets it."""
    for part in training.microbatches(data):
        training._add(*training._clipped(part.data, part.mask, training.clip_norm), part)
    step, training._step = training._step, None
    training._turn.leave()
    assert step is not None
    step.sums = {n: step.sums.get(n, torch.zeros_like(p)) for n, p in trainable(training.model).items()}
    if training.plan.release is not None and step.observed is None:
        step.observed = torch.zeros(training.plan.release.size, dtype=torch.float64)
    return step


class _LikelihoodRatio:
    """The best statistic there is: the log-likelihood ratio of the two worlds, given all that is released."""

    def __init__(self, training: PrivateTraining, worlds: list[Any]) -> None:
        out, into = worlds
        plan = training.plan
        self.training, self.release = training, plan.release
        scale = plan.gradient_noise_multiplier_at(0) * out.sensitivity
        self.directions = {name: (into.sums[name].double() - x.double()) / scale**2 for name, x in out.sums.items()}
        self.other = None if plan.release is None else (into.observed - out.observed) / plan.release.noise**2
        once = [_tiled(step, 1) for step in worlds]
        self.cut = sum(float(self._values(step.sums, step.observed)) for step in once) / 2

    def _values(self, sums: dict[str, Tensor], observed: Tensor | None) -> Tensor:
        """The statistic of each of several releases [n, …]."""
        total = sum(
            torch.einsum("i,ni->n", d.flatten(), sums[n].flatten(1).double()) for n, d in self.directions.items()
        )
        if self.other is not None and observed is not None:
            total = total + (observed.double() @ self.other).to(total)
        return total.cpu()  # type: ignore[union-attr]

    def draws(self, step: Any, number: int) -> np.ndarray[Any, Any]:
        """The statistic of `number` independent releases of one world, made in parts."""
        found, part = [], max(1, 4_000_000 // sum(v.numel() for v in step.sums.values()))
        for start in range(0, number, part):
            training = self.training
            training._noise = copy.copy(training._noise)  # a key of its own: the same step is released again and again
            tiled = _tiled(step, min(part, number - start))
            found.append(self._values(*tiled.noised(training.plan, training._noise, 1, None)).numpy())
        return np.concatenate(found)


def _tiled(step: Any, rows: int) -> Any:
    """The same step many times over."""
    sums = {name: v.expand(rows, *v.shape).clone() for name, v in step.sums.items()}
    return replace(step, sums=sums, observed=None if step.observed is None else step.observed.expand(rows, -1).clone())


def audit_canaries(
    *,
    epsilon: float = 4.0,
    delta: float = 1e-5,
    canaries: int = 10_000,
    steps: int = 1,
    sampling_prob: float = 1.0,
    rule: Rule | None = None,
    guesses: int | None = None,
    alpha: float = 0.05,
    noise: Mode = "secure",
) -> Audit:
    """Audit a whole run, once: each canary's gradient has a coordinate of its own, and joins the data by a coin.

    The data set holds the canaries whose coin says so; the attacker sees the final weights, and guesses the coins from
    the canaries' coordinates. A fresh run under a plan for `epsilon` is trained for it.
    """
    batch = max(1.0, sampling_prob * count(canaries=canaries))
    plan = Plan(
        epsilon=epsilon,
        delta=delta,
        sampling_prob=sampling_prob,
        steps=steps,
        expected_batch_size=batch,
        rule=rule or PSAC(),
    )
    model, secret = nn.Embedding(canaries, 1), Coins()
    nn.init.zeros_(model.weight)
    included = np.array([secret.uniform() < 0.5 for _ in range(canaries)])
    optimizer = torch.optim.SGD(model.parameters(), lr=batch)
    training = privatize(model, optimizer, plan, _own_coordinate, noise=noise, preflight=False)
    for drawn in training.batches(torch.from_numpy(np.flatnonzero(included))):
        training.step(drawn)
    scores = -model.weight.detach()[:, 0].double().numpy()
    return audit_run(scores, included, claimed=plan.epsilon, delta=delta, alpha=alpha, guesses=guesses)


def _own_coordinate(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss whose gradient is a unit vector of the record's own, times a thousand: clipped to C."""
    outputs: Tensor = model(batch)
    return outputs[:, 0] * 1e3
