"""What the rules do to gradients: their weights, where they stand still, and how far they turn a batch's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import clipwise as cw

from .recipes import MODELS as BUILT
from .recipes import RECIPES, losses_of, plan_of, prepared

Weights = Callable[[Tensor], Tensor]

CURVES: dict[str, Weights] = {
    "Abadi, C = 1": lambda n: cw.Abadi().weights(n, 1.0),
    "AUTO-V": lambda n: cw.AutoV().weights(n, 1.0),
    "AUTO-S, γ = 0.01": lambda n: cw.AutoS(0.01).weights(n, 1.0),
    "PSAC, r = 0.1": lambda n: cw.PSAC(0.1).weights(n, 1.0),
    "PSAC, r = 0.01": lambda n: cw.PSAC(0.01).weights(n, 1.0),
}
STANDING: dict[str, Weights] = {
    "SGD": torch.ones_like,
    "Abadi, C = 0.1": lambda n: cw.Abadi().weights(n, 0.1) / 0.1,
    "Abadi, C = 0.01": lambda n: cw.Abadi().weights(n, 0.01) / 0.01,
    "AUTO-V": lambda n: cw.AutoV().weights(n, 1.0),
    "AUTO-S, γ = 0.01": lambda n: cw.AutoS(0.01).weights(n, 1.0),
    "PSAC, r = 0.01": lambda n: cw.PSAC(0.01).weights(n, 1.0),
}
MIXED: dict[str, Weights] = {
    "SGD": torch.ones_like,
    "Abadi, C = 1": lambda n: cw.Abadi().weights(n, 1.0),
    "Abadi, C = 6": lambda n: cw.Abadi().weights(n, 6.0) / 6,
    "AUTO-V": lambda n: cw.AutoV().weights(n, 1.0),
    "AUTO-S, γ = 0.01": lambda n: cw.AutoS(0.01).weights(n, 1.0),
    "AUTO-S, γ = 4": lambda n: cw.AutoS(4.0).weights(n, 1.0),
}
TURNING: dict[str, Weights] = {
    "Abadi, C = 1": lambda n: cw.Abadi().weights(n, 1.0),
    "Abadi, C = 0.1": lambda n: cw.Abadi().weights(n, 0.1),
    "AUTO-V": lambda n: cw.AutoV().weights(n, 0.1),
    "AUTO-S, γ = 0.01": lambda n: cw.AutoS(0.01).weights(n, 0.1),
    "PSAC, r = 0.1": lambda n: cw.PSAC(0.1).weights(n, 0.1),
}


def _short(values: Tensor) -> list[float]:
    return [float(f"{v:.5g}") for v in values.tolist()]


def weights() -> dict[str, Any]:
    """P figure 2: weights against norms, and the norms that result."""
    norms = torch.logspace(-4, 2, 181, dtype=torch.float64)
    return {"norms": _short(norms), "weights": {name: _short(rule(norms)) for name, rule in CURVES.items()}}


def lazy(size: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """P figure 5, A figure 3: the mean weighted gradient of a bias θ, for logistic regression on N(±1, 1)."""
    labels = (torch.arange(size) % 2).double()
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 2 * labels - 1
    thetas = torch.linspace(-4, 4, 161, dtype=torch.float64)
    gradients = torch.sigmoid(thetas[:, None] + x) - labels
    curves = {name: _short((rule(gradients.abs()) * gradients).mean(1)) for name, rule in STANDING.items()}
    return {"size": size, "thetas": _short(thetas), "curves": curves}


def mixture(size: int = 10_000, seed: int = 0, apart: float = 4.0) -> dict[str, Any]:
    """A figure 12: the mean weighted gradient when θ is to be the mean of N(±apart, 1), by the loss (θ − x)²/2."""
    signs = 2 * (torch.arange(size) % 2).double() - 1
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + apart * signs
    thetas = torch.linspace(-2 * apart, 2 * apart, 161, dtype=torch.float64)
    gradients = thetas[:, None] - x
    curves = {name: _short((rule(gradients.abs()) * gradients).mean(1)) for name, rule in MIXED.items()}
    return {"size": size, "apart": apart, "thetas": _short(thetas), "curves": curves}


def per_example(model: nn.Module, losses: Callable[[nn.Module, Any], Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    """Gradients [b, d], by brute force."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, Tensor], *record: Tensor) -> Tensor:
        one = tuple(v[None] for v in record)
        return losses(lambda x: functional_call(model, given, (x,)), one)[0]  # type: ignore[arg-type]

    found = vmap(grad(loss), (None, *(0 for _ in batch)))(parameters, *batch)
    return torch.cat([g.flatten(1) for g in found.values()], dim=1)


def turned(gradients: Tensor) -> dict[str, float]:
    """The cosine of each rule's weighted mean with the true mean."""
    norms, mean = gradients.norm(dim=1), gradients.mean(0)
    return {
        name: float(f"{torch.cosine_similarity(rule(norms) @ gradients, mean, dim=0):.5f}")
        for name, rule in TURNING.items()
    }


def bias(seeds: int = 3, steps: int = 936, every: int = 36, rows: int = 512) -> dict[str, Any]:
    """P figures 1 and 3, on MNIST: how far each rule turns a batch's gradient, along a private run under PSAC."""
    recipe = RECIPES["mnist"]
    data = prepared(recipe, "cpu")
    losses, curves, examples = losses_of(recipe), [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = BUILT[recipe.model](recipe, data)
        optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9)
        training = cw.privatize(model, optimizer, plan_of(recipe, "psac", len(data.train[0])), losses, seed=seed)
        chosen = torch.randperm(len(data.train[0]), generator=torch.Generator().manual_seed(seed))[:rows]
        public = tuple(v[chosen] for v in data.train)
        for step, batch in zip(range(steps), training.batches(data.train), strict=False):
            if step % every == 0:
                gradients = per_example(model, losses, public)
                curves.append({"seed": seed, "step": step, **turned(gradients)})
                if seed == 0 and step in (0, every, every * ((steps - 1) // every)):
                    cosines = torch.cosine_similarity(gradients, gradients.mean(0, keepdim=True))
                    examples.append({"step": step, "norms": _short(gradients.norm(dim=1)), "cosines": _short(cosines)})
            training.step(batch)
    return {"recipe": "mnist", "rows": rows, "curves": curves, "examples": examples}


def bound(points: int = 121, low: float = 1e-4, high: float = 1.0) -> dict[str, Any]:
    """P theorem 2: the term that no number of steps removes, against r, for gradient noise (τ₀, τ₁)."""
    r = torch.logspace(math.log10(low), math.log10(high), points, dtype=torch.float64)
    curves = []
    for t0, t1 in ((0.1, 0.5), (1.0, 0.5), (1.0, 0.9)):
        left = 1 - t1
        inner = 2 * t0 + r * left
        least = (inner * t0 / (4 * t0**2 + 2 * r * t0 * left + r * left**2)).clamp(max=t0 / left)
        term = 8 * t0**2 * (1 + t0) / (3 * least * left**3 * (t0 + r * left / inner) * (2 * r.sqrt() - r))
        curves.append({"tau_0": t0, "tau_1": t1, "term": _short(term)})
    return {"r": _short(r), "curves": curves}
