"""Figures, drawn from result files only: `python -m experiments figure D2` writes a PNG and an SVG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .dc_figures import grid_figure, knob_figure, level_figure, paid_figure
from .norm_figures import (
    clipped_figure,
    falling_figure,
    norm_figure,
    product_figure,
    rule_figure,
    steady_figure,
)
from .paint import COLORS, LINES, heatmap, panels
from .papers import LABELS
from .results_io import RESULTS, load
from .sweeps import KNOBS, RATES
from .tables import heatmap_cells, tuned
from .theory_figures import automatic_figure, bound_figure, lazy_figure, mixture_figure, parts_figure, rate_figure

SIGNS = {"r": "r", "gamma": "γ", "clip_norm": "C"}
FIGURES = Path(__file__).parent.parent / "docs" / "figures"


def draw(name: str, results: Path = RESULTS, out: Path = FIGURES) -> list[Path]:
    """Draw one figure; returns the files."""
    if name not in DRAWN:
        raise ValueError(f"Unknown figure {name!r}; there are {', '.join(DRAWN)}.")
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "clipwise"})
    result, paint = DRAWN[name]
    figure = paint(load(result, results))
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def percentile_figure(found: dict[str, Any]) -> Any:
    """DC-SGD, figure 2: C against the percentile, one panel per number of bins."""
    bins = sorted({curve["bins"] for curve in found["curves"]})
    figure, axes = panels(len(bins), sharey=True)
    for axis, number in zip(axes, bins, strict=True):
        curves = [c for c in found["curves"] if c["bins"] == number]
        points = [row["p"] for row in curves[0]["rows"]]
        for color, curve in zip(COLORS, curves, strict=True):
            rows = curve["rows"]
            axis.plot(points, [r["median"] for r in rows], color=color, label=f"σ_H = {curve['noise']:g}")
            axis.fill_between(
                points, [r["low"] for r in rows], [r["high"] for r in rows], color=color, alpha=0.15, lw=0
            )
        axis.plot(points, [row["truth"] for row in curves[0]["rows"]], "k--", label="true percentile")
        axis.set(title=f"b = {number} bins", xlabel="percentile p")
    axes[0].set_ylabel("clip norm C")
    axes[0].legend(frameon=False)
    figure.suptitle(f"DC-SGD-P on 256 draws of N(100, 20²): median and 5–95% of {found['trials']} trials", y=1.02)
    return figure


def error_figure(found: dict[str, Any]) -> Any:
    """DC-SGD, figure 3: expected squared error against C, exact and as noisy histograms show it."""
    bins = sorted({curve["bins"] for curve in found["curves"]})
    figure, axes = panels(len(bins), sharey=True)
    for axis, number in zip(axes, bins, strict=True):
        for color, curve in zip(COLORS, [c for c in found["curves"] if c["bins"] == number], strict=True):
            axis.plot(found["grid"], curve["median"], color=color, label=f"σ_H = {curve['noise']:g}")
            axis.fill_between(found["grid"], curve["low"], curve["high"], color=color, alpha=0.15, lw=0)
            axis.axvline(curve["chosen"]["median"], color=color, lw=0.8, ls=":")
        axis.plot(found["grid"], found["exact"], "k--", label="exact")
        axis.set(title=f"b = {number} bins", xlabel="clip norm C", ylim=(0, 1.4 * max(found["exact"][-1], 1)))
    axes[0].set_ylabel("expected squared error")
    axes[0].legend(frameon=False, loc="lower right")
    figure.suptitle("DC-SGD-E: σ_T = 1, B = 256, d = 100,000, R = 120; dotted: the C that is chosen", y=1.02)
    return figure


def convergence_figure(found: dict[str, Any]) -> Any:
    """C_t over a run on digits, one panel per threshold."""
    names = list(dict.fromkeys(curve["threshold"] for curve in found["curves"]))
    figure, axes = panels(len(names), sharey=True)
    for axis, name in zip(axes, names, strict=True):
        for curve in (c for c in found["curves"] if c["threshold"] == name):
            color = COLORS[[0.01, 1.0, 100.0].index(curve["initial"])]
            label = f"C_0 = {curve['initial']:g}" if curve["seed"] == 0 else None
            axis.plot(range(len(curve["clip_norms"])), curve["clip_norms"], color=color, lw=0.9, alpha=0.8, label=label)
        axis.set(title=name, xlabel="step", yscale="log")
    axes[0].set_ylabel("clip norm C")
    axes[0].legend(frameon=False, loc="center right")
    figure.suptitle(f"Digits at ε = {found['epsilon']:g}: the clip norm over the run, three runs each", y=1.02)
    return figure


def heatmap_figure(found: dict[str, Any]) -> Any:
    """P figure 4: accuracy over the learning rate and each rule's own knob."""
    figure, axes = panels(len(KNOBS), sharey=True)
    for axis, (method, (knob, values)) in zip(axes, KNOBS.items(), strict=True):
        cells = heatmap_cells(found["rows"], method)
        grid = [[cells.get((rate, value), float("nan")) for value in values] for rate in RATES]
        heatmap(axis, grid, low=30, high=90)
        axis.set(title=LABELS[method], xlabel=SIGNS[knob])
        axis.set_xticks(range(len(values)), [f"{v:.0e}" if v < 0.01 else f"{v:g}" for v in values], fontsize=8)
        axis.set_yticks(range(len(RATES)), [f"{v:g}" for v in RATES])
    axes[0].set_ylabel("learning rate")
    figure.suptitle("Fashion-MNIST, (3, 1e-5)-DP: test accuracy in percent, one seed; C = 0.1 for PSAC, AUTO-S", y=1.02)
    return figure


