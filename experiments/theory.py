"""The bounds of automatic clipping (A, theorems 4 and 6) as curves: what is left of the gradient, against descent x.

x stands for what training achieves in T steps, of order 1/√T; ξ bounds the gradient noise. With γ > 0 the bound goes to
0 as x does, of order √x, that is T^(−1/4); with γ = 0 (AUTO-V) it never falls below ξ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_RATIOS = 1 + np.logspace(-6, 6, 4_001)  # r > 1
_BELOW = np.linspace(1e-3, 1 - 1e-6, 2_001)  # r < 1, for γ = 0
_COSINES = np.linspace(0, 1, 201)


def inverse(x: float, r: Array, xi: float, gamma: float) -> Array:
    """M⁻¹(x; r, ξ, γ) of theorem 4; infinite from x = 2γ/(r² − 1) on."""
    s = xi / r
    left = 2 * gamma - (r**2 - 1) * x
    root = np.sqrt(s**2 + 2 * xi * x + 2 * gamma * x + x**2)
    above = -s * gamma + (r**2 - 1) * s * x + r * gamma * x + gamma * root
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(left > 0, above / left, np.inf)


def smooth_bound(x: float, xi: float, gamma: float) -> float:
    """Theorem 4, γ > 0: the least of ξ/r + M⁻¹ over r > 1. The concave envelope that the proof takes is left out."""
    return float((xi / _RATIOS + inverse(x, _RATIOS, xi, gamma)).min())


def pair(c: Array, r: Array) -> Array:
    """f(c, r) of theorem 6: what is left of a gradient by two opposite errors, r times as long, at cosine c."""
    return (1 + r * c) / np.sqrt(r**2 + 2 * r * c + 1) + (1 - r * c) / np.sqrt(r**2 - 2 * r * c + 1)


def normalised_bound(x: float, xi: float) -> float:
    """Theorem 6, γ = 0: the least of ξ/r + x / min_c f(c, r) over r < 1."""
    return float((xi / _BELOW + x / pair(_COSINES[:, None], _BELOW[None]).min(0)).min())


def automatic(points: int = 81) -> dict[str, Any]:
    """A figures 6 to 11: the bound against x, for several γ and ξ."""
    xs = np.logspace(-6, 0, points)
    curves = []
    for xi in (0.1, 1.0):
        curves += [
            {"xi": xi, "gamma": g, "bound": [float(f"{smooth_bound(x, xi, g):.5g}") for x in xs]}
            for g in (0.001, 0.01, 0.1, 1.0)
        ]
        curves.append({"xi": xi, "gamma": 0.0, "bound": [float(f"{normalised_bound(x, xi):.5g}") for x in xs]})
    return {"x": [float(f"{x:.5g}") for x in xs], "curves": curves}


def _short(values: Array) -> list[float | None]:
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in values]


def bound_parts(xi: float = 1.0, gamma: float = 1.0) -> dict[str, Any]:
    """A figures 7 to 11: M⁻¹ against x, ξ/r + M⁻¹ against r, f(c, r) against c, and the bounds against T."""
    xs, ratios, steps = np.linspace(0, 2, 201), 1 + np.logspace(-3, 2, 151), np.logspace(2, 12, 41)
    cosines = np.linspace(0, 1, 101)
    descents = 1 / np.sqrt(steps)
    return {
        "xi": xi,
        "gamma": gamma,
        "x": _short(xs),
        "inverse": {
            f"{r:g}": _short(np.array([inverse(x, np.array([r]), xi, gamma)[0] for x in xs]))
            for r in (1.1, 1.5, 2.0, 4.0)
        },
        "r": _short(ratios),
        "sum": {f"{x:g}": _short(xi / ratios + inverse(x, ratios, xi, gamma)) for x in (1e-3, 1e-2, 1e-1)},
        "c": _short(cosines),
        "pair": {f"{r:g}": _short(pair(cosines, np.array([r]))) for r in (0.1, 0.5, 0.9, 1.1, 2.0)},
        "steps": _short(steps),
        "against_steps": {
            f"{g:g}": _short(
                np.array([smooth_bound(x, xi, g) if g else normalised_bound(x, xi) for x in descents.tolist()])
            )
            for g in (1.0, 0.01, 0.0)
        },
    }


def descent(steps: Array, share: float) -> Array:
    """The x of theorem 5, where (L₀ − L*)·L = 1: 4√(1/T + d/(μn)²). `share` is what a fixed budget μ leaves."""
    return 4 * np.sqrt(1 / steps + share)


def plain_rate(steps: Array, xi: float, batch: int) -> Array:
    """Ordinary SGD at rate 1/(L√T), where (L₀ − L*)·L = 1: T^(−1/4)·√(2 + ξ²/B) bounds the least gradient norm."""
    bound: Array = steps**-0.25 * np.sqrt(2 + xi**2 / batch)
    return bound


def rates(xi: float = 1.0, gamma: float = 0.01, batch: int = 256) -> dict[str, Any]:
    """A figure 5: bounds of AUTO-V and AUTO-S against T at several budgets, and of ordinary SGD."""
    steps = np.logspace(2, 14, 49)
    kinds = {"AUTO-V": lambda x: normalised_bound(x, xi), "AUTO-S": lambda x: smooth_bound(x, xi, gamma)}
    return {
        "xi": xi,
        "gamma": gamma,
        "batch": batch,
        "steps": _short(steps),
        "private": {
            name: {f"{s:g}": _short(np.array([bound(x) for x in descent(steps, s).tolist()])) for s in (1e-4, 1e-8, 0)}
            for name, bound in kinds.items()
        },
        "plain": _short(plain_rate(steps, xi, batch)),
    }
