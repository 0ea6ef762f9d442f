"""A figures 2 and 13, on SST-2 with MiniLM: norms of examples' gradients, and their products with the mean gradient.

The run is an ordinary one: what is looked at is the data and the model, not a mechanism. All of it is NOT PRIVATE.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipes import MODELS, RECIPES, prepared


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Of the mean loss; padding that no row needs is cut off."""
    loss = F.cross_entropy(model(x[:, : int((x != 0).sum(1).max())]), y)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _product(a: list[Tensor], b: list[Tensor]) -> float:
    return float(sum((p * q).sum(dtype=torch.float64) for p, q in zip(a, b, strict=True)))


def looked_at(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, list[float]]:
    """One example at a time, twice: for the mean gradient, and for each gradient's norm and product with that mean."""
    mean = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(len(x)):
        for total, part in zip(mean, gradient(model, x[i : i + 1], y[i : i + 1]), strict=True):
            total.add_(part, alpha=1 / len(x))
    length, norms, cosines = _product(mean, mean) ** 0.5, [], []
    for i in range(len(x)):
        one = gradient(model, x[i : i + 1], y[i : i + 1])
        norm = _product(one, one) ** 0.5
        norms.append(float(f"{norm:.5g}"))
        cosines.append(float(f"{_product(one, mean) / max(norm * length, 1e-30):.5g}"))
    return {"norms": norms, "cosines": cosines, "mean": [float(f"{length:.5g}")]}


def similarity(
    rows: int = 128, moments: tuple[int, ...] = (0, 20, 60), batch: int = 32, seed: int = 0
) -> dict[str, Any]:
    """Along a short fine-tuning with AdamW at a tenth of the recipe's rate."""
    recipe = RECIPES["sst2"]
    data = prepared(recipe, "cpu")
    torch.manual_seed(0)
    model = MODELS[recipe.model](recipe, data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr / 10, weight_decay=0.0)
    order = torch.randperm(len(data.train[0]), generator=torch.Generator().manual_seed(0))
    public, rest, examples = order[:rows], order[rows:], []
    for step in range(max(moments) + 1):
        if step in moments:
            examples.append({"step": step, **looked_at(model, *(v[public] for v in data.train))})
            print(f"step {step} looked at", flush=True)
        chosen = rest[batch * step : batch * (step + 1)]
        for p, g in zip(model.parameters(), gradient(model, *(v[chosen] for v in data.train)), strict=True):
            p.grad = g
        optimizer.step()
    return {"title": f"SST-2, MiniLM, an ordinary run: {rows} examples", "rows": rows, "examples": examples}
