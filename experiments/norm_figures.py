"""Figures of gradient norms along a run: who is clipped, and where small gradients point."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from .paint import COLORS


def by_norm(norms: Sequence[float], cosines: Sequence[float], bins: int = 8) -> list[tuple[float, float]]:
    """The median norm and the mean cosine of each of `bins` equally large groups, smallest norms first.

    >>> by_norm([1.0, 2.0, 3.0, 4.0], [0.0, 0.2, 0.4, 0.8], bins=2)
    [(1.5, 0.1), (3.5, 0.6)]
    """
    ordered = sorted(zip(norms, cosines, strict=True))
    cuts = [round(k * len(ordered) / bins) for k in range(bins + 1)]
    groups = [ordered[a:b] for a, b in itertools.pairwise(cuts) if b > a]
    return [
        (statistics.median(n for n, _ in group), round(statistics.mean(c for _, c in group), 6)) for group in groups
    ]


def share_above(norms: Sequence[float], clip_norms: Sequence[float]) -> list[float]:
    """Which share of examples each C clips."""
    return [sum(n > c for n in norms) / len(norms) for c in clip_norms]


def _axis() -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.8))
    return figure, figure.subplots()


def norm_figure(found: dict[str, Any]) -> Any:
    """P figure 6: the smaller a gradient, the less it points where the batch's does."""
    figure, axis = _axis()
    for color, part in zip(COLORS, found["examples"], strict=True):
        points = by_norm(part["norms"], part["cosines"])
        axis.plot(*zip(*points, strict=True), "o-", ms=3, color=color, label=f"step {part['step']}")
    axis.set(xscale="log", xlabel="norm of an example's gradient", ylabel="mean cosine with the batch's mean gradient")
    axis.set_title("MNIST, 4-layer CNN, a private run under PSAC: eighths of 512 examples", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    return figure


def clipped_figure(found: dict[str, Any]) -> Any:
    """A figure 13, on MNIST: no C suits a whole run."""
    figure, axis = _axis()
    clip_norms = [10 ** (k / 20) for k in range(-80, 41)]
    for color, part in zip(COLORS, found["examples"], strict=True):
        axis.plot(clip_norms, share_above(part["norms"], clip_norms), color=color, label=f"step {part['step']}")
    axis.set(xscale="log", xlabel="clip norm C", ylabel="share of examples clipped by Abadi")
    axis.set_title("MNIST, 4-layer CNN, a private run under PSAC: 512 examples", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    return figure
