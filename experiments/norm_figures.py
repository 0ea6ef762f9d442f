"""Figures of gradient norms along a run: who is clipped, and where small gradients point."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from .paint import COLORS, LINES, heatmap, panels
from .sweeps import STEADIED, STEADY_RATES


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


def _title(found: dict[str, Any]) -> str:
    return str(found.get("title", f"MNIST, 4-layer CNN, a private run under PSAC: {found['rows']} examples"))


def norm_figure(found: dict[str, Any]) -> Any:
    """P figure 6: the smaller a gradient, the less it points where the batch's does."""
    figure, axis = _axis()
    for color, part in zip(COLORS, found["examples"], strict=True):
        points = by_norm(part["norms"], part["cosines"])
        axis.plot(*zip(*points, strict=True), "o-", ms=3, color=color, label=f"step {part['step']}")
    axis.set(xscale="log", xlabel="norm of an example's gradient", ylabel="mean cosine with the batch's mean gradient")
    axis.set_title(f"{_title(found)}, in eighths", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    return figure


def clipped_figure(found: dict[str, Any]) -> Any:
    """A figure 13: which share of examples a C clips, at several moments."""
    figure, axis = _axis()
    clip_norms = [10 ** (k / 20) for k in range(-80, 41)]
    for color, part in zip(COLORS, found["examples"], strict=True):
        axis.plot(clip_norms, share_above(part["norms"], clip_norms), color=color, label=f"step {part['step']}")
    axis.set(xscale="log", xlabel="clip norm C", ylabel="share of examples clipped by Abadi")
    axis.set_title(_title(found), fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    return figure


def product_figure(found: dict[str, Any]) -> Any:
    """A figure 2: how far each example's gradient goes along the mean gradient, before and after normalisation."""
    figure, (left, right) = panels(2)
    figure.subplots_adjust(wspace=0.3)
    for color, part in zip(COLORS, found["examples"], strict=True):
        along = sorted(n * c for n, c in zip(part["norms"], part["cosines"], strict=True))
        shares = [(i + 0.5) / len(along) for i in range(len(along))]
        label = f"step {part['step']}: {sum(v < 0 for v in along) / len(along):.0%} point backwards"
        left.plot(along, shares, color=color, label=label)
        right.plot(sorted(part["cosines"]), shares, color=color)
    for axis, name in ((left, "as it is"), (right, "normalised (AUTO-V)")):
        axis.axvline(0, color="black", lw=0.5)
        axis.set(xlabel="product with the direction of the mean gradient", title=f"gradient {name}")
    left.set_ylabel("share of examples below")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(_title(found), y=1.02)
    return figure


STEADY = (0.0, *STEADIED)  # γ; AUTO-V has none


def steady_run(rows: Sequence[dict[str, Any]], rate: float, gamma: float) -> dict[str, Any] | None:
    """The run of A figures 14 and 15 at a learning rate and a γ, seed 0."""
    wanted = ("auto-s", {"lr": rate, "gamma": gamma}) if gamma else ("auto-v", {"lr": rate})
    found = [r for r in rows if (r["method"], r["settings"]) == wanted and r["seed"] == 0]
    return found[0] if found else None


def _name(gamma: float) -> str:
    return f"γ = {gamma:g}" if gamma else "AUTO-V"


def falling_figure(found: dict[str, Any]) -> Any:
    """A figure 14: the length of the mean gradient along a run, for several γ, at each learning rate."""
    figure, axes = panels(len(STEADY_RATES), sharey=True)
    every = found["recipe"]["watch"]
    for axis, rate in zip(axes, STEADY_RATES, strict=True):
        for color, gamma in zip(LINES, STEADY, strict=False):
            if (run := steady_run(found["rows"], rate, gamma)) is not None:
                steps = [every * i + 1 for i in range(len(run["gradients"]))]
                axis.plot(steps, run["gradients"], color=color, lw=1.2, label=_name(gamma))
        axis.set(title=f"learning rate {rate:g}", xlabel="step", yscale="log")
    axes[0].set_ylabel("length of the mean gradient, test records")
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle("SST-2, the last layer and head of MiniLM, ε = 3, one epoch, one seed", y=1.02)
    return figure


def steady_figure(found: dict[str, Any]) -> Any:
    """A figure 15: accuracy over the learning rate and γ."""
    from matplotlib.figure import Figure

    runs = [[steady_run(found["rows"], rate, gamma) for gamma in STEADY] for rate in STEADY_RATES]
    grid = [[float("nan") if run is None else 100 * run["accuracy"] for run in row] for row in runs]
    figure = Figure(figsize=(5.6, 3.8))
    axis = figure.subplots()
    heatmap(axis, grid, low=50, high=90)
    axis.set_xticks(range(len(STEADY)), [_name(gamma) for gamma in STEADY])
    axis.set_yticks(range(len(STEADY_RATES)), [f"{rate:g}" for rate in STEADY_RATES])
    axis.set(ylabel="learning rate")
    axis.set_title("SST-2, the last layer and head of MiniLM, ε = 3, one epoch, one seed", fontsize=10)
    return figure


def after(norms: Sequence[float]) -> dict[str, list[float]]:
    """What each rule with C = 1 makes of norms."""
    import torch

    from .analysis import CURVES

    given = torch.tensor(norms, dtype=torch.float64)
    return {name: (given * weights(given)).tolist() for name, weights in CURVES.items()}


def rule_figure(found: dict[str, Any]) -> Any:
    """A figure 4, on SST-2: norms of examples' gradients, and what each rule makes of them."""
    figure, (left, right) = panels(2)
    figure.subplots_adjust(wspace=0.28)
    edges = [10 ** (k / 6) for k in range(-8, 14)]
    for color, part in zip(COLORS, found["examples"], strict=True):
        small = sum(n < 1 for n in part["norms"]) / len(part["norms"])
        label = f"step {part['step']}: {small:.0%} below 1"
        left.hist(part["norms"], edges, histtype="step", color=color, lw=1.4, label=label)
    norms = sorted(found["examples"][-1]["norms"])
    for color, (name, values) in zip(LINES, after(norms).items(), strict=False):
        right.plot(norms, values, ".-", ms=3, lw=0.8, color=color, label=name)
    left.set(xscale="log", xlabel="norm of an example's gradient", ylabel="examples")
    right.set(xscale="log", xlabel="norm before", ylabel="norm after, C = 1", ylim=(0, 1.05))
    right.set_title(f"step {found['examples'][-1]['step']}", fontsize=10)
    left.legend(frameon=False, fontsize=8, loc="upper left")
    right.legend(frameon=False, fontsize=8)
    figure.suptitle(_title(found), y=1.02)
    return figure
