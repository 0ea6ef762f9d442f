"""The truth: a float64 loop over single examples, by plain autograd, with the rules' formulas written out again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.batch import batch_size, map_tensors

WEIGHTS: dict[str, Callable[[float, float], float]] = {
    "PSAC": lambda n, c: c / (n + 0.1 / (n + 0.1)),
    "AutoS": lambda n, c: c / (n + 0.01),
    "AutoV": lambda n, c: c / n if n > 0 else 0.0,
    "Abadi": lambda n, c: min(1.0, c / n) if n > 0 else 1.0,
    "Reparam": lambda n, c: min(1 / c, 1 / n) if n > 0 else 1 / c,
    "Global": lambda n, c: min(1.0, max(0.0, 17 - 16 * (n / c))),
}


def double(data: Any) -> Any:
    return map_tensors(data, lambda x: x.double() if x.is_floating_point() else x)


def example(data: Any, i: int) -> Any:
    return map_tensors(data, lambda x: x[i : i + 1])


def gradients(model: nn.Module, loss_fn: Any, data: Any) -> list[dict[str, Tensor]]:
    """One dict of float64 gradients per example; the model is copied, never changed."""
    model = copy.deepcopy(model).double()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for i in range(batch_size(data)):
        loss = loss_fn(model, double(example(data, i)))
        assert loss.shape == (1,)
        grads = torch.autograd.grad(loss[0], list(parameters.values()), allow_unused=True)
        found.append(
            {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), grads, strict=True)}
        )
    return found


def norm(grads: dict[str, Tensor]) -> float:
    return float(torch.sqrt(sum((g.double().square().sum() for g in grads.values()), torch.tensor(0.0).double())))


def clipped(grads: list[dict[str, Tensor]], rule: str, clip_norm: float) -> tuple[dict[str, Tensor], Tensor]:
    """Weighted sum and norms."""
    norms = [norm(g) for g in grads]
    weights = [WEIGHTS[rule](n, clip_norm) for n in norms]
    total = {name: sum(w * g[name] for w, g in zip(weights, grads, strict=True)) for name in grads[0]}
    return total, torch.tensor(norms, dtype=torch.float64)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return norm({name: a[name].double() - b[name].double() for name in a})


def assert_matches(model: nn.Module, loss_fn: Any, data: Any, rule: Any, clip_norm: float = 1.0, **options: Any) -> Any:
    """clipped_sum of `model` against brute force, in the model's dtype."""
    import clipwise as cw

    tolerance = 1e-10 if next(model.parameters()).dtype == torch.float64 else 1e-5
    out = cw.clipped_sum(model, loss_fn, data, rule, clip_norm, **options)
    total, norms = clipped(gradients(model, loss_fn, data), type(rule).__name__, clip_norm)
    relative = ((out.norms - norms).abs() / norms.clamp(min=1e-6)).max()
    assert relative <= tolerance, f"norms are off by {relative:.2g}"
    steep = getattr(rule, "steepness", 1.0)  # a weight that falls steeply makes more of the norm's rounding
    error = distance(dict(out.grads), total) / (norm(total) + (clip_norm if steep > 1 else 1e-9))
    assert error <= steep * tolerance, f"the sum is off by {error:.2g}"
    for value in out.grads.values():
        assert value.dtype in (torch.float32, torch.float64)
    return out