def tuned_figure(found: dict[str, Any]) -> Any:
    """The runs of P figure 4 with the learning rate tuned for each value of a knob: which knob still matters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.8))
    axis = figure.subplots()
    for color, (method, (knob, _)) in zip(COLORS, KNOBS.items(), strict=True):
        best = tuned(heatmap_cells(found["rows"], method))
        label = f"{LABELS[method]}, {SIGNS[knob]}: {max(best.values()) - min(best.values()):.1f} points"
        axis.plot(list(best), list(best.values()), "o-", ms=4, color=color, label=label)
    axis.set(xscale="log", xlabel="the rule's own knob", ylabel="test accuracy, percent")
    axis.set_title("Fashion-MNIST, (3, 1e-5)-DP: at the best of six learning rates, one seed", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def weight_figure(found: dict[str, Any]) -> Any:
    """P figure 2: the weight of an example against the norm of its gradient, and the norm that results."""
    figure, (left, right) = panels(2)
    for color, (name, weights) in zip(LINES, found["weights"].items(), strict=False):
        left.plot(found["norms"], weights, color=color, label=name)
        right.plot(found["norms"], [n * w for n, w in zip(found["norms"], weights, strict=True)], color=color)
    left.set(xscale="log", yscale="log", xlabel="norm n", ylabel="weight w(n)", ylim=(5e-3, 2e4))
    right.set(xscale="log", xlabel="norm n", ylabel="weighted norm n·w(n)")
    left.legend(frameon=False, fontsize=8)
    figure.subplots_adjust(wspace=0.3)
    return figure


def turning_figure(found: dict[str, Any]) -> Any:
    """P figure 3: the cosine of each rule's mean gradient with the true one along a private run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.8))
    axis = figure.subplots()
    steps = sorted({row["step"] for row in found["curves"]})
    names = [key for key in found["curves"][0] if key not in ("seed", "step")]
    for color, name in zip(LINES, names, strict=False):
        at = [[row[name] for row in found["curves"] if row["step"] == step] for step in steps]
        axis.plot(steps, [sum(v) / len(v) for v in at], color=color, label=name)
        axis.fill_between(steps, [min(v) for v in at], [max(v) for v in at], color=color, alpha=0.12, lw=0)
    seeds = len({row["seed"] for row in found["curves"]})
    axis.set(xlabel="step", ylabel="cosine with the true gradient")
    axis.set_title(f"MNIST, 4-layer CNN: mean and range of {seeds} runs, {found['rows']} examples each", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def example_figure(found: dict[str, Any]) -> Any:
    """P figure 1: small gradients point elsewhere than the batch's."""
    figure, axes = panels(len(found["examples"]), sharey=True)
    for axis, part in zip(axes, found["examples"], strict=True):
        axis.scatter(part["norms"], part["cosines"], s=5, color=LINES[1], alpha=0.6, lw=0)
        axis.axhline(0, color="black", lw=0.5)
        wide = max(part["norms"]) > 10 * min(part["norms"])
        axis.set(
            title=f"step {part['step']}", xlabel="norm of an example's gradient", xscale="log" if wide else "linear"
        )
    axes[0].set_ylabel("cosine with the batch's mean gradient")
    figure.suptitle("MNIST, 4-layer CNN, a private run under PSAC", y=1.02)
    return figure


def threshold_figure(found: dict[str, Any]) -> Any:
    """C over a run of DC-SGD on real data, at each ε."""
    rows = [row for row in found["rows"] if "clip_norms" in row and row["settings"].keys() == {"epsilon"}]
    rows = list({(r["method"], r["settings"]["epsilon"], r["seed"]): r for r in reversed(rows)}.values())  # one device
    rows.sort(key=lambda row: (row["settings"]["epsilon"], row["seed"]))
    methods = [m for m in LABELS if any(row["method"] == m for row in rows)]
    levels = sorted({row["settings"]["epsilon"] for row in rows})
    figure, axes = panels(len(methods), sharey=True)
    for axis, method in zip(axes, methods, strict=True):
        for row in (r for r in rows if r["method"] == method):
            level = row["settings"]["epsilon"]
            every = max(1, row["steps"] // 100)
            label = f"ε = {level:g}" if row["seed"] == 0 else None
            steps = [every * i for i in range(len(row["clip_norms"]))]
            axis.plot(steps, row["clip_norms"], color=COLORS[levels.index(level)], lw=0.9, alpha=0.8, label=label)
        axis.set(title=LABELS[method], xlabel="step", yscale="log")
    axes[0].set_ylabel("clip norm C")
    shown = {name: line for axis in axes for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    axes[0].legend(shown.values(), shown, frameon=False)
    figure.suptitle(f"{found['recipe']['data'].upper()}: the clip norm that DC-SGD chooses", y=1.02)
    return figure


DRAWN: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "D2": ("percentiles", percentile_figure),
    "D3": ("errors", error_figure),
    "thresholds": ("thresholds", convergence_figure),
    "P1": ("bias", example_figure),
    "P2": ("weights", weight_figure),
    "P3": ("bias", turning_figure),
    "P4": ("fashion_mnist", heatmap_figure),
    "P4_tuned": ("fashion_mnist", tuned_figure),
    "P5": ("lazy", lazy_figure),
    "P6": ("bias", norm_figure),
    "P_bound": ("bound", bound_figure),
    "A5": ("rates", rate_figure),
    "A6": ("automatic", automatic_figure),
    "A7": ("bound_parts", parts_figure),
    "A12": ("mixture", mixture_figure),
    "A2": ("similarity", product_figure),
    "A13": ("similarity", clipped_figure),
    "A4": ("similarity", rule_figure),
    "A14": ("sst2_last", falling_figure),
    "A15": ("sst2_last", steady_figure),
    "clipped_mnist": ("bias", clipped_figure),
    "D1": ("mnist_dc", grid_figure),
    "dc_knobs": ("mnist_dc", knob_figure),
    "dc_knobs_cifar10": ("cifar10_dc", knob_figure),
    "levels_mnist": ("mnist_dc", level_figure),
    "levels_names": ("names_dc", level_figure),
    "levels_cifar10": ("cifar10_dc", level_figure),
    "paid_mnist": ("mnist_dc", paid_figure),
    "paid_names": ("names_dc", paid_figure),
    "dc_mnist": ("mnist_dc", threshold_figure),
    "dc_names": ("names_dc", threshold_figure),
    "dc_cifar10": ("cifar10_dc", threshold_figure),
}
