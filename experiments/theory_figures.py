"""Figures of theory and of toy problems: bounds, and where weighted gradients vanish."""

from __future__ import annotations

from typing import Any

from .paint import COLORS, LINES, panels


def _standing(found: dict[str, Any], title: str) -> Any:
    """Mean weighted gradients against θ."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.8))
    axis = figure.subplots()
    for color, (name, curve) in zip(LINES, found["curves"].items(), strict=True):
        axis.plot(found["thetas"], curve, color=color, label=name)
    axis.axhline(0, color="black", lw=0.5)
    axis.set(xlabel="θ", ylabel="mean weighted gradient", title=title)
    axis.legend(frameon=False, fontsize=8)
    return figure


def lazy_figure(found: dict[str, Any]) -> Any:
    """P figure 5, A figure 3: where the weighted gradient vanishes although the true one does not."""
    return _standing(found, "Logistic regression on N(±1, 1), weights up to scale")


def mixture_figure(found: dict[str, Any]) -> Any:
    """A figure 12: the same for a mean."""
    figure = _standing(found, f"The mean of N(±{found['apart']:g}, 1), weights up to scale")
    figure.axes[0].set_ylim(-1.5, 1.5)
    return figure


def bound_figure(found: dict[str, Any]) -> Any:
    """P theorem 2: what remains of the bound however long one trains."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.8))
    axis = figure.subplots()
    for color, curve in zip(COLORS, found["curves"], strict=True):
        axis.plot(found["r"], curve["term"], color=color, label=f"τ₀ = {curve['tau_0']:g}, τ₁ = {curve['tau_1']:g}")
    start = found["curves"][0]["term"][0] / 3
    for power, style in ((-0.5, "--"), (-1.0, ":")):
        guide = [start * (r / found["r"][0]) ** power for r in found["r"]]
        axis.plot(found["r"], guide, color="black", lw=0.8, ls=style, label=f"order r^({power:g})")
    axis.set(xscale="log", yscale="log", xlabel="r", ylabel="term that remains", title="P, theorem 2, as printed")
    axis.legend(frameon=False, fontsize=8)
    return figure


def automatic_figure(found: dict[str, Any]) -> Any:
    """A figures 6 to 11: with γ > 0 the bound falls to 0, with γ = 0 it stays above ξ."""
    levels = sorted({curve["xi"] for curve in found["curves"]})
    figure, axes = panels(len(levels), sharey=True)
    for axis, xi in zip(axes, levels, strict=True):
        for color, curve in zip(LINES, [c for c in found["curves"] if c["xi"] == xi], strict=False):
            name = f"γ = {curve['gamma']:g}" if curve["gamma"] else "γ = 0 (AUTO-V)"
            axis.plot(found["x"], curve["bound"], color=color if curve["gamma"] else "#cc0000", label=name)
        axis.axhline(xi, color="black", lw=0.6, ls=":")
        axis.set(xscale="log", yscale="log", xlabel="x, of order 1/√T", title=f"ξ = {xi:g} (dotted)")
    axes[0].set_ylabel("bound on the least gradient norm")
    axes[-1].legend(frameon=False, fontsize=8)
    figure.suptitle("A, theorems 4 and 6, without the concave envelope", y=1.02)
    return figure


def parts_figure(found: dict[str, Any]) -> Any:
    """A figures 7 to 11: what the bounds are made of, and how they fall with the number of steps."""
    figure, axes = panels(4)
    figure.subplots_adjust(wspace=0.32)
    curves = (("x", "inverse", "r = "), ("r", "sum", "x = "), ("c", "pair", "r = "), ("steps", "against_steps", "γ = "))
    for axis, (given, part, sign) in zip(axes, curves, strict=True):
        for color, (name, values) in zip(LINES, found[part].items(), strict=False):
            ys = [float("nan") if v is None else v for v in values]
            axis.plot(found[given], ys, color=color, label=sign + name)
    steps, last = found["steps"], found["against_steps"]["1"][-1]
    axes[3].plot(steps, [last * (steps[-1] / t) ** 0.25 for t in steps], "k:", lw=0.9, label="order T^(−1/4)")
    axes[3].axhline(found["xi"], color="black", lw=0.5)
    axes[0].set(ylim=(0, 20), xlabel="x", title="M⁻¹(x; r, ξ, γ)")
    axes[1].set(xscale="log", ylim=(0, 3), xlabel="r", title="ξ/r + M⁻¹: its least is the bound")
    axes[2].set(xlabel="cosine c", title="f(c, r), for γ = 0", ylim=(0, None))
    axes[3].set(xscale="log", yscale="log", xlabel="steps T, x = 1/√T", title="the bounds")
    for axis in axes:
        axis.legend(frameon=False, fontsize=8)
    axes[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, 1.02))
    figure.suptitle(f"A, theorems 4 and 6: ξ = {found['xi']:g}, γ = {found['gamma']:g} unless said", y=1.03)
    return figure


def rate_figure(found: dict[str, Any]) -> Any:
    """A figure 5: how the bounds of AUTO-V and AUTO-S fall with the steps at a fixed budget, and beside SGD."""
    figure, axes = panels(3, sharey=True)
    for axis, (name, curves) in zip(axes, found["private"].items(), strict=False):
        for color, (share, values) in zip(LINES, curves.items(), strict=False):
            label = f"d/(μn)² = {share}" if share != "0" else "no noise"
            axis.plot(found["steps"], values, color=color, label=label)
        axes[2].plot(found["steps"], curves["0"], color=COLORS[list(found["private"]).index(name)], label=name)
        axis.set_title(name if name == "AUTO-V" else f"{name}, γ = {found['gamma']:g}")
    axes[2].plot(found["steps"], found["plain"], "k--", lw=1, label=f"SGD, B = {found['batch']}")
    axes[2].set_title("no noise, beside SGD")
    for axis in axes:
        axis.axhline(found["xi"], color="black", lw=0.5, ls=":")
        axis.set(xscale="log", yscale="log", xlabel="steps T")
        axis.legend(frameon=False, fontsize=8, loc="lower left")
    axes[0].set_ylabel("bound on the least gradient norm")
    figure.suptitle(f"A, theorems 4 to 6 and SGD's own: ξ = {found['xi']:g} (dotted), (L₀ − L*)·L = 1", y=1.02)
    return figure
